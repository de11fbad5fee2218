#include "pipeline/stored_batches.h"

#include <utility>

namespace forebay {

std::shared_ptr<const Catalog> EngineBatches::Find(DatasetId dataset) const {
  return dataset < engine_.dataset_count() ? engine_.shared_catalog(dataset) : nullptr;
}

Result<StreamId> EngineBatches::OpenStream(const StreamOptions& options) {
  return engine_.OpenStream(options);
}

Status EngineBatches::Seek(StreamId stream, uint64_t epoch, uint64_t position) {
  return engine_.Seek(stream, epoch, position);
}

Result<TakeKind> EngineBatches::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  return engine_.Take(stream, wait, out);
}

Result<std::shared_ptr<void>> EngineBatches::Lend(uint64_t bytes, uint64_t leave, Nanos wait) {
  Result<MemoryShare> share = engine_.Lend(bytes, leave, wait);
  if (!share) return share.error();
  // Shared only in name: a type that both kinds of engines can give.
  return std::shared_ptr<void>(std::make_shared<MemoryShare>(*std::move(share)));
}

void EngineBatches::CountStall(StreamId /*stream*/, StallCause cause, Nanos waited) {
  engine_.CountStall(cause, waited);
}

}  // namespace forebay
