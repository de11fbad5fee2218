#include "client/socket_client.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/fork.h"
#include "wire/socket.h"

namespace forebay {
namespace {

// What an answer may take beyond the wait that was asked for.
constexpr Nanos kGrace = 5 * kSecond;
constexpr Nanos kLongestWait = 3600 * kSecond;
// Releases that may wait for the next request. The bytes they hold are kept small too: other
// processes may be waiting for that memory.
constexpr size_t kReleasesHeld = 16;
constexpr uint64_t kReleaseBytesHeld = uint64_t{1} << 20;
constexpr size_t kReceiveBytes = size_t{16} << 10;
constexpr size_t kDeclarePart = size_t{1} << 20;  // samples in a message

timeval ToTimeval(Nanos time) {
  return {static_cast<time_t>(time / kSecond), static_cast<suseconds_t>(time % kSecond / kMicro)};
}

}  // namespace

SocketClient::SocketClient(OwnedFd socket, OwnedFd server, std::string path)
    : fork_generation_(ForkGeneration()),
      path_(std::move(path)),
      socket_(std::move(socket)),
      server_(std::move(server)) {}

Result<std::unique_ptr<SocketClient>> SocketClient::Attach(const std::string& socket_path,
                                                           Nanos timeout) {
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
  std::unique_ptr<SocketClient> client(
      new SocketClient(std::move(socket), *std::move(server), socket_path));
  FOREBAY_RETURN_IF_ERROR(client->Greet(deadline));
  return client;
}

Status SocketClient::Greet(Nanos deadline) {
  MutexLock call(call_mutex_);
  {
    MutexLock lock(write_mutex_);
    wire::Hello hello;
    hello.pid = static_cast<uint32_t>(getpid());
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

Status SocketClient::Alive() const {
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

Status SocketClient::Lose(const Status& why) {
  lost_.store(true, std::memory_order_relaxed);
  shutdown(socket_.get(), SHUT_RDWR);
  return Status(Code::kUnavailable,
                StrCat("the connection to the engine at ", path_, " is lost: ", why.message()));
}

Status SocketClient::Await(short events, Nanos deadline) {
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

Status SocketClient::Send(std::vector<std::byte>& bytes, Nanos deadline) {
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

Status SocketClient::AppendReleases() {
  if (releases_.leases.empty()) return Status();
  FOREBAY_RETURN_IF_ERROR(wire::Encode(releases_, 0, &out_));
  releases_.leases.clear();
  release_bytes_ = 0;
  return Status();
}

Status SocketClient::SendReleases(Nanos deadline) {
  FOREBAY_RETURN_IF_ERROR(AppendReleases());
  return Send(out_, deadline);
}

Status SocketClient::Receive(uint64_t request, Nanos deadline, wire::Frame* out) {
  while (true) {
    const Result<bool> whole = in_.Next(out);
    if (!whole) return whole.error();
    if (*whole) {
      if (out->header.request == request) return Status();
      return Status(Code::kDataLoss, "an answer to another request");
    }
    FOREBAY_RETURN_IF_ERROR(Await(POLLIN, deadline));
    const std::span<std::byte> room = in_.Room(kReceiveBytes);
    const ssize_t n = recv(socket_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (n > 0) {
      in_.Filled(static_cast<size_t>(n));
    } else if (n == 0) {
      return Status(Code::kUnavailable, "the engine's process closed it");
    } else if (errno != EAGAIN && errno != EINTR) {
      return ErrnoStatus(errno, "receiving");
    }
  }
}

template <typename Request, typename Reply>
Status SocketClient::Call(const Request& request, Nanos wait, Reply* reply) {
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
    FOREBAY_RETURN_IF_ERROR(Send(out_, deadline));
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

Result<StreamId> SocketClient::OpenStream(const StreamOptions& options) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::OpenStream request;
  request.dataset = options.shape.dataset;
  request.batch_size = options.shape.batch_size;
  request.drop_last = options.shape.drop_last;
  request.contiguous = options.shape.contiguous;
  request.itemised = options.shape.itemised;
  request.declared = options.declared;
  request.first_epoch = options.shape.first_epoch;
  request.first_position = options.shape.first_position;
  request.epochs = options.shape.epochs;
  request.sampler_size = options.sampler.size;
  request.sampler_shuffle = options.sampler.shuffle;
  request.sampler_drop_last = options.sampler.drop_last;
  request.sampler_seed = options.sampler.seed;
  request.sampler_rank = options.sampler.rank;
  request.sampler_world = options.sampler.world;
  wire::OpenStreamReply reply;
  MutexLock call(call_mutex_);
  FOREBAY_RETURN_IF_ERROR(Call(request, 0, &reply));
  return reply.stream;
}

Status SocketClient::Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order,
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

Status SocketClient::Seek(StreamId stream, uint64_t epoch, uint64_t position) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Seek request;
  request.stream = stream;
  request.epoch = epoch;
  request.position = position;
  wire::StatusReply reply;
  MutexLock call(call_mutex_);
  return Call(request, 0, &reply);
}

Status SocketClient::CloseStream(StreamId stream) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::CloseStream request;
  request.stream = stream;
  wire::StatusReply reply;
  MutexLock call(call_mutex_);
  return Call(request, 0, &reply);
}

template <typename Request>
Result<TakeKind> SocketClient::Ask(const Request& request, Nanos wait, BatchLoan* out) {
  MutexLock call(call_mutex_);
  FOREBAY_RETURN_IF_ERROR(Call(request, wait, &loan_));
  const auto kind = static_cast<TakeKind>(loan_.kind);
  if (kind != TakeKind::kBatch) return kind;
  uint64_t bytes = 0;
  for (size_t i = 0; i < loan_.samples.size(); ++i) {
    if (loan_.offsets[i] > arena_.size() || loan_.lengths[i] > arena_.size() - loan_.offsets[i]) {
      return Lose(Status(Code::kDataLoss, "a loan outside of the arena"));
    }
    bytes += loan_.lengths[i];
  }
  out->lease = loan_.lease;
  out->stream = loan_.stream;
  out->dataset = loan_.dataset;
  out->epoch = loan_.epoch;
  out->index = loan_.index;
  out->samples.swap(loan_.samples);
  out->offsets.swap(loan_.offsets);
  out->lengths.swap(loan_.lengths);
  MutexLock lock(write_mutex_);
  held_[out->lease] = bytes;
  return kind;
}

Result<TakeKind> SocketClient::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Take request;
  request.stream = stream;
  request.wait_ns = std::clamp<Nanos>(wait, 0, kLongestWait);
  return Ask(request, request.wait_ns, out);
}

Result<TakeKind> SocketClient::Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Fetch request;
  request.stream = stream;
  request.sample = sample;
  request.wait_ns = std::clamp<Nanos>(wait, 0, kLongestWait);
  return Ask(request, request.wait_ns, out);
}

Status SocketClient::Release(LeaseId lease) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(write_mutex_);
  const auto held = held_.find(lease);
  if (held == held_.end()) return Status();
  releases_.leases.push_back(lease);
  release_bytes_ += held->second;
  held_.erase(held);
  const bool many = releases_.leases.size() > kReleasesHeld || release_bytes_ > kReleaseBytesHeld;
  // Another thread's Take may be waiting for this very memory.
  if (!many && !answer_awaited_) return Status();
  return SendReleases(SteadyClock().Now() + kGrace);
}

Status SocketClient::Served(uint64_t reads, uint64_t passes) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  wire::Served message;
  message.reads = reads;
  message.passes = passes;
  MutexLock lock(write_mutex_);
  FOREBAY_RETURN_IF_ERROR(AppendReleases());
  FOREBAY_RETURN_IF_ERROR(wire::Encode(message, 0, &out_));
  return Send(out_, SteadyClock().Now() + kGrace);
}

}  // namespace forebay
