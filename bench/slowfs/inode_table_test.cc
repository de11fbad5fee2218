#include "slowfs/inode_table.h"

#include <gtest/gtest.h>

namespace forebay::slowfs {
namespace {

TEST(InodeTable, KeepsANodeUntilForgottenAsOftenAsAcquired) {
  InodeTable table;
  const NodeId node = table.Acquire(1, 100, "a/b");
  EXPECT_GE(node, InodeTable::kFirstNode);
  EXPECT_EQ(table.Acquire(1, 100, "a/b"), node);
  EXPECT_EQ(table.Acquire(1, 100, "a/b"), node);
  table.Forget(node, 2);
  EXPECT_EQ(table.PathOf(node), "a/b");
  table.Forget(node, 1);
  EXPECT_EQ(table.PathOf(node), std::nullopt);
  EXPECT_EQ(table.size(), 0u);
  EXPECT_NE(table.Acquire(1, 100, "a/b"), node);
}

TEST(InodeTable, TellsDevicesAndInodesApart) {
  InodeTable table;
  const NodeId a = table.Acquire(1, 100, "a");
  EXPECT_NE(table.Acquire(2, 100, "b"), a);
  EXPECT_NE(table.Acquire(1, 101, "c"), a);
  EXPECT_EQ(table.size(), 3u);
}

TEST(InodeTable, FollowsAFileToItsLatestPath) {
  InodeTable table;
  const NodeId node = table.Acquire(1, 100, "old");
  EXPECT_EQ(table.Acquire(1, 100, "new"), node);
  EXPECT_EQ(table.PathOf(node), "new");
}

TEST(InodeTable, RootIsAlwaysThere) {
  InodeTable table;
  table.Forget(InodeTable::kRoot, 1000);
  EXPECT_EQ(table.PathOf(InodeTable::kRoot), ".");
}

TEST(JoinPath, LeavesOutTheRoot) {
  EXPECT_EQ(JoinPath(".", "a"), "a");
  EXPECT_EQ(JoinPath("a/b", "c"), "a/b/c");
}

}  // namespace
}  // namespace forebay::slowfs
