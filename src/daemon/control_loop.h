// ControlLoop: makes policies hold in a daemon's engine.
//
// A thread of its own, a few rounds a second: it sums up what each job read and wanted, publishes
// it, takes part in the election of a controller, and gives the engine the limits that were
// decided. Nobody else waits for it or for the store.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "control/controller.h"
#include "control/memory_store.h"
#include "core/policy.h"
#include "stage/engine.h"

namespace forebay {

struct ControlLoopOptions {
  // Of a cluster's etcd; none: this node is on its own.
  std::vector<std::string> etcd;
  std::string prefix = "/forebay/";
  std::string node;  // empty: the host's name and the process
  // Where this node's policy is kept for the next daemon (control/kept_policy.h); empty: nowhere.
  std::string policy_file;
  // Told of changes that people should know of, in a sentence.
  std::function<void(std::string_view)> say;
};

// Safe for concurrent use by multiple threads.
class ControlLoop {
 public:
  // `engine` must outlive it.
  static Result<std::unique_ptr<ControlLoop>> Start(Engine& engine, ControlLoopOptions options);
  // Leaves the cluster, so that its share goes to the others at once.
  ~ControlLoop();

  // Puts a policy in force on this node, all of it or nothing; an empty text: none. kUnimplemented
  // where the policy is a cluster's. Neither of the two waits; the policy is kept in the file by
  // the next round.
  Status SetPolicy(const std::string& json);
  std::string policy() const;
  // State, limits and rates as JSON: docs/daemon.md.
  std::string Describe() const;

 private:
  struct Seen {  // of a job, in the round before
    uint64_t requests = 0;
    uint64_t bytes = 0;
    Nanos waited = 0;
    Nanos held = 0;
  };
  struct JobView {
    JobStats stats;
    control::StageSummary summary;
    double held_share = 0;
  };

  ControlLoop(Engine& engine, ControlLoopOptions options);
  void Run(std::stop_token stop);
  void Round(Nanos now);
  std::vector<JobView> LookAtJobs(Nanos now);
  void LoadPolicy();
  void KeepPolicy();
  void ApplyPolicy(const control::Policy* policy);
  void Tell(const control::AgentHealth& health);
  std::vector<control::KnownKnob> Knobs() const;

  // Constant after Start.
  Engine& engine_;
  const ControlLoopOptions options_;
  std::optional<control::MemoryStoreState> memory_;
  std::unique_ptr<control::ControlStore> store_;

  // The thread's own.
  std::optional<control::StageAgent> agent_;
  std::optional<control::Controller> controller_;
  std::map<std::string, Seen> seen_;
  Nanos looked_ = 0;
  std::map<std::string, int64_t> before_;  // values of knobs that the policy holds now
  std::string complaint_;
  control::AgentState told_ = control::AgentState::kStarting;

  mutable Mutex mutex_;
  // As of the last round, for Describe: the store is the thread's own.
  std::string where_ GUARDED_BY(mutex_);
  control::AgentHealth health_ GUARDED_BY(mutex_);
  control::RoundReport report_ GUARDED_BY(mutex_);
  std::vector<JobView> jobs_ GUARDED_BY(mutex_);
  std::optional<control::Policy> policy_ GUARDED_BY(mutex_);
  Status policy_status_ GUARDED_BY(mutex_);
  std::optional<std::string> to_keep_ GUARDED_BY(mutex_);  // what the file is to have
  bool kept_ GUARDED_BY(mutex_) = false;                   // it has the policy in force
  Status keep_status_ GUARDED_BY(mutex_);
  bool loaded_ GUARDED_BY(mutex_) = false;
  std::condition_variable_any has_loaded_;

  std::jthread thread_;
};

}  // namespace forebay
