// PeerSource: what lives with another node comes from there, the rest from the inner source.
//
// Whatever happens to a peer, a read ends as the inner source would end it: a refusal, a timeout, a
// lost connection or wrong bytes cost a second read, never an error.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/slots.h"
#include "base/status.h"
#include "core/cost_model.h"
#include "core/route.h"
#include "peer/exchange.h"
#include "source/source.h"
#include "source/wake_fd.h"

namespace forebay::peer {

// Confined to the engine's loop thread, as every Source; what is asked of a sample, by any.
class PeerSource final : public Source {
 public:
  static Result<std::unique_ptr<PeerSource>> Make(std::shared_ptr<Exchange> exchange,
                                                  std::shared_ptr<PeerDataset> dataset,
                                                  std::unique_ptr<Source> inner);
  // Waits for peers' bytes under way, whose time is bounded.
  ~PeerSource() override;

  size_t Submit(std::span<const SourceRead> reads) override;
  size_t Reap(std::span<SourceDone> out) override;
  int event_fd() const override { return wake_.get(); }
  size_t capacity() const override { return slots_.capacity(); }
  std::string Describe() const override;
  int32_t Elsewhere(SampleId sample) const override;
  bool AwaitsNodes(SampleId sample) const override;
  void Retire() override { dataset_->Leave(); }

 private:
  enum class At : uint8_t { kFree, kWaiting, kPeer, kInner };
  struct Slot {
    SourceRead read;
    Nanos start = 0;
    uint32_t node = kNoNode;
    uint32_t depth = 0;  // asks of that peer, or reads of the source, as it began
    At at = At::kFree;
    bool moved = false;  // was asked of a node that is not its home any more
  };

  PeerSource(std::shared_ptr<Exchange> exchange, std::shared_ptr<PeerDataset> dataset,
             std::unique_ptr<Source> inner, WakeFd wake);
  bool MayWait(Nanos now) const;
  // Sends the slots in `placed_` where `choices_` says; `groups`: they are a Submit's.
  void Dispatch(bool groups, Nanos now);
  void ToInner(uint32_t index, uint32_t group, Nanos now);
  void Flush(Nanos now);
  void TryWaiting(Nanos now);
  // Chooses anew for `slots`, which it empties.
  void ChooseAgain(std::vector<uint32_t>& slots, Nanos now);
  size_t ReapAnswers(std::span<SourceDone> out, Nanos now);
  size_t ReapInner(std::span<SourceDone> out, Nanos now);
  PeerCost& Cost(uint32_t node);

  // Shared with the peer thread, which may end before this source, or after it.
  const std::shared_ptr<Exchange> exchange_;
  const std::shared_ptr<PeerDataset> dataset_;
  const pid_t creator_;
  Slots<Slot> slots_;
  std::vector<uint32_t> waiting_;  // for a plan, or for a home
  std::vector<uint32_t> moved_;    // to be asked elsewhere
  std::vector<uint32_t> placed_;
  std::vector<SampleId> samples_;
  std::vector<Choice> choices_;
  std::vector<Ask> asks_;
  std::vector<SourceRead> to_inner_;
  std::vector<Answer> answers_;
  size_t answers_at_ = 0;
  uint64_t version_ = 0;
  uint64_t plan_ = 0;  // PeerDataset::plan_digest, not younger than choices_
  uint32_t last_group_ = 0;
  size_t asked_ = 0;        // slots at peers
  size_t inner_depth_ = 0;  // slots at the inner source
  OriginModel source_model_;
  std::vector<std::unique_ptr<PeerCost>> costs_;  // by node; null: never asked
  WakeFd wake_;
  std::unique_ptr<Source> inner_;
};

}  // namespace forebay::peer
