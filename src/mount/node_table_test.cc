#include "mount/node_table.h"

#include <gtest/gtest.h>

namespace forebay::mount {
namespace {

TEST(NodeTableTest, TheSameFileKeepsItsNodeUntilItIsForgotten) {
  NodeTable table("/data");
  const NodeId node = table.Acquire("/data/a", 1, 10);
  EXPECT_EQ(table.Acquire("/data/a", 1, 10), node);
  table.Forget(node, 1);
  EXPECT_EQ(table.PathOf(node), "/data/a");
  table.Forget(node, 1);
  EXPECT_EQ(table.PathOf(node), std::nullopt);
  EXPECT_EQ(table.size(), 0u);
  EXPECT_NE(table.Acquire("/data/a", 1, 10), node);
}

TEST(NodeTableTest, AnotherFileAtThePathIsAnotherNode) {
  NodeTable table("/data");
  const NodeId old = table.Acquire("/data/a", 1, 10);
  const NodeId now = table.Acquire("/data/a", 1, 11);
  EXPECT_NE(old, now);
  table.Forget(old, 1);  // leaves the new one
  EXPECT_EQ(table.Acquire("/data/a", 1, 11), now);
  EXPECT_EQ(table.size(), 1u);
}

TEST(NodeTableTest, TheRootIsAlwaysThere) {
  NodeTable table("/data");
  table.Forget(NodeTable::kRoot, 100);
  EXPECT_EQ(table.PathOf(NodeTable::kRoot), "/data");
}

}  // namespace
}  // namespace forebay::mount
