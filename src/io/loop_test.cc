// One conformance suite for every Loop.
#include "io/loop.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"

namespace forebay {
namespace {

struct Kind {
  const char* name;
  Result<std::unique_ptr<Loop>> (*make)(const LoopOptions&);
  Status (*probe)();
};

class LoopTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    const Status usable = GetParam().probe();
    if (!usable.ok()) GTEST_SKIP() << "NOT TESTED: " << usable.ToString();
    std::string pattern = testing::TempDir() + "forebay_loop_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }

  std::unique_ptr<Loop> Make(size_t max_in_flight) {
    Result<std::unique_ptr<Loop>> loop = GetParam().make({.max_in_flight = max_in_flight});
    EXPECT_TRUE(loop.has_value()) << loop.status().ToString();
    return loop ? std::move(*loop) : nullptr;
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  std::vector<std::byte> WriteFile(const std::string& name, size_t size, uint64_t seed) {
    std::vector<std::byte> bytes(size);
    SplitMix64 rng(seed);
    for (std::byte& b : bytes) b = static_cast<std::byte>(rng.Next());
    const OwnedFd fd(open(Path(name).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600));
    EXPECT_TRUE(fd.valid());
    EXPECT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    return bytes;
  }

  // Polls and reaps until `count` ops are done; each tag may come once.
  static std::map<uint64_t, Completion> Collect(Loop& loop, size_t count) {
    std::map<uint64_t, Completion> all;
    std::vector<Completion> out(7);
    while (all.size() < count) {
      pollfd waiting{loop.event_fd(), POLLIN, 0};
      if (poll(&waiting, 1, 60'000) != 1) {
        ADD_FAILURE() << "only " << all.size() << " of " << count << " completed";
        return all;
      }
      const size_t n = loop.Reap(out);
      for (size_t i = 0; i < n; ++i) {
        EXPECT_TRUE(all.emplace(out[i].tag, out[i]).second) << "twice: " << out[i].tag;
      }
    }
    EXPECT_EQ(loop.Reap(out), 0u);
    return all;
  }

  static Completion RunOne(Loop& loop, const ReadOp& op) {
    EXPECT_EQ(loop.Submit(std::span(&op, 1)), 1u);
    return Collect(loop, 1)[op.tag];
  }

  std::string folder_;
};

size_t CountOpenFds() {
  size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST_P(LoopTest, ReadsEverySize) {
  auto loop = Make(4);
  for (size_t size : {0u, 1u, 511u, 4096u, 112'640u, 9u << 20, 20u << 20}) {
    const auto expected = WriteFile("f", size, size);
    std::vector<std::byte> dest(size);
    const std::string path = Path("f");
    const Completion done = RunOne(
        *loop,
        {.tag = size, .path = path.c_str(), .dest = dest, .expect_end = true, .checksum = true});
    EXPECT_EQ(done.error, 0);
    EXPECT_EQ(done.bytes, size);
    EXPECT_FALSE(done.longer);
    EXPECT_EQ(done.crc, Crc32c(expected));
    EXPECT_GT(done.latency_ns, 0);
    EXPECT_TRUE(dest == expected) << size;
  }
}

TEST_P(LoopTest, RandomReadsFromASeed) {
  constexpr uint64_t kSeed = 20240607;
  SplitMix64 rng(kSeed);
  auto loop = Make(16);
  std::vector<std::vector<std::byte>> files;
  std::vector<std::string> paths;
  std::vector<OwnedFd> fds;
  for (size_t i = 0; i < 8; ++i) {
    files.push_back(WriteFile(std::to_string(i), 1 + rng.Below(600'000), rng.Next()));
    paths.push_back(Path(std::to_string(i)));
    fds.emplace_back(open(paths.back().c_str(), O_RDONLY | O_CLOEXEC));
  }
  const size_t open_before = CountOpenFds();
  constexpr size_t kOps = 1500;
  struct Expected {
    size_t file, offset, bytes;
    bool longer;
    std::vector<std::byte> dest;
  };
  std::vector<Expected> expected(kOps);
  size_t submitted = 0;
  size_t finished = 0;
  std::vector<bool> seen(kOps);
  std::vector<ReadOp> batch;
  std::vector<Completion> out(5);
  while (finished < kOps) {
    while (batch.size() < 1 + rng.Below(20) && submitted + batch.size() < kOps) {
      const size_t tag = submitted + batch.size();
      Expected& e = expected[tag];
      e.file = rng.Below(files.size());
      const size_t size = files[e.file].size();
      e.offset = rng.Below(size + 100);  // some begin beyond the end
      const size_t left = e.offset < size ? size - e.offset : 0;
      const size_t wanted = rng.Below(3) == 0 ? left : rng.Below(size + 200);
      const bool expect_end = rng.Below(2) == 0;
      e.bytes = std::min(wanted, left);
      e.longer = expect_end && wanted < left;
      e.dest.resize(wanted);
      const bool by_fd = rng.Below(2) == 0;
      batch.push_back({.tag = tag,
                       .fd = by_fd ? fds[e.file].get() : -1,
                       .path = by_fd ? nullptr : paths[e.file].c_str(),
                       .offset = e.offset,
                       .dest = e.dest,
                       .expect_end = expect_end,
                       .checksum = true});
    }
    const size_t taken = loop->Submit(batch);
    ASSERT_LE(taken, batch.size());
    submitted += taken;
    batch.erase(batch.begin(), batch.begin() + static_cast<ptrdiff_t>(taken));
    // What was not taken keeps its tag, so the batch must stay as it is until it is.
    pollfd waiting{loop->event_fd(), POLLIN, 0};
    if (submitted > finished) {
      ASSERT_EQ(poll(&waiting, 1, 60'000), 1) << "seed " << kSeed;
    }
    const size_t n = loop->Reap(out);
    for (size_t i = 0; i < n; ++i, ++finished) {
      const Completion& c = out[i];
      ASSERT_LT(c.tag, submitted);
      ASSERT_FALSE(seen[c.tag]) << "seed " << kSeed << " op " << c.tag;
      seen[c.tag] = true;
      Expected& e = expected[c.tag];
      ASSERT_EQ(c.error, 0) << strerror(c.error);
      ASSERT_EQ(c.bytes, e.bytes);
      ASSERT_EQ(c.longer, e.longer) << "seed " << kSeed << " op " << c.tag;
      const std::byte* from = files[e.file].data() + std::min(e.offset, files[e.file].size());
      ASSERT_EQ(std::memcmp(e.dest.data(), from, e.bytes), 0);
      ASSERT_EQ(c.crc, Crc32c(std::span(from, e.bytes)));
      e.dest = {};
    }
  }
  EXPECT_EQ(loop->Reap(out), 0u);
  loop.reset();
  EXPECT_LE(CountOpenFds(), open_before) << "descriptors leaked, or given ones were closed";
  for (const OwnedFd& fd : fds) EXPECT_GE(fcntl(fd.get(), F_GETFD), 0);
}

// A read into several places, with gaps, of one range.
struct Scattered {
  uint64_t offset = 0;
  uint64_t range = 0;
  std::vector<std::vector<std::byte>> dests;
  std::vector<ReadPart> parts;

  void Add(uint64_t gap, size_t size) {
    dests.emplace_back(size);
    parts.push_back({.gap = gap, .dest = dests.back()});
    range += gap + size;
  }
  void Check(std::span<const std::byte> file) const {
    uint64_t at = offset;
    for (const ReadPart& part : parts) {
      at += part.gap;
      const std::span<const std::byte> expected = file.subspan(at, part.dest.size());
      ASSERT_TRUE(std::ranges::equal(part.dest, expected));
      ASSERT_EQ(part.crc, Crc32c(expected));
      at += part.dest.size();
    }
  }
};

TEST_P(LoopTest, ScatteredReadsFromASeed) {
  constexpr size_t kSize = 3'000'000;
  const auto file = WriteFile("f", kSize, 5);
  const std::string path = Path("f");
  const OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  auto loop = Make(8);
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    std::vector<Scattered> reads(1 + rng.Below(8));
    std::vector<ReadOp> ops;
    for (Scattered& read : reads) {
      read.offset = rng.Below(kSize / 2);
      // Some name more places, or leave larger gaps, than one request takes.
      const bool many = rng.Below(8) == 0;
      const size_t parts = 1 + rng.Below(many ? 700 : 12);
      for (size_t i = 0; i < parts; ++i) {
        const uint64_t gap =
            rng.Below(3) == 0 ? 0 : rng.Below(uint64_t{1} << rng.Below(many ? 12 : 20));
        const size_t size =
            rng.Below(5) == 0 ? 0 : rng.Below(uint64_t{1} << rng.Below(many ? 10 : 16));
        if (read.offset + read.range + gap + size > kSize) break;
        read.Add(gap, size);
      }
      if (read.parts.empty()) read.Add(100, 10);
      const bool by_fd = rng.Below(2) == 0;
      ops.push_back({.tag = ops.size(),
                     .fd = by_fd ? fd.get() : -1,
                     .path = by_fd ? nullptr : path.c_str(),
                     .offset = read.offset,
                     .parts = read.parts,
                     .checksum = true});
    }
    ASSERT_EQ(loop->Submit(ops), ops.size());
    for (const auto& [tag, done] : Collect(*loop, ops.size())) {
      ASSERT_EQ(done.error, 0) << strerror(done.error);
      ASSERT_EQ(done.bytes, reads[tag].range);
      ASSERT_FALSE(done.longer);
      reads[tag].Check(file);
    }
  }
}

TEST_P(LoopTest, ScatteredReadOfAShortFile) {
  auto loop = Make(4);
  const auto file = WriteFile("f", 50'000, 1);
  const std::string path = Path("f");
  for (const uint64_t end : {0, 5, 10, 15, 30'015, 30'020, 49'990}) {
    Scattered read;
    read.offset = 50'000 - end;
    read.Add(0, 10);
    read.Add(30'000, 10);
    read.Add(20'000, 10);
    const Completion done = RunOne(*loop, {.tag = end,
                                           .path = path.c_str(),
                                           .offset = read.offset,
                                           .parts = read.parts,
                                           .checksum = true});
    EXPECT_EQ(done.error, 0);
    EXPECT_EQ(done.bytes, end);
    const size_t first = std::min<size_t>(end, 10);
    EXPECT_EQ(std::memcmp(read.dests[0].data(), file.data() + read.offset, first), 0);
  }
}

TEST_P(LoopTest, ScatteredReadOfNothing) {
  auto loop = Make(4);
  WriteFile("f", 100, 1);
  const std::string path = Path("f");
  Scattered read;
  read.Add(0, 0);
  read.Add(0, 0);
  const Completion done =
      RunOne(*loop, {.tag = 1, .path = path.c_str(), .parts = read.parts, .checksum = true});
  EXPECT_EQ(done.error, 0);
  EXPECT_EQ(done.bytes, 0u);
  EXPECT_EQ(read.parts[1].crc, 0u);
}

TEST_P(LoopTest, ReportsErrors) {
  auto loop = Make(4);
  std::vector<std::byte> dest(100);
  const std::string missing = Path("missing");
  Completion done = RunOne(*loop, {.tag = 1, .path = missing.c_str(), .dest = dest});
  EXPECT_EQ(done.error, ENOENT);
  EXPECT_EQ(done.bytes, 0u);
  done = RunOne(*loop, {.tag = 2, .path = folder_.c_str(), .dest = dest});
  EXPECT_EQ(done.error, EISDIR);
  const std::string endless(5000, 'x');
  done = RunOne(*loop, {.tag = 3, .path = endless.c_str(), .dest = dest});
  EXPECT_EQ(done.error, ENAMETOOLONG);
  // The loop still works.
  WriteFile("f", 100, 1);
  const std::string path = Path("f");
  done = RunOne(*loop, {.tag = 4, .path = path.c_str(), .dest = dest});
  EXPECT_EQ(done.error, 0);
  EXPECT_EQ(done.bytes, 100u);
}

TEST_P(LoopTest, ShortAndLongFiles) {
  auto loop = Make(4);
  const auto bytes = WriteFile("f", 100, 1);
  const std::string path = Path("f");
  std::vector<std::byte> dest(150);
  Completion done =
      RunOne(*loop, {.tag = 1, .path = path.c_str(), .dest = dest, .expect_end = true});
  EXPECT_EQ(done.error, 0);
  EXPECT_EQ(done.bytes, 100u);
  EXPECT_FALSE(done.longer);
  dest.resize(99);
  done = RunOne(*loop, {.tag = 2, .path = path.c_str(), .dest = dest, .expect_end = true});
  EXPECT_EQ(done.bytes, 99u);
  EXPECT_TRUE(done.longer);
  EXPECT_EQ(std::memcmp(dest.data(), bytes.data(), 99), 0);
  done = RunOne(*loop, {.tag = 3, .path = path.c_str(), .dest = dest});
  EXPECT_FALSE(done.longer);
  done = RunOne(*loop, {.tag = 4, .path = path.c_str(), .dest = {}, .expect_end = true});
  EXPECT_EQ(done.bytes, 0u);
  EXPECT_TRUE(done.longer);
}

TEST_P(LoopTest, TellsAnotherVersionOfTheFile) {
  const auto loop = Make(2);
  const std::vector<std::byte> bytes = WriteFile("f", 100, 1);
  const std::string path = Path("f");
  const OwnedFd open_file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const timespec times[2] = {{.tv_sec = 7, .tv_nsec = 123'456'789}, {.tv_sec = 7, .tv_nsec = 5}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  const FileVersion now{.bytes = 100, .modified_ns = 7'000'000'005};
  const FileVersion longer{.bytes = 101, .modified_ns = 7'000'000'005};
  const FileVersion later{.bytes = 100, .modified_ns = 7'000'000'006};
  std::vector<std::byte> dest(60);
  for (const int fd : {-1, open_file.get()}) {
    const auto run = [&](const FileVersion& version) {
      return RunOne(*loop,
                    {.tag = 1, .fd = fd, .path = path.c_str(), .dest = dest, .version = version});
    };
    const Completion same = run(now);
    EXPECT_EQ(same.error, 0);
    EXPECT_EQ(same.bytes, 60u);
    EXPECT_FALSE(same.changed);
    EXPECT_TRUE(std::equal(dest.begin(), dest.end(), bytes.begin()));
    EXPECT_TRUE(run(longer).changed);
    EXPECT_TRUE(run(later).changed);
  }
  const std::string none = Path("none");
  const Completion missing =
      RunOne(*loop, {.tag = 1, .path = none.c_str(), .dest = dest, .version = now});
  EXPECT_EQ(missing.error, ENOENT);
  EXPECT_FALSE(missing.changed);
}

TEST_P(LoopTest, TellsTheChangeTimeOfAPath) {
  const auto loop = Make(2);
  WriteFile("f", 100, 1);
  const std::string path = Path("f");
  const OwnedFd open_file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat st = {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  std::vector<std::byte> dest(100);
  ReadOp op{.tag = 1, .path = path.c_str(), .dest = dest, .expect_end = true, .change_time = true};
  const Completion done = RunOne(*loop, op);
  EXPECT_EQ(done.error, 0);
  EXPECT_EQ(done.bytes, 100u);
  EXPECT_EQ(done.change_time_ns, st.st_ctim.tv_sec * kSecond + st.st_ctim.tv_nsec);
  op.change_time = false;
  EXPECT_EQ(RunOne(*loop, op).change_time_ns, 0);
  op = {.tag = 2, .fd = open_file.get(), .dest = dest, .change_time = true};
  EXPECT_EQ(RunOne(*loop, op).change_time_ns, 0);
  const std::string none = Path("none");
  op = {.tag = 3, .path = none.c_str(), .dest = dest, .change_time = true};
  EXPECT_EQ(RunOne(*loop, op).error, ENOENT);
}

TEST_P(LoopTest, EventFdFollowsCompletions) {
  auto loop = Make(8);
  EXPECT_EQ(loop->capacity(), 8u);
  pollfd waiting{loop->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
  Completion one;
  EXPECT_EQ(loop->Reap(std::span(&one, 1)), 0u);
  WriteFile("f", 10, 1);
  const std::string path = Path("f");
  std::vector<std::byte> dest(3 * 10);
  for (uint64_t tag = 0; tag < 3; ++tag) {
    const ReadOp op{
        .tag = tag, .path = path.c_str(), .dest = std::span(dest).subspan(tag * 10, 10)};
    ASSERT_EQ(loop->Submit(std::span(&op, 1)), 1u);
  }
  // One at a time: it stays readable while completions wait.
  for (int got = 0; got < 3;) {
    ASSERT_EQ(poll(&waiting, 1, 60'000), 1);
    got += static_cast<int>(loop->Reap(std::span(&one, 1)));
  }
  // A signal may come late, for a completion that is reaped already; Reap drains it, too.
  int readable = 1;
  for (int tries = 0; tries < 1000 && readable != 0; ++tries) {
    EXPECT_EQ(loop->Reap(std::span(&one, 1)), 0u);
    readable = poll(&waiting, 1, 1);
  }
  EXPECT_EQ(readable, 0);
}

// Ops whose destinations are pages that nobody has filled yet: the read waits until Release.
class BlockedOps {
 public:
  BlockedOps(const std::string& folder, size_t count)
      : path_(folder + "/blocked"), bytes_(count * kPage) {
    const OwnedFd file(open(path_.c_str(), O_WRONLY | O_CREAT, 0600));
    EXPECT_EQ(write(file.get(), "x", 1), 1);
    fd_ = OwnedFd(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK)));
    if (!fd_.valid()) return;
    uffdio_api api{};
    api.api = UFFD_API;
    pages_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uffdio_register range{};
    range.range = {reinterpret_cast<uint64_t>(pages_), bytes_};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    ready_ = pages_ != MAP_FAILED && ioctl(fd_.get(), UFFDIO_API, &api) == 0 &&
             ioctl(fd_.get(), UFFDIO_REGISTER, &range) == 0;
    for (size_t i = 0; ready_ && i < count; ++i) {
      ops_.push_back({.tag = i, .path = path_.c_str(), .dest = {Page(i), 1}});
    }
  }
  ~BlockedOps() {
    if (pages_ != MAP_FAILED) munmap(pages_, bytes_);
  }
  BlockedOps(const BlockedOps&) = delete;
  BlockedOps& operator=(const BlockedOps&) = delete;

  bool ready() const { return ready_; }
  const std::vector<ReadOp>& ops() const { return ops_; }
  // Lets the read of op `i` go on, if it has come to the page.
  bool ReleaseIfWaiting(size_t i) {
    uffd_msg message;
    while (read(fd_.get(), &message, sizeof message) == sizeof message) {
      waiting_.insert((message.arg.pagefault.address - reinterpret_cast<uint64_t>(pages_)) / kPage);
    }
    if (waiting_.count(i) == 0) return false;
    uffdio_zeropage zero{};
    zero.range = {reinterpret_cast<uint64_t>(Page(i)), kPage};
    return ioctl(fd_.get(), UFFDIO_ZEROPAGE, &zero) == 0 || errno == EEXIST;
  }
  // Waits for the read, then lets it go on.
  void Release(size_t i) {
    for (int tries = 0; tries < 6000 && !ReleaseIfWaiting(i); ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

 private:
  static constexpr size_t kPage = 4096;
  std::byte* Page(size_t i) { return static_cast<std::byte*>(pages_) + i * kPage; }

  const std::string path_;
  const size_t bytes_;
  OwnedFd fd_;
  void* pages_ = MAP_FAILED;
  bool ready_ = false;
  std::set<size_t> waiting_;
  std::vector<ReadOp> ops_;
};

TEST_P(LoopTest, SubmitTakesAPrefixAndAllOverlap) {
  constexpr size_t kInFlight = 40;
  auto loop = Make(kInFlight);
  BlockedOps blocked(folder_, kInFlight + 10);
  if (!blocked.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  EXPECT_EQ(loop->Submit(blocked.ops()), kInFlight);
  EXPECT_EQ(loop->Submit(std::span(blocked.ops()).subspan(kInFlight)), 0u);
  Completion one;
  EXPECT_EQ(loop->Reap(std::span(&one, 1)), 0u);
  // Released in reverse: the last can only be inside its read while all before it are blocked.
  for (size_t i = kInFlight; i > 0; --i) blocked.Release(i - 1);
  const auto done = Collect(*loop, kInFlight);
  EXPECT_EQ(done.size(), kInFlight);
  for (const auto& [tag, completion] : done) {
    EXPECT_TRUE(completion.error == 0 && completion.bytes == 1);
  }
  EXPECT_EQ(loop->Submit(std::span(blocked.ops()).subspan(kInFlight)), 10u);
  for (size_t i = 0; i < 10; ++i) blocked.Release(kInFlight + i);
  Collect(*loop, 10);
}

TEST_P(LoopTest, OneStuckReadDelaysNoOther) {
  auto loop = Make(4);
  BlockedOps blocked(folder_, 3);
  if (!blocked.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  ASSERT_EQ(loop->Submit(blocked.ops()), 3u);
  const auto bytes = WriteFile("f", 1000, 1);
  const std::string path = Path("f");
  for (uint64_t tag = 100; tag < 150; ++tag) {
    std::vector<std::byte> dest(1000);
    const Completion done = RunOne(*loop, {.tag = tag, .path = path.c_str(), .dest = dest});
    EXPECT_EQ(done.bytes, 1000u);
    EXPECT_EQ(dest, bytes);
  }
  for (size_t i = 0; i < 3; ++i) blocked.Release(i);
  Collect(*loop, 3);
}

TEST_P(LoopTest, DestructionWaitsForWhatIsInFlight) {
  auto loop = Make(4);
  BlockedOps blocked(folder_, 4);
  if (!blocked.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  ASSERT_EQ(loop->Submit(blocked.ops()), 4u);
  // Ops that were not begun are discarded, so nobody may ever come to their pages.
  std::jthread releaser([&](const std::stop_token& stop) {
    for (size_t i = 0; !stop.stop_requested(); i = (i + 1) % 4) {
      blocked.ReleaseIfWaiting(i);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  loop.reset();
  releaser.request_stop();

  loop = Make(64);
  const auto bytes = WriteFile("f", 500'000, 1);
  const std::string path = Path("f");
  std::vector<std::vector<std::byte>> dest(64, std::vector<std::byte>(bytes.size()));
  std::vector<ReadOp> ops;
  for (auto& d : dest) ops.push_back({.path = path.c_str(), .dest = d});
  ASSERT_EQ(loop->Submit(ops), 64u);
  loop.reset();
  // Under AddressSanitizer a late write into these is a failure.
  dest.clear();
}

TEST_P(LoopTest, ForkedChildDestroysWithoutWaiting) {
  auto loop = Make(8);
  BlockedOps blocked(folder_, 4);
  if (!blocked.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  ASSERT_EQ(loop->Submit(blocked.ops()), 4u);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    loop.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  // The parent's ops are untouched.
  for (size_t i = 0; i < 4; ++i) blocked.Release(i);
  EXPECT_EQ(Collect(*loop, 4).size(), 4u);
  const auto bytes = WriteFile("f", 1000, 1);
  const std::string path = Path("f");
  std::vector<std::byte> dest(1000);
  EXPECT_EQ(RunOne(*loop, {.tag = 9, .path = path.c_str(), .dest = dest}).bytes, 1000u);
  EXPECT_EQ(dest, bytes);
}

// A file that became something else: nobody is waited for.
TEST_P(LoopTest, FifosSocketsAndDevicesAreNotWaitedFor) {
  auto loop = Make(4);
  std::vector<std::byte> dest(10);
  const auto read = [&](const std::string& path) {
    return RunOne(*loop, {.tag = 1, .path = path.c_str(), .dest = dest, .expect_end = true});
  };
  const std::string fifo = Path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  Completion done = read(fifo);
  EXPECT_TRUE(done.error == ESPIPE || done.bytes == 0) << done.error << " " << done.bytes;
  {
    // With somebody who could write, and does not.
    const OwnedFd writer(open(fifo.c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(writer.valid());
    EXPECT_EQ(read(fifo).error, ESPIPE);
  }
  std::filesystem::create_symlink("/dev/zero", Path("endless"));
  done = read(Path("endless"));
  EXPECT_TRUE(done.error == ESPIPE || done.longer);
  std::filesystem::create_symlink("/dev/null", Path("empty"));
  done = read(Path("empty"));
  EXPECT_TRUE(done.error == ESPIPE || done.bytes == 0);
  const OwnedFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  Path("socket").copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(read(Path("socket")).error, ESPIPE);
  EXPECT_EQ(read(folder_).error, EISDIR);
  // Links are followed, in a data set.
  const auto bytes = WriteFile("f", 10, 1);
  std::filesystem::create_symlink(Path("f"), Path("link"));
  EXPECT_EQ(read(Path("link")).bytes, 10u);
  EXPECT_EQ(dest, bytes);
}

TEST_P(LoopTest, RefusesBadOptions) {
  EXPECT_EQ(GetParam().make({.max_in_flight = 0}).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(GetParam().make({.max_in_flight = 5000}).error().code(), Code::kInvalidArgument);
}

// On threads that loops of other tests have used, and will use.
Result<std::unique_ptr<Loop>> MakeShared(const LoopOptions& options) {
  static const std::shared_ptr<ReaderPool> pool = *MakeReaderPool({.threads = 64});
  return MakeThreadLoopOn(pool, options);
}

class ReaderPoolTest : public LoopTest {};

TEST_P(ReaderPoolTest, CompletionsGoToTheLoopThatAsked) {
  const auto pool = *MakeReaderPool({.threads = 3});
  constexpr size_t kLoops = 5;
  std::vector<std::unique_ptr<Loop>> loops;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::string> paths;
  for (size_t i = 0; i < kLoops; ++i) {
    loops.push_back(*MakeThreadLoopOn(pool, {.max_in_flight = 8}));
    bytes.push_back(WriteFile("f" + std::to_string(i), 1000, i));
    paths.push_back(Path("f" + std::to_string(i)));
  }
  for (int round = 0; round < 50; ++round) {
    std::vector<std::vector<std::byte>> dest(kLoops * 8, std::vector<std::byte>(1000));
    for (size_t i = 0; i < kLoops; ++i) {
      for (size_t k = 0; k < 8; ++k) {
        const ReadOp op{.tag = k, .path = paths[i].c_str(), .dest = dest[i * 8 + k]};
        ASSERT_EQ(loops[i]->Submit(std::span(&op, 1)), 1u);
      }
    }
    // The last first: what is another's waits for it.
    for (size_t i = kLoops; i > 0; --i) EXPECT_EQ(Collect(*loops[i - 1], 8).size(), 8u);
    for (size_t i = 0; i < dest.size(); ++i) EXPECT_EQ(dest[i], bytes[i / 8]);
  }
}

TEST_P(ReaderPoolTest, LeavingDiscardsAndWaitsForItsOwnOnly) {
  const auto pool = *MakeReaderPool({.threads = 2});
  auto hanging = *MakeThreadLoopOn(pool, {.max_in_flight = 4});
  auto other = *MakeThreadLoopOn(pool, {.max_in_flight = 64});
  BlockedOps blocked(folder_, 1);
  if (!blocked.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  ASSERT_EQ(hanging->Submit(blocked.ops()), 1u);
  const auto bytes = WriteFile("f", 100'000, 1);
  const std::string path = Path("f");
  std::vector<std::vector<std::byte>> dest(64, std::vector<std::byte>(bytes.size()));
  std::vector<ReadOp> ops;
  for (auto& d : dest) ops.push_back({.path = path.c_str(), .dest = d});
  ASSERT_EQ(other->Submit(ops), 64u);
  other.reset();  // while the other loop's op hangs
  dest.clear();
  blocked.Release(0);
  EXPECT_EQ(Collect(*hanging, 1).size(), 1u);
}

// One data set's storage hangs below every thread there is.
TEST_P(ReaderPoolTest, StuckThreadsAreNotTakenFromOtherLoops) {
  constexpr size_t kThreads = 4;
  const auto pool = *MakeReaderPool({.threads = kThreads, .stuck_after = kMilli});
  auto hanging = *MakeThreadLoopOn(pool, {.max_in_flight = kThreads});
  auto other = *MakeThreadLoopOn(pool, {.max_in_flight = kThreads});
  BlockedOps blocked(folder_, kThreads);
  if (!blocked.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  ASSERT_EQ(hanging->Submit(blocked.ops()), kThreads);
  const auto bytes = WriteFile("f", 1000, 1);
  const std::string path = Path("f");
  std::vector<std::byte> dest(1000);
  const ReadOp op{.tag = 7, .path = path.c_str(), .dest = dest};
  ASSERT_EQ(other->Submit(std::span(&op, 1)), 1u);
  Completion done;
  size_t reaped = 0;
  for (int tries = 0; tries < 6000 && reaped == 0; ++tries) {
    pollfd waiting{other->event_fd(), POLLIN, 0};
    (void)poll(&waiting, 1, 10);
    reaped = other->Reap(std::span(&done, 1));
  }
  EXPECT_EQ(reaped, 1u);
  EXPECT_EQ(dest, bytes);
  for (size_t i = 0; i < kThreads; ++i) blocked.Release(i);
  Collect(*hanging, kThreads);
}

INSTANTIATE_TEST_SUITE_P(All, ReaderPoolTest,
                         testing::Values(Kind{"threads", &MakeShared, [] { return Status(); }}),
                         [](const testing::TestParamInfo<Kind>& kind) {
                           return std::string(kind.param.name);
                         });

INSTANTIATE_TEST_SUITE_P(All, LoopTest,
                         testing::Values(Kind{"threads", &MakeThreadLoop, [] { return Status(); }},
                                         Kind{"shared", &MakeShared, [] { return Status(); }},
                                         Kind{"uring", &MakeUringLoop, &ProbeUring}),
                         [](const testing::TestParamInfo<Kind>& kind) {
                           return std::string(kind.param.name);
                         });

}  // namespace
}  // namespace forebay
