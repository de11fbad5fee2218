// ArenaAllocator: places blocks in the arena. Pure bookkeeping on offsets; it never touches memory.
//
// Two-level segregated fit (Masmano et al., 2004): free holes are kept in lists by size class, 16
// classes to each power of two, with bitmaps to find the next non-empty one; neighbours merge on
// free. Both operations take constant time, and the waste is at most kGrain - 1 bytes a block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay {

class ArenaAllocator {
 public:
  using Block = uint32_t;
  static constexpr Block kNone = ~Block{0};
  static constexpr uint64_t kGrain = 64;  // a cache line: no two samples share one

  explicit ArenaAllocator(uint64_t bytes);

  // kNone when no hole is large enough. Zero bytes take one grain.
  Block Allocate(uint64_t bytes);
  void Free(Block block);

  uint64_t offset(Block block) const { return nodes_[block].offset; }
  uint64_t size(Block block) const { return nodes_[block].size; }
  uint64_t used() const { return used_; }
  uint64_t capacity() const { return capacity_; }
  static uint64_t Rounded(uint64_t bytes) {
    return bytes == 0 ? kGrain : (bytes + kGrain - 1) / kGrain * kGrain;
  }

 private:
  struct Node {
    uint64_t offset;
    uint64_t size;
    Block before, after;   // neighbours in the arena
    Block previous, next;  // neighbours in the free list, when free
    bool free;
  };
  static constexpr int kSubBits = 4;
  static constexpr size_t kSub = size_t{1} << kSubBits;
  static constexpr size_t kLevels = 42;  // 64 B << 42 is beyond any machine

  struct Class {
    size_t level, sub;
  };
  static Class ClassOf(uint64_t size);       // the class that holds holes of this size
  static Class ClassAtLeast(uint64_t size);  // the first class whose every hole is large enough
  Block FindIn(Class from) const;
  Block FindExact(uint64_t size) const;  // searches the size's own class
  void Link(Block block);
  void Unlink(Block block);
  Block NewNode();

  uint64_t capacity_;
  uint64_t used_ = 0;
  std::vector<Node> nodes_;
  std::vector<Block> spare_;  // nodes_ entries not in use
  uint64_t levels_ = 0;       // bit l: some class of level l is not empty
  std::array<uint32_t, kLevels> subs_{};
  std::array<std::array<Block, kSub>, kLevels> heads_;
};

}  // namespace forebay
