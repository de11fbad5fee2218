#include "port/socket_port.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "wire/socket.h"

namespace forebay {
namespace {

// A server made of one function, which has the connection to itself.
class SocketPortTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_client_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    path_ = folder_ + "/socket";
    listen_ = OwnedFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto address = wire::SocketAddress(path_);
    ASSERT_TRUE(address);
    ASSERT_EQ(bind(listen_.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address),
              0);
    ASSERT_EQ(listen(listen_.get(), 4), 0);
  }
  void TearDown() override {
    thread_ = {};
    std::filesystem::remove_all(folder_);
  }

  void Serve(std::function<void(int)> serve) {
    thread_ = std::jthread([this, serve] {
      const OwnedFd connection(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      serve(connection.get());
    });
  }

  // Reads one frame; the payload lives until the next call.
  wire::Frame Read(int fd) {
    wire::Frame frame;
    while (true) {
      const auto whole = in_.Next(&frame);
      if (!whole || *whole) return frame;
      const std::span<std::byte> room = in_.Room(4096);
      const ssize_t n = read(fd, room.data(), room.size());
      if (n <= 0) return frame;
      in_.Filled(static_cast<size_t>(n));
    }
  }

  void Greet(int fd, uint64_t claimed_bytes = 4096) {
    const wire::Frame frame = Read(fd);
    const OwnedFd memory(memfd_create("test", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(memory.get(), 4096), 0);
    wire::HelloReply reply;
    reply.arena_bytes = claimed_bytes;
    std::vector<std::byte> bytes;
    ASSERT_TRUE(wire::Encode(reply, frame.header.request, &bytes).ok());
    ASSERT_TRUE(wire::SendDescriptor(fd, bytes, memory.get()).ok());
  }

  template <typename Message>
  void Write(int fd, const Message& message, uint64_t request) {
    std::vector<std::byte> bytes;
    ASSERT_TRUE(wire::Encode(message, request, &bytes).ok());
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  std::string folder_;
  std::string path_;
  OwnedFd listen_;
  wire::FrameReader in_;
  std::jthread thread_;
};

TEST_F(SocketPortTest, NobodyThereIsUnavailable) {
  EXPECT_EQ(SocketPort::Attach(folder_ + "/none", kSecond).status().code(), Code::kUnavailable);
  listen_.Reset();
  EXPECT_EQ(SocketPort::Attach(path_, 20 * kSecond).status().code(), Code::kUnavailable);
  EXPECT_EQ(SocketPort::Attach(std::string(200, 'x'), kSecond).status().code(),
            Code::kInvalidArgument);
}

TEST_F(SocketPortTest, ASilentServerDoesNotHangTheAttach) {
  EXPECT_EQ(SocketPort::Attach(path_, 50 * kMilli).status().code(), Code::kDeadlineExceeded);
}

TEST_F(SocketPortTest, GarbageInsteadOfAGreetingIsAnError) {
  Serve([this](int fd) {
    Read(fd);
    (void)!write(fd, std::string(100, 'x').data(), 100);
    Read(fd);
  });
  EXPECT_EQ(SocketPort::Attach(path_, 20 * kSecond).status().code(), Code::kDataLoss);
}

TEST_F(SocketPortTest, AnArenaShorterThanClaimedIsRefused) {
  Serve([this](int fd) {
    Greet(fd, 8192);
    Read(fd);
  });
  EXPECT_EQ(SocketPort::Attach(path_, 20 * kSecond).status().code(), Code::kDataLoss);
}

TEST_F(SocketPortTest, ALoanOutsideOfTheArenaEndsTheConnection) {
  Serve([this](int fd) {
    Greet(fd);
    const wire::Frame frame = Read(fd);
    wire::Loan loan;
    loan.lease = 1;
    loan.samples = {0};
    loan.offsets = {4000};
    loan.lengths = {200};
    Write(fd, loan, frame.header.request);
    Read(fd);
  });
  auto client = SocketPort::Attach(path_, 20 * kSecond);
  ASSERT_TRUE(client) << client.status().ToString();
  BatchLoan loan;
  EXPECT_EQ((*client)->Take(0, kSecond, &loan).status().code(), Code::kUnavailable);
  EXPECT_FALSE((*client)->connected());
  EXPECT_EQ((*client)->Take(0, kSecond, &loan).status().code(), Code::kUnavailable);
  EXPECT_EQ((*client)->Release(1).code(), Code::kUnavailable);
}

TEST_F(SocketPortTest, AnAnswerToAnotherRequestEndsTheConnection) {
  Serve([this](int fd) {
    Greet(fd);
    Write(fd, wire::Loan(), Read(fd).header.request + 1);
    Read(fd);
  });
  auto client = SocketPort::Attach(path_, 20 * kSecond);
  ASSERT_TRUE(client);
  BatchLoan loan;
  EXPECT_EQ((*client)->Take(0, kSecond, &loan).status().code(), Code::kUnavailable);
}

// Releases wait for company, but not while memory is being waited for.
TEST_F(SocketPortTest, ReleasesTravelWithTheNextRequest) {
  std::vector<size_t> counts;  // of leases in each Release frame; 0 for a Fetch
  Serve([this, &counts](int fd) {
    Greet(fd);
    uint64_t lease = 0;
    while (true) {
      const wire::Frame frame = Read(fd);
      if (frame.header.type == wire::Type::kRelease) {
        wire::Release release;
        EXPECT_TRUE(wire::Decode(frame, &release).ok());
        counts.push_back(release.leases.size());
      } else if (frame.header.type == wire::Type::kFetch) {
        counts.push_back(0);
        wire::Loan loan;
        loan.lease = ++lease;
        loan.samples = {0};
        loan.offsets = {0};
        loan.lengths = {10};
        Write(fd, loan, frame.header.request);
      } else {
        return;
      }
    }
  });
  auto client = SocketPort::Attach(path_, 20 * kSecond);
  ASSERT_TRUE(client);
  std::vector<BatchLoan> held(20);
  for (BatchLoan& loan : held) {
    ASSERT_EQ(*(*client)->Fetch(0, 0, kSecond, &loan), TakeKind::kBatch);
  }
  for (const BatchLoan& loan : held) ASSERT_TRUE((*client)->Release(loan.lease).ok());
  BatchLoan loan;
  ASSERT_EQ(*(*client)->Fetch(0, 0, kSecond, &loan), TakeKind::kBatch);
  client->reset();
  thread_.join();
  std::vector<size_t> expected(20, 0);
  expected.insert(expected.end(), {17, 3, 0});
  EXPECT_EQ(counts, expected);
}

// The Release of one thread may be what the Take of another waits for.
TEST_F(SocketPortTest, AReleaseOvertakesAWaitingTake) {
  std::atomic<bool> taking = false;
  Serve([this, &taking](int fd) {
    Greet(fd);
    wire::Loan loan;
    loan.lease = 1;
    Write(fd, loan, Read(fd).header.request);
    const uint64_t request = Read(fd).header.request;
    taking = true;
    EXPECT_EQ(Read(fd).header.type, wire::Type::kRelease);
    Write(fd, loan, request);
    Read(fd);
  });
  auto client = SocketPort::Attach(path_, 20 * kSecond);
  ASSERT_TRUE(client);
  BatchLoan loan;
  ASSERT_EQ(*(*client)->Take(0, kSecond, &loan), TakeKind::kBatch);
  std::jthread releaser([&, lease = loan.lease] {
    while (!taking) std::this_thread::yield();
    EXPECT_TRUE((*client)->Release(lease).ok());
  });
  BatchLoan next;
  const auto taken = (*client)->Take(0, 20 * kSecond, &next);
  ASSERT_TRUE(taken) << taken.status().ToString();
  EXPECT_EQ(*taken, TakeKind::kBatch);
}

TEST_F(SocketPortTest, AServerThatClosesEndsEveryCall) {
  Serve([this](int fd) {
    Greet(fd);
    Read(fd);
  });
  auto client = SocketPort::Attach(path_, 20 * kSecond);
  ASSERT_TRUE(client);
  BatchLoan loan;
  EXPECT_EQ((*client)->Take(0, 600 * kSecond, &loan).status().code(), Code::kUnavailable);
  EXPECT_EQ((*client)->OpenStream({}).status().code(), Code::kUnavailable);
  EXPECT_EQ((*client)->Declare(0, 0, {}, true).code(), Code::kUnavailable);
  EXPECT_EQ((*client)->Seek(0, 0, 0).code(), Code::kUnavailable);
  EXPECT_EQ((*client)->CloseStream(0).code(), Code::kUnavailable);
  EXPECT_EQ((*client)->Served(1, 1).code(), Code::kUnavailable);
}

}  // namespace
}  // namespace forebay
