// ClientBatches: a daemon's stored samples for pipelines of this process.
//
// Decode threads are this process's own. The memory of finished batches, too, but it is lent by the
// daemon's budget: all processes of a node together stay within it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "client/socket_client.h"
#include "pipeline/stored_batches.h"

namespace forebay {

// In a forked child every call returns kCancelled.
class ClientBatches final : public StoredBatches {
 public:
  // `client`: shared with batches on loan.
  explicit ClientBatches(std::shared_ptr<SocketClient> client);
  ~ClientBatches() override;

  // Of a data set that the client has added.
  void Remember(DatasetId dataset, std::shared_ptr<const Catalog> catalog);

  std::shared_ptr<const Catalog> Find(DatasetId dataset) const override;
  Result<StreamId> OpenStream(const StreamOptions& options) override;
  Status CloseStream(StreamId stream) override;
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Status Release(LeaseId lease) override { return client_->Release(lease); }
  const std::byte* base() const override { return client_->base(); }
  Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) override;
  uint64_t budget() const override { return client_->budget(); }
  uint64_t sharers() const override { return sharers_; }
  DecodePool& decode_pool() override { return local_->pool; }
  Registry& registry() override { return local_->registry; }
  // What the last batch was waited for, which is known with it.
  StallCause WaitCause(StreamId stream) const override { return client_->LastCause(stream); }
  // The daemon answers with an error where only a release would help.
  Status Blocked(StreamId /*stream*/) const override { return Status(); }
  void CountStall(StreamId stream, StallCause cause, Nanos waited) override;
  std::vector<EpochStats> Stats(StreamId stream) const override;
  std::string WaitingFor(StreamId stream) const override;

 private:
  struct Local {
    explicit Local(size_t threads) : pool(registry, threads) {}
    Registry registry;
    DecodePool pool;
  };

  const std::shared_ptr<SocketClient> client_;
  const uint64_t fork_generation_;
  const uint64_t sharers_;
  std::unique_ptr<Local> local_;  // left alone in a forked child, which has no threads of it
  mutable Mutex mutex_;
  std::map<DatasetId, std::shared_ptr<const Catalog>> catalogs_ GUARDED_BY(mutex_);
  Nanos ask_again_ GUARDED_BY(mutex_) = 0;  // memory that is no necessity was refused until then
};

}  // namespace forebay
