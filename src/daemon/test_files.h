// An engine over files whose bytes are FillNullSample's, for tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/files_testing.h"
#include "base/rng.h"
#include "source/delay_source.h"
#include "source/null_source.h"
#include "stage/engine.h"

namespace forebay::testing {

inline uint64_t Seeds() {
  const char* text = std::getenv("FOREBAY_SEEDS");
  return text != nullptr ? std::max<uint64_t>(1, std::strtoull(text, nullptr, 10)) : 20;
}

// Mostly nothing is written into the files: a source that knows the bytes reads them.
class TestFiles {
 public:
  TestFiles() {
    char name[] = "/tmp/forebay_daemon_XXXXXX";
    if (mkdtemp(name) != nullptr) root_ = name;
  }
  ~TestFiles() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  TestFiles(const TestFiles&) = delete;
  TestFiles& operator=(const TestFiles&) = delete;

  const std::string& root() const { return root_; }

  // `written`: for a source that reads the files.
  std::shared_ptr<const Catalog> Make(uint32_t n, uint32_t low, uint32_t high,
                                      bool written = false) const {
    SplitMix64 rng(n);
    std::vector<std::string> paths;
    const std::string folder = StrCat(root_, "/", n, "_", high);
    std::filesystem::create_directories(folder);
    for (uint32_t i = 0; i < n; ++i) {
      paths.push_back(StrCat(folder, "/", i));
      const int fd = creat(paths.back().c_str(), 0600);
      const uint64_t length = low + rng.Below(high - low + 1);
      EXPECT_EQ(ftruncate(fd, static_cast<off_t>(length)), 0);
      if (written) {
        std::vector<std::byte> bytes(length);
        FillNullSample(i, bytes);
        EXPECT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(length));
      }
      close(fd);
      WrittenLongAgo(paths.back());
    }
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

 private:
  std::string root_;
};

inline EngineOptions SmallEngine(uint64_t memory) {
  EngineOptions options;
  options.memory = memory;
  options.max_in_flight = 16;
  options.release_wait = 300 * kMilli;
  return options;
}

inline EnginePtr MakeEngine(uint64_t memory) {
  auto engine = Engine::Create(SmallEngine(memory));
  EXPECT_TRUE(engine) << engine.status().ToString();
  return *std::move(engine);
}

// A source whose every read takes `latency`.
inline std::unique_ptr<Source> SlowSource(Nanos latency) {
  DelayOptions options;
  options.open_each = false;
  options.storage.read = latency;
  auto source = DelaySource::Make(*MakeNullSource(16), options);
  EXPECT_TRUE(source) << source.status().ToString();
  return *std::move(source);
}

inline bool BytesRight(const BatchLoan& loan) {
  std::vector<std::byte> expected;
  for (size_t i = 0; i < loan.samples.size(); ++i) {
    expected.resize(loan.lengths[i]);
    FillNullSample(loan.samples[i], expected);
    if (std::memcmp(loan.base + loan.offsets[i], expected.data(), expected.size()) != 0)
      return false;
  }
  return true;
}

inline uint64_t MetricValue(Engine& engine, std::string_view name) {
  for (const Registry::Sample& sample : engine.registry().Snapshot()) {
    if (sample.name == name) return sample.value;
  }
  return ~uint64_t{0};
}

// Other threads have to notice first: waits for a gauge, for ten seconds at most.
inline uint64_t AwaitMetric(Engine& engine, std::string_view name, uint64_t wanted) {
  const Nanos until = SteadyClock().Now() + 10 * kSecond;
  while (MetricValue(engine, name) != wanted && SteadyClock().Now() < until) usleep(1000);
  return MetricValue(engine, name);
}

}  // namespace forebay::testing
