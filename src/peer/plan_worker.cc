#include "peer/plan_worker.h"

#include <sys/resource.h>

#include "base/thread.h"

namespace forebay::peer {
namespace {

// Of the thread: it is to take what training leaves.
constexpr int kPlanNice = 10;

}  // namespace

PlanWorker::~PlanWorker() { stopped_.store(true, std::memory_order_relaxed); }

void PlanWorker::Want(Job job) {
  MutexLock lock(mutex_);
  std::erase_if(jobs_, [&](const Job& other) { return other.number == job.number; });
  jobs_.push_back(std::move(job));
  if (running_) return;
  auto thread = StartThread("forebay-plan", [this] { Run(); });
  if (!thread) {
    jobs_.clear();
    return;
  }
  running_ = true;
  thread_ = *std::move(thread);  // the former one has ended, but for its last instructions
}

std::vector<PlanWorker::Done> PlanWorker::Take() {
  MutexLock lock(mutex_);
  return std::exchange(finished_, {});
}

void PlanWorker::Run() {
  (void)setpriority(PRIO_PROCESS, 0, kPlanNice);  // of this thread alone
  while (true) {
    Job job;
    {
      MutexLock lock(mutex_);
      running_ = !jobs_.empty() && !Stopped();
      if (!running_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    std::shared_ptr<const HomePlan> plan = Plan(job);
    if (plan == nullptr) continue;
    {
      MutexLock lock(mutex_);
      finished_.push_back(
          {.number = job.number, .spec = std::move(job.spec), .plan = std::move(plan)});
    }
    done_();
  }
}

std::shared_ptr<const HomePlan> PlanWorker::Plan(const Job& job) const {
  // Half of the memory stays for samples; a job that is short of it goes on with the hash.
  const Result<MemoryShare> memory =
      engine_.Lend(HomePlanBytes(job.spec), engine_.arena_bytes() / 2, kSecond);
  if (!memory) return nullptr;
  const std::vector<uint32_t> lengths = Engine::TierLengths(*job.catalog);
  if (lengths.size() != job.spec.sampler.size) return nullptr;
  Result<std::shared_ptr<const HomePlan>> plan = PlanHomes(job.spec, lengths, self_, this);
  return plan ? *std::move(plan) : nullptr;
}

}  // namespace forebay::peer
