// The C ABI over the node's daemon, over one that dies, and over a cache folder.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/files_testing.h"
#include "forebay/forebay.h"
#include "port/attach.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

constexpr int kWaitMs = 20000;
constexpr uint32_t kFiles = 50;

// What one call of fb_loader_next gave.
struct Seen {
  int result = 0;
  int64_t epoch = 0;
  int64_t index = 0;
  std::vector<std::string> bytes;
  bool operator==(const Seen&) const = default;
};

class CapiSharedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "forebay_capi_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    setenv("FOREBAY_CACHE_DIR", (root_ + "/lists").c_str(), 1);
    setenv("FOREBAYD", FOREBAYD, 1);
    fs::create_directories(root_ + "/data");
    for (uint32_t i = 0; i < kFiles; ++i) {
      const std::string text = std::to_string(i) + std::string((i * 337) % 5000, 'x');
      std::ofstream(root_ + "/data/" + std::to_string(1000 + i)) << text;
      forebay::WrittenLongAgo(root_ + "/data/" + std::to_string(1000 + i));
    }
    folder_ = root_ + "/run";
  }
  void TearDown() override {
    std::error_code ignored;  // a daemon that ends removes its files, too
    fs::remove_all(root_, ignored);
  }

  fb_engine_options Shared() {
    fb_engine_options options;
    EXPECT_EQ(fb_engine_options_init(&options, sizeof options), 0);
    EXPECT_EQ(options.shared, 0u);
    EXPECT_EQ(options.linger_s, 5u);
    options.memory = uint64_t{32} << 20;
    options.peers = "off";
    options.shared = 1;
    options.linger_s = 0;
    options.daemon_folder = folder_.c_str();
    options.event = [](void* context, int event, const char* what) {
      auto* const test = static_cast<CapiSharedTest*>(context);
      ++test->events_[event];
      EXPECT_NE(*what, '\0');
    };
    options.event_context = this;
    return options;
  }

  // 0: there is none.
  pid_t Daemon() const {
    const auto watcher = AttachRunningDaemon(folder_, kSecond);
    return watcher ? static_cast<pid_t>((*watcher)->server_pid()) : 0;
  }

  static Seen Look(const fb_batch* batch) {
    Seen seen{FB_BATCH, fb_batch_epoch(batch), fb_batch_index(batch), {}};
    for (int64_t i = 0; i < fb_batch_size(batch); ++i) {
      const void* bytes = nullptr;
      size_t length = 0;
      EXPECT_EQ(fb_batch_data(batch, static_cast<size_t>(i), &bytes, &length), 0);
      seen.bytes.emplace_back(static_cast<const char*>(bytes), length);
    }
    return seen;
  }

  // Three epochs of a loader; the daemon is killed once before the batch `kill_at`.
  std::vector<Seen> Read(const fb_engine_options& options, size_t kill_at = ~size_t{0}) {
    std::vector<Seen> out;
    fb_engine* engine = nullptr;
    fb_dataset* dataset = nullptr;
    fb_loader* loader = nullptr;
    EXPECT_EQ(fb_engine_open(&options, &engine), 0) << fb_last_error();
    EXPECT_EQ(fb_dataset_open(engine, (root_ + "/data").c_str(), nullptr, &dataset), 0)
        << fb_last_error();
    fb_loader_options loading;
    EXPECT_EQ(fb_loader_options_init(&loading, sizeof loading), 0);
    loading.batch_size = 4;
    loading.epochs = 3;
    loading.first_position = 9;
    EXPECT_EQ(fb_loader_open(dataset, &loading, &loader), 0) << fb_last_error();
    fb_batch* held = nullptr;
    Seen first;
    do {
      if (out.size() == kill_at) {
        const pid_t pid = Daemon();
        EXPECT_GT(pid, 1);
        if (pid > 1) kill(pid, SIGKILL);
      }
      fb_batch* batch = nullptr;
      const int rc = fb_loader_next(loader, kWaitMs, &batch);
      EXPECT_GE(rc, 0) << fb_last_error();
      if (rc != FB_BATCH) {
        out.push_back({rc, 0, 0, {}});
        continue;
      }
      out.push_back(Look(batch));
      if (held == nullptr) {
        held = batch;
        first = out.back();
      } else {
        EXPECT_EQ(fb_batch_release(batch), 0);
      }
    } while (out.back().result >= 0 && out.back().result != FB_END_OF_STREAM);
    if (held != nullptr) {
      EXPECT_EQ(Look(held), first);  // lent by a daemon that has gone since
      EXPECT_EQ(fb_batch_release(held), 0);
    }
    std::vector<char> text(1 << 20);
    EXPECT_GT(fb_metrics_text(engine, text.data(), text.size()), 100);
    metrics_ = text.data();
    fb_loader_close(loader);
    fb_dataset_close(dataset);
    fb_engine_close(engine);
    return out;
  }

  std::string root_;
  std::string metrics_;  // of the engine that was read from last
  std::string folder_;
  std::atomic<int> events_[2] = {};
};

TEST_F(CapiSharedTest, BatchesAreTheSameFromTheDaemon) {
  fb_engine_options options = Shared();
  const std::vector<Seen> shared = Read(options);
  EXPECT_EQ(events_[FB_EVENT_ALONE], 0);
  options.shared = 0;
  EXPECT_EQ(Read(options), shared);
  EXPECT_EQ(shared.front().index, 2);  // 9 samples are before it
}

TEST_F(CapiSharedTest, AKilledDaemonCostsNoBatch) {
  fb_engine_options options = Shared();
  options.shared = 0;
  const std::vector<Seen> expected = Read(options);
  options.shared = 1;
  for (const size_t kill_at : {1u, 5u, 12u, 30u}) {
    EXPECT_EQ(Read(options, kill_at), expected) << kill_at;
    EXPECT_EQ(events_[FB_EVENT_ALONE].exchange(0), 1);
  }
}

TEST_F(CapiSharedTest, WithoutADaemonTheEngineIsOfThisProcess) {
  fb_engine_options options = Shared();
  options.daemon_program = "/nonexistent/forebayd";
  const std::vector<Seen> alone = Read(options);
  EXPECT_EQ(events_[FB_EVENT_ALONE], 1);
  options.shared = 0;
  EXPECT_EQ(Read(options), alone);
}

TEST_F(CapiSharedTest, SettingsReachTheDaemon) {
  fb_engine_options options = Shared();
  const std::string cache = root_ + "/cache";
  options.cache_dir = cache.c_str();
  options.cache_bytes = 1 << 20;
  const std::string group = std::to_string(getegid());
  options.cache_group = group.c_str();
  options.keep = 0;
  fb_engine* engine = nullptr;
  ASSERT_EQ(fb_engine_open(&options, &engine), 0) << fb_last_error();
  const auto watcher = AttachRunningDaemon(folder_, kSecond);
  ASSERT_TRUE(watcher) << watcher.status().ToString();
  const std::string& settings = (*watcher)->settings();
  EXPECT_NE(settings.find("memory=33554432\n"), std::string::npos) << settings;
  EXPECT_NE(settings.find("keep=0\n"), std::string::npos) << settings;
  EXPECT_NE(settings.find("cache_dir=" + cache + "\n"), std::string::npos) << settings;
  EXPECT_NE(settings.find("cache_bytes=1048576\n"), std::string::npos) << settings;
  EXPECT_NE(settings.find("cache_group=" + group + "\n"), std::string::npos) << settings;
  EXPECT_NE(settings.find("linger=0\n"), std::string::npos) << settings;
  fb_engine_close(engine);
}

TEST_F(CapiSharedTest, ACacheFolderServesTheNextEngine) {
  fb_engine_options options = Shared();
  options.shared = 0;
  const std::string cache = root_ + "/cache";
  options.cache_dir = cache.c_str();
  const std::vector<Seen> first = Read(options);
  EXPECT_FALSE(fs::is_empty(cache));
  const std::string none = "\nforebay_source_reads_total 0\n";
  EXPECT_EQ(metrics_.find(none), std::string::npos) << metrics_;
  EXPECT_EQ(Read(options), first);
  EXPECT_NE(metrics_.find(none), std::string::npos) << metrics_;
}

TEST_F(CapiSharedTest, WrongOptionsAreRefusedByName) {
  const auto refuses = [this](void (*change)(fb_engine_options&), const char* name) {
    fb_engine_options options = Shared();
    change(options);
    fb_engine* engine = nullptr;
    EXPECT_EQ(fb_engine_open(&options, &engine), -EINVAL) << name;
    EXPECT_NE(std::string(fb_last_error()).find(name), std::string::npos) << fb_last_error();
  };
  refuses([](fb_engine_options& o) { o.shared = 2; }, "shared");
  refuses([](fb_engine_options& o) { o.cache_bytes = 1; }, "cache_dir");
  refuses([](fb_engine_options& o) { o.cache_group = "users"; }, "cache_dir");
  refuses([](fb_engine_options& o) { o.memory = 1000; }, "memory");
}

// As compiled before there were daemons: what follows is not the caller's.
TEST_F(CapiSharedTest, AnOlderCallersEngineIsOfItsProcess) {
  fb_engine_options old;
  std::memset(&old, 0xee, sizeof old);
  ASSERT_EQ(fb_engine_options_init(&old, offsetof(fb_engine_options, cache_dir)), 0);
  old.memory = uint64_t{16} << 20;
  old.peers = "off";
  EXPECT_EQ(old.shared, 0xeeeeeeeeu);
  EXPECT_EQ(Read(old).back().result, FB_END_OF_STREAM);
  EXPECT_EQ(Daemon(), 0);
}

}  // namespace
}  // namespace forebay
