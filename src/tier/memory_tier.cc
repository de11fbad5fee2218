#include "tier/memory_tier.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/thread_annotations.h"

namespace forebay {
namespace {

class MemoryTier final : public Tier {
 public:
  MemoryTier(uint64_t capacity_bytes, size_t max_in_flight, OwnedFd event_fd)
      : capacity_bytes_(capacity_bytes),
        max_in_flight_(max_in_flight),
        event_fd_(std::move(event_fd)) {}

  size_t Submit(std::span<const TierOp> ops) override {
    MutexLock lock(mutex_);
    const size_t taken = std::min(ops.size(), max_in_flight_ - done_.size());
    for (const TierOp& op : ops.first(taken)) done_.push_back(Execute(op));
    if (taken > 0) {
      const uint64_t one = 1;
      (void)!write(event_fd_.get(), &one, sizeof one);
    }
    return taken;
  }

  size_t Reap(std::span<TierDone> out) override {
    MutexLock lock(mutex_);
    const size_t taken = std::min(out.size(), done_.size());
    for (size_t i = 0; i < taken; ++i) {
      out[i] = std::move(done_.front());
      done_.pop_front();
    }
    if (done_.empty()) {
      uint64_t count;
      (void)!read(event_fd_.get(), &count, sizeof count);
    }
    return taken;
  }

  int event_fd() const override { return event_fd_.get(); }
  size_t capacity() const override { return max_in_flight_; }
  bool Has(const TierKey& key) const override {
    MutexLock lock(mutex_);
    return copies_.contains({key.name, key.check});
  }
  uint32_t StampOfCopy(const TierKey& key) const override {
    MutexLock lock(mutex_);
    const auto found = copies_.find({key.name, key.check});
    return found == copies_.end() ? 0 : found->second.stamp;
  }
  bool HasRoom(uint64_t bytes) const override {
    MutexLock lock(mutex_);
    return bytes <= capacity_bytes_ - used_;
  }
  uint64_t capacity_bytes() const override { return capacity_bytes_; }
  uint64_t used_bytes() const override {
    MutexLock lock(mutex_);
    return used_;
  }
  TierStats stats() const override {
    MutexLock lock(mutex_);
    return stats_;
  }
  Status health() const override { return Status(); }
  std::string Describe() const override { return "memory"; }

 private:
  struct Copy {
    std::vector<std::byte> bytes;
    uint32_t crc = 0;
    uint32_t stamp = 0;
  };

  TierDone Execute(const TierOp& op) REQUIRES(mutex_) {
    TierDone done{.tag = op.tag};
    auto found = copies_.find({op.key.name, op.key.check});
    if (op.kind == TierOp::Kind::kPut && found != copies_.end() && op.stamp != 0 &&
        op.stamp != found->second.stamp) {
      if (op.crc == found->second.crc) {
        found->second.stamp = op.stamp;
      } else {
        Forget(found);
        found = copies_.end();
      }
    }
    switch (op.kind) {
      case TierOp::Kind::kPut:
        done.stored = found != copies_.end() || Store(op);
        break;
      case TierOp::Kind::kDrop:
        if (found != copies_.end()) Forget(found);
        break;
      case TierOp::Kind::kGet:
        if (found != copies_.end()) {
          const Copy& copy = found->second;
          if (copy.bytes.size() == op.bytes.size()) {
            std::copy(copy.bytes.begin(), copy.bytes.end(), op.bytes.begin());
            done.crc = Crc32c(op.bytes);
            done.hit = done.crc == copy.crc;
          }
          if (!done.hit) {
            ++stats_.damaged;
            Forget(found);
          }
        }
        ++(done.hit ? stats_.hits : stats_.misses);
        break;
    }
    return done;
  }

  bool Store(const TierOp& op) REQUIRES(mutex_) {
    if (op.bytes.size() > capacity_bytes_ - used_) {
      ++stats_.full;
      return false;
    }
    copies_.emplace(std::pair(op.key.name, op.key.check),
                    Copy{{op.bytes.begin(), op.bytes.end()}, op.crc, op.stamp});
    used_ += op.bytes.size();
    ++stats_.writes;
    return true;
  }

  using Copies = std::map<std::pair<uint64_t, uint32_t>, Copy>;
  void Forget(Copies::const_iterator copy) REQUIRES(mutex_) {
    used_ -= copy->second.bytes.size();
    copies_.erase(copy);
  }

  const uint64_t capacity_bytes_;
  const size_t max_in_flight_;
  const OwnedFd event_fd_;

  mutable Mutex mutex_;
  Copies copies_ GUARDED_BY(mutex_);
  std::deque<TierDone> done_ GUARDED_BY(mutex_);
  uint64_t used_ GUARDED_BY(mutex_) = 0;
  TierStats stats_ GUARDED_BY(mutex_);
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeMemoryTier(uint64_t capacity_bytes, size_t max_in_flight) {
  if (max_in_flight == 0) {
    return Status(Code::kInvalidArgument, "max_in_flight is 0; it must be at least 1");
  }
  OwnedFd event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd.valid()) return ErrnoStatus(errno, "eventfd");
  return std::unique_ptr<Tier>(
      std::make_unique<MemoryTier>(capacity_bytes, max_in_flight, std::move(event_fd)));
}

}  // namespace forebay
