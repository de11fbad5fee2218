// What a client process and the engine's server say to each other.
//
// A client says Hello first; the HelloReply carries the arena's descriptor. Every request is
// answered by its reply or by a StatusReply with the same request number; Release and Served have
// no answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forebay::wire {

// Changes with the meaning of any message; both sides must have the same.
inline constexpr uint32_t kProtocol = 1;

enum class Type : uint16_t {
  kHello = 1,
  kHelloReply,
  kStatusReply,
  kOpenStream,
  kOpenStreamReply,
  kDeclare,
  kSeek,
  kCloseStream,
  kTake,
  kFetch,
  kLoan,
  kRelease,
  kServed,
};
inline constexpr Type kLastType = Type::kServed;

struct Hello {
  static constexpr Type kType = Type::kHello;
  uint32_t protocol = kProtocol;
  uint32_t pid = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.protocol, m.pid);
  }
};

struct HelloReply {
  static constexpr Type kType = Type::kHelloReply;
  uint32_t protocol = kProtocol;
  uint32_t pid = 0;
  uint64_t arena_bytes = 0;
  uint64_t budget = 0;
  uint32_t datasets = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.protocol, m.pid, m.arena_bytes, m.budget, m.datasets);
  }
};

// The frame's status is the code; ok answers a request that returns nothing.
struct StatusReply {
  static constexpr Type kType = Type::kStatusReply;
  std::string message;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.message);
  }
};

struct OpenStream {
  static constexpr Type kType = Type::kOpenStream;
  uint32_t dataset = 0;
  uint32_t batch_size = 1;
  bool drop_last = false;
  bool contiguous = false;
  bool itemised = false;
  bool declared = false;
  uint64_t first_epoch = 0;
  uint64_t first_position = 0;
  uint64_t epochs = 0;
  uint32_t sampler_size = 0;
  bool sampler_shuffle = true;
  bool sampler_drop_last = false;
  uint64_t sampler_seed = 0;
  uint32_t sampler_rank = 0;
  uint32_t sampler_world = 1;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset, m.batch_size, m.drop_last, m.contiguous, m.itemised, m.declared, m.first_epoch,
       m.first_position, m.epochs, m.sampler_size, m.sampler_shuffle, m.sampler_drop_last,
       m.sampler_seed, m.sampler_rank, m.sampler_world);
  }
};

struct OpenStreamReply {
  static constexpr Type kType = Type::kOpenStreamReply;
  uint32_t stream = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream);
  }
};

// A long order travels in parts, each answered; the one without `more` declares the whole.
struct Declare {
  static constexpr Type kType = Type::kDeclare;
  uint32_t stream = 0;
  uint64_t epoch = 0;
  bool last = false;
  bool more = false;
  std::vector<uint32_t> order;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream, m.epoch, m.last, m.more, m.order);
  }
};

struct Seek {
  static constexpr Type kType = Type::kSeek;
  uint32_t stream = 0;
  uint64_t epoch = 0;
  uint64_t position = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream, m.epoch, m.position);
  }
};

struct CloseStream {
  static constexpr Type kType = Type::kCloseStream;
  uint32_t stream = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream);
  }
};

struct Take {
  static constexpr Type kType = Type::kTake;
  uint32_t stream = 0;
  int64_t wait_ns = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream, m.wait_ns);
  }
};

struct Fetch {
  static constexpr Type kType = Type::kFetch;
  uint32_t stream = 0;
  uint32_t sample = 0;
  int64_t wait_ns = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream, m.sample, m.wait_ns);
  }
};

// Answers Take and Fetch. The three lists have one length: decoding sees to it.
struct Loan {
  static constexpr Type kType = Type::kLoan;
  static constexpr uint8_t kKinds = 4;
  uint8_t kind = 0;  // a TakeKind, below kKinds
  uint64_t lease = 0;
  uint32_t stream = 0;
  uint32_t dataset = 0;
  uint64_t epoch = 0;
  uint64_t index = 0;
  std::vector<uint32_t> samples;
  std::vector<uint64_t> offsets;
  std::vector<uint32_t> lengths;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.kind, m.lease, m.stream, m.dataset, m.epoch, m.index);
    io.Columns(m.samples, m.offsets, m.lengths);
  }
  bool Valid() const { return kind < kKinds; }
};

struct Release {
  static constexpr Type kType = Type::kRelease;
  std::vector<uint64_t> leases;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.leases);
  }
};

// What a client did since it last said so.
struct Served {
  static constexpr Type kType = Type::kServed;
  uint64_t reads = 0;   // answered from the arena
  uint64_t passes = 0;  // left to the file system
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.reads, m.passes);
  }
};

}  // namespace forebay::wire
