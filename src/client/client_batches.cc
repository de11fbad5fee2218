#include "client/client_batches.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "base/system_memory.h"
#include "decode/numa.h"
#include "wire/message.h"

namespace forebay {
namespace {

constexpr Nanos kRetry = 10 * kMilli;
constexpr Nanos kRefused = 200 * kMilli;

}  // namespace

ClientBatches::ClientBatches(std::shared_ptr<SocketClient> client)
    : client_(std::move(client)),
      fork_generation_(ForkGeneration()),
      sharers_(LocalRanks()),
      local_(std::make_unique<Local>(std::max<size_t>(1, UsableProcessors() / sharers_))) {}

ClientBatches::~ClientBatches() {
  if (fork_generation_ != ForkGeneration()) (void)local_.release();
}

void ClientBatches::Remember(DatasetId dataset, std::shared_ptr<const Catalog> catalog) {
  MutexLock lock(mutex_);
  catalogs_[dataset] = std::move(catalog);
}

std::shared_ptr<const Catalog> ClientBatches::Find(DatasetId dataset) const {
  MutexLock lock(mutex_);
  const auto found = catalogs_.find(dataset);
  return found == catalogs_.end() ? nullptr : found->second;
}

Result<StreamId> ClientBatches::OpenStream(const StreamOptions& options) {
  return client_->OpenStream(options);
}

Status ClientBatches::CloseStream(StreamId stream) { return client_->CloseStream(stream); }

Status ClientBatches::Seek(StreamId stream, uint64_t epoch, uint64_t position) {
  return client_->Seek(stream, epoch, position);
}

Result<TakeKind> ClientBatches::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  return client_->Take(stream, wait, out);
}

Result<std::shared_ptr<void>> ClientBatches::Lend(uint64_t bytes, uint64_t leave, Nanos wait) {
  const Nanos start = SteadyClock().Now();
  if (wait == 0) {
    MutexLock lock(mutex_);
    if (start < ask_again_) return Status(Code::kResourceExhausted, "refused a moment ago");
  }
  while (true) {
    const Result<uint64_t> share = client_->Lend(bytes, leave);
    if (share) {
      // The token's owner count is what is wanted; it points to nothing.
      return std::shared_ptr<void>(
          nullptr, [client = client_, id = *share](void*) { client->GiveBack(id); });
    }
    const Nanos now = SteadyClock().Now();
    if (share.error().code() != Code::kResourceExhausted || now - start >= wait) {
      MutexLock lock(mutex_);
      if (wait == 0) ask_again_ = now + kRefused;
      return share.error();
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(kRetry));
  }
}

void ClientBatches::CountStall(StreamId stream, StallCause cause, Nanos waited) {
  (void)client_->Stalled(stream, cause, waited);
}

std::vector<EpochStats> ClientBatches::Stats(StreamId stream) const {
  Result<std::vector<EpochStats>> stats = client_->Stats(stream);
  return stats ? *std::move(stats) : std::vector<EpochStats>();
}

std::string ClientBatches::WaitingFor(StreamId stream) const {
  const Result<std::string> said = client_->Query(wire::Query::kWaitingFor, stream);
  return said ? *said : said.error().ToString();
}

}  // namespace forebay
