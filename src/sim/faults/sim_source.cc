#include "sim/faults/sim_source.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/crc32c.h"
#include "source/null_source.h"

namespace forebay::sim {

SimSource::SimSource(World& world, uint32_t node, StorageState& storage)
    : world_(world),
      node_(node),
      storage_(storage),
      event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      state_(std::make_shared<State>()) {
  storage_.sources.push_back(this);
}

SimSource::~SimSource() {
  state_->gone = true;
  std::erase(storage_.sources, this);
}

size_t SimSource::Submit(std::span<const SourceRead> reads) {
  size_t taken = 0;
  for (const SourceRead& read : reads) {
    if (state_->flying.size() + state_->done.size() >= capacity()) break;
    ++taken;
    state_->flying.push_back(read);
    const Nanos began = world_.now();
    if (dying_) {
      Finish(*state_, read, began, Status(Code::kCancelled, "the process ends"));
      continue;
    }
    Nanos took =
        world_.Between(300 * kMicro, 4 * kMilli) + static_cast<Nanos>(read.dest.size()) * 5;
    if (storage_.slow_until > began) took *= static_cast<Nanos>(storage_.slower);
    if (world_.OneIn(300)) took += world_.Between(0, 200 * kMilli);
    world_.In(took, node_, [this, state = state_, read, began] { Try(state, read, began); });
  }
  return taken;
}

void SimSource::Try(const std::shared_ptr<State>& state, const SourceRead& read, Nanos began) {
  const bool there =
      !state->gone && std::any_of(state->flying.begin(), state->flying.end(),
                                  [&](const SourceRead& one) { return one.tag == read.tag; });
  if (!there) return;
  if (storage_.stalled_until > world_.now()) {
    world_.At(storage_.stalled_until + world_.Between(0, 2 * kMilli), node_,
              [this, state, read, began] { Try(state, read, began); });
    return;
  }
  const bool fails = storage_.failing_until > world_.now() && world_.OneIn(storage_.fails_one_in);
  Finish(*state, read, began, fails ? Status(Code::kUnavailable, "a simulated error") : Status());
}

void SimSource::Finish(State& state, const SourceRead& read, Nanos began, Status status) {
  std::erase_if(state.flying, [&](const SourceRead& one) { return one.tag == read.tag; });
  SourceDone& done = state.done.emplace_back();
  done.tag = read.tag;
  done.latency_ns = world_.now() - began;
  if (status.ok()) {
    FillNullSample(read.sample, read.dest);
    done.crc = Crc32c(read.dest);
    ++(*storage_.reads)[read.sample];
  }
  done.status = std::move(status);
  const uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof one);
}

size_t SimSource::Reap(std::span<SourceDone> out) {
  size_t taken = 0;
  while (taken < out.size() && !state_->done.empty()) {
    out[taken++] = std::move(state_->done.front());
    state_->done.pop_front();
  }
  uint64_t count = 0;
  if (state_->done.empty()) (void)!read(event_.get(), &count, sizeof count);
  return taken;
}

void SimSource::Die() {
  dying_ = true;
  for (const SourceRead& read : std::vector(state_->flying)) {
    Finish(*state_, read, world_.now(), Status(Code::kCancelled, "the process ends"));
  }
}

}  // namespace forebay::sim
