#include "core/place_watch.h"

#include <gtest/gtest.h>

namespace forebay {
namespace {

constexpr Nanos kPatience = 700 * kMilli;

TEST(PlaceWatch, PatienceFollowsWhatReadsTake) {
  EXPECT_EQ(PlaceWatch::Patience(kMilli, 0), PlaceWatch::kLeastPatience) << "a busy processor";
  EXPECT_EQ(PlaceWatch::Patience(700 * kMilli, 0), 700 * kMilli);
  EXPECT_EQ(PlaceWatch::Patience(OriginModel::kNever, kMilli), PlaceWatch::kMostPatience)
      << "nothing is known yet";
  EXPECT_EQ(PlaceWatch::Patience(kMilli, kSecond), 4 * kSecond) << "the source is slower";
  EXPECT_EQ(PlaceWatch::Patience(kMilli, OriginModel::kNever), OriginModel::kNever);
}

TEST(PlaceWatch, ASilentPlaceIsLeftAndUsedAgainWhenAProbeAnswers) {
  PlaceWatch watch;
  EXPECT_FALSE(watch.Suspects(10 * kSecond, kPatience, kPatience));
  EXPECT_FALSE(watch.ProbeDue(10 * kSecond)) << "a place in use is not probed";
  EXPECT_TRUE(watch.Suspects(11 * kSecond, kPatience + 1, kPatience));
  EXPECT_TRUE(watch.left());
  EXPECT_FALSE(watch.Suspects(12 * kSecond, 2 * kSecond, kPatience)) << "said once";
  EXPECT_FALSE(watch.ProbeDue(11 * kSecond));
  const Nanos probe = 11 * kSecond + PlaceWatch::kFirstPause;
  EXPECT_TRUE(watch.ProbeDue(probe));
  watch.OnProbeSent();
  EXPECT_FALSE(watch.ProbeDue(99 * kSecond)) << "one at a time";
  // It ends with the hang, which tells that the place answers, and not that it does so in time.
  EXPECT_FALSE(watch.OnProbeAnswered(100 * kSecond, 100 * kSecond - probe, kPatience));
  EXPECT_TRUE(watch.left());
  EXPECT_TRUE(watch.ProbeDue(100 * kSecond + 2 * PlaceWatch::kFirstPause));
  watch.OnProbeSent();
  EXPECT_TRUE(watch.OnProbeAnswered(102 * kSecond, kMilli, kPatience));
  EXPECT_FALSE(watch.left());
  EXPECT_FALSE(watch.ProbeDue(200 * kSecond));
}

// Seconds until the next probe after one more failure.
Nanos NextPause(PlaceWatch& watch, Nanos now) {
  Nanos pause = 0;
  while (!watch.ProbeDue(now + pause)) pause += kMilli;
  return pause;
}

TEST(PlaceWatch, PausesDoubleForProbesThatAreLate) {
  PlaceWatch watch;
  Nanos now = 100 * kSecond;
  ASSERT_TRUE(watch.Suspects(now, kSecond, kPatience));
  Nanos expected = PlaceWatch::kFirstPause;
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(NextPause(watch, now), expected);
    now += expected;
    watch.OnProbeSent();
    now += 3 * kSecond;
    EXPECT_FALSE(watch.OnProbeAnswered(now, 3 * kSecond, kPatience));
    expected = std::min(2 * expected, PlaceWatch::kLongestPause);
  }
  EXPECT_EQ(expected, PlaceWatch::kLongestPause);
}

// Its probes are answered and its reads are not: it must not cost a wait every second.
TEST(PlaceWatch, APlaceThatFailsAgainSoonIsLeftForLonger) {
  PlaceWatch watch;
  Nanos now = 100 * kSecond;
  Nanos expected = PlaceWatch::kFirstPause;
  const auto fail = [&] {
    now += kSecond;
    ASSERT_TRUE(watch.Suspects(now, kSecond, kPatience));
    EXPECT_EQ(NextPause(watch, now), expected);
    now += expected;
    watch.OnProbeSent();
    EXPECT_TRUE(watch.OnProbeAnswered(now, kMilli, kPatience));
    expected = std::min(2 * expected, PlaceWatch::kLongestPause);
  };
  for (int i = 0; i < 12; ++i) fail();
  now += PlaceWatch::kServedLong;
  expected = PlaceWatch::kFirstPause;
  fail();
}

}  // namespace
}  // namespace forebay
