// PlanWorker: computes plans of homes by use on a thread of its own, one at a time, in memory of
// the engine's budget. Where that has no room there is no plan, and homes are by hash.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "core/home_plan.h"
#include "stage/engine.h"

namespace forebay::peer {

class PlanWorker final : private PlanInterrupt {
 public:
  struct Job {
    uint32_t number = 0;  // of the data set, as the caller counts
    std::shared_ptr<const Catalog> catalog;
    HomePlanSpec spec;
  };
  struct Done {
    uint32_t number = 0;
    HomePlanSpec spec;
    std::shared_ptr<const HomePlan> plan;
  };

  // `done` is called by the thread after each plan. The engine must outlive this.
  PlanWorker(Engine& engine, uint32_t self, std::function<void()> done)
      : engine_(engine), self_(self), done_(std::move(done)) {}
  // A plan under way is given up.
  ~PlanWorker() override;

  // Takes the place of what waits under the same number. The thread lives while there is work;
  // where none is to be had, nothing is planned.
  void Want(Job job) EXCLUDES(mutex_);
  std::vector<Done> Take() EXCLUDES(mutex_);

 private:
  bool Stopped() const override { return stopped_.load(std::memory_order_relaxed); }
  void Run();
  std::shared_ptr<const HomePlan> Plan(const Job& job) const;

  Engine& engine_;
  const uint32_t self_;
  const std::function<void()> done_;
  std::atomic<bool> stopped_{false};  // read by who plans; the mutex orders the rest
  Mutex mutex_;
  std::deque<Job> jobs_ GUARDED_BY(mutex_);
  std::vector<Done> finished_ GUARDED_BY(mutex_);
  bool running_ GUARDED_BY(mutex_) = false;
  std::jthread thread_;
};

}  // namespace forebay::peer
