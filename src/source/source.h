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

struct SourceRead {
  uint64_t tag = 0;
  SampleId sample = 0;
  std::span<std::byte> dest;  // exactly the sample's length; valid until the completion is reaped
};

struct SourceDone {
  uint64_t tag = 0;
  Status status;     // ok: every byte of dest is the sample's, its stored checksum (if any) matched
  uint32_t crc = 0;  // CRC-32C of dest when ok
  int64_t latency_ns = 0;  // of the last attempt
  uint32_t retries = 0;    // attempts after the first, made because of errors that may pass
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
  // Most reads in flight.
  virtual size_t capacity() const = 0;
  // For logs and reports: "posix (threads) /data/train".
  virtual std::string Describe() const = 0;
};

struct PosixSourceOptions {
  size_t max_in_flight = 256;
  enum class Io { kAuto, kThreads, kUring } io = Io::kAuto;  // kAuto: threads
  size_t max_open_shards = 256;  // descriptors kept for objects that hold several samples
  Status Validate() const;
};

// Opens each whole-object file for its one read; keeps descriptors of objects that hold several
// samples. EIO, EAGAIN, ESTALE, ETIMEDOUT and a lack of descriptors are retried three times, after
// growing pauses. `catalog` must outlive the source.
Result<std::unique_ptr<Source>> MakePosixSource(const Catalog& catalog,
                                                const PosixSourceOptions& options);

// The same on a loop of the caller's; `options` gives the shards only.
Result<std::unique_ptr<Source>> MakePosixSourceOn(const Catalog& catalog,
                                                  const PosixSourceOptions& options,
                                                  std::unique_ptr<Loop> loop);

}  // namespace forebay
