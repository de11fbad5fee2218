// StoredBatches: where a pipeline's stored samples and its memory come from, an engine of this
// process or a daemon's.
#pragma once

#include <cstddef>
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

// Each is what Engine says of its own. Safe for concurrent use by multiple threads.
class StoredBatches {
 public:
  virtual ~StoredBatches() = default;

  virtual std::shared_ptr<const Catalog> Find(DatasetId dataset) const = 0;  // null: unknown
  virtual Result<StreamId> OpenStream(const StreamOptions& options) = 0;
  virtual Status CloseStream(StreamId stream) = 0;
  virtual Status Seek(StreamId stream, uint64_t epoch, uint64_t position) = 0;
  virtual Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) = 0;
  virtual Status Release(LeaseId lease) = 0;
  virtual const std::byte* base() const = 0;

  // A part of the budget; it goes back with the last owner of what is returned.
  virtual Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) = 0;
  virtual uint64_t budget() const = 0;
  // Pipelines that share the budget with this one.
  virtual uint64_t sharers() const = 0;
  virtual DecodePool& decode_pool() = 0;
  virtual Registry& registry() = 0;

  virtual StallCause WaitCause(StreamId stream) const = 0;
  virtual Status Blocked(StreamId stream) const = 0;
  virtual void CountStall(StreamId stream, StallCause cause, Nanos waited) = 0;
  virtual std::vector<EpochStats> Stats(StreamId stream) const = 0;
  virtual std::string WaitingFor(StreamId stream) const = 0;
};

// `engine` must outlive it.
class EngineBatches final : public StoredBatches {
 public:
  explicit EngineBatches(Engine& engine) : engine_(engine) {}

  std::shared_ptr<const Catalog> Find(DatasetId dataset) const override;
  Result<StreamId> OpenStream(const StreamOptions& options) override;
  Status CloseStream(StreamId stream) override { return engine_.CloseStream(stream); }
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Status Release(LeaseId lease) override { return engine_.Release(lease); }
  const std::byte* base() const override { return engine_.base(); }
  Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) override;
  uint64_t budget() const override { return engine_.budget(); }
  uint64_t sharers() const override { return 1; }
  DecodePool& decode_pool() override { return engine_.decode_pool(); }
  Registry& registry() override { return engine_.registry(); }
  StallCause WaitCause(StreamId stream) const override { return engine_.WaitCause(stream); }
  Status Blocked(StreamId stream) const override { return engine_.Blocked(stream); }
  void CountStall(StreamId stream, StallCause cause, Nanos waited) override;
  std::vector<EpochStats> Stats(StreamId stream) const override { return engine_.Stats(stream); }
  std::string WaitingFor(StreamId stream) const override { return engine_.WaitingFor(stream); }

 private:
  Engine& engine_;
};

}  // namespace forebay
