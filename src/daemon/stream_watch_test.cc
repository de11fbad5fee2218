#include "daemon/stream_watch.h"

#include <gtest/gtest.h>

namespace forebay {
namespace {

constexpr Nanos kStart = 1000 * kSecond;

Nanos Source(const StreamWatch::Waits& waits) {
  return waits[static_cast<size_t>(StallCause::kSource)];
}
Nanos Memory(const StreamWatch::Waits& waits) {
  return waits[static_cast<size_t>(StallCause::kMemory)];
}

TEST(StreamWatch, CountsWhatWasTaken) {
  StreamWatch watch(3, kStart);
  watch.Took(3, 0, 8, 100);
  watch.Took(3, 1, 4, 50);
  EXPECT_EQ(watch.epoch_batches(), 2u);
  watch.Waited(StallCause::kSource, kStart, kStart + 5);
  EXPECT_EQ(Source(watch.epoch_waits()), 5);
  watch.EndedEpoch();
  EXPECT_EQ(watch.epoch(), 4u);
  EXPECT_EQ(watch.epoch_batches(), 0u);
  EXPECT_EQ(Source(watch.epoch_waits()), 0);
  watch.Took(4, 0, 8, 100);
  EXPECT_EQ(watch.batches(), 3u);
  EXPECT_EQ(watch.samples(), 20u);
  EXPECT_EQ(watch.bytes(), 250u);
  EXPECT_EQ(Source(watch.waits()), 5);
  // A seek that nobody told of: the batch says where it is.
  watch.Took(9, 6, 1, 1);
  EXPECT_EQ(watch.epoch(), 9u);
  EXPECT_EQ(watch.epoch_batches(), 7u);
}

TEST(StreamWatch, CountsWhatWorkersFetched) {
  StreamWatch watch(3, kStart);
  watch.Fetched(3, 1, 100);
  watch.Waited(StallCause::kSource, kStart, kStart + 5);
  watch.Fetched(4, 1, 50);
  EXPECT_EQ(watch.epoch(), 4u);
  EXPECT_EQ(Source(watch.epoch_waits()), 0);
  watch.Fetched(3, 1, 10);  // by a worker that is behind
  EXPECT_EQ(watch.epoch(), 4u);
  EXPECT_EQ(watch.samples(), 3u);
  EXPECT_EQ(watch.bytes(), 160u);
  EXPECT_EQ(watch.batches(), 0u);
}

TEST(StreamWatch, RemembersTheLastSeconds) {
  StreamWatch watch(0, kStart);
  EXPECT_EQ(watch.LastSeconds(kStart).WaitingShare(), 0.0);
  // Half of each second, across its end.
  for (int i = 0; i < 4; ++i) {
    watch.Waited(StallCause::kSource, kStart + i * kSecond + kSecond * 3 / 4,
                 kStart + (i + 1) * kSecond + kSecond / 4);
  }
  StreamWatch::Recent recent = watch.LastSeconds(kStart + 4 * kSecond + kSecond / 4);
  EXPECT_EQ(recent.span, 4 * kSecond + kSecond / 4);
  EXPECT_EQ(Source(recent.waits), 2 * kSecond);
  EXPECT_NEAR(recent.WaitingShare(), 2 / 4.25, 1e-9);
  // Later only the part within the window counts: seconds 3 to 12, and of them 3 and 4 had waits.
  recent = watch.LastSeconds(kStart + 12 * kSecond + kSecond / 2);
  EXPECT_EQ(recent.span, 9 * kSecond + kSecond / 2);
  EXPECT_EQ(Source(recent.waits), kSecond / 2 + kSecond / 4);
  recent = watch.LastSeconds(kStart + 60 * kSecond);
  EXPECT_EQ(recent.WaitingShare(), 0.0);
}

TEST(StreamWatch, AWaitLongerThanTheWindowFillsIt) {
  StreamWatch watch(0, kStart);
  watch.Waited(StallCause::kMemory, kStart, kStart + 100 * kSecond + 7);
  const StreamWatch::Recent recent = watch.LastSeconds(kStart + 100 * kSecond + 7);
  EXPECT_EQ(Memory(recent.waits), recent.span);
  EXPECT_EQ(recent.WaitingShare(), 1.0);
  EXPECT_EQ(Memory(watch.waits()), 100 * kSecond + 7);
  watch.Waited(StallCause::kMemory, kStart, kStart);
  watch.Waited(StallCause::kMemory, kStart, kStart - 5);
  EXPECT_EQ(Memory(watch.waits()), 100 * kSecond + 7);
}

}  // namespace
}  // namespace forebay
