#include "base/signal_forwarding.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <stop_token>
#include <thread>

namespace forebay {
namespace {

constexpr std::array kSignals = {SIGUSR1, SIGUSR2, SIGHUP};

// A child that writes the number of each signal it gets; SIGTERM ends it.
class SignalForwardingTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe(pipe_.data()), 0);
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) Listen();
    ASSERT_EQ(Next(), 0);  // it listens
  }

  void TearDown() override {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    close(pipe_[0]);
    close(pipe_[1]);
  }

  // The next signal that the child has got; -1 when none comes.
  int Next(int wait_ms = 10'000) {
    pollfd waiting = {.fd = pipe_[0], .events = POLLIN, .revents = 0};
    char number = 0;
    if (poll(&waiting, 1, wait_ms) != 1 || read(pipe_[0], &number, 1) != 1) return -1;
    return number;
  }

  pid_t child_ = 0;

 private:
  [[noreturn]] void Listen() const {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that crashes leaves it, and its output, to nobody
    sigset_t set;
    sigemptyset(&set);
    for (const int number : kSignals) sigaddset(&set, number);
    sigprocmask(SIG_BLOCK, &set, nullptr);
    for (int number = 0;; sigwait(&set, &number)) {
      const char byte = static_cast<char>(number);
      if (write(pipe_[1], &byte, 1) != 1) _exit(1);
    }
  }

  std::array<int, 2> pipe_ = {};
};

TEST_F(SignalForwardingTest, PassesOnWhatComesAndWhatCameBefore) {
  SignalForwarding forwarding(kSignals);
  kill(getpid(), SIGUSR1);
  EXPECT_EQ(Next(50), -1);
  forwarding.SendTo(child_);
  EXPECT_EQ(Next(), SIGUSR1);
  kill(getpid(), SIGUSR2);
  EXPECT_EQ(Next(), SIGUSR2);
  EXPECT_EQ(Next(50), -1);
}

TEST_F(SignalForwardingTest, FromAnyThread) {
  // It blocks no signal. It sleeps in a call that the thread sanitizer knows: others it lets go on
  // when a signal comes, and runs the handler after them.
  std::atomic<bool> slept{false};
  const std::jthread other([&](const std::stop_token& stop) {
    for (; !stop.stop_requested(); slept = true) poll(nullptr, 0, 5);
  });
  // The thread sanitizer loses a signal that comes as a thread begins (1 of 600 runs).
  while (!slept) poll(nullptr, 0, 1);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  {
    SignalForwarding forwarding(kSignals);
    forwarding.SendTo(child_);
    int came = SIGUSR1;
    for (int i = 0; i < 100 && came == SIGUSR1; ++i) {
      kill(getpid(), SIGUSR1);
      came = Next();
    }
    EXPECT_EQ(came, SIGUSR1);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST_F(SignalForwardingTest, NothingAfterTheEnd) {
  SignalForwarding forwarding(kSignals);
  forwarding.SendTo(child_);
  forwarding.Stop();
  kill(getpid(), SIGUSR1);
  EXPECT_EQ(Next(50), -1);
}

TEST_F(SignalForwardingTest, HandlersAreAsBefore) {
  const auto handler = [](int number) {
    struct sigaction now = {};
    sigaction(number, nullptr, &now);
    return now.sa_handler;
  };
  signal(SIGHUP, SIG_IGN);
  {
    SignalForwarding forwarding(kSignals);
    EXPECT_EQ(handler(SIGHUP), SIG_IGN);  // a child that is started now inherits it
    EXPECT_NE(handler(SIGUSR1), SIG_DFL);
    forwarding.SendTo(child_);
    kill(getpid(), SIGHUP);
    EXPECT_EQ(Next(), SIGHUP);
  }
  EXPECT_EQ(handler(SIGHUP), SIG_IGN);
  EXPECT_EQ(handler(SIGUSR1), SIG_DFL);
  signal(SIGHUP, SIG_DFL);
}

}  // namespace
}  // namespace forebay
