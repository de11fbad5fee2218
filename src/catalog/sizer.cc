#include "catalog/sizer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "base/owned.h"
#include "base/thread.h"
#include "base/thread_annotations.h"

namespace forebay {
namespace {

constexpr Nanos kSlice = 100 * kMilli;  // longest single sleep of any wait
// How long the destructor waits for lookups under way before it leaves them.
constexpr Nanos kLeaveAfter = 2 * kSecond;
// Found lengths are told together: whoever reaps takes a lock for them.
constexpr size_t kTellAtOnce = 16;
constexpr Nanos kTellWithin = kMilli;
// With so many lengths known beyond those in use, few threads look up more; with fewer, more of
// them do, all where there are none. On a machine with two processors 64 threads that went on held
// up the first reads for longer than those took.
constexpr size_t kEnough = 128;
constexpr size_t kThreadsAtRest = 2;
// Before there is an engine that reads: what its first batch needs, while it is made ready.
constexpr size_t kThreadsBefore = 16;
// Threads that one call starts; each of them starts more.
constexpr size_t kStartAtOnce = 4;
// Errors that may pass are tried again after these, as those of reads are.
constexpr std::array<Nanos, 3> kPauses = {10 * kMilli, 50 * kMilli, 250 * kMilli};

bool MayPass(const Status& status) {
  return status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded;
}

}  // namespace

struct Sizer::State : std::enable_shared_from_this<State> {
  enum class Look : uint8_t { kNone, kUnderWay, kKnown, kFailed };

  // The orders that one stream has told.
  struct Lane {
    uint32_t stream = 0;
    uint64_t generation = 0;
    std::deque<std::vector<SampleId>> orders;
    size_t at = 0;  // in the first of them
  };

  explicit State(Work given)
      : work(std::move(given)),
        guess(work.guess),
        fork_generation(ForkGeneration()),
        event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        looks(work.samples),
        lengths(work.samples),
        left(work.samples) {}

  bool ours() const { return fork_generation == ForkGeneration(); }

  bool Pick(SampleId* out) REQUIRES(mutex) {
    while (!urgent.empty()) {
      *out = urgent.front();
      urgent.pop_front();
      if (looks[*out] == Look::kNone || looks[*out] == Look::kFailed) return true;
    }
    while (!lanes.empty()) {
      turn = (turn + 1) % lanes.size();
      Lane& lane = lanes[turn];
      while (!lane.orders.empty()) {
        const std::vector<SampleId>& order = lane.orders.front();
        while (lane.at < order.size()) {
          *out = order[lane.at++];
          if (looks[*out] == Look::kNone) return true;
        }
        lane.orders.pop_front();
        lane.at = 0;
      }
      lanes.erase(lanes.begin() + static_cast<ptrdiff_t>(turn));
    }
    for (; rest < looks.size(); ++rest) {
      *out = static_cast<SampleId>(rest);
      if (looks[rest] == Look::kNone) return true;
    }
    return false;
  }

  size_t Limit() const REQUIRES(mutex) {
    if (stopping) return 0;
    if (all_wanted) return work.threads;
    if (!attached) return urgent.empty() ? 0 : std::min(work.threads, kThreadsBefore);
    if (!urgent.empty()) return work.threads;
    if (!begun) return 0;  // there is no order yet
    // Those that nobody has reaped yet are not in use either.
    const size_t known = ahead + found.size() + under_way;
    const size_t lacking = kEnough - std::min(known, kEnough);
    return std::max(std::min(work.threads, kThreadsAtRest), work.threads * lacking / kEnough);
  }

  // Threads for what is to be looked up. Where one does not start, a later call tries again.
  void Start() REQUIRES(mutex) {
    for (size_t i = 0; i < kStartAtOnce; ++i) {
      if (running >= std::min(Limit(), left + urgent.size())) return;
      auto started =
          StartThread<std::thread>("forebay-size", [self = shared_from_this()] { self->Run(); });
      if (!started) return;
      started->detach();
      ++running;
    }
  }

  void Run() {
    MutexLock lock(mutex);
    Start();
    SampleId sample = 0;
    while (running <= Limit() && Pick(&sample)) {
      const bool again = looks[sample] == Look::kFailed;
      looks[sample] = Look::kUnderWay;
      ++under_way;
      lock.native().unlock();
      Result<Size> size = LookUp(sample);
      lock.native().lock();
      --under_way;
      if (stopping) break;
      if (!again) --left;
      Record(sample, std::move(size));
    }
    if (left == 0 && under_way == 0 && !finishing && !stopping) {
      finishing = true;
      const Status first = error;
      lock.native().unlock();
      work.finish(first);
      complete.store(true, std::memory_order_release);
      lock.native().lock();
      // No lookup will follow: what it would need, such as open folders, is given up.
      if (error.ok()) work.look = nullptr;
    }
    --running;
    changed.notify_all();
  }

  Result<Size> LookUp(SampleId sample) {
    for (const Nanos pause : kPauses) {
      Result<Size> size = work.look(sample);
      if (size || !MayPass(size.error())) return size;
      MutexLock lock(mutex);
      changed.wait_for(lock.native(), std::chrono::nanoseconds(pause),
                       [&]() NO_THREAD_SAFETY_ANALYSIS { return stopping; });
      if (stopping) return size;
    }
    return work.look(sample);
  }

  void Record(SampleId sample, Result<Size> size) REQUIRES(mutex) {
    Found entry{.sample = sample, .length = 0, .status = Status()};
    if (size) {
      looks[sample] = Look::kKnown;
      lengths[sample] = entry.length = size->length;
      errors.erase(sample);
      work.set(sample, *size);
    } else {
      looks[sample] = Look::kFailed;
      entry.status = size.error();
      errors.insert_or_assign(sample, entry.status);
      if (error.ok()) error = entry.status;
    }
    if (!attached) return;
    found.push_back(std::move(entry));
    const Nanos now = SteadyClock().Now();
    const bool last = under_way == 0 || left == 0;
    if (found.size() < kTellAtOnce && now - told_at < kTellWithin && !last) return;
    told_at = now;
    Tell();
  }

  void Tell() const {
    const uint64_t one = 1;
    (void)!::write(event.get(), &one, sizeof one);
  }

  Work work;  // constant until every length is known
  const uint32_t guess;
  const uint64_t fork_generation;
  const OwnedFd event;
  std::atomic<bool> complete = false;  // released after `finish`, which pairs with acquire

  Mutex mutex;
  std::condition_variable changed;
  bool begun GUARDED_BY(mutex) = false;
  bool stopping GUARDED_BY(mutex) = false;
  bool attached GUARDED_BY(mutex) = false;
  bool all_wanted GUARDED_BY(mutex) = false;
  bool finishing GUARDED_BY(mutex) = false;
  std::vector<Look> looks GUARDED_BY(mutex);
  std::vector<uint32_t> lengths GUARDED_BY(mutex);
  size_t left GUARDED_BY(mutex);           // samples not looked up for the first time
  size_t under_way GUARDED_BY(mutex) = 0;  // lookups
  size_t running GUARDED_BY(mutex) = 0;    // threads
  size_t ahead GUARDED_BY(mutex) = 0;
  std::deque<SampleId> urgent GUARDED_BY(mutex);
  std::vector<Lane> lanes GUARDED_BY(mutex);
  size_t turn GUARDED_BY(mutex) = 0;
  size_t rest GUARDED_BY(mutex) = 0;
  std::vector<Found> found GUARDED_BY(mutex);
  Nanos told_at GUARDED_BY(mutex) = 0;
  Status error GUARDED_BY(mutex);  // the first
  std::map<SampleId, Status> errors GUARDED_BY(mutex);
};

Sizer::Sizer(Work work) : state_(std::make_shared<State>(std::move(work))) {}

Sizer::~Sizer() {
  if (!state_->ours()) {
    // Its lock and what waits for it are of the parent's threads: never destroyed here.
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.stopping = true;
  s.attached = false;
  s.changed.notify_all();
  s.changed.wait_for(lock.native(), std::chrono::nanoseconds(kLeaveAfter),
                     [&]() NO_THREAD_SAFETY_ANALYSIS { return s.running == 0; });
}

bool Sizer::Attach() {
  State& s = *state_;
  if (!s.ours()) return false;
  MutexLock lock(s.mutex);
  if (s.attached) return false;
  s.attached = true;
  s.found.clear();
  for (SampleId i = 0; i < s.looks.size(); ++i) {
    if (s.looks[i] == State::Look::kKnown) {
      s.found.push_back({.sample = i, .length = s.lengths[i], .status = Status()});
    }
  }
  for (const auto& [sample, error] : s.errors) {
    s.found.push_back({.sample = sample, .length = 0, .status = error});
  }
  if (!s.found.empty()) s.Tell();
  return true;
}

void Sizer::Detach() {
  State& s = *state_;
  if (!s.ours()) return;
  MutexLock lock(s.mutex);
  s.attached = false;
  s.found.clear();
  s.lanes.clear();
  s.urgent.clear();
  s.ahead = 0;
}

void Sizer::Reap(std::vector<Found>* out) {
  out->clear();
  State& s = *state_;
  uint64_t count;
  (void)!::read(s.event.get(), &count, sizeof count);
  MutexLock lock(s.mutex);
  out->swap(s.found);
  s.ahead += out->size();  // until SetAhead says how many
}

int Sizer::event_fd() const { return state_->event.get(); }

void Sizer::Follow(uint32_t stream, uint64_t generation, std::span<const SampleId> order) {
  State& s = *state_;
  if (complete()) return;
  MutexLock lock(s.mutex);
  auto lane = std::find_if(s.lanes.begin(), s.lanes.end(),
                           [&](const State::Lane& l) { return l.stream == stream; });
  if (lane == s.lanes.end()) {
    s.lanes.emplace_back();
    lane = s.lanes.end() - 1;
    lane->stream = stream;
  } else if (lane->generation != generation) {
    lane->orders.clear();
    lane->at = 0;
  }
  lane->generation = generation;
  lane->orders.emplace_back(order.begin(), order.end());
  s.begun = true;
  s.Start();
}

void Sizer::Want(std::span<const SampleId> samples) {
  if (samples.empty()) return;
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.urgent.insert(s.urgent.end(), samples.begin(), samples.end());
  if (s.attached) s.begun = true;
  s.Start();
}

void Sizer::SetAhead(size_t lengths) {
  State& s = *state_;
  MutexLock lock(s.mutex);
  s.ahead = lengths;
  s.Start();
}

bool Sizer::complete() const { return state_->complete.load(std::memory_order_acquire); }

uint32_t Sizer::guess() const { return state_->guess; }

bool Sizer::all_known() const { return complete() && first_error().ok(); }

Status Sizer::Wait(Nanos wait) {
  State& s = *state_;
  if (complete()) return Status();
  if (!s.ours()) {
    return Status(Code::kCancelled,
                  "the sizes of this catalog were being looked up when the process forked; open it "
                  "again");
  }
  const Nanos until = SteadyClock().Now() + wait;
  MutexLock lock(s.mutex);
  s.all_wanted = true;
  while (!complete()) {
    s.Start();
    const Nanos left = until - SteadyClock().Now();
    if (left <= 0) return Status(Code::kUnavailable, "sizes of files are still being looked up");
    s.changed.wait_for(lock.native(), std::chrono::nanoseconds(std::min(left, kSlice)),
                       [&] { return complete(); });
  }
  return Status();
}

Status Sizer::first_error() const {
  if (!state_->ours()) return Status();
  MutexLock lock(state_->mutex);
  return state_->error;
}

}  // namespace forebay
