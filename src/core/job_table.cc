#include "core/job_table.h"

#include <utility>

namespace forebay {

JobId JobTable::Open(std::string_view name) {
  size_t unused = jobs_.size();
  for (size_t i = 0; i < jobs_.size(); ++i) {
    JobStats& stats = jobs_[i].stats;
    if (stats.name == name) {
      ++stats.streams;
      return static_cast<JobId>(i);
    }
    if (i != kNoJob && stats.streams == 0 && stats.kept_bytes == 0) unused = std::min(unused, i);
  }
  if (unused > std::numeric_limits<JobId>::max()) {
    ++jobs_[kNoJob].stats.streams;
    return kNoJob;
  }
  if (unused == jobs_.size()) jobs_.emplace_back();
  jobs_[unused] = Job();
  jobs_[unused].stats.name = name;
  jobs_[unused].stats.streams = 1;
  return static_cast<JobId>(unused);
}

JobId JobTable::Find(std::string_view name) const {
  for (size_t i = 1; i < jobs_.size(); ++i) {
    if (jobs_[i].stats.name == name) return static_cast<JobId>(i);
  }
  return kNoJob;
}

void JobTable::SetLimits(JobId job, const JobLimits& limits, Nanos now) {
  jobs_[job].stats.limits = limits;
  jobs_[job].limiter.SetLimits(limits.source, now);
}

bool JobTable::Ready(JobId job, Nanos now) {
  Job& asks = jobs_[job];
  const Nanos when = std::max(asks.limiter.ReadyAt(now), node_.ReadyAt(now));
  if (when <= now) return true;
  asks.held = true;
  asks.held_since_taken = true;
  wake_at_ = std::min(wake_at_, when);
  return false;
}

bool JobTable::AnyLimited() const {
  return std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) {
    return job.stats.streams > 0 && job.stats.limits.source != RateLimits();
  });
}

bool JobTable::ShouldYield(JobId job) {
  constexpr double kSlack = 0.005;
  constexpr Nanos kLately = 20 * kMilli;  // it may just have had a batch
  constexpr Nanos kLongest = 100 * kMilli;
  if (!Limited(job)) return false;
  Job& asks = jobs_[job];
  const bool behind = std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& other) {
    return other.limiter.limits().bytes_per_s < kUnlimited && at_ - other.waited_at <= kLately &&
           other.served < asks.served - kSlack;
  });
  if (!behind) {
    asks.yields_since = -1;
    return false;
  }
  if (asks.yields_since < 0) asks.yields_since = at_;
  return at_ - asks.yields_since < kLongest;
}

void JobTable::Charge(JobId job, uint64_t bytes) {
  // One that did not ask for a while has saved up no more than its bucket.
  constexpr double kMostBehind = 0.05;
  Job& charged = jobs_[job];
  charged.limiter.Charge(bytes);
  charged.yields_since = -1;
  node_.Charge(bytes);
  const double rate = charged.limiter.limits().bytes_per_s;
  if (!(rate > 0)) return;
  charged.served = std::max(charged.served, served_ - kMostBehind);
  charged.served += static_cast<double>(bytes) / rate;  // nothing, without a limit
  served_ = std::max(served_, charged.served);
}

void JobTable::GiveBack(JobId job, uint64_t bytes) {
  jobs_[job].limiter.GiveBack(bytes);
  node_.GiveBack(bytes);
}

void JobTable::BeginRound(Nanos now) {
  const Nanos passed = std::max<Nanos>(0, now - std::exchange(at_, std::max(at_, now)));
  for (Job& job : jobs_) {
    if (std::exchange(job.waiting, false)) {
      job.stats.waited += passed;
      job.waited_at = at_;
    }
    if (std::exchange(job.held, false)) {
      job.stats.held += passed;
      held_total_ += passed;
    }
  }
  wake_at_ = kNeverReady;
}

std::vector<JobStats> JobTable::TakeStats() {
  std::vector<JobStats> out;
  const bool node_held = static_cast<bool>(node_.TakeHeldBack());
  for (Job& job : jobs_) {
    if (job.stats.streams == 0) continue;
    job.stats.held_back = job.limiter.TakeHeldBack();
    // Which limit of the node's it was does not matter: it wants more of the source.
    job.stats.held_back.bytes |= std::exchange(job.held_since_taken, false) && node_held;
    out.push_back(job.stats);
  }
  return out;
}

}  // namespace forebay
