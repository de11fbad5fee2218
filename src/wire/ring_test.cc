#include "wire/ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/rng.h"

namespace forebay::wire {
namespace {

struct Both {
  explicit Both(uint32_t batch) : writer(*RingWriter::Create(RingShape::For(batch))) {
    const OwnedFd copy(dup(writer.fd()));
    reader = *RingReader::Map(copy, writer.shape());
  }
  RingWriter writer;
  RingReader reader;
};

struct Taken {
  RingEntry entry;
  std::vector<uint32_t> samples;
  std::vector<uint64_t> offsets;
  std::vector<uint32_t> lengths;
  std::string error;
};

bool Take(RingReader& reader, Taken* out) {
  const auto there =
      reader.Take(&out->entry, &out->samples, &out->offsets, &out->lengths, &out->error);
  EXPECT_TRUE(there) << there.status().ToString();
  return there && *there;
}

void PublishNumber(RingWriter& writer, uint32_t number, uint32_t count) {
  std::vector<uint32_t> samples(count, number);
  std::vector<uint64_t> offsets(count, uint64_t{number} << 33);
  std::vector<uint32_t> lengths(count, number + 1);
  RingEntry entry;
  entry.lease = number;
  entry.index = number;
  writer.Publish(entry, samples, offsets, lengths);
}

TEST(RingTest, EntriesComeInOrderThroughManyRounds) {
  Both ring(5);
  SplitMix64 rng(1);
  uint32_t published = 0;
  uint32_t taken = 0;
  Taken out;
  while (taken < 1000) {
    ASSERT_TRUE(ring.writer.ReadPosition().ok());
    ASSERT_EQ(ring.writer.outstanding(), published - taken);
    for (uint64_t n = rng.Below(ring.writer.free_slots() + 1); n > 0; --n, ++published) {
      PublishNumber(ring.writer, published, published % 6);
    }
    for (uint64_t n = rng.Below(10); n > 0 && Take(ring.reader, &out); --n, ++taken) {
      ASSERT_EQ(out.entry.lease, taken);
      ASSERT_EQ(out.samples, std::vector<uint32_t>(taken % 6, taken));
      ASSERT_EQ(out.offsets, std::vector<uint64_t>(taken % 6, uint64_t{taken} << 33));
      ASSERT_EQ(out.lengths, std::vector<uint32_t>(taken % 6, taken + 1));
    }
  }
}

TEST(RingTest, ErrorsKeepCodeAndWords) {
  Both ring(1);
  ring.writer.PublishError(Status(Code::kNotFound, std::string(5000, 'x')), 1);
  Taken out;
  ASSERT_TRUE(Take(ring.reader, &out));
  EXPECT_EQ(out.entry.kind, RingEntry::kError);
  EXPECT_EQ(out.entry.code, Code::kNotFound);
  EXPECT_EQ(out.error, std::string(512, 'x'));  // as much as a slot holds
}

TEST(RingTest, TakingIsNoNewsUntilTheClientWaits) {
  Both ring(4);
  for (uint32_t i = 0; i < 4; ++i) PublishNumber(ring.writer, i, 1);
  const uint32_t beat = ring.reader.beat();
  EXPECT_FALSE(ring.writer.Sleep(false, false));
  EXPECT_NE(ring.reader.beat(), beat);
  Taken out;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Take(ring.reader, &out));
  EXPECT_FALSE(ring.writer.Sleep(false, false));
  uint32_t seen = 0;
  EXPECT_TRUE(ring.reader.Want(&seen));
  // Also before the next look, which would show that the ring is empty.
  EXPECT_TRUE(ring.writer.Sleep(false, false));
}

TEST(RingPaceTest, TheDaemonComesBackWhenHalfIsTaken) {
  RingPace pace;
  EXPECT_EQ(pace.SleepFor(32), RingPace::kLongest);
  Nanos now = 7 * kSecond;
  pace.Saw(1, now);
  for (int i = 0; i < 10; ++i) pace.Saw(10, now += 10 * kMilli);
  EXPECT_EQ(pace.SleepFor(32), 16 * kMilli);
  EXPECT_EQ(pace.SleepFor(2), kMilli);
  pace.Saw(10, now += 100 * kMicro);  // a faster client
  EXPECT_EQ(pace.SleepFor(32), 160 * kMicro);
  EXPECT_EQ(pace.SleepFor(1), 100 * kMicro);  // no busy wait
  // One that stopped is looked at ever more seldom.
  Nanos slept = 0;
  for (int i = 0; i < 20; ++i) {
    const Nanos next = pace.SleepFor(32);
    EXPECT_GE(next, slept);
    slept = next;
    pace.Saw(0, now += next);
  }
  EXPECT_EQ(slept, RingPace::kLongest);
}

TEST(RingTest, AnEmptyRingIsWantedAndTheWaitEndsWithTheNextEntry) {
  Both ring(4);
  EXPECT_FALSE(ring.writer.Sleep(false, false));
  uint32_t seen = 0;
  EXPECT_TRUE(ring.reader.Want(&seen));
  EXPECT_TRUE(ring.writer.wanted());
  EXPECT_TRUE(ring.writer.Sleep(false, false));  // news
  EXPECT_FALSE(ring.writer.Sleep(false, true));  // none
  std::jthread publisher([&] {
    usleep(20000);
    PublishNumber(ring.writer, 7, 2);
  });
  ring.reader.Wait(seen, 20 * kSecond);
  Taken out;
  ASSERT_TRUE(Take(ring.reader, &out));
  EXPECT_EQ(out.entry.lease, 7u);
  publisher.join();
  EXPECT_FALSE(ring.writer.wanted());
}

TEST(RingTest, ReleasesComeThroughAndAFullRingSaysSo) {
  Both ring(4);
  bool tell = false;
  for (uint64_t lease = 0; lease < internal::kRingReleases; ++lease) {
    ASSERT_TRUE(ring.reader.Release(lease, &tell));
    EXPECT_FALSE(tell);
  }
  EXPECT_FALSE(ring.reader.Release(99, &tell));
  std::vector<uint64_t> leases;
  ASSERT_TRUE(ring.writer.PopReleases(&leases).ok());
  ASSERT_EQ(leases.size(), internal::kRingReleases);
  for (uint64_t lease = 0; lease < leases.size(); ++lease) EXPECT_EQ(leases[lease], lease);
  EXPECT_FALSE(ring.writer.Sleep(true, false));
  ASSERT_TRUE(ring.reader.Release(99, &tell));
  EXPECT_TRUE(tell);
  ASSERT_TRUE(ring.reader.Release(100, &tell));
  EXPECT_FALSE(tell);  // once
}

TEST(RingTest, ARewindTakesBackWhatWasNotTaken) {
  Both ring(4);
  for (uint32_t i = 0; i < 5; ++i) PublishNumber(ring.writer, i, 1);
  Taken out;
  ASSERT_TRUE(Take(ring.reader, &out));
  ASSERT_TRUE(ring.writer.ReadPosition().ok());
  EXPECT_EQ(ring.writer.outstanding(), 4u);
  ring.writer.Rewind();
  EXPECT_FALSE(Take(ring.reader, &out));
  PublishNumber(ring.writer, 50, 1);
  ASSERT_TRUE(Take(ring.reader, &out));
  EXPECT_EQ(out.entry.lease, 50u);
}

// A client that writes nonsense into the memory meets an error, whatever it writes.
TEST(RingTest, NonsenseInTheMemoryEndsInAnError) {
  uint64_t refused = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Both ring(4);
    SplitMix64 rng(seed);
    PublishNumber(ring.writer, 1, 4);
    void* memory = mmap(nullptr, ring.writer.shape().Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED,
                        ring.writer.fd(), 0);
    ASSERT_NE(memory, MAP_FAILED);
    const Mapping mapping(memory, ring.writer.shape().Bytes());
    for (int i = 0; i < 40; ++i) {
      const uint64_t at = rng.Below(mapping.size() - 8);
      const uint64_t value = rng.Next() >> rng.Below(64);
      std::memcpy(mapping.data() + (rng.Below(2) == 0 ? at : at % 256), &value, 8);
    }
    std::vector<uint64_t> leases;
    const bool looked = ring.writer.ReadPosition().ok();
    const bool popped = ring.writer.PopReleases(&leases).ok();
    refused += looked && popped ? 0 : 1;
    EXPECT_LE(ring.writer.outstanding(), ring.writer.shape().slots);
    EXPECT_LE(leases.size(), internal::kRingReleases);
    (void)ring.writer.Sleep(true, false);
    if (ring.writer.free_slots() != 0) PublishNumber(ring.writer, 2, 4);
    Taken out;
    (void)ring.reader.Take(&out.entry, &out.samples, &out.offsets, &out.lengths, &out.error);
    EXPECT_LE(out.samples.size(), 4u);
  }
  EXPECT_GT(refused, 100u);
}

TEST(RingTest, NobodyCanShrinkTheMemory) {
  Both ring(4);
  EXPECT_NE(ftruncate(ring.writer.fd(), 0), 0);
  RingShape large = ring.writer.shape();
  large.samples *= 1000;
  EXPECT_FALSE(RingReader::Map(OwnedFd(dup(ring.writer.fd())), large));
  EXPECT_FALSE(RingReader::Map(OwnedFd(), ring.writer.shape()));
}

TEST(RingTest, LongBatchesHaveFewerSlotsOrNone) {
  EXPECT_EQ(RingShape::For(1).slots, 32u);
  EXPECT_EQ(RingShape::For(1024).slots, 32u);
  EXPECT_EQ(RingShape::For(100000).slots, 2u);
  EXPECT_EQ(RingShape::For(1 << 20).slots, 0u);
  EXPECT_EQ(RingShape::For(~uint32_t{0}).slots, 0u);
}

// Two threads and both directions; no wait may be lost.
TEST(RingTest, ThousandsOfEntriesBetweenTwoThreads) {
  constexpr uint32_t kEntries = 20000;
  Both ring(4);
  std::atomic<bool> nudged = false;
  std::jthread daemon([&] {
    uint32_t published = 0;
    uint32_t released = 0;
    std::vector<uint64_t> leases;
    while (released < kEntries) {
      ring.writer.Awake();
      ASSERT_TRUE(ring.writer.ReadPosition().ok());
      leases.clear();
      ASSERT_TRUE(ring.writer.PopReleases(&leases).ok());
      for (const uint64_t lease : leases) ASSERT_EQ(lease, released++);
      while (ring.writer.free_slots() != 0 && published < kEntries) {
        PublishNumber(ring.writer, published++, 3);
      }
      const bool last = published == kEntries;
      if (ring.writer.Sleep(last, false)) continue;
      for (int i = 0; i < 20000 && !nudged.exchange(false); ++i) usleep(100);
    }
  });
  Taken out;
  for (uint32_t i = 0; i < kEntries; ++i) {
    while (!Take(ring.reader, &out)) {
      uint32_t seen = 0;
      if (ring.reader.Want(&seen)) nudged = true;
      ring.reader.Wait(seen, 20 * kSecond);
    }
    ASSERT_EQ(out.entry.lease, i);
    ASSERT_EQ(out.samples, std::vector<uint32_t>(3, i));
    bool tell = false;
    while (!ring.reader.Release(i, &tell)) usleep(50);
    if (tell) nudged = true;
  }
}

}  // namespace
}  // namespace forebay::wire
