// LocalClient: an engine in this process.
#pragma once

#include <vector>

#include "client/client.h"

namespace forebay {

// `engine` must outlive it. Loans and streams stay when the client goes.
class LocalClient final : public Client {
 public:
  explicit LocalClient(Engine& engine) : engine_(engine) {}

  Result<StreamId> OpenStream(const StreamOptions& options) override;
  Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last) override;
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Status CloseStream(StreamId stream) override;
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) override;
  Status Release(LeaseId lease) override;
  const std::byte* base() const override { return engine_.base(); }

 private:
  Engine& engine_;
};

}  // namespace forebay
