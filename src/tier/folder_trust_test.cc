// Who may write to a cache folder, who may read it, and what lies in it that Forebay did not put
// there.
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tier/folder_admin.h"
#include "tier/folder_lock.h"
#include "tier/folder_log.h"
#include "tier/folder_tier.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;

constexpr TierKey kSmall{9, 1};
constexpr TierKey kLarge{9, 2};
Bytes SmallBytes() { return Bytes(5'000, std::byte{1}); }
Bytes LargeBytes() { return Bytes(70'000, std::byte{2}); }

mode_t ModeOf(const fs::path& path) {
  struct stat st {};
  EXPECT_EQ(lstat(path.c_str(), &st), 0) << path;
  return st.st_mode & 07777;
}

std::string ReadText(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteText(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

class FolderTrustTest : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: only root can make files of another user";
  }
  void Fill() {
    auto tier = OpenFolder(cache());
    ASSERT_TRUE(Put(*tier, kSmall, SmallBytes()).stored);
    ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
  }
  // Both ways to open a folder refuse this one, and say so.
  void ExpectRefused(const std::string& path, const std::vector<std::string>& words) {
    const Status statuses[] = {FolderStore::Open({.folder = path}).status(),
                               FolderAdmin::Open(path, false).status(),
                               FolderAdmin::Open(path, true).status()};
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), Code::kPermissionDenied) << status.ToString();
      EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
      for (const std::string& word : words) {
        EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
      }
    }
  }
  bool GetsBoth(Tier& tier) {
    Bytes small(SmallBytes().size());
    Bytes large(LargeBytes().size());
    const bool hits = Get(tier, kSmall, small).hit && Get(tier, kLarge, large).hit;
    return hits && small == SmallBytes() && large == LargeBytes();
  }
  const std::string& cache() const { return cache_; }
  std::string In(const std::string& name) const { return cache_ + "/" + name; }

  TempFolder folder_;
  const std::string cache_ = folder_.path() + "/cache";
};

TEST_F(FolderTrustTest, AnotherUsersFolderIsRefused) {
  Fill();
  ASSERT_EQ(chmod(cache().c_str(), 0755), 0);
  ASSERT_EQ(chown(cache().c_str(), kStranger, kStranger), 0);
  ExpectRefused(cache(), {"user 65534, mode 0755", "this process is user 0", "chown"});
  ASSERT_EQ(chown(cache().c_str(), 0, 0), 0);
  EXPECT_TRUE(GetsBoth(*OpenFolder(cache())));
}

// The other way round: root's folder, which everybody may read, in the hands of a user.
TEST_F(FolderTrustTest, RootsFolderIsAnotherUsers) {
  Fill();
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(cache().c_str(), 0755), 0);
  const AsStranger stranger;
  ExpectRefused(cache(), {"user 0, mode 0755", "this process is user 65534"});
}

TEST_F(FolderTrustTest, AFolderThatOthersMayWriteToIsRefused) {
  Fill();
  for (const mode_t mode : {0770, 0702, 0777, 02775}) {
    ASSERT_EQ(chmod(cache().c_str(), mode), 0);
    ExpectRefused(cache(), {"others may write", "chmod go-w"});
  }
  ASSERT_EQ(chmod(cache().c_str(), 01777), 0);
  ExpectRefused(cache(), {"mode 1777", "name a folder below it"});
  EXPECT_EQ(ModeOf(cache()), 01777u) << "left as it was";
  // A folder below such a one is fine, as in /tmp.
  auto tier = OpenFolder(In("mine"));
  EXPECT_TRUE(Put(*tier, kSmall, SmallBytes()).stored);
}

TEST_F(FolderTrustTest, OnlyALinkOfThisUserIsFollowed) {
  Fill();
  const std::string link = folder_.path() + "/link";
  fs::create_directory_symlink(cache(), link);
  EXPECT_TRUE(GetsBoth(*OpenFolder(link)));
  if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: only root can make links of another user";
  ASSERT_EQ(lchown(link.c_str(), 65534, 65534), 0);
  ExpectRefused(link, {"another user's symbolic link"});
  EXPECT_EQ(FolderStore::Open({.folder = link + "/"}).status().code(), Code::kPermissionDenied);
  // Above the last component a link is the user's own business.
  fs::create_directory_symlink(folder_.path(), folder_.path() + "/above");
  EXPECT_TRUE(GetsBoth(*OpenFolder(folder_.path() + "/above/cache/")));
}

TEST_F(FolderTrustTest, OthersCannotReadCopiesWhateverTheUmask) {
  for (const mode_t mask : {000, 022, 077}) {
    const std::string above = StrCat(folder_.path(), "/above", mask);
    const std::string here = above + "/cache";
    const mode_t before = umask(mask);
    {
      auto store = OpenStore(here);
      store->Use(9, "/data/private");
      auto tier = *FolderStore::MakeTier(store, 4);
      EXPECT_TRUE(Put(*tier, kSmall, SmallBytes()).stored);
      EXPECT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
      EXPECT_EQ(ModeOf(here + "/writing"), 0700u);
    }
    auto admin = FolderAdmin::Open(here, true);
    EXPECT_TRUE(admin.has_value() && admin->Drop(kSmall).ok());
    umask(before);
    EXPECT_EQ(ModeOf(above) & 022, 0u);
    EXPECT_EQ(ModeOf(here), 0700u);
    size_t files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(here)) {
      const bool file = entry.is_regular_file();
      files += file ? 1 : 0;
      EXPECT_EQ(ModeOf(entry.path()), file ? 0600u : 0700u) << entry.path();
    }
    EXPECT_EQ(files, 4u) << "lock, log, segment and file";
  }
}

TEST_F(FolderTrustTest, AnOlderFolderIsClosedToOthers) {
  Fill();
  for (const auto& entry : fs::recursive_directory_iterator(cache())) {
    ASSERT_EQ(chmod(entry.path().c_str(), entry.is_regular_file() ? 0644 : 0755), 0);
  }
  ASSERT_EQ(chmod(cache().c_str(), 0755), 0);
  EXPECT_TRUE(GetsBoth(*OpenFolder(cache())));
  EXPECT_EQ(ModeOf(cache()), 0700u);
  EXPECT_EQ(ModeOf(In("0000000000000009")), 0700u);
  EXPECT_EQ(ModeOf(In("writing")), 0700u);
  EXPECT_EQ(ModeOf(In("index.log")), 0600u);
  EXPECT_EQ(ModeOf(In("forebay.lock")), 0600u);
}

TEST_F(FolderTrustTest, AFolderThatHoldsOtherThingsKeepsItsMode) {
  Fill();
  WriteText(In("paper.pdf"), "for all to read");
  ASSERT_EQ(chmod(cache().c_str(), 0755), 0);
  ASSERT_EQ(chmod(In("0000000000000009").c_str(), 0755), 0);
  EXPECT_TRUE(GetsBoth(*OpenFolder(cache())));
  EXPECT_EQ(ModeOf(cache()), 0755u);
  EXPECT_EQ(ModeOf(In("0000000000000009")), 0700u);
}

// ---- what lies in the place of a file

TEST_F(FolderTrustTest, TheLockIsNoWayToAnotherFile) {
  const std::string precious = folder_.path() + "/precious";
  WriteText(precious, "do not lose this");
  fs::create_directory(cache());
  ASSERT_EQ(chmod(cache().c_str(), 0700), 0);
  for (const bool hard : {false, true}) {
    hard ? fs::create_hard_link(precious, In(FolderLock::kName))
         : fs::create_symlink(precious, In(FolderLock::kName));
    {
      auto store = OpenStore(cache());
      EXPECT_EQ(store->health().ok(), hard) << store->health().ToString();
      if (!hard) {
        EXPECT_NE(store->health().message().find("forebay.lock is not a regular file"),
                  std::string::npos)
            << store->health().message();
        EXPECT_EQ(FolderAdmin::Open(cache(), true).status().code(), Code::kPermissionDenied);
      }
    }
    EXPECT_EQ(ReadText(precious), "do not lose this");
    fs::remove(In(FolderLock::kName));
  }
  // A link to nothing makes nothing.
  fs::create_symlink(folder_.path() + "/new", In(FolderLock::kName));
  EXPECT_FALSE(OpenStore(cache())->health().ok());
  EXPECT_FALSE(fs::exists(folder_.path() + "/new"));
}

TEST_F(FolderTrustTest, ALockThatIsAFifoOrAnotherUsers) {
  Fill();
  fs::remove(In(FolderLock::kName));
  ASSERT_EQ(mkfifo(In(FolderLock::kName).c_str(), 0600), 0);
  {
    auto tier = OpenFolder(cache());
    EXPECT_EQ(tier->health().code(), Code::kPermissionDenied) << tier->health().ToString();
    EXPECT_TRUE(GetsBoth(*tier)) << "what is there is read all the same";
    EXPECT_FALSE(Put(*tier, {9, 3}, SmallBytes()).stored);
  }
  EXPECT_EQ(FolderAdmin::Open(cache(), true).status().code(), Code::kPermissionDenied);
  EXPECT_EQ(FolderLock::Holder(OwnedFd(open(cache().c_str(), O_RDONLY)).get()), "");
  fs::remove(In(FolderLock::kName));
  WriteText(In(FolderLock::kName), "mine");
  ASSERT_EQ(chown(In(FolderLock::kName).c_str(), kStranger, kStranger), 0);
  EXPECT_FALSE(OpenStore(cache())->health().ok());
  EXPECT_EQ(ReadText(In(FolderLock::kName)), "mine");
}

// What the log says is believed, so it must be ours.
TEST_F(FolderTrustTest, ALogThatIsNotOursIsReplaced) {
  const std::string precious = folder_.path() + "/precious";
  for (int kind = 0; kind < 4; ++kind) {
    Fill();
    const std::string log = In(FolderLog::kName);
    if (kind == 0) {
      ASSERT_EQ(chown(log.c_str(), kStranger, kStranger), 0);
    } else if (kind == 1) {
      ASSERT_EQ(chmod(log.c_str(), 0622), 0);
    } else if (kind == 2) {
      fs::rename(log, precious);
      fs::create_symlink(precious, log);
    } else {
      fs::remove(log);
      ASSERT_EQ(mkfifo(log.c_str(), 0600), 0);
    }
    const std::string before = kind == 2 ? ReadText(precious) : "";
    auto tier = OpenFolder(cache());
    EXPECT_FALSE(tier->Has(kSmall) || tier->Has(kLarge)) << kind;
    EXPECT_TRUE(tier->health().ok()) << kind << ": " << tier->health().ToString();
    EXPECT_TRUE(Put(*tier, kSmall, SmallBytes()).stored) << kind;
    if (kind == 2) {
      EXPECT_EQ(ReadText(precious), before);
    }
    struct stat st {};
    ASSERT_EQ(lstat(log.c_str(), &st), 0);
    EXPECT_TRUE(S_ISREG(st.st_mode) && st.st_uid == geteuid()) << kind;
  }
}

// Each copy in turn is a FIFO, a link, a device's name, a folder, another user's, or for all to
// write; with the very bytes that the log names.
TEST_F(FolderTrustTest, ACopyThatIsNotOursIsNotRead) {
  for (const std::string extension : {".seg", ".bin"}) {
    const bool small = extension == ".seg";
    const TierKey key = small ? kSmall : kLarge;
    const Bytes truth = small ? SmallBytes() : LargeBytes();
    for (int kind = 0; kind < 6; ++kind) {
      std::error_code ignored;
      fs::remove_all(cache(), ignored);
      Fill();
      const fs::path copy = folder_.Files(extension).at(0);
      const fs::path elsewhere = folder_.path() + "/elsewhere";
      fs::rename(copy, elsewhere);
      switch (kind) {
        case 0:
          ASSERT_EQ(mkfifo(copy.c_str(), 0600), 0);
          break;
        case 1:
          fs::create_symlink(elsewhere, copy);
          break;
        case 2:
          fs::create_symlink("/dev/zero", copy);
          break;
        case 3:
          fs::create_directory(copy);
          break;
        case 4:
          fs::copy_file(elsewhere, copy);
          ASSERT_EQ(chown(copy.c_str(), kStranger, kStranger), 0);
          break;
        case 5:
          fs::copy_file(elsewhere, copy);
          ASSERT_EQ(chmod(copy.c_str(), 0666), 0);
          break;
      }
      auto tier = OpenFolder(cache());
      ASSERT_TRUE(tier->Has(key));
      Bytes bytes(truth.size());
      EXPECT_FALSE(Get(*tier, key, bytes).hit) << extension << kind;
      EXPECT_EQ(tier->stats().damaged, 1u) << extension << kind;
      EXPECT_FALSE(tier->Has(key)) << extension << kind;
      if (kind == 3) continue;  // a folder is in the way of the next copy
      EXPECT_TRUE(Put(*tier, key, truth).stored) << extension << kind;
      EXPECT_TRUE(Get(*tier, key, bytes).hit && bytes == truth) << extension << kind;
      fs::remove(elsewhere);
    }
  }
}

// On the way to a file, too, no link is followed.
TEST_F(FolderTrustTest, AFolderBelowThatIsALinkIsNotFollowed) {
  Fill();
  const std::string elsewhere = folder_.path() + "/elsewhere";
  auto tier = OpenFolder(cache());
  ASSERT_TRUE(GetsBoth(*tier));
  fs::rename(In("0000000000000009"), elsewhere);
  fs::create_directory_symlink(elsewhere, In("0000000000000009"));
  Bytes small(SmallBytes().size());
  Bytes large(LargeBytes().size());
  EXPECT_FALSE(Get(*tier, kSmall, small).hit);
  EXPECT_FALSE(Get(*tier, kLarge, large).hit);
}

// A folder that never was a cache keeps what it has, whatever its name.
TEST_F(FolderTrustTest, WhatTheUserHasUnderOurNamesIsLeftAlone) {
  for (const std::string name : {"index.log", "writing", "run", "00000000000000ab"}) {
    fs::remove_all(cache());
    fs::create_directory(cache());
    ASSERT_EQ(chmod(cache().c_str(), 0755), 0);
    const bool file = name == "index.log";
    const std::string mine = file ? In(name) : In(name) + "/mine.tmp";
    if (!file) fs::create_directory(In(name));
    WriteText(mine, "my own notes");
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Status status = FolderStore::Open({.folder = cache()}).status();
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
      EXPECT_NE(status.message().find(cache()), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
    }
    EXPECT_EQ(ReadText(mine), "my own notes");
    EXPECT_EQ(ModeOf(cache()), 0755u);
    EXPECT_FALSE(fs::exists(In("forebay.lock")));
  }
}

// ---- a folder that a group shares on purpose

// Another user of that group, in a process of its own: what `body` returns is its exit status.
template <typename Body>
int InChildAs(uid_t user, gid_t group, const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    umask(077);
    if (setgroups(1, &group) != 0 || setgid(kStranger) != 0 || setuid(user) != 0) _exit(100);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class FolderGroupTest : public FolderTrustTest {
 protected:
  static constexpr gid_t kTeam = 54321;
  static constexpr uid_t kAlice = 50001;
  static constexpr uid_t kBob = 50002;
  const std::string kGroup = std::to_string(kTeam);

  void SetUp() override {
    FolderTrustTest::SetUp();
    if (IsSkipped()) return;
    // Where a team has its caches.
    ASSERT_EQ(chown(folder_.path().c_str(), 0, kTeam), 0);
    ASSERT_EQ(chmod(folder_.path().c_str(), 0770), 0);
  }
  std::shared_ptr<FolderStore> Open(const std::string& group) const {
    auto store = FolderStore::Open({.folder = cache(),
                                    .group = group,
                                    .capacity_bytes = 64 << 20,
                                    .block_bytes = 1,
                                    .file_bytes = 64 << 10,
                                    .gather = 100 * kMicro});
    if (!store || !(*store)->WaitScanned(kLong)) return nullptr;
    return *std::move(store);
  }
  // Puts what is missing and finds what is there. 0: both went well.
  int PutOne(const TierKey& key, const Bytes& bytes, bool there) {
    const auto store = Open(kGroup);
    if (store == nullptr) return 1;
    if (!store->health().ok()) return 2;
    auto tier = *FolderStore::MakeTier(store, 4);
    Bytes found(bytes.size());
    const bool hit = Get(*tier, key, found).hit;
    if (hit != there || (hit && found != bytes)) return 3;
    return hit || Put(*tier, key, bytes).stored ? 0 : 4;
  }
};

TEST_F(FolderGroupTest, MembersShareWhatTheyCopy) {
  const auto put = [&](uid_t user, const TierKey& key, const Bytes& bytes, bool there) {
    return InChildAs(user, kTeam, [&] { return PutOne(key, bytes, there); });
  };
  EXPECT_EQ(put(kAlice, kSmall, SmallBytes(), false), 0);
  EXPECT_EQ(put(kAlice, kLarge, LargeBytes(), false), 0);
  EXPECT_EQ(put(kBob, kSmall, SmallBytes(), true), 0);
  EXPECT_EQ(put(kBob, kLarge, LargeBytes(), true), 0);
  // Bob writes beside Alice, into folders that she made, and drops what is hers.
  EXPECT_EQ(put(kBob, {9, 3}, SmallBytes(), false), 0);
  EXPECT_EQ(put(kBob, {9, 4}, LargeBytes(), false), 0);
  EXPECT_EQ(put(kAlice, {9, 3}, SmallBytes(), true), 0);
  EXPECT_EQ(InChildAs(kBob, kTeam,
                      [&] {
                        auto admin = FolderAdmin::Open(cache(), true, kGroup);
                        uint64_t bytes = 0;
                        const bool fine = admin.has_value() && *admin->Check(kLarge, &bytes) &&
                                          admin->Drop(kLarge).ok() && admin->Drop(kSmall).ok();
                        return fine ? 0 : 1;
                      }),
            0);
  EXPECT_EQ(put(kAlice, kLarge, LargeBytes(), false), 0);
  // Whatever the umask was.
  struct stat st {};
  for (const auto& each : fs::recursive_directory_iterator(cache())) {
    ASSERT_EQ(lstat(each.path().c_str(), &st), 0);
    EXPECT_EQ(st.st_gid, kTeam) << each.path();
    EXPECT_EQ(st.st_mode & 07777, each.is_directory() ? 02770u : 0660u) << each.path();
  }
  EXPECT_EQ(ModeOf(cache()), 02770u);
  EXPECT_EQ(InChildAs(kBob, kStranger, [&] { return access(In("index.log").c_str(), R_OK) == 0; }),
            0)
      << "others cannot read it";
}

TEST_F(FolderGroupTest, OnlyThatGroupIsTrusted) {
  ASSERT_EQ(InChildAs(kAlice, kTeam, [&] { return PutOne(kSmall, SmallBytes(), false); }), 0);
  const auto code = [&](uid_t user, gid_t group, const std::string& asked) {
    return InChildAs(user, group, [&] {
      return static_cast<int>(
          FolderStore::Open({.folder = cache(), .group = asked}).status().code());
    });
  };
  const int denied = static_cast<int>(Code::kPermissionDenied);
  EXPECT_EQ(code(kBob, kTeam, ""), denied) << "who does not say so trusts nobody";
  EXPECT_EQ(code(kAlice, kTeam, ""), denied) << "not even the owner";
  EXPECT_EQ(code(kBob, kStranger, kGroup), denied) << "not a member";
  EXPECT_EQ(code(kBob, kTeam, "no-such-group-here"), static_cast<int>(Code::kInvalidArgument));
  // Root is anybody.
  const auto status = [&](const std::string& asked) {
    return FolderStore::Open({.folder = cache(), .group = asked}).status();
  };
  EXPECT_TRUE(status(kGroup).ok()) << status(kGroup).ToString();
  EXPECT_EQ(status("65534").code(), Code::kPermissionDenied) << "another group's";
  for (const mode_t mode : {02772, 02777, 0700, 02750, 03770}) {
    ASSERT_EQ(chmod(cache().c_str(), mode), 0);
    EXPECT_EQ(status(kGroup).code(), Code::kPermissionDenied) << mode;
    EXPECT_NE(status(kGroup).message().find("chgrp"), std::string::npos);
    EXPECT_EQ(ModeOf(cache()), mode) << "left as it was";
  }
  ASSERT_EQ(chmod(cache().c_str(), 02775), 0);
  EXPECT_TRUE(status(kGroup).ok());
  EXPECT_EQ(ModeOf(cache()), 02770u) << "closed to others";
}

// What a stranger could put in its place, were the folder open for a moment.
TEST_F(FolderGroupTest, FilesThatAreNotTheGroupsAreNotRead) {
  ASSERT_EQ(InChildAs(kAlice, kTeam, [&] { return PutOne(kLarge, LargeBytes(), false); }), 0);
  const std::string copy = folder_.Files(".bin").front();
  const auto reads = [&] {
    const auto store = Open(kGroup);
    Bytes found(LargeBytes().size());
    return store != nullptr && store->Read(kLarge, found);
  };
  const auto again = [&] {
    EXPECT_EQ(InChildAs(kAlice, kTeam, [&] { return PutOne(kLarge, LargeBytes(), false); }), 0);
  };
  EXPECT_TRUE(reads());
  ASSERT_EQ(chmod(copy.c_str(), 0662), 0);
  EXPECT_FALSE(reads()) << "others may write to it";
  again();
  ASSERT_EQ(chown(copy.c_str(), kBob, kStranger), 0);
  EXPECT_FALSE(reads()) << "another group's";
  again();
  const std::string elsewhere = folder_.path() + "/elsewhere";
  fs::rename(copy, elsewhere);
  fs::create_symlink(elsewhere, copy);
  EXPECT_FALSE(reads()) << "a link";
}

// A lock that somebody removed, or a log whose first bytes went with the power, is no reason.
TEST_F(FolderTrustTest, ACacheThatLostItsLockOrItsLogIsStillOne) {
  Fill();
  fs::remove(In("forebay.lock"));
  EXPECT_TRUE(GetsBoth(*OpenFolder(cache())));
  fs::remove(In("forebay.lock"));
  std::ofstream(In("index.log"), std::ios::trunc) << std::string(100, '\0');
  EXPECT_NE(OpenFolder(cache()), nullptr);
}

}  // namespace
}  // namespace forebay
