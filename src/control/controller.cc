#include "control/controller.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

namespace forebay::control {
namespace {

// Four digits, rounded down: noise in the summaries changes no decision, and limits do not add up
// to more than there is.
double Rounded(double rate) {
  if (!(rate > 0) || std::isinf(rate)) return rate;
  const double unit = std::pow(10.0, std::floor(std::log10(rate)) - 3);
  return unit > 0 ? std::floor(rate / unit) * unit : rate;
}

// Whether a number moved by more than 2 %.
bool Moved(double from, double to) {
  return std::isinf(from) != std::isinf(to) ||
         (!std::isinf(from) && std::abs(to - from) > 0.02 * std::max(std::abs(from), std::abs(to)));
}

bool Moved(const StageSummary& from, const StageSummary& to) {
  return Moved(from.demand.bytes_per_s, to.demand.bytes_per_s) ||
         Moved(from.demand.operations_per_s, to.demand.operations_per_s) ||
         Moved(from.delivered.bytes_per_s, to.delivered.bytes_per_s) ||
         Moved(from.delivered.operations_per_s, to.delivered.operations_per_s) ||
         Moved(from.capacity, to.capacity) || std::abs(from.stall_share - to.stall_share) > 0.02;
}

double Whole(double rate) { return rate >= 10'000 ? std::floor(rate) : rate; }

}  // namespace

Result<LeaseId> KeptLease::Keep(Nanos now, bool* is_new) {
  *is_new = false;
  if (id_ != 0 && now - kept_ >= ttl_ / 3) {
    const Status kept = store_.KeepAlive(id_);
    if (kept.ok()) {
      kept_ = now;
    } else if (kept.code() == Code::kNotFound) {
      id_ = 0;
    } else {
      return kept;
    }
  }
  if (id_ == 0) {
    const Result<LeaseId> granted = store_.GrantLease(ttl_);
    if (!granted) return granted.error();
    id_ = *granted;
    kept_ = now;
    *is_new = true;
  }
  return id_;
}

Result<RoundReport> Controller::Round(Nanos now) {
  bool is_new = false;
  const Result<LeaseId> lease = lease_.Keep(now, &is_new);
  if (!lease) return lease.error();
  if (is_new) leads_ = false;
  RoundReport report;
  if (!leads_) {
    const Result<Leadership> leader = store_.Campaign(layout_.Election(), options_.name, *lease);
    if (!leader) {
      if (leader.error().code() == Code::kNotFound) lease_.Lost();
      return leader.error();
    }
    report.leader = leader->name;
    if (leader->lease != *lease) return report;
    FOREBAY_RETURN_IF_ERROR(TakeOver(now));
    leads_ = true;
  }
  report.leader = options_.name;
  const Status status = Decide(now, &report);
  if (status.code() == Code::kCancelled) {
    // The lease ended unseen, and with it the lead.
    leads_ = false;
    report.leader.clear();
    return report;
  }
  if (!status.ok()) return status;
  report.leads = true;
  return report;
}

Status Controller::TakeOver(Nanos now) {
  const Result<StoreSnapshot> snapshot = store_.Range(layout_.Decisions());
  if (!snapshot) return snapshot.error();
  stored_.clear();
  for (const StoreEntry& entry : snapshot->entries) stored_[entry.key] = entry.value;
  observed_.reset();
  read_.clear();
  ledger_ = ShareLedger();
  bytes_ = SourceCapacity(options_.capacity);
  operations_ = SourceCapacity(options_.capacity);
  const auto state = stored_.find(layout_.State());
  if (state == stored_.end()) return Status();
  const Result<JsonValue> value = JsonValue::Parse(state->second);
  if (!value) return Status();  // no more than a start: it is found out anew
  const auto assume = [&](const char* name, SourceCapacity* capacity) {
    const JsonValue* member = value->Find(name);
    if (member != nullptr && member->number()) capacity->Assume(*member->number(), now);
  };
  assume("bytes", &bytes_);
  assume("operations", &operations_);
  return Status();
}

double Controller::TakeRead(const StoreEntry& entry, const StageSummary& stage, double passed) {
  const double guess = stage.delivered.bytes_per_s * passed;
  if (!stage.read_bytes) return guess;
  const auto told = static_cast<double>(*stage.read_bytes);
  const auto [at, is_new] = read_.try_emplace(entry.key);
  ReadSoFar& so_far = at->second;
  so_far.seen = true;
  const bool told_again = so_far.revision != entry.revision;
  so_far.revision = entry.revision;
  // A job that was forgotten and came back counts from the start.
  const bool goes_on =
      !is_new && *stage.read_bytes >= std::exchange(so_far.told, *stage.read_bytes);
  if (!goes_on) {
    so_far.told = *stage.read_bytes;
    so_far.bytes = told;
    return guess;
  }
  if (!told_again) {  // it goes on as it did: until it tells, that is what it read
    so_far.bytes += guess;
    return guess;
  }
  return told - std::exchange(so_far.bytes, told);
}

void Controller::Observe(std::span<const StageSummary> stages, std::span<const double> read,
                         Nanos now) {
  if (!observed_ && !bytes_.Estimate()) {
    // The first to lead: what the nodes found on their own is a start.
    std::map<std::string_view, double> nodes;
    for (const StageSummary& stage : stages) {
      double& most = nodes[stage.node];
      most = std::max(most, stage.capacity);
    }
    double sum = 0;
    bool all = !nodes.empty();
    for (const auto& [node, capacity] : nodes) {
      sum += capacity;
      all = all && capacity > 0;
    }
    if (all) bytes_.Assume(sum, now);
  }
  RateLimits delivered{0, 0};
  struct OfJob {
    RateLimits delivered{0, 0};
    double read = 0;
    double demand = 0;
  };
  std::map<std::string_view, OfJob> jobs;
  for (size_t i = 0; i < stages.size(); ++i) {
    const StageSummary& stage = stages[i];
    OfJob& job = jobs[stage.job];
    job.delivered.bytes_per_s += stage.delivered.bytes_per_s;
    job.delivered.operations_per_s += stage.delivered.operations_per_s;
    job.read += read[i];
    job.demand += stage.demand.bytes_per_s;
    delivered.bytes_per_s += stage.delivered.bytes_per_s;
    delivered.operations_per_s += stage.delivered.operations_per_s;
  }
  // A job that is held by the policy's own maximum says nothing about the source.
  bool unmet_bytes = false;
  bool unmet_operations = false;
  for (const StageSummary& stage : stages) {
    constexpr double kNear = 0.9;
    const JobRule& rule = policy_.RuleFor(stage.job);
    const RateLimits& job = jobs[stage.job].delivered;
    unmet_bytes |=
        std::isinf(stage.demand.bytes_per_s) && job.bytes_per_s < kNear * rule.max_bandwidth;
    unmet_operations |= std::isinf(stage.demand.operations_per_s) &&
                        job.operations_per_s < kNear * rule.max_operations;
  }
  const double passed =
      observed_ ? static_cast<double>(std::max<Nanos>(0, now - *observed_)) / kSecond : 0;
  if (observed_) {
    std::vector<ShareLedger::Entry> entries;
    entries.reserve(jobs.size());
    for (const auto& [name, job] : jobs) {
      entries.push_back({name, job.read, ClaimOfBytes(policy_.RuleFor(name), job.demand)});
    }
    ledger_.Observe(entries, now - *observed_);
  }
  observed_ = now;
  // By rates: when a node tells does not matter then, as it does for what it has read so far.
  bytes_.Observe(delivered.bytes_per_s * passed, unmet_bytes, now);
  operations_.Observe(delivered.operations_per_s * passed, unmet_operations, now);
}

Status Controller::Decide(Nanos now, RoundReport* report) {
  const Result<StoreSnapshot> snapshot = store_.Range(layout_.Live());
  if (!snapshot) return snapshot.error();
  std::vector<StageSummary> stages;
  std::vector<double> read;
  stages.reserve(snapshot->entries.size());
  read.reserve(snapshot->entries.size());
  const double passed =
      observed_ ? static_cast<double>(std::max<Nanos>(0, now - *observed_)) / kSecond : 0;
  const std::string policy_key = layout_.Policy();
  bool has_policy = false;
  for (const StoreEntry& entry : snapshot->entries) {
    if (entry.key == policy_key) {
      has_policy = true;
      if (entry.revision == policy_revision_) continue;
      policy_revision_ = entry.revision;
      Result<Policy> policy = ParsePolicy(entry.value, {});
      policy_status_ = policy.status();
      if (policy) policy_ = *std::move(policy);
      continue;
    }
    auto names = layout_.StageOf(entry.key);
    if (!names) {
      ++report->unreadable;
      continue;
    }
    Result<StageSummary> stage =
        ParseSummary(std::move(names->first), std::move(names->second), entry.value);
    if (stage) {
      read.push_back(TakeRead(entry, *stage, passed));
      stages.push_back(*std::move(stage));
    } else {
      ++report->unreadable;
    }
  }
  if (!has_policy && policy_revision_ != 0) {  // it was taken away
    policy_ = Policy();
    policy_status_ = Status();
    policy_revision_ = 0;
  }
  for (auto each = read_.begin(); each != read_.end();) {
    each = std::exchange(each->second.seen, false) ? std::next(each) : read_.erase(each);
  }
  Observe(stages, read, now);
  report->stages = stages.size();
  report->policy = policy_status_;
  report->capacity = {bytes_.Allowance(), operations_.Allowance()};
  // A job that is alone needs no limit, but for the policy's maxima: what there is, is its own.
  const bool alone = std::all_of(stages.begin(), stages.end(), [&](const StageSummary& stage) {
    return stage.job == stages.front().job;
  });
  const auto found = [](const SourceCapacity& of) { return of.Estimate().value_or(kUnlimited); };
  const auto more = [](const SourceCapacity& of) {
    return of.Estimate() ? of.Allowance() - *of.Estimate() : 0;
  };
  const std::vector<RateLimits> limits =
      alone ? DivideSource(policy_, stages, RateLimits())
            : DivideSource(policy_, stages, {found(bytes_), found(operations_)},
                           {more(bytes_), more(operations_)}, &ledger_);

  std::vector<DecisionPage> pages(ControlLayout::kPages);
  for (size_t i = 0; i < stages.size(); ++i) {
    DecisionPage& page = pages[ControlLayout::PageOf(stages[i].node)];
    page.limits[stages[i].node][stages[i].job] = {Whole(Rounded(limits[i].bytes_per_s)),
                                                  Whole(Rounded(limits[i].operations_per_s))};
  }
  std::vector<StoreWrite> writes;
  const auto write = [&](std::string key, std::string value) {
    const auto at = stored_.find(key);
    if (at == stored_.end() || at->second != value) writes.push_back({std::move(key), value, 0});
  };
  for (uint32_t i = 0; i < ControlLayout::kPages; ++i) {
    pages[i].policy = policy_revision_;
    std::string key = layout_.Page(i);
    if (pages[i].limits.empty() && stored_.count(key) == 0) continue;
    write(std::move(key), WritePage(pages[i]));
  }
  JsonValue state;
  state.Set("leader", options_.name);
  state.Set("bytes", Rounded(bytes_.Estimate().value_or(0)));
  state.Set("operations", Rounded(operations_.Estimate().value_or(0)));
  write(layout_.State(), state.Write());
  if (writes.empty()) {
    Forget(snapshot->revision, now);
    return Status();
  }
  const Fence fence{layout_.Election(), lease_.id()};
  const Status status = store_.PutMany(writes, &fence);
  if (!status.ok()) {
    // Some of it may be written: the next round writes all that it cannot be sure of.
    for (const StoreWrite& each : writes) stored_[each.key].clear();
    return status;
  }
  report->written = writes.size();
  for (StoreWrite& each : writes) stored_[each.key] = std::move(each.value);
  Forget(snapshot->revision, now);
  return Status();
}

void Controller::Forget(int64_t revision, Nanos now) {
  if (store_.shared()) return;
  if (!mark_) {
    mark_ = {revision, now};
  } else if (now - mark_->second >= options_.history) {
    // Nothing depends on it: a failure is made good in the next turn.
    static_cast<void>(store_.Compact(mark_->first));
    mark_ = {revision, now};
  }
}

Status Controller::Resign() {
  leads_ = false;
  const LeaseId lease = lease_.id();
  lease_.Lost();
  return lease == 0 ? Status() : store_.Revoke(lease);
}

void StageAgent::Become(AgentState state, Nanos now, std::string text) {
  if (health_.state != state) health_.since = now;
  health_.state = state;
  health_.text = std::move(text);
}

Status StageAgent::Step(std::span<const StageSummary> jobs, Nanos now) {
  if (!failure_.ok() && now < retry_at_) return failure_;
  Status status = Publish(jobs, now);
  if (status.ok()) status = ReadDecision();
  std::optional<Leadership> leader;
  if (status.ok()) {
    Result<std::optional<Leadership>> found = store_.Leader(layout_.Election());
    status = found.status();
    if (found) leader = *std::move(found);
  }
  failure_ = status;
  const char* keeps = decided_ ? "the limits of the last decision hold" : "no limits are known";
  if (!status.ok()) {
    retry_ = retry_ == 0 ? options_.first_retry : std::min(retry_ * 2, options_.longest_retry);
    retry_at_ = now + retry_;
    Become(AgentState::kNoStore, now,
           StrCat("the control store does not answer; ", keeps, ": ", status.message()));
    return status;
  }
  retry_ = 0;
  if (!leader) {
    Become(AgentState::kNoController, now, StrCat("no controller is elected; ", keeps));
  } else {
    Become(AgentState::kFollowing, now,
           decided_ ? StrCat("limits follow controller ", leader->name)
                    : StrCat("waits for the first decision of controller ", leader->name));
  }
  return Status();
}

Status StageAgent::Publish(std::span<const StageSummary> jobs, Nanos now) {
  bool is_new = false;
  const Result<LeaseId> lease = lease_.Keep(now, &is_new);
  if (!lease) return lease.error();
  if (is_new) published_.clear();  // what was published went with the old lease
  std::vector<StoreWrite> writes;
  std::map<std::string, StageSummary> current;
  for (const StageSummary& job : jobs) {
    if (!current.emplace(job.job, job).second) continue;
    const auto before = published_.find(job.job);
    if (before != published_.end() && !Moved(before->second, job)) {
      current[job.job] = before->second;
      continue;
    }
    writes.push_back({layout_.Stage(options_.node, job.job), WriteSummary(job), *lease});
  }
  const Status put = store_.PutMany(writes);
  if (!put.ok()) {
    // Perhaps some of it was written: the next call writes all of it.
    for (const StageSummary& job : jobs) published_.erase(job.job);
    if (put.code() == Code::kNotFound) lease_.Lost();
    return put;
  }
  for (const auto& [job, summary] : published_) {
    if (current.count(job) == 0) {
      FOREBAY_RETURN_IF_ERROR(store_.Delete(layout_.Stage(options_.node, job)));
    }
  }
  published_ = std::move(current);
  return Status();
}

Status StageAgent::ReadDecision() {
  const std::string key = layout_.Page(ControlLayout::PageOf(options_.node));
  const Result<StoreSnapshot> snapshot = store_.Range(key);
  if (!snapshot) return snapshot.error();
  if (snapshot->entries.empty() || snapshot->entries[0].key != key) return Status();
  Result<DecisionPage> page = ParsePage(snapshot->entries[0].value);
  if (!page) return page.error();
  const auto mine = page->limits.find(options_.node);
  if (mine == page->limits.end()) return Status();  // none about this node yet
  page_.limits = {{mine->first, mine->second}};
  decided_ = true;
  if (page->policy == policy_revision_) return Status();
  if (page->policy == 0) {
    policy_.reset();
  } else {
    const Result<StoreSnapshot> stored = store_.Range(layout_.Policy());
    if (!stored) return stored.error();
    if (!stored->entries.empty()) {
      Result<Policy> policy = ParsePolicy(stored->entries[0].value, {});
      if (policy) policy_ = *std::move(policy);  // the controller tells what is wrong with it
    }
  }
  policy_revision_ = page->policy;
  return Status();
}

RateLimits StageAgent::LimitsFor(std::string_view job) const {
  const auto node = page_.limits.find(options_.node);
  if (node == page_.limits.end()) return {};
  const auto limits = node->second.find(std::string(job));
  return limits == node->second.end() ? RateLimits() : limits->second;
}

Status StageAgent::Leave() {
  published_.clear();
  const LeaseId lease = lease_.id();
  lease_.Lost();
  return lease == 0 ? Status() : store_.Revoke(lease);
}

Status StorePolicy(ControlStore& store, const std::string& prefix, const Policy& policy) {
  FOREBAY_RETURN_IF_ERROR(Validate(policy, {}));
  return store.Put(ControlLayout(prefix).Policy(), WritePolicy(policy));
}

}  // namespace forebay::control
