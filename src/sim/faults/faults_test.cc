// The cluster under faults, by seed. FOREBAY_SEEDS above 300: so many of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "sim/faults/bugs.h"
#include "sim/faults/cluster.h"

namespace forebay::sim {
namespace {

constexpr uint64_t kLeastSeeds = 300;
constexpr uint64_t kParts = 6;  // that may run side by side

uint64_t Seeds() {
  const char* text = std::getenv("FOREBAY_SEEDS");
  return std::max<uint64_t>(kLeastSeeds, text == nullptr ? 0 : std::strtoull(text, nullptr, 10));
}

std::string Told(const FaultRun& run, const FaultOutcome& out, const std::string& bug = "") {
  return StrCat("seed ", run.seed, ": ", out.violation, ": ", out.what, "\n",
                ReplayCommand(run.seed, out.schedule, bug),
                "\nshortest: ", ReplayCommand(run.seed, Shrink(run, out, 100), bug));
}

class FaultSeeds : public ::testing::TestWithParam<uint64_t> {};

TEST_P(FaultSeeds, HoldWhatIsPromised) {
  uint64_t batches = 0;
  uint64_t from_peers = 0;
  for (uint64_t seed = 1 + GetParam(); seed <= Seeds(); seed += kParts) {
    const FaultRun run{.seed = seed};
    const FaultOutcome out = RunFaults(run);
    ASSERT_TRUE(out.ok()) << Told(run, out);
    batches += out.batches;
    from_peers += out.peer_reads;
  }
  // They did something.
  EXPECT_GT(batches, 100 * Seeds() / kParts);
  EXPECT_GT(from_peers, 100 * Seeds() / kParts);
}

INSTANTIATE_TEST_SUITE_P(Parts, FaultSeeds, ::testing::Range<uint64_t>(0, kParts));

TEST(FaultSimulator, TheSameSeedIsTheSameRun) {
  for (uint64_t seed = 20; seed < 26; ++seed) {
    const FaultOutcome a = RunFaults({.seed = seed});
    const FaultOutcome b = RunFaults({.seed = seed, .schedule = a.schedule});
    EXPECT_EQ(a.hash, b.hash);
    EXPECT_EQ(a.events, b.events);
    EXPECT_EQ(a.batches, b.batches);
    EXPECT_NE(a.hash, RunFaults({.seed = seed + 100}).hash);
  }
}

TEST(FaultSimulator, SchedulesAreText) {
  for (uint64_t seed = 1; seed < 200; ++seed) {
    const Schedule drawn = Schedule::Draw(seed, 2 + seed % 4);
    const Result<Schedule> parsed = Schedule::Parse(drawn.ToString());
    ASSERT_TRUE(parsed) << parsed.status().ToString();
    EXPECT_EQ(parsed->faults, drawn.faults);
  }
  EXPECT_TRUE(Schedule::Parse("")->faults.empty());
  for (const char* wrong : {"crash", "crash:1:2:3:4", "crash:1:2:3:4:5:6", "burn:1:2:3:4:5",
                            "crash:1:2:3:4:x", "crash:1:2:3:4:5,", "crash:-1:2:3:4:5"}) {
    const Result<Schedule> parsed = Schedule::Parse(wrong);
    EXPECT_TRUE(!parsed || std::string_view(wrong).ends_with(',')) << wrong;
  }
}

class PlantedBugs : public ::testing::TestWithParam<size_t> {
 protected:
  void TearDown() override { planted_bug = PlantedBug::kNone; }
};

TEST_P(PlantedBugs, AreFoundWithinAThousandSeeds) {
  const auto [name, bug] = kBugs[GetParam()];
  planted_bug = bug;
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    const FaultRun run{.seed = seed};
    const FaultOutcome out = RunFaults(run);
    if (out.ok()) continue;
    const Schedule shortest = Shrink(run, out, 60);
    EXPECT_LE(shortest.faults.size(), out.schedule.faults.size());
    const FaultRun again{.seed = seed, .schedule = shortest};
    EXPECT_EQ(RunFaults(again).violation, out.violation) << ReplayCommand(seed, shortest, "");
    planted_bug = PlantedBug::kNone;
    const FaultOutcome without = RunFaults(again);
    EXPECT_TRUE(without.ok()) << Told(again, without);
    RecordProperty("seed", static_cast<int>(seed));
    return;
  }
  FAIL() << name << " was not found";
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedBugs, ::testing::Range<size_t>(0, kBugs.size()),
                         [](const ::testing::TestParamInfo<size_t>& one) {
                           std::string name(kBugs[one.param].first);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace forebay::sim
