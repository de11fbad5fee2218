#include "port/local_port.h"

#include <cstddef>
#include <span>
#include <utility>

#include "base/crc32c.h"
#include "catalog/sizer.h"
#include "source/delay_source.h"

namespace forebay {

Result<DatasetId> LocalPort::OpenDataset(std::shared_ptr<const Catalog> catalog,
                                         const std::string& delay) {
  std::unique_ptr<Source> source;
  if (!delay.empty()) {
    Result<std::unique_ptr<Source>> emulated = MakeDelayedSource(*catalog, delay);
    if (!emulated) return emulated.error();
    source = *std::move(emulated);
  }
  std::string key;
  if (catalog->sizer() == nullptr || catalog->sizer()->all_known()) {
    const std::span<const std::byte> image = catalog->image();
    key = StrCat("port ", catalog->fingerprint(), " ", image.size(), " ", Crc32c(image), " ", delay,
                 " ", catalog->root());
  }
  return engine_.AddDataset(std::move(catalog), std::move(source), nullptr, key);
}

std::shared_ptr<const Catalog> LocalPort::Find(DatasetId dataset) {
  return engine_.shared_catalog(dataset);
}

Result<StreamId> LocalPort::OpenStream(const StreamOptions& options) {
  return engine_.OpenStream(options);
}

Status LocalPort::Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last) {
  return engine_.Declare(stream, epoch, std::move(order), last);
}

Status LocalPort::Seek(StreamId stream, uint64_t epoch, uint64_t position) {
  return engine_.Seek(stream, epoch, position);
}

Result<TakeKind> LocalPort::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  return engine_.Take(stream, wait, out);
}

Result<TakeKind> LocalPort::Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) {
  LeaseId lease = kNoLease;
  Result<TakeKind> kind = engine_.Fetch(stream, sample, wait, &lease, out);
  const bool handed_out = kind && *kind == TakeKind::kBatch;
  if (lease != kNoLease && !handed_out) FOREBAY_RETURN_IF_ERROR(engine_.Release(lease));
  return kind;
}

Result<std::shared_ptr<void>> LocalPort::Lend(uint64_t bytes, uint64_t leave, Nanos wait) {
  Result<MemoryShare> share = engine_.Lend(bytes, leave, wait);
  if (!share) return share.error();
  // Shared only in name: a type that every port can give.
  return std::shared_ptr<void>(std::make_shared<MemoryShare>(*std::move(share)));
}

void LocalPort::CountStall(StreamId /*stream*/, StallCause cause, Nanos waited) {
  engine_.CountStall(cause, waited);
}

std::shared_ptr<Port> MakeLocalPort(std::shared_ptr<Engine> engine) {
  struct Owner {
    explicit Owner(std::shared_ptr<Engine> owned) : engine(std::move(owned)), port(*engine) {}
    const std::shared_ptr<Engine> engine;
    LocalPort port;
  };
  auto owner = std::make_shared<Owner>(std::move(engine));
  Port* const port = &owner->port;
  return std::shared_ptr<Port>(std::move(owner), port);
}

}  // namespace forebay
