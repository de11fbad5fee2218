// One conformance suite for every Source, and what is particular to each.
#include "source/source.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "io/loop.h"
#include "source/delay_source.h"
#include "source/fault_source.h"
#include "source/null_source.h"
#include "source/shard_fds.h"

namespace forebay {
namespace {

using Bytes = std::vector<std::byte>;

Bytes RandomBytes(size_t size, uint64_t seed) {
  Bytes bytes(size);
  SplitMix64 rng(seed);
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng.Next());
  return bytes;
}

void WriteFile(const std::string& path, std::span<const std::byte> bytes) {
  const OwnedFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600));
  ASSERT_TRUE(fd.valid()) << path;
  ASSERT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
}

template <typename T>
void AppendNumber(Bytes& out, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

void AppendTfRecord(Bytes& out, const Bytes& data) {
  const uint64_t length = data.size();
  AppendNumber(out, length);
  AppendNumber(out, MaskCrc(Crc32c(std::as_bytes(std::span(&length, 1)))));
  out.insert(out.end(), data.begin(), data.end());
  AppendNumber(out, MaskCrc(Crc32c(data)));
}

// A tar member of one file; headers and padding are gaps between the samples.
void AppendTarMember(Bytes& out, const std::string& name, const Bytes& data) {
  std::array<char, 512> header{};
  name.copy(header.data(), 100);
  std::snprintf(header.data() + 124, 12, "%011zo", data.size());
  std::memset(header.data() + 148, ' ', 8);
  header[156] = '0';
  std::memcpy(header.data() + 257, "ustar\00000", 8);
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  std::snprintf(header.data() + 148, 8, "%06o", sum);
  const auto bytes = std::as_bytes(std::span(header));
  out.insert(out.end(), bytes.begin(), bytes.end());
  out.insert(out.end(), data.begin(), data.end());
  out.resize((out.size() + 511) / 512 * 512);
}

// A file's modification time, to be put back after a write.
class KeptTime {
 public:
  explicit KeptTime(std::string path) : path_(std::move(path)) {
    EXPECT_EQ(stat(path_.c_str(), &before_), 0);
  }
  void PutBack() const {
    const timespec times[2] = {before_.st_atim, before_.st_mtim};
    EXPECT_EQ(utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  }

 private:
  std::string path_;
  struct stat before_ = {};
};

// As a file that was written a second later, whatever the clock's steps are.
void SetNewer(const std::string& path) {
  struct stat st = {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  const timespec times[2] = {st.st_atim, {st.st_mtim.tv_sec + 1, st.st_mtim.tv_nsec}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

bool WaitReadable(const Source& source) {
  pollfd waiting{source.event_fd(), POLLIN, 0};
  return poll(&waiting, 1, 60'000) == 1;
}

std::map<uint64_t, SourceDone> Collect(Source& source, size_t count) {
  std::map<uint64_t, SourceDone> all;
  std::vector<SourceDone> out(5);
  while (all.size() < count) {
    if (!WaitReadable(source)) {
      ADD_FAILURE() << "only " << all.size() << " of " << count << " completed";
      return all;
    }
    const size_t n = source.Reap(out);
    for (size_t i = 0; i < n; ++i) {
      const uint64_t tag = out[i].tag;
      EXPECT_TRUE(all.emplace(tag, std::move(out[i])).second) << "twice: " << tag;
    }
  }
  EXPECT_EQ(source.Reap(out), 0u);
  return all;
}

SourceDone ReadOne(Source& source, SampleId sample, std::span<std::byte> dest) {
  const SourceRead read{.tag = 7, .sample = sample, .dest = dest};
  EXPECT_EQ(source.Submit(std::span(&read, 1)), 1u);
  return std::move(Collect(source, 1)[7]);
}

// A data set of files and one of shards, in a folder of its own.
class DataSet {
 public:
  DataSet() {
    std::string pattern = testing::TempDir() + "forebay_source_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  ~DataSet() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  void MakeFiles(std::span<const size_t> sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      samples_.push_back(RandomBytes(sizes[i], i + 1));
      paths_.push_back(folder_ + "/" + std::to_string(i) + ".bin");
      WriteFile(paths_.back(), samples_.back());
    }
    Keep(BuildFileList(paths_, {}));
  }

  void MakeTfRecords(size_t shards, size_t each) {
    for (size_t s = 0; s < shards; ++s) {
      Bytes shard;
      for (size_t i = 0; i < each; ++i) {
        samples_.push_back(RandomBytes(100 + 37 * i, s * each + i + 1));
        AppendTfRecord(shard, samples_.back());
      }
      paths_.push_back(folder_ + "/shard-" + std::to_string(10 + s) + ".tfrecord");
      WriteFile(paths_.back(), shard);
    }
    Keep(BuildCatalog(folder_, {}));
  }

  void MakeTars(size_t shards, size_t each) {
    for (size_t s = 0; s < shards; ++s) {
      Bytes shard;
      for (size_t i = 0; i < each; ++i) {
        samples_.push_back(RandomBytes(1 + (i * 733 + s * 71) % 3000, s * each + i + 1));
        AppendTarMember(shard, std::to_string(100'000 + s * each + i) + ".bin", samples_.back());
      }
      shard.resize(shard.size() + 1024);
      paths_.push_back(folder_ + "/shard-" + std::to_string(10 + s) + ".tar");
      WriteFile(paths_.back(), shard);
    }
    Keep(BuildCatalog(folder_, {}));
  }

  const Catalog& catalog() const { return *catalog_; }
  const std::string& folder() const { return folder_; }
  const std::string& path(size_t i) const { return paths_[i]; }
  const Bytes& sample(size_t i) const { return samples_[i]; }
  size_t size() const { return samples_.size(); }

 private:
  void Keep(Result<std::unique_ptr<Catalog>> catalog) {
    ASSERT_TRUE(catalog.has_value()) << catalog.status().ToString();
    catalog_ = *std::move(catalog);
    ASSERT_EQ(catalog_->size(), samples_.size());
  }

  std::string folder_;
  std::vector<std::string> paths_;
  std::vector<Bytes> samples_;
  std::unique_ptr<Catalog> catalog_;
};

Result<std::unique_ptr<Source>> MakeThreads(const Catalog& catalog, size_t max_in_flight) {
  return MakePosixSource(catalog,
                         {.max_in_flight = max_in_flight, .io = PosixSourceOptions::Io::kThreads});
}

Result<std::unique_ptr<Source>> MakeUring(const Catalog& catalog, size_t max_in_flight) {
  return MakePosixSource(catalog,
                         {.max_in_flight = max_in_flight, .io = PosixSourceOptions::Io::kUring});
}

Result<std::unique_ptr<Source>> MakeDelayed(const Catalog& catalog, size_t max_in_flight) {
  Result<std::unique_ptr<Source>> inner = MakeThreads(catalog, max_in_flight);
  if (!inner) return inner;
  DelayOptions options;
  options.storage.open = kMilli / 2;
  options.storage.read = kMilli / 2;
  options.storage.jitter = 0.9;
  auto source = DelaySource::Make(*std::move(inner), options);
  if (!source) return source.error();
  return std::unique_ptr<Source>(*std::move(source));
}

Result<std::unique_ptr<Source>> MakeNull(const Catalog&, size_t max_in_flight) {
  return MakeNullSource(max_in_flight);
}

struct Kind {
  const char* name;
  Result<std::unique_ptr<Source>> (*make)(const Catalog&, size_t);
  bool needs_uring = false;
  bool stores = true;  // false: bytes are FillNullSample's
  bool groups = true;  // samples of a shard
  bool groups_anything = false;
};

class SourceTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!GetParam().needs_uring) return;
    const Status usable = ProbeUring();
    if (!usable.ok()) GTEST_SKIP() << "NOT TESTED: " << usable.ToString();
  }
  std::unique_ptr<Source> Make(size_t max_in_flight) {
    auto source = GetParam().make(data_.catalog(), max_in_flight);
    EXPECT_TRUE(source.has_value()) << source.status().ToString();
    return source ? *std::move(source) : nullptr;
  }
  Bytes Expected(SampleId sample) const {
    if (GetParam().stores) return data_.sample(sample);
    Bytes bytes(data_.catalog().length(sample));
    FillNullSample(sample, bytes);
    return bytes;
  }
  // Reads `count` random samples in random batches; with `groups`, runs of samples that mostly lie
  // one after the other, as the scheduler makes them.
  void ReadMany(Source& source, size_t count, uint64_t seed, bool groups = false) {
    SplitMix64 rng(seed);
    std::deque<Bytes> dests;
    std::vector<SampleId> samples;
    std::vector<bool> seen(count);
    std::vector<SourceRead> batch;
    std::vector<SourceDone> out(6);
    size_t submitted = 0;
    size_t finished = 0;
    uint32_t group = 0;
    grouped_ = 0;
    while (finished < count) {
      while (batch.size() < 1 + rng.Below(groups ? 40 : 12) && samples.size() < count) {
        const bool follows = groups && !samples.empty() && rng.Below(8) != 0;
        if (!follows) group = static_cast<uint32_t>(rng.Below(groups ? 3 : 1));
        const uint64_t sample =
            follows ? samples.back() + 1 + rng.Below(3) : rng.Below(data_.size());
        samples.push_back(static_cast<SampleId>(sample % data_.size()));
        dests.emplace_back(data_.catalog().length(samples.back()));
        batch.push_back({.tag = samples.size() - 1,
                         .sample = samples.back(),
                         .dest = dests.back(),
                         .group = group});
      }
      const size_t taken = source.Submit(batch);
      submitted += taken;
      ASSERT_LE(submitted - finished, source.capacity());
      batch.erase(batch.begin(), batch.begin() + static_cast<ptrdiff_t>(taken));
      if (submitted > finished) {
        ASSERT_TRUE(WaitReadable(source)) << "seed " << seed;
      }
      const size_t n = source.Reap(out);
      for (size_t i = 0; i < n; ++i, ++finished) {
        const uint64_t tag = out[i].tag;
        ASSERT_LT(tag, submitted);
        ASSERT_FALSE(seen[tag]) << "twice: " << tag;
        seen[tag] = true;
        ASSERT_TRUE(out[i].status.ok()) << out[i].status.ToString();
        const Bytes expected = Expected(samples[tag]);
        ASSERT_TRUE(dests[tag] == expected) << "seed " << seed << " sample " << samples[tag];
        ASSERT_EQ(out[i].crc, Crc32c(expected));
        ASSERT_GE(out[i].latency_ns, 0);
        ASSERT_GE(out[i].group_size, 1u);
        grouped_ += out[i].group_size > 1 ? 1 : 0;
      }
    }
    EXPECT_EQ(source.Reap(out), 0u);
  }

  DataSet data_;
  size_t grouped_ = 0;  // reads that shared an operation
};

TEST_P(SourceTest, FilesFromASeed) {
  const size_t sizes[] = {0, 1, 100, 4096, 65'537, 112'640, 3 << 20};
  data_.MakeFiles(sizes);
  auto source = Make(8);
  ReadMany(*source, 300, 1);
}

TEST_P(SourceTest, ShardsFromASeed) {
  data_.MakeTfRecords(5, 40);
  auto source = Make(16);
  ReadMany(*source, 1000, 2);
}

TEST_P(SourceTest, GroupsFromASeed) {
  data_.MakeTars(4, 60);
  auto source = Make(4);
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    ReadMany(*source, 500, seed, true);
    EXPECT_EQ(grouped_ > 0, GetParam().groups) << grouped_;
  }
}

TEST_P(SourceTest, GroupsOfRecordsFromASeed) {
  data_.MakeTfRecords(3, 50);
  auto source = Make(8);
  ReadMany(*source, 1000, 7, true);
}

TEST_P(SourceTest, FilesAreNoGroups) {
  const std::vector<size_t> sizes(20, 1000);
  data_.MakeFiles(sizes);
  auto source = Make(4);
  ReadMany(*source, 300, 3, true);
  if (!GetParam().groups_anything) {
    EXPECT_EQ(grouped_, 0u);
  }
}

TEST_P(SourceTest, SubmitTakesAPrefixAndReapNeverBlocks) {
  const std::vector<size_t> sizes(26, 10);
  data_.MakeFiles(sizes);
  auto source = Make(3);
  const size_t most = source->capacity();
  ASSERT_GE(most, 3u);
  ASSERT_LE(most, 24u);
  EXPECT_FALSE(source->Describe().empty());
  std::vector<SourceDone> out(8);
  EXPECT_EQ(source->Reap(out), 0u);
  std::vector<Bytes> dests(26, Bytes(10));
  std::vector<SourceRead> reads;
  for (SampleId i = 0; i < most + 2; ++i) {
    reads.push_back({.tag = i, .sample = i, .dest = dests[i]});
  }
  EXPECT_EQ(source->Submit(reads), most);
  EXPECT_EQ(source->Submit(std::span(reads).subspan(most)), 0u);
  EXPECT_EQ(Collect(*source, most).size(), most);
  EXPECT_EQ(source->Submit(std::span(reads).subspan(most)), 2u);
  EXPECT_EQ(Collect(*source, 2).size(), 2u);
}

TEST_P(SourceTest, DestructionWithReadsInFlight) {
  const std::vector<size_t> sizes(30, 200'000);
  data_.MakeFiles(sizes);
  auto source = Make(30);
  std::vector<Bytes> dests(30, Bytes(200'000));
  std::vector<SourceRead> reads;
  for (SampleId i = 0; i < 30; ++i) reads.push_back({.tag = i, .sample = i, .dest = dests[i]});
  EXPECT_EQ(source->Submit(reads), 30u);
  source.reset();
  dests.clear();
}

TEST_P(SourceTest, ForkedChildDestroysWithoutWaiting) {
  data_.MakeTfRecords(3, 4);
  auto source = Make(4);
  ReadMany(*source, 40, 3);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    source.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ReadMany(*source, 40, 4);
}

INSTANTIATE_TEST_SUITE_P(
    All, SourceTest,
    testing::Values(Kind{"posix_threads", &MakeThreads},
                    Kind{.name = "posix_uring", .make = &MakeUring, .needs_uring = true},
                    Kind{.name = "delayed", .make = &MakeDelayed, .groups_anything = true},
                    Kind{.name = "null", .make = &MakeNull, .stores = false, .groups = false}),
    [](const testing::TestParamInfo<Kind>& kind) { return std::string(kind.param.name); });

// What a user reads when the data set is not what the catalog says.

class PosixSourceTest : public testing::Test {
 protected:
  void Open(const PosixSourceOptions& options = {}) {
    auto source = MakePosixSource(data_.catalog(), options);
    ASSERT_TRUE(source.has_value()) << source.status().ToString();
    source_ = *std::move(source);
  }
  SourceDone Read(SampleId sample) {
    Bytes dest(data_.catalog().length(sample));
    return ReadOne(*source_, sample, dest);
  }
  void ExpectMessage(const Status& status, Code code, std::initializer_list<std::string> parts) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    for (const std::string& part : parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << "\"" << part << "\" not in: " << status.ToString();
    }
  }

  DataSet data_;
  std::unique_ptr<Source> source_;
};

// What a growing catalog was given after the source was made.
TEST_F(PosixSourceTest, FilesThatAreMetLater) {
  const std::string folder = testing::TempDir() + "forebay_met_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  const auto catalog = Catalog::Growing(folder);
  PosixSourceOptions options;
  options.max_in_flight = 4;
  auto source = MakePosixSource(*catalog, options);
  ASSERT_TRUE(source) << source.status().ToString();
  Bytes dest(1);
  ExpectMessage(ReadOne(**source, 0, dest).status, Code::kInvalidArgument, {"does not exist"});
  const Bytes whole = RandomBytes(5000, 1);
  const Bytes large = RandomBytes(10'000, 2);
  WriteFile(folder + "/whole", whole);
  WriteFile(folder + "/large", large);
  WriteFile(folder + "/empty", {});
  const auto set_time = [&](const std::string& name, int64_t nanos) {
    const timespec times[2] = {{.tv_sec = 0, .tv_nsec = 0}, {.tv_sec = 0, .tv_nsec = nanos}};
    ASSERT_EQ(utimensat(AT_FDCWD, (folder + name).c_str(), times, 0), 0);
  };
  for (const char* name : {"/whole", "/large", "/empty"}) set_time(name, 1);
  ASSERT_TRUE(catalog->Append({folder + "/whole", whole.size(), 1, 0}));
  ASSERT_TRUE(catalog->Append({folder + "/large", large.size(), 1, 4096}));
  ASSERT_TRUE(catalog->Append({folder + "/empty", 0, 1, 0}));
  for (int round = 0; round < 2; ++round) {
    for (SampleId s = 0; s < catalog->size(); ++s) {
      const Extent extent = catalog->extent(s);
      dest.assign(extent.length, std::byte{0});
      const SourceDone done = ReadOne(**source, s, dest);
      ASSERT_TRUE(done.status.ok()) << done.status.ToString();
      const Bytes& truth = s == 0 ? whole : large;
      EXPECT_TRUE(std::equal(dest.begin(), dest.end(),
                             truth.begin() + static_cast<ptrdiff_t>(extent.offset)));
    }
  }
  // A file of another time is another file, as a whole and by blocks.
  set_time("/whole", 2);
  set_time("/large", 2);
  dest.resize(whole.size());
  ExpectMessage(ReadOne(**source, 0, dest).status, Code::kChanged,
                {"modification time", "changed since it was opened"});
  dest.resize(4096);
  ExpectMessage(ReadOne(**source, 2, dest).status, Code::kChanged, {"modification time"});
  WriteFile(folder + "/whole", large);
  dest.resize(whole.size());
  ExpectMessage(ReadOne(**source, 0, dest).status, Code::kChanged, {"changed since it was opened"});
  std::filesystem::remove_all(folder);
}

TEST_F(PosixSourceTest, VanishedFile) {
  const size_t sizes[] = {10, 10};
  data_.MakeFiles(sizes);
  Open();
  unlink(data_.path(1).c_str());
  EXPECT_TRUE(Read(0).status.ok());
  ExpectMessage(Read(1).status, Code::kNotFound,
                {data_.path(1), "the data set changed since it was indexed",
                 "run `forebay index --rebuild " + data_.catalog().root() + "`"});
}

TEST_F(PosixSourceTest, ShrunkAndGrownFiles) {
  const size_t sizes[] = {1000, 1000};
  data_.MakeFiles(sizes);
  Open();
  WriteFile(data_.path(0), RandomBytes(600, 1));
  WriteFile(data_.path(1), RandomBytes(1001, 1));
  ExpectMessage(Read(0).status, Code::kChanged,
                {data_.path(0), "expected 1000 bytes at offset 0", "found 600"});
  ExpectMessage(Read(1).status, Code::kChanged,
                {data_.path(1), "expected 1000 bytes", "found more"});
}

TEST_F(PosixSourceTest, FolderInPlaceOfAFile) {
  const size_t sizes[] = {10};
  data_.MakeFiles(sizes);
  Open();
  unlink(data_.path(0).c_str());
  std::filesystem::create_directory(data_.path(0));
  ExpectMessage(Read(0).status, Code::kChanged, {data_.path(0), "folder"});
}

TEST_F(PosixSourceTest, FifoInPlaceOfAFile) {
  const size_t sizes[] = {10, 20};
  data_.MakeFiles(sizes);
  Open();
  unlink(data_.path(0).c_str());
  ASSERT_EQ(mkfifo(data_.path(0).c_str(), 0600), 0);
  ExpectMessage(Read(0).status, Code::kChanged,
                {data_.path(0), "no regular file", "forebay index --rebuild"});
  unlink(data_.path(0).c_str());
  std::filesystem::create_symlink("/dev/zero", data_.path(0));
  ExpectMessage(Read(0).status, Code::kChanged, {data_.path(0), "no regular file"});
  EXPECT_TRUE(Read(1).status.ok());
}

// Also where the shard's descriptor is opened for later reads, on a thread of its own.
TEST_F(PosixSourceTest, FifoInPlaceOfAShard) {
  data_.MakeTfRecords(1, 5);
  Open();
  unlink(data_.path(0).c_str());
  ASSERT_EQ(mkfifo(data_.path(0).c_str(), 0600), 0);
  for (int i = 0; i < 20; ++i) {
    ExpectMessage(Read(i % 5).status, Code::kChanged, {data_.path(0), "no regular file"});
    usleep(1000);
  }
}

TEST_F(PosixSourceTest, DamagedRecord) {
  data_.MakeTfRecords(1, 5);
  Open();
  EXPECT_TRUE(Read(2).status.ok());
  const uint64_t offset = data_.catalog().extent(2).offset;
  const KeptTime kept(data_.path(0));  // a disk that forgets a bit changes no time
  const OwnedFd fd(open(data_.path(0).c_str(), O_RDWR));
  const std::byte damaged = data_.sample(2)[10] ^ std::byte{4};
  ASSERT_EQ(pwrite(fd.get(), &damaged, 1, static_cast<off_t>(offset) + 10), 1);
  kept.PutBack();
  ExpectMessage(Read(2).status, Code::kDataLoss,
                {data_.path(0), "offset " + std::to_string(offset), "CRC-32C"});
  EXPECT_TRUE(Read(3).status.ok());
}

TEST_F(PosixSourceTest, TruncatedShard) {
  data_.MakeTfRecords(1, 5);
  Open();
  const Extent last = data_.catalog().extent(4);
  ASSERT_EQ(truncate(data_.path(0).c_str(), static_cast<off_t>(last.offset) + 9), 0);
  ExpectMessage(Read(4).status, Code::kChanged,
                {data_.path(0), "at offset " + std::to_string(last.offset), "found 9"});
}

TEST_F(PosixSourceTest, RefusesWrongReads) {
  const size_t sizes[] = {10};
  data_.MakeFiles(sizes);
  Open();
  Bytes dest(9);
  ExpectMessage(ReadOne(*source_, 0, dest).status, Code::kInvalidArgument,
                {"has 10 bytes", "destination has 9"});
  ExpectMessage(ReadOne(*source_, 1, dest).status, Code::kInvalidArgument, {"does not exist"});
  EXPECT_TRUE(Read(0).status.ok());
}

TEST_F(PosixSourceTest, MoreShardsThanDescriptors) {
  data_.MakeTfRecords(12, 3);
  Open({.max_in_flight = 4, .max_open_shards = 2});
  for (int round = 0; round < 5; ++round) {
    for (SampleId sample = 0; sample < data_.size(); ++sample) {
      Bytes dest(data_.catalog().length(sample));
      const SourceDone done = ReadOne(*source_, sample, dest);
      ASSERT_TRUE(done.status.ok()) << done.status.ToString();
      ASSERT_TRUE(dest == data_.sample(sample));
    }
  }
}

TEST_F(PosixSourceTest, WaitsForDescriptors) {
  const size_t sizes[] = {10};
  data_.MakeFiles(sizes);
  Open();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const SourceDone failed = Read(0);
  Bytes dest(10);
  const SourceRead read{.tag = 1, .sample = 0, .dest = dest};
  EXPECT_EQ(source_->Submit(std::span(&read, 1)), 1u);
  // The first attempt has failed once the loop is readable; the second finds descriptors.
  EXPECT_TRUE(WaitReadable(*source_));
  SourceDone done;
  EXPECT_EQ(source_->Reap(std::span(&done, 1)), 0u);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(failed.status.code(), Code::kResourceExhausted) << failed.status.ToString();
  EXPECT_EQ(failed.retries, 3u);
  const auto all = Collect(*source_, 1);
  EXPECT_TRUE(all.at(1).status.ok());
  EXPECT_GE(all.at(1).retries, 1u);
}

// Fails the first `failures` ops that `picks` chooses.
class FlakyLoop final : public Loop {
 public:
  FlakyLoop(std::unique_ptr<Loop> inner, int error, size_t failures,
            std::function<bool(const ReadOp&)> picks)
      : inner_(std::move(inner)), error_(error), failures_(failures), picks_(std::move(picks)) {}

  size_t Submit(std::span<const ReadOp> ops) override {
    const size_t taken = inner_->Submit(ops);
    for (const ReadOp& op : ops.first(taken)) {
      if (failures_ == 0 || !picks_(op)) continue;
      --failures_;
      failing_.insert({op.tag, true});
    }
    return taken;
  }
  size_t Reap(std::span<Completion> out) override {
    const size_t taken = inner_->Reap(out);
    for (Completion& done : out.first(taken)) {
      if (failing_.erase(done.tag) > 0) done.error = error_;
    }
    return taken;
  }
  int event_fd() const override { return inner_->event_fd(); }
  size_t capacity() const override { return inner_->capacity(); }
  const char* name() const override { return "flaky"; }

 private:
  std::unique_ptr<Loop> inner_;
  const int error_;
  size_t failures_;
  std::function<bool(const ReadOp&)> picks_;
  std::map<uint64_t, bool> failing_;
};

std::unique_ptr<Source> MakeFlaky(const Catalog& catalog, int error, size_t failures,
                                  std::function<bool(const ReadOp&)> picks) {
  auto loop = MakeThreadLoop({.max_in_flight = 8});
  auto source = MakePosixSourceOn(
      catalog, {},
      std::make_unique<FlakyLoop>(*std::move(loop), error, failures, std::move(picks)));
  EXPECT_TRUE(source.has_value());
  return *std::move(source);
}

TEST_F(PosixSourceTest, ErrorsThatPassAreRetried) {
  const size_t sizes[] = {1000};
  data_.MakeFiles(sizes);
  for (const int error : {EIO, EAGAIN, ESTALE, ETIMEDOUT}) {
    source_ = MakeFlaky(data_.catalog(), error, 2, [](const ReadOp&) { return true; });
    const SourceDone done = Read(0);
    EXPECT_TRUE(done.status.ok()) << done.status.ToString();
    EXPECT_EQ(done.retries, 2u);
  }
}

TEST_F(PosixSourceTest, ErrorsThatStayAreReported) {
  const size_t sizes[] = {1000};
  data_.MakeFiles(sizes);
  source_ = MakeFlaky(data_.catalog(), EIO, 4, [](const ReadOp&) { return true; });
  const SourceDone done = Read(0);
  ExpectMessage(done.status, Code::kUnavailable,
                {data_.path(0), "1000 bytes at offset 0", "Input/output error", "4 attempts"});
  EXPECT_EQ(done.retries, 3u);
  EXPECT_TRUE(Read(0).status.ok());
}

TEST_F(PosixSourceTest, ARetryDelaysNoOtherRead) {
  const size_t sizes[] = {1000, 500};
  data_.MakeFiles(sizes);
  source_ =
      MakeFlaky(data_.catalog(), EIO, 3, [](const ReadOp& op) { return op.dest.size() == 1000; });
  Bytes slow(1000);
  const SourceRead read{.tag = 99, .sample = 0, .dest = slow};
  ASSERT_EQ(source_->Submit(std::span(&read, 1)), 1u);
  // These all pass while the first waits: its pauses add up to 310 ms.
  size_t before = 0;
  bool slow_done = false;
  while (!slow_done) {
    Bytes dest(500);
    const SourceRead quick{.tag = 1, .sample = 1, .dest = dest};
    ASSERT_EQ(source_->Submit(std::span(&quick, 1)), 1u);
    for (bool quick_done = false; !quick_done;) {
      ASSERT_TRUE(WaitReadable(*source_));
      SourceDone done;
      if (source_->Reap(std::span(&done, 1)) == 0) continue;
      EXPECT_TRUE(done.status.ok());
      quick_done = done.tag == 1;
      if (!quick_done) {
        slow_done = true;
        EXPECT_EQ(done.retries, 3u);
      }
    }
    ++before;
  }
  EXPECT_GT(before, 3u);
  EXPECT_TRUE(slow == data_.sample(0));
}

TEST_F(PosixSourceTest, AStaleShardDescriptorIsReplaced) {
  data_.MakeTfRecords(1, 3);
  size_t by_descriptor = 0;
  source_ = MakeFlaky(data_.catalog(), ESTALE, 1, [&](const ReadOp& op) {
    by_descriptor += op.fd >= 0 ? 1 : 0;
    return op.fd >= 0;
  });
  // Reads go by path until the opener has delivered.
  for (int i = 0; i < 100'000 && by_descriptor == 0; ++i) {
    ASSERT_TRUE(Read(1).status.ok());
  }
  EXPECT_EQ(by_descriptor, 1u);
  EXPECT_TRUE(Read(1).status.ok());
}

std::map<uint64_t, SourceDone> ReadGroup(Source& source, const Catalog& catalog,
                                         std::span<const SampleId> samples, uint32_t group,
                                         std::map<SampleId, Bytes>* bytes = nullptr);

// How a program may make a shard another one.
enum class Rewrite { kInPlace, kShorter, kLonger, kRenamed, kRenamedShorter };

void RewriteShard(const std::string& path, Rewrite how) {
  const auto size = static_cast<size_t>(std::filesystem::file_size(path));
  if (how == Rewrite::kInPlace) {
    const OwnedFd fd(open(path.c_str(), O_WRONLY));
    const Bytes other = RandomBytes(size, 99);
    ASSERT_EQ(pwrite(fd.get(), other.data(), size, 0), static_cast<ssize_t>(size));
    SetNewer(path);
  } else if (how == Rewrite::kShorter) {
    ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(size - 512)), 0);
  } else if (how == Rewrite::kLonger) {
    const OwnedFd fd(open(path.c_str(), O_WRONLY | O_APPEND));
    ASSERT_EQ(write(fd.get(), "more", 4), 4);
  } else {
    const std::string beside = path + ".new";
    WriteFile(beside, RandomBytes(how == Rewrite::kRenamed ? size : size - 512, 99));
    SetNewer(beside);
    ASSERT_EQ(rename(beside.c_str(), path.c_str()), 0);
  }
}

struct Rewritten {
  PosixSourceOptions::Io io = PosixSourceOptions::Io::kThreads;
  Rewrite how = Rewrite::kInPlace;
  size_t max_open = 256;
};

// Below a job that reads it: the right bytes, or an error that names the shard and the remedy.
class RewrittenShard : public PosixSourceTest, public testing::WithParamInterface<Rewritten> {
 protected:
  void SetUp() override {
    if (GetParam().io != PosixSourceOptions::Io::kUring) return;
    const Status usable = ProbeUring();
    if (!usable.ok()) GTEST_SKIP() << "NOT TESTED: " << usable.ToString();
  }
};

TEST_P(RewrittenShard, IsNeverReadByItsOldIndex) {
  constexpr size_t kShards = 8;
  constexpr size_t kEach = 12;
  data_.MakeTars(kShards, kEach);
  Open({.io = GetParam().io, .max_open_shards = GetParam().max_open});
  const auto round = [&](size_t* changed) {
    SplitMix64 rng(3);
    for (size_t shard = 0; shard < kShards; ++shard) {
      std::vector<SampleId> samples;
      for (size_t i = 0; i < kEach; ++i) {
        samples.push_back(static_cast<SampleId>(shard * kEach + i));
      }
      std::map<SampleId, Bytes> bytes;
      const auto all = ReadGroup(*source_, data_.catalog(), samples,
                                 static_cast<uint32_t>(rng.Below(2)), &bytes);
      for (const SampleId sample : samples) {
        const Status& status = all.at(sample).status;
        if (status.ok()) {
          ASSERT_TRUE(bytes[sample] == data_.sample(sample)) << "another sample's bytes";
          continue;
        }
        ++*changed;
        ExpectMessage(status, Code::kChanged,
                      {data_.path(shard), "forebay index --rebuild " + data_.catalog().root()});
      }
    }
  };
  size_t changed = 0;
  for (int i = 0; i < 3; ++i) round(&changed);  // until descriptors are held
  ASSERT_EQ(changed, 0u);
  for (size_t shard = 0; shard < kShards; shard += 2) {
    RewriteShard(data_.path(shard), GetParam().how);
  }
  // One that was replaced may be read by its old descriptor until its path is looked at again.
  const Nanos end = SteadyClock().Now() + 60 * kSecond;
  while (changed < kShards / 2 * kEach && SteadyClock().Now() < end) {
    changed = 0;
    round(&changed);
    if (GetParam().how < Rewrite::kRenamed) break;
  }
  EXPECT_EQ(changed, kShards / 2 * kEach);
}

std::string RewrittenName(const testing::TestParamInfo<Rewritten>& test) {
  const std::array names = {"InPlace", "Shorter", "Longer", "Renamed", "RenamedShorter"};
  return StrCat(test.param.io == PosixSourceOptions::Io::kUring ? "uring" : "threads",
                names[static_cast<size_t>(test.param.how)], test.param.max_open);
}

INSTANTIATE_TEST_SUITE_P(
    All, RewrittenShard,
    testing::Values(
        Rewritten{.how = Rewrite::kInPlace}, Rewritten{.how = Rewrite::kShorter},
        Rewritten{.how = Rewrite::kLonger}, Rewritten{.how = Rewrite::kRenamed},
        Rewritten{.how = Rewrite::kRenamedShorter},
        Rewritten{.how = Rewrite::kInPlace, .max_open = 2},
        Rewritten{.how = Rewrite::kRenamed, .max_open = 2},
        Rewritten{.io = PosixSourceOptions::Io::kUring, .how = Rewrite::kInPlace},
        Rewritten{.io = PosixSourceOptions::Io::kUring, .how = Rewrite::kRenamed},
        Rewritten{.io = PosixSourceOptions::Io::kUring, .how = Rewrite::kInPlace, .max_open = 2}),
    &RewrittenName);

// A server whose file was replaced says ESTALE of the old descriptor: the path leads to the new
// file, which is another version.
TEST_F(PosixSourceTest, AStaleDescriptorOfAReplacedShard) {
  data_.MakeTars(1, 6);
  size_t by_descriptor = 0;
  source_ = MakeFlaky(data_.catalog(), ESTALE, 1'000'000, [&](const ReadOp& op) {
    by_descriptor += op.fd >= 0 ? 1 : 0;
    if (op.fd < 0 || by_descriptor > 1) return op.fd >= 0;
    RewriteShard(data_.path(0), Rewrite::kRenamed);
    return true;
  });
  Status status;
  for (int i = 0; i < 100'000 && status.ok(); ++i) {
    Bytes dest(data_.catalog().length(1));
    status = ReadOne(*source_, 1, dest).status;
    if (status.ok()) {
      ASSERT_TRUE(dest == data_.sample(1));
    }
  }
  EXPECT_GE(by_descriptor, 1u);
  ExpectMessage(status, Code::kChanged, {data_.path(0), "forebay index --rebuild"});
}

// Reads samples with one group number and returns what came back, by sample.
std::map<uint64_t, SourceDone> ReadGroup(Source& source, const Catalog& catalog,
                                         std::span<const SampleId> samples, uint32_t group,
                                         std::map<SampleId, Bytes>* bytes) {
  std::map<SampleId, Bytes> dests;
  std::vector<SourceRead> reads;
  for (const SampleId sample : samples) {
    Bytes& dest = dests[sample] = Bytes(catalog.length(sample));
    reads.push_back({.tag = sample, .sample = sample, .dest = dest, .group = group});
  }
  EXPECT_EQ(source.Submit(reads), reads.size());
  auto all = Collect(source, reads.size());
  if (bytes != nullptr) *bytes = std::move(dests);
  return all;
}

TEST_F(PosixSourceTest, AGroupIsOneOperation) {
  data_.MakeTars(2, 40);
  size_t ops = 0;
  source_ = MakeFlaky(data_.catalog(), EIO, 1, [&](const ReadOp&) {
    ++ops;
    return false;
  });
  const std::vector<SampleId> samples = {3, 4, 6, 10, 11, 12, 20, 39};
  std::map<SampleId, Bytes> bytes;
  const auto all = ReadGroup(*source_, data_.catalog(), samples, 5, &bytes);
  EXPECT_EQ(ops, 1u);
  for (const SampleId sample : samples) {
    const SourceDone& done = all.at(sample);
    EXPECT_TRUE(done.status.ok()) << done.status.ToString();
    EXPECT_EQ(done.group_size, samples.size());
    EXPECT_EQ(done.latency_ns, all.at(3).latency_ns);
    EXPECT_EQ(done.crc, Crc32c(data_.sample(sample)));
    EXPECT_TRUE(bytes[sample] == data_.sample(sample));
  }
  uint64_t read = 0;
  for (const SampleId s : samples) read += bytes[s].size() + all.at(s).gap_bytes;
  const Extent begin = data_.catalog().extent(3);
  const Extent end = data_.catalog().extent(39);
  EXPECT_EQ(read, end.offset + end.length - begin.offset);
  // Backwards, into another object, and back: four operations of 1, 2, 1 and 2 samples.
  ops = 0;
  const std::vector<SampleId> astray = {9, 7, 8, 45, 1, 2};
  const auto others = ReadGroup(*source_, data_.catalog(), astray, 5);
  EXPECT_EQ(ops, 4u);
  const std::map<SampleId, uint32_t> sizes = {{9, 1}, {7, 2}, {8, 2}, {45, 1}, {1, 2}, {2, 2}};
  for (const auto& [sample, size] : sizes) {
    EXPECT_TRUE(others.at(sample).status.ok());
    EXPECT_EQ(others.at(sample).group_size, size) << sample;
  }
  // No number, no group.
  ops = 0;
  for (const auto& [tag, done] : ReadGroup(*source_, data_.catalog(), samples, 0)) {
    EXPECT_EQ(done.group_size, 1u);
  }
  EXPECT_EQ(ops, samples.size());
}

TEST_F(PosixSourceTest, AGroupIsCutByThePrefixRule) {
  data_.MakeTars(1, 40);
  Open({.max_in_flight = 2});
  ASSERT_EQ(source_->capacity(), 16u);
  std::vector<Bytes> dests;
  std::vector<SourceRead> reads;
  for (SampleId i = 0; i < 20; ++i) dests.emplace_back(data_.catalog().length(i));
  for (SampleId i = 0; i < 20; ++i) {
    reads.push_back({.tag = i, .sample = i, .dest = dests[i], .group = 1});
  }
  ASSERT_EQ(source_->Submit(reads), 16u);
  ASSERT_EQ(source_->Submit(std::span(reads).subspan(16)), 0u);
  // One at a time: it stays readable while samples of the operation wait.
  for (size_t i = 0; i < 16; ++i) {
    SourceDone done;
    size_t n = 0;
    while (n == 0) {
      ASSERT_TRUE(WaitReadable(*source_));
      n = source_->Reap(std::span(&done, 1));
    }
    EXPECT_EQ(done.group_size, 16u);
  }
  ASSERT_EQ(source_->Submit(std::span(reads).subspan(16)), 4u);
  for (const auto& [tag, done] : Collect(*source_, 4)) EXPECT_EQ(done.group_size, 4u);
  for (SampleId i = 0; i < 20; ++i) EXPECT_TRUE(dests[i] == data_.sample(i));
}

TEST_F(PosixSourceTest, AWrongReadLeavesItsGroupAlone) {
  data_.MakeTars(1, 10);
  Open();
  std::vector<Bytes> dests;
  std::vector<SourceRead> reads;
  for (SampleId i = 0; i < 5; ++i) dests.emplace_back(data_.catalog().length(i));
  for (SampleId i = 0; i < 5; ++i) {
    reads.push_back({.tag = i, .sample = i, .dest = dests[i], .group = 1});
  }
  reads[2].sample = 99;
  ASSERT_EQ(source_->Submit(reads), 5u);
  const auto all = Collect(*source_, 5);
  ExpectMessage(all.at(2).status, Code::kInvalidArgument, {"sample 99 does not exist"});
  for (const uint64_t tag : {0, 1, 3, 4}) {
    EXPECT_TRUE(all.at(tag).status.ok());
    EXPECT_EQ(all.at(tag).group_size, 2u);
    EXPECT_TRUE(dests[tag] == data_.sample(tag));
  }
}

TEST_F(PosixSourceTest, AGroupThatFailsIsReadOneByOne) {
  data_.MakeTars(1, 10);
  const std::vector<SampleId> samples = {1, 2, 5};
  for (const int error : {EIO, ENOENT}) {
    source_ =
        MakeFlaky(data_.catalog(), error, 1, [](const ReadOp& op) { return !op.parts.empty(); });
    std::map<SampleId, Bytes> bytes;
    const auto all = ReadGroup(*source_, data_.catalog(), samples, 5, &bytes);
    for (const SampleId sample : samples) {
      EXPECT_TRUE(all.at(sample).status.ok());
      EXPECT_EQ(all.at(sample).group_size, 1u);
      EXPECT_EQ(all.at(sample).retries, 0u);
      EXPECT_TRUE(bytes[sample] == data_.sample(sample));
    }
  }
  // What stays is reported for the sample that it belongs to.
  const uint64_t bad = data_.catalog().extent(2).offset;
  source_ = MakeFlaky(data_.catalog(), EIO, 5,
                      [&](const ReadOp& op) { return !op.parts.empty() || op.offset == bad; });
  const auto all = ReadGroup(*source_, data_.catalog(), samples, 5);
  EXPECT_TRUE(all.at(1).status.ok());
  EXPECT_TRUE(all.at(5).status.ok());
  ExpectMessage(all.at(2).status, Code::kUnavailable,
                {data_.path(0), "at offset " + std::to_string(bad), "4 attempts"});
  EXPECT_EQ(all.at(2).retries, 3u);
}

// Whatever happened to the shards, a group ends as its samples read one by one do.
TEST_F(PosixSourceTest, DamagedShardsInGroupsAsAlone) {
  data_.MakeTfRecords(4, 30);
  const KeptTime kept(data_.path(0));
  const OwnedFd fd(open(data_.path(0).c_str(), O_RDWR));
  for (const SampleId damaged : {4, 5, 17}) {
    const std::byte wrong = data_.sample(damaged)[3] ^ std::byte{1};
    const auto at = static_cast<off_t>(data_.catalog().extent(damaged).offset) + 3;
    ASSERT_EQ(pwrite(fd.get(), &wrong, 1, at), 1);
  }
  kept.PutBack();
  const auto cut = static_cast<off_t>(data_.catalog().extent(50).offset);
  ASSERT_EQ(truncate(data_.path(1).c_str(), cut + 7), 0);
  unlink(data_.path(2).c_str());
  unlink(data_.path(3).c_str());
  std::filesystem::create_directory(data_.path(3));
  Open();
  std::map<uint64_t, SourceDone> alone;
  for (SampleId sample = 0; sample < data_.size(); ++sample) {
    Bytes dest(data_.catalog().length(sample));
    alone[sample] = ReadOne(*source_, sample, dest);
  }
  SplitMix64 rng(11);
  size_t failed = 0;
  for (int round = 0; round < 100; ++round) {
    std::vector<SampleId> samples;
    for (auto at = static_cast<SampleId>(rng.Below(data_.size())); at < data_.size();
         at += static_cast<SampleId>(1 + rng.Below(4))) {
      samples.push_back(at);
      if (rng.Below(20) == 0) break;
    }
    std::map<SampleId, Bytes> bytes;
    const auto all = ReadGroup(*source_, data_.catalog(), samples, 1, &bytes);
    for (const SampleId sample : samples) {
      const SourceDone& done = all.at(sample);
      ASSERT_EQ(done.status.ToString(), alone[sample].status.ToString());
      ASSERT_EQ(done.retries, alone[sample].retries);
      failed += done.status.ok() ? 0 : 1;
      if (!done.status.ok()) continue;
      ASSERT_EQ(done.crc, Crc32c(data_.sample(sample)));
      ASSERT_TRUE(bytes[sample] == data_.sample(sample));
    }
  }
  EXPECT_GT(failed, 100u);
}

FileVersion VersionAt(const std::string& path) {
  struct stat st = {};
  EXPECT_EQ(stat(path.c_str(), &st), 0);
  return {.bytes = static_cast<uint64_t>(st.st_size),
          .modified_ns = st.st_mtim.tv_sec * kSecond + st.st_mtim.tv_nsec};
}

TEST(ShardFds, GivesTheVersionThatIsAskedForAndLooksAgain) {
  DataSet data;
  const std::string path = data.folder() + "/shard";
  WriteFile(path, RandomBytes(100, 1));
  const FileVersion version = VersionAt(path);
  ShardFds shards(2, 0);  // looks at each Acquire
  const auto acquire = [&](const FileVersion& wanted) {
    const int fd = shards.Acquire(0, path, wanted);
    if (fd >= 0) shards.Release(0);
    return fd >= 0;
  };
  bool given = false;
  for (int i = 0; i < 6000 && !given; ++i, usleep(1000)) given = acquire(version);
  EXPECT_TRUE(given);
  RewriteShard(path, Rewrite::kRenamed);
  for (int i = 0; i < 6000 && given; ++i, usleep(1000)) given = acquire(version);
  EXPECT_FALSE(given) << "the path leads to another file";
  for (int i = 0; i < 20; ++i, usleep(1000)) EXPECT_FALSE(acquire(version));
  const FileVersion now = VersionAt(path);
  for (int i = 0; i < 6000 && !given; ++i, usleep(1000)) given = acquire(now);
  EXPECT_TRUE(given);
}

TEST(ShardFds, KeepsWhatIsUsedAndEvictsTheRest) {
  DataSet data;
  std::vector<std::string> paths;
  std::vector<FileVersion> versions;
  for (int i = 0; i < 4; ++i) {
    paths.push_back(data.folder() + "/" + std::to_string(i));
    WriteFile(paths.back(), {});
    versions.push_back(VersionAt(paths.back()));
  }
  ShardFds shards(2);
  const auto acquire = [&](ObjectId object) {
    int fd = -1;
    for (int i = 0; i < 6000 && fd < 0; ++i) {
      fd = shards.Acquire(object, paths[object], versions[object]);
      if (fd < 0) usleep(1000);
    }
    EXPECT_GE(fd, 0);
    return fd;
  };
  const int held = acquire(0);
  acquire(1);
  shards.Release(1);
  acquire(2);  // in place of 1, the only one that nobody uses
  EXPECT_EQ(shards.open_count(), 2u);
  EXPECT_EQ(shards.Acquire(0, paths[0], versions[0]), held);
  shards.Release(0);
  // Both are in use: a third has no place.
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(shards.Acquire(3, paths[3], versions[3]), -1);
    usleep(1000);
  }
  shards.Shrink();
  EXPECT_EQ(shards.open_count(), 2u);
  shards.Forget(0);
  EXPECT_EQ(shards.Acquire(0, paths[0], versions[0]), -1);
  EXPECT_GE(fcntl(held, F_GETFD), 0) << "still used";
  shards.Release(0);
  shards.Release(2);
  shards.Shrink();
  EXPECT_LE(shards.open_count(), 1u);
}

TEST(DelaySource, StallsUntilApplied) {
  auto source = DelaySource::Make(*MakeNullSource(4), [] {
    DelayOptions options;
    options.storage.stall = StorageSettings::kForever;
    return options;
  }());
  ASSERT_TRUE(source.has_value()) << source.status().ToString();
  Bytes dest(100);
  const SourceRead read{.tag = 1, .sample = 5, .dest = dest};
  ASSERT_EQ((*source)->Submit(std::span(&read, 1)), 1u);
  SourceDone done;
  EXPECT_EQ((*source)->Reap(std::span(&done, 1)), 0u);
  pollfd waiting{(*source)->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
  ASSERT_TRUE((*source)->Apply({}).ok());
  EXPECT_TRUE(Collect(**source, 1).at(1).status.ok());
}

TEST(DelaySource, NoSoonerThanTheModel) {
  DelayOptions options;
  options.storage.open = 3 * kMilli;
  options.storage.read = 4 * kMilli;
  auto source = DelaySource::Make(*MakeNullSource(4), options);
  ASSERT_TRUE(source.has_value());
  Bytes dest(100);
  const Nanos start = SteadyClock().Now();
  const SourceDone done = ReadOne(**source, 3, dest);
  EXPECT_TRUE(done.status.ok());
  EXPECT_GE(done.latency_ns, 7 * kMilli);
  EXPECT_GE(SteadyClock().Now() - start, 7 * kMilli);
}

TEST(DelaySource, AGroupIsOneOperation) {
  DelayOptions options;
  options.open_each = false;
  options.storage.ops_per_s = 200;
  options.storage.read = kMilli;
  auto source = DelaySource::Make(*MakeNullSource(16), options);
  ASSERT_TRUE(source.has_value());
  std::vector<Bytes> dests(12, Bytes(100));
  std::vector<SourceRead> reads;
  for (SampleId i = 0; i < 12; ++i) {
    reads.push_back({.tag = i, .sample = i, .dest = dests[i], .group = 1 + i / 4});
  }
  ASSERT_EQ((*source)->Submit(reads), 12u);
  const auto all = Collect(**source, 12);
  for (uint64_t i = 0; i < 12; ++i) {
    EXPECT_TRUE(all.at(i).status.ok());
    EXPECT_EQ(all.at(i).group_size, 4u);
    EXPECT_EQ(all.at(i).latency_ns, all.at(i / 4 * 4).latency_ns);
  }
  // The third operation may begin 10 ms after the first.
  EXPECT_GE(all.at(8).latency_ns, 11 * kMilli);
}

TEST(DelaySource, ErrorsOfTheModel) {
  DelayOptions options;
  options.storage.eio_rate = 1;
  auto source = DelaySource::Make(*MakeNullSource(4), options);
  ASSERT_TRUE(source.has_value());
  Bytes dest(100);
  const SourceDone done = ReadOne(**source, 3, dest);
  EXPECT_EQ(done.status.code(), Code::kUnavailable) << done.status.ToString();
}

struct Tally {
  size_t ok = 0, unavailable = 0, changed = 0, flipped = 0;
  bool operator==(const Tally&) const = default;
};

Tally ReadWithFaults(const FaultOptions& options, FaultCounts& counts) {
  auto source = FaultSource::Make(*MakeNullSource(8), options);
  EXPECT_TRUE(source.has_value());
  Tally tally;
  for (SampleId sample = 0; sample < 1000; ++sample) {
    Bytes dest(64);
    const SourceDone done = ReadOne(**source, sample, dest);
    if (done.status.code() == Code::kUnavailable) ++tally.unavailable;
    if (done.status.code() == Code::kChanged) ++tally.changed;
    if (!done.status.ok()) continue;
    Bytes truth(64);
    FillNullSample(sample, truth);
    EXPECT_EQ(done.crc, Crc32c(truth));
    if (dest == truth) {
      ++tally.ok;
    } else {
      ++tally.flipped;
      EXPECT_NE(Crc32c(dest), done.crc);
    }
  }
  counts = (*source)->counts();
  return tally;
}

TEST(FaultSource, EachKindIsCountedAndRepeatable) {
  const FaultOptions options{.seed = 5, .error = 0.1, .short_read = 0.05, .flip = 0.2};
  FaultCounts counts;
  const Tally tally = ReadWithFaults(options, counts);
  EXPECT_EQ(tally.unavailable, counts.error);
  EXPECT_EQ(tally.changed, counts.short_read);
  EXPECT_EQ(tally.flipped, counts.flip);
  EXPECT_EQ(tally.ok + counts.error + counts.short_read + counts.flip, 1000u);
  EXPECT_GT(counts.error, 50u);
  EXPECT_GT(counts.short_read, 20u);
  EXPECT_GT(counts.flip, 120u);
  FaultCounts again;
  EXPECT_EQ(ReadWithFaults(options, again), tally);
}

TEST(FaultSource, HangsUntilReleased) {
  auto source = FaultSource::Make(*MakeNullSource(2), {.hang = 1});
  ASSERT_TRUE(source.has_value());
  Bytes dest(10);
  const std::vector<SourceRead> reads(3, {.tag = 1, .sample = 1, .dest = dest});
  ASSERT_EQ((*source)->Submit(std::span(reads).first(1)), 1u);
  SourceDone done;
  EXPECT_EQ((*source)->Reap(std::span(&done, 1)), 0u);
  EXPECT_EQ((*source)->Reap(std::span(&done, 1)), 0u);
  EXPECT_EQ((*source)->counts().hang, 1u);
  pollfd waiting{(*source)->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
  // A read that hangs keeps its place.
  EXPECT_EQ((*source)->Submit(std::span(reads).subspan(1)), 1u);
  EXPECT_EQ((*source)->Reap(std::span(&done, 1)), 0u);
  (*source)->Release();
  EXPECT_EQ(poll(&waiting, 1, 0), 1);
  std::vector<SourceDone> out(4);
  EXPECT_EQ((*source)->Reap(out), 2u);
  EXPECT_TRUE(out[0].status.ok());
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
}

TEST(FaultSource, RefusesBadOptions) {
  EXPECT_FALSE(FaultSource::Make(*MakeNullSource(1), {.error = -0.1}).has_value());
  EXPECT_FALSE(FaultSource::Make(*MakeNullSource(1), {.error = 0.6, .flip = 0.6}).has_value());
}

}  // namespace
}  // namespace forebay
