#include "core/directory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/rng.h"
#include "core/home.h"

namespace forebay::peer {
namespace {

std::vector<uint32_t> Lengths(uint32_t count, uint64_t seed, uint32_t most = 1000) {
  SplitMix64 rng(seed);
  std::vector<uint32_t> lengths(count);
  for (uint32_t& length : lengths) length = static_cast<uint32_t>(1 + rng.Below(most));
  return lengths;
}

uint64_t Sum(const std::vector<uint32_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
}

View ViewOf(uint32_t nodes, uint64_t memory, uint64_t folder) {
  View view;
  view.version = 1;
  view.nodes = nodes;
  for (uint32_t n = 0; n < nodes; ++n) {
    Member member;
    member.node = n;
    member.memory = memory;
    member.folder = folder;
    view.members.push_back(member);
  }
  return view;
}

View Without(View view, std::vector<uint32_t> dead) {
  for (const uint32_t node : dead) view.members[node].alive = false;
  return view;
}

std::vector<uint32_t> Homes(const Directory& directory) {
  std::vector<uint32_t> homes;
  for (SampleId s = 0; s < directory.size(); ++s) homes.push_back(directory.Locate(s).home);
  return homes;
}

std::vector<uint32_t> HomesFor(const std::vector<uint32_t>& lengths, const View& view,
                               uint32_t self = 0) {
  Directory directory(self, lengths);
  directory.OnView(view);
  return Homes(directory);
}

TEST(Directory, HomesAreThePlainHashWhileThereIsRoom) {
  const auto lengths = Lengths(4000, 1);
  const View view = ViewOf(4, Sum(lengths) * 3 / 10, 0);
  Directory directory(2, lengths);
  EXPECT_EQ(directory.Locate(5).home, kNoNode);  // nothing is known yet
  EXPECT_TRUE(directory.OnView(view));
  EXPECT_FALSE(directory.OnView(view));
  EXPECT_EQ(directory.homeless(), 0u);
  uint64_t bytes = 0;
  uint32_t samples = 0;
  for (SampleId s = 0; s < lengths.size(); ++s) {
    const uint32_t home = directory.Locate(s).home;
    ASSERT_EQ(home, HomeOf(s, 4).node);
    ASSERT_EQ(directory.ShareOf(s), home == 2 ? KeepShare::kHome : KeepShare::kReplica);
    if (home == 2) {
      bytes += lengths[s];
      ++samples;
    }
  }
  EXPECT_EQ(directory.home_bytes(2), bytes);
  EXPECT_EQ(directory.home_samples(2), samples);
  EXPECT_EQ(directory.home_bytes(99), 0u);
}

TEST(Directory, OnlyTheDeadsSamplesMoveAndAReturnRestoresThem) {
  const auto lengths = Lengths(3000, 2);
  const View all = ViewOf(5, Sum(lengths), 0);
  Directory directory(0, lengths);
  directory.OnView(all);
  const auto before = Homes(directory);
  EXPECT_TRUE(directory.OnView(Without(all, {3})));
  const auto one_dead = Homes(directory);
  std::vector<uint32_t> got(5);
  for (SampleId s = 0; s < lengths.size(); ++s) {
    if (before[s] != 3) {
      ASSERT_EQ(one_dead[s], before[s]);
    } else {
      ASSERT_NE(one_dead[s], 3u);
      ++got[one_dead[s]];
    }
  }
  // All that live share the work.
  for (const uint32_t n : {0u, 1u, 2u, 4u}) EXPECT_GT(got[n], 60u) << n;

  // With room, a second death moves only its own, too.
  directory.OnView(Without(all, {1, 3}));
  const auto two_dead = Homes(directory);
  for (SampleId s = 0; s < lengths.size(); ++s) {
    if (one_dead[s] != 1) {
      ASSERT_EQ(two_dead[s], one_dead[s]);
    }
  }
  EXPECT_TRUE(directory.OnView(Without(all, {1})));
  EXPECT_TRUE(directory.OnView(all));
  EXPECT_EQ(Homes(directory), before);
}

TEST(Directory, NoNodeGetsMoreThanItsRoomAndTheClusterIsFilled) {
  SplitMix64 rng(7);
  for (int round = 0; round < 60; ++round) {
    const auto lengths = Lengths(static_cast<uint32_t>(1 + rng.Below(2000)), rng.Next());
    const auto nodes = static_cast<uint32_t>(1 + rng.Below(9));
    View view = ViewOf(nodes, 0, 0);
    const uint64_t mean = Sum(lengths) / nodes;
    uint64_t room = 0;
    for (Member& member : view.members) {
      member.memory = rng.Below(2 * mean + 1);
      member.folder = rng.Below(2) == 0 ? 0 : rng.Below(2 * mean + 1);
      member.alive = rng.Below(4) != 0;
      if (member.alive) room += member.memory + member.folder;
    }
    Directory directory(0, lengths);
    directory.OnView(view);
    std::vector<uint64_t> used(nodes);
    uint64_t covered = 0;
    uint32_t homeless = 0, shortest = UINT32_MAX;
    for (SampleId s = 0; s < lengths.size(); ++s) {
      const uint32_t home = directory.Locate(s).home;
      if (home == kNoNode) {
        ++homeless;
        shortest = std::min(shortest, lengths[s]);
        continue;
      }
      ASSERT_TRUE(view.members[home].alive);
      used[home] += lengths[s];
      covered += lengths[s];
    }
    ASSERT_EQ(homeless, directory.homeless());
    for (uint32_t n = 0; n < nodes; ++n) {
      ASSERT_LE(used[n], view.members[n].memory + view.members[n].folder);
      ASSERT_EQ(used[n], directory.home_bytes(n));
      // Whoever could take one more has no sample left to take: two tiers may each be too short.
      if (homeless > 0 && view.members[n].alive) {
        ASSERT_LT(view.members[n].memory + view.members[n].folder - used[n], 2 * shortest);
      }
    }
    ASSERT_LE(covered, room);
  }
}

TEST(Directory, EveryNodeFindsTheSameHomesWhateverItSawBefore) {
  SplitMix64 rng(11);
  const auto lengths = Lengths(1500, 3);
  View view = ViewOf(6, Sum(lengths) / 5, 0);
  std::vector<Directory> nodes;
  for (uint32_t n = 0; n < 6; ++n) nodes.emplace_back(n, lengths);
  for (int round = 0; round < 30; ++round) {
    Member& changed = view.members[rng.Below(6)];
    changed.alive = !changed.alive;
    if (round == 15) changed.memory /= 2;
    // Not everyone sees every view.
    for (Directory& node : nodes) {
      if (rng.Below(2) == 0) node.OnView(view);
    }
    nodes[0].OnView(view);
    nodes[5].OnView(view);
    const auto fresh = HomesFor(lengths, view);
    ASSERT_EQ(Homes(nodes[0]), fresh);
    ASSERT_EQ(Homes(nodes[5]), fresh);
  }
}

TEST(Directory, WhoNeverCameCountsAsDead) {
  const auto lengths = Lengths(1000, 4);
  const View all = ViewOf(4, Sum(lengths), 0);
  View some = all;
  some.members.erase(some.members.begin() + 2);
  EXPECT_EQ(HomesFor(lengths, some), HomesFor(lengths, Without(all, {2})));
  View none = all;
  none.members.clear();
  Directory directory(0, lengths);
  EXPECT_FALSE(directory.OnView(none));
  EXPECT_EQ(directory.homeless(), 1000u);
  EXPECT_EQ(directory.ShareOf(0), KeepShare::kNone);
}

// A job of four nodes is restarted with three, then with five: who stays keeps what it had.
TEST(Directory, AnotherNumberOfNodesKeepsWhatItCan) {
  const auto lengths = Lengths(8000, 5);
  for (const uint64_t percent : {30, 100}) {  // of the data set, on each node
    const uint64_t room = Sum(lengths) * percent / 100;
    const auto four = HomesFor(lengths, ViewOf(4, room, 0));
    const auto three = HomesFor(lengths, ViewOf(3, room, 0));
    const auto five = HomesFor(lengths, ViewOf(5, room, 0));
    uint32_t moved = 0, last = 0;
    for (SampleId s = 0; s < lengths.size(); ++s) {
      if (four[s] != 3) {
        ASSERT_EQ(three[s], four[s]) << s;
      }
      last += five[s] == 4 ? 1 : 0;
      moved += five[s] != four[s] ? 1 : 0;
    }
    EXPECT_EQ(moved, last);
    EXPECT_NEAR(last, 1600, 200);
  }
}

TEST(Directory, ReportsCorrectThePlan) {
  const std::vector<uint32_t> lengths(64, 10);
  const View all = ViewOf(4, 1000, 0);
  Directory directory(0, lengths);
  directory.OnView(all);
  SampleId sample = 0;
  while (directory.Locate(sample).home != 1) ++sample;
  EXPECT_EQ(directory.Locate(sample).holder, kNoNode);
  directory.OnGot(0, sample);  // itself
  EXPECT_EQ(directory.Locate(sample).holder, kNoNode);
  directory.OnGot(2, sample);
  EXPECT_EQ(directory.Locate(sample).holder, 2u);
  directory.OnGot(1, sample);
  EXPECT_EQ(directory.Locate(sample).holder, 1u);  // the home before others
  directory.OnLost(1, sample);
  EXPECT_EQ(directory.Locate(sample).home, 1u);
  EXPECT_EQ(directory.Locate(sample).holder, 2u);
  directory.OnLost(2, sample);
  EXPECT_EQ(directory.Locate(sample).holder, kNoNode);

  // A bitmap says what is there and what is not.
  directory.OnGot(3, 8);
  directory.OnGot(3, 9);
  const std::vector<std::byte> bits = {std::byte{0b10}, std::byte{0}};
  directory.OnHave(3, 8, bits);
  EXPECT_EQ(directory.Locate(8).holder, kNoNode);
  EXPECT_EQ(directory.Locate(9).holder, 3u);
  directory.OnDead(3);
  EXPECT_EQ(directory.Locate(9).holder, kNoNode);

  // Nonsense from the network.
  directory.OnGot(UINT32_MAX, 1);
  directory.OnGot(1, 64);
  directory.OnLost(70000, UINT32_MAX);
  directory.OnHave(3, 60, bits);
  directory.OnHave(3, UINT32_MAX, bits);
  EXPECT_EQ(directory.Locate(61).holder, 3u);
}

TEST(Directory, CopiesAreKnownWhenAHomeDiesAndReturns) {
  const std::vector<uint32_t> lengths(400, 10);
  const View all = ViewOf(4, 10000, 0);
  Directory directory(0, lengths);
  directory.OnView(all);
  const View dead = Without(all, {1});
  Directory after(0, lengths);
  after.OnView(dead);
  SampleId sample = 0;  // moves from 1 to 2
  while (directory.Locate(sample).home != 1 || after.Locate(sample).home != 2) ++sample;
  directory.OnGot(1, sample);
  directory.OnGot(2, sample);
  directory.OnView(dead);
  EXPECT_EQ(directory.Locate(sample).home, 2u);
  EXPECT_EQ(directory.Locate(sample).holder, 2u);
  // The old home comes back empty: who stood in for it still has the copy.
  directory.OnView(all);
  EXPECT_EQ(directory.Locate(sample).home, 1u);
  EXPECT_EQ(directory.Locate(sample).holder, 2u);
  directory.OnGot(1, sample);
  EXPECT_EQ(directory.Locate(sample).holder, 1u);
}

TEST(Directory, FourThousandNodes) {
  const std::vector<uint32_t> lengths(200000, 100);
  const View all = ViewOf(4096, 100 * 60, 0);
  Directory directory(4095, lengths);
  directory.OnView(Without(all, {0, 17, 4094}));
  EXPECT_EQ(directory.homeless(), 0u);
  uint64_t bytes = 0;
  for (uint32_t n = 0; n < 4096; ++n) {
    ASSERT_LE(directory.home_bytes(n), 6000u);
    bytes += directory.home_bytes(n);
  }
  EXPECT_EQ(bytes, 200000u * 100);
  EXPECT_EQ(directory.home_bytes(17), 0u);
}

}  // namespace
}  // namespace forebay::peer
