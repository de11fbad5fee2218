#include "decode/pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/thread.h"
#include "decode/numa.h"

namespace forebay {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);  // longest single sleep
// Training's own threads come first; where nobody else wants the processor this costs nothing.
constexpr int kNice = 5;

void SettleThread(size_t thread, const std::vector<cpu_set_t>& nodes) {
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);
  if (nodes.size() > 1) {
    const cpu_set_t& node = nodes[thread % nodes.size()];
    (void)pthread_setaffinity_np(pthread_self(), sizeof node, &node);
  }
}

}  // namespace

void ThreadGovernor::OnTake(size_t ready, size_t ahead) {
  if (++since_floor_ > kForget) {
    floor_ = 1;
    since_floor_ = 0;
  }
  if (ready * 2 < ahead) {
    if (limit_ < maximum_) {
      floor_ = std::min(limit_ + 1, maximum_);
      since_floor_ = 0;
    }
    limit_ = maximum_;
    calm_ = 0;
  } else if (ready < ahead) {
    calm_ = 0;
  } else if (++calm_ >= kCalm) {
    calm_ = 0;
    limit_ = std::max(floor_, limit_ - 1);
  }
}

DecodePool::DecodePool(Registry& registry, size_t threads)
    : most_(std::max<size_t>(threads, 1)),
      mechanism_(registry.AddMechanism("decode", "threads that decode for all loaders")),
      active_(mechanism_.AddGauge("forebay_decode_threads", "Decode threads allowed to run")),
      knob_(mechanism_.AddKnob("decode_threads", KnobType::kCount, 0, static_cast<int64_t>(most_),
                               0, "threads that decode; 0 lets the governor choose")),
      governor_(most_) {}

DecodePool::~DecodePool() {
  std::vector<std::jthread> pool;
  {
    MutexLock lock(mutex_);
    pool.swap(pool_);
  }
  for (std::jthread& thread : pool) thread.request_stop();
  {
    MutexLock lock(mutex_);
    ++wakes_;
    ready_.notify_all();
  }
  pool.clear();
}

Status DecodePool::Add(DecodeWork& work) {
  MutexLock lock(mutex_);
  auto entry = std::make_shared<Entry>();
  entry->work = &work;
  while (pool_.size() < most_) {
    const size_t number = pool_.size();
    auto started =
        StartThread("forebay-decode", [this, number](std::stop_token stop) { Run(stop, number); });
    if (!started && pool_.empty()) return started.error();
    if (!started) break;  // fewer do the same work
    pool_.push_back(*std::move(started));
  }
  works_.push_back(std::move(entry));
  ++wakes_;
  ready_.notify_all();
  return Status();
}

void DecodePool::Remove(DecodeWork& work) {
  MutexLock lock(mutex_);
  for (size_t i = 0; i < works_.size(); ++i) {
    if (works_[i]->work != &work) continue;
    const std::shared_ptr<Entry> entry = works_[i];
    entry->leaving = true;
    works_.erase(works_.begin() + static_cast<std::ptrdiff_t>(i));
    while (entry->inside != 0) left_.wait_for(lock.native(), kSlice);
    return;
  }
}

void DecodePool::Wake() {
  MutexLock lock(mutex_);
  ++wakes_;
  ready_.notify_all();
}

void DecodePool::OnTake(size_t ready, size_t ahead) {
  MutexLock lock(mutex_);
  const size_t before = Limit();
  governor_.OnTake(ready, ahead);
  if (Limit() > before) {
    ++wakes_;
    ready_.notify_all();
  }
}

size_t DecodePool::Limit() {
  const auto fixed = static_cast<size_t>(knob_.value());
  const size_t limit = fixed != 0 ? fixed : governor_.limit();
  active_.Set(limit);
  return limit;
}

bool DecodePool::StepOne(size_t thread) {
  const size_t n = works_.size();
  const size_t first = turn_;
  for (size_t i = 0; i < n; ++i) {
    if (works_.size() != n) return true;  // the list changed while unlocked: look again
    const std::shared_ptr<Entry> entry = works_[(first + i) % n];
    ++entry->inside;
    mutex_.Unlock();
    const bool did = entry->work->Step(thread);
    mutex_.Lock();
    --entry->inside;
    if (entry->leaving && entry->inside == 0) left_.notify_all();
    if (did) {
      ++turn_;
      return true;
    }
  }
  return false;
}

void DecodePool::Run(std::stop_token stop, size_t thread) {
  SettleThread(thread, NumaNodes());
  MutexLock lock(mutex_);
  while (!stop.stop_requested()) {
    const uint64_t seen = wakes_;
    if (thread < Limit() && StepOne(thread)) continue;
    ready_.wait_for(lock.native(), kSlice, [&]() NO_THREAD_SAFETY_ANALYSIS {
      return stop.stop_requested() || wakes_ != seen;
    });
  }
}

}  // namespace forebay
