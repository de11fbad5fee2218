// Arena: the memory of a scheduler. Bookkeeping only, as its allocator's. One thread at a time.
//
// Beside samples and copies of batches it has blocks that are set aside, for tables and for memory
// that is held elsewhere, and regions, in which streams keep their contiguous batches.
//
// Where a sample may take more than a quarter of it, a place for one is kept free of smaller ones
// as long as they fit elsewhere: a few of them that are held would leave no hole that is large
// enough.
#pragma once

#include <cstdint>
#include <utility>

#include "core/allocator.h"

namespace forebay {

class Arena {
 public:
  using Block = ArenaAllocator::Block;
  static constexpr Block kNone = ArenaAllocator::kNone;

  explicit Arena(uint64_t bytes) : blocks_(bytes) {}

  // Each kNone when no hole is large enough.
  Block Allocate(uint64_t bytes) {
    if (!IsLarge(bytes)) return blocks_.Allocate(bytes);
    GiveUpLargePlace();
    const Block block = blocks_.Allocate(bytes);
    KeepLargePlace();
    return block;
  }
  Block SetAside(uint64_t bytes) { return Counted(bytes, &set_aside_); }
  Block MakeRegion(uint64_t bytes) { return Counted(bytes, &regions_); }

  void Free(Block block) {
    blocks_.Free(block);
    ++frees_;
    KeepLargePlace();
  }
  void ReturnAside(Block block) {
    Adopt(block);
    Free(block);
  }
  void FreeRegion(Block block) {
    regions_ -= size(block);
    Free(block);
  }
  // A block that was set aside is a sample's from now on.
  void Adopt(Block block) { set_aside_ -= size(block); }

  // Whether so much could be set aside, and `leave` be left, were nothing pinned or being read.
  bool MaySetAside(uint64_t bytes, uint64_t leave = 0) const {
    return leave <= usable() && bytes <= usable() - leave;
  }
  bool Fits(uint64_t bytes) {
    const Block block = Allocate(bytes);
    if (block == kNone) return false;
    blocks_.Free(block);
    KeepLargePlace();
    return true;
  }

  // That samples of so many bytes will come.
  void Expect(uint64_t bytes) {
    if (bytes > large_bytes_ && IsLarge(bytes)) large_bytes_ = bytes;
    KeepLargePlace();
  }
  // None of more than so many any longer.
  void ExpectNoMoreThan(uint64_t bytes) {
    if (bytes >= large_bytes_) return;
    if (large_ != kNone) blocks_.Free(std::exchange(large_, kNone));
    large_bytes_ = IsLarge(bytes) ? bytes : 0;
    KeepLargePlace();
  }
  // Until the next Free. False: there is none.
  bool GiveUpLargePlace() {
    if (large_ == kNone) return false;
    blocks_.Free(large_);
    large_ = kNone;
    return true;
  }

  // Differs from an earlier value when room may have come since.
  uint64_t frees() const { return frees_; }
  void NoteRoom() { ++frees_; }

  uint64_t offset(Block block) const { return blocks_.offset(block); }
  uint64_t size(Block block) const { return blocks_.size(block); }
  uint64_t used() const { return blocks_.used() - (large_ == kNone ? 0 : size(large_)); }
  uint64_t capacity() const { return blocks_.capacity(); }
  uint64_t set_aside() const { return set_aside_; }
  uint64_t regions() const { return regions_; }
  // Room for single samples.
  uint64_t usable() const { return capacity() - set_aside_ - regions_; }

 private:
  bool IsLarge(uint64_t bytes) const { return bytes > capacity() / 4; }
  void KeepLargePlace() {
    if (large_bytes_ > 0 && large_ == kNone) large_ = blocks_.Allocate(large_bytes_);
  }
  Block Counted(uint64_t bytes, uint64_t* sum) {
    Block block = blocks_.Allocate(bytes);
    if (block == kNone && GiveUpLargePlace()) block = blocks_.Allocate(bytes);
    if (block != kNone) *sum += blocks_.size(block);
    return block;
  }

  ArenaAllocator blocks_;
  uint64_t set_aside_ = 0;
  uint64_t regions_ = 0;
  uint64_t frees_ = 1;
  uint64_t large_bytes_ = 0;  // 0: no sample is large
  Block large_ = kNone;       // the place that is kept
};

}  // namespace forebay
