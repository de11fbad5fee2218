#include "files/read_progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "base/owned.h"

namespace forebay::files {
namespace {

constexpr size_t kBytes = 1 << 20;

class ReadProgressTest : public ::testing::Test {
 protected:
  ReadProgressTest() {
    char name[] = "/tmp/forebay_progress_XXXXXX";
    file_ = OwnedFd(mkstemp(name));
    unlink(name);
    const std::string bytes(kBytes, 'x');
    EXPECT_EQ(write(file_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(kBytes));
    map_ = static_cast<const volatile char*>(
        mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, file_.get(), 0));
  }
  ~ReadProgressTest() override { munmap(const_cast<char*>(map_), kBytes); }
  void Touch() const {
    for (size_t at = 0; at < kBytes; at += 4096) (void)map_[at];
  }

  OwnedFd file_;
  const volatile char* map_;
};

TEST_F(ReadProgressTest, AMappingThatIsReadMakesProgress) {
  // Without reads it stays as it is, once what it needs of the program itself is there.
  ReadProgress before = MappingProgress(getpid());
  int tries = 0;
  for (ReadProgress now = MappingProgress(getpid()); now.mark != before.mark && tries < 1000;
       now = MappingProgress(getpid()), ++tries) {
    before = now;
  }
  EXPECT_LT(tries, 1000);
  EXPECT_NE(before.mark, 0U);
  Touch();
  const ReadProgress after = MappingProgress(getpid());
  EXPECT_NE(after.mark, before.mark);
  EXPECT_GE(after.bytes, before.bytes + kBytes / 2);  // the kernel counts roughly
}

TEST_F(ReadProgressTest, SoDoesOneThatWasForked) {
  int go[2];
  int done[2];
  ASSERT_EQ(pipe(go), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  char byte = 0;
  if (child == 0) {
    while (read(go[0], &byte, 1) == 1) {
      Touch();
      if (write(done[1], &byte, 1) != 1) break;
    }
    _exit(0);
  }
  (void)MappingProgress(getpid());
  const uint64_t before = MappingProgress(getpid()).mark;
  ASSERT_EQ(write(go[1], "x", 1), 1);
  ASSERT_EQ(read(done[0], &byte, 1), 1);
  EXPECT_NE(MappingProgress(getpid()).mark, before);
  EXPECT_NE(MappingProgress(child).mark, 0U);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(MappingProgress(child).mark, 0U);
  for (const int fd : {go[0], go[1], done[0], done[1]}) close(fd);
}

TEST_F(ReadProgressTest, ADescriptorIsWhereItsReaderIs) {
  lseek(file_.get(), 0, SEEK_SET);
  EXPECT_EQ(DescriptorProgress(getpid(), file_.get()).mark, 1U);
  char bytes[100];
  ASSERT_EQ(read(file_.get(), bytes, sizeof bytes), 100);
  EXPECT_EQ(DescriptorProgress(getpid(), file_.get()).mark, 101U);
  const int fd = dup(file_.get());
  close(fd);
  EXPECT_EQ(DescriptorProgress(getpid(), fd).mark, 0U);
}

}  // namespace
}  // namespace forebay::files
