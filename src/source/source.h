// Source: where the data lives for good. Extents in, bytes out, many in flight.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "catalog/catalog.h"

namespace forebay {

class Loop;
class ReaderPool;

struct SourceRead {
  uint64_t tag = 0;
  SampleId sample = 0;
  // Exactly the sample's length; valid until the completion is reaped.
  std::span<std::byte> dest = {};
  // Neighbours in one Submit with the same number, not 0, may be read by one operation, together
  // with what lies between them, where they follow each other in one object without overlapping.
  // Each completes as if it had been read alone. A source may ignore it.
  uint32_t group = 0;
  // Where a tier lies before the source: not from there. Nor from a peer.
  bool skip_tier = false;
  bool urgent = false;  // a consumer waits for it; a source may ignore it
};

struct SourceDone {
  uint64_t tag = 0;
  Status status;     // ok: every byte of dest is the sample's, its stored checksum (if any) matched
  uint32_t crc = 0;  // CRC-32C of dest when ok
  int64_t latency_ns = 0;  // of the last attempt
  uint32_t retries = 0;    // attempts after the first, made because of errors that may pass
  // Reads that the last attempt's operation served, with its latency, this one included.
  uint32_t group_size = 1;
  // Bytes before this one that were read with it, and that nobody asked for.
  uint64_t gap_bytes = 0;
  // With ok: the file has another modification time than the catalog says, of its own look at it.
  // The bytes are those that the file has now.
  bool changed = false;
  // Of the file (Catalog::ChangeStamp) as it was when the read began, or when its copy was made,
  // where nobody has looked at it before; 0: not known.
  uint32_t stamp = 0;
  int32_t peer = -1;  // the node of the cluster that the bytes came from; -1: from the source
};

class Source {
 public:
  // Waits for what is in flight. In a forked child destroying is the only call allowed, and it
  // waits for nothing.
  virtual ~Source() = default;

  // As Loop: takes a prefix, never blocks, each accepted read completes exactly once.
  virtual size_t Submit(std::span<const SourceRead> reads) = 0;
  virtual size_t Reap(std::span<SourceDone> out) = 0;
  // Readable (poll) while completions may be waiting.
  virtual int event_fd() const = 0;
  // Most reads (not operations) that are accepted and not reaped.
  virtual size_t capacity() const = 0;
  // For logs and reports: "posix (threads) /data/train".
  virtual std::string Describe() const = 0;
  // The node of the cluster that a read of the sample would ask, as far as is known; -1: none, it
  // would be read here. From any thread, with locks of the caller held: it must neither wait nor
  // call back.
  virtual int32_t Elsewhere(SampleId) const { return -1; }
  // Whether a read of the sample is held back until other nodes have joined. Called as Elsewhere.
  virtual bool AwaitsNodes(SampleId) const { return false; }
  // Nobody will ask for its samples any more, but for those who are let in by the source itself,
  // such as other nodes: they are to leave. From the thread that submits.
  virtual void Retire() {}
};

struct PosixSourceOptions {
  // Most operations in flight. The source takes kReadsPerOp times as many reads, so that groups can
  // fill them; what has no operation yet waits in order.
  size_t max_in_flight = 256;
  static constexpr size_t kReadsPerOp = 8;
  enum class Io { kAuto, kThreads, kUring } io = Io::kAuto;  // kAuto: threads
  size_t max_open_shards = 256;  // descriptors kept for objects that hold several samples
  std::shared_ptr<ReaderPool> pool = nullptr;  // threads to share; null: its own. Not with io_uring
  Status Validate() const;
};

// Opens each whole-object file for its one read; keeps descriptors of objects that hold several
// samples. EIO, EAGAIN, ESTALE, ETIMEDOUT and a lack of descriptors are retried three times, after
// growing pauses. `catalog` must outlive the source.
//
// A shard (tar, TFRecord) must be of the size and modification time that its index has: compared
// when it is opened and after each read, as the kernel knows them, and by its path once a second
// while it is read. Another version is kChanged. A file system that keeps attributes for longer
// than that, and does not renew them with a read as NFS does, shows a change from elsewhere later.
//
// A group is one operation where its samples lie in one object of several; files of their own are
// read one by one. A group that Submit takes in part is a smaller group. When a group's operation
// fails or meets the end of the file, its samples are read one by one, and so is a sample whose
// stored checksum does not match: errors and retries are those of single reads.
Result<std::unique_ptr<Source>> MakePosixSource(const Catalog& catalog,
                                                const PosixSourceOptions& options);

// The same on a loop of the caller's; `options` gives the shards only.
Result<std::unique_ptr<Source>> MakePosixSourceOn(const Catalog& catalog,
                                                  const PosixSourceOptions& options,
                                                  std::unique_ptr<Loop> loop);

}  // namespace forebay
