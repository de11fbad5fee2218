#include "base/boot_id.h"

#include <gtest/gtest.h>

#include <string>

namespace forebay {
namespace {

TEST(BootIdTest, ParsesWhatTheKernelWrites) {
  const BootId id = ParseBootId("01234567-89ab-cdef-fedc-ba9876543210\n");
  EXPECT_EQ(id.high, 0x0123456789abcdefu);
  EXPECT_EQ(id.low, 0xfedcba9876543210u);
  EXPECT_TRUE(id.known());
}

TEST(BootIdTest, AnythingElseIsNotKnown) {
  const std::string id = "01234567-89ab-cdef-fedc-ba9876543210";
  for (const std::string& text : {std::string(), id + "0", id.substr(1), "x" + id.substr(1),
                                  std::string(32, '0'), std::string(36, '\0')}) {
    EXPECT_FALSE(ParseBootId(text).known()) << text;
  }
}

TEST(BootIdTest, StaysWhileTheMachineRuns) { EXPECT_EQ(ReadBootId(), ReadBootId()); }

}  // namespace
}  // namespace forebay
