#include "daemon/server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <utility>

#include "base/fork.h"
#include "base/rng.h"
#include "base/thread.h"
#include "wire/socket.h"

namespace forebay {
namespace {

constexpr Nanos kSlice = 100 * kMilli;  // longest sleep while something waits
constexpr Nanos kIdle = 10 * kSecond;
constexpr Nanos kFirstClient = 10 * kSecond;  // who has a server started comes
constexpr Nanos kLongestWait = 3600 * kSecond;
constexpr size_t kReadBytes = size_t{16} << 10;
constexpr size_t kLongestOrder = size_t{1} << 28;
// Output buffers that one large reply has grown are given back.
constexpr size_t kOutputKept = size_t{1} << 20;
constexpr int kEventsAtOnce = 64;
constexpr uint64_t kAheadShare = 8;  // of the arena
constexpr int kBacklog = 256;

// What an epoll event is about: these, or a peer's socket (its id) or process (its id + 1).
constexpr uint64_t kListenEvent = 0;
constexpr uint64_t kWakeEvent = 1;
constexpr uint64_t kProgressEvent = 2;
constexpr uint64_t kFirstPeer = 16;

void Drain(int event_fd) {
  uint64_t count = 0;
  (void)!read(event_fd, &count, sizeof count);
}

bool SetEvents(int epoll, int operation, int fd, uint64_t what, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = what;
  return epoll_ctl(epoll, operation, fd, &event) == 0;
}

// Descriptors of forked children keep what we close alive: it has to be shut down and taken out of
// the epoll set by name.
void Disconnect(int epoll, int socket) {
  (void)SetEvents(epoll, EPOLL_CTL_DEL, socket, 0, 0);
  shutdown(socket, SHUT_RDWR);
}

// Whether the socket at `address` has a living process behind it.
bool SomebodyListens(const sockaddr_un& address) {
  const OwnedFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return errno != ECONNREFUSED && errno != ENOENT && errno != ENOTSOCK;
  }
  const Result<pid_t> peer = wire::CheckPeer(probe.get());
  // A forked child can hold the socket of its dead parent open.
  return !peer || wire::WatchProcess(*peer).has_value();
}

std::string Hex(uint32_t number) {
  std::string out;
  for (int shift = 28; shift >= 0; shift -= 4)
    out.push_back("0123456789abcdef"[number >> shift & 15]);
  return out;
}

}  // namespace

Status ServerOptions::Validate() const {
  if (max_clients < 1 || max_pending < 1) {
    return Status(Code::kInvalidArgument, "max_clients and max_pending take 1 or more");
  }
  if (max_output_bytes < wire::kMaxFrameBytes) {
    return Status(Code::kInvalidArgument, StrCat("max_output_bytes is ", max_output_bytes,
                                                 "; one reply may have ", wire::kMaxFrameBytes));
  }
  return Status();
}

Server::Server(Engine& engine, const ServerOptions& options)
    : engine_(engine),
      options_(options),
      fork_generation_(ForkGeneration()),
      clients_(engine.registry().AddGauge("forebay_daemon_clients", "Processes attached")),
      dropped_total_(engine.registry().AddCounter(
          "forebay_daemon_dropped_clients_total",
          "Processes disconnected for what they sent or did not read")),
      served_total_(
          engine.registry().AddCounter("forebay_client_served_reads_total",
                                       "Reads that attached processes answered from memory")),
      passed_total_(
          engine.registry().AddCounter("forebay_client_passed_reads_total",
                                       "Reads that attached processes left to the file system")),
      fetch_wait_total_(
          engine.registry().AddCounter("forebay_client_wait_nanoseconds_total",
                                       "Time that reads of attached processes waited here")),
      ready_batches_(engine.registry().AddGauge("forebay_daemon_ready_batches",
                                                "Batches announced to clients and not taken yet")),
      rings_(engine.registry().AddGauge("forebay_daemon_rings", "Streams served through a ring")),
      looks_handed_in_total_(engine.registry().AddCounter(
          "forebay_daemon_looks_handed_in_total",
          "Looks at all files of a data set that one rank made for its job")),
      looks_taken_total_(
          engine.registry().AddCounter("forebay_daemon_looks_taken_total",
                                       "Looks at a data set's files that a rank was spared")),
      look_bytes_(engine.registry().AddGauge("forebay_daemon_look_bytes",
                                             "Memory of looks that are kept for other ranks")),
      started_(SteadyClock().Now()),
      ahead_limit_(engine.arena_bytes() / kAheadShare),
      next_id_(kFirstPeer),
      idle_since_(started_) {}

Result<ServerPtr> Server::Start(Engine& engine, const ServerOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  ServerPtr server(new Server(engine, options));
  // Reopened, so that no client can write to other people's samples.
  server->arena_ =
      OwnedFd(open(StrCat("/proc/self/fd/", engine.arena_fd()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!server->arena_.valid()) return ErrnoStatus(errno, "opening the arena through /proc/self/fd");
  server->epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  server->wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  server->ended_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  server->listen_ = OwnedFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!server->epoll_.valid() || !server->wake_.valid() || !server->ended_.valid() ||
      !server->listen_.valid()) {
    return ErrnoStatus(errno, "making the server's descriptors");
  }
  FOREBAY_RETURN_IF_ERROR(server->Bind());
  const int epoll = server->epoll_.get();
  if (!SetEvents(epoll, EPOLL_CTL_ADD, server->listen_.get(), kListenEvent, EPOLLIN) ||
      !SetEvents(epoll, EPOLL_CTL_ADD, server->wake_.get(), kWakeEvent, EPOLLIN) ||
      !SetEvents(epoll, EPOLL_CTL_ADD, engine.progress_fd(), kProgressEvent, EPOLLIN)) {
    return ErrnoStatus(errno, "watching the server's descriptors");
  }
  Server* const self = server.get();
  auto started = StartThread("forebay-serve", [self](std::stop_token stop) { self->Run(stop); });
  if (!started) return started.error();
  server->thread_ = *std::move(started);
  return server;
}

Status Server::Bind() {
  constexpr int kAttempts = 50;
  const bool choose = options_.socket_path.empty();
  std::string folder = wire::RuntimeFolder();
  if (!choose) {
    const size_t slash = options_.socket_path.rfind('/');
    folder = slash == std::string::npos ? "." : options_.socket_path.substr(0, slash + 1);
  }
  SplitMix64 names(static_cast<uint64_t>(SteadyClock().Now()) ^ static_cast<uint64_t>(getpid())
                                                                    << 40);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    path_ = choose ? StrCat(folder, "/", getpid(), "-", Hex(static_cast<uint32_t>(names.Next())),
                            ".sock")
                   : options_.socket_path;
    const Result<sockaddr_un> address = wire::SocketAddress(path_);
    if (!address) return address.error();
    bool made = false;
    const Status there = wire::PrivateFolder(folder, &made);
    // Made by another, and removed again before it was looked at.
    if (there.code() == Code::kNotFound && attempt + 1 < kAttempts) continue;
    FOREBAY_RETURN_IF_ERROR(there);
    if (made || choose) folder_ = folder;
    // One starter at a time judges and replaces what is there.
    const OwnedFd lock(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (lock.valid() && flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(20 * kMilli));
      continue;
    }
    if (bind(listen_.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) == 0) {
      bound_ = true;
      if (listen(listen_.get(), kBacklog) == 0) return Status();
      return ErrnoStatus(errno, StrCat("listening at ", path_));
    }
    if (errno == ENOENT)
      continue;  // another server has just removed the folder as the last to leave
    if (errno != EADDRINUSE) return ErrnoStatus(errno, StrCat("binding a socket to ", path_));
    struct stat st = {};
    if (lstat(path_.c_str(), &st) != 0) continue;
    if (!S_ISSOCK(st.st_mode)) {
      return Status(Code::kInvalidArgument, StrCat(path_, " is there and is not a socket"));
    }
    if (SomebodyListens(*address)) {
      return Status(Code::kUnavailable, StrCat("another process listens at ", path_));
    }
    if (unlink(path_.c_str()) != 0 && errno != ENOENT) {
      return ErrnoStatus(errno, StrCat("removing the stale socket ", path_));
    }
  }
  return Status(Code::kUnavailable,
                StrCat("no socket could be made in ", folder, ": others keep it busy"));
}

void ServerDelete::operator()(Server* server) const {
  if (server == nullptr || server->fork_generation_ != ForkGeneration()) return;
  delete server;
}

Server::~Server() {
  if (thread_.joinable()) {
    thread_.request_stop();
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
    thread_.join();
  }
  std::vector<std::jthread> openers;
  {
    MutexLock lock(open_mutex_);
    openers.swap(openers_);
  }
  for (std::jthread& opener : openers) opener.request_stop();
  openers.clear();
  if (bound_) {
    unlink(path_.c_str());
    shutdown(listen_.get(), SHUT_RDWR);
    // Those that have connected and were not greeted yet.
    while (true) {
      const OwnedFd waiting(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!waiting.valid()) break;
      shutdown(waiting.get(), SHUT_RDWR);
    }
  }
  if (!folder_.empty()) rmdir(folder_.c_str());  // fails, rightly, while others have sockets there
  if (options_.keep_loans) return;               // the sockets close, and that is all
  AnswerOpened();
  for (auto& [id, peer] : peers_) peer->gone = true;
  some_gone_ = true;
  RemoveGone();
}

void Server::Run(std::stop_token stop) {
  std::array<epoll_event, kEventsAtOnce> events;
  while (!stop.stop_requested()) {
    Nanos now = SteadyClock().Now();
    Nanos wait = some_gone_ ? 0 : kIdle;
    StayWhileOccupied(now);
    if (!pending_.empty()) wait = std::min(wait, kSlice);
    if (ring_count_ != 0) wait = std::min(wait, SleepOnRings());
    for (const Pending& ask : pending_) wait = std::min(wait, ask.deadline - now);
    if (const Nanos over = board_.NextExpiry(); over != LookBoard::kNothing) {
      wait = std::min(wait, over - now);
    }
    if (accept_again_ != 0) wait = std::min(wait, accept_again_ - now);
    if (options_.linger != nullptr && Deserted()) wait = std::min(wait, LingerLeft(now));
    const int ready = WaitForEvents(events, wait);
    for (int i = 0; i < ready; ++i) {
      const uint64_t what = events[static_cast<size_t>(i)].data.u64;
      const uint32_t how = events[static_cast<size_t>(i)].events;
      if (what == kListenEvent) {
        Accept();
      } else if (what == kWakeEvent) {
        Drain(wake_.get());
      } else if (what == kProgressEvent) {
        Drain(engine_.progress_fd());
      } else {
        const auto found = peers_.find(what & ~uint64_t{1});
        if (found == peers_.end() || found->second->gone) continue;
        Peer& peer = *found->second;
        const bool ended = (what & 1) != 0;
        if (ended || (how & ~static_cast<uint32_t>(EPOLLOUT)) != 0) Read(peer);
        if (ended) MarkGone(peer);
        if ((how & EPOLLOUT) != 0 && !peer.gone) Flush(peer);
      }
    }
    now = SteadyClock().Now();
    if (accept_again_ != 0 && now >= accept_again_) {
      accept_again_ = 0;
      (void)SetEvents(epoll_.get(), EPOLL_CTL_MOD, listen_.get(), kListenEvent, EPOLLIN);
    }
    RemoveGone();
    AnswerOpened();
    board_.Expire(now);
    look_bytes_.Set(board_.bytes());
    if (!pending_.empty()) Retry();
    if (ring_count_ != 0) PumpAll();
    AnswerLooks();
    StayWhileOccupied(now);
    if (options_.linger == nullptr || !Deserted() || LingerLeft(now) > 0) continue;
    // Who has connected by now stays; who comes later finds a closed door and knocks elsewhere.
    Accept();
    if (!Deserted()) continue;
    const uint64_t one = 1;
    (void)!write(ended_.get(), &one, sizeof one);
    return;
  }
}

int Server::WaitForEvents(std::span<epoll_event> events, Nanos wait) {
  wait = std::max<Nanos>(wait, 0);
  const auto count = static_cast<int>(events.size());
#ifdef SYS_epoll_pwait2
  // Rings are emptied within milliseconds: whole ones are too coarse.
  const timespec bound = {static_cast<time_t>(wait / kSecond), static_cast<long>(wait % kSecond)};
  const long ready =
      syscall(SYS_epoll_pwait2, epoll_.get(), events.data(), count, &bound, nullptr, size_t{0});
  // Older kernels do not know it, and older containers' filters forbid what they do not know.
  if (ready >= 0 || errno == EINTR) return static_cast<int>(ready);
#endif
  const Nanos milliseconds = (wait + kMilli - 1) / kMilli;
  return epoll_wait(epoll_.get(), events.data(), count, static_cast<int>(milliseconds));
}

bool Server::Deserted() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const auto& entry) { return entry.second->viewer; });
}

void Server::StayWhileOccupied(Nanos now) {
  if (options_.occupied == nullptr || !options_.occupied()) return;
  had_client_ = true;
  idle_since_ = now;
}

Nanos Server::LingerLeft(Nanos now) const {
  const Nanos linger = options_.linger();
  return idle_since_ + (had_client_ ? linger : std::max(linger, kFirstClient)) - now;
}

void Server::Accept() {
  while (true) {
    OwnedFd socket(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        accept_again_ = SteadyClock().Now() + kSlice;
        (void)SetEvents(epoll_.get(), EPOLL_CTL_MOD, listen_.get(), kListenEvent, 0);
      }
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return;
    }
    const Result<pid_t> pid = wire::CheckPeer(socket.get());
    if (!pid || peers_.size() >= options_.max_clients) {
      dropped_total_.Add(1);
      shutdown(socket.get(), SHUT_RDWR);
      continue;
    }
    Result<OwnedFd> process = wire::WatchProcess(*pid);
    if (!process) continue;
    auto peer = std::make_unique<Peer>();
    peer->id = next_id_;
    next_id_ += 2;
    peer->socket = std::move(socket);
    peer->process = *std::move(process);
    const bool watched =
        SetEvents(epoll_.get(), EPOLL_CTL_ADD, peer->socket.get(), peer->id,
                  EPOLLIN | EPOLLRDHUP) &&
        (!peer->process.valid() ||
         SetEvents(epoll_.get(), EPOLL_CTL_ADD, peer->process.get(), peer->id + 1, EPOLLIN));
    if (!watched) {
      Disconnect(epoll_.get(), peer->socket.get());
      continue;
    }
    peers_.emplace(peer->id, std::move(peer));
    clients_.Set(peers_.size());
    had_client_ = true;
  }
}

void Server::Read(Peer& peer) {
  const Result<size_t> got =
      wire::ReceiveDescriptor(peer.socket.get(), peer.in.Room(kReadBytes), &peer.received);
  if (!got) {
    MarkGone(peer);
    return;
  }
  if (*got == 0) return;
  peer.in.Filled(*got);
  while (!peer.gone) {
    wire::Frame frame;
    const Result<bool> whole = peer.in.Next(&frame);
    if (whole && !*whole) break;
    if (!whole || !OnFrame(peer, frame).ok()) {
      dropped_total_.Add(1);
      MarkGone(peer);
    }
  }
  if (!peer.gone) Flush(peer);
}

Status Server::OnFrame(Peer& peer, const wire::Frame& frame) {
  if (!peer.greeted) return OnHello(peer, frame);
  const uint64_t request = frame.header.request;
  switch (frame.header.type) {
    case wire::Type::kTake: {
      wire::Take take;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &take));
      Pending ask;
      ask.request = request;
      ask.stream = take.stream;
      return OnAsk(peer, ask, take.wait_ns);
    }
    case wire::Type::kFetch: {
      wire::Fetch fetch;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &fetch));
      Pending ask;
      ask.request = request;
      ask.fetch = true;
      ask.stream = fetch.stream;
      ask.sample = fetch.sample;
      return OnAsk(peer, ask, fetch.wait_ns);
    }
    case wire::Type::kRelease: {
      wire::Release release;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &release));
      for (const LeaseId lease : release.leases) {
        // Nobody gives back what another one reads.
        if (peer.leases.erase(lease) != 0) FOREBAY_RETURN_IF_ERROR(engine_.Release(lease));
      }
      return Status();
    }
    case wire::Type::kOpenStream: {
      wire::OpenStream open;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &open));
      OnOpenStream(peer, request, open);
      return Status();
    }
    case wire::Type::kDeclare: {
      wire::Declare declare;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &declare));
      const Status allowed = MayMove(peer, declare.stream);
      Reply(peer, request, allowed.ok() ? OnDeclare(peer, declare) : allowed);
      return Status();
    }
    case wire::Type::kSeek: {
      wire::Seek seek;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &seek));
      const Status allowed = MayMove(peer, seek.stream);
      Reply(peer, request, allowed.ok() ? OnSeek(peer, seek) : allowed);
      return Status();
    }
    case wire::Type::kCloseStream: {
      wire::CloseStream close;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &close));
      Status closed;
      DropRing(peer, close.stream);
      if (peer.streams.erase(close.stream) != 0) {
        closed = engine_.CloseStream(close.stream);
      } else {
        closed = Status(Code::kInvalidArgument,
                        StrCat("stream ", close.stream, " was not opened by this client"));
      }
      Reply(peer, request, closed);
      return Status();
    }
    case wire::Type::kServed: {
      wire::Served served;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &served));
      served_total_.Add(served.reads);
      passed_total_.Add(served.passes);
      return Status();
    }
    case wire::Type::kOpenDataset: {
      wire::OpenDataset open;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &open));
      const Status refused = OnOpenDataset(peer, request, open);
      if (!refused.ok()) Reply(peer, request, refused);
      return Status();
    }
    case wire::Type::kCloseDataset: {
      wire::CloseDataset close;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &close));
      OnCloseDataset(peer, close.dataset);
      return Status();
    }
    case wire::Type::kQuery: {
      wire::Query query;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &query));
      OnQuery(peer, request, query);
      return Status();
    }
    case wire::Type::kStats: {
      wire::Stats stats;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &stats));
      OnStats(peer, request, stats.stream);
      return Status();
    }
    case wire::Type::kSetKnobs: {
      wire::SetKnobs set;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &set));
      Reply(peer, request, OnSetKnobs(set));
      return Status();
    }
    case wire::Type::kSetPolicy: {
      wire::SetPolicy set;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &set));
      const Status none(Code::kUnimplemented, "this engine follows no policy");
      Reply(peer, request, options_.set_policy ? options_.set_policy(set.json) : none);
      return Status();
    }
    case wire::Type::kLend: {
      wire::Lend lend;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &lend));
      OnLend(peer, request, lend);
      return Status();
    }
    case wire::Type::kGiveBack: {
      wire::GiveBack back;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &back));
      peer.shares.erase(back.share);
      return Status();
    }
    case wire::Type::kStalled: {
      wire::Stalled stalled;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &stalled));
      OnStalled(peer, stalled);
      return Status();
    }
    case wire::Type::kAskLook: {
      wire::AskLook ask;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &ask));
      OnAskLook(peer, request, ask);
      return Status();
    }
    case wire::Type::kLookProgress: {
      wire::LookProgress progress;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &progress));
      board_.Progress(peer.id, progress.ticket, SteadyClock().Now());
      return Status();
    }
    case wire::Type::kHandInLook: {
      wire::HandInLook look;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &look));
      const Status taken = OnHandInLook(peer, look);
      if (!taken.ok()) board_.Drop(peer.id, look.ticket, SteadyClock().Now());
      Reply(peer, request, taken);
      return Status();
    }
    case wire::Type::kDropLook: {
      wire::DropLook drop;
      FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &drop));
      if (drop.ticket == 0) board_.Wrote(peer.id);
      board_.Drop(peer.id, drop.ticket, SteadyClock().Now());
      return Status();
    }
    case wire::Type::kNudge:
      return Status();  // the rings are looked at after every round
    default:
      return Status(Code::kDataLoss, "a message that only a server sends");
  }
}

Status Server::OnHello(Peer& peer, const wire::Frame& frame) {
  wire::Hello hello;
  FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &hello));
  if (hello.protocol != wire::kProtocol) {
    const Status refusal(Code::kUnimplemented,
                         StrCat("this client speaks protocol ", hello.protocol, " and the engine ",
                                wire::kProtocol, "; use one version of Forebay for both"));
    Reply(peer, frame.header.request, refusal);
    Flush(peer);
    return refusal;
  }
  wire::HelloReply reply;
  reply.pid = static_cast<uint32_t>(getpid());
  reply.arena_bytes = engine_.arena_bytes();
  reply.budget = engine_.budget();
  reply.datasets = static_cast<uint32_t>(engine_.dataset_count());
  reply.settings = options_.settings;
  std::vector<std::byte> bytes;
  FOREBAY_RETURN_IF_ERROR(wire::Encode(reply, frame.header.request, &bytes));
  // The first bytes on an empty socket: they fit, or the client is not worth keeping.
  FOREBAY_RETURN_IF_ERROR(wire::SendDescriptor(peer.socket.get(), bytes, arena_.get()));
  peer.greeted = true;
  peer.pid = hello.pid;
  peer.viewer = hello.viewer;
  return Status();
}

void Server::OnOpenStream(Peer& peer, uint64_t request, const wire::OpenStream& open) {
  StreamOptions options = open.options;
  const wire::RingShape shape = open.ring && !options.shape.itemised
                                    ? wire::RingShape::For(options.shape.batch_size)
                                    : wire::RingShape();
  options.ahead_of_consumer = shape.slots != 0;
  const Result<StreamId> stream = engine_.OpenStream(options);
  if (!stream) {
    Reply(peer, request, stream.error());
    return;
  }
  StreamInfo info;
  info.opened = open.options;
  info.watch = StreamWatch(open.options.shape.first_epoch, SteadyClock().Now());
  peer.streams.emplace(*stream, std::move(info));
  wire::OpenStreamReply reply;
  reply.stream = *stream;
  Result<wire::RingWriter> writer = wire::RingWriter::Create(shape);
  if (!writer) {
    // Too long batches, or no descriptor left for a ring: they come when they are asked for.
    (void)wire::Encode(reply, request, &peer.out);  // a few bytes
    return;
  }
  reply.ring_slots = shape.slots;
  reply.ring_samples = shape.samples;
  std::vector<std::byte> bytes;
  (void)wire::Encode(reply, request, &bytes);
  // The descriptor goes with bytes that the socket takes at once; what was to be said before that
  // has gone out, as the client asks one thing at a time.
  Flush(peer);
  Status sent;
  if (!peer.out.empty()) {
    sent = Status(Code::kUnavailable, "this client does not read its replies");
  }
  if (sent.ok()) sent = wire::SendDescriptor(peer.socket.get(), bytes, writer->fd());
  if (!sent.ok()) {
    peer.streams.erase(*stream);
    (void)engine_.CloseStream(*stream);
    Reply(peer, request, sent);
    return;
  }
  auto ring = std::make_unique<Ring>(*stream, *std::move(writer));
  const auto catalog = engine_.shared_catalog(options.shape.dataset);  // its stream keeps it
  const uint64_t count = std::min<uint64_t>(catalog->size(), options.shape.batch_size);
  ring->batch_bytes = catalog->total_bytes() / std::max<uint64_t>(catalog->size(), 1) * count;
  peer.rings.emplace(*stream, std::move(ring));
  rings_.Set(++ring_count_);
}

Status Server::OnDeclare(Peer& peer, wire::Declare& declare) {
  if (peer.declaring &&
      (peer.declare_stream != declare.stream || peer.declare_epoch != declare.epoch)) {
    peer.declaring = false;
    peer.order = {};
    return Status(Code::kInvalidArgument, "an order began before the one before it was complete");
  }
  if (peer.order.size() + declare.order.size() > kLongestOrder) {
    peer.declaring = false;
    peer.order = {};
    return Status(Code::kResourceExhausted,
                  StrCat("an order has at most ", kLongestOrder, " samples"));
  }
  peer.order.insert(peer.order.end(), declare.order.begin(), declare.order.end());
  peer.declaring = declare.more;
  peer.declare_stream = declare.stream;
  peer.declare_epoch = declare.epoch;
  if (declare.more) return Status();
  return engine_.Declare(declare.stream, declare.epoch, std::exchange(peer.order, {}),
                         declare.last);
}

bool Server::HasRing(StreamId stream) const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [&](const auto& entry) { return entry.second->rings.contains(stream); });
}

Status Server::MayMove(const Peer& peer, StreamId stream) const {
  if (peer.rings.contains(stream) || !HasRing(stream)) return Status();
  return Status(Code::kInvalidArgument,
                StrCat("stream ", stream, " was not opened by this client"));
}

Status Server::OnAsk(Peer& peer, Pending ask, int64_t wait) {
  const Nanos now = SteadyClock().Now();
  ask.peer = &peer;
  if (HasRing(ask.stream)) {
    Reply(peer, ask.request,
          Status(Code::kInvalidArgument, "this stream's batches are announced in its ring"));
    return Status();
  }
  ask.deadline = now + std::clamp<Nanos>(wait, 0, kLongestWait);
  // A batch goes to those who asked first.
  const bool behind =
      !ask.fetch && std::any_of(pending_.begin(), pending_.end(), [&](const Pending& p) {
        return !p.fetch && p.stream == ask.stream;
      });
  if (!behind && Answer(ask, now)) return Status();
  if (peer.pending >= options_.max_pending) {
    Cancel(ask);
    Reply(peer, ask.request,
          Status(Code::kResourceExhausted,
                 StrCat("this client already has ", peer.pending, " requests waiting")));
    return Status();
  }
  ++peer.pending;
  pending_.push_back(ask);
  return Status();
}

void Server::Cancel(Pending& ask) {
  if (ask.lease != kNoLease) (void)engine_.Release(std::exchange(ask.lease, kNoLease));
}

bool Server::Answer(Pending& ask, Nanos now) {
  Result<TakeKind> kind = ask.fetch ? engine_.Fetch(ask.stream, ask.sample, 0, &ask.lease, &loan_)
                                    : engine_.Take(ask.stream, 0, &loan_);
  if (kind && *kind == TakeKind::kPending) {
    const Status blocked = engine_.Blocked(ask.stream);
    if (blocked.ok()) {
      ask.blocked_since = -1;
    } else if (ask.blocked_since < 0) {
      ask.blocked_since = now;
    } else if (now - ask.blocked_since > options_.release_wait) {
      kind = blocked;
    }
    if (kind && now < ask.deadline) {
      const StallCause cause = engine_.WaitCause(ask.stream, ask.lease);
      // What it lacks now is another thing: the rest of the wait is charged to that.
      if (cause != ask.cause) ChargeWait(ask, now);
      if (ask.since < 0) ask.since = now;
      ask.cause = cause;
      return false;
    }
  }
  Peer& peer = *ask.peer;
  ChargeWait(ask, now);
  if (!kind) {
    Cancel(ask);
    Reply(peer, ask.request, kind.error());
    return true;
  }
  reply_.kind = static_cast<uint8_t>(*kind);
  reply_.stream = ask.stream;
  reply_.samples.clear();
  reply_.offsets.clear();
  reply_.lengths.clear();
  reply_.waits.clear();
  if (std::any_of(ask.waits.begin(), ask.waits.end(), [](Nanos wait) { return wait > 0; })) {
    reply_.waits.assign(ask.waits.begin(), ask.waits.end());
  }
  StreamInfo* const info = Find(peer, ask.stream);
  if (*kind != TakeKind::kBatch) {
    Cancel(ask);
    if (*kind == TakeKind::kEndOfEpoch && info != nullptr) info->watch.EndedEpoch();
    reply_.lease = kNoLease;
    (void)wire::Encode(reply_, ask.request, &peer.out);  // a few bytes
    return true;
  }
  ask.lease = kNoLease;
  reply_.lease = loan_.lease;
  reply_.dataset = loan_.dataset;
  reply_.epoch = loan_.epoch;
  reply_.index = loan_.index;
  reply_.samples.swap(loan_.samples);
  reply_.offsets.swap(loan_.offsets);
  reply_.lengths.swap(loan_.lengths);
  const Status encoded = wire::Encode(reply_, ask.request, &peer.out);
  if (encoded.ok()) {
    uint64_t bytes = 0;
    for (const uint32_t length : reply_.lengths) bytes += length;
    peer.leases.emplace(loan_.lease, bytes);
    if (info != nullptr && ask.fetch) {
      info->watch.Fetched(loan_.epoch, reply_.samples.size(), bytes);
    } else if (info != nullptr) {
      info->watch.Took(loan_.epoch, loan_.index, reply_.samples.size(), bytes);
    }
  } else {
    (void)engine_.Release(loan_.lease);
    Reply(peer, ask.request, encoded);
  }
  return true;
}

void Server::ChargeWait(Pending& ask, Nanos now) {
  if (ask.since < 0) return;
  const Nanos since = std::exchange(ask.since, -1);
  ask.waits[static_cast<size_t>(ask.cause)] += now - since;
  if (ask.fetch) {
    // Of a worker that reads ahead of the consumer: nobody's stall yet. Its main process tells what
    // the consumer waited for.
    fetch_wait_total_.Add(static_cast<uint64_t>(now - since));
    return;
  }
  engine_.CountStall(ask.cause, now - since);
  const auto own = ask.peer->streams.find(ask.stream);
  if (own != ask.peer->streams.end()) own->second.watch.Waited(ask.cause, since, now);
}

Server::StreamInfo* Server::Find(Peer& peer, StreamId stream) {
  const auto own = peer.streams.find(stream);
  if (own != peer.streams.end()) return &own->second;
  for (auto& [id, other] : peers_) {
    const auto found = other->streams.find(stream);
    if (found != other->streams.end()) return &found->second;
  }
  return nullptr;
}

void Server::Retry() {
  // Before the asking: what happens after an ask has looked is signalled.
  engine_.ArmProgress();
  const Nanos now = SteadyClock().Now();
  size_t kept = 0;
  for (Pending& ask : pending_) {
    Peer& peer = *ask.peer;
    if (!peer.gone && Answer(ask, now)) {
      --peer.pending;
      Flush(peer);
    } else {
      pending_[kept++] = ask;
    }
  }
  pending_.resize(kept);
}

void Server::Reply(Peer& peer, uint64_t request, const Status& status) {
  wire::EncodeStatus(status, request, &peer.out);
}

void Server::Flush(Peer& peer) {
  while (peer.sent < peer.out.size()) {
    const ssize_t n = send(peer.socket.get(), peer.out.data() + peer.sent,
                           peer.out.size() - peer.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      peer.sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      MarkGone(peer);
      return;
    }
  }
  if (peer.sent == peer.out.size()) {
    peer.out.clear();
    peer.sent = 0;
    if (peer.out.capacity() > kOutputKept) peer.out.shrink_to_fit();
  } else if (peer.sent > kOutputKept) {
    peer.out.erase(peer.out.begin(), peer.out.begin() + static_cast<int64_t>(peer.sent));
    peer.sent = 0;
  }
  if (peer.out.size() - peer.sent > options_.max_output_bytes) {
    dropped_total_.Add(1);
    MarkGone(peer);
    return;
  }
  const bool wants_room = !peer.out.empty();
  if (wants_room == peer.wants_room) return;
  peer.wants_room = wants_room;
  const uint32_t events = EPOLLIN | EPOLLRDHUP | (wants_room ? EPOLLOUT : 0u);
  if (!SetEvents(epoll_.get(), EPOLL_CTL_MOD, peer.socket.get(), peer.id, events)) MarkGone(peer);
}

void Server::MarkGone(Peer& peer) {
  peer.gone = true;
  some_gone_ = true;
}

void Server::RemoveGone() {
  if (!some_gone_) return;
  some_gone_ = false;
  std::erase_if(pending_, [this](Pending& ask) {
    if (ask.peer->gone) Cancel(ask);
    return ask.peer->gone;
  });
  bool left = false;
  std::erase_if(peers_, [this, &left](auto& entry) {
    Peer& peer = *entry.second;
    if (!peer.gone) return false;
    left |= !peer.viewer;
    Disconnect(epoll_.get(), peer.socket.get());
    if (peer.process.valid())
      (void)SetEvents(epoll_.get(), EPOLL_CTL_DEL, peer.process.get(), 0, 0);
    while (!peer.rings.empty()) DropRing(peer, peer.rings.begin()->first);
    for (const auto& [lease, bytes] : peer.leases) (void)engine_.Release(lease);
    for (const auto& [stream, info] : peer.streams) (void)engine_.CloseStream(stream);
    while (!peer.datasets.empty()) OnCloseDataset(peer, peer.datasets.begin()->first);
    board_.Gone(peer.id);
    return true;
  });
  clients_.Set(peers_.size());
  if (left && Deserted()) idle_since_ = SteadyClock().Now();
}

}  // namespace forebay
