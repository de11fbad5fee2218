// Client: how a consumer reaches an engine, in its own process or in another one.
//
// Safe for concurrent use by multiple threads. In a forked child every call returns kCancelled; the
// child makes a client of its own.
#pragma once

#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "stage/engine.h"

namespace forebay {

class Client {
 public:
  virtual ~Client() = default;

  virtual Result<StreamId> OpenStream(const StreamOptions& options) = 0;
  virtual Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order,
                         bool last) = 0;
  virtual Status Seek(StreamId stream, uint64_t epoch, uint64_t position) = 0;
  virtual Status CloseStream(StreamId stream) = 0;

  // As Engine::Take.
  virtual Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) = 0;
  // One sample, within `wait`: kBatch with a loan, or kPending with nothing left under way for it.
  virtual Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) = 0;
  // The memory of a loan may change from now on. Does nothing for a lease that this client does not
  // hold.
  virtual Status Release(LeaseId lease) = 0;

  // What the offsets of loans count from.
  virtual const std::byte* base() const = 0;
};

}  // namespace forebay
