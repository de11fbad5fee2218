#include "core/policy.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace forebay::control {
namespace {

const std::vector<KnownKnob> kKnobs = {{"parallelism", 1, 256}, {"buffer_bytes", 1 << 20, 1 << 30}};

std::string Complaint(std::string_view json) {
  const Result<Policy> policy = ParsePolicy(json, kKnobs);
  return policy ? "" : policy.error().message();
}

TEST(Policy, ReadsAndWritesAll) {
  const std::string text =
      R"({"job":[{"folder":0,"match":"imagenet-*","max_bandwidth":1000000000,"max_operations":5000,)"
      R"("memory":8589934592,"min_bandwidth":200000000.5,"min_operations":10,"priority":-2,)"
      R"("share":3},{"match":"*"}],"tiers":{"folder":7,"memory":9},)"
      R"("tuner":{"knobs":{"parallelism":32},"on":false},"version":1})";
  const Result<Policy> policy = ParsePolicy(text, kKnobs);
  ASSERT_TRUE(policy) << policy.error().message();
  EXPECT_EQ(WritePolicy(*policy), text);
  const JobRule& rule = policy->RuleFor("imagenet-7");
  EXPECT_EQ(rule.share, 3);
  EXPECT_EQ(rule.priority, -2);
  EXPECT_EQ(rule.min_bandwidth, 200000000.5);
  EXPECT_EQ(rule.max_operations, 5000);
  EXPECT_EQ(rule.memory, int64_t{8} << 30);
  EXPECT_EQ(rule.folder, 0);
  EXPECT_EQ(policy->RuleFor("other").share, 1);
  EXPECT_EQ(policy->RuleFor("other").folder, std::nullopt);
  EXPECT_FALSE(policy->tuner);
  EXPECT_EQ(policy->knobs.at("parallelism"), 32);
}

TEST(Policy, TheDefaultIsNoPolicy) {
  const Result<Policy> policy = ParsePolicy(R"({"version":1})", {});
  ASSERT_TRUE(policy);
  EXPECT_EQ(*policy, Policy());
  EXPECT_EQ(policy->RuleFor("anything"), JobRule());
  EXPECT_EQ(WritePolicy(Policy()), R"({"version":1})");
}

TEST(Policy, TheFirstRuleThatMatchesHolds) {
  const Result<Policy> policy =
      ParsePolicy(R"({"version":1,"job":[{"match":"a*","share":2},{"match":"ab","share":3}]})", {});
  ASSERT_TRUE(policy);
  EXPECT_EQ(policy->RuleFor("ab").share, 2);
}

TEST(Policy, ErrorsNameTheKeyAndTheRemedy) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({})", "version: it is missing; it must be 1"},
      {R"({"version":2})", "version: it is 2; this build reads version 1"},
      {R"([1])", "policy: it must be an object"},
      {R"({"version":1)", "policy: not JSON at byte 12"},
      {R"({"version":1,"jobs":[]})",
       "jobs: it is not a key; there are: version, job, tiers, tuner"},
      {R"({"version":1,"job":[{}]})", "job[0].match: it is missing"},
      {R"({"version":1,"job":[{"match":3}]})", "job[0].match: it must be text"},
      {R"({"version":1,"job":[{"match":""}]})", "job[0].match: it must have 1 to 256"},
      {R"({"version":1,"job":[{"match":"a","shares":3}]})", "job[0].shares: it is not a key"},
      {R"({"version":1,"job":[{"match":"a","share":0}]})", "job[0].share: it must be from 0.001"},
      {R"({"version":1,"job":[{"match":"a","share":"3"}]})", "job[0].share: it must be a number"},
      {R"({"version":1,"job":[{"match":"a"},{"match":"b","priority":101}]})",
       "job[1].priority: it must be from -100 to 100"},
      {R"({"version":1,"job":[{"match":"a","priority":4294967297}]})",
       "job[0].priority: it must be"},
      {R"({"version":1,"job":[{"match":"a","min_bandwidth":-1}]})",
       "job[0].min_bandwidth: it must be 0 or more"},
      {R"({"version":1,"job":[{"match":"a","max_operations":0}]})",
       "job[0].max_operations: it must be above 0; leave it out for no limit"},
      {R"({"version":1,"job":[{"match":"a","min_bandwidth":9,"max_bandwidth":8}]})",
       "job[0].min_bandwidth: it is above max_bandwidth"},
      {R"({"version":1,"job":[{"match":"a","memory":1.5}]})",
       "job[0].memory: it must be a number of bytes"},
      {R"({"version":1,"job":[{"match":"a","folder":-1}]})", "job[0].folder: it must be 0 or more"},
      {R"({"version":1,"job":[{"match":"*"},{"match":"a"}]})",
       "job[1].match: it is never reached: job[0] with match \"*\" comes first"},
      {R"({"version":1,"tiers":{"memory":-5}})", "tiers.memory: it must be 0 or more"},
      {R"({"version":1,"tiers":{"nvme":5}})", "tiers.nvme: it is not a key"},
      {R"({"version":1,"tuner":{"on":1}})", "tuner.on: it must be true or false"},
      {R"({"version":1,"tuner":{"knobs":{"threads":1}}})",
       "tuner.knobs.threads: there is no such knob; there are: parallelism, buffer_bytes"},
      {R"({"version":1,"tuner":{"knobs":{"parallelism":0}}})",
       "tuner.knobs.parallelism: it is 0; it must be from 1 to 256"},
      {R"({"version":1,"tuner":{"knobs":{"parallelism":1.5}}})",
       "tuner.knobs.parallelism: it must be a whole number"},
  };
  for (const auto& [json, said] : cases) {
    EXPECT_EQ(Complaint(json).substr(0, said.size()), said) << json;
  }
}

TEST(Policy, KnobsAreNotComparedWithNothing) {
  EXPECT_TRUE(ParsePolicy(R"({"version":1,"tuner":{"knobs":{"threads":1}}})", {}));
}

TEST(Glob, Matches) {
  EXPECT_TRUE(GlobMatches("*", ""));
  EXPECT_TRUE(GlobMatches("", ""));
  EXPECT_TRUE(GlobMatches("a?c", "abc"));
  EXPECT_TRUE(GlobMatches("*-train-*", "x-train-train-1"));
  EXPECT_TRUE(GlobMatches("a*b*c", "aXbXbc"));
  EXPECT_TRUE(GlobMatches("abc**", "abc"));
  EXPECT_FALSE(GlobMatches("", "a"));
  EXPECT_FALSE(GlobMatches("?", ""));
  EXPECT_FALSE(GlobMatches("a*b", "abc"));
  EXPECT_FALSE(GlobMatches("abc", "ab"));
  // A pattern that costs a naive matcher the age of the universe.
  std::string pattern;
  for (int i = 0; i < 60; ++i) pattern += "a*";
  EXPECT_FALSE(GlobMatches(pattern + "b", std::string(2000, 'a')));
}

}  // namespace
}  // namespace forebay::control
