#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/sampler.h"
#include "forebay/forebay.h"

// The thread sanitizer's library has an operator new of its own.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FOREBAY_TEST_OWN_NEW 0
#endif
#endif
#ifndef FOREBAY_TEST_OWN_NEW
#define FOREBAY_TEST_OWN_NEW 1
#endif

#if FOREBAY_TEST_OWN_NEW
// Allocations of this thread that may still succeed; -1: all.
static thread_local int allocations_left = -1;

// Not inlined: g++ would see malloc on one side and delete on the other, and warn.
[[gnu::noinline]] void* operator new(size_t n) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* out = std::malloc(n);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}
[[gnu::noinline]] void* operator new(size_t n, const std::nothrow_t&) noexcept {
  if (allocations_left == 0) return nullptr;
  if (allocations_left > 0) --allocations_left;
  return std::malloc(n);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

namespace {

namespace fs = std::filesystem;

constexpr int kWaitMs = 20000;
constexpr uint64_t kMiB = uint64_t{1} << 20;

// The bytes of a file are a function of its name.
std::string ContentOf(const std::string& name, size_t size) {
  std::string out(size, '\0');
  for (size_t i = 0; i < size; ++i) {
    out[i] = static_cast<char>(name[i % name.size()] + static_cast<char>(i / name.size()));
  }
  return out;
}

// What one call of fb_loader_next gave.
struct Seen {
  int result = 0;
  int64_t epoch = 0;
  int64_t index = 0;
  std::vector<int64_t> samples;
  std::vector<std::string> bytes;
  bool operator==(const Seen&) const = default;
};

class CapiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "forebay_capi_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    setenv("FOREBAY_CACHE_DIR", (root_ + "/cache").c_str(), 1);
  }
  void TearDown() override {
    fb_dataset_close(dataset_);
    fb_engine_close(engine_);
    fs::remove_all(root_);
  }

  // n files in two class folders, all of `size` bytes, or of many sizes with 0.
  void MakeFiles(size_t n, size_t size = 0) {
    for (size_t i = 0; i < n; ++i) {
      const std::string name = (i % 2 == 0 ? "cat/" : "dog/") + std::to_string(1000 + i) +
                               (i % 5 == 4 ? ".txt" : ".bin");
      fs::create_directories(fs::path(data() + "/" + name).parent_path());
      contents_[name] = ContentOf(name, size != 0 ? size : (i * 337) % 5000);
      std::ofstream(data() + "/" + name, std::ios::binary) << contents_[name];
    }
  }
  std::string data() const { return root_ + "/data"; }

  static fb_engine_options EngineOptions(uint64_t memory = 32 * kMiB) {
    fb_engine_options options;
    EXPECT_EQ(fb_engine_options_init(&options, sizeof options), 0);
    options.memory = memory;
    return options;
  }
  static fb_loader_options LoaderOptions(uint32_t batch_size) {
    fb_loader_options options;
    EXPECT_EQ(fb_loader_options_init(&options, sizeof options), 0);
    options.batch_size = batch_size;
    return options;
  }

  void Open(const fb_engine_options& options) {
    ASSERT_EQ(fb_engine_open(&options, &engine_), 0) << fb_last_error();
    ASSERT_EQ(fb_dataset_open(engine_, data().c_str(), nullptr, &dataset_), 0) << fb_last_error();
  }
  fb_loader* OpenLoader(const fb_loader_options& options) {
    fb_loader* loader = nullptr;
    EXPECT_EQ(fb_loader_open(dataset_, &options, &loader), 0) << fb_last_error();
    return loader;
  }

  static Seen Look(const fb_batch* batch) {
    Seen seen{FB_BATCH, fb_batch_epoch(batch), fb_batch_index(batch), {}, {}};
    for (int64_t i = 0; i < fb_batch_size(batch); ++i) {
      const void* bytes = nullptr;
      size_t length = 0;
      EXPECT_EQ(fb_batch_data(batch, static_cast<size_t>(i), &bytes, &length), 0);
      seen.samples.push_back(fb_batch_sample(batch, static_cast<size_t>(i)));
      seen.bytes.emplace_back(static_cast<const char*>(bytes), length);
    }
    return seen;
  }
  static Seen Next(fb_loader* loader) {
    fb_batch* batch = nullptr;
    const int rc = fb_loader_next(loader, kWaitMs, &batch);
    EXPECT_GE(rc, 0) << fb_last_error();
    if (rc != FB_BATCH) {
      EXPECT_EQ(batch, nullptr);
      return {rc, 0, 0, {}, {}};
    }
    Seen seen = Look(batch);
    EXPECT_EQ(fb_batch_release(batch), 0);
    return seen;
  }
  // Everything up to the end of the stream.
  static std::vector<Seen> Rest(fb_loader* loader) {
    std::vector<Seen> out;
    do {
      out.push_back(Next(loader));
    } while (out.back().result >= 0 && out.back().result != FB_END_OF_STREAM);
    return out;
  }

  std::string NameOf(uint32_t sample) const {
    char name[256];
    EXPECT_GT(fb_dataset_sample_name(dataset_, sample, name, sizeof name), 0);
    return name;
  }

  std::string root_;
  std::map<std::string, std::string> contents_;
  fb_engine* engine_ = nullptr;
  fb_dataset* dataset_ = nullptr;
};

bool Says(const std::string& part) {
  return std::string(fb_last_error()).find(part) != std::string::npos;
}

TEST_F(CapiTest, DescribesTheDataSet) {
  MakeFiles(30);
  Open(EngineOptions());
  EXPECT_STRNE(fb_version(), "");
  ASSERT_EQ(fb_dataset_size(dataset_), 30);
  uint64_t total = 0;
  std::set<std::string> names;
  for (uint32_t s = 0; s < 30; ++s) {
    const std::string name = NameOf(s);
    names.insert(name);
    ASSERT_EQ(contents_.count(name), 1u) << name;
    EXPECT_EQ(fb_dataset_sample_bytes(dataset_, s), static_cast<int64_t>(contents_[name].size()));
    total += contents_[name].size();
    int64_t label = -7;
    EXPECT_EQ(fb_dataset_label(dataset_, s, &label), 0);
    EXPECT_EQ(label, name.starts_with("dog/") ? 1 : 0);
  }
  EXPECT_EQ(names.size(), 30u);
  EXPECT_EQ(fb_dataset_bytes(dataset_), static_cast<int64_t>(total));

  char cut[4] = "xyz";
  EXPECT_EQ(fb_dataset_sample_name(dataset_, 0, cut, sizeof cut),
            static_cast<int64_t>(NameOf(0).size()));
  EXPECT_EQ(NameOf(0).substr(0, 3), cut);
  EXPECT_EQ(fb_dataset_sample_name(dataset_, 30, cut, sizeof cut), -EINVAL);
  EXPECT_TRUE(Says("30"));
}

TEST_F(CapiTest, BatchesComeInTheSamplersOrder) {
  MakeFiles(45);
  Open(EngineOptions());
  for (uint32_t shuffle : {0u, 1u}) {
    for (uint32_t contiguous : {0u, 1u}) {
      fb_loader_options options = LoaderOptions(4);
      options.shuffle = shuffle;
      options.contiguous = contiguous;
      options.seed = 11;
      options.world = 2;
      options.rank = 1;
      options.epochs = 2;
      options.first_epoch = 3;
      fb_loader* loader = OpenLoader(options);
      const forebay::SamplerSpec spec = {
          .size = 45, .shuffle = shuffle == 1, .seed = 11, .rank = 1, .world = 2};
      for (uint64_t epoch : {3u, 4u}) {
        const auto order = forebay::EpochOrder(spec, epoch);
        size_t at = 0;
        for (int64_t index = 0; at < order.size(); ++index) {
          fb_batch* batch = nullptr;
          ASSERT_EQ(fb_loader_next(loader, kWaitMs, &batch), FB_BATCH) << fb_last_error();
          const Seen seen = Look(batch);
          EXPECT_EQ(seen.epoch, static_cast<int64_t>(epoch));
          EXPECT_EQ(seen.index, index);
          std::string joined;
          for (size_t i = 0; i < seen.samples.size(); ++i, ++at) {
            ASSERT_LT(at, order.size());
            ASSERT_EQ(seen.samples[i], order[at]);
            const std::string name = NameOf(order[at]);
            ASSERT_EQ(seen.bytes[i], contents_[name]);
            joined += seen.bytes[i];
            int64_t label = -7;
            EXPECT_EQ(fb_batch_label(batch, i, &label), 0);
            EXPECT_EQ(label, name.starts_with("dog/") ? 1 : 0);
          }
          const void* all = nullptr;
          size_t length = 0;
          const int rc = fb_batch_contiguous(batch, &all, &length);
          if (contiguous == 1) {
            ASSERT_EQ(rc, 0);
            EXPECT_EQ(std::string(static_cast<const char*>(all), length), joined);
          } else {
            EXPECT_EQ(rc, -EINVAL);
            EXPECT_TRUE(Says("contiguous"));
          }
          EXPECT_EQ(fb_batch_release(batch), 0);
        }
        EXPECT_EQ(Next(loader).result, FB_END_OF_EPOCH);
      }
      EXPECT_EQ(Next(loader).result, FB_END_OF_STREAM);
      EXPECT_EQ(Next(loader).result, FB_END_OF_STREAM);
      fb_loader_close(loader);
    }
  }
}

// Cuts the stream after every call and goes on from the noted position: in the same loader, and in
// a new one.
TEST_F(CapiTest, ResumesExactlyWhereItStopped) {
  MakeFiles(23);
  Open(EngineOptions());
  for (uint32_t world : {1u, 3u}) {
    for (uint32_t drop_last : {0u, 1u}) {
      fb_loader_options options = LoaderOptions(3);
      options.seed = 5;
      options.world = world;
      options.rank = world - 1;
      options.epochs = 3;
      options.drop_last = drop_last;
      options.contiguous = drop_last;
      fb_loader* loader = OpenLoader(options);
      const std::vector<Seen> all = Rest(loader);
      ASSERT_EQ(fb_loader_seek(loader, 0, 0), 0) << fb_last_error();
      std::vector<std::pair<uint64_t, uint64_t>> positions;
      for (const Seen& expected : all) {
        positions.emplace_back();
        ASSERT_EQ(fb_loader_position(loader, &positions.back().first, &positions.back().second), 0);
        ASSERT_EQ(Next(loader), expected);
      }
      for (size_t cut = 0; cut < all.size(); ++cut) {
        const std::vector<Seen> expected(all.begin() + static_cast<ptrdiff_t>(cut), all.end());
        const auto [epoch, position] = positions[cut];
        ASSERT_EQ(fb_loader_seek(loader, epoch, position), 0) << fb_last_error();
        ASSERT_EQ(Rest(loader), expected) << "epoch " << epoch << ", position " << position;

        fb_loader_options resumed = options;
        resumed.first_epoch = epoch;
        resumed.first_position = position;
        resumed.epochs = options.epochs - std::min(epoch, options.epochs - 1);
        fb_loader* other = OpenLoader(resumed);
        if (epoch < options.epochs) {
          ASSERT_EQ(Rest(other), expected) << "epoch " << epoch << ", position " << position;
        }
        fb_loader_close(other);
      }
      if (world > 1) {
        EXPECT_EQ(fb_loader_seek(loader, 0, 1), -EINVAL);
        EXPECT_TRUE(Says("world size 3"));
      }
      fb_loader_close(loader);
    }
  }
}

TEST_F(CapiTest, NullArgumentsAreRefusedByName) {
  MakeFiles(5);
  Open(EngineOptions());
  fb_loader* loader = OpenLoader(LoaderOptions(2));
  fb_batch* batch = nullptr;
  ASSERT_EQ(fb_loader_next(loader, kWaitMs, &batch), FB_BATCH) << fb_last_error();
  fb_dataset* dataset = nullptr;
  uint64_t number = 0;
  const void* bytes = nullptr;
  size_t length = 0;
  const auto refused = [](int64_t rc, const std::string& function, const std::string& argument) {
    EXPECT_EQ(rc, -EINVAL) << function << " " << argument;
    EXPECT_EQ(std::string(fb_last_error()), function + ": " + argument + " is NULL");
  };
  refused(fb_engine_options_init(nullptr, 8), "fb_engine_options_init", "options");
  refused(fb_dataset_options_init(nullptr, 8), "fb_dataset_options_init", "options");
  refused(fb_loader_options_init(nullptr, 8), "fb_loader_options_init", "options");
  refused(fb_engine_open(nullptr, nullptr), "fb_engine_open", "out");
  refused(fb_metrics_text(nullptr, nullptr, 0), "fb_metrics_text", "engine");
  refused(fb_metrics_text(engine_, nullptr, 1), "fb_metrics_text", "buffer");
  refused(fb_dataset_open(nullptr, "x", nullptr, &dataset), "fb_dataset_open", "engine");
  refused(fb_dataset_open(engine_, nullptr, nullptr, &dataset), "fb_dataset_open", "path");
  refused(fb_dataset_open(engine_, "x", nullptr, nullptr), "fb_dataset_open", "out");
  refused(fb_dataset_size(nullptr), "fb_dataset_size", "dataset");
  refused(fb_dataset_bytes(nullptr), "fb_dataset_bytes", "dataset");
  refused(fb_dataset_sample_name(nullptr, 0, nullptr, 0), "fb_dataset_sample_name", "dataset");
  refused(fb_dataset_sample_name(dataset_, 0, nullptr, 1), "fb_dataset_sample_name", "buffer");
  refused(fb_dataset_sample_bytes(nullptr, 0), "fb_dataset_sample_bytes", "dataset");
  refused(fb_dataset_label(dataset_, 0, nullptr), "fb_dataset_label", "label");
  fb_loader* opened = loader;
  refused(fb_loader_open(nullptr, nullptr, &opened), "fb_loader_open", "dataset");
  EXPECT_EQ(opened, nullptr);
  refused(fb_loader_open(dataset_, nullptr, nullptr), "fb_loader_open", "out");
  refused(fb_loader_next(loader, 0, nullptr), "fb_loader_next", "out");
  refused(fb_loader_seek(nullptr, 0, 0), "fb_loader_seek", "loader");
  refused(fb_loader_position(nullptr, &number, &number), "fb_loader_position", "loader");
  refused(fb_loader_position(loader, nullptr, &number), "fb_loader_position", "epoch");
  refused(fb_loader_position(loader, &number, nullptr), "fb_loader_position", "position");
  refused(fb_batch_size(nullptr), "fb_batch_size", "batch");
  refused(fb_batch_epoch(nullptr), "fb_batch_epoch", "batch");
  refused(fb_batch_index(nullptr), "fb_batch_index", "batch");
  refused(fb_batch_sample(nullptr, 0), "fb_batch_sample", "batch");
  refused(fb_batch_data(batch, 0, nullptr, &length), "fb_batch_data", "data");
  refused(fb_batch_data(batch, 0, &bytes, nullptr), "fb_batch_data", "length");
  refused(fb_batch_contiguous(nullptr, &bytes, &length), "fb_batch_contiguous", "batch");
  refused(fb_batch_label(batch, 0, nullptr), "fb_batch_label", "label");
  refused(fb_batch_release(nullptr), "fb_batch_release", "batch");
  fb_batch* next = batch;
  refused(fb_loader_next(nullptr, 0, &next), "fb_loader_next", "loader");
  EXPECT_EQ(next, nullptr);
  EXPECT_EQ(fb_batch_data(batch, 2, &bytes, &length), -EINVAL);
  EXPECT_TRUE(Says("batch of 2"));
  EXPECT_EQ(fb_loader_next(loader, -1, &next), -EINVAL);
  EXPECT_TRUE(Says("timeout_ms"));
  EXPECT_EQ(fb_batch_release(batch), 0);
  fb_loader_close(loader);
  fb_loader_close(nullptr);
  fb_dataset_close(nullptr);
  fb_engine_close(nullptr);
}

TEST_F(CapiTest, MissingFolderIsNamed) {
  const fb_engine_options options = EngineOptions();
  ASSERT_EQ(fb_engine_open(&options, &engine_), 0);
  for (uint32_t use_cache : {0u, 1u}) {
    fb_dataset_options dataset_options;
    ASSERT_EQ(fb_dataset_options_init(&dataset_options, sizeof dataset_options), 0);
    dataset_options.use_cache = use_cache;
    const std::string path = root_ + "/not_here";
    EXPECT_EQ(fb_dataset_open(engine_, path.c_str(), &dataset_options, &dataset_), -ENOENT);
    EXPECT_EQ(dataset_, nullptr);
    EXPECT_TRUE(Says(path)) << fb_last_error();
  }
}

TEST_F(CapiTest, AFileThatChangedIsNamed) {
  MakeFiles(8, 1000);
  Open(EngineOptions());
  const std::string name = NameOf(3);
  fs::resize_file(data() + "/" + name, 10);
  fb_loader_options options = LoaderOptions(8);
  fb_loader* loader = OpenLoader(options);
  fb_batch* batch = nullptr;
  EXPECT_EQ(fb_loader_next(loader, kWaitMs, &batch), -ESTALE);
  EXPECT_EQ(batch, nullptr);
  EXPECT_TRUE(Says(name)) << fb_last_error();
  // The stream stands where it was: the batch comes once the file is whole again.
  std::ofstream(data() + "/" + name, std::ios::binary) << contents_[name];
  EXPECT_EQ(Next(loader).samples.size(), 8u);
  fb_loader_close(loader);
}

TEST_F(CapiTest, ErrorsBelongToTheirThread) {
  EXPECT_EQ(fb_dataset_size(nullptr), -EINVAL);
  const std::string here = fb_last_error();
  std::string there = "?";
  std::thread([&] {
    there = fb_last_error();
    (void)fb_batch_size(nullptr);
  }).join();
  EXPECT_EQ(there, "");
  EXPECT_EQ(here, fb_last_error());
}

TEST_F(CapiTest, OlderCallersMayPassSmallerOptions) {
  MakeFiles(6);
  // As compiled before max_in_flight existed; what follows is not the caller's.
  fb_engine_options old_engine;
  std::memset(&old_engine, 0xee, sizeof old_engine);
  const size_t engine_size = offsetof(fb_engine_options, max_in_flight);
  ASSERT_EQ(fb_engine_options_init(&old_engine, engine_size), 0);
  EXPECT_EQ(old_engine.size, engine_size);
  EXPECT_EQ(old_engine.max_in_flight, 0xeeeeeeeeu);
  old_engine.memory = 16 * kMiB;
  Open(old_engine);

  fb_loader_options old_loader;
  std::memset(&old_loader, 0xee, sizeof old_loader);
  const size_t loader_size = offsetof(fb_loader_options, rank);
  ASSERT_EQ(fb_loader_options_init(&old_loader, loader_size), 0);
  EXPECT_EQ(old_loader.rank, 0xeeeeeeeeu);
  old_loader.batch_size = 6;
  fb_loader* loader = OpenLoader(old_loader);
  EXPECT_EQ(Next(loader).samples.size(), 6u);
  fb_loader_close(loader);

  fb_dataset_options none;
  none.size = 0;
  fb_dataset* dataset = nullptr;
  EXPECT_EQ(fb_dataset_open(engine_, data().c_str(), &none, &dataset), -EINVAL);
  EXPECT_TRUE(Says("init"));
  EXPECT_EQ(fb_dataset_options_init(&none, 0), -EINVAL);
}

TEST_F(CapiTest, NewerCallersMayNotSetWhatWeLack) {
  struct Newer {
    fb_engine_options options;
    uint64_t field;
  } newer;
  newer.field = 7;
  ASSERT_EQ(fb_engine_options_init(&newer.options, sizeof newer), 0);
  EXPECT_EQ(newer.field, 0u);
  newer.options.memory = 16 * kMiB;
  fb_engine* engine = nullptr;
  ASSERT_EQ(fb_engine_open(&newer.options, &engine), 0) << fb_last_error();
  fb_engine_close(engine);
  newer.field = 7;
  EXPECT_EQ(fb_engine_open(&newer.options, &engine), -ENOTSUP);
  EXPECT_EQ(engine, nullptr);
  EXPECT_TRUE(Says(fb_version()));
}

TEST_F(CapiTest, WrongOptionsAreRefusedByName) {
  MakeFiles(6);
  Open(EngineOptions());
  const auto engine_refuses = [](void (*change)(fb_engine_options&), const char* name) {
    fb_engine_options options = EngineOptions();
    change(options);
    fb_engine* engine = nullptr;
    EXPECT_EQ(fb_engine_open(&options, &engine), -EINVAL) << name;
    EXPECT_TRUE(Says(name)) << fb_last_error();
  };
  engine_refuses([](fb_engine_options& o) { o.memory = 1000; }, "memory");
  engine_refuses([](fb_engine_options& o) { o.max_in_flight = 0; }, "max_in_flight");
  engine_refuses([](fb_engine_options& o) { o.io = 9; }, "io");
  engine_refuses([](fb_engine_options& o) { o.keep = 2; }, "keep");
  engine_refuses([](fb_engine_options& o) { o.copy_threads = 0; }, "copy_threads");
  engine_refuses([](fb_engine_options& o) { o.release_wait_ms = ~uint64_t{0}; }, "release_wait_ms");
  const auto loader_refuses = [this](void (*change)(fb_loader_options&), const char* name) {
    fb_loader_options options = LoaderOptions(2);
    change(options);
    fb_loader* loader = nullptr;
    EXPECT_EQ(fb_loader_open(dataset_, &options, &loader), -EINVAL) << name;
    EXPECT_TRUE(Says(name)) << fb_last_error();
  };
  loader_refuses([](fb_loader_options& o) { o.batch_size = 0; }, "batch_size");
  loader_refuses([](fb_loader_options& o) { o.world = 0; }, "world");
  loader_refuses([](fb_loader_options& o) { o.rank = 1; }, "rank");
  loader_refuses([](fb_loader_options& o) { o.shuffle = 2; }, "shuffle");
  loader_refuses([](fb_loader_options& o) { o.epochs = ~uint64_t{0}; }, "epochs");
  loader_refuses([](fb_loader_options& o) { o.reserved = 1; }, "reserved");
  loader_refuses(
      [](fb_loader_options& o) {
        o.world = 2;
        o.first_position = 3;
      },
      "first_position");
}

TEST_F(CapiTest, DatasetOptionsSelectAndReport) {
  MakeFiles(20);
  const fb_engine_options engine_options = EngineOptions();
  ASSERT_EQ(fb_engine_open(&engine_options, &engine_), 0);
  fb_dataset_options options;
  ASSERT_EQ(fb_dataset_options_init(&options, sizeof options), 0);
  const char* extensions[] = {".bin"};
  options.extensions = extensions;
  options.extension_count = 1;
  struct Calls {
    int count = 0;
    int answer = 0;
  } calls;
  options.progress = [](void* context, uint64_t, uint64_t, uint64_t) {
    auto* seen = static_cast<Calls*>(context);
    ++seen->count;
    return seen->answer;
  };
  options.progress_context = &calls;
  ASSERT_EQ(fb_dataset_open(engine_, data().c_str(), &options, &dataset_), 0) << fb_last_error();
  EXPECT_EQ(fb_dataset_size(dataset_), 16);
  EXPECT_GT(calls.count, 0);

  calls.answer = 1;
  options.use_cache = 0;
  fb_dataset* other = nullptr;
  EXPECT_EQ(fb_dataset_open(engine_, data().c_str(), &options, &other), -ECANCELED);
  options.progress = nullptr;
  options.format = "cassette";
  EXPECT_EQ(fb_dataset_open(engine_, data().c_str(), &options, &other), -EINVAL);
  EXPECT_TRUE(Says("cassette"));
  options.extensions = nullptr;
  EXPECT_EQ(fb_dataset_open(engine_, data().c_str(), &options, &other), -EINVAL);
  EXPECT_TRUE(Says("extensions is NULL"));
}

TEST_F(CapiTest, ABatchLargerThanTheBudgetSaysSo) {
  MakeFiles(12, kMiB);
  Open(EngineOptions(8 * kMiB));
  fb_loader* loader = OpenLoader(LoaderOptions(12));
  fb_batch* batch = nullptr;
  EXPECT_EQ(fb_loader_next(loader, kWaitMs, &batch), -ENOMEM);
  EXPECT_EQ(batch, nullptr);
  EXPECT_TRUE(Says("batch_size")) << fb_last_error();
  fb_loader_close(loader);
}

TEST_F(CapiTest, UnreleasedBatchesAreTheNamedCauseOfAWait) {
  MakeFiles(12, kMiB);
  fb_engine_options options = EngineOptions(8 * kMiB);
  options.release_wait_ms = 60000;
  Open(options);
  fb_loader* loader = OpenLoader(LoaderOptions(2));
  std::vector<fb_batch*> held;
  fb_batch* batch = nullptr;
  int rc = FB_BATCH;
  // A wait may first be for the source.
  while (rc == FB_BATCH || (rc == -EAGAIN && !Says("memory"))) {
    rc = fb_loader_next(loader, 50, &batch);
    if (rc == FB_BATCH) held.push_back(batch);
  }
  ASSERT_EQ(rc, -EAGAIN) << fb_last_error();
  ASSERT_FALSE(held.empty());

  // A thread that waits has the loader to itself.
  uint64_t epoch = 0;
  uint64_t position = 0;
  ASSERT_EQ(fb_loader_position(loader, &epoch, &position), 0);
  EXPECT_EQ(position, 2 * held.size());
  Seen waited;
  std::thread waiter([&] { waited = Next(loader); });
  while ((rc = fb_loader_seek(loader, epoch, position)) == 0) std::this_thread::yield();
  EXPECT_EQ(rc, -EBUSY);
  EXPECT_EQ(fb_loader_next(loader, 0, &batch), -EAGAIN);
  EXPECT_TRUE(Says("another thread")) << fb_last_error();
  EXPECT_EQ(fb_batch_release(held.back()), 0);
  held.pop_back();
  waiter.join();
  EXPECT_EQ(waited.samples.size(), 2u);
  EXPECT_EQ(waited.index, static_cast<int64_t>(held.size()) + 1);
  for (fb_batch* left : held) EXPECT_EQ(fb_batch_release(left), 0);
  fb_loader_close(loader);
}

TEST_F(CapiTest, ASecondReleaseIsRefused) {
  MakeFiles(20);
  Open(EngineOptions());
  fb_loader* loader = OpenLoader(LoaderOptions(4));
  fb_batch* first = nullptr;
  fb_batch* second = nullptr;
  ASSERT_EQ(fb_loader_next(loader, kWaitMs, &first), FB_BATCH);
  ASSERT_EQ(fb_loader_next(loader, kWaitMs, &second), FB_BATCH);
  const Seen before = Look(second);
  EXPECT_EQ(fb_batch_release(first), 0);
  EXPECT_EQ(fb_batch_release(first), -EINVAL);
  EXPECT_TRUE(Says("released"));
  EXPECT_EQ(fb_batch_size(first), -EINVAL);
  const void* bytes = nullptr;
  size_t length = 0;
  EXPECT_EQ(fb_batch_data(first, 0, &bytes, &length), -EINVAL);
  EXPECT_EQ(Look(second), before);
  EXPECT_EQ(fb_batch_release(second), 0);
  fb_loader_close(loader);
}

TEST_F(CapiTest, HandlesCloseInAnyOrder) {
  MakeFiles(20);
  Open(EngineOptions());
  fb_loader* loader = OpenLoader(LoaderOptions(8));
  fb_engine_close(std::exchange(engine_, nullptr));
  fb_batch* batch = nullptr;
  ASSERT_EQ(fb_loader_next(loader, kWaitMs, &batch), FB_BATCH) << fb_last_error();
  const Seen before = Look(batch);
  std::vector<std::string> expected;
  for (int64_t s : before.samples) expected.push_back(contents_[NameOf(static_cast<uint32_t>(s))]);
  EXPECT_EQ(before.bytes, expected);
  fb_dataset_close(std::exchange(dataset_, nullptr));
  EXPECT_EQ(Next(loader).samples.size(), 8u);
  fb_loader_close(loader);
  EXPECT_EQ(Look(batch), before);
  EXPECT_EQ(fb_batch_release(batch), 0);
}

TEST_F(CapiTest, ManyThreadsShareOneLoader) {
  MakeFiles(200);
  Open(EngineOptions());
  fb_loader* loader = OpenLoader(LoaderOptions(3));
  std::mutex mutex;
  std::multiset<int64_t> samples;
  int epochs = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      while (true) {
        const Seen seen = Next(loader);
        const std::lock_guard<std::mutex> lock(mutex);
        if (seen.result == FB_END_OF_EPOCH) ++epochs;
        if (seen.result < 0 || seen.result == FB_END_OF_STREAM) return;
        samples.insert(seen.samples.begin(), seen.samples.end());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(epochs, 1);
  EXPECT_EQ(samples.size(), 200u);
  EXPECT_EQ(std::set<int64_t>(samples.begin(), samples.end()).size(), 200u);
  uint64_t epoch = 0;
  uint64_t position = 9;
  EXPECT_EQ(fb_loader_position(loader, &epoch, &position), 0);
  EXPECT_EQ(epoch, 1u);
  EXPECT_EQ(position, 0u);
  fb_loader_close(loader);
}

TEST_F(CapiTest, MetricsAreWrittenAsSnprintfDoes) {
  MakeFiles(10);
  Open(EngineOptions());
  fb_loader* loader = OpenLoader(LoaderOptions(10));
  EXPECT_EQ(Next(loader).samples.size(), 10u);
  fb_loader_close(loader);
  const int64_t length = fb_metrics_text(engine_, nullptr, 0);
  ASSERT_GT(length, 0);
  std::vector<char> text(static_cast<size_t>(length) + 64);
  ASSERT_GT(fb_metrics_text(engine_, text.data(), text.size()), 0);
  EXPECT_NE(std::string(text.data()).find("forebay_stage_samples_total 10"), std::string::npos);
  char cut[8];
  EXPECT_GE(fb_metrics_text(engine_, cut, sizeof cut), 8);
  EXPECT_EQ(std::strlen(cut), 7u);
}

#if FOREBAY_TEST_OWN_NEW
// Fails the first allocation of a call, then the second, ... until the call has enough. Each call
// has an engine of its own.
TEST_F(CapiTest, ALackOfMemoryIsAnErrorLikeAnyOther) {
  MakeFiles(4);
  const std::string path = data();
  const auto survives = [&](auto call) {
    int64_t rc = -ENOMEM;
    int allowed = 0;
    for (; rc == -ENOMEM && allowed < 2000; ++allowed) {
      Open(EngineOptions(8 * kMiB));
      allocations_left = allowed;
      rc = call();
      allocations_left = -1;
      fb_dataset_close(std::exchange(dataset_, nullptr));
      fb_engine_close(std::exchange(engine_, nullptr));
    }
    EXPECT_GE(rc, 0) << fb_last_error();
    EXPECT_GT(allowed, 1);
    EXPECT_TRUE(Says("out of memory")) << fb_last_error();
  };
  survives([&] { return fb_metrics_text(engine_, nullptr, 0); });
  survives([&] {
    fb_dataset* dataset = nullptr;
    const int rc = fb_dataset_open(engine_, path.c_str(), nullptr, &dataset);
    fb_dataset_close(dataset);
    return rc;
  });
  survives([&] {
    fb_loader* loader = nullptr;
    const int rc = fb_loader_open(dataset_, nullptr, &loader);
    fb_loader_close(loader);
    return rc;
  });
}
#endif

TEST_F(CapiTest, AForkedChildIsTurnedAway) {
  MakeFiles(10);
  Open(EngineOptions());
  fb_loader* loader = OpenLoader(LoaderOptions(4));
  fb_batch* batch = nullptr;
  ASSERT_EQ(fb_loader_next(loader, kWaitMs, &batch), FB_BATCH);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    fb_batch* other = nullptr;
    fb_loader* opened = nullptr;
    uint64_t number = 0;
    int wrong = 0;
    wrong |= fb_loader_next(loader, 1000, &other) == -ECANCELED ? 0 : 1;
    wrong |= fb_loader_seek(loader, 0, 0) == -ECANCELED ? 0 : 2;
    wrong |= fb_loader_position(loader, &number, &number) == -ECANCELED ? 0 : 4;
    wrong |= fb_batch_release(batch) == -ECANCELED ? 0 : 8;
    wrong |= fb_loader_open(dataset_, nullptr, &opened) == -ECANCELED ? 0 : 16;
    wrong |= fb_metrics_text(engine_, nullptr, 0) == -ECANCELED ? 0 : 32;
    wrong |= Says("parent") ? 0 : 64;
    fb_loader_close(loader);
    fb_dataset_close(dataset_);
    fb_engine_close(engine_);
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(fb_batch_release(batch), 0);
  EXPECT_EQ(Next(loader).samples.size(), 4u);
  fb_loader_close(loader);
}

}  // namespace
