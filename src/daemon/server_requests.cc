// The server's answers about data sets, knobs and itself.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "base/crc32c.h"
#include "base/system_memory.h"
#include "base/thread.h"
#include "daemon/server.h"
#include "source/delay_source.h"
#include "wire/socket.h"

namespace forebay {
namespace {

constexpr uint64_t kLargestImage = uint64_t{64} << 30;

Status ReadAt(int fd, uint64_t at, std::span<std::byte> dest) {
  while (!dest.empty()) {
    const ssize_t n = pread(fd, dest.data(), dest.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n == 0 ? EIO : errno, "reading a catalog's image");
    at += static_cast<uint64_t>(n);
    dest = dest.subspan(static_cast<size_t>(n));
  }
  return Status();
}

// What comes with a wire::OpenDataset.
struct Image {
  std::vector<std::byte> catalog;
  std::vector<uint32_t> stamps;
};

// Not mapped: a client could shrink the file under us. What is not there takes no memory of ours:
// a file of holes is no catalog.
Result<Image> ReadImage(int fd, const wire::OpenDataset& open) {
  struct stat st = {};
  // Only memory has seals. A file could lie where reading it takes for ever.
  if (fd < 0 || fcntl(fd, F_GET_SEALS) < 0 || fstat(fd, &st) != 0) {
    return Status(Code::kInvalidArgument, "the catalog's image did not come along");
  }
  const auto bytes = static_cast<uint64_t>(std::max<off_t>(st.st_size, 0));
  const uint64_t behind = bytes - std::min(bytes, open.image_bytes);
  const bool fits = open.stamps_hash == 0 ? behind == 0 : behind % sizeof(uint32_t) == 0;
  if (bytes > kLargestImage || bytes < open.image_bytes || !fits) {
    return Status(Code::kInvalidArgument,
                  StrCat("a catalog of ", open.image_bytes, " bytes came as ", st.st_size));
  }
  constexpr uint64_t kBlock = 512;  // of st_blocks
  if (static_cast<uint64_t>(st.st_blocks) * kBlock < bytes) {
    return Status(Code::kInvalidArgument,
                  StrCat("a catalog of ", bytes, " bytes came with ",
                         static_cast<uint64_t>(st.st_blocks) * kBlock, " of them"));
  }
  if (bytes > ReadMemoryLimit().usable() / 2) {
    return Status(Code::kResourceExhausted,
                  StrCat("a catalog of ", bytes, " bytes is more than half of the memory left"));
  }
  Image image{.catalog = std::vector<std::byte>(open.image_bytes),
              .stamps = std::vector<uint32_t>(behind / sizeof(uint32_t))};
  FOREBAY_RETURN_IF_ERROR(ReadAt(fd, 0, image.catalog));
  FOREBAY_RETURN_IF_ERROR(
      ReadAt(fd, open.image_bytes, std::as_writable_bytes(std::span(image.stamps))));
  return image;
}

// By what its catalog's image and source are.
std::string DatasetKey(const wire::OpenDataset& open) {
  return StrCat("image ", open.fingerprint, " ", open.image_bytes, " ", open.image_crc, " ",
                open.delay);
}

}  // namespace

Status Server::OnOpenDataset(Peer& peer, uint64_t request, const wire::OpenDataset& open) {
  if (!options_.open_datasets) {
    return Status(Code::kPermissionDenied, "this engine takes no data sets from its clients");
  }
  OwnedFd image = std::move(peer.received);
  if (const std::optional<DatasetId> known =
          engine_.UseDataset(DatasetKey(open), open.stamps_hash)) {
    ++peer.datasets[*known];
    wire::OpenDatasetReply reply;
    reply.dataset = *known;
    return wire::Encode(reply, request, &peer.out);
  }
  if (!open.has_image) return Status(Code::kNotFound, "this engine does not know the data set");
  if (peer.opening != 0) {
    return Status(Code::kResourceExhausted, "this client is opening another data set");
  }
  MutexLock lock(open_mutex_);
  FOREBAY_RETURN_IF_ERROR(StartOpener());
  ++peer.opening;
  openings_.push_back({peer.id, request, open, std::move(image)});
  open_ready_.notify_one();
  return Status();
}

void Server::OnCloseDataset(Peer& peer, DatasetId dataset) {
  const auto found = peer.datasets.find(dataset);
  if (found == peer.datasets.end()) return;
  (void)engine_.CloseDataset(dataset);
  if (--found->second == 0) peer.datasets.erase(found);
}

Status Server::StartOpener() {
  if (idle_openers_ > openings_.size() || openers_.size() >= kMostOpeners) return Status();
  auto started = StartThread("forebay-adopt", [this](std::stop_token stop) { RunOpener(stop); });
  if (!started) return openers_.empty() ? started.error() : Status();
  openers_.push_back(*std::move(started));
  return Status();
}

void Server::RunOpener(std::stop_token stop) {
  while (true) {
    Opening next;
    {
      MutexLock lock(open_mutex_);
      ++idle_openers_;
      open_ready_.wait(lock.native(), stop,
                       [this]() NO_THREAD_SAFETY_ANALYSIS { return !openings_.empty(); });
      --idle_openers_;
      if (stop.stop_requested()) return;
      next = std::move(openings_.front());
      openings_.pop_front();
    }
    Opened opened{next.peer, next.request, AddDataset(next.open, next.image.get())};
    MutexLock lock(open_mutex_);
    opened_.push_back(std::move(opened));
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
  }
}

void Server::AnswerOpened() {
  std::vector<Opened> opened;
  {
    MutexLock lock(open_mutex_);
    opened.swap(opened_);
  }
  for (const Opened& one : opened) {
    const auto found = peers_.find(one.peer);
    if (found == peers_.end() || found->second->gone) {
      if (one.dataset) (void)engine_.CloseDataset(*one.dataset);
      continue;
    }
    Peer& peer = *found->second;
    --peer.opening;
    if (one.dataset) {
      ++peer.datasets[*one.dataset];
      wire::OpenDatasetReply reply;
      reply.dataset = *one.dataset;
      (void)wire::Encode(reply, one.request, &peer.out);  // a few bytes
    } else {
      Reply(peer, one.request, one.dataset.error());
    }
    Flush(peer);
  }
}

Result<DatasetId> Server::AddDataset(const wire::OpenDataset& open, int image) {
  Result<Image> read = ReadImage(image, open);
  if (!read) return read.error();
  if (Crc32c(read->catalog) != open.image_crc) {
    return Status(Code::kDataLoss, "a catalog's image is not the one that was announced");
  }
  Result<std::unique_ptr<Catalog>> catalog = Catalog::FromImage(std::move(read->catalog));
  if (!catalog) return catalog.error();
  if (open.stamps_hash != 0) {
    if (read->stamps.size() != (*catalog)->object_count()) {
      return Status(Code::kDataLoss,
                    StrCat("a catalog of ", (*catalog)->object_count(),
                           " files came with change times of ", read->stamps.size()));
    }
    (*catalog)->SetLookedAt(std::make_shared<std::vector<uint32_t>>(std::move(read->stamps)));
    if ((*catalog)->StampsHash() != open.stamps_hash) {
      return Status(Code::kDataLoss, "a catalog's change times are not those that were announced");
    }
  }
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
  return engine_.AddDataset(shared, std::move(source), nullptr, DatasetKey(open));
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
  if (query.what == wire::Query::kChangedFiles) {
    const ChangedFilesOf changed = engine_.ChangedFiles(query.stream);
    reply.text = StrCat(changed.count, " ", changed.last);
  }
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
  peer.shares.emplace(reply.share, BudgetClaim{*std::move(share), lend.bytes});
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

void Server::OnAskLook(Peer& peer, uint64_t request, const wire::AskLook& ask) {
  if (ask.ticket == 0) DropLooksOfEnded(peer);
  const Nanos now = SteadyClock().Now();
  const bool wrote = ask.wrote_ago_ns >= 0;
  LookBoard::Answer answer =
      board_.Ask({.client = peer.id,
                  .job = ask.job,
                  .name = ask.name,
                  .rank = ask.rank,
                  .ranks = ask.ranks,
                  .opening = ask.opening,
                  .waited_for = ask.ticket,
                  .wrote_at = wrote ? std::max<Nanos>(now - ask.wrote_ago_ns, 0)
                                    : LookBoard::Question::kNever},
                 now);
  wire::AskLookReply reply;
  reply.turn = static_cast<uint8_t>(answer.turn);
  reply.ticket = answer.ticket;
  if (answer.seen != nullptr) {
    reply.list = answer.seen->list;
    reply.files = answer.seen->files;
    std::vector<std::byte> bytes;
    (void)wire::Encode(reply, request, &bytes);
    // As a ring's: the descriptor goes with bytes that the socket takes at once.
    Flush(peer);
    looks_taken_total_.Add(1);
    if (peer.out.empty() &&
        wire::SendDescriptor(peer.socket.get(), bytes, answer.seen->memory.get()).ok()) {
      return;
    }
    reply = {};
  }
  (void)wire::Encode(reply, request, &peer.out);  // a few bytes
}

Status Server::OnHandInLook(Peer& peer, const wire::HandInLook& look) {
  LookBoard::Seen seen{.memory = std::move(peer.received),
                       .list = look.list,
                       .files = look.files,
                       .bytes = 0,
                       .charge = nullptr};
  constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  struct stat st = {};
  if (!seen.memory.valid() || fstat(seen.memory.get(), &st) != 0 ||
      (fcntl(seen.memory.get(), F_GET_SEALS) & kSeals) != kSeals || look.files > kLargestImage ||
      static_cast<uint64_t>(st.st_size) != look.files * sizeof(SeenFile)) {
    return Status(Code::kInvalidArgument, "what a look has found did not come along");
  }
  seen.bytes = static_cast<uint64_t>(st.st_size);
  // Not more than samples can do without.
  Result<MemoryShare> share = engine_.Lend(seen.bytes, engine_.budget() / 2);
  if (!share) return share.error();
  seen.charge = std::make_shared<MemoryShare>(*std::move(share));
  if (!board_.HandIn(peer.id, look.ticket, std::move(seen), SteadyClock().Now())) {
    return Status(Code::kResourceExhausted, "this look is not kept for others");
  }
  looks_handed_in_total_.Add(1);
  return Status();
}

void Server::DropLooksOfEnded(const Peer& asker) {
  // A program that follows another one of its job must not get what that one saw.
  std::vector<pollfd> fds;
  std::vector<uint64_t> ids;
  for (const auto& [id, peer] : peers_) {
    if (id == asker.id) continue;
    for (const int fd : {peer->socket.get(), peer->process.get()}) {
      if (fd < 0) continue;
      const bool process = fd == peer->process.get();
      fds.push_back({fd, static_cast<short>(process ? POLLIN : POLLRDHUP), 0});
      ids.push_back(id);
    }
  }
  if (poll(fds.data(), fds.size(), 0) <= 0) return;
  for (size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents != 0) board_.Gone(ids[i]);
  }
}

}  // namespace forebay
