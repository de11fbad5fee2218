// The controller, which divides the shared source between nodes, and the agent through which a node
// takes part. Both get the time passed and work on any ControlStore, so tests run them in virtual
// time. Confined to one thread each; only the store's calls wait, for its deadline at most.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"
#include "control/layout.h"
#include "control/store.h"
#include "core/capacity.h"
#include "core/division.h"
#include "core/policy.h"
#include "core/share_ledger.h"

namespace forebay::control {

// A lease that is granted when needed and kept alive when a third of it is over.
class KeptLease {
 public:
  KeptLease(ControlStore& store, Nanos ttl) : store_(store), ttl_(ttl) {}
  // The lease; `is_new` when it is another than at the last call.
  Result<LeaseId> Keep(Nanos now, bool* is_new);
  // It has ended, as a call with it found out.
  void Lost() { id_ = 0; }
  LeaseId id() const { return id_; }

 private:
  ControlStore& store_;
  const Nanos ttl_;
  LeaseId id_ = 0;
  Nanos kept_ = 0;
};

struct ControllerOptions {
  std::string prefix = "/forebay/";
  std::string name;           // of this candidate, for messages
  Nanos lease = 5 * kSecond;  // how long the lead outlives a dead leader
  // The leader makes a store of our own forget what is older than this: summaries change all the
  // time.
  Nanos history = kSecond * 60;
  CapacityOptions capacity;
};

struct RoundReport {
  bool leads = false;
  std::string leader;
  size_t stages = 0;
  size_t unreadable = 0;  // summaries that are not understood; they get no limit
  size_t written = 0;     // keys
  RateLimits capacity;    // that was divided; kUnlimited: not known yet
  Status policy;          // why the stored policy is not used: the one before it stays in force
};

// A candidate for the lead. Every node may run one; the one that leads decides.
class Controller {
 public:
  Controller(ControlStore& store, ControllerOptions options)
      : store_(store),
        options_(std::move(options)),
        layout_(options_.prefix),
        lease_(store, options_.lease),
        bytes_(options_.capacity),
        operations_(options_.capacity) {}

  // Takes or keeps the lead if it can; as the leader reads all summaries with one range read,
  // divides the source, and writes what changed in one batch, which the store refuses when another
  // leads by now. Call it once or a few times a second.
  Result<RoundReport> Round(Nanos now);
  // Gives the lead up, so that another need not wait for the lease to end.
  Status Resign();

 private:
  Status TakeOver(Nanos now);
  struct ReadSoFar {
    int64_t revision = 0;  // of the summary that was counted last
    uint64_t told = 0;
    double bytes = 0;
    bool seen = false;  // in this round
  };
  // What a stage has read since the last round; a little below 0 where more was counted before.
  double TakeRead(const StoreEntry& entry, const StageSummary& stage, double passed);
  void Observe(std::span<const StageSummary> stages, std::span<const double> read, Nanos now);
  Status Decide(Nanos now, RoundReport* report);
  void Forget(int64_t revision, Nanos now);

  ControlStore& store_;
  const ControllerOptions options_;
  const ControlLayout layout_;
  KeptLease lease_;
  bool leads_ = false;
  int64_t policy_revision_ = 0;
  Policy policy_;
  Status policy_status_;
  SourceCapacity bytes_;
  SourceCapacity operations_;
  ShareLedger ledger_;
  std::map<std::string, ReadSoFar> read_;  // by key
  std::optional<Nanos> observed_;
  std::map<std::string, std::string> stored_;      // decisions as they are in the store
  std::optional<std::pair<int64_t, Nanos>> mark_;  // a revision, and when it was the last
};

struct AgentOptions {
  std::string prefix = "/forebay/";
  std::string node;
  Nanos lease = 5 * kSecond;  // how long this node's demand outlives it
  Nanos first_retry = 100 * kMilli;
  Nanos longest_retry = 2 * kSecond;
};

enum class AgentState { kStarting, kFollowing, kNoController, kNoStore };

struct AgentHealth {
  AgentState state = AgentState::kStarting;
  Nanos since = 0;   // when it came to that
  std::string text;  // one sentence for people
};

class StageAgent {
 public:
  StageAgent(ControlStore& store, AgentOptions options)
      : store_(store),
        options_(std::move(options)),
        layout_(options_.prefix),
        lease_(store, options_.lease) {}

  // Publishes what this node's jobs do (`node` in them is ignored), if it changed by more than 2 %,
  // and reads the decision about them. After a failure the store is left alone for a while, longer
  // each time: calls return the same error at once. Call it once or a few times a second.
  Status Step(std::span<const StageSummary> jobs, Nanos now);

  // The last decision, whatever became of store and controller; no limit for a job that none was
  // made about.
  RateLimits LimitsFor(std::string_view job) const;
  // The cluster's policy, once there is one.
  const std::optional<Policy>& policy() const { return policy_; }
  const AgentHealth& health() const { return health_; }

  // Takes this node out: its share goes to the others at once.
  Status Leave();

 private:
  Status Publish(std::span<const StageSummary> jobs, Nanos now);
  Status ReadDecision();
  void Become(AgentState state, Nanos now, std::string text);

  ControlStore& store_;
  const AgentOptions options_;
  const ControlLayout layout_;
  KeptLease lease_;
  std::map<std::string, StageSummary> published_;  // by job
  DecisionPage page_;
  bool decided_ = false;
  int64_t policy_revision_ = 0;
  std::optional<Policy> policy_;
  AgentHealth health_;
  Status failure_;
  Nanos retry_at_ = 0;
  Nanos retry_ = 0;
};

// Puts a policy in force for all nodes, from the controller's next round on.
Status StorePolicy(ControlStore& store, const std::string& prefix, const Policy& policy);

}  // namespace forebay::control
