#include "metrics/registry.h"

#include <gtest/gtest.h>

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
  Knob& knob = registry.AddKnob("reads", 1, 8, 4, "reads in flight");
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

TEST(Metric, RaiseKeepsTheLargest) {
  Metric m;
  m.Raise(5);
  m.Raise(3);
  EXPECT_EQ(m.value(), 5u);
}

}  // namespace
}  // namespace forebay
