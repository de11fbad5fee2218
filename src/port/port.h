// Port: how a consumer reaches an engine, in its own process or in another one.
//
// Everything that takes batches stands on it: pipelines, the C ABI, Python's loaders. Safe for
// concurrent use by multiple threads. In a forked child every call that can fail returns
// kCancelled; the child makes a port of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "catalog/catalog.h"
#include "decode/pool.h"
#include "metrics/registry.h"
#include "metrics/stall.h"
#include "stage/engine.h"

namespace forebay {

class Port {
 public:
  virtual ~Port() = default;

  // ---- Data sets.
  //
  // Adds one, or names it where it is known already. `delay`: settings of an emulated slow storage,
  // see StorageSettings; mostly empty.
  virtual Result<DatasetId> OpenDataset(std::shared_ptr<const Catalog> catalog,
                                        const std::string& delay) = 0;
  // Once for each OpenDataset: the caller opens no more streams over it. Those that are open keep
  // it; it is given back with the last.
  virtual void CloseDataset(DatasetId dataset) = 0;
  // Of a data set that this port has opened, or that the engine of this process has; null: unknown.
  virtual std::shared_ptr<const Catalog> Find(DatasetId dataset) = 0;

  // ---- Streams. Each is what Engine says of its own.
  virtual Result<StreamId> OpenStream(const StreamOptions& options) = 0;
  virtual Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order,
                         bool last) = 0;
  virtual Status Seek(StreamId stream, uint64_t epoch, uint64_t position) = 0;
  virtual Status CloseStream(StreamId stream) = 0;

  // ---- Batches.
  //
  // As Engine::Take.
  virtual Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) = 0;
  // One sample, within `wait`: kBatch with a loan, or kPending with nothing left under way for it.
  virtual Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) = 0;
  // The memory of a loan may change from now on. Does nothing for a lease that this port does not
  // hold.
  virtual Status Release(LeaseId lease) = 0;

  // ---- What pipelines need besides.
  //
  // A part of the budget; it goes back with the last owner of what is returned.
  virtual Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) = 0;
  virtual uint64_t budget() = 0;
  // Processes that share the budget with this one, itself included.
  virtual uint64_t sharers() = 0;
  // They live as long as the port.
  virtual DecodePool& decode_pool() = 0;
  virtual Registry& registry() = 0;

  // ---- Accounts.
  virtual StallCause WaitCause(StreamId stream) = 0;
  // kResourceExhausted while nothing but a Release can end the stream's wait.
  virtual Status Blocked(StreamId stream) = 0;
  // A consumer behind an `ahead_of_consumer` stream waited.
  virtual void CountStall(StreamId stream, StallCause cause, Nanos waited) = 0;
  virtual Result<std::vector<EpochStats>> Stats(StreamId stream) = 0;
  // Of the stream's data set. A request to the engine's process, where that is another one.
  virtual Result<ChangedFilesOf> ChangedFiles(StreamId stream) = 0;
  // What a pending Take waits for, in words.
  virtual std::string WaitingFor(StreamId stream) = 0;
  // Every metric of the engine as Prometheus text.
  virtual Result<std::string> MetricsText() = 0;
};

}  // namespace forebay
