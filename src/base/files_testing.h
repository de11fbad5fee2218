// Files' times, for tests.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>

namespace forebay {

// Sets a file's time back: of one that was written a moment ago, copies are compared first.
inline void WrittenLongAgo(const std::string& path) {
  std::filesystem::last_write_time(
      path, std::filesystem::file_time_type::clock::now() - std::chrono::minutes(1));
}

}  // namespace forebay
