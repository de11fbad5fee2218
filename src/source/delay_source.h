// DelaySource: another source's bytes, no sooner than a StorageModel would answer. Stands in for
// slow shared storage where no emulated mount is possible.
#pragma once

#include <cstdint>
#include <memory>
#include <queue>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/slots.h"
#include "base/status.h"
#include "core/storage_model.h"
#include "source/source.h"
#include "source/wake_fd.h"

namespace forebay {

struct DelayOptions {
  StorageSettings storage;
  bool open_each = true;  // every read pays for an open first, as whole-file reads do
  Status Validate() const;
};

// Confined to one thread, as every Source. An error of the model becomes kUnavailable; nothing is
// retried. A group is one operation of the model. Reads that a stall without end swallows wait for
// the next Apply; destruction drops them.
class DelaySource final : public Source {
 public:
  static Result<std::unique_ptr<DelaySource>> Make(std::unique_ptr<Source> inner,
                                                   const DelayOptions& options);

  size_t Submit(std::span<const SourceRead> reads) override;
  size_t Reap(std::span<SourceDone> out) override;
  int event_fd() const override { return wake_.get(); }
  size_t capacity() const override { return slots_.capacity(); }
  std::string Describe() const override;

  // Changes the storage for operations that begin from now on.
  Status Apply(const StorageSettings& storage);

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  enum class Step : uint8_t { kOpen, kRead, kOver };
  struct Slot {
    SourceRead read;
    Nanos start = 0;
    Nanos end = 0;
    Step step = Step::kOpen;
    int error = 0;  // of the model
    bool inner_done = false;
    uint32_t next = kNone;  // of the same group
    // Of the first one of a group, which the model is asked about: the group's.
    uint32_t group_size = 0;
    uint64_t bytes = 0;
    SourceDone done;
  };
  struct Due {
    Nanos at = 0;
    uint32_t index = 0;
    bool operator>(const Due& other) const { return at > other.at; }
  };

  DelaySource(std::unique_ptr<Source> inner, const DelayOptions& options, WakeFd wake);
  void Admit(uint32_t index, Nanos now);
  void Advance(Nanos now);
  void TakeInner();
  void SetAlarm();

  const bool open_each_;
  StorageModel model_;
  Slots<Slot> slots_;
  std::vector<SourceRead> to_inner_;  // of the Submit under way
  std::priority_queue<Due, std::vector<Due>, std::greater<Due>> due_;
  std::vector<uint32_t> swallowed_;  // by a stall without end
  std::vector<uint32_t> ready_;
  WakeFd wake_;
  std::unique_ptr<Source> inner_;
};

// The catalog's files as a storage with these settings (StorageSettings::Parse) would give them.
Result<std::unique_ptr<Source>> MakeDelayedSource(const Catalog& catalog,
                                                  const std::string& settings);

}  // namespace forebay
