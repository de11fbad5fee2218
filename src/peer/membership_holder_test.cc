// Who holds the list of members when nodes die, return, come late, and lose sight of each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "base/thread_annotations.h"
#include "peer/holder_file.h"
#include "peer/membership_testing.h"
#include "peer/secret.h"

namespace forebay::peer {
namespace {

using testing::Alive;
using testing::Await;
using testing::Job;
using testing::kSecret;

// Links between nodes that a test cuts. Safe for concurrent use by multiple threads.
class Cuts {
 public:
  bool IsCut(uint32_t a, uint32_t b) const {
    MutexLock lock(mutex_);
    return cut_.contains(std::minmax(a, b));
  }
  void Cut(uint32_t a, uint32_t b) {
    MutexLock lock(mutex_);
    cut_.insert(std::minmax(a, b));
  }
  // Between every node of the one half and every node of the other.
  void Split(const std::vector<uint32_t>& one, const std::vector<uint32_t>& other) {
    for (const uint32_t a : one) {
      for (const uint32_t b : other) Cut(a, b);
    }
  }
  void Heal() {
    MutexLock lock(mutex_);
    cut_.clear();
  }

 private:
  mutable Mutex mutex_;
  std::set<std::pair<uint32_t, uint32_t>> cut_ GUARDED_BY(mutex_);
};

class HolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_holder_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    // A thread that nobody waits for may just write there.
    EXPECT_TRUE(Await([&] {
      std::error_code error;
      std::filesystem::remove_all(folder_, error);
      return !std::filesystem::exists(folder_);
    }));
  }

  std::string file() const { return folder_ + "/secret.holder"; }
  // As the nodes of a cluster with a shared home folder.
  void Prepare(Job& job) {
    job.Adjust([this](MembershipOptions& options) {
      options.holder_file = file();
      options.cut = [this, self = options.self.node](uint32_t node) {
        return cuts_.IsCut(self, node);
      };
    });
  }

  static bool Holds(const Membership& member) {
    return member.Holder().starts_with("registrar at");
  }

  // Those nodes see each other alive and all the rest dead; the lowest of them, or `holder`, holds
  // the list, and the others are registered with it.
  static bool Settled(Job& job, const std::set<uint32_t>& nodes, uint32_t holder) {
    const auto reference = job[*nodes.begin()].Current().members;
    for (const uint32_t node : nodes) {
      const Membership& member = job[node];
      if (member.Current().members != reference || !member.health().ok()) return false;
      const std::string wanted =
          node == holder ? "registrar at" : StrCat("registered with node ", holder, " ");
      if (!member.Holder().starts_with(wanted)) return false;
    }
    std::set<uint32_t> alive;
    for (const Member& one : reference) {
      if (one.alive) alive.insert(one.node);
    }
    return alive == nodes;
  }
  static std::string Told(Job& job, const std::set<uint32_t>& nodes) {
    std::string out;
    for (const uint32_t node : nodes) {
      out += StrCat(job[node].Describe(), " | ", job[node].Holder(), "\n");
    }
    return out;
  }
  static void ExpectSettled(Job& job, const std::set<uint32_t>& nodes, uint32_t holder) {
    ASSERT_TRUE(Await([&] { return Settled(job, nodes, holder); }, 60 * kSecond))
        << Told(job, nodes);
  }
  // Nothing changes any more.
  static void ExpectQuiet(Job& job, const std::set<uint32_t>& nodes, Nanos time) {
    std::vector<uint64_t> before;
    for (const uint32_t node : nodes) before.push_back(job[node].counts().contacts);
    std::this_thread::sleep_for(std::chrono::nanoseconds(time));
    size_t i = 0;
    for (const uint32_t node : nodes) {
      EXPECT_EQ(job[node].counts().contacts, before[i++]) << "node " << node;
    }
  }

  std::string folder_;
  Cuts cuts_;
};

TEST_F(HolderTest, TheNextOneTakesOverAndTellsOfDeaths) {
  Job job(4);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3}, 0);
  job.Stop(0);
  ExpectSettled(job, {1, 2, 3}, 1);
  job.Stop(3);
  ExpectSettled(job, {1, 2}, 1);
  job.Start(3, 33);
  ExpectSettled(job, {1, 2, 3}, 1);
  job.Start(0, 55);
  ExpectSettled(job, {0, 1, 2, 3}, 0);
  EXPECT_TRUE(Alive(job[2], 0, 55) && Alive(job[2], 3, 33));
  job.Stop(0);
  ExpectSettled(job, {1, 2, 3}, 1);
  job.Stop(1);
  ExpectSettled(job, {2, 3}, 2);
}

// Only what was the dead holder's own moves.
TEST_F(HolderTest, NobodyElseVanishesWhileTheListPassesOn) {
  Job job(5);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3, 4}, 0);
  const uint64_t deaths = job[4].counts().deaths;
  job.Stop(0);
  ExpectSettled(job, {1, 2, 3, 4}, 1);
  EXPECT_EQ(job[4].counts().deaths, deaths + 1);
  job.Start(0, 2);
  ExpectSettled(job, {0, 1, 2, 3, 4}, 0);
  EXPECT_EQ(job[4].counts().deaths, deaths + 1);
  EXPECT_EQ(job[3].counts().deaths, deaths + 1);
  EXPECT_EQ(job[0].counts().deaths, 0u);
}

TEST_F(HolderTest, LateJoinersFindWhoTookOver) {
  Job job(5);
  Prepare(job);
  for (const uint32_t node : {0u, 1u, 2u}) job.Start(node);
  ExpectSettled(job, {0, 1, 2}, 0);
  EXPECT_FALSE(std::filesystem::exists(file())) << "nobody needs it";
  job.Stop(0);
  ExpectSettled(job, {1, 2}, 1);
  job.Start(4);
  ExpectSettled(job, {1, 2, 4}, 1);
  job.Start(3);
  ExpectSettled(job, {1, 2, 3, 4}, 1);
  // The holder again, and one that was there returns.
  job.Stop(1);
  ExpectSettled(job, {2, 3, 4}, 2);
  job.Start(1, 11);  // below the holder: it joins all the same
  ExpectSettled(job, {1, 2, 3, 4}, 2);
  job.Stop(2);
  ExpectSettled(job, {1, 3, 4}, 1);
}

TEST_F(HolderTest, TheLossOfAMajority) {
  Job job(4);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3}, 0);
  job.Stop(1);
  job.Stop(0);
  ExpectSettled(job, {2, 3}, 2);
  job.Stop(2);
  ExpectSettled(job, {3}, 3);
  job.Start(1, 5);
  ExpectSettled(job, {1, 3}, 3);
  job.Start(2, 5);
  ExpectSettled(job, {1, 2, 3}, 3);
}

TEST_F(HolderTest, ASilentHolderIsReplacedAfterTheLease) {
  constexpr Nanos kLease = kSecond;
  Job job(4, kLease);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3}, 0);
  cuts_.Split({0}, {1, 2, 3});
  ExpectSettled(job, {1, 2, 3}, 1);
  ExpectSettled(job, {0}, 0);
}

TEST_F(HolderTest, HalvesMerge) {
  constexpr Nanos kLease = kSecond;
  Job job(6, kLease);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3, 4, 5}, 0);
  cuts_.Split({0, 1, 4}, {2, 3, 5});
  ExpectSettled(job, {0, 1, 4}, 0);
  ExpectSettled(job, {2, 3, 5}, 2);
  cuts_.Heal();
  ExpectSettled(job, {0, 1, 2, 3, 4, 5}, 0);
  ExpectQuiet(job, {0, 1, 2, 3, 4, 5}, 2 * kLease);
}

// The higher holder is found by the lower one, too: here it is all that can reach the other half.
TEST_F(HolderTest, HalvesMergeOverOneConnection) {
  constexpr Nanos kLease = kSecond;
  Job job(6, kLease);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3, 4, 5}, 0);
  job.Stop(0);
  ExpectSettled(job, {1, 2, 3, 4, 5}, 1);
  cuts_.Split({1, 3}, {2, 4, 5});
  ExpectSettled(job, {1, 3}, 1);
  ExpectSettled(job, {2, 4, 5}, 2);
  job.Start(5, 50);  // an address that the other half does not know
  ExpectSettled(job, {2, 4, 5}, 2);
  cuts_.Heal();
  ExpectSettled(job, {1, 2, 3, 4, 5}, 1);
  // The file names who holds the list, not who has yielded.
  ASSERT_TRUE(Await([&] {
    std::ifstream in(file());
    const std::string text(std::istreambuf_iterator<char>(in), {});
    const auto hint = ParseHolderText(kSecret, text);
    return hint && hint->node == 1;
  }));
}

// Who alone cannot reach the holder does not make a list of its own, and keeps its view.
TEST_F(HolderTest, OneBadLinkMakesNoHolder) {
  constexpr Nanos kLease = 500 * kMilli;
  Job job(4, kLease);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2, 3}, 0);
  cuts_.Cut(0, 3);
  ASSERT_TRUE(Await([&] { return !Alive(job[1], 3) && !job[3].health().ok(); }));
  const Nanos until = SteadyClock().Now() + 4 * kLease;
  while (SteadyClock().Now() < until) {
    ASSERT_FALSE(Holds(job[3])) << job[3].Describe();
    ASSERT_TRUE(Holds(job[0]) && !Holds(job[1]) && !Holds(job[2]));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(Alive(job[3], 1) && Alive(job[3], 2));
  cuts_.Heal();
  ExpectSettled(job, {0, 1, 2, 3}, 0);
}

TEST_F(HolderTest, ASecondProcessOfANodeIsNoHolderAndKeepsNobodyWaiting) {
  Job job(3, kSecond);
  Prepare(job);
  job.StartAll();
  ExpectSettled(job, {0, 1, 2}, 0);
  auto second = Join(job.Options(1, 2));
  ASSERT_TRUE(second);
  ASSERT_TRUE(Await([&] { return Alive(job[2], 1, 2) && !job[1].health().ok(); }));
  job.Stop(0);
  ASSERT_TRUE(Await([&] { return Holds(**second) && Alive(job[2], 1, 2) && !Alive(job[2], 0); }))
      << (*second)->Describe();
  EXPECT_TRUE(Await([&] { return job[2].Holder().starts_with("registered with node 1"); }));
  EXPECT_FALSE(Holds(job[1]));
}

// A file of another job, or one that somebody has changed.
TEST_F(HolderTest, AWrongFileIsNoHint) {
  const HolderHint hint{3, "10.0.0.3:7712"};
  const std::string text = HolderText(kSecret, hint);
  EXPECT_EQ(ParseHolderText(kSecret, text), hint);
  EXPECT_EQ(ParseHolderText(std::string(32, 'x'), text), std::nullopt);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] ^= 1;
    EXPECT_EQ(ParseHolderText(kSecret, changed), std::nullopt) << i;
    EXPECT_EQ(ParseHolderText(kSecret, text.substr(0, i)), std::nullopt) << i;
  }
  EXPECT_EQ(ParseHolderText(kSecret, text + text), std::nullopt);
  EXPECT_EQ(ParseHolderText(kSecret, HolderText(kSecret, {3, "nowhere"})), std::nullopt);
}

// Such as a loader's and that of `forebay run` in one script.
TEST_F(HolderTest, JobsWithOneSecretHaveFilesOfTheirOwn) {
  ClusterSpec one;
  one.secret_file = folder_ + "/secret";
  ClusterSpec other = one;
  one.job = "job";
  other.job = "job-files";
  ASSERT_TRUE(HolderFile(one) && HolderFile(other));
  EXPECT_TRUE(HolderFile(one)->starts_with(one.secret_file + ".holder-"));
  EXPECT_NE(*HolderFile(one), *HolderFile(other));
}

TEST_F(HolderTest, AFolderThatCannotBeWrittenToIsNamed) {
  Job job(2);
  Prepare(job);
  job.Adjust([this](MembershipOptions& options) {
    options.holder_file = folder_ + "/missing/secret.holder";
  });
  job.StartAll();
  ExpectSettled(job, {0, 1}, 0);
  job.Stop(0);
  ExpectSettled(job, {1}, 1);
  EXPECT_TRUE(Await([&] {
    return job[1].Holder().find(folder_ + "/missing") != std::string::npos &&
           job[1].Holder().find("FOREBAY_PEER_SECRET") != std::string::npos;
  })) << job[1].Holder();
}

uint64_t Seeds() {
  const char* text = std::getenv("FOREBAY_SEEDS");
  return text == nullptr ? 5 : std::strtoull(text, nullptr, 10);
}

// Deaths, returns and cuts at random; in the end all that live have one view and one holder.
TEST_F(HolderTest, InTheEndThereIsOneHolder) {
  constexpr uint32_t kNodes = 5;
  for (uint64_t seed = 0; seed < Seeds(); ++seed) {
    SCOPED_TRACE(StrCat("seed ", seed));
    std::filesystem::remove(file());
    SplitMix64 random(seed);
    Job job(kNodes, 400 * kMilli);
    Prepare(job);
    job.StartAll();
    std::set<uint32_t> all;
    for (uint32_t node = 0; node < kNodes; ++node) all.insert(node);
    ExpectSettled(job, all, 0);
    std::set<uint32_t> running = all;
    uint64_t incarnation = 1;
    std::string done;
    for (int step = 0; step < 8; ++step) {
      const auto node = static_cast<uint32_t>(random.Below(kNodes));
      switch (random.Below(4)) {
        case 0: {
          std::array<std::vector<uint32_t>, 2> halves;
          for (const uint32_t one : all) halves[random.Below(2)].push_back(one);
          cuts_.Split(halves[0], halves[1]);
          done += " cut";
          break;
        }
        case 1:
          cuts_.Heal();
          done += " heal";
          break;
        default:
          if (!running.contains(node)) {
            job.Start(node, ++incarnation);
            running.insert(node);
            done += StrCat(" start", node);
          } else if (running.size() > 1) {
            job.Stop(node);
            running.erase(node);
            done += StrCat(" stop", node);
          }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(random.Below(600)));
    }
    cuts_.Heal();
    // Nodes that have never heard of each other meet at the master's address only.
    bool somebody_knows = false;
    for (const uint32_t node : running) {
      somebody_knows |= node != 0 && !job[node].Current().members.empty();
    }
    if (!running.contains(0) && (!somebody_knows || random.Below(2) == 0)) {
      job.Start(0, ++incarnation);
      running.insert(0);
    }
    const auto holders = [&] {
      std::vector<uint32_t> found;
      for (const uint32_t node : running) {
        if (Holds(job[node])) found.push_back(node);
      }
      return found;
    };
    ASSERT_TRUE(Await(
        [&] {
          const auto found = holders();
          return found.size() == 1 && Settled(job, running, found.front());
        },
        60 * kSecond))
        << done << "\n"
        << Told(job, running);
  }
}

}  // namespace
}  // namespace forebay::peer
