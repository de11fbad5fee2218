#include "daemon/server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <thread>

#include "daemon/test_files.h"
#include "port/socket_port.h"
#include "wire/socket.h"

namespace forebay {
namespace {

using testing::AwaitMetric;
using testing::BytesRight;
using testing::MakeEngine;
using testing::MetricValue;
using testing::Seeds;
using testing::SlowSource;
using testing::TestFiles;

constexpr uint32_t kSamples = 300;
#if defined(__has_feature)
constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
constexpr bool kThreadSanitizer = false;
#endif

class ServerTest : public ::testing::Test {
 protected:
  void Make(std::unique_ptr<Source> source, ServerOptions options = {}) {
    catalog_ = files_.Make(kSamples, 0, 60000);
    engine_ = MakeEngine(10 << 20);
    ASSERT_TRUE(engine_->AddDataset(catalog_, std::move(source)));
    StreamOptions itemised;
    itemised.declared = true;
    itemised.shape.itemised = true;
    auto stream = engine_->OpenStream(itemised);
    ASSERT_TRUE(stream);
    shared_stream_ = *stream;
    options.socket_path = path();
    options.release_wait = 300 * kMilli;
    auto server = Server::Start(*engine_, options);
    ASSERT_TRUE(server) << server.status().ToString();
    server_ = *std::move(server);
  }

  std::string path() const { return files_.root() + "/socket"; }

  std::unique_ptr<SocketPort> Attach() {
    auto client = SocketPort::Attach(path(), 10 * kSecond);
    EXPECT_TRUE(client) << client.status().ToString();
    return client ? *std::move(client) : nullptr;
  }

  std::unique_ptr<SocketPort> AttachWithRings() {
    auto client = SocketPort::Attach(path(), 10 * kSecond, true);
    EXPECT_TRUE(client) << client.status().ToString();
    return client ? *std::move(client) : nullptr;
  }

  // A connected socket that speaks for itself; greeted when wanted.
  OwnedFd Raw(bool greet, OwnedFd* memory = nullptr) {
    OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto address = wire::SocketAddress(path());
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address), 0);
    if (!greet) return fd;
    std::vector<std::byte> hello;
    EXPECT_TRUE(wire::Encode(wire::Hello(), 0, &hello).ok());
    EXPECT_EQ(write(fd.get(), hello.data(), hello.size()), static_cast<ssize_t>(hello.size()));
    pollfd ready = {fd.get(), POLLIN, 0};
    EXPECT_EQ(poll(&ready, 1, 10000), 1);
    std::vector<std::byte> reply(200);
    OwnedFd ignored;
    EXPECT_TRUE(wire::ReceiveDescriptor(fd.get(), reply, memory != nullptr ? memory : &ignored));
    return fd;
  }

  // Whether the other end closes the connection within ten seconds.
  static bool Closed(int fd) {
    std::vector<std::byte> bytes(1 << 16);
    const timeval bound = {10, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound);
    while (true) {
      const ssize_t n = read(fd, bytes.data(), bytes.size());
      if (n == 0 || (n < 0 && errno == ECONNRESET)) return true;
      if (n < 0) return false;
    }
  }

  void ExpectAllBack() {
    EXPECT_EQ(AwaitMetric(*engine_, "forebay_daemon_clients", 0), 0u);
    EXPECT_EQ(AwaitMetric(*engine_, "forebay_stage_leases", 0), 0u);
  }

  TestFiles files_;
  std::shared_ptr<const Catalog> catalog_;
  EnginePtr engine_;
  StreamId shared_stream_ = 0;
  ServerPtr server_;
};

// A client's life in a process of its own: fetches from the shared stream and takes from one of its
// own, holds some loans for a while, and checks every byte. What it returns is the exit status.
int LiveAsClient(const std::string& path, StreamId shared, uint64_t seed, uint64_t steps) {
  auto attached = SocketPort::Attach(path, 20 * kSecond);
  if (!attached) return 2;
  SocketPort& client = **attached;
  SplitMix64 rng(seed);
  StreamOptions options;
  options.shape.batch_size = 1 + static_cast<uint32_t>(rng.Below(5));
  options.shape.contiguous = rng.Below(2) == 0;
  options.sampler.size = kSamples;
  options.sampler.seed = seed;
  const auto own = client.OpenStream(options);
  if (!own) return 3;
  std::deque<BatchLoan> held;
  for (uint64_t i = 0; i < steps; ++i) {
    BatchLoan loan;
    const Nanos wait = rng.Below(5) == 0 ? static_cast<Nanos>(rng.Below(3)) * kMilli : 30 * kSecond;
    const bool take = rng.Below(3) == 0;
    const auto sample = static_cast<SampleId>(rng.Below(kSamples));
    const auto kind =
        take ? client.Take(*own, wait, &loan) : client.Fetch(shared, sample, wait, &loan);
    if (!kind) {
      std::fprintf(stderr, "client %d: %s\n", getpid(), kind.error().ToString().c_str());
      return 4;
    }
    if (*kind == TakeKind::kPending && wait == 30 * kSecond) return 5;
    if (*kind == TakeKind::kBatch) {
      if (!take && loan.samples[0] != sample) return 6;
      if (!BytesRight(loan)) return 7;
      held.push_back(std::move(loan));
    }
    while (held.size() > 1 + rng.Below(3)) {
      if (!BytesRight(held.front())) return 8;
      if (!client.Release(held.front().lease).ok()) return 9;
      held.pop_front();
    }
  }
  return 0;
}

// One round: two clients that are killed at a random moment, and two that must not notice.
struct Round {
  StreamId shared = 0;
  uint64_t seed = 0;
};
struct RoundResult {
  std::array<int, 4> statuses = {-1, -1, -1, -1};
};

// Forks clients when told to. It must itself be forked while this process has one thread: address
// sanitizer's allocator locks would otherwise stay locked in the children.
void RunNursery(int socket, const std::string& path) {
  Round round;
  while (read(socket, &round, sizeof round) == static_cast<ssize_t>(sizeof round)) {
    SplitMix64 rng(round.seed);
    std::array<pid_t, 4> children;
    for (size_t i = 0; i < children.size(); ++i) {
      children[i] = fork();
      if (children[i] != 0) continue;
      alarm(100);
      _exit(LiveAsClient(path, round.shared, round.seed * 10 + i, i < 2 ? 1000000 : 60));
    }
    for (size_t i = 0; i < 2; ++i) {
      usleep(static_cast<useconds_t>(rng.Below(15000)));
      kill(children[i], SIGKILL);
    }
    RoundResult result;
    for (size_t i = 0; i < children.size(); ++i) waitpid(children[i], &result.statuses[i], 0);
    (void)!write(socket, &result, sizeof result);
  }
}

TEST_F(ServerTest, KilledClientsGiveBackWhatTheyHeldAndOthersGoOn) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  OwnedFd ours(ends[0]);
  OwnedFd theirs(ends[1]);
  const pid_t nursery = fork();
  if (nursery == 0) {
    ours.Reset();
    RunNursery(theirs.get(), path());
    _exit(0);
  }
  theirs.Reset();
  ASSERT_NO_FATAL_FAILURE(Make(SlowSource(kMilli / 5)));
  for (uint64_t seed = 0; seed < Seeds() && !HasFailure(); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const Round round = {shared_stream_, seed};
    ASSERT_EQ(write(ours.get(), &round, sizeof round), static_cast<ssize_t>(sizeof round));
    RoundResult result;
    ASSERT_EQ(read(ours.get(), &result, sizeof result), static_cast<ssize_t>(sizeof result));
    for (size_t i = 0; i < result.statuses.size(); ++i) {
      const int status = result.statuses[i];
      EXPECT_TRUE(i < 2 ? WIFSIGNALED(status) : status == 0)
          << "client " << i << ": signal " << WTERMSIG(status) << ", exit status "
          << WEXITSTATUS(status);
    }
    ExpectAllBack();
  }
  ours.Reset();
  EXPECT_EQ(waitpid(nursery, nullptr, 0), nursery);
}

// The engine goes on for a while after its server; what clients hold, and what was announced to
// them, must not change meanwhile.
TEST_F(ServerTest, KeptLoansStayRightWhenTheServerHasEnded) {
  catalog_ = files_.Make(kSamples, 0, 60000);
  EngineOptions small;
  small.memory = 10 << 20;
  small.keep = false;  // memory that is given back is used again
  auto engine = Engine::Create(small);
  ASSERT_TRUE(engine) << engine.status().ToString();
  engine_ = *std::move(engine);
  ASSERT_TRUE(engine_->AddDataset(catalog_, *MakeNullSource(16)));
  ServerOptions keep;
  keep.keep_loans = true;
  keep.socket_path = path();
  auto server = Server::Start(*engine_, keep);
  ASSERT_TRUE(server) << server.status().ToString();
  server_ = *std::move(server);
  auto client = SocketPort::Attach(path(), 10 * kSecond, true);
  ASSERT_TRUE(client) << client.status().ToString();
  StreamOptions options;
  options.shape.batch_size = 8;
  options.sampler.size = kSamples;
  const auto stream = (*client)->OpenStream(options);
  ASSERT_TRUE(stream);
  std::vector<BatchLoan> held(3);
  for (BatchLoan& loan : held) {
    const auto taken = (*client)->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
  }
  server_.reset();
  ASSERT_TRUE(engine_->CloseStream(*stream).ok());
  options.sampler.seed = 5;
  const auto other = engine_->OpenStream(options);
  ASSERT_TRUE(other);
  for (int i = 0; i < 80; ++i) {
    BatchLoan loan;
    const auto taken = engine_->Take(*other, 10 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    if (*taken != TakeKind::kBatch) continue;
    ASSERT_TRUE(engine_->Release(loan.lease).ok());
  }
  for (const BatchLoan& loan : held) EXPECT_TRUE(BytesRight(loan));
  while (true) {
    BatchLoan loan;
    const auto taken = (*client)->Take(*stream, kSecond, &loan);
    if (!taken) {
      EXPECT_EQ(taken.error().code(), Code::kUnavailable);
      break;
    }
    ASSERT_EQ(*taken, TakeKind::kBatch);
    EXPECT_TRUE(BytesRight(loan));
  }
}

TEST_F(ServerTest, ItsEndEndsEveryWait) {
  int started[2];
  ASSERT_EQ(pipe2(started, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    char byte = 0;
    (void)!read(started[0], &byte, 1);
    auto client = SocketPort::Attach(path(), 10 * kSecond);
    StreamOptions options;
    options.declared = true;
    const auto stream = (*client)->OpenStream(options);
    BatchLoan loan;
    const auto taken = (*client)->Take(*stream, 300 * kSecond, &loan);
    _exit(taken.status().code() == Code::kUnavailable ? 0 : 1);
  }
  ASSERT_NO_FATAL_FAILURE(Make(SlowSource(kMilli)));
  ASSERT_EQ(write(started[1], "x", 1), 1);
  close(started[0]);
  close(started[1]);
  std::vector<std::unique_ptr<SocketPort>> clients;
  std::vector<std::jthread> threads;
  std::atomic<int> unavailable = 0;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(Attach());
    ASSERT_NE(clients.back(), nullptr);
    StreamOptions options;
    options.declared = true;
    auto stream = clients.back()->OpenStream(options);
    ASSERT_TRUE(stream);
    threads.emplace_back([&, stream = *stream, client = clients.back().get()] {
      BatchLoan loan;
      const auto taken = client->Take(stream, 300 * kSecond, &loan);
      unavailable += taken.status().code() == Code::kUnavailable ? 1 : 0;
    });
  }
  ASSERT_EQ(AwaitMetric(*engine_, "forebay_daemon_clients", 4), 4u);
  usleep(20000);
  server_.reset();
  threads.clear();
  EXPECT_EQ(unavailable, 3);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  BatchLoan loan;
  for (auto& client : clients) {
    EXPECT_EQ(client->Take(0, kSecond, &loan).status().code(), Code::kUnavailable);
  }
  EXPECT_EQ(SocketPort::Attach(path(), kSecond).status().code(), Code::kUnavailable);
  ExpectAllBack();
}

// The server's process is killed while a child that it forked keeps its descriptors open, as a
// DataLoader worker does.
TEST_F(ServerTest, ItsProcessKilledEndsEveryWaitAndLeavesASocketThatIsReplaced) {
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    Make(SlowSource(kMilli));
    if (server_ == nullptr) _exit(1);
    auto client = Attach();  // the grandchild inherits a connection too
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      alarm(60);
      while (true) pause();
    }
    (void)!write(ready[1], &grandchild, sizeof grandchild);
    while (true) pause();
  }
  pid_t grandchild = 0;
  ASSERT_EQ(read(ready[0], &grandchild, sizeof grandchild),
            static_cast<ssize_t>(sizeof grandchild));
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  StreamOptions options;
  options.declared = true;
  const auto stream = client->OpenStream(options);
  ASSERT_TRUE(stream);
  std::jthread killer([&] {
    usleep(20000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  });
  BatchLoan loan;
  EXPECT_EQ(client->Take(*stream, 300 * kSecond, &loan).status().code(), Code::kUnavailable);
  killer.join();
  EXPECT_EQ(SocketPort::Attach(path(), 10 * kSecond).status().code(), Code::kUnavailable);
  ASSERT_NO_FATAL_FAILURE(Make(SlowSource(kMilli)));
  EXPECT_NE(Attach(), nullptr);
  kill(grandchild, SIGKILL);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(ServerTest, HostileBytesEndOnlyTheirOwnConnection) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  auto good = Attach();
  ASSERT_NE(good, nullptr);
  for (uint64_t seed = 0; seed < 10 * Seeds(); ++seed) {
    SplitMix64 rng(seed);
    const bool greeted = rng.Below(2) == 0;
    const OwnedFd fd = Raw(greeted);
    std::vector<std::byte> bytes;
    // Real requests with damage behind them, so that the damage is reached.
    for (uint64_t i = rng.Below(5); i > 0; --i) {
      wire::Fetch fetch;
      fetch.stream = static_cast<uint32_t>(rng.Below(3));
      fetch.sample = static_cast<uint32_t>(rng.Next());
      fetch.wait_ns = static_cast<int64_t>(rng.Next());
      ASSERT_TRUE(wire::Encode(fetch, i, &bytes).ok());
      wire::Release release;
      release.leases = {rng.Below(1000), rng.Next()};
      ASSERT_TRUE(wire::Encode(release, i, &bytes).ok());
      wire::Declare declare;
      declare.stream = static_cast<uint32_t>(rng.Below(3));
      declare.more = rng.Below(2) == 0;
      declare.order = {static_cast<uint32_t>(rng.Next())};
      ASSERT_TRUE(wire::Encode(declare, i, &bytes).ok());
    }
    for (uint64_t i = 0; i < 100; ++i) bytes.push_back(static_cast<std::byte>(rng.Next() | 1));
    (void)!send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(Closed(fd.get())) << "seed " << seed;
    BatchLoan loan;
    const auto kind = good->Fetch(shared_stream_, static_cast<SampleId>(rng.Below(kSamples)),
                                  20 * kSecond, &loan);
    ASSERT_TRUE(kind) << kind.status().ToString();
    ASSERT_TRUE(BytesRight(loan));
    ASSERT_TRUE(good->Release(loan.lease).ok());
  }
  good.reset();
  ExpectAllBack();
  EXPECT_GT(MetricValue(*engine_, "forebay_daemon_dropped_clients_total"), 0u);
}

TEST_F(ServerTest, AClientThatDoesNotReadIsDropped) {
  ServerOptions options;
  options.max_output_bytes = wire::kMaxFrameBytes;
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16), options));
  const OwnedFd fd = Raw(true);
  std::vector<std::byte> bytes;
  // Each request is answered by an error with a message.
  wire::Take take;
  take.stream = 4000000000;
  for (uint64_t i = 0; i < 1000; ++i) ASSERT_TRUE(wire::Encode(take, i, &bytes).ok());
  const timeval bound = {10, 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);
  bool dropped = false;
  for (int i = 0; i < 2000 && !dropped; ++i) {
    dropped = send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0 && errno == EPIPE;
  }
  EXPECT_TRUE(dropped);
  EXPECT_EQ(MetricValue(*engine_, "forebay_daemon_dropped_clients_total"), 1u);
  EXPECT_NE(Attach(), nullptr);
}

TEST_F(ServerTest, NobodyReleasesAnothersLoanOrClosesItsStream) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  auto one = Attach();
  auto two = Attach();
  ASSERT_TRUE(one != nullptr && two != nullptr);
  BatchLoan loan;
  ASSERT_TRUE(one->Fetch(shared_stream_, 7, 10 * kSecond, &loan));
  ASSERT_TRUE(two->Release(loan.lease).ok());
  const OwnedFd raw = Raw(true);
  wire::Release release;
  release.leases = {loan.lease};
  wire::CloseStream close;
  close.stream = shared_stream_;
  std::vector<std::byte> bytes;
  ASSERT_TRUE(wire::Encode(release, 0, &bytes).ok());
  ASSERT_TRUE(wire::Encode(close, 1, &bytes).ok());
  ASSERT_EQ(write(raw.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  pollfd ready = {raw.get(), POLLIN, 0};
  ASSERT_EQ(poll(&ready, 1, 10000), 1);
  EXPECT_EQ(MetricValue(*engine_, "forebay_stage_leases"), 1u);
  BatchLoan more;
  ASSERT_TRUE(two->Fetch(shared_stream_, 8, 10 * kSecond, &more));
  one.reset();
  two.reset();
  EXPECT_EQ(AwaitMetric(*engine_, "forebay_stage_leases", 0), 0u);
}

TEST_F(ServerTest, AStreamEndsWithTheClientThatOpenedIt) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  auto one = Attach();
  auto two = Attach();
  ASSERT_TRUE(one != nullptr && two != nullptr);
  StreamOptions options;
  options.declared = true;
  auto stream = one->OpenStream(options);
  ASSERT_TRUE(stream);
  std::jthread leaver([&] {
    usleep(20000);
    one.reset();
  });
  BatchLoan loan;
  EXPECT_EQ(two->Take(*stream, 60 * kSecond, &loan).status().code(), Code::kCancelled);
}

StreamOptions OwnStream(uint64_t seed) {
  StreamOptions options;
  options.shape.batch_size = 4;
  options.sampler.size = kSamples;
  options.sampler.seed = seed;
  return options;
}

TEST_F(ServerTest, NobodyMovesAStreamWhoseBatchesAreAnnouncedToAnother) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  auto one = AttachWithRings();
  auto two = Attach();
  ASSERT_TRUE(one != nullptr && two != nullptr);
  const auto stream = one->OpenStream(OwnStream(1));
  ASSERT_TRUE(stream);
  BatchLoan loan;
  for (uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(two->Seek(*stream, 3, 0).code(), Code::kInvalidArgument);
    EXPECT_EQ(two->Declare(*stream, 0, {1}, true).code(), Code::kInvalidArgument);
    const auto kind = one->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(kind && *kind == TakeKind::kBatch);
    EXPECT_EQ(loan.epoch, 0u);
    EXPECT_EQ(loan.index, i);
    ASSERT_TRUE(one->Release(loan.lease).ok());
  }
}

// As one that is stopped.
TEST_F(ServerTest, AClientThatTakesNothingLeavesOthersTheirPartOfWhatIsAnnounced) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  auto one = AttachWithRings();
  ASSERT_NE(one, nullptr);
  ASSERT_TRUE(one->OpenStream(OwnStream(1)));
  const auto ready = [this] { return MetricValue(*engine_, "forebay_daemon_ready_batches"); };
  const auto settled = [&] {
    uint64_t last = 0;
    for (int same = 0; same < 30; usleep(10000))
      same = ready() == std::exchange(last, ready()) ? same + 1 : 0;
    return last;
  };
  const uint64_t alone = settled();
  EXPECT_GT(alone, 2u);
  auto two = AttachWithRings();
  ASSERT_NE(two, nullptr);
  const auto stream = two->OpenStream(OwnStream(2));
  ASSERT_TRUE(stream);
  EXPECT_GT(settled(), alone);
  BatchLoan loan;
  for (uint64_t i = 0; i < 200; ++i) {
    const auto kind = two->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(kind) << kind.status().ToString();
    if (*kind != TakeKind::kBatch) continue;
    ASSERT_TRUE(BytesRight(loan));
    ASSERT_TRUE(two->Release(loan.lease).ok());
  }
}

TEST_F(ServerTest, WhoFindsNoRoomBecauseOfOthersIsToldAtOnceAndByName) {
  ServerOptions options;
  options.others_wait = 100 * kMilli;
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16), options));
  auto hoarder = AttachWithRings();
  auto other = AttachWithRings();
  ASSERT_TRUE(hoarder != nullptr && other != nullptr);
  const auto first = hoarder->OpenStream(OwnStream(1));
  ASSERT_TRUE(first);
  BatchLoan loan;
  // Its own doing: an error, and it may go on when it has let go of something.
  Result<TakeKind> kind = TakeKind::kBatch;
  std::vector<LeaseId> held;
  while (kind) {
    kind = hoarder->Take(*first, 10 * kSecond, &loan);
    if (kind && *kind == TakeKind::kBatch) held.push_back(loan.lease);
  }
  EXPECT_EQ(kind.error().code(), Code::kResourceExhausted) << kind.error().ToString();
  EXPECT_TRUE(hoarder->connected());
  const auto second = other->OpenStream(OwnStream(2));
  ASSERT_TRUE(second);
  BatchLoan kept;
  do {
    kind = other->Take(*second, 10 * kSecond, &loan);
    if (!kind || *kind != TakeKind::kBatch) continue;
    if (kept.lease == kNoLease) {
      kept = loan;
    } else {
      (void)other->Release(loan.lease);
    }
  } while (kind);
  EXPECT_EQ(kind.error().code(), Code::kUnavailable) << kind.error().ToString();
  EXPECT_NE(kind.error().message().find(StrCat("process ", getpid())), std::string::npos)
      << kind.error().ToString();
  EXPECT_FALSE(other->connected());
  for (const LeaseId lease : held) ASSERT_TRUE(hoarder->Release(lease).ok());
  // What it holds stays right for as long as it holds it, whatever is read meanwhile.
  for (int i = 0; i < 100; ++i) {
    kind = hoarder->Take(*first, 10 * kSecond, &loan);
    ASSERT_TRUE(kind) << kind.status().ToString();
    if (*kind != TakeKind::kBatch) continue;
    ASSERT_TRUE(hoarder->Release(loan.lease).ok());
  }
  if (kept.lease != kNoLease) {
    EXPECT_TRUE(BytesRight(kept));
    EXPECT_EQ(MetricValue(*engine_, "forebay_daemon_clients"), 2u);
    EXPECT_EQ(other->Release(kept.lease).code(), Code::kUnavailable);
  }
  EXPECT_EQ(AwaitMetric(*engine_, "forebay_daemon_clients", 1), 1u);
}

// As the filters of older containers do with every call that they do not know.
bool ForbidNewWaits() {
#ifdef SYS_epoll_pwait2
  std::array<sock_filter, 4> code = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_epoll_pwait2, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter = {code.size(), code.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
#else
  return false;
#endif
}

TEST_F(ServerTest, ServesWhereNewSystemCallsAreForbidden) {
  if (kThreadSanitizer) GTEST_SKIP() << "it takes no new threads in a forked child";
  const pid_t child = fork();
  if (child == 0) {
    if (!ForbidNewWaits()) _exit(77);
    Make(*MakeNullSource(16));
    if (server_ == nullptr) _exit(1);
    const auto client = SocketPort::Attach(path(), 5 * kSecond, true);
    if (!client) _exit(2);
    const auto stream = (*client)->OpenStream(OwnStream(1));
    if (!stream) _exit(3);
    BatchLoan loan;
    const auto kind = (*client)->Take(*stream, 5 * kSecond, &loan);
    _exit(kind && *kind == TakeKind::kBatch ? 0 : 4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no filters here";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(ServerTest, TheArenaCannotBeWrittenTo) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  OwnedFd memory;
  const OwnedFd raw = Raw(true, &memory);
  ASSERT_TRUE(memory.valid());
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0), MAP_FAILED);
  EXPECT_LT(pwrite(memory.get(), "x", 1, 0), 0);
}

TEST_F(ServerTest, CountsWhatClientsServed) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(client->dataset_count(), 1u);
  EXPECT_EQ(client->budget(), engine_->budget());
  ASSERT_TRUE(client->Served(5, 2).ok());
  ASSERT_TRUE(client->Served(1, 0).ok());
  EXPECT_EQ(AwaitMetric(*engine_, "forebay_client_served_reads_total", 6), 6u);
  EXPECT_EQ(MetricValue(*engine_, "forebay_client_passed_reads_total"), 2u);
}

TEST_F(ServerTest, OneServerAtAPath) {
  ASSERT_NO_FATAL_FAILURE(Make(*MakeNullSource(16)));
  ServerOptions options;
  options.socket_path = path();
  EXPECT_EQ(Server::Start(*engine_, options).status().code(), Code::kUnavailable);
  EXPECT_NE(Attach(), nullptr);
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(path()));
  EXPECT_TRUE(std::filesystem::exists(files_.root()));
}

TEST_F(ServerTest, FoldersThatOthersCanEnterAreRefused) {
  engine_ = MakeEngine(10 << 20);
  const std::string open = files_.root() + "/open";
  std::filesystem::create_directory(open);
  std::filesystem::permissions(open, std::filesystem::perms::all);
  ServerOptions options;
  options.socket_path = open + "/socket";
  EXPECT_EQ(Server::Start(*engine_, options).status().code(), Code::kPermissionDenied);
  options.socket_path = files_.root() + "/file";
  close(creat(options.socket_path.c_str(), 0600));
  EXPECT_EQ(Server::Start(*engine_, options).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::exists(options.socket_path));
}

TEST_F(ServerTest, AFetchTellsWhatItWaitedFor) {
  ASSERT_NO_FATAL_FAILURE(Make(SlowSource(20 * kMilli)));
  const auto client = Attach();
  ASSERT_NE(client, nullptr);
  constexpr auto kSource = static_cast<size_t>(StallCause::kSource);
  BatchLoan loan;
  ASSERT_TRUE(client->Fetch(shared_stream_, 3, 10 * kSecond, &loan));
  const auto first = client->FetchWaits();
  EXPECT_GT(first[kSource], 0);
  for (size_t i = 0; i < kStallCauses; ++i) EXPECT_TRUE(i == kSource || first[i] == 0) << i;
  // What is in memory is not waited for.
  BatchLoan again;
  ASSERT_TRUE(client->Fetch(shared_stream_, 3, 10 * kSecond, &again));
  EXPECT_EQ(client->FetchWaits(), first);
  // Nobody's stall: who has the worker knows whether somebody waits for it.
  EXPECT_GT(MetricValue(*engine_, "forebay_client_wait_nanoseconds_total"), 0u);
  for (const std::string_view cause : kStallCauseNames) {
    EXPECT_EQ(MetricValue(*engine_, StrCat("forebay_stall_", cause, "_nanoseconds_total")), 0u)
        << cause;
  }
  // A sample that there is not: the time counts, as the source's.
  ASSERT_FALSE(client->Fetch(shared_stream_, kSamples, kSecond, &again));
  EXPECT_GT(client->FetchWaits()[kSource], first[kSource]);
  for (const LeaseId lease : {loan.lease, again.lease}) EXPECT_TRUE(client->Release(lease).ok());
}

TEST_F(ServerTest, ChoosesAPathAndRemovesItsFolder) {
  engine_ = MakeEngine(10 << 20);
  const char* before = std::getenv("XDG_RUNTIME_DIR");
  const std::string saved = before != nullptr ? before : "";
  // No socket's path has room for this one.
  const std::string longest = files_.root() + "/" + std::string(90, 'x');
  std::filesystem::create_directory(longest);
  setenv("XDG_RUNTIME_DIR", longest.c_str(), 1);
  EXPECT_EQ(wire::RuntimeFolder(), StrCat("/tmp/forebay-", geteuid()));
  setenv("XDG_RUNTIME_DIR", files_.root().c_str(), 1);
  auto server = Server::Start(*engine_, {});
  auto second_engine = MakeEngine(10 << 20);
  auto second = Server::Start(*second_engine, {});
  before != nullptr ? setenv("XDG_RUNTIME_DIR", saved.c_str(), 1) : unsetenv("XDG_RUNTIME_DIR");
  ASSERT_TRUE(server && second);
  const std::string folder = files_.root() + "/forebay";
  EXPECT_EQ((*server)->socket_path().rfind(folder + "/", 0), 0u) << (*server)->socket_path();
  EXPECT_NE((*server)->socket_path(), (*second)->socket_path());
  EXPECT_EQ(std::filesystem::status(folder).permissions(), std::filesystem::perms::owner_all);
  server->reset();
  EXPECT_TRUE(SocketPort::Attach((*second)->socket_path(), kSecond));
  second->reset();
  EXPECT_FALSE(std::filesystem::exists(folder));
}

}  // namespace
}  // namespace forebay
