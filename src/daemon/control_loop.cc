#include "daemon/control_loop.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <utility>

#include "base/json.h"
#include "base/thread.h"
#include "control/etcd_store.h"
#include "control/kept_policy.h"
#include "control/layout.h"
#include "core/capacity.h"

namespace forebay {
namespace {

using control::AgentState;
using control::JsonArray;
using control::JsonValue;

constexpr Nanos kRound = 100 * kMilli;
// A round of a store that is far or busy has ten times what its calls took, so that they are a
// tenth of the time at most, but no longer than this.
constexpr Nanos kLongestRound = 250 * kMilli;
constexpr int kIdleParts = 10;
constexpr Nanos kEtcdLease = 2 * kSecond;
constexpr Nanos kEtcdDeadline = kSecond;
constexpr Nanos kLongestLoad = kSecond;  // of a home folder that does not answer
// A job whose batches lacked reads for so much of the time wants more than it gets.
constexpr double kMuchWaiting = 0.5;

std::string NodeName() {
  std::array<char, 256> host{};
  (void)gethostname(host.data(), host.size() - 1);
  return StrCat(host.data(), "-", getpid());
}

std::string_view StateName(AgentState state) {
  switch (state) {
    case AgentState::kStarting:
      return "starting";
    case AgentState::kFollowing:
      return "following";
    case AgentState::kNoController:
      return "no controller";
    case AgentState::kNoStore:
      return "no store";
  }
  return "unknown";
}

JsonValue Rate(double rate) { return control::WriteRate(rate); }

}  // namespace

ControlLoop::ControlLoop(Engine& engine, ControlLoopOptions options)
    : engine_(engine), options_(std::move(options)) {}

Result<std::unique_ptr<ControlLoop>> ControlLoop::Start(Engine& engine,
                                                        ControlLoopOptions options) {
  if (options.node.empty()) options.node = NodeName();
  std::unique_ptr<ControlLoop> loop(new ControlLoop(engine, std::move(options)));
  const ControlLoopOptions& chosen = loop->options_;
  if (chosen.etcd.empty()) {
    loop->memory_.emplace(SteadyClock());
    loop->store_ = std::make_unique<control::MemoryStore>(*loop->memory_);
  } else {
    Result<std::unique_ptr<control::EtcdStore>> store =
        control::EtcdStore::Open(chosen.etcd, kEtcdDeadline);
    if (!store) return store.error();
    const std::string warning = (*store)->Warning();
    if (!warning.empty() && chosen.say) chosen.say(StrCat("WARNING: ", warning));
    loop->store_ = *std::move(store);
  }
  control::AgentOptions agent;
  agent.prefix = chosen.prefix;
  agent.node = chosen.node;
  control::ControllerOptions controller;
  controller.prefix = chosen.prefix;
  controller.name = chosen.node;
  if (!chosen.etcd.empty()) {
    agent.lease = controller.lease = kEtcdLease;
    controller.capacity = control::CapacityOptions::OfSeveralNodes();
  }
  loop->agent_.emplace(*loop->store_, agent);
  loop->controller_.emplace(*loop->store_, controller);
  {
    MutexLock lock(loop->mutex_);
    loop->where_ = loop->store_->Describe();
  }
  ControlLoop* const self = loop.get();
  auto started = StartThread("forebay-control", [self](std::stop_token stop) { self->Run(stop); });
  if (!started) return started.error();
  loop->thread_ = *std::move(started);
  MutexLock lock(loop->mutex_);
  loop->has_loaded_.wait_for(lock.native(), std::chrono::nanoseconds(kLongestLoad),
                             [self]() NO_THREAD_SAFETY_ANALYSIS { return self->loaded_; });
  return loop;
}

ControlLoop::~ControlLoop() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  thread_.join();
  if (agent_->health().state == AgentState::kNoStore) return;  // the leases end by themselves
  (void)agent_->Leave();
  (void)controller_->Resign();
}

void ControlLoop::Run(std::stop_token stop) {
  Mutex sleep;
  std::condition_variable_any ended;
  LoadPolicy();
  while (!stop.stop_requested()) {
    const Nanos begin = SteadyClock().Now();
    Round(begin);
    KeepPolicy();
    const Nanos took = SteadyClock().Now() - begin;
    const Nanos left = std::clamp(kIdleParts * took, kRound, kLongestRound) - took;
    if (left <= 0) continue;
    MutexLock lock(sleep);
    ended.wait_for(lock.native(), stop, std::chrono::nanoseconds(left), [] { return false; });
  }
  KeepPolicy();
}

// What the daemon before this one was told.
void ControlLoop::LoadPolicy() {
  Status status;
  std::string found;
  if (memory_ && !options_.policy_file.empty()) {
    const Result<std::string> read = control::ReadKeptPolicy(options_.policy_file);
    status = read.status();
    if (read) found = *read;
  }
  std::optional<control::Policy> policy;
  if (!found.empty()) {
    Result<control::Policy> parsed = control::ParsePolicy(found, Knobs());
    if (parsed) {
      policy = *std::move(parsed);
    } else {
      status = Status(parsed.error().code(),
                      StrCat("the kept policy ", options_.policy_file,
                             " is not in force: ", parsed.error().message(),
                             "; set another one, or remove it with forebay policy remove"));
    }
  }
  if (!status.ok() && options_.say) options_.say(StrCat("WARNING: ", status.message()));
  MutexLock lock(mutex_);
  keep_status_ = std::move(status);
  loaded_ = true;
  if (policy && !to_keep_) {  // else one was set meanwhile
    control::MemoryStore store(*memory_);
    kept_ = control::StorePolicy(store, options_.prefix, *policy).ok();
  }
  has_loaded_.notify_all();
}

void ControlLoop::KeepPolicy() {
  std::optional<std::string> json;
  {
    MutexLock lock(mutex_);
    json = to_keep_;
  }
  if (!json) return;
  Status status = control::KeepPolicy(options_.policy_file, *json);
  if (!status.ok() && options_.say) options_.say(StrCat("WARNING: ", status.message()));
  MutexLock lock(mutex_);
  if (to_keep_ != json) return;  // another one was set meanwhile
  to_keep_.reset();
  kept_ = status.ok() && !json->empty();
  keep_status_ = std::move(status);
}

std::vector<ControlLoop::JobView> ControlLoop::LookAtJobs(Nanos now) {
  std::vector<JobView> out;
  std::map<std::string, Seen> seen;
  const double seconds = static_cast<double>(std::max<Nanos>(1, now - looked_)) / kSecond;
  for (JobStats& stats : engine_.TakeJobStats()) {
    if (stats.name.empty()) continue;  // streams of the daemon's own process
    const Seen current{stats.requests, stats.bytes, stats.waited, stats.held};
    const auto before = seen_.find(stats.name);
    // A job that was forgotten and came back counts from the start.
    const bool known = before != seen_.end() && before->second.bytes <= current.bytes;
    const Seen last = known ? before->second : Seen();
    JobView& view = out.emplace_back();
    const auto share = [&](Nanos a, Nanos b) {
      return std::clamp(static_cast<double>(b - a) / kSecond / seconds, 0.0, 1.0);
    };
    control::StageSummary& summary = view.summary;
    summary.job = stats.name;
    summary.delivered = {static_cast<double>(current.bytes - last.bytes) / seconds,
                         static_cast<double>(current.requests - last.requests) / seconds};
    summary.read_bytes = current.bytes;
    summary.stall_share = share(last.waited, current.waited);
    view.held_share = share(last.held, current.held);
    const bool wants = stats.held_back.bytes || summary.stall_share > kMuchWaiting;
    summary.demand = {
        control::EstimateDemand(summary.delivered.bytes_per_s, wants),
        control::EstimateDemand(summary.delivered.operations_per_s, stats.held_back.operations)};
    seen[stats.name] = current;
    view.stats = std::move(stats);
  }
  seen_ = std::move(seen);
  looked_ = now;
  return out;
}

void ControlLoop::Round(Nanos now) {
  std::vector<JobView> jobs = LookAtJobs(now);
  std::vector<control::StageSummary> summaries;
  summaries.reserve(jobs.size());
  for (const JobView& job : jobs) summaries.push_back(job.summary);
  Status status = agent_->Step(summaries, now);
  std::optional<control::RoundReport> report;
  if (status.ok()) {
    Result<control::RoundReport> round = controller_->Round(now);
    if (round) {
      report = *std::move(round);
      // What was just decided holds now, not in a round.
      if (report->leads) (void)agent_->Step(summaries, now);
    }
  }
  const control::Policy* policy = agent_->policy() ? &*agent_->policy() : nullptr;
  ApplyPolicy(policy);
  for (JobView& job : jobs) {
    JobLimits limits;
    limits.source = agent_->LimitsFor(job.stats.name);
    if (policy != nullptr) {
      const control::JobRule& rule = policy->RuleFor(job.stats.name);
      if (rule.memory) limits.memory_bytes = static_cast<uint64_t>(*rule.memory);
      if (rule.folder) limits.folder_bytes = static_cast<uint64_t>(*rule.folder);
    }
    job.stats.limits = limits;
    engine_.SetJobLimits(job.stats.name, limits);
  }
  Tell(agent_->health());
  MutexLock lock(mutex_);
  where_ = store_->Describe();
  health_ = agent_->health();
  if (report) report_ = *std::move(report);
  jobs_ = std::move(jobs);
  policy_ = agent_->policy();
}

// Knobs that a policy names stay at its values; one that it no longer names goes back.
void ControlLoop::ApplyPolicy(const control::Policy* policy) {
  std::map<std::string, int64_t> wanted;
  if (policy != nullptr) {
    wanted = policy->knobs;
    // 0 would lift the limit.
    const auto quota = [](int64_t bytes) { return std::max<int64_t>(1, bytes); };
    if (policy->memory) wanted.try_emplace("memory_tier_bytes", quota(*policy->memory));
    if (policy->folder) wanted.try_emplace("cache_folder_bytes", quota(*policy->folder));
    if (!policy->tuner) wanted.try_emplace("tuner_on", 0);
  }
  std::vector<KnobSetting> settings;
  std::string unknown;
  std::map<std::string, const Knob*> knobs;
  for (const Knob* knob : engine_.registry().Knobs()) knobs[knob->name()] = knob;
  for (auto& [name, value] : wanted) {
    const auto knob = knobs.find(name);
    if (knob == knobs.end()) {
      unknown += StrCat(unknown.empty() ? "" : ", ", name);
      continue;
    }
    // A node with less memory than the policy names has a range of its own.
    value = std::clamp(value, knob->second->minimum(), knob->second->maximum());
    before_.try_emplace(name, knob->second->value());
    if (knob->second->value() != value) settings.push_back({name, value});
  }
  for (auto held = before_.begin(); held != before_.end();) {
    if (wanted.count(held->first) != 0) {
      ++held;
      continue;
    }
    settings.push_back({held->first, held->second});
    held = before_.erase(held);
  }
  Status applied = settings.empty() ? Status() : engine_.registry().Apply(settings);
  if (applied.ok() && !unknown.empty()) {
    applied = Status(Code::kInvalidArgument,
                     StrCat("the policy names knobs that this daemon does not have: ", unknown));
  }
  if (!applied.ok() && applied.message() != complaint_ && options_.say) {
    options_.say(applied.message());
  }
  complaint_ = applied.message();
  MutexLock lock(mutex_);
  policy_status_ = std::move(applied);
}

void ControlLoop::Tell(const control::AgentHealth& health) {
  if (health.state == told_) return;
  // With a store in this process there is nothing to lose; and at first all is well.
  const bool first = told_ == AgentState::kStarting && health.state == AgentState::kFollowing;
  told_ = health.state;
  if (!first && options_.say && !options_.etcd.empty()) {
    options_.say(StrCat("control: ", health.text));
  }
}

std::vector<control::KnownKnob> ControlLoop::Knobs() const {
  std::vector<control::KnownKnob> known;
  for (const Knob* knob : engine_.registry().Knobs()) {
    known.push_back({knob->name(), knob->minimum(), knob->maximum()});
  }
  return known;
}

Status ControlLoop::SetPolicy(const std::string& json) {
  if (!memory_) {
    std::string list;
    for (const std::string& each : options_.etcd) list += (list.empty() ? "" : ",") + each;
    return Status(
        Code::kUnimplemented,
        StrCat("this node takes its policy from etcd; use forebay policy set FILE --etcd ", list));
  }
  control::MemoryStore store(*memory_);
  std::string kept;
  if (json.empty()) {
    FOREBAY_RETURN_IF_ERROR(store.Delete(control::ControlLayout(options_.prefix).Policy()));
  } else {
    const Result<control::Policy> policy = control::ParsePolicy(json, Knobs());
    if (!policy) return policy.error();
    FOREBAY_RETURN_IF_ERROR(control::StorePolicy(store, options_.prefix, *policy));
    kept = control::WritePolicy(*policy);
  }
  if (options_.policy_file.empty()) return Status();
  MutexLock lock(mutex_);
  to_keep_ = std::move(kept);
  kept_ = false;
  keep_status_ = Status();
  return Status();
}

std::string ControlLoop::policy() const {
  if (memory_) {  // also between SetPolicy and the next round
    control::MemoryStore store(*memory_);
    const std::string key = control::ControlLayout(options_.prefix).Policy();
    const Result<control::StoreSnapshot> found = store.Range(key);
    if (!found || found->entries.empty()) return "";
    return found->entries[0].value;
  }
  MutexLock lock(mutex_);
  return policy_ ? control::WritePolicy(*policy_) : "";
}

std::string ControlLoop::Describe() const {
  JsonValue out;
  MutexLock lock(mutex_);
  out.Set("store", where_);
  out.Set("node", options_.node);
  out.Set("state", StateName(health_.state));
  out.Set("sentence", health_.text);
  out.Set("leader", report_.leader);
  out.Set("leads", report_.leads);
  // What is divided; null: not known yet.
  out.Set("capacity_bytes_per_s", Rate(report_.leads ? report_.capacity.bytes_per_s : kUnlimited));
  out.Set("capacity_operations_per_s",
          Rate(report_.leads ? report_.capacity.operations_per_s : kUnlimited));
  const Status& found = report_.policy.ok() ? policy_status_ : report_.policy;
  const Status& policy = found.ok() ? keep_status_ : found;
  out.Set("policy_status", policy.ok() ? "" : policy.ToString());
  // Empty: the policy goes with the daemon, or lies in etcd.
  out.Set("policy_kept", kept_ ? options_.policy_file : "");
  out.Set("policy_pending", to_keep_.has_value());
  out.Set("policy_keep_error", keep_status_.ok() ? "" : keep_status_.ToString());
  JsonArray jobs;
  for (const JobView& view : jobs_) {
    JsonValue& job = jobs.emplace_back();
    const RateLimits& limits = view.stats.limits.source;
    job.Set("job", view.stats.name);
    job.Set("streams", view.stats.streams);
    job.Set("limit_bytes_per_s", Rate(limits.bytes_per_s));
    job.Set("limit_operations_per_s", Rate(limits.operations_per_s));
    job.Set("delivered_bytes_per_s", view.summary.delivered.bytes_per_s);
    job.Set("delivered_operations_per_s", view.summary.delivered.operations_per_s);
    job.Set("demand_bytes_per_s", Rate(view.summary.demand.bytes_per_s));
    job.Set("waiting_share", view.summary.stall_share);
    job.Set("held_share", view.held_share);
    job.Set("read_bytes", view.stats.bytes);
    job.Set("read_requests", view.stats.requests);
    job.Set("kept_bytes", view.stats.kept_bytes);
    job.Set("folder_bytes", view.stats.folder_bytes);
  }
  out.Set("jobs", std::move(jobs));
  return out.Write();
}

}  // namespace forebay
