#include "port/socket_port.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <limits>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/crc32c.h"
#include "base/fork.h"
#include "port/job_name.h"
#include "wire/socket.h"

namespace forebay {
namespace {

// What an answer may take beyond the wait that was asked for; a server that does not move for so
// long is as good as dead. Training must not stand still for 5 s.
constexpr Nanos kGrace = 4 * kSecond;
constexpr Nanos kLongestWait = 3600 * kSecond;
// Releases that may wait for the next request. The bytes they hold are kept small too: other
// processes may be waiting for that memory.
constexpr size_t kReleasesHeld = 16;
constexpr uint64_t kReleaseBytesHeld = uint64_t{1} << 20;
constexpr size_t kReceiveBytes = size_t{16} << 10;
constexpr size_t kDeclarePart = size_t{1} << 20;  // samples in a message
// A fetch is asked for anew after so long, then after twice as long: a server that does not move is
// found out kGrace after the first of these, however long the storage may take. The read goes on.
constexpr Nanos kFirstFetch = kSecond;
constexpr Nanos kSlice = 100 * kMilli;  // of a wait, before it is asked whether the server lives
constexpr Nanos kImageWait = 60 * kSecond;
// Memory that was refused: how soon to ask again while waiting for it, and without a need.
constexpr Nanos kLendRetry = 10 * kMilli;
constexpr Nanos kRefused = 200 * kMilli;

timeval ToTimeval(Nanos time) {
  return {static_cast<time_t>(time / kSecond), static_cast<suseconds_t>(time % kSecond / kMicro)};
}

Status WriteAll(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "copying a catalog");
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return Status();
}

}  // namespace

SocketPort::SocketPort(OwnedFd socket, OwnedFd server, std::string path, bool rings, bool viewer)
    : fork_generation_(ForkGeneration()),
      path_(std::move(path)),
      rings_(rings),
      viewer_(viewer),
      socket_(std::move(socket)),
      server_(std::move(server)),
      shares_(std::make_shared<Shares>(this)),
      decoding_(std::make_unique<OwnDecoding>()) {}

Result<std::unique_ptr<SocketPort>> SocketPort::Attach(const std::string& socket_path,
                                                       Nanos timeout, bool rings, bool viewer) {
  const Nanos limit = std::clamp(timeout, kMilli, kLongestWait);
  const Nanos deadline = SteadyClock().Now() + limit;
  const Result<sockaddr_un> address = wire::SocketAddress(socket_path);
  if (!address) return address.error();
  OwnedFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus(errno, "making a socket");
  // Bounds a connect that waits for room in the server's queue.
  const timeval bound = ToTimeval(limit);
  (void)setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);
  int connected = -1;
  do {
    connected =
        connect(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address);
  } while (connected != 0 && errno == EINTR && SteadyClock().Now() < deadline);
  if (connected != 0) {
    // A socket that nobody listens at, or that is gone, means the same: there is no engine.
    const Status error = ErrnoStatus(errno, StrCat("connecting to the engine at ", socket_path));
    const bool refused = error.code() == Code::kPermissionDenied;
    return Status(refused ? Code::kPermissionDenied : Code::kUnavailable, error.message());
  }
  const Result<pid_t> peer = wire::CheckPeer(socket.get());
  if (!peer) return peer.error();
  Result<OwnedFd> server = wire::WatchProcess(*peer);
  // A forked child of the server's process can hold its socket open after its end.
  if (!server)
    return Status(Code::kUnavailable, StrCat(socket_path, ": ", server.error().message()));
  if (fcntl(socket.get(), F_SETFL, O_NONBLOCK) != 0) return ErrnoStatus(errno, "fcntl of a socket");
  std::unique_ptr<SocketPort> client(
      new SocketPort(std::move(socket), *std::move(server), socket_path, rings, viewer));
  FOREBAY_RETURN_IF_ERROR(client->Greet(deadline));
  return client;
}

SocketPort::~SocketPort() {
  // A forked child holds the socket, too: only this tells the server that we are gone. The child's
  // own copy is its parent's connection, and its parent's locks may be held.
  if (fork_generation_ != ForkGeneration()) {
    (void)decoding_.release();
    return;
  }
  shutdown(socket_.get(), SHUT_RDWR);
  MutexLock lock(shares_->mutex);
  shares_->port = nullptr;
}

Status SocketPort::Greet(Nanos deadline) {
  MutexLock call(call_mutex_);
  {
    MutexLock lock(write_mutex_);
    wire::Hello hello;
    hello.pid = static_cast<uint32_t>(getpid());
    hello.viewer = viewer_;
    FOREBAY_RETURN_IF_ERROR(wire::Encode(hello, 0, &out_));
    FOREBAY_RETURN_IF_ERROR(Send(out_, deadline));
  }
  OwnedFd memory;
  wire::Frame frame;
  while (true) {
    const Result<bool> whole = in_.Next(&frame);
    if (!whole) return whole.error();
    if (*whole) break;
    FOREBAY_RETURN_IF_ERROR(Await(POLLIN, deadline));
    const Result<size_t> got =
        wire::ReceiveDescriptor(socket_.get(), in_.Room(kReceiveBytes), &memory);
    if (!got) return got.error();
    in_.Filled(*got);
  }
  if (frame.header.type == wire::Type::kStatusReply) {
    Status refusal;
    FOREBAY_RETURN_IF_ERROR(wire::DecodeStatus(frame, &refusal));
    return refusal.ok() ? Status(Code::kDataLoss, "an empty answer to Hello") : refusal;
  }
  FOREBAY_RETURN_IF_ERROR(wire::Decode(frame, &hello_));
  struct stat st = {};
  if (!memory.valid() || fstat(memory.get(), &st) != 0) {
    return Status(Code::kDataLoss, "the engine's arena did not come with its answer");
  }
  // Reading past the end of the file would raise SIGBUS.
  if (st.st_size < 0 || hello_.arena_bytes == 0 ||
      static_cast<uint64_t>(st.st_size) < hello_.arena_bytes) {
    return Status(Code::kDataLoss, StrCat("the engine's arena has ", st.st_size,
                                          " bytes and should have ", hello_.arena_bytes));
  }
  void* base = mmap(nullptr, hello_.arena_bytes, PROT_READ, MAP_SHARED, memory.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "mapping the engine's arena");
  arena_ = Mapping(base, hello_.arena_bytes);
  return Status();
}

Status SocketPort::Alive() const {
  if (fork_generation_ != ForkGeneration()) {
    return Status(Code::kCancelled,
                  "this connection belongs to the parent process; a forked child makes its own");
  }
  if (lost_.load(std::memory_order_relaxed)) {
    return Status(Code::kUnavailable,
                  StrCat("the connection to the engine at ", path_, " is lost"));
  }
  return Status();
}

Status SocketPort::Lose(const Status& why) {
  lost_.store(true);
  if (loans_.load() == 0) shutdown(socket_.get(), SHUT_RDWR);
  return Status(Code::kUnavailable,
                StrCat("the connection to the engine at ", path_, " is lost: ", why.message()));
}

Status SocketPort::Hold(LeaseId lease, uint64_t bytes, std::shared_ptr<Stream> ring) {
  loans_.fetch_add(1);
  if (lost_.load()) {
    LetGo();
    return Alive();
  }
  held_[lease] = {bytes, std::move(ring)};
  return Status();
}

void SocketPort::LetGo() {
  if (loans_.fetch_sub(1) == 1 && lost_.load()) shutdown(socket_.get(), SHUT_RDWR);
}

Status SocketPort::Await(short events, Nanos deadline) {
  while (true) {
    const Nanos left = deadline - SteadyClock().Now();
    if (left <= 0) return Status(Code::kDeadlineExceeded, "no answer in time");
    std::array<pollfd, 2> fds = {pollfd{socket_.get(), events, 0},
                                 pollfd{server_.get(), POLLIN, 0}};
    const timespec bound = {static_cast<time_t>(left / kSecond), static_cast<long>(left % kSecond)};
    const int ready = ppoll(fds.data(), server_.valid() ? 2 : 1, &bound, nullptr);
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "waiting for the engine");
    if (ready <= 0) continue;
    if (fds[0].revents != 0) return Status();
    return Status(Code::kUnavailable, "the engine's process has ended");
  }
}

Status SocketPort::Send(std::vector<std::byte>& bytes, Nanos deadline) {
  size_t sent = 0;
  Status status;
  while (sent < bytes.size() && status.ok()) {
    const ssize_t n =
        send(socket_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      status = Await(POLLOUT, deadline);
    } else if (errno != EINTR) {
      status = ErrnoStatus(errno, "sending to the engine's process");
    }
  }
  bytes.clear();
  return status.ok() ? status : Lose(status);
}

Status SocketPort::AppendReleases() {
  if (releases_.leases.empty()) return Status();
  FOREBAY_RETURN_IF_ERROR(wire::Encode(releases_, 0, &out_));
  releases_.leases.clear();
  release_bytes_ = 0;
  return Status();
}

Status SocketPort::SendReleasesBy(Nanos deadline) {
  FOREBAY_RETURN_IF_ERROR(AppendReleases());
  return Send(out_, deadline);
}

Status SocketPort::Receive(uint64_t request, Nanos deadline, wire::Frame* out) {
  while (true) {
    const Result<bool> whole = in_.Next(out);
    if (!whole) return whole.error();
    if (*whole) {
      if (out->header.request == request) return Status();
      return Status(Code::kDataLoss, "an answer to another request");
    }
    FOREBAY_RETURN_IF_ERROR(Await(POLLIN, deadline));
    const Result<size_t> got =
        wire::ReceiveDescriptor(socket_.get(), in_.Room(kReceiveBytes), &received_);
    if (!got) return got.error();
    in_.Filled(*got);
  }
}

template <typename Request, typename Reply>
Status SocketPort::Call(const Request& request, Nanos wait, Reply* reply, int descriptor) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const Nanos deadline = SteadyClock().Now() + wait + kGrace;
  const uint64_t id = next_request_++;
  {
    MutexLock lock(write_mutex_);
    FOREBAY_RETURN_IF_ERROR(AppendReleases());
    const Status encoded = wire::Encode(request, id, &out_);
    if (!encoded.ok()) {
      FOREBAY_RETURN_IF_ERROR(Send(out_, deadline));
      return encoded;
    }
    if (descriptor < 0) {
      FOREBAY_RETURN_IF_ERROR(Send(out_, deadline));
    } else {
      // One request at a time, and the server has read the last: the socket takes a few bytes
      // whole.
      const Status sent = wire::SendDescriptor(socket_.get(), out_, descriptor);
      out_.clear();
      if (!sent.ok()) return Lose(sent);
    }
    answer_awaited_ = true;
  }
  wire::Frame frame;
  const Status received = Receive(id, deadline, &frame);
  {
    MutexLock lock(write_mutex_);
    answer_awaited_ = false;
  }
  if (!received.ok()) return Lose(received);
  if (frame.header.type == wire::Type::kStatusReply) {
    Status answer;
    const Status decoded = wire::DecodeStatus(frame, &answer);
    if (!decoded.ok()) return Lose(decoded);
    if (!answer.ok() || std::is_same_v<Reply, wire::StatusReply>) return answer;
  }
  const Status decoded = wire::Decode(frame, reply);
  return decoded.ok() ? decoded : Lose(decoded);
}

Result<StreamId> SocketPort::OpenStream(const StreamOptions& options) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::OpenStream request;
  request.options = options;
  std::string& job = request.options.shape.job;
  job = job.empty() ? JobName() : CleanJobName(job);
  request.ring = rings_ && !options.shape.itemised;
  wire::OpenStreamReply reply;
  auto stream = std::make_shared<Stream>();
  MutexLock call(call_mutex_);
  received_.Reset();
  FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
  if (reply.ring_slots != 0) {
    const OwnedFd memory = std::move(received_);
    Result<wire::RingReader> reader =
        wire::RingReader::Map(memory, {reply.ring_slots, reply.ring_samples});
    if (!reader) return Lose(reader.error());
    stream->ring = true;
    stream->reader = *std::move(reader);
  }
  MutexLock lock(streams_mutex_);
  streams_[reply.stream] = std::move(stream);
  return reply.stream;
}

Result<DatasetId> SocketPort::AddDataset(const Catalog& catalog, const std::string& delay) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::span<const std::byte> image = catalog.image();
  wire::OpenDataset request;
  request.fingerprint = catalog.fingerprint();
  request.image_bytes = image.size();
  request.image_crc = Crc32c(image);
  request.delay = delay;
  request.stamps_hash = catalog.StampsHash();
  wire::OpenDatasetReply reply;
  MutexLock call(call_mutex_);
  const Status known = Call(request, 0, &reply);
  if (known.ok()) return reply.dataset;
  if (known.code() != Code::kNotFound) return known;
  const OwnedFd memory(memfd_create("forebay-catalog", MFD_CLOEXEC));
  if (!memory.valid()) return ErrnoStatus(errno, "making memory for a catalog");
  FOREBAY_RETURN_IF_ERROR(WriteAll(memory.get(), image));
  if (request.stamps_hash != 0) {
    FOREBAY_RETURN_IF_ERROR(WriteAll(memory.get(), std::as_bytes(std::span(*catalog.stamps()))));
  }
  request.has_image = true;
  FOREBAY_RETURN_IF_ERROR(Call(request, kImageWait, &reply, memory.get()));
  return reply.dataset;
}

Result<DatasetId> SocketPort::OpenDataset(std::shared_ptr<const Catalog> catalog,
                                          const std::string& delay) {
  const Result<DatasetId> id = AddDataset(*catalog, delay);
  if (!id) return id;
  MutexLock lock(streams_mutex_);
  Opened& opened = catalogs_[*id];
  opened.catalog = std::move(catalog);
  ++opened.times;
  return id;
}

void SocketPort::CloseDataset(DatasetId dataset) {
  if (!Alive().ok()) return;
  {
    MutexLock lock(streams_mutex_);
    const auto found = catalogs_.find(dataset);
    if (found == catalogs_.end()) return;
    if (--found->second.times == 0) catalogs_.erase(found);
  }
  wire::CloseDataset message;
  message.dataset = dataset;
  MutexLock lock(write_mutex_);
  (void)Tell(message);  // a lost connection has closed it
}

std::shared_ptr<const Catalog> SocketPort::Find(DatasetId dataset) {
  if (fork_generation_ != ForkGeneration()) return nullptr;
  MutexLock lock(streams_mutex_);
  const auto found = catalogs_.find(dataset);
  return found == catalogs_.end() ? nullptr : found->second.catalog;
}

Result<std::string> SocketPort::Query(uint8_t what, StreamId stream) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Query request;
  request.what = what;
  request.stream = stream;
  wire::Text reply;
  MutexLock call(call_mutex_);
  FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
  return std::move(reply.text);
}

Result<wire::AskLookReply> SocketPort::AskLook(const wire::AskLook& request, OwnedFd* memory) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::AskLookReply reply;
  MutexLock call(call_mutex_);
  received_.Reset();
  FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
  *memory = std::move(received_);
  return reply;
}

Status SocketPort::HandInLook(const wire::HandInLook& look, const OwnedFd& memory) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::StatusReply reply;
  MutexLock call(call_mutex_);
  return Call(look, 0, &reply, memory.get());
}

void SocketPort::TellLookProgress(uint64_t ticket) {
  if (!Alive().ok()) return;
  wire::LookProgress message;
  message.ticket = ticket;
  MutexLock lock(write_mutex_);
  (void)Tell(message);
}

void SocketPort::DropLook(uint64_t ticket) {
  if (!Alive().ok()) return;
  wire::DropLook message;
  message.ticket = ticket;
  MutexLock lock(write_mutex_);
  (void)Tell(message);  // a lost connection has dropped it
}

Status SocketPort::SetKnobs(std::vector<std::string> names, std::vector<int64_t> values) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::SetKnobs request;
  request.names = std::move(names);
  request.values = std::move(values);
  wire::StatusReply reply;
  MutexLock call(call_mutex_);
  return Call(request, 0, &reply);
}

Status SocketPort::SetPolicy(std::string json) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::SetPolicy request;
  request.json = std::move(json);
  wire::StatusReply reply;
  MutexLock call(call_mutex_);
  return Call(request, 0, &reply);
}

Status SocketPort::Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order,
                           bool last) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock call(call_mutex_);  // the parts of one order stay together
  size_t at = 0;
  do {
    const size_t n = std::min(order.size() - at, kDeclarePart);
    wire::Declare request;
    request.stream = stream;
    request.epoch = epoch;
    request.last = last;
    request.more = at + n < order.size();
    const auto begin = order.begin() + static_cast<int64_t>(at);
    request.order.assign(begin, begin + static_cast<int64_t>(n));
    wire::StatusReply reply;
    FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
    at += n;
  } while (at < order.size());
  return Status();
}

Status SocketPort::Seek(StreamId stream, uint64_t epoch, uint64_t position) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Seek request;
  request.stream = stream;
  request.epoch = epoch;
  request.position = position;
  wire::StatusReply reply;
  const std::shared_ptr<Stream> state = FindStream(stream);
  if (state == nullptr) {
    MutexLock call(call_mutex_);
    return Call(request, 0, &reply);
  }
  // Nobody takes from the ring while the server takes back what it announced.
  MutexLock lock(state->mutex);
  MutexLock call(call_mutex_);
  FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
  state->ended = false;
  state->waited = 0;
  (void)state->epochs.End(SteadyClock().Now());
  return Status();
}

Status SocketPort::CloseStream(StreamId stream) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::CloseStream request;
  request.stream = stream;
  if (const std::shared_ptr<Stream> state = FindStream(stream); state != nullptr) {
    {
      MutexLock lock(streams_mutex_);
      streams_.erase(stream);
    }
    {
      MutexLock lock(write_mutex_);
      state->closed.store(true, std::memory_order_relaxed);
    }
    if (state->ring) state->reader.Wake();
  }
  wire::StatusReply reply;
  MutexLock call(call_mutex_);
  return Call(request, 0, &reply);
}

template <typename Request>
Result<TakeKind> SocketPort::Ask(const Request& request, Nanos wait, BatchLoan* out, Waits* waits) {
  MutexLock call(call_mutex_);
  FOREBAY_RETURN_IF_ERROR(Call(request, wait, &loan_));
  const size_t causes = std::min(loan_.waits.size(), waits->size());
  for (size_t i = 0; i < causes; ++i) (*waits)[i] = static_cast<Nanos>(loan_.waits[i]);
  const auto kind = static_cast<TakeKind>(loan_.kind);
  if (kind != TakeKind::kBatch) return kind;
  out->lease = loan_.lease;
  out->stream = loan_.stream;
  out->dataset = loan_.dataset;
  out->base = arena_.data();
  out->epoch = loan_.epoch;
  out->index = loan_.index;
  out->samples.swap(loan_.samples);
  out->offsets.swap(loan_.offsets);
  out->lengths.swap(loan_.lengths);
  uint64_t bytes = 0;
  FOREBAY_RETURN_IF_ERROR(CheckLoan(*out, &bytes));
  MutexLock lock(write_mutex_);
  FOREBAY_RETURN_IF_ERROR(Hold(out->lease, bytes, nullptr));
  return kind;
}

Status SocketPort::CheckLoan(const BatchLoan& loan, uint64_t* bytes) {
  *bytes = 0;
  for (size_t i = 0; i < loan.samples.size(); ++i) {
    if (loan.offsets[i] > arena_.size() || loan.lengths[i] > arena_.size() - loan.offsets[i]) {
      return Lose(Status(Code::kDataLoss, "a loan outside of the arena"));
    }
    *bytes += loan.lengths[i];
  }
  return Status();
}

std::shared_ptr<SocketPort::Stream> SocketPort::FindStream(StreamId stream) {
  MutexLock lock(streams_mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? nullptr : found->second;
}

Result<TakeKind> SocketPort::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> state = FindStream(stream);
  if (state != nullptr && state->ring) return TakeFromRing(stream, state, wait, out);
  wire::Take request;
  request.stream = stream;
  request.wait_ns = std::clamp<Nanos>(wait, 0, kLongestWait);
  const Nanos start = SteadyClock().Now();
  Waits waits{};
  Result<TakeKind> kind = Ask(request, request.wait_ns, out, &waits);
  if (state != nullptr && kind) {
    const Nanos now = SteadyClock().Now();
    const auto most = std::max_element(waits.begin(), waits.end()) - waits.begin();
    MutexLock lock(state->mutex);
    state->epochs.Begin(start);
    state->waited += now - start;
    state->Account(*kind, *out, static_cast<StallCause>(most), now);
  }
  return kind;
}

Result<TakeKind> SocketPort::TakeReady(StreamId id, const std::shared_ptr<Stream>& stream,
                                       BatchLoan* out) {
  const Nanos now = SteadyClock().Now();
  wire::RingEntry entry;
  std::string error;
  MutexLock lock(stream->mutex);
  stream->epochs.Begin(now);
  if (stream->ended) return TakeKind::kEndOfStream;
  const Result<bool> there =
      stream->reader.Take(&entry, &out->samples, &out->offsets, &out->lengths, &error);
  if (!there) return Lose(there.error());
  if (!*there) {
    ++stream->empty;
    return TakeKind::kPending;
  }
  // A lost connection shows when the ring is empty; this batch is a right one.
  const StallCause cause =
      entry.cause < kStallCauses ? static_cast<StallCause>(entry.cause) : StallCause::kSource;
  if (entry.kind == wire::RingEntry::kError) return Status(entry.code, std::move(error));
  if (entry.kind == wire::RingEntry::kNoRoom) return Lose(Status(entry.code, std::move(error)));
  const auto kind = static_cast<TakeKind>(entry.kind);
  if (kind == TakeKind::kBatch) {
    out->lease = entry.lease;
    out->stream = id;
    out->dataset = entry.dataset;
    out->base = arena_.data();
    out->epoch = entry.epoch;
    out->index = entry.index;
    uint64_t bytes = 0;
    FOREBAY_RETURN_IF_ERROR(CheckLoan(*out, &bytes));
    MutexLock write(write_mutex_);
    FOREBAY_RETURN_IF_ERROR(Hold(out->lease, bytes, stream));
  }
  stream->ended = kind == TakeKind::kEndOfStream;
  stream->last_cause = cause;
  stream->Account(kind, *out, cause, now);
  return kind;
}

Result<TakeKind> SocketPort::TakeFromRing(StreamId id, const std::shared_ptr<Stream>& stream,
                                          Nanos wait, BatchLoan* out) {
  const Nanos deadline = SteadyClock().Now() + std::clamp<Nanos>(wait, 0, kLongestWait);
  while (true) {
    FOREBAY_RETURN_IF_ERROR(Alive());
    if (stream->closed.load(std::memory_order_relaxed)) {
      return Status(Code::kCancelled, "the stream was closed");
    }
    const Result<TakeKind> kind = TakeReady(id, stream, out);
    if (!kind || *kind != TakeKind::kPending) return kind;
    FOREBAY_RETURN_IF_ERROR(ServerLives());
    uint32_t seen = 0;
    {
      MutexLock lock(stream->mutex);
      if (stream->reader.Want(&seen)) {
        MutexLock write(write_mutex_);
        FOREBAY_RETURN_IF_ERROR(SendNudge());
      }
    }
    const Nanos start = SteadyClock().Now();
    if (start >= deadline) return TakeKind::kPending;
    stream->reader.Wait(seen, std::min(deadline - start, kSlice));
    const Nanos waited = SteadyClock().Now() - start;
    MutexLock lock(stream->mutex);
    stream->waited += waited;
    // No more than a slice counts: this process may have been stopped, and the daemon with it.
    stream->silent += std::min(waited, kSlice);
    if (const uint32_t beat = stream->reader.beat(); beat != stream->beat) {
      stream->beat = beat;
      stream->silent = 0;
    }
    if (stream->silent > kGrace) {
      return Lose(Status(Code::kUnavailable, "the engine's process does not move"));
    }
  }
}

void SocketPort::Stream::Account(TakeKind kind, const BatchLoan& loan, StallCause cause,
                                 Nanos now) {
  epochs.Waited(cause, std::exchange(waited, 0));
  switch (kind) {
    case TakeKind::kBatch: {
      uint64_t bytes = 0;
      for (const uint32_t length : loan.lengths) bytes += length;
      epochs.Count(loan.epoch, loan.samples.size(), bytes, now);
      return;
    }
    case TakeKind::kEndOfEpoch:
      (void)epochs.End(now);
      return;
    case TakeKind::kEndOfStream:
      epochs.EndOfStream();
      return;
    case TakeKind::kPending:
      return;
  }
}

Result<std::vector<EpochStats>> SocketPort::Stats(StreamId id) {
  // A forked child's locks may be held for ever.
  if (fork_generation_ != ForkGeneration()) return Alive();
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) {
    return Status(Code::kInvalidArgument, StrCat("stream ", id, " was not opened by this client"));
  }
  std::vector<EpochStats> out;
  {
    MutexLock lock(stream->mutex);
    out = stream->epochs.Stats(SteadyClock().Now());
  }
  wire::Stats request;
  request.stream = id;
  wire::StatsReply reply;
  MutexLock call(call_mutex_);
  // Without the server the reads stay 0; the rest is known here.
  if (!Call(request, 0, &reply).ok()) return out;
  for (EpochStats& stats : out) {
    for (size_t i = 0; i < reply.epochs.size(); ++i) {
      if (reply.epochs[i] != stats.epoch) continue;
      stats.source_reads = reply.reads[i];
      stats.source_bytes = reply.bytes[i];
      stats.peer_reads = reply.peer_reads[i];
      stats.peer_bytes = reply.peer_bytes[i];
    }
  }
  return out;
}

uint64_t SocketPort::EmptyRings(StreamId id) {
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return 0;
  MutexLock lock(stream->mutex);
  return stream->empty;
}

Status SocketPort::ServerLives() {
  FOREBAY_RETURN_IF_ERROR(Alive());
  std::array<pollfd, 2> fds = {pollfd{socket_.get(), POLLRDHUP, 0},
                               pollfd{server_.get(), POLLIN, 0}};
  const int ready = poll(fds.data(), server_.valid() ? 2 : 1, 0);
  if (ready <= 0) return Status();
  return Lose(Status(Code::kUnavailable, "the engine's process has ended"));
}

StallCause SocketPort::WaitCause(StreamId id) {
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return StallCause::kSource;
  MutexLock lock(stream->mutex);
  return stream->last_cause;
}

template <typename Message>
Status SocketPort::Tell(const Message& message) {
  FOREBAY_RETURN_IF_ERROR(AppendReleases());
  FOREBAY_RETURN_IF_ERROR(wire::Encode(message, 0, &out_));
  return Send(out_, SteadyClock().Now() + kGrace);
}

Status SocketPort::SendNudge() { return Tell(wire::Nudge()); }

Result<std::shared_ptr<void>> SocketPort::Lend(uint64_t bytes, uint64_t leave, Nanos wait) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const Nanos start = SteadyClock().Now();
  if (wait == 0) {
    MutexLock lock(streams_mutex_);
    if (start < ask_again_) return Status(Code::kResourceExhausted, "refused a moment ago");
  }
  while (true) {
    const Result<uint64_t> share = AskShare(bytes, leave);
    if (share) {
      // The token's owner count is what is wanted; it points to nothing.
      const auto give_back = [shares = shares_, id = *share, fork = fork_generation_](void*) {
        if (fork != ForkGeneration()) return;  // the lock may be held for ever
        MutexLock lock(shares->mutex);
        if (shares->port != nullptr) shares->port->GiveBack(id);
      };
      return std::shared_ptr<void>(nullptr, give_back);
    }
    const Nanos now = SteadyClock().Now();
    if (share.error().code() != Code::kResourceExhausted || now - start >= wait) {
      MutexLock lock(streams_mutex_);
      if (wait == 0) ask_again_ = now + kRefused;
      return share.error();
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(kLendRetry));
  }
}

Result<uint64_t> SocketPort::AskShare(uint64_t bytes, uint64_t leave) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Lend request;
  request.bytes = bytes;
  request.leave = leave;
  wire::LendReply reply;
  MutexLock call(call_mutex_);
  FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
  return reply.share;
}

void SocketPort::GiveBack(uint64_t share) {
  if (!Alive().ok()) return;
  wire::GiveBack message;
  message.share = share;
  MutexLock lock(write_mutex_);
  (void)Tell(message);  // a lost connection has given it back
}

void SocketPort::CountStall(StreamId stream, StallCause cause, Nanos waited) {
  if (!Alive().ok()) return;
  wire::Stalled message;
  message.stream = stream;
  message.cause = static_cast<uint8_t>(cause);
  message.nanoseconds = static_cast<uint64_t>(std::max<Nanos>(waited, 0));
  MutexLock lock(write_mutex_);
  (void)Tell(message);
}

Result<ChangedFilesOf> SocketPort::ChangedFiles(StreamId stream) {
  const Result<std::string> said = Query(wire::Query::kChangedFiles, stream);
  if (!said) return said.error();
  ChangedFilesOf out;
  const char* const end = said->data() + said->size();
  const auto [rest, error] = std::from_chars(said->data(), end, out.count);
  if (error != std::errc() || rest == end || *rest != ' ') {
    return Lose(Status(Code::kDataLoss, "no count of changed files"));
  }
  out.last.assign(rest + 1, end);
  return out;
}

std::string SocketPort::WaitingFor(StreamId stream) {
  const Result<std::string> said = Query(wire::Query::kWaitingFor, stream);
  return said ? *said : said.error().ToString();
}

Result<std::string> SocketPort::MetricsText() { return Query(wire::Query::kPrometheus); }

Result<TakeKind> SocketPort::Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Fetch request;
  request.stream = stream;
  request.sample = sample;
  wait = std::clamp<Nanos>(wait, 0, kLongestWait);
  const Nanos start = SteadyClock().Now();
  Waits waits{};
  Result<TakeKind> kind = TakeKind::kPending;
  Nanos most = kFirstFetch;
  do {
    request.wait_ns = std::clamp<Nanos>(start + wait - SteadyClock().Now(), 0, most);
    Waits waited{};
    kind = Ask(request, request.wait_ns, out, &waited);
    for (size_t i = 0; i < waits.size(); ++i) waits[i] += waited[i];
    most *= 2;
  } while (kind && *kind == TakeKind::kPending && SteadyClock().Now() - start < wait);
  if (!kind) {
    const bool full = kind.error().code() == Code::kResourceExhausted;
    const StallCause cause = full ? StallCause::kMemory : StallCause::kSource;
    waits[static_cast<size_t>(cause)] = SteadyClock().Now() - start;
  }
  for (size_t i = 0; i < waits.size(); ++i) {
    if (waits[i] != 0) fetch_waits_[i].fetch_add(waits[i], std::memory_order_relaxed);
  }
  return kind;
}

std::array<Nanos, kStallCauses> SocketPort::FetchWaits() const {
  Waits waits{};
  for (size_t i = 0; i < waits.size(); ++i) {
    waits[i] = fetch_waits_[i].load(std::memory_order_relaxed);
  }
  return waits;
}

Status SocketPort::Release(LeaseId lease) {
  // A forked child's locks may be held for ever.
  if (fork_generation_ != ForkGeneration()) return Alive();
  MutexLock lock(write_mutex_);
  const auto held = held_.find(lease);
  if (held == held_.end()) return Alive();
  const Held loan = std::move(held->second);
  held_.erase(held);
  LetGo();
  FOREBAY_RETURN_IF_ERROR(Alive());
  bool tell = false;
  if (loan.ring != nullptr && !loan.ring->closed.load(std::memory_order_relaxed) &&
      loan.ring->reader.Release(lease, &tell)) {
    return tell ? SendNudge() : Status();
  }
  releases_.leases.push_back(lease);
  release_bytes_ += loan.bytes;
  const bool many = releases_.leases.size() > kReleasesHeld || release_bytes_ > kReleaseBytesHeld;
  // Another thread's Take may be waiting for this very memory.
  if (!many && !answer_awaited_) return Status();
  return SendReleasesBy(SteadyClock().Now() + kGrace);
}

void SocketPort::SendReleases() {
  if (!Alive().ok()) return;
  MutexLock lock(write_mutex_);
  if (!releases_.leases.empty()) (void)SendReleasesBy(SteadyClock().Now() + kGrace);
}

Status SocketPort::Served(uint64_t reads, uint64_t passes) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Served message;
  message.reads = reads;
  message.passes = passes;
  MutexLock lock(write_mutex_);
  return Tell(message);
}

}  // namespace forebay
