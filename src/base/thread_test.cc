#include "base/thread.h"

#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <stop_token>

namespace forebay {
namespace {

sigset_t Mask() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return mask;
}

TEST(StartThread, TakesNoSignalsAndLeavesTheCallersMaskAlone) {
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, SIGUSR2);
  sigset_t outer;
  pthread_sigmask(SIG_BLOCK, &one, &outer);
  const sigset_t before = Mask();

  sigset_t inside = {};
  Result<std::jthread> thread = StartThread("forebay-test", [&inside] { inside = Mask(); });
  ASSERT_TRUE(thread) << thread.error().ToString();
  const sigset_t after = Mask();
  thread->join();

  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGPROF,
                           SIGCHLD, SIGPIPE, SIGXFSZ, SIGABRT, SIGRTMIN, SIGRTMAX}) {
    EXPECT_EQ(sigismember(&inside, number), 1) << number;
  }
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
    EXPECT_EQ(sigismember(&inside, fault), 0) << fault;
  }
  for (int number = 1; number <= SIGRTMAX; ++number) {
    EXPECT_EQ(sigismember(&after, number), sigismember(&before, number)) << number;
  }
  EXPECT_EQ(sigismember(&after, SIGINT), 0);
  EXPECT_EQ(sigismember(&after, SIGUSR2), 1);
  pthread_sigmask(SIG_SETMASK, &outer, nullptr);
}

TEST(StartThread, NamesTheThreadAndHandsItTheStopToken) {
  Result<std::jthread> thread = StartThread("forebay-test", [](const std::stop_token& stop) {
    while (!stop.stop_requested()) std::this_thread::yield();
  });
  ASSERT_TRUE(thread) << thread.error().ToString();
  std::array<char, 16> name = {};
  ASSERT_EQ(pthread_getname_np(thread->native_handle(), name.data(), name.size()), 0);
  EXPECT_STREQ(name.data(), "forebay-test");
}  // ends only because the token says so

}  // namespace
}  // namespace forebay
