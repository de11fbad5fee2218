#include "core/storage_model.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <queue>
#include <vector>

namespace forebay {
namespace {

StorageSettings Settings(std::string_view text) {
  const Result<StorageSettings> settings = StorageSettings::Parse(text);
  EXPECT_TRUE(settings) << settings.status().ToString();
  return settings ? *settings : StorageSettings();
}

std::vector<Nanos> ReadLatencies(const StorageSettings& settings, int count) {
  StorageModel model(settings, 0);
  std::vector<Nanos> latencies;
  for (int i = 0; i < count; ++i) latencies.push_back(model.Admit(OpKind::kRead, 1, 0).finish_at);
  return latencies;
}

// Virtual time in which `readers` readers, each with one read in flight, move `reads` reads.
Nanos TimeToRead(const StorageSettings& settings, int readers, int reads, uint64_t bytes) {
  StorageModel model(settings, 0);
  std::priority_queue<Nanos, std::vector<Nanos>, std::greater<>> finishing;
  for (int i = 0; i < readers; ++i) finishing.push(model.Admit(OpKind::kRead, bytes, 0).finish_at);
  Nanos now = 0;
  for (int i = readers; i < reads + readers; ++i) {
    now = finishing.top();
    finishing.pop();
    if (i < reads) finishing.push(model.Admit(OpKind::kRead, bytes, now).finish_at);
  }
  return now;
}

TEST(StorageSettings, ParsesLinesCommasAndComments) {
  const StorageSettings settings = Settings(
      "open_ms=1.5, stat_ms=0.2\n# a comment\nread_ms = 2 # why\n\nreaddir_ms=3\r\n"
      "jitter=0.1,tail_prob=0.01,tail_mult=20\nbandwidth_mb=300\nops=5000\neio_rate=0.5\n"
      "stall_ms=forever\nseed=18446744073709551615");
  EXPECT_EQ(settings.open, 1500 * kMicro);
  EXPECT_EQ(settings.stat, 200 * kMicro);
  EXPECT_EQ(settings.read, 2 * kMilli);
  EXPECT_EQ(settings.readdir, 3 * kMilli);
  EXPECT_EQ(settings.jitter, 0.1);
  EXPECT_EQ(settings.tail_prob, 0.01);
  EXPECT_EQ(settings.tail_mult, 20);
  EXPECT_EQ(settings.bytes_per_s, 300e6);
  EXPECT_EQ(settings.ops_per_s, 5000);
  EXPECT_EQ(settings.eio_rate, 0.5);
  EXPECT_EQ(settings.stall, StorageSettings::kForever);
  EXPECT_EQ(settings.seed, UINT64_MAX);
}

TEST(StorageSettings, TextRoundTrips) {
  EXPECT_EQ(Settings(StorageSettings().ToText()), StorageSettings());
  const StorageSettings settings = Settings(
      "open_ms=0.123457,read_ms=7,jitter=0.3,bandwidth_mb=117.7,ops=1e4,stall_ms=250,seed=42");
  EXPECT_EQ(Settings(settings.ToText()), settings) << settings.ToText();
  const StorageSettings stalled = Settings("stall_ms=forever");
  EXPECT_EQ(Settings(stalled.ToText()), stalled);
}

TEST(StorageSettings, WithKeepsWhatTheTextDoesNotName) {
  const StorageSettings base = Settings("open_ms=1,read_ms=2");
  const Result<StorageSettings> changed = base.With("read_ms=3");
  ASSERT_TRUE(changed);
  EXPECT_EQ(changed->open, kMilli);
  EXPECT_EQ(changed->read, 3 * kMilli);
}

TEST(StorageSettings, RefusesNonsense) {
  for (const std::string_view text :
       {"open_ms", "colour=3", "open_ms=fast", "open_ms=-1", "open_ms=", "read_ms=1e300",
        "read_ms=nan", "jitter=1.1", "jitter=nan", "tail_prob=2", "tail_mult=0.5",
        "bandwidth_mb=-1", "ops=-5", "ops=inf", "eio_rate=-0.1", "stall_ms=-1", "seed=-1",
        "seed=1.5", "open_ms=forever"}) {
    const Result<StorageSettings> settings = StorageSettings::Parse(text);
    ASSERT_FALSE(settings) << text;
    EXPECT_EQ(settings.error().code(), Code::kInvalidArgument) << text;
  }
}

TEST(StorageModel, FreeByDefault) {
  StorageModel model(StorageSettings(), 100);
  for (const OpKind kind : {OpKind::kOpen, OpKind::kStat, OpKind::kReaddir, OpKind::kRead}) {
    const StorageModel::Decision decision = model.Admit(kind, 1 << 20, 100);
    EXPECT_EQ(decision.finish_at, 100);
    EXPECT_EQ(decision.error, 0);
  }
}

TEST(StorageModel, EachKindHasItsLatency) {
  StorageModel model(Settings("open_ms=1,stat_ms=2,readdir_ms=3,read_ms=4"), 0);
  EXPECT_EQ(model.Admit(OpKind::kOpen, 0, 10).finish_at, 10 + kMilli);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 10).finish_at, 10 + 2 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kReaddir, 0, 10).finish_at, 10 + 3 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kRead, 0, 10).finish_at, 10 + 4 * kMilli);
}

TEST(StorageModel, JitterStaysInItsFractionAndKeepsTheMean) {
  const std::vector<Nanos> latencies = ReadLatencies(Settings("read_ms=1,jitter=0.25"), 10000);
  double sum = 0;
  Nanos lowest = latencies[0], highest = latencies[0];
  for (const Nanos latency : latencies) {
    lowest = std::min(lowest, latency);
    highest = std::max(highest, latency);
    sum += static_cast<double>(latency);
  }
  EXPECT_GE(lowest, 750 * kMicro);
  EXPECT_LT(lowest, 760 * kMicro);
  EXPECT_LE(highest, 1250 * kMicro);
  EXPECT_GT(highest, 1240 * kMicro);
  EXPECT_NEAR(sum / 10000, kMilli, 10 * kMicro);
}

TEST(StorageModel, EqualSeedsGiveEqualTimes) {
  const std::string_view text = "read_ms=1,jitter=0.5,tail_prob=0.1,eio_rate=0.1,seed=";
  const auto with_seed = [&](int seed) { return Settings(StrCat(text, seed)); };
  EXPECT_EQ(ReadLatencies(with_seed(7), 1000), ReadLatencies(with_seed(7), 1000));
  EXPECT_NE(ReadLatencies(with_seed(7), 1000), ReadLatencies(with_seed(8), 1000));
}

TEST(StorageModel, TailTakesItsShareAndMultiple) {
  int slow = 0;
  for (const Nanos latency :
       ReadLatencies(Settings("read_ms=1,tail_prob=0.1,tail_mult=50"), 10000)) {
    ASSERT_TRUE(latency == kMilli || latency == 50 * kMilli) << latency;
    if (latency > kMilli) ++slow;
  }
  EXPECT_NEAR(slow, 1000, 120);
}

TEST(StorageModel, TransferOverlapsLatency) {
  StorageModel model(Settings("read_ms=10,bandwidth_mb=100"), 0);
  // 100 kB take 1 ms of the pipe: the latency covers the first ten, the pipe delays those after.
  for (int i = 1; i <= 30; ++i) {
    EXPECT_EQ(model.Admit(OpKind::kRead, 100'000, 0).finish_at, std::max(10, i) * kMilli) << i;
  }
}

TEST(StorageModel, BandwidthIsReachedWithEnoughReadsInFlight) {
  // One read of 110 KiB takes 375 us of the pipe and 2 ms of latency: six in flight fill it.
  const StorageSettings settings = Settings("read_ms=2,bandwidth_mb=300");
  const uint64_t bytes = 110 * 1024;
  const double limit = 4000.0 * static_cast<double>(bytes) / 300e6 * kSecond;
  EXPECT_NEAR(static_cast<double>(TimeToRead(settings, 1, 4000, bytes)), 4000.0 * 2 * kMilli,
              kMilli);
  EXPECT_NEAR(static_cast<double>(TimeToRead(settings, 8, 4000, bytes)) / limit, 1, 0.01);
  EXPECT_NEAR(static_cast<double>(TimeToRead(settings, 256, 4000, bytes)) / limit, 1, 0.01);
}

TEST(StorageModel, AnIdlePipeSavesNothingUp) {
  StorageModel model(Settings("bandwidth_mb=1"), 0);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1'000'000, 0).finish_at, kSecond);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1'000'000, 10 * kSecond).finish_at, 11 * kSecond);
}

TEST(StorageModel, OperationsShareTheirLimit) {
  StorageModel model(Settings("ops=1000,stat_ms=5"), 0);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 0).finish_at, 5 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kOpen, 0, 0).finish_at, kMilli);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 0).finish_at, 7 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kRead, 9, kSecond).finish_at, kSecond);
}

TEST(StorageModel, FailsItsShareOfOpensAndReads) {
  StorageModel model(Settings("eio_rate=0.2,read_ms=1"), 0);
  int errors = 0;
  for (int i = 0; i < 10000; ++i) {
    const StorageModel::Decision decision = model.Admit(OpKind::kRead, 1, 0);
    EXPECT_EQ(decision.finish_at, kMilli);
    if (decision.error != 0) {
      EXPECT_EQ(decision.error, EIO);
      ++errors;
    }
    EXPECT_EQ(model.Admit(OpKind::kStat, 0, 0).error, 0);
    EXPECT_EQ(model.Admit(OpKind::kReaddir, 0, 0).error, 0);
  }
  EXPECT_NEAR(errors, 2000, 200);
  model.Apply(Settings("eio_rate=1"), 0);
  EXPECT_EQ(model.Admit(OpKind::kOpen, 0, 0).error, EIO);
}

TEST(StorageModel, FailedReadTakesNoBandwidth) {
  StorageModel model(Settings("eio_rate=1,bandwidth_mb=1"), 0);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1'000'000, 0).finish_at, 0);
}

TEST(StorageModel, StallEndsAfterItsTime) {
  StorageModel model(Settings("read_ms=1,stall_ms=100"), 0);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1, 0).finish_at, 101 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1, 99 * kMilli).finish_at, 101 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1, 200 * kMilli).finish_at, 201 * kMilli);
  EXPECT_EQ(model.settings(99 * kMilli).stall, 100 * kMilli);
  EXPECT_EQ(model.settings(100 * kMilli).stall, 0);
}

TEST(StorageModel, OtherChangesNeitherExtendNorRepeatAStall) {
  StorageModel model(Settings("stall_ms=100"), 0);
  const auto change = [&](std::string_view text, Nanos now) {
    const Result<StorageSettings> settings = model.settings(now).With(text);
    ASSERT_TRUE(settings);
    model.Apply(*settings, now);
  };
  change("read_ms=1", 50 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 60 * kMilli).finish_at, 100 * kMilli);
  change("read_ms=2", 150 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 150 * kMilli).finish_at, 150 * kMilli);
  change("stall_ms=100", 200 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 200 * kMilli).finish_at, 300 * kMilli);
  change("stall_ms=0", 210 * kMilli);
  EXPECT_EQ(model.Admit(OpKind::kStat, 0, 210 * kMilli).finish_at, 210 * kMilli);
}

TEST(StorageModel, StallForeverLastsUntilChanged) {
  StorageModel model(Settings("stall_ms=forever"), 0);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1, 0).finish_at, StorageModel::kNever);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1, 1000 * kSecond).finish_at, StorageModel::kNever);
  EXPECT_EQ(model.settings(1000 * kSecond).stall, StorageSettings::kForever);
  model.Apply(Settings("read_ms=1"), 2000 * kSecond);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1, 2000 * kSecond).finish_at, 2000 * kSecond + kMilli);
}

TEST(StorageModel, AChangedLimitForgetsItsBacklog) {
  StorageModel model(Settings("bandwidth_mb=1,ops=1"), 0);
  for (int i = 0; i < 100; ++i) model.Admit(OpKind::kRead, 1'000'000, 0);
  model.Apply(Settings("bandwidth_mb=1000,ops=1000"), kSecond);
  EXPECT_EQ(model.Admit(OpKind::kRead, 1'000'000, kSecond).finish_at, kSecond + kMilli);
}

}  // namespace
}  // namespace forebay
