#include "peer/membership_table.h"

#include <gtest/gtest.h>

#include "peer/membership_view.h"

namespace forebay::peer {
namespace {

Member Someone(uint32_t node, uint64_t incarnation) { return {node, incarnation, "a", 1, 2, true}; }

class MemberTableTest : public ::testing::Test {
 protected:
  MemberTableTest() { table_.RegisterSelf(Someone(0, 100)); }
  bool Alive(uint32_t node) {
    const Member* member = table_.Find(node);
    return member != nullptr && member->alive;
  }
  MemberTable table_{4, 10};
};

TEST_F(MemberTableTest, SilentForTheLeaseIsDead) {
  ASSERT_TRUE(table_.Register(Someone(1, 7), 0).ok());
  ASSERT_TRUE(table_.Register(Someone(2, 8), 0).ok());
  table_.Renew(1, 7, 5);
  table_.Renew(2, 9, 5);  // not that one
  table_.Expire(9);
  EXPECT_TRUE(Alive(1) && Alive(2));
  table_.Expire(10);
  EXPECT_TRUE(Alive(1));
  EXPECT_FALSE(Alive(2));
  table_.Expire(15);
  EXPECT_FALSE(Alive(1));
  table_.Expire(1000);
  EXPECT_TRUE(Alive(0)) << "the table's own node";
  EXPECT_EQ(table_.deaths(), 2u);
}

TEST_F(MemberTableTest, VersionsTellWhatHasChanged) {
  const uint64_t first = table_.version();
  ASSERT_TRUE(table_.Register(Someone(1, 7), 0).ok());
  ASSERT_TRUE(table_.Register(Someone(3, 9), 0).ok());
  const uint64_t second = table_.version();
  EXPECT_EQ(table_.Since(first).size(), 2u);
  EXPECT_TRUE(table_.Since(second).empty());
  ASSERT_TRUE(table_.Register(Someone(3, 9), 1).ok());  // again, as before
  EXPECT_EQ(table_.version(), second);
  table_.Gone(1, 6);  // a late word of somebody else
  EXPECT_EQ(table_.version(), second);
  table_.Gone(1, 7);
  ASSERT_EQ(table_.Since(second).size(), 1u);
  EXPECT_EQ(table_.Since(second)[0].node, 1u);
  EXPECT_FALSE(table_.Since(second)[0].alive);
  EXPECT_EQ(table_.Current().members.size(), 3u);
  EXPECT_FALSE(table_.Current().complete());
}

TEST_F(MemberTableTest, ReturnsAsANewIncarnationAndTheOldOneStaysAway) {
  ASSERT_TRUE(table_.Register(Someone(1, 7), 0).ok());
  ASSERT_TRUE(table_.Register(Someone(1, 8), 1).ok());
  EXPECT_EQ(table_.Find(1)->incarnation, 8u);
  EXPECT_EQ(table_.deaths(), 1u);
  EXPECT_EQ(table_.Register(Someone(1, 7), 2).code(), Code::kChanged);
  table_.Gone(1, 8);
  EXPECT_FALSE(Alive(1));
  ASSERT_TRUE(table_.Register(Someone(1, 8), 3).ok());  // the same process, after a cut
  EXPECT_TRUE(Alive(1));
}

TEST_F(MemberTableTest, OnlyNodesOfTheJob) {
  EXPECT_FALSE(table_.Register(Someone(4, 7), 0).ok());
  EXPECT_FALSE(table_.Register(Someone(0, 7), 0).ok());
  EXPECT_EQ(table_.Find(0)->incarnation, 100u);
}

TEST_F(MemberTableTest, SuspectsHaveAQuarterOfTheLease) {
  ASSERT_TRUE(table_.Register(Someone(1, 7), 0).ok());
  ASSERT_TRUE(table_.Register(Someone(2, 8), 0).ok());
  EXPECT_TRUE(table_.Suspect(1, 7, 1));
  EXPECT_TRUE(table_.Suspect(2, 8, 1));
  EXPECT_FALSE(table_.Suspect(2, 9, 1));
  EXPECT_FALSE(table_.Suspect(3, 9, 1));
  EXPECT_TRUE(table_.Suspect(0, 100, 1));
  table_.Renew(2, 8, 2);
  table_.Expire(3);
  EXPECT_FALSE(Alive(1));
  EXPECT_TRUE(Alive(2));
  EXPECT_TRUE(Alive(0));
}

// Its connection held all the time: it does not register again.
TEST_F(MemberTableTest, WhoIsHeardOfAgainLives) {
  ASSERT_TRUE(table_.Register(Someone(1, 7), 0).ok());
  EXPECT_TRUE(table_.Suspect(1, 7, 1));
  table_.Expire(4);
  EXPECT_FALSE(Alive(1));
  const uint64_t version = table_.version();
  table_.Renew(1, 6, 5);  // not that one
  EXPECT_FALSE(Alive(1));
  table_.Renew(1, 7, 5);
  EXPECT_TRUE(Alive(1));
  EXPECT_GT(table_.version(), version) << "the others are told";
  table_.Expire(14);
  EXPECT_TRUE(Alive(1));
  table_.Expire(15);
  EXPECT_FALSE(Alive(1));
}

TEST_F(MemberTableTest, RegistrarStartedAnewGoesOn) {
  Member dead = Someone(3, 9);
  dead.alive = false;
  const std::vector<Member> known = {Someone(0, 99), Someone(1, 7), Someone(2, 8), dead};
  table_.Adopt(known, 41, 0);
  EXPECT_GT(table_.version(), 41u);
  EXPECT_EQ(table_.Find(0)->incarnation, 100u);
  EXPECT_TRUE(Alive(1) && Alive(2));
  EXPECT_FALSE(Alive(3));
  EXPECT_TRUE(table_.Current().complete());
  const uint64_t version = table_.version();
  ASSERT_TRUE(table_.Register(Someone(1, 7), 5).ok());
  EXPECT_EQ(table_.version(), version) << "it was there all the time";
  table_.Adopt(known, 41, 5);
  EXPECT_EQ(table_.version(), version);
  table_.Expire(10);
  EXPECT_TRUE(Alive(1));
  EXPECT_FALSE(Alive(2)) << "it did not come back";
  table_.Above(UINT64_MAX);
  EXPECT_LT(table_.version(), 100u);
}

TEST(OwnSuspicionsTest, EndWhenItAnswers) {
  OwnSuspicions suspicions;
  const auto dead = [&](uint64_t incarnation = 7) {
    std::vector<Member> members = {Someone(1, incarnation), Someone(2, 8)};
    suspicions.Apply(&members);
    EXPECT_TRUE(members[1].alive);
    EXPECT_EQ(members[0].suspected, !members[0].alive);
    return !members[0].alive;
  };
  EXPECT_FALSE(dead());
  suspicions.OnOpinion({1, 7, false, "lost"});
  EXPECT_TRUE(dead());
  EXPECT_FALSE(dead(9));
  suspicions.OnOpinion({1, 9, true, ""});  // another one
  suspicions.OnOpinion({2, 7, true, ""});
  EXPECT_TRUE(dead());
  suspicions.OnOpinion({1, 7, true, ""});
  EXPECT_FALSE(dead());
  suspicions.OnOpinion({1, 9, false, "lost"});
  EXPECT_TRUE(dead(9));
  EXPECT_FALSE(dead());
  suspicions.Clear();
  EXPECT_FALSE(dead(9));

  // Whom the registrar called dead is not suspected.
  suspicions.OnOpinion({1, 7, false, "lost"});
  std::vector<Member> members = {Someone(1, 7)};
  members[0].alive = false;
  suspicions.Apply(&members);
  EXPECT_FALSE(members[0].suspected);
}

TEST(OwnSuspicionsTest, TheLastWordOnANodeCounts) {
  std::vector<PeerOpinion> opinions;
  AddOpinion({1, 7, false, "lost"}, &opinions);
  AddOpinion({2, 7, false, "lost"}, &opinions);
  AddOpinion({1, 7, true, ""}, &opinions);
  ASSERT_EQ(opinions.size(), 2u);
  EXPECT_EQ(opinions[0].node, 2u);
  EXPECT_TRUE(opinions[1].trusted);
}

}  // namespace
}  // namespace forebay::peer
