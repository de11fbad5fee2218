#include "daemon/program_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/status.h"

namespace forebay {
namespace {

TEST(ProgramWatch, TellsWhoWaitedAndForWhat) {
  ProgramWatch watch;
  watch.Asked(getpid(), StallCause::kSource, 100 * kSecond, 101 * kSecond);
  watch.Asked(getpid(), StallCause::kPeer, 101 * kSecond, 103 * kSecond);
  watch.Asked(1, StallCause::kTier, 102 * kSecond, 102 * kSecond);
  const auto programs = watch.Programs(104 * kSecond);
  ASSERT_EQ(programs.size(), 2);
  const ProgramWatch::Program& own = programs[programs[0].pid == getpid() ? 0 : 1];
  EXPECT_NE(own.name.find(StrCat(" ", getpid())), std::string::npos) << own.name;
  EXPECT_EQ(own.watch.samples(), 2);
  EXPECT_EQ(own.watch.waits()[static_cast<size_t>(StallCause::kSource)], kSecond);
  EXPECT_EQ(own.watch.waits()[static_cast<size_t>(StallCause::kPeer)], 2 * kSecond);
  EXPECT_DOUBLE_EQ(own.watch.LastSeconds(104 * kSecond).WaitingShare(), 0.75);
}

TEST(ProgramWatch, ForgetsWhoAsksForNothingAnyMore) {
  ProgramWatch watch;
  watch.Asked(5, StallCause::kSource, kSecond, 2 * kSecond);
  EXPECT_EQ(watch.Programs(60 * kSecond).size(), 1);
  EXPECT_EQ(watch.Programs(63 * kSecond).size(), 0);
}

}  // namespace
}  // namespace forebay
