// Values by small numbers, which are used again: reads and requests under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay {

// With a capacity: so many, which never move, and the caller takes no more than are left(). Without
// one: it grows, which moves them. Not safe for concurrent use.
template <typename T>
class Slots {
 public:
  Slots() = default;
  explicit Slots(size_t capacity) : all_(capacity) {
    free_.reserve(capacity);
    for (size_t i = capacity; i > 0; --i) free_.push_back(static_cast<uint32_t>(i - 1));
  }

  // The number of a free one. Its value is what its last user left.
  uint32_t Take() {
    if (free_.empty()) {
      all_.emplace_back();
      return static_cast<uint32_t>(all_.size() - 1);
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  void Free(size_t index) { free_.push_back(static_cast<uint32_t>(index)); }
  // What Take will return after so many others; less than left().
  uint32_t Next(size_t ahead = 0) const { return free_[free_.size() - 1 - ahead]; }

  T& operator[](size_t index) { return all_[index]; }
  const T& operator[](size_t index) const { return all_[index]; }

  size_t capacity() const { return all_.size(); }
  size_t left() const { return free_.size(); }
  size_t used() const { return all_.size() - free_.size(); }

 private:
  std::vector<T> all_;
  std::vector<uint32_t> free_;
};

}  // namespace forebay
