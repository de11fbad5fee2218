// The server's answers about data sets, knobs and itself.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "base/crc32c.h"
#include "daemon/server.h"
#include "source/delay_source.h"

namespace forebay {
namespace {

constexpr uint64_t kLargestImage = uint64_t{64} << 30;

// Not mapped: a client could shrink the file under us.
Result<std::vector<std::byte>> ReadImage(int fd, uint64_t bytes) {
  struct stat st = {};
  if (fd < 0 || fstat(fd, &st) != 0) {
    return Status(Code::kInvalidArgument, "the catalog's image did not come along");
  }
  if (bytes > kLargestImage || st.st_size < 0 || static_cast<uint64_t>(st.st_size) != bytes) {
    return Status(Code::kInvalidArgument,
                  StrCat("a catalog of ", bytes, " bytes came as ", st.st_size));
  }
  std::vector<std::byte> image(bytes);
  uint64_t at = 0;
  while (at < bytes) {
    const ssize_t n = pread(fd, image.data() + at, bytes - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n == 0 ? EIO : errno, "reading a catalog's image");
    at += static_cast<uint64_t>(n);
  }
  return image;
}

}  // namespace

Result<DatasetId> Server::OnOpenDataset(Peer& peer, const wire::OpenDataset& open) {
  if (!options_.open_datasets) {
    return Status(Code::kPermissionDenied, "this engine takes no data sets from its clients");
  }
  const auto key = std::make_tuple(open.fingerprint, open.image_bytes, open.image_crc, open.delay);
  const OwnedFd image = std::move(peer.received);
  const auto known = datasets_.find(key);
  if (known != datasets_.end()) return known->second;
  if (!open.has_image) return Status(Code::kNotFound, "this engine does not know the data set");
  Result<std::vector<std::byte>> bytes = ReadImage(image.get(), open.image_bytes);
  if (!bytes) return bytes.error();
  if (Crc32c(*bytes) != open.image_crc) {
    return Status(Code::kDataLoss, "a catalog's image is not the one that was announced");
  }
  Result<std::unique_ptr<Catalog>> catalog = Catalog::FromImage(*std::move(bytes));
  if (!catalog) return catalog.error();
  // Shared with the engine, whose streams keep it.
  const std::shared_ptr<const Catalog> shared = *std::move(catalog);
  if (shared->fingerprint() != open.fingerprint) {
    return Status(Code::kDataLoss, "a catalog's fingerprint is not the one that was announced");
  }
  std::unique_ptr<Source> source;
  if (!open.delay.empty()) {
    Result<std::unique_ptr<Source>> delayed = MakeDelayedSource(*shared, open.delay);
    if (!delayed) return delayed.error();
    source = *std::move(delayed);
  }
  const Result<DatasetId> added = engine_.AddDataset(shared, std::move(source));
  if (added) datasets_.emplace(key, *added);
  return added;
}

Status Server::OnSetKnobs(const wire::SetKnobs& set) {
  std::vector<KnobSetting> settings;
  for (size_t i = 0; i < set.names.size(); ++i) settings.push_back({set.names[i], set.values[i]});
  return engine_.registry().Apply(settings);
}

void Server::OnQuery(Peer& peer, uint64_t request, const wire::Query& query) {
  wire::Text reply;
  // What clients took without a word is seen by looking.
  if (ring_count_ != 0) PumpAll();
  if (query.what == wire::Query::kDescribe) reply.text = Describe();
  if (query.what == wire::Query::kPrometheus) reply.text = PrometheusText();
  if (query.what == wire::Query::kWaitingFor) reply.text = engine_.WaitingFor(query.stream);
  if (query.what == wire::Query::kPolicy && options_.policy) reply.text = options_.policy();
  const Status encoded = wire::Encode(reply, request, &peer.out);
  if (!encoded.ok()) Reply(peer, request, encoded);
}

void Server::OnStats(Peer& peer, uint64_t request, StreamId stream) {
  wire::StatsReply reply;
  for (const EpochStats& epoch : engine_.Stats(stream)) {
    if (epoch.batches == 0) continue;  // which one it is shows with its first batch
    reply.epochs.push_back(epoch.epoch);
    reply.reads.push_back(epoch.source_reads);
    reply.bytes.push_back(epoch.source_bytes);
    reply.peer_reads.push_back(epoch.peer_reads);
    reply.peer_bytes.push_back(epoch.peer_bytes);
  }
  const Status encoded = wire::Encode(reply, request, &peer.out);
  if (!encoded.ok()) Reply(peer, request, encoded);
}

void Server::OnLend(Peer& peer, uint64_t request, const wire::Lend& lend) {
  constexpr size_t kMostShares = 4096;
  if (peer.shares.size() >= kMostShares) {
    Reply(peer, request,
          Status(Code::kResourceExhausted, "this client has too many shares of the budget"));
    return;
  }
  Result<MemoryShare> share = engine_.Lend(lend.bytes, lend.leave);
  if (!share) {
    Reply(peer, request, share.error());
    return;
  }
  wire::LendReply reply;
  reply.share = peer.next_share++;
  peer.shares.emplace(reply.share, Share{*std::move(share), lend.bytes});
  (void)wire::Encode(reply, request, &peer.out);  // a few bytes
}

void Server::OnStalled(Peer& peer, const wire::Stalled& stalled) {
  const auto found = peer.streams.find(stalled.stream);
  if (found == peer.streams.end() || stalled.cause >= kStallCauses) return;
  const auto cause = static_cast<StallCause>(stalled.cause);
  const Nanos now = SteadyClock().Now();
  const auto waited = static_cast<Nanos>(
      std::min<uint64_t>(stalled.nanoseconds, static_cast<uint64_t>(now - started_)));
  engine_.CountStall(cause, waited);
  found->second.watch.Waited(cause, now - waited, now);
}

}  // namespace forebay
