#include "client/local_client.h"

#include <utility>

namespace forebay {

Result<StreamId> LocalClient::OpenStream(const StreamOptions& options) {
  return engine_.OpenStream(options);
}

Status LocalClient::Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order,
                            bool last) {
  return engine_.Declare(stream, epoch, std::move(order), last);
}

Status LocalClient::Seek(StreamId stream, uint64_t epoch, uint64_t position) {
  return engine_.Seek(stream, epoch, position);
}

Status LocalClient::CloseStream(StreamId stream) { return engine_.CloseStream(stream); }

Result<TakeKind> LocalClient::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  return engine_.Take(stream, wait, out);
}

Result<TakeKind> LocalClient::Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) {
  LeaseId lease = kNoLease;
  Result<TakeKind> kind = engine_.Fetch(stream, sample, wait, &lease, out);
  const bool handed_out = kind && *kind == TakeKind::kBatch;
  if (lease != kNoLease && !handed_out) FOREBAY_RETURN_IF_ERROR(engine_.Release(lease));
  return kind;
}

Status LocalClient::Release(LeaseId lease) { return engine_.Release(lease); }

}  // namespace forebay
