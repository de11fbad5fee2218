#include "source/null_source.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"

namespace forebay {
namespace {

class NullSource final : public Source {
 public:
  NullSource(size_t capacity, OwnedFd event_fd)
      : capacity_(capacity), event_fd_(std::move(event_fd)) {}

  size_t Submit(std::span<const SourceRead> reads) override {
    const size_t taken = std::min(reads.size(), capacity_ - waiting_.size());
    if (taken > 0 && waiting_.empty()) {
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t n = write(event_fd_.get(), &one, sizeof one);
    }
    waiting_.insert(waiting_.end(), reads.begin(), reads.begin() + static_cast<ptrdiff_t>(taken));
    return taken;
  }

  size_t Reap(std::span<SourceDone> out) override {
    const size_t taken = std::min(out.size(), waiting_.size());
    for (SourceDone& done : out.first(taken)) {
      const Nanos start = SteadyClock().Now();
      const SourceRead& read = waiting_.front();
      FillNullSample(read.sample, read.dest);
      done = {.tag = read.tag, .status = Status(), .crc = Crc32c(read.dest)};
      done.latency_ns = SteadyClock().Now() - start;
      waiting_.pop_front();
    }
    if (taken > 0 && waiting_.empty()) {
      uint64_t count;
      [[maybe_unused]] const ssize_t n = ::read(event_fd_.get(), &count, sizeof count);
    }
    return taken;
  }

  int event_fd() const override { return event_fd_.get(); }
  size_t capacity() const override { return capacity_; }
  std::string Describe() const override { return "null"; }

 private:
  const size_t capacity_;
  const OwnedFd event_fd_;
  std::deque<SourceRead> waiting_;
};

}  // namespace

void FillNullSample(SampleId sample, std::span<std::byte> dest) {
  // Words in arithmetic progression: each sample and each position differ, and filling costs no
  // more than the memory written.
  uint64_t word = SplitMix64(sample).Next();
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ULL;
  size_t at = 0;
  for (; at + sizeof word <= dest.size(); at += sizeof word, word += kStep) {
    std::memcpy(dest.data() + at, &word, sizeof word);
  }
  if (at < dest.size()) std::memcpy(dest.data() + at, &word, dest.size() - at);
}

Result<std::unique_ptr<Source>> MakeNullSource(size_t max_in_flight) {
  if (max_in_flight == 0) {
    return Status(Code::kInvalidArgument, "max_in_flight is 0; it must be at least 1");
  }
  OwnedFd event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd.valid()) return ErrnoStatus(errno, "eventfd");
  return std::unique_ptr<Source>(std::make_unique<NullSource>(max_in_flight, std::move(event_fd)));
}

}  // namespace forebay
