// Copies as files with second names, what they take of the disk, and what leaves when.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "tier/folder_admin.h"
#include "tier/folder_index.h"
#include "tier/folder_tier.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;

constexpr TierKey kSmall{9, 1};
constexpr TierKey kLarge{9, 2};

Bytes RandomBytes(size_t length, uint64_t seed) {
  Bytes bytes(length);
  SplitMix64 rng(seed);
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng.Next());
  return bytes;
}
// A name as the file face gives it.
std::string SecondName(const std::string& text) {
  std::string name(32, '0');
  (void)std::snprintf(name.data(), 33, "%032llx",
                      static_cast<unsigned long long>(std::hash<std::string>()(text)));
  return name;
}
Bytes SmallBytes() { return RandomBytes(8'192, 1); }
Bytes LargeBytes() { return RandomBytes(70'000, 2); }

class FolderLinksTest : public testing::Test {
 protected:
  FolderLinksTest() { Open(64 << 20); }
  void Open(uint64_t capacity, uint64_t block = 1, Nanos retry = 30 * kSecond) {
    Close();
    auto opened = FolderStore::Open({.folder = folder_.path(),
                                     .capacity_bytes = capacity,
                                     .block_bytes = block,
                                     .file_bytes = 64 << 10,
                                     .retry_every = retry,
                                     .gather = 100 * kMicro});
    ASSERT_TRUE(opened.has_value()) << opened.status().ToString();
    store_ = *std::move(opened);
    ASSERT_TRUE(store_->WaitScanned(kLong));
    tier_ = *FolderStore::MakeTier(store_, 64);
    links_path_ = folder_.path() + "/run/copies";
    fs::create_directories(links_path_);
    links_ = OwnedFd(open(links_path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  void Close() {
    tier_.reset();
    store_.reset();
  }
  Status Link(const TierKey& key, uint64_t length, const std::string& name) {
    return store_->LinkCopy(key, length, links_.get(), SecondName(name).c_str());
  }
  void Unlink(const std::string& name) {
    EXPECT_EQ(unlinkat(links_.get(), SecondName(name).c_str(), 0), 0) << name;
  }
  std::string At(const std::string& name) const { return links_path_ + "/" + SecondName(name); }
  Status Adopt(FolderStore& store, const TierKey& key, const std::string& name, uint64_t length,
               uint32_t crc, bool reserved = false) {
    return store.AdoptFile(key, links_.get(), SecondName(name).c_str(), length, crc, reserved);
  }
  Bytes Content(const std::string& path) const {
    const OwnedFd fd(open(path.c_str(), O_RDONLY));
    Bytes bytes(fd.valid() ? fs::file_size(path) : 0);
    EXPECT_EQ(read(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  nlink_t LinksOf(const std::string& path) const {
    struct stat st {};
    EXPECT_EQ(stat(path.c_str(), &st), 0) << path;
    return st.st_nlink;
  }
  void WriteAt(const std::string& path, const Bytes& bytes) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  }
  bool Gets(const TierKey& key, const Bytes& truth) {
    Bytes bytes(truth.size());
    return Get(*tier_, key, bytes).hit && bytes == truth;
  }
  TierDone PutAsFile(const TierKey& key, Bytes bytes) {
    return DoOne(*tier_, {.tag = 1,
                          .kind = Kind::kPut,
                          .key = key,
                          .bytes = bytes,
                          .crc = Crc32c(bytes),
                          .as_file = true});
  }

  TempFolder folder_;
  std::shared_ptr<FolderStore> store_;
  std::unique_ptr<Tier> tier_;
  std::string links_path_;
  OwnedFd links_;
};

TEST_F(FolderLinksTest, AFileGetsASecondName) {
  ASSERT_TRUE(Put(*tier_, kLarge, LargeBytes()).stored);
  ASSERT_TRUE(Link(kLarge, 70'000, "large").ok());
  EXPECT_EQ(LinksOf(At("large")), 2u);
  EXPECT_TRUE(Content(At("large")) == LargeBytes());
  EXPECT_EQ(Link(kLarge, 70'000, "large").code(), Code::kAlreadyExists);
  EXPECT_TRUE(Link(kLarge, 70'000, "again").ok());
  EXPECT_EQ(Link({9, 3}, 70'000, "none").code(), Code::kNotFound);
  EXPECT_FALSE(fs::exists(At("none")));
  // Mode and attributes are the giver's.
  ASSERT_EQ(chmod(At("large").c_str(), S_ISVTX | 0444), 0);
  (void)setxattr(At("large").c_str(), "user.forebay.file", "x", 1, 0);
  EXPECT_TRUE(Gets(kLarge, LargeBytes()));
  Open(64 << 20);
  EXPECT_TRUE(Gets(kLarge, LargeBytes())) << "the next job reads it, too";
  EXPECT_EQ(tier_->stats().damaged, 0u);
  EXPECT_TRUE(Link(kLarge, 70'000, "large").ok()) << "the last job's names are gone";
}

TEST_F(FolderLinksTest, APackedCopyBecomesAFileWithoutItsSource) {
  for (uint32_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(Put(*tier_, {9, i}, RandomBytes(8'192, i)).stored);
  }
  EXPECT_TRUE(folder_.Files(".bin").empty());
  const uint64_t used = store_->used_bytes();
  for (const uint32_t i : {3u, 7u}) {
    ASSERT_TRUE(Link({9, i}, 8'192, std::to_string(i)).ok()) << i;
    EXPECT_TRUE(Content(At(std::to_string(i))) == RandomBytes(8'192, i)) << i;
    EXPECT_EQ(LinksOf(At(std::to_string(i))), 2u) << i;
  }
  EXPECT_EQ(folder_.Files(".bin").size(), 2u);
  EXPECT_EQ(store_->used_bytes(), used) << "the segment's room was given back";
  EXPECT_EQ(store_->stats().writes, 20u);
  for (uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(Gets({9, i}, RandomBytes(8'192, i))) << i;
  Open(64 << 20);
  EXPECT_EQ(store_->used_bytes(), used) << "the log says the same";
  for (uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(Gets({9, i}, RandomBytes(8'192, i))) << i;
  for (uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(Link({9, i}, 8'192, std::to_string(i)).ok()) << i;
  EXPECT_EQ(folder_.Files(".bin").size(), 20u);
  EXPECT_TRUE(folder_.Files(".seg").empty()) << "nothing is packed any more";
  EXPECT_EQ(store_->stats().damaged, 0u);
}

TEST_F(FolderLinksTest, ADamagedCopyGetsNoName) {
  ASSERT_TRUE(Put(*tier_, kSmall, SmallBytes()).stored);
  ASSERT_TRUE(Put(*tier_, kLarge, LargeBytes()).stored);
  ASSERT_TRUE(Put(*tier_, {9, 3}, LargeBytes()).stored);
  Close();
  for (const std::string extension : {".seg", ".bin"}) {
    for (const fs::path& path : folder_.Files(extension)) {
      const OwnedFd fd(open(path.c_str(), O_RDWR));
      const std::byte other{0};
      ASSERT_EQ(pwrite(fd.get(), &other, 1, 100), 1);
      ASSERT_EQ(pwrite(fd.get(), &other, 1, 101), 1);
    }
  }
  Open(64 << 20);
  EXPECT_EQ(Link(kSmall, 8'192, "small").code(), Code::kNotFound);
  EXPECT_EQ(Link(kLarge, 70'000, "large").code(), Code::kNotFound);
  EXPECT_EQ(Link({9, 3}, 69'999, "length").code(), Code::kNotFound);
  EXPECT_TRUE(fs::is_empty(links_path_));
  EXPECT_FALSE(store_->Has(kSmall) || store_->Has(kLarge) || store_->Has({9, 3}));
  EXPECT_EQ(store_->stats().damaged, 3u);
  EXPECT_TRUE(store_->TakeUnlinks().empty());
  ASSERT_TRUE(Put(*tier_, kSmall, SmallBytes()).stored);
  EXPECT_TRUE(Link(kSmall, 8'192, "small").ok());
}

TEST_F(FolderLinksTest, WhereThereAreNoLinks) {
  std::string other = "/dev/shm/forebay_tier_XXXXXX";
  if (mkdtemp(other.data()) == nullptr) GTEST_SKIP() << "NOT TESTED: no /dev/shm";
  struct stat here {};
  struct stat there {};
  ASSERT_TRUE(stat(folder_.path().c_str(), &here) == 0 && stat(other.c_str(), &there) == 0);
  const OwnedFd dir(open(other.c_str(), O_RDONLY | O_DIRECTORY));
  if (here.st_dev != there.st_dev) {
    for (const TierKey& key : {kSmall, kLarge}) {
      const Bytes bytes = key == kSmall ? SmallBytes() : LargeBytes();
      ASSERT_TRUE(Put(*tier_, key, bytes).stored);
      const Status status = store_->LinkCopy(key, bytes.size(), dir.get(), "name");
      EXPECT_EQ(status.code(), Code::kUnimplemented) << status.ToString();
      EXPECT_TRUE(Gets(key, bytes));
    }
    WriteAt(other + "/file", LargeBytes());
    EXPECT_FALSE(store_->AdoptFile({9, 5}, dir.get(), "file", 70'000, Crc32c(LargeBytes())).ok());
    EXPECT_FALSE(store_->Has({9, 5}));
    EXPECT_TRUE(store_->health().ok()) << store_->health().ToString();
  }
  fs::remove_all(other);
}

TEST_F(FolderLinksTest, AFileOfOthersIsAdopted) {
  WriteAt(At("file"), LargeBytes());
  const uint32_t crc = Crc32c(LargeBytes());
  EXPECT_EQ(Adopt(*store_, kLarge, "file", 69'999, crc).code(), Code::kInvalidArgument);
  EXPECT_EQ(Adopt(*store_, kLarge, "none", 70'000, crc).code(), Code::kNotFound);
  ASSERT_TRUE(Adopt(*store_, kLarge, "file", 70'000, crc).ok());
  EXPECT_EQ(LinksOf(At("file")), 2u);
  EXPECT_TRUE(Gets(kLarge, LargeBytes()));
  // Another file of the same content is none of the store's.
  WriteAt(At("other"), LargeBytes());
  EXPECT_TRUE(Adopt(*store_, kLarge, "other", 70'000, crc).ok());
  EXPECT_EQ(LinksOf(At("other")), 1u);
  Unlink("file");
  store_->ReleaseCopy(kLarge);
  EXPECT_TRUE(Gets(kLarge, LargeBytes())) << "the copy needs no second name";
  Open(64 << 20);
  EXPECT_TRUE(Gets(kLarge, LargeBytes()));
}

TEST_F(FolderLinksTest, RoomForAFileThatIsAboutToBeWritten) {
  Open(200'000);
  ASSERT_TRUE(store_->Reserve(100'000).ok());
  EXPECT_FALSE(tier_->HasRoom(100'000));
  EXPECT_EQ(store_->Reserve(100'000).code(), Code::kResourceExhausted);
  WriteAt(At("file"), Bytes(100'000));
  const uint32_t crc = Crc32c(Bytes(100'000));
  EXPECT_TRUE(Adopt(*store_, {9, 5}, "file", 100'000, crc, true).ok());
  EXPECT_EQ(store_->used_bytes(), 100'040u);
  EXPECT_TRUE(tier_->HasRoom(99'000)) << "reserved once";
  WriteAt(At("second"), Bytes(100'000, std::byte{1}));
  EXPECT_EQ(Adopt(*store_, {9, 6}, "second", 100'000, 0).code(), Code::kResourceExhausted);
  EXPECT_EQ(LinksOf(At("second")), 1u);
  ASSERT_TRUE(store_->Reserve(90'000).ok());
  store_->Unreserve(90'000);
  EXPECT_TRUE(store_->Reserve(90'000).ok());
}

TEST_F(FolderLinksTest, DroppedIsNotFoundAgain) {
  for (int round = 0; round < 50; ++round) {
    // The put may be under way.
    Bytes bytes = round % 2 == 0 ? SmallBytes() : LargeBytes();
    const TierOp put{
        .tag = 1, .kind = Kind::kPut, .key = kLarge, .bytes = bytes, .crc = Crc32c(bytes)};
    ASSERT_EQ(tier_->Submit(std::span(&put, 1)), 1u);
    store_->Drop(kLarge);
    EXPECT_FALSE(store_->Has(kLarge));
    EXPECT_EQ(Link(kLarge, bytes.size(), "name").code(), Code::kNotFound);
    Collect(*tier_, 1);
  }
  EXPECT_EQ(store_->used_bytes(), 0u);
  store_->Drop({9, 77});
}

TEST_F(FolderLinksTest, ADroppedCopyTakesItsRoomUntilItsSecondNameIsGone) {
  ASSERT_TRUE(Put(*tier_, kLarge, LargeBytes()).stored);
  ASSERT_TRUE(Link(kLarge, 70'000, "large").ok());
  EXPECT_TRUE(store_->TakeUnlinks().empty());
  store_->Drop(kLarge);
  EXPECT_FALSE(store_->Has(kLarge));
  EXPECT_EQ(store_->used_bytes(), 70'040u);
  EXPECT_EQ(store_->TakeUnlinks(), std::vector<TierKey>{kLarge});
  EXPECT_TRUE(store_->TakeUnlinks().empty()) << "told once";
  Unlink("large");
  store_->ReleaseCopy(kLarge);
  EXPECT_EQ(store_->used_bytes(), 0u);
  store_->ReleaseCopy(kLarge);
  EXPECT_EQ(store_->used_bytes(), 0u);
}

TEST_F(FolderLinksTest, WhatProgramsHaveOpenIsNotGivenUp) {
  Open(300'000);
  store_->Use(9, "/data/nine");
  store_->AskedForAll(9);
  for (uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(Put(*tier_, {9, i}, Bytes(70'000)).stored);
  for (uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(Link({9, i}, 70'000, std::to_string(i)).ok());
  store_->Unuse(9);
  store_->Use(8, "/data/eight");
  EXPECT_TRUE(Put(*tier_, {8, 0, 8}, Bytes(70'000)).stored) << "number 3 has no second name";
  EXPECT_FALSE(store_->Has({9, 3}));
  EXPECT_TRUE(store_->TakeUnlinks().empty());
  EXPECT_FALSE(Put(*tier_, {8, 1, 8}, Bytes(70'000)).stored);
  const std::vector<TierKey> wanted = store_->TakeUnlinks();
  ASSERT_EQ(wanted, (std::vector<TierKey>{{9, 0}})) << "the one asked for longest ago";
  EXPECT_FALSE(Put(*tier_, {8, 1, 8}, Bytes(70'000)).stored);
  EXPECT_TRUE(store_->TakeUnlinks().empty()) << "told once";
  Unlink("0");
  store_->ReleaseCopy(wanted[0]);
  EXPECT_TRUE(Put(*tier_, {8, 1, 8}, Bytes(70'000)).stored);
  EXPECT_FALSE(store_->Has({9, 0}));
  EXPECT_TRUE(store_->Has({9, 1}) && store_->Has({9, 2}));
}

TEST_F(FolderLinksTest, ADataSetThatIsClosedMakesRoom) {
  Open(300'000);
  store_->Use(1, "/data/one");
  store_->Use(1, "/data/one");
  for (uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(Put(*tier_, {1, i, 1}, Bytes(70'000)).stored);
  store_->Unuse(1);
  EXPECT_FALSE(Put(*tier_, {2, 0, 2}, Bytes(70'000)).stored) << "somebody still uses it";
  store_->Unuse(1);
  EXPECT_TRUE(Put(*tier_, {2, 0, 2}, Bytes(70'000)).stored);
}

// A data set that grows: what an earlier job left leaves in the order in which it came, after the
// groups that nobody named; what was asked for stays.
TEST_F(FolderLinksTest, ADataSetThatGrows) {
  Open(600'000);
  for (uint32_t i = 0; i < 6; ++i) ASSERT_TRUE(Put(*tier_, {9, i}, Bytes(70'000)).stored);
  ASSERT_TRUE(Put(*tier_, {1, 0, 1}, Bytes(70'000)).stored);
  ASSERT_TRUE(Put(*tier_, {9, 6}, Bytes(70'000)).stored);
  Open(600'000);
  store_->Use(9, "/data/nine");
  store_->AskedForAll(9);
  EXPECT_TRUE(store_->Has({9, 1}));
  std::vector<std::set<uint64_t>> left;
  for (uint32_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(Put(*tier_, {9, 100 + i}, Bytes(70'000)).stored);
    auto admin = FolderAdmin::Open(folder_.path(), false);
    ASSERT_TRUE(admin.has_value());
    std::set<uint64_t> held;
    for (const TierKey& key : admin->Keys(9)) held.insert(key.name);
    for (const TierKey& key : admin->Keys(1)) held.insert(1000 + key.name);
    left.push_back(held);
  }
  EXPECT_EQ(left[0], (std::set<uint64_t>{0, 1, 2, 3, 4, 5, 6, 100})) << "group 1 first";
  EXPECT_EQ(left[1], (std::set<uint64_t>{1, 2, 3, 4, 5, 6, 100, 101}));
  EXPECT_EQ(left[2], (std::set<uint64_t>{1, 3, 4, 5, 6, 100, 101, 102}));
  EXPECT_EQ(left[3], (std::set<uint64_t>{1, 4, 5, 6, 100, 101, 102, 103}));
}

// Copies that a data set of another folder needs, of a group that nobody named.
TEST_F(FolderLinksTest, WhatIsNeededStaysWhicheverGroupHasIt) {
  Open(300'000);
  for (uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(Put(*tier_, {1, i, 1}, Bytes(70'000)).stored);
  Open(300'000);
  store_->Use(2, "/data/two");
  EXPECT_TRUE(store_->Has({2, 2, 1}));
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Put(*tier_, {2, i, 2}, Bytes(70'000)).stored) << i;
  EXPECT_FALSE(Put(*tier_, {2, 3, 2}, Bytes(70'000)).stored);
  EXPECT_TRUE(store_->Has({2, 2, 1}));
}

TEST_F(FolderLinksTest, SmallCopiesAsFilesWhereThatIsAskedFor) {
  ASSERT_TRUE(PutAsFile(kSmall, SmallBytes()).stored);
  EXPECT_EQ(folder_.Files(".bin").size(), 1u);
  EXPECT_TRUE(folder_.Files(".seg").empty());
  EXPECT_TRUE(Gets(kSmall, SmallBytes()));
}

TEST_F(FolderLinksTest, OnlyTheWriterLinks) {
  ASSERT_TRUE(Put(*tier_, kLarge, LargeBytes()).stored);
  auto reader = OpenStore(folder_.path());
  ASSERT_FALSE(reader->health().ok());
  EXPECT_EQ(reader->LinkCopy(kLarge, 70'000, links_.get(), "large").code(), Code::kUnavailable);
  WriteAt(At("file"), LargeBytes());
  EXPECT_EQ(Adopt(*reader, {9, 5}, "file", 70'000, 0).code(), Code::kUnavailable);
  reader->Drop(kLarge);
  EXPECT_FALSE(reader->Has(kLarge));
  EXPECT_TRUE(Gets(kLarge, LargeBytes()));
}

// ---- what the disk takes

TEST_F(FolderLinksTest, TheDiskTakesNoMoreThanTheLimit) {
  constexpr uint64_t kCapacity = 5 << 20;
  for (const bool as_files : {true, false}) {
    Close();
    fs::remove_all(folder_.path());
    Open(kCapacity, 0);
    store_->Use(9, "/data/nine");
    store_->AskedForAll(9);
    SplitMix64 rng(as_files ? 1 : 2);
    std::vector<uint64_t> lengths;
    uint64_t bytes = 0;
    size_t stored = 0;
    for (uint32_t i = 0; i < 1000; ++i) {
      lengths.push_back(1 + rng.Below(10'000));
      const TierKey key{9, rng.Next(), i};
      const bool put = (as_files ? PutAsFile(key, Bytes(lengths[i], std::byte{1}))
                                 : Put(*tier_, key, Bytes(lengths[i], std::byte{1})))
                           .stored;
      stored += put ? 1 : 0;
      bytes += put ? lengths[i] : 0;
      if (put && i % 10 == 0) {
        const Status linked = Link(key, lengths[i], std::to_string(i));
        EXPECT_TRUE(linked.ok() || linked.code() == Code::kResourceExhausted) << linked.ToString();
        // As the file face does.
        (void)setxattr(At(std::to_string(i)).c_str(), "user.forebay.file", Bytes(400).data(), 400,
                       0);
      }
      if (put && i % 7 == 3) store_->Drop(key);
      if (i % 100 == 99) {
        EXPECT_LE(DiskUse(folder_.path()), kCapacity) << i << (as_files ? " files" : " packed");
        EXPECT_LE(DiskUse(folder_.path()), store_->used_bytes()) << i;
      }
    }
    EXPECT_LT(stored, 1000u) << "the limit was reached";
    EXPECT_GT(store_->BytesFor(1000, 5'000'000, as_files), kCapacity / 10 * 9);
    EXPECT_LT(store_->BytesFor(stored / 2, bytes / 2, as_files), kCapacity);
    EXPECT_LE(store_->used_bytes(), kCapacity);
    if (!as_files) {
      EXPECT_GT(bytes, kCapacity / 10 * 8);
    }
    const uint64_t used = store_->used_bytes();
    Open(kCapacity, 0);
    EXPECT_LE(DiskUse(folder_.path()), store_->used_bytes());
    EXPECT_LE(store_->used_bytes(), used);
  }
}

TEST_F(FolderLinksTest, WhatOthersKeepInTheFolderCounts) {
  Open(300'000);
  store_->SetAside(150'000);
  EXPECT_EQ(store_->used_bytes(), 150'000u);
  EXPECT_TRUE(Put(*tier_, {9, 0}, Bytes(100'000)).stored);
  EXPECT_FALSE(Put(*tier_, {9, 1}, Bytes(100'000)).stored);
  store_->SetAside(0);
  EXPECT_TRUE(Put(*tier_, {9, 1}, Bytes(100'000)).stored);
}

TEST_F(FolderLinksTest, TheLogOfCopiesThatComeAndGoStaysShort) {
  for (uint32_t i = 0; i < 8'000; ++i) {
    ASSERT_TRUE(Put(*tier_, {9, i}, Bytes(10)).stored);
    store_->Drop({9, i});
  }
  EXPECT_LE(fs::file_size(folder_.path() + "/index.log"), 6'000u * 40);
  ASSERT_TRUE(Put(*tier_, kSmall, SmallBytes()).stored);
  Open(64 << 20);
  EXPECT_TRUE(Gets(kSmall, SmallBytes()));
}

TEST(FolderIndexTest, BlocksThatDroppedCopiesSharedStayTaken) {
  FolderIndex index(4096);
  const auto packed = [&](uint32_t offset, uint32_t length) {
    CopyEntry entry;
    entry.length = length;
    entry.offset = offset;
    entry.packed = 1;
    entry.group = index.NumberOf(7) & (FolderIndex::kMostGroups - 1);
    return entry;
  };
  ASSERT_TRUE(index.Set({7, 1}, packed(0, 10'000)));
  ASSERT_TRUE(index.Set({7, 2}, packed(10'000, 10'000)));
  ASSERT_TRUE(index.Set({7, 3}, packed(20'000, 10'000)));
  EXPECT_EQ(index.used(), 30'120u + 2 * 4096) << "and a block each for folder and segment";
  index.Clear({7, 2});  // one whole block of it: 12,288 to 16,384
  EXPECT_EQ(index.used(), 20'080u + 2 * 4096 + 10'000 - 4096);
  FolderIndex again(4096);
  index.Write([&](const LogRecord& record) { again.Apply(record); });
  EXPECT_EQ(again.used(), index.used());
  index.Clear({7, 1});
  index.Clear({7, 3});
  EXPECT_EQ(index.used(), 0u);
}

// ---- trouble

TEST_F(FolderLinksTest, WritingGoesOnWhenThereIsRoomAgain) {
  Close();
  const std::string mounted = folder_.path() + "/disk";
  fs::create_directories(mounted);
  if (mount("none", mounted.c_str(), "tmpfs", 0, "size=512k,mode=0700") != 0) {
    GTEST_SKIP() << "NOT TESTED: mounting a small tmpfs: " << strerror(errno);
  }
  {
    auto store = *FolderStore::Open({.folder = mounted,
                                     .capacity_bytes = 64 << 20,
                                     .retry_every = kMilli,
                                     .gather = 100 * kMicro});
    ASSERT_TRUE(store->WaitScanned(kLong));
    auto tier = *FolderStore::MakeTier(store, 4);
    WriteAt(mounted + "/filler", Bytes(400'000));
    uint32_t i = 0;
    while (i < 100 && Put(*tier, {9, i}, Bytes(20'000, std::byte{3})).stored) ++i;
    ASSERT_LT(i, 100u);
    EXPECT_LT(store->capacity_bytes(), 64u << 20);
    fs::remove(mounted + "/filler");
    EXPECT_TRUE(Soon([&] { return store->health().ok(); })) << store->health().ToString();
    EXPECT_EQ(store->capacity_bytes(), 64u << 20);
    EXPECT_TRUE(Soon([&] { return Put(*tier, {9, 200}, Bytes(20'000)).stored; }));
    Bytes bytes(20'000);
    EXPECT_TRUE(Get(*tier, {9, 0}, bytes).hit);
  }
  EXPECT_EQ(umount(mounted.c_str()), 0);
}

// A file where the group's folder should be.
TEST_F(FolderLinksTest, WhatIsInTheWayIsNamedAndTriedAgain) {
  Close();
  const std::string cache = folder_.path() + "/other";
  auto store = *FolderStore::Open(
      {.folder = cache, .capacity_bytes = 64 << 20, .retry_every = kMilli, .gather = 100 * kMicro});
  ASSERT_TRUE(store->WaitScanned(kLong));
  auto tier = *FolderStore::MakeTier(store, 4);
  const std::string stray = cache + "/0000000000000009";
  for (const size_t bytes : {size_t{1000}, size_t{1} << 20}) {
    WriteAt(stray, Bytes(10));
    const TierDone done = Put(*tier, {9, bytes}, Bytes(bytes));
    EXPECT_FALSE(done.stored);
    EXPECT_EQ(done.status.ToString().find(cache) == std::string::npos, false)
        << done.status.ToString();
    fs::remove(stray);
    EXPECT_TRUE(Soon([&] { return store->health().ok(); })) << store->health().ToString();
    EXPECT_TRUE(Soon([&] { return Put(*tier, {9, bytes}, Bytes(bytes)).stored; }));
    store->Drop({9, bytes});
    fs::remove_all(stray);
  }
}

TEST_F(FolderLinksTest, ManyThreadsLinkDropAndGet) {
  constexpr uint32_t kKeys = 12;
  const auto key = [](uint32_t i) { return TierKey{9, i}; };
  const auto truth = [](uint32_t i) { return RandomBytes(i % 3 == 0 ? 70'000 : 3'000, i); };
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      auto tier = *FolderStore::MakeTier(store_, 4);
      SplitMix64 rng(t);
      for (int round = 0; round < 150; ++round) {
        const auto i = static_cast<uint32_t>(rng.Below(kKeys));
        const Bytes right = truth(i);
        const std::string name = std::to_string(t) + "-" + std::to_string(round);
        switch (rng.Below(4)) {
          case 0:
            (void)Put(*tier, key(i), right);
            break;
          case 1: {
            Bytes bytes(right.size());
            if (Get(*tier, key(i), bytes).hit) {
              EXPECT_TRUE(bytes == right);
            }
            break;
          }
          case 2: {
            const Status linked = Link(key(i), right.size(), name);
            EXPECT_TRUE(linked.ok() || linked.code() == Code::kNotFound) << linked.ToString();
            if (linked.ok()) {
              EXPECT_TRUE(Content(At(name)) == right) << i;
            }
            break;
          }
          case 3:
            store_->Drop(key(i));
            for (const TierKey& gone : store_->TakeUnlinks()) store_->ReleaseCopy(gone);
            break;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store_->stats().damaged, 0u);
  EXPECT_TRUE(folder_.Files(".tmp").empty());
  for (uint32_t i = 0; i < kKeys; ++i) {
    if (store_->Has(key(i))) {
      EXPECT_TRUE(Gets(key(i), truth(i))) << i;
    }
  }
}

// ---- other things in the folder

TEST_F(FolderLinksTest, AFolderOfTheOldFileServiceIsNamed) {
  Close();
  const std::string old = folder_.path() + "/old";
  fs::create_directories(old + "/copies");
  ASSERT_EQ(chmod(old.c_str(), 0700), 0);
  const std::string copy = old + "/copies/0123456789abcdef0123456789abcdef";
  for (const std::string& name : {old + "/lock", old + "/boot", copy, old + "/mine"}) {
    WriteAt(name, Bytes(5));
  }
  const Status refused = FolderStore::Open({.folder = old}).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("forebay cache clear " + old), std::string::npos)
      << refused.message();
  EXPECT_TRUE(fs::exists(copy));
  EXPECT_FALSE(fs::exists(old + "/forebay.lock")) << "nothing was made in it";
  auto admin = FolderAdmin::Open(old, false);
  ASSERT_TRUE(admin.has_value()) << admin.status().ToString();
  EXPECT_NE(admin->foreign().find("older Forebay"), std::string::npos) << admin->foreign();
  admin = FolderAdmin::Open(old, true);
  ASSERT_TRUE(admin.has_value()) << admin.status().ToString();
  EXPECT_TRUE(admin->ClearAll().ok());
  EXPECT_FALSE(fs::exists(copy) || fs::exists(old + "/copies") || fs::exists(old + "/boot"));
  EXPECT_TRUE(fs::exists(old + "/mine")) << "not ours";
  EXPECT_TRUE(FolderStore::Open({.folder = old}).has_value());
}

TEST_F(FolderLinksTest, ClearingTakesTheSecondNamesToo) {
  ASSERT_TRUE(Put(*tier_, kLarge, LargeBytes()).stored);
  ASSERT_TRUE(Link(kLarge, 70'000, "large").ok());
  WriteAt(folder_.path() + "/run/table", Bytes(100));
  WriteAt(links_path_ + "/notes", Bytes(100));
  Close();
  {
    auto admin = FolderAdmin::Open(folder_.path(), false);
    ASSERT_TRUE(admin.has_value());
    EXPECT_TRUE(fs::exists(At("large"))) << "listing changes nothing";
  }
  auto admin = FolderAdmin::Open(folder_.path(), true);
  ASSERT_TRUE(admin.has_value());
  uint64_t bytes = 0;
  EXPECT_TRUE(*admin->Check(kLarge, &bytes));
  EXPECT_TRUE(admin->Clear(9).ok());
  EXPECT_FALSE(fs::exists(At("large")));
  EXPECT_TRUE(fs::exists(folder_.path() + "/run/table"));
  EXPECT_TRUE(admin->ClearAll().ok());
  EXPECT_FALSE(fs::exists(folder_.path() + "/run/table"));
  EXPECT_TRUE(fs::exists(links_path_ + "/notes")) << "not ours";
  fs::remove(links_path_ + "/notes");
  EXPECT_TRUE(admin->ClearAll().ok());
  EXPECT_FALSE(fs::exists(folder_.path() + "/run"));
}

}  // namespace
}  // namespace forebay
