// A file service for tests: hands out a table and answers as the test says, one question a
// connection.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "files/message.h"
#include "files/packet.h"
#include "files/table_memory.h"
#include "wire/socket.h"

namespace forebay::files {

class FakeService {
 public:
  struct Question {
    Kind kind;
    std::string path;
    uint64_t a;
    uint64_t b;
  };
  using Reply = std::function<Header(const Question&)>;

  // Without a table, nobody is given one.
  FakeService(const std::string& path, Reply reply, TableMemory* table = nullptr)
      : reply_(std::move(reply)), table_(table), path_(path) {
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 64), 0);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeService() {
    stop_ = true;
    thread_.join();
    close(listener_);
    unlink(path_.c_str());
  }
  std::vector<Question> questions() {
    const std::lock_guard lock(mutex_);
    return questions_;
  }

 private:
  void Serve() {
    while (!stop_) {
      pollfd poll_for{.fd = listener_, .events = POLLIN, .revents = 0};
      if (poll(&poll_for, 1, 20) <= 0) continue;
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      std::vector<char> packet(kMostPacket);
      const ssize_t got = recv(fd, packet.data(), packet.size(), 0);
      Header header{};
      uint16_t length = 0;
      if (got == sizeof(header)) std::memcpy(&header, packet.data(), sizeof(header));
      if (header.kind == Kind::kTable && table_ != nullptr) {
        const std::vector<std::byte> answer =
            AnswerPacket(Kind::kTable, Answer::kReady, table_->bytes());
        EXPECT_TRUE(wire::SendDescriptor(fd, answer, table_->fd()).ok());
      } else if (got >= static_cast<ssize_t>(sizeof(header) + sizeof(length))) {
        std::memcpy(&header, packet.data(), sizeof(header));
        std::memcpy(&length, packet.data() + sizeof(header), sizeof(length));
        EXPECT_EQ(header.bytes, sizeof(length) + length);
        EXPECT_EQ(got, static_cast<ssize_t>(sizeof(header) + header.bytes));
        EXPECT_EQ(header.count, 1U);
        Question question{header.kind,
                          std::string(packet.data() + sizeof(header) + sizeof(length), length),
                          header.a, header.b};
        const Header reply = reply_(question);
        {
          const std::lock_guard lock(mutex_);
          questions_.push_back(std::move(question));
        }
        if (reply.answer != Answer::kNone) send(fd, &reply, sizeof(reply), MSG_NOSIGNAL);
      }
      close(fd);
    }
  }

  const Reply reply_;
  TableMemory* const table_;
  const std::string path_;
  int listener_ = -1;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
  std::mutex mutex_;
  std::vector<Question> questions_;
};

inline Header Say(Answer answer, uint64_t a = 0) {
  Header header{};
  header.answer = answer;
  header.a = a;
  return header;
}

}  // namespace forebay::files
