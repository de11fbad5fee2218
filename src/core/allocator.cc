#include "core/allocator.h"

#include <bit>
#include <cassert>

namespace forebay {

ArenaAllocator::ArenaAllocator(uint64_t bytes) : capacity_(bytes / kGrain * kGrain) {
  for (auto& row : heads_) row.fill(kNone);
  if (capacity_ == 0) return;
  const Block all = NewNode();
  nodes_[all] = {0, capacity_, kNone, kNone, kNone, kNone, false};
  Link(all);
}

ArenaAllocator::Class ArenaAllocator::ClassOf(uint64_t size) {
  const uint64_t units = size / kGrain;
  const auto width = static_cast<size_t>(std::bit_width(units));
  // Sizes below 16 grains have a class each on level 0.
  if (width <= kSubBits) return {0, units};
  const size_t shift = width - 1 - kSubBits;
  return {shift + 1, (units >> shift) & (kSub - 1)};
}

ArenaAllocator::Class ArenaAllocator::ClassAtLeast(uint64_t size) {
  const uint64_t units = size / kGrain;
  const auto width = static_cast<size_t>(std::bit_width(units));
  if (width <= kSubBits) return ClassOf(size);
  const uint64_t step = uint64_t{1} << (width - 1 - kSubBits);
  return ClassOf((units + step - 1) / step * step * kGrain);
}

ArenaAllocator::Block ArenaAllocator::FindIn(Class from) const {
  if (from.level >= kLevels) return kNone;
  uint32_t subs = subs_[from.level] & (~uint32_t{0} << from.sub);
  size_t level = from.level;
  if (subs == 0) {
    const uint64_t higher = level + 1 >= 64 ? 0 : levels_ & (~uint64_t{0} << (level + 1));
    if (higher == 0) return kNone;
    level = static_cast<size_t>(std::countr_zero(higher));
    subs = subs_[level];
  }
  return heads_[level][static_cast<size_t>(std::countr_zero(subs))];
}

ArenaAllocator::Block ArenaAllocator::FindExact(uint64_t size) const {
  const Class c = ClassOf(size);
  for (Block b = heads_[c.level][c.sub]; b != kNone; b = nodes_[b].next) {
    if (nodes_[b].size >= size) return b;
  }
  return kNone;
}

ArenaAllocator::Block ArenaAllocator::NewNode() {
  if (!spare_.empty()) {
    const Block block = spare_.back();
    spare_.pop_back();
    return block;
  }
  nodes_.push_back({});
  return static_cast<Block>(nodes_.size() - 1);
}

void ArenaAllocator::Link(Block block) {
  Node& node = nodes_[block];
  const Class c = ClassOf(node.size);
  Block& head = heads_[c.level][c.sub];
  node.free = true;
  node.previous = kNone;
  node.next = head;
  if (head != kNone) nodes_[head].previous = block;
  head = block;
  levels_ |= uint64_t{1} << c.level;
  subs_[c.level] |= uint32_t{1} << c.sub;
}

void ArenaAllocator::Unlink(Block block) {
  Node& node = nodes_[block];
  const Class c = ClassOf(node.size);
  Block& head = heads_[c.level][c.sub];
  if (node.previous != kNone) nodes_[node.previous].next = node.next;
  if (node.next != kNone) nodes_[node.next].previous = node.previous;
  if (head == block) head = node.next;
  if (head == kNone) {
    subs_[c.level] &= ~(uint32_t{1} << c.sub);
    if (subs_[c.level] == 0) levels_ &= ~(uint64_t{1} << c.level);
  }
  node.free = false;
}

ArenaAllocator::Block ArenaAllocator::Allocate(uint64_t bytes) {
  const uint64_t size = Rounded(bytes);
  if (size > capacity_) return kNone;
  Block block = FindIn(ClassAtLeast(size));
  // A class rounds down, so its own list may still hold one that fits: worth a search before giving
  // up.
  if (block == kNone) block = FindExact(size);
  if (block == kNone) return kNone;
  Unlink(block);
  if (nodes_[block].size > size) {
    const Block rest = NewNode();
    Node& node = nodes_[block];
    nodes_[rest] = {node.offset + size, node.size - size, block, node.after, kNone, kNone, false};
    if (node.after != kNone) nodes_[node.after].before = rest;
    node.after = rest;
    node.size = size;
    Link(rest);
  }
  used_ += size;
  return block;
}

void ArenaAllocator::Free(Block block) {
  assert(block < nodes_.size() && !nodes_[block].free);
  used_ -= nodes_[block].size;
  const Block after = nodes_[block].after;
  if (after != kNone && nodes_[after].free) {
    Unlink(after);
    Node& node = nodes_[block];
    node.size += nodes_[after].size;
    node.after = nodes_[after].after;
    if (node.after != kNone) nodes_[node.after].before = block;
    spare_.push_back(after);
  }
  const Block before = nodes_[block].before;
  if (before != kNone && nodes_[before].free) {
    Unlink(before);
    Node& node = nodes_[before];
    node.size += nodes_[block].size;
    node.after = nodes_[block].after;
    if (node.after != kNone) nodes_[node.after].before = before;
    spare_.push_back(block);
    block = before;
  }
  Link(block);
}

}  // namespace forebay
