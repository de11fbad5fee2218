// Growing data sets among nodes: each numbers its files in the order in which they were opened
// there, and all of them know a file by its name.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <numeric>
#include <thread>

#include "catalog/paths.h"
#include "peer/peer_testing.h"
#include "source/delay_source.h"

namespace forebay::peer {
namespace {

class GrowingCluster : public testing::PeerCluster {
 protected:
  // Nothing goes wrong unless a test says so; a busy machine must not make it seem so.
  GrowingCluster() {
    options_.request_wait = 20 * kSecond;
    options_.join_wait = 20 * kSecond;
    options_.lease = 20 * kSecond;
  }

  // As MakeFiles, without a catalog; returns the paths below the folder.
  std::vector<std::string> WriteFiles(const std::string& folder, uint32_t first, uint32_t count,
                                      uint32_t low, uint32_t high) {
    SplitMix64 rng(first + high);
    std::vector<std::string> paths;
    for (uint32_t i = first; i < first + count; ++i) {
      std::vector<std::byte> bytes(low + rng.Below(high - low + 1));
      FillNullSample(i, bytes);
      paths.push_back(StrCat("class", i % 7, "/", i, ".bin"));
      const std::string path = StrCat(folder, "/", paths.back());
      std::filesystem::create_directories(DirName(path));
      std::ofstream(path, std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    return paths;
  }

  void Grow(uint32_t node, const std::string& root, const std::string& name = "") {
    One& one = nodes_[node];
    auto dataset = one.engine->AddGrowing(Catalog::Growing(root, name));
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    one.dataset = *dataset;
    StreamOptions options;
    options.shape.dataset = *dataset;
    options.shape.itemised = true;
    options.declared = true;
    auto stream = one.engine->OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    one.stream = *stream;
  }

  void StartGrowing(uint32_t nodes, uint64_t memory) {
    Prepare(nodes);
    for (uint32_t node = 0; node < nodes; ++node) Begin(node, memory);
    for (uint32_t node = 0; node < nodes; ++node) Grow(node, root_ + "/data");
  }

  // As a program that opens the file: its attributes are looked up here, then it is read.
  Appended OpenFile(uint32_t node, const std::string& path, uint32_t block = 0) {
    struct stat st = {};
    EXPECT_EQ(stat(path.c_str(), &st), 0) << path;
    const NewFile file{.path = path,
                       .size = static_cast<uint64_t>(st.st_size),
                       .mtime_ns = MtimeNs(st),
                       .block = block};
    std::vector<Appended> added;
    const Status status =
        nodes_[node].engine->AppendSamples(nodes_[node].dataset, {&file, 1}, &added);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return added.empty() ? Appended{} : added.front();
  }

  static std::vector<std::byte> Fetch(One& one, SampleId sample) {
    LeaseId lease = kNoLease;
    BatchLoan loan;
    const Result<TakeKind> taken =
        one.engine->Fetch(one.stream, sample, 30 * kSecond, &lease, &loan);
    EXPECT_TRUE(taken) << taken.status().ToString();
    if (!taken || *taken != TakeKind::kBatch) {
      ADD_FAILURE() << one.engine->WaitingFor(one.stream);
      return {};
    }
    const std::byte* at = one.engine->base() + loan.offsets[0];
    std::vector<std::byte> bytes(at, at + loan.lengths[0]);
    EXPECT_TRUE(one.engine->Release(loan.lease).ok());
    return bytes;
  }

  std::vector<std::byte> ReadFile(uint32_t node, const std::string& path) {
    return Fetch(nodes_[node], OpenFile(node, path).first);
  }

  static std::vector<std::byte> Contents(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    std::vector<std::byte> bytes(text.size());
    std::memcpy(bytes.data(), text.data(), text.size());
    return bytes;
  }

  // The node reads all of them in an order of its own and compares every byte. `at_half` is called
  // once, in the middle.
  void ReadAll(uint32_t node, const std::string& root, std::vector<std::string> paths,
               const std::function<void()>& at_half = nullptr) {
    SplitMix64 rng(1000 + node);
    for (size_t i = paths.size(); i > 1; --i) std::swap(paths[i - 1], paths[rng.Below(i)]);
    for (size_t i = 0; i < paths.size(); ++i) {
      if (at_half && i == paths.size() / 2) at_half();
      const std::string path = StrCat(root, "/", paths[i]);
      ASSERT_EQ(ReadFile(node, path), Contents(path)) << path << " on node " << node;
    }
  }

  // All of `nodes` at once.
  void AllRead(const std::vector<uint32_t>& nodes, const std::vector<std::string>& paths,
               const std::function<void()>& at_half = nullptr) {
    std::vector<std::jthread> programs;
    for (const uint32_t node : nodes) {
      programs.emplace_back([&, node] {
        ReadAll(node, root_ + "/data", paths, node == nodes[0] ? at_half : nullptr);
      });
    }
  }
};

TEST_F(GrowingCluster, FourNodesOpenFilesInFourOrdersAndReadEachOnce) {
  const std::string data = root_ + "/data";
  const std::vector<std::string> paths = WriteFiles(data, 0, 300, 0, 30000);
  StartGrowing(4, 64 << 20);
  AllRead({0, 1, 2, 3}, paths);
  EXPECT_EQ(SourceReads(), 300u) << Fates();
  EXPECT_EQ(Sum("forebay_peer_refused_total"), 0u);
  // Numbers differ, and each node has every file once, whoever told it first.
  for (const One& one : nodes_) EXPECT_EQ(one.engine->shared_catalog(one.dataset)->size(), 300u);
  AllRead({0, 1, 2, 3}, paths);
  EXPECT_EQ(SourceReads(), 300u) << Fates();

  // A node dies; nobody lacks a byte, and what is new is still read once.
  Kill(3);
  registrar_->SetAlive(3, false);
  AllRead({0, 1, 2}, paths);
  // Who has not heard of it yet takes another node for a file's home.
  for (uint32_t node = 0; node < 3; ++node) {
    ASSERT_TRUE(Within(20 * kSecond, [&] { return Seen(node, 3).state == "dead"; })) << node;
  }
  const std::vector<std::string> more = WriteFiles(data, 300, 100, 0, 30000);
  const uint64_t before = SourceReads();
  AllRead({0, 1, 2}, more);
  EXPECT_EQ(SourceReads(), before + 100) << Fates();
}

TEST_F(GrowingCluster, ANodeThatDiesInTheMiddleCostsNobodyAByte) {
  const std::vector<std::string> paths = WriteFiles(root_ + "/data", 0, 400, 0, 30000);
  StartGrowing(4, 64 << 20);
  AllRead({0, 1, 2}, paths, [&] {
    Kill(3);
    registrar_->SetAlive(3, false);
  });
  EXPECT_GT(Sum("forebay_peer_reads_total"), 0u);
}

TEST_F(GrowingCluster, WhatAPeerHasAskedForIsNotReadAgainWhenItIsOpenedHere) {
  const std::string data = root_ + "/data";
  const std::vector<std::string> paths = WriteFiles(data, 0, 60, 1000, 3000);
  StartGrowing(2, 32 << 20);
  ReadAll(0, data, paths);
  EXPECT_EQ(SourceReads(), 60u) << Fates();
  const uint64_t here = Value(*nodes_[1].engine, "forebay_source_reads_total");
  EXPECT_GT(here, 10u);
  ReadAll(1, data, paths);
  EXPECT_EQ(SourceReads(), 60u) << Fates();
  EXPECT_EQ(nodes_[1].engine->shared_catalog(nodes_[1].dataset)->size(), 60u);
}

TEST_F(GrowingCluster, BlocksOfALargeFileHaveHomesOfTheirOwn) {
  constexpr uint32_t kBlock = 64 << 10;
  const std::string path = root_ + "/data/large.bin";
  std::filesystem::create_directories(root_ + "/data");
  std::vector<std::byte> bytes(40 * kBlock + 77);
  FillNullSample(5, bytes);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  StartGrowing(3, 64 << 20);
  std::vector<std::jthread> programs;
  for (uint32_t node = 0; node < 3; ++node) {
    programs.emplace_back([&, node] {
      const Appended file = OpenFile(node, path, kBlock);
      ASSERT_EQ(file.count, 41u);
      for (uint32_t i = 0; i < file.count; ++i) {
        const uint32_t block = (i * 17 + node * 13) % file.count;
        const size_t at = size_t{block} * kBlock;
        const size_t length = std::min<size_t>(kBlock, bytes.size() - at);
        const std::vector<std::byte> got = Fetch(nodes_[node], file.first + block);
        ASSERT_EQ(got.size(), length);
        ASSERT_EQ(std::memcmp(got.data(), bytes.data() + at, length), 0) << block;
      }
    });
  }
  programs.clear();
  EXPECT_EQ(SourceReads(), 41u) << Fates();
  for (uint32_t node = 0; node < 3; ++node) {
    EXPECT_GT(Value(*nodes_[node].engine, "forebay_source_reads_total"), 3u) << node;
  }
}

// A file that this node has invalidated may come back with its size and time: others may have old
// bytes under that name.
TEST_F(GrowingCluster, AFileThatWasInvalidatedHereIsNotAskedOfOthers) {
  const std::string data = root_ + "/data";
  const std::vector<std::string> paths = WriteFiles(data, 0, 40, 1000, 1000);
  StartGrowing(2, 32 << 20);
  for (uint32_t node = 0; node < 2; ++node) ReadAll(node, data, paths);
  for (const std::string& name : paths) {
    const std::string path = data + "/" + name;
    struct stat st = {};
    ASSERT_EQ(stat(path.c_str(), &st), 0);
    const Appended old = OpenFile(0, path);
    ASSERT_TRUE(nodes_[0].engine->Invalidate(nodes_[0].dataset, old.first, old.count).ok());
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).put('!');
    const timespec times[2] = {st.st_atim, st.st_mtim};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    ASSERT_EQ(ReadFile(0, path), Contents(path)) << path;
  }
}

// Where memory keeps nothing, copies lie in the folders, and a later run finds them there.
TEST_F(GrowingCluster, ALaterRunFindsTheCopiesInTheFoldersOfTheirHomes) {
  const std::string data = root_ + "/data";
  const std::vector<std::string> paths = WriteFiles(data, 0, 120, 1000, 20000);
  engine_options_.keep = false;
  engine_options_.cache_bytes = 64 << 20;
  const auto start = [&] {
    Prepare(3);
    for (uint32_t node = 0; node < 3; ++node) {
      engine_options_.cache_folder = StrCat(root_, "/cache", node);
      Begin(node, 32 << 20);
    }
    for (uint32_t node = 0; node < 3; ++node) Grow(node, data);
  };
  start();
  AllRead({0, 1, 2}, paths);
  EXPECT_EQ(SourceReads(), 120u) << Fates();
  for (One& one : nodes_) {
    one.peers.reset();
    one.engine.reset();
  }
  // One node comes back with nothing: the others have what lives with them, and do not ask the
  // source for files that no program has opened there.
  std::filesystem::remove_all(root_ + "/cache0");
  start();
  ReadAll(0, data, paths);
  EXPECT_EQ(SourceReads(), Value(*nodes_[0].engine, "forebay_source_reads_total")) << Fates();
  EXPECT_GT(SourceReads(), 0u);
  EXPECT_LT(SourceReads(), 70u) << Fates();
}

TEST_F(GrowingCluster, WrongBytesAreNeverTaken) {
  const std::string data = root_ + "/data";
  const std::vector<std::string> paths = WriteFiles(data, 0, 150, 100, 30000);
  parts_.corrupt_every = 3;
  StartGrowing(3, 64 << 20);
  AllRead({0, 1, 2}, paths);
  EXPECT_GT(Sum("forebay_peer_corrupt_total"), 0u);
  EXPECT_GT(Sum("forebay_peer_reads_total"), 0u);
}

TEST_F(GrowingCluster, AHomeThatDoesNotAnswerCostsABoundedWait) {
  const std::string data = root_ + "/data";
  const std::vector<std::string> paths = WriteFiles(data, 0, 20, 1000, 3000);
  options_.request_wait = 100 * kMilli;
  Prepare(2);
  for (uint32_t node = 0; node < 2; ++node) Begin(node, 32 << 20);
  Grow(0, data);
  const std::shared_ptr<Catalog> catalog = Catalog::Growing(data);
  DelayOptions hangs;
  hangs.storage.read = 20 * kSecond;
  auto slow = DelaySource::Make(*MakePosixSource(*catalog, {}), hangs);
  ASSERT_TRUE(slow) << slow.status().ToString();
  ASSERT_TRUE(nodes_[1].engine->AddGrowing(catalog, *std::move(slow)));
  ReadAll(0, data, paths);
  EXPECT_GT(Sum("forebay_peer_timeouts_total") + Sum("forebay_peer_lost_total"), 0u) << Fates();
}

class GrowingNames : public GrowingCluster {
 protected:
  // Two nodes, each with a folder of its own.
  void StartTwo(const std::string& name) {
    options_.join_wait = 2 * kSecond;
    Prepare(2);
    for (uint32_t node = 0; node < 2; ++node) Begin(node, 32 << 20);
    for (uint32_t node = 0; node < 2; ++node) Grow(node, Folder(node), name);
  }
  std::string Folder(uint32_t node) const { return StrCat(root_, "/mounted", node, "/data"); }
  // The same files, as if mounted at another path.
  void Link(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      const std::string to = Folder(1) + "/" + path;
      std::filesystem::create_directories(DirName(to));
      std::filesystem::create_hard_link(Folder(0) + "/" + path, to);
    }
  }
};

TEST_F(GrowingNames, AGivenNameJoinsFoldersAtOtherPaths) {
  const std::vector<std::string> paths = WriteFiles(Folder(0), 0, 80, 1000, 3000);
  Link(paths);
  StartTwo("imagenet");
  ReadAll(0, Folder(0), paths);
  ReadAll(1, Folder(1), paths);
  EXPECT_EQ(SourceReads(), 80u) << Fates();
}

TEST_F(GrowingNames, FoldersAtOtherPathsWithoutANameAreOthers) {
  const std::vector<std::string> paths = WriteFiles(Folder(0), 0, 80, 1000, 3000);
  Link(paths);
  StartTwo("");
  ReadAll(0, Folder(0), paths);
  ReadAll(1, Folder(1), paths);
  EXPECT_EQ(SourceReads(), 160u);
  EXPECT_EQ(Sum("forebay_peer_refused_total"), 0u) << "nobody is asked";
}

// A link on the way to the folder does not make another folder of it.
TEST_F(GrowingNames, TheFoldersRealPathCounts) {
  const std::vector<std::string> paths = WriteFiles(Folder(0), 0, 80, 1000, 3000);
  std::filesystem::create_directory_symlink(root_ + "/mounted0", root_ + "/mounted1");
  StartTwo("");
  ReadAll(0, Folder(0), paths);
  ReadAll(1, Folder(1), paths);
  EXPECT_EQ(SourceReads(), 80u) << Fates();
}

// Files of the same names and sizes that are not the same: each node gets its own bytes.
TEST_F(GrowingNames, OtherVersionsOfAFileAreNeverTakenForThisOne) {
  constexpr uint32_t kFiles = 300;
  const std::vector<std::string> paths = WriteFiles(Folder(0), 0, kFiles, 2000, 2000);
  for (size_t i = 0; i < paths.size(); ++i) {
    const std::string to = Folder(1) + "/" + paths[i];
    std::filesystem::create_directories(DirName(to));
    std::filesystem::copy_file(Folder(0) + "/" + paths[i], to);
    std::fstream(to, std::ios::in | std::ios::out | std::ios::binary).put('!');
    const timespec times[2] = {{.tv_sec = 1'000'000, .tv_nsec = 0},
                               {.tv_sec = 1'000'000, .tv_nsec = static_cast<long>(i)}};
    ASSERT_EQ(utimensat(AT_FDCWD, to.c_str(), times, 0), 0);
  }
  StartTwo("imagenet");
  for (uint32_t node = 0; node < 2; ++node) ReadAll(node, Folder(node), paths);
  EXPECT_EQ(Sum("forebay_peer_reads_total"), 0u);
  const uint64_t refused = Sum("forebay_peer_refused_total");
  EXPECT_GT(refused, 0u);
  // Who has only other versions is soon asked for no more than a probe now and then.
  EXPECT_LT(refused, uint64_t{kFiles} / 2) << Fates();
}

TEST_F(GrowingNames, AFileThatIsReplacedIsReadAnew) {
  const std::vector<std::string> paths = WriteFiles(Folder(0), 0, 40, 1000, 1000);
  Link(paths);
  StartTwo("imagenet");
  for (uint32_t node = 0; node < 2; ++node) ReadAll(node, Folder(node), paths);
  EXPECT_EQ(SourceReads(), 40u) << Fates();
  for (const std::string& path : paths) {
    // In place, so that both names lead to it; the same size.
    const std::string file = Folder(0) + "/" + path;
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).put('!');
    const timespec times[2] = {{.tv_sec = 2'000'000, .tv_nsec = 0},
                               {.tv_sec = 2'000'000, .tv_nsec = 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  }
  for (uint32_t node = 0; node < 2; ++node) ReadAll(node, Folder(node), paths);
  EXPECT_EQ(SourceReads(), 80u) << Fates();
}

}  // namespace
}  // namespace forebay::peer
