#include "metrics/registry.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace forebay {
namespace {

TEST(Registry, OneMetricForOneName) {
  Registry registry;
  Metric& a = registry.AddCounter("forebay_x_total", "x");
  Metric& b = registry.AddCounter("forebay_x_total", "x");
  a.Add(2);
  b.Add(3);
  EXPECT_EQ(&a, &b);
  EXPECT_EQ(registry.Snapshot().size(), 1u);
  EXPECT_EQ(registry.PrometheusText(),
            "# HELP forebay_x_total x\n# TYPE forebay_x_total counter\nforebay_x_total 5\n");
}

TEST(Registry, KnobOutOfRangeNamesRangeAndKeepsValue) {
  Registry registry;
  Mechanism& prefetch = registry.AddMechanism("prefetch", "reads ahead");
  Knob& knob = prefetch.AddKnob("reads", KnobType::kCount, 1, 8, 4, "reads in flight");
  const Status bad = registry.SetKnob("reads", 9);
  EXPECT_EQ(bad.code(), Code::kInvalidArgument);
  EXPECT_NE(bad.message().find("1 to 8"), std::string::npos);
  EXPECT_EQ(knob.value(), 4);
  EXPECT_TRUE(registry.SetKnob("reads", 8).ok());
  EXPECT_EQ(knob.value(), 8);
  const Status unknown = registry.SetKnob("read", 1);
  EXPECT_EQ(unknown.code(), Code::kInvalidArgument);
  EXPECT_NE(unknown.message().find("reads"), std::string::npos);
}

TEST(Registry, AllKnobsOrNone) {
  Registry registry;
  Mechanism& one = registry.AddMechanism("one", "");
  Knob& a = one.AddKnob("a", KnobType::kCount, 0, 8, 1, "");
  Knob& b = registry.AddMechanism("two", "").AddKnob("b", KnobType::kSwitch, 0, 1, 0, "");
  const std::vector<std::vector<KnobSetting>> wrong = {
      {{"a", 2}, {"b", 2}}, {{"a", 2}, {"c", 1}}, {{"a", 2}, {"a", 3}}};
  for (const auto& settings : wrong) {
    EXPECT_EQ(registry.Apply(settings).code(), Code::kInvalidArgument);
    EXPECT_EQ(a.value(), 1);
    EXPECT_EQ(b.value(), 0);
  }
  EXPECT_TRUE(registry.Apply(std::vector<KnobSetting>{{"a", 2}, {"b", 1}}).ok());
  EXPECT_EQ(a.value(), 2);
  EXPECT_EQ(b.value(), 1);
}

// A reader never sees one of two knobs that are always set together to the same value.
TEST(Registry, KnobsSetTogetherAreReadTogether) {
  Registry registry;
  Mechanism& mechanism = registry.AddMechanism("m", "");
  Knob& a = mechanism.AddKnob("a", KnobType::kCount, 0, 1 << 20, 0, "");
  Knob& b = mechanism.AddKnob("b", KnobType::kCount, 0, 1 << 20, 0, "");
  constexpr int64_t kLast = 20'000;
  std::jthread writer([&] {
    for (int64_t i = 1; i <= kLast; ++i) {
      ASSERT_TRUE(registry.Apply(std::vector<KnobSetting>{{"a", i}, {"b", i}}).ok());
    }
  });
  uint64_t seen = 0;
  int64_t last = -1;
  size_t torn = 0;
  size_t reads = 0;
  while (last < kLast) {
    registry.ReadKnobs(&seen, [&] {
      ++reads;
      torn += a.value() != b.value() ? 1 : 0;
      last = a.value();
    });
  }
  EXPECT_EQ(torn, 0u);
  registry.ReadKnobs(&seen, [&] { ++reads; });
  const size_t before = reads;
  registry.ReadKnobs(&seen, [&] { ++reads; });
  EXPECT_EQ(reads, before) << "nothing was set since";
}

TEST(Registry, MechanismsListTheirKnobsAndMetrics) {
  Registry registry;
  registry.AddCounter("forebay_of_nobody_total", "");
  Mechanism& tier = registry.AddMechanism("tier", "keeps");
  tier.AddKnob("tier_bytes", KnobType::kBytes, 0, 8, 8, "most");
  tier.AddGauge("forebay_tier_bytes", "");
  EXPECT_EQ(&registry.AddMechanism("tier", "keeps"), &tier);
  const auto listed = registry.Mechanisms();
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_EQ(listed[0].mechanism->meaning(), "keeps");
  ASSERT_EQ(listed[0].knobs.size(), 1u);
  EXPECT_EQ(KnobTypeName(listed[0].knobs[0]->type()), "bytes");
  EXPECT_EQ(listed[0].metrics, std::vector<std::string>{"forebay_tier_bytes"});
}

TEST(Metric, RaiseKeepsTheLargest) {
  Metric m;
  m.Raise(5);
  m.Raise(3);
  EXPECT_EQ(m.value(), 5u);
}

}  // namespace
}  // namespace forebay
