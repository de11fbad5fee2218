// The storage of the simulated cluster, as one node sees it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/owned.h"
#include "sim/faults/world.h"
#include "source/source.h"

namespace forebay::sim {

// What goes wrong with it, and what was read; outlives the sources, of which each start of the node
// has a new one.
class SimSource;
struct StorageState {
  Nanos stalled_until = 0;
  Nanos failing_until = 0;
  uint64_t fails_one_in = 0;
  Nanos slow_until = 0;
  uint64_t slower = 1;
  std::vector<uint32_t>* reads = nullptr;  // by sample, of all nodes
  std::vector<SimSource*> sources;         // that live
};

class SimSource final : public Source {
 public:
  SimSource(World& world, uint32_t node, StorageState& storage);
  ~SimSource() override;
  size_t Submit(std::span<const SourceRead> reads) override;
  size_t Reap(std::span<SourceDone> out) override;
  int event_fd() const override { return event_.get(); }
  size_t capacity() const override { return 64; }
  std::string Describe() const override { return "simulated"; }
  // From now on what is under way ends at once.
  void Die();

 private:
  struct State {
    bool gone = false;
    std::vector<SourceRead> flying;
    std::deque<SourceDone> done;
  };
  void Try(const std::shared_ptr<State>& state, const SourceRead& read, Nanos began);
  void Finish(State& state, const SourceRead& read, Nanos began, Status status);

  World& world_;
  const uint32_t node_;
  StorageState& storage_;
  const OwnedFd event_;
  const std::shared_ptr<State> state_;  // shared with reads that end later
  bool dying_ = false;
};

}  // namespace forebay::sim
