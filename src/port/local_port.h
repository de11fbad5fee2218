// LocalPort: an engine in this process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "port/port.h"

namespace forebay {

// `engine` must outlive it. Loans and streams stay when the port goes.
class LocalPort final : public Port {
 public:
  explicit LocalPort(Engine& engine) : engine_(engine) {}

  // One that is open, or was closed lately, where the catalog is equal and its lengths are known.
  Result<DatasetId> OpenDataset(std::shared_ptr<const Catalog> catalog,
                                const std::string& delay) override;
  void CloseDataset(DatasetId dataset) override { (void)engine_.CloseDataset(dataset); }
  std::shared_ptr<const Catalog> Find(DatasetId dataset) override;
  Result<StreamId> OpenStream(const StreamOptions& options) override;
  Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last) override;
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Status CloseStream(StreamId stream) override { return engine_.CloseStream(stream); }
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) override;
  Status Release(LeaseId lease) override { return engine_.Release(lease); }
  Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) override;
  uint64_t budget() override { return engine_.budget(); }
  uint64_t sharers() override { return 1; }
  DecodePool& decode_pool() override { return engine_.decode_pool(); }
  Registry& registry() override { return engine_.registry(); }
  StallCause WaitCause(StreamId stream) override { return engine_.WaitCause(stream); }
  Status Blocked(StreamId stream) override { return engine_.Blocked(stream); }
  void CountStall(StreamId stream, StallCause cause, Nanos waited) override;
  Result<std::vector<EpochStats>> Stats(StreamId stream) override { return engine_.Stats(stream); }
  Result<ChangedFilesOf> ChangedFiles(StreamId stream) override {
    return engine_.ChangedFiles(stream);
  }
  std::string WaitingFor(StreamId stream) override { return engine_.WaitingFor(stream); }
  Result<std::string> MetricsText() override { return engine_.registry().PrometheusText(); }

 private:
  Engine& engine_;
};

// One that keeps its engine alive.
std::shared_ptr<Port> MakeLocalPort(std::shared_ptr<Engine> engine);

}  // namespace forebay
