// Warnings that somebody is told of later, each once. What stands after the first ';' of a text is
// advice: texts that differ in it only are the same warning.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_annotations.h"

namespace forebay {

// Safe for concurrent use by multiple threads.
class Warnings {
 public:
  // Later ones are dropped: who has so many does not read them.
  static constexpr size_t kMost = 32;

  // False: it is there already, or there are too many.
  bool Add(const std::string& text) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const auto same = [fact = Fact(text)](const std::string& other) { return Fact(other) == fact; };
    if (all_.size() >= kMost || std::any_of(all_.begin(), all_.end(), same)) return false;
    all_.push_back(text);
    return true;
  }
  std::vector<std::string> All() const EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return all_;
  }

 private:
  static std::string_view Fact(std::string_view text) { return text.substr(0, text.find(';')); }

  mutable Mutex mutex_;
  std::vector<std::string> all_ GUARDED_BY(mutex_);
};

}  // namespace forebay
