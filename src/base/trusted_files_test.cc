#include "base/trusted_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

namespace forebay {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kStranger = 65534;

class TrustedFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "forebay_trusted_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    folder_ = OwnedFd(open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  void TearDown() override {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  std::string In(const std::string& name) const { return root_ + "/" + name; }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(In(name)) << text;
    EXPECT_EQ(chmod(In(name).c_str(), 0600), 0);
    return In(name);
  }
  mode_t ModeOf(const std::string& name) const {
    struct stat st {};
    EXPECT_EQ(lstat(In(name).c_str(), &st), 0) << name;
    return st.st_mode & 07777;
  }
  // 0 or the errno.
  int OpenFile(const char* name, int flags) const {
    return OpenPrivateFile(folder_.get(), name, flags).valid() ? 0 : errno;
  }

  std::string root_;
  OwnedFd folder_;
};

TEST_F(TrustedFilesTest, MakesWhatIsMissingForThisUserAlone) {
  const mode_t before = umask(0);
  const bool made = OpenPrivateFolder(In("a/b/c/"), "cache folder", true).has_value();
  umask(before);
  ASSERT_TRUE(made);
  EXPECT_EQ(ModeOf("a"), 0755u);
  EXPECT_EQ(ModeOf("a/b"), 0755u);
  EXPECT_EQ(ModeOf("a/b/c"), 0700u);
  EXPECT_EQ(OpenPrivateFolder(In("none"), "cache folder", false).status().code(), Code::kNotFound);
  EXPECT_FALSE(fs::exists(In("none")));
  Write("file", "x");
  EXPECT_FALSE(OpenPrivateFolder(In("file"), "cache folder", true).has_value());
  EXPECT_FALSE(OpenPrivateFolder(In("file/below"), "cache folder", true).has_value());
}

TEST_F(TrustedFilesTest, FoldersOfOthersAreRefused) {
  fs::create_directory(In("f"));
  ASSERT_EQ(chmod(In("f").c_str(), 0755), 0);
  EXPECT_TRUE(OpenPrivateFolder(In("f"), "cache folder", false).has_value());
  ASSERT_EQ(chmod(In("f").c_str(), 0775), 0);
  Status status = OpenPrivateFolder(In("f"), "cache folder", false).status();
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_NE(status.message().find("mode 0775"), std::string::npos) << status.message();
  ASSERT_EQ(chmod(In("f").c_str(), 0755), 0);
  fs::create_directory_symlink(In("f"), In("link"));
  EXPECT_TRUE(OpenPrivateFolder(In("link"), "cache folder", true).has_value());
  EXPECT_TRUE(OpenPrivateFolder(In("link//"), "cache folder", true).has_value());
  if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: only root can make folders of another user";
  ASSERT_EQ(lchown(In("link").c_str(), kStranger, kStranger), 0);
  EXPECT_EQ(OpenPrivateFolder(In("link"), "cache folder", true).status().code(),
            Code::kPermissionDenied);
  EXPECT_EQ(OpenPrivateFolder(In("link//"), "cache folder", true).status().code(),
            Code::kPermissionDenied);
  ASSERT_EQ(chown(In("f").c_str(), kStranger, kStranger), 0);
  status = OpenPrivateFolder(In("f"), "cache folder", false).status();
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_NE(status.message().find("user 65534"), std::string::npos) << status.message();
}

TEST_F(TrustedFilesTest, OnlyRegularFilesOfThisUser) {
  const mode_t before = umask(0);
  EXPECT_EQ(OpenFile("new", O_RDWR | O_CREAT), 0);
  umask(before);
  EXPECT_EQ(ModeOf("new"), 0600u);
  EXPECT_EQ(OpenFile("none", O_RDONLY), ENOENT);
  const std::string file = Write("file", "text");
  fs::create_symlink(file, In("link"));
  fs::create_symlink(In("nothing"), In("dangling"));
  fs::create_directory(In("folder"));
  fs::create_directory_symlink(root_, In("around"));
  ASSERT_EQ(mkfifo(In("fifo").c_str(), 0600), 0);
  for (const char* name : {"link", "dangling", "folder", "fifo", "around/file"}) {
    for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR | O_CREAT}) {
      EXPECT_EQ(OpenFile(name, flags), EPERM) << name << " " << flags;
    }
  }
  EXPECT_FALSE(fs::exists(In("nothing")));
  ASSERT_EQ(chmod(file.c_str(), 0620), 0);
  EXPECT_EQ(OpenFile("file", O_RDONLY), EPERM);
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  EXPECT_EQ(OpenFile("file", O_RDONLY), 0);
  EXPECT_EQ(ModeOf("file"), 0644u);
  EXPECT_EQ(OpenFile("file", O_RDWR), 0);
  EXPECT_EQ(ModeOf("file"), 0600u) << "whoever writes closes it to others";
  if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: only root can make files of another user";
  ASSERT_EQ(chown(file.c_str(), kStranger, kStranger), 0);
  EXPECT_EQ(OpenFile("file", O_RDWR), EPERM);
  EXPECT_EQ(fs::file_size(file), 4u);
}

TEST_F(TrustedFilesTest, SourceFilesAreRegularButLinksAreFollowed) {
  fs::create_symlink(Write("file", "text"), In("link"));
  const OwnedFd fd = OpenRegularFile(In("link").c_str());
  ASSERT_TRUE(fd.valid());
  EXPECT_EQ(fcntl(fd.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  const auto error = [this](const std::string& name) {
    return OpenRegularFile(name[0] == '/' ? name.c_str() : In(name).c_str()).valid() ? 0 : errno;
  };
  ASSERT_EQ(mkfifo(In("fifo").c_str(), 0600), 0);
  fs::create_symlink(In("fifo"), In("link to fifo"));
  EXPECT_EQ(error("fifo"), ESPIPE);
  EXPECT_EQ(error("link to fifo"), ESPIPE);
  EXPECT_EQ(error("/dev/zero"), ESPIPE);
  EXPECT_EQ(error("none"), ENOENT);
  EXPECT_EQ(error(root_), EISDIR);
}

TEST(LocalFileSystemTest, NetworksAndWhatIsNotKnownAreNotLocal) {
  for (const uint64_t magic : {0xEF53u, 0x58465342u, 0x01021994u}) {
    EXPECT_TRUE(IsLocalFileSystem(magic)) << magic;
  }
  // NFS, Lustre, CIFS, SMB2, Ceph, GPFS, FUSE, 9p, AFS, and nothing.
  for (const uint64_t magic : {0x6969u, 0x0BD00BD0u, 0xFF534D42u, 0xFE534D42u, 0x00C36400u,
                               0x47504653u, 0x65735546u, 0x01021997u, 0x5346414Fu, 0u}) {
    EXPECT_FALSE(IsLocalFileSystem(magic)) << magic;
  }
  EXPECT_FALSE(OnLocalFileSystem(-1));
}

}  // namespace
}  // namespace forebay
