// What a client process and the engine's server say to each other.
//
// A client says Hello first; the HelloReply carries the arena's descriptor. Every request is
// answered by its reply or by a StatusReply with the same request number; Release, Served, Nudge,
// GiveBack, Stalled, CloseDataset, LookProgress and DropLook have no answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/stream_options.h"

namespace forebay::wire {

// Changes with the meaning of any message; both sides must have the same.
inline constexpr uint32_t kProtocol = 8;

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
  kOpenDataset,
  kOpenDatasetReply,
  kQuery,
  kText,
  kStats,
  kStatsReply,
  kSetKnobs,
  kNudge,
  kSetPolicy,
  kLend,
  kLendReply,
  kGiveBack,
  kStalled,
  kCloseDataset,
  kAskLook,
  kAskLookReply,
  kLookProgress,
  kHandInLook,
  kDropLook,
};
inline constexpr Type kLastType = Type::kDropLook;

struct Hello {
  static constexpr Type kType = Type::kHello;
  uint32_t protocol = kProtocol;
  uint32_t pid = 0;
  bool viewer = false;  // only looks on: the daemon does not stay for it
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.protocol, m.pid, m.viewer);
  }
};

struct HelloReply {
  static constexpr Type kType = Type::kHelloReply;
  uint32_t protocol = kProtocol;
  uint32_t pid = 0;
  uint64_t arena_bytes = 0;
  uint64_t budget = 0;
  uint32_t datasets = 0;
  std::string settings;  // what the daemon was started with, a "name=value" in each line
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.protocol, m.pid, m.arena_bytes, m.budget, m.datasets, m.settings);
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

inline constexpr size_t kLongestJob = 256;

struct OpenStream {
  static constexpr Type kType = Type::kOpenStream;
  StreamOptions options;
  bool ring = false;  // batches are announced in a ring, to this client alone
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    auto& shape = m.options.shape;
    auto& sampler = m.options.sampler;
    io(shape.dataset, shape.batch_size, shape.drop_last, shape.contiguous, shape.itemised,
       m.options.declared, shape.first_epoch, shape.first_position, shape.epochs, sampler.size,
       sampler.shuffle, sampler.drop_last, sampler.seed, sampler.rank, sampler.world,
       sampler.exchange, sampler.ranks_per_node, m.ring, m.options.ahead_of_consumer, shape.job);
  }
  bool Valid() const { return options.shape.job.size() <= kLongestJob; }
};

struct OpenStreamReply {
  static constexpr Type kType = Type::kOpenStreamReply;
  uint32_t stream = 0;
  // The ring whose descriptor comes along; 0 slots: there is none, batches are asked for.
  uint32_t ring_slots = 0;
  uint32_t ring_samples = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream, m.ring_slots, m.ring_samples);
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
  std::vector<uint64_t> waits;  // ns that the request waited, by StallCause; empty: it did not
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.kind, m.lease, m.stream, m.dataset, m.epoch, m.index);
    io.Columns(m.samples, m.offsets, m.lengths);
    io(m.waits);
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

// Adds a data set, or names the one that is there. With `has_image` a descriptor of the catalog's
// image comes along, and behind it Catalog::ChangeStamp of each object, where the client has
// looked; without it, kNotFound asks for it.
struct OpenDataset {
  static constexpr Type kType = Type::kOpenDataset;
  uint64_t fingerprint = 0;
  uint64_t image_bytes = 0;
  uint32_t image_crc = 0;
  bool has_image = false;
  std::string delay;         // settings of an emulated slow storage; mostly empty
  uint64_t stamps_hash = 0;  // Catalog::StampsHash; 0: there are none
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.fingerprint, m.image_bytes, m.image_crc, m.has_image, m.delay, m.stamps_hash);
  }
};

struct OpenDatasetReply {
  static constexpr Type kType = Type::kOpenDatasetReply;
  uint32_t dataset = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset);
  }
};

// Once for each OpenDataset that was answered with a number. Streams over it stay.
struct CloseDataset {
  static constexpr Type kType = Type::kCloseDataset;
  uint32_t dataset = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset);
  }
};

inline constexpr size_t kLongestLook = 4096;

// Whether another process of the job looks at the files of a data set, or has just done so. Who is
// told to wait asks again, with the ticket.
struct AskLook {
  static constexpr Type kType = Type::kAskLook;
  std::string job;
  std::string name;  // of the data set
  uint32_t rank = 0;
  uint32_t ranks = 0;    // of the job on this node
  uint64_t opening = 0;  // the how-manyth of this data set by this process
  uint64_t ticket = 0;   // 0: the first time
  // How long ago this process last wrote to a file of a data set; below 0: it has not.
  int64_t wrote_ago_ns = -1;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.job, m.name, m.rank, m.ranks, m.opening, m.ticket, m.wrote_ago_ns);
  }
  bool Valid() const { return job.size() <= kLongestJob && name.size() <= kLongestLook; }
};

struct AskLookReply {
  static constexpr Type kType = Type::kAskLookReply;
  static constexpr uint8_t kAlone = 0;  // look; nobody is interested in what is found
  static constexpr uint8_t kLook = 1;   // look, and hand it in, or drop it
  static constexpr uint8_t kWait = 2;
  static constexpr uint8_t kTake = 3;  // the descriptor of sealed memory comes along
  static constexpr uint8_t kTurns = 4;
  uint8_t turn = kAlone;
  uint64_t ticket = 0;
  uint64_t list = 0;   // kTake: Catalog::ListHash
  uint64_t files = 0;  // kTake: so many SeenFile
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.turn, m.ticket, m.list, m.files);
  }
  bool Valid() const { return turn < kTurns; }
};

// It goes on.
struct LookProgress {
  static constexpr Type kType = Type::kLookProgress;
  uint64_t ticket = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.ticket);
  }
};

// The descriptor of sealed memory comes along, with so many SeenFile in it.
struct HandInLook {
  static constexpr Type kType = Type::kHandInLook;
  uint64_t ticket = 0;
  uint64_t list = 0;
  uint64_t files = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.ticket, m.list, m.files);
  }
};

// Nothing will be handed in. Ticket 0: this process writes to a data set that its job has open.
struct DropLook {
  static constexpr Type kType = Type::kDropLook;
  uint64_t ticket = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.ticket);
  }
};

// Answered by a Text.
struct Query {
  static constexpr Type kType = Type::kQuery;
  static constexpr uint8_t kDescribe = 0;    // the daemon, its data sets, clients, knobs: JSON
  static constexpr uint8_t kPrometheus = 1;  // metrics as Prometheus text
  static constexpr uint8_t kWaitingFor = 2;  // what `stream` waits for, in words
  static constexpr uint8_t kPolicy = 3;      // the node's policy as JSON; empty: none is in force
  // How many files of `stream`'s data set changed since they were looked at, a blank, and the last
  // one in words.
  static constexpr uint8_t kChangedFiles = 4;
  static constexpr uint8_t kKinds = 5;
  uint8_t what = 0;
  uint32_t stream = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.what, m.stream);
  }
  bool Valid() const { return what < kKinds; }
};

struct Text {
  static constexpr Type kType = Type::kText;
  std::string text;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.text);
  }
};

// What a stream's epochs read from the source; the client counts the rest itself.
struct Stats {
  static constexpr Type kType = Type::kStats;
  uint32_t stream = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream);
  }
};

struct StatsReply {
  static constexpr Type kType = Type::kStatsReply;
  std::vector<uint64_t> epochs;
  std::vector<uint64_t> reads;
  std::vector<uint64_t> bytes;
  std::vector<uint64_t> peer_reads;
  std::vector<uint64_t> peer_bytes;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io.Columns(m.epochs, m.reads, m.bytes, m.peer_reads, m.peer_bytes);
  }
};

// All of them, or none.
struct SetKnobs {
  static constexpr Type kType = Type::kSetKnobs;
  std::vector<std::string> names;
  std::vector<int64_t> values;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.names, m.values);
  }
  bool Valid() const { return names.size() == values.size(); }
};

// Puts a policy in force on this node; an empty one: none.
struct SetPolicy {
  static constexpr Type kType = Type::kSetPolicy;
  std::string json;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.json);
  }
};

// The client changed something in a ring that the daemon sleeps on.
struct Nudge {
  static constexpr Type kType = Type::kNudge;
  template <typename Self, typename Io>
  static void Fields(Self&, Io&) {}
};

// A part of the budget, for memory of the client's own. It goes back with GiveBack, or with the
// client.
struct Lend {
  static constexpr Type kType = Type::kLend;
  uint64_t bytes = 0;
  uint64_t leave = 0;  // as Engine::Lend
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.bytes, m.leave);
  }
};

struct LendReply {
  static constexpr Type kType = Type::kLendReply;
  uint64_t share = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.share);
  }
};

struct GiveBack {
  static constexpr Type kType = Type::kGiveBack;
  uint64_t share = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.share);
  }
};

// A consumer waited behind a stream with `ahead_of_consumer`.
struct Stalled {
  static constexpr Type kType = Type::kStalled;
  uint32_t stream = 0;
  uint8_t cause = 0;  // a StallCause
  uint64_t nanoseconds = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stream, m.cause, m.nanoseconds);
  }
};

}  // namespace forebay::wire
