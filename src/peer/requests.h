// The asks under way, by the number that travels with them. Pure.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/slots.h"
#include "peer/exchange.h"
#include "transport/transport.h"

namespace forebay::peer {

struct Request {
  enum class At : uint8_t {
    kFree,
    kQueued,    // for the peer's credit
    kSent,      // nothing has come
    kArriving,  // its bytes are on their way into place
  };
  Ask ask;
  At at = At::kFree;
  ConnectionId connection = 0;  // that it was sent by
  Nanos give_up = 0;
};

// A number is used again much later only: one that was given up cannot be taken for another whose
// answer is late. Not safe for concurrent use.
class Requests {
 public:
  static constexpr uint32_t kIndexBits = 16;
  static constexpr uint32_t kMost = 1 << kIndexBits;

  uint32_t Add(Ask ask, Nanos give_up) {
    const uint32_t index = slots_.Take();
    Entry& entry = slots_[index];
    entry.request = {
        .ask = std::move(ask), .at = Request::At::kQueued, .connection = 0, .give_up = give_up};
    return entry.uses << kIndexBits | index;
  }

  // Null: it is over.
  Request* Find(uint32_t id) {
    const uint32_t index = id & (kMost - 1);
    if (index >= slots_.capacity()) return nullptr;
    Entry& entry = slots_[index];
    const bool live = entry.request.at != Request::At::kFree && entry.uses == id >> kIndexBits;
    return live ? &entry.request : nullptr;
  }

  void Remove(uint32_t id) {
    const uint32_t index = id & (kMost - 1);
    Entry& entry = slots_[index];
    entry.request = {};
    entry.uses = (entry.uses + 1) & ((1 << (32 - kIndexBits)) - 1);
    slots_.Free(index);
  }

  size_t size() const { return slots_.used(); }
  bool full() const { return size() >= kMost; }

  // Numbers of those for which `which` holds.
  template <typename Which>
  std::vector<uint32_t> Select(Which which) const {
    std::vector<uint32_t> out;
    for (uint32_t i = 0; i < slots_.capacity(); ++i) {
      const Entry& entry = slots_[i];
      if (entry.request.at != Request::At::kFree && which(entry.request)) {
        out.push_back(entry.uses << kIndexBits | i);
      }
    }
    return out;
  }

 private:
  struct Entry {
    Request request;
    uint32_t uses = 0;
  };
  Slots<Entry> slots_;
};

}  // namespace forebay::peer
