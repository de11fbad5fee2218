#include "files/client.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "files/fake_service.h"
#include "files/identity.h"

namespace forebay::files {
namespace {

std::string All(int fd) {
  std::string text(1 << 16, 0);
  const ssize_t got = read(fd, text.data(), text.size());
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  close(fd);
  return text;
}

class FileClientTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/var/tmp/forebay_client_XXXXXX";
    ASSERT_NE(mkdtemp(pattern), nullptr);
    root_ = pattern;
    std::filesystem::create_directories(root_ + "/cache/copies");
    Result<TableMemory> memory = TableMemory::Make(64);
    ASSERT_TRUE(memory) << memory.error().message();
    memory_.emplace(*std::move(memory));
    table_ = memory_->table();
    socket_ = root_ + "/s";
    const auto gives = Gives();
    ASSERT_TRUE(client_.Start((root_ + "/cache").c_str(), socket_.c_str(), "/data:/other//set/"));
  }
  void TearDown() override {
    client_.Stop();
    std::filesystem::remove_all(root_);
  }

  // Its table, and nothing else.
  std::unique_ptr<FakeService> Gives() {
    return std::make_unique<FakeService>(
        socket_, [](const auto&) { return Say(Answer::kNone); }, &*memory_);
  }
  std::string Copy(const std::string& path, const std::string& ending = "") const {
    char name[kNameLength + 1];
    NameOf(KeyOf(path), name);
    return root_ + "/cache/copies/" + name + ending;
  }
  void Put(const std::string& path, const std::string& text, const std::string& ending = "") const {
    std::ofstream(Copy(path, ending), std::ios::binary) << text;
  }

  std::string root_;
  std::string socket_;
  std::optional<TableMemory> memory_;
  FileTable table_;
  Client client_;
  Client::Found found_ = Client::Found::kCopy;
};

TEST_F(FileClientTest, CoversDataFoldersAndNotTheCache) {
  EXPECT_TRUE(client_.Covers("/data/a"));
  EXPECT_TRUE(client_.Covers("/data"));
  EXPECT_TRUE(client_.Covers("/other/set/b/c"));
  EXPECT_FALSE(client_.Covers("/database"));
  EXPECT_FALSE(client_.Covers("/other"));
  Client all;
  const auto gives = Gives();
  ASSERT_TRUE(all.Start((root_ + "/cache").c_str(), socket_.c_str(), root_.c_str()));
  EXPECT_TRUE(all.Covers(root_ + "/x"));
  EXPECT_FALSE(all.Covers(root_ + "/cache/copies/x"));
  all.Stop();
}

TEST_F(FileClientTest, StaysOffWhenAnythingIsMissing) {
  const std::string cache = root_ + "/cache";
  auto gives = Gives();
  const char* s = socket_.c_str();
  for (const auto& [c, at, f] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {nullptr, s, "/data"},
           {cache.c_str(), nullptr, "/data"},
           {cache.c_str(), s, nullptr},
           {cache.c_str(), s, ""},
           {cache.c_str(), s, "relative"},
           {cache.c_str(), "", "/data"},
           {cache.c_str(), "/nowhere/at/all", "/data"}}) {
    Client client;
    EXPECT_FALSE(client.Start(c, at, f));
    EXPECT_FALSE(client.on());
  }
  // A service that gives no table, or one that is none.
  gives.reset();
  gives = std::make_unique<FakeService>(socket_, [](const auto&) { return Say(Answer::kBad); });
  Client client;
  EXPECT_FALSE(client.Start(cache.c_str(), s, "/data"));
  gives.reset();
  ASSERT_EQ(pwrite(memory_->fd(), "no", 2, offsetof(FileTableHeader, magic)), 2);
  gives = Gives();
  EXPECT_FALSE(client.Start(cache.c_str(), s, "/data"));
}

TEST_F(FileClientTest, ACopyIsOpenedAndCountedWithoutAsking) {
  Put("/data/a", "copied");
  FileSlot* slot = table_.Add(KeyOf("/data/a"), FileState::kKept);
  errno = 77;
  const int fd = client_.OpenCopy("/data/a", O_CLOEXEC, &found_);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(found_, Client::Found::kCopy);
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(All(fd), "copied");
  EXPECT_EQ(slot->opens.load(), 1U);
  char name[Client::kMostCopyPath];
  EXPECT_TRUE(client_.CopyPath("/data/a", name, sizeof(name)));
  EXPECT_EQ(name, Copy("/data/a"));
  EXPECT_FALSE(client_.CopyPath("/data/b", name, sizeof(name)));
  EXPECT_EQ(errno, 77);
}

TEST_F(FileClientTest, AnAliasIsNotFollowedWhereTheProgramSaysSo) {
  Put("/data/real", "copied");
  ASSERT_EQ(symlink(Copy("/data/real").c_str(), Copy("/data/link").c_str()), 0);
  table_.Add(KeyOf("/data/link"), FileState::kKept);
  EXPECT_EQ(All(client_.OpenCopy("/data/link", 0, &found_)), "copied");
  EXPECT_EQ(client_.OpenCopy("/data/link", O_NOFOLLOW, &found_), -1);
  EXPECT_EQ(found_, Client::Found::kSource);
}

TEST_F(FileClientTest, ChangedAndRefusedFilesGoToTheSourceUnasked) {
  FakeService service(socket_, [](const auto&) { return Say(Answer::kReady); });
  for (const FileState state : {FileState::kChanged, FileState::kSource}) {
    const std::string path = "/data/" + std::to_string(static_cast<int>(state));
    Put(path, "old");
    table_.Add(KeyOf(path), state);
    EXPECT_EQ(client_.OpenCopy(path, 0, &found_), -1);
    EXPECT_EQ(found_, Client::Found::kSource);
  }
  EXPECT_TRUE(service.questions().empty());
}

TEST_F(FileClientTest, AMissingCopyIsAskedFor) {
  FakeService service(socket_, [this](const FakeService::Question& question) {
    if (question.path != "/data/a") return Say(Answer::kSource);
    Put("/data/a", "now");
    table_.Add(KeyOf("/data/a"), FileState::kKept);
    return Say(Answer::kReady);
  });
  const int fd = client_.OpenCopy("/data/a", 0, &found_);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(All(fd), "now");
  EXPECT_EQ(table_.Find(KeyOf("/data/a"))->opens.load(), 1U);
  EXPECT_EQ(client_.OpenCopy("/data/b", 0, &found_), -1);
  EXPECT_EQ(found_, Client::Found::kSource);
  const auto asked = service.questions();
  ASSERT_EQ(asked.size(), 2U);
  EXPECT_EQ(asked[0].kind, Kind::kGet);
  EXPECT_EQ(asked[1].path, "/data/b");
}

TEST_F(FileClientTest, ACopyThatIsGoneIsAskedForAgain) {
  FakeService service(socket_, [this](const auto&) {
    Put("/data/a", "again");
    return Say(Answer::kReady);
  });
  table_.Add(KeyOf("/data/a"), FileState::kKept);
  EXPECT_EQ(All(client_.OpenCopy("/data/a", 0, &found_)), "again");
}

// However it ended: here, its thread does without a word.
TEST_F(FileClientTest, OnceTheServiceHasEndedNoCopyIsOpened) {
  Put("/data/a", "copied");
  table_.Add(KeyOf("/data/a"), FileState::kKept);
  Client other;
  {
    const auto gives = Gives();
    ASSERT_TRUE(other.Start((root_ + "/cache").c_str(), socket_.c_str(), "/data"));
  }
  const pid_t service = fork();
  if (service == 0) {
    const TableHold hold(table_);
    raise(SIGKILL);
  }
  ASSERT_GT(service, 0);
  int status = 0;
  ASSERT_EQ(waitpid(service, &status, 0), service);
  EXPECT_TRUE(WIFSIGNALED(status));
  for (Client* client : {&client_, &other}) {
    EXPECT_FALSE(client->on());
    EXPECT_EQ(client->OpenCopy("/data/a", O_CLOEXEC, &found_), -1);
    EXPECT_EQ(found_, Client::Found::kSource);
  }
  EXPECT_FALSE(table_.closed()) << "nobody had to say so";
  other.Stop();
}

TEST_F(FileClientTest, AServiceThatLivesIsUsed) {
  Put("/data/a", "copied");
  table_.Add(KeyOf("/data/a"), FileState::kKept);
  std::thread([&] { const TableHold hold(table_); }).join();  // it ended as it should
  EXPECT_TRUE(client_.on());
  const int fd = client_.OpenCopy("/data/a", O_CLOEXEC, &found_);
  ASSERT_GE(fd, 0);
  close(fd);
}

// A part more is found by who has the table already.
TEST_F(FileClientTest, TheTableGrowsUnderItsClients) {
  Result<TableMemory> memory = TableMemory::Make(FileTable::kFirstSlots * 2);
  ASSERT_TRUE(memory) << memory.error().message();
  memory_.emplace(*std::move(memory));
  FileTable& table = memory_->table();
  Client client;
  {
    const auto gives = Gives();
    ASSERT_TRUE(client.Start((root_ + "/cache").c_str(), socket_.c_str(), "/data"));
  }
  struct stat st = {};
  ASSERT_EQ(fstat(memory_->fd(), &st), 0);
  EXPECT_EQ(static_cast<uint64_t>(st.st_blocks) * 512, FileTable::kFirstSlots * 32 + 4096);
  const auto path = [](uint64_t i) { return "/data/" + std::to_string(i); };
  std::vector<FileSlot*> slots;
  while (FileSlot* slot = table.Add(KeyOf(path(slots.size())), FileState::kKept)) {
    slots.push_back(slot);
  }
  EXPECT_EQ(slots.size(), FileTable::kFirstSlots / 4 * 3);
  ASSERT_TRUE(memory_->Grow());
  FileSlot* slot = table.Add(KeyOf(path(slots.size())), FileState::kKept);
  ASSERT_NE(slot, nullptr);
  slots.push_back(slot);
  EXPECT_TRUE(client.Knows(path(slots.size() - 1)));
  EXPECT_FALSE(client.Knows(path(slots.size())));
  for (uint64_t i = 0; i < slots.size(); ++i) ASSERT_EQ(table.Find(KeyOf(path(i))), slots[i]);
  EXPECT_FALSE(memory_->Grow()) << "it has all that it may have";
  EXPECT_NE(ftruncate(memory_->fd(), 0), 0) << "a client could end the others";
  client.Stop();
}

// Such a program tells of no changes.
TEST_F(FileClientTest, WhoCannotMapTheTableIsNotTrusted) {
  const auto gives = Gives();
  const std::string cache = root_ + "/cache";
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit = {.rlim_cur = 1, .rlim_max = 1};
    (void)setrlimit(RLIMIT_AS, &limit);
    Client client;
    _exit(client.Start(cache.c_str(), socket_.c_str(), "/data") ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(client_.unwatched());
}

TEST_F(FileClientTest, WithoutMemoryThereIsNoTable) {
  const pid_t child = fork();
  if (child == 0) {
    (void)std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {.rlim_cur = 1 << 16, .rlim_max = 1 << 16};
    (void)setrlimit(RLIMIT_FSIZE, &limit);
    const Result<TableMemory> made = TableMemory::Make(1 << 21);
    _exit(!made && made.error().message().find("gets no memory") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(FileClientTest, WithoutAServiceTheSourceIsOpened) {
  EXPECT_EQ(client_.OpenCopy("/data/a", 0, &found_), -1);
  EXPECT_EQ(found_, Client::Found::kSource);
  // One that hangs up, too.
  FakeService service(socket_, [](const auto&) { return Say(Answer::kNone); });
  EXPECT_EQ(client_.OpenCopy("/data/a", 0, &found_), -1);
  EXPECT_EQ(found_, Client::Found::kSource);
  EXPECT_TRUE(client_.on());
}

TEST_F(FileClientTest, AChangeIsToldAndAKnownOneIsNotToldTwice) {
  FakeService service(socket_, [this](const FakeService::Question& question) {
    table_.Add(KeyOf(question.path), FileState::kChanged);
    return Say(Answer::kReady);
  });
  client_.FileChanged("/data/a");
  client_.FileChanged("/data/a");
  client_.Changed("/data/a");
  const auto asked = service.questions();
  ASSERT_EQ(asked.size(), 2U);
  EXPECT_EQ(asked[0].kind, Kind::kChanged);
  EXPECT_TRUE(client_.on());
}

TEST_F(FileClientTest, AChangeThatNobodyHearsClosesTheTable) {
  Put("/data/a", "copied");
  table_.Add(KeyOf("/data/a"), FileState::kKept);
  client_.Changed("/data/b");
  EXPECT_FALSE(client_.on());
  EXPECT_TRUE(table_.closed());
  EXPECT_EQ(client_.OpenCopy("/data/a", 0, &found_), -1);
}

TEST_F(FileClientTest, PartsOfALargeFileComeAsTheyAreCopied) {
  const std::string text(3 << 20, 'x');
  FakeService service(socket_, [&](const FakeService::Question& question) {
    if (question.kind == Kind::kGet) return Say(Answer::kPartial, text.size());
    return Say(question.a < (2 << 20) ? Answer::kReady : Answer::kSource);
  });
  uint64_t size = 0;
  EXPECT_EQ(client_.OpenCopy("/data/a", 0, &found_, &size), -1);
  EXPECT_EQ(found_, Client::Found::kPartial);
  EXPECT_EQ(size, text.size());
  Put("/data/a", text, ".part");
  FileSlot* slot = table_.Add(KeyOf("/data/a"), FileState::kComing);
  Client::Seen seen;
  char out[4096];
  for (uint64_t offset : {0, 4096, 8192}) {
    EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), offset, &seen), 4096);
  }
  ASSERT_EQ(service.questions().size(), 2U);  // one for the whole block
  EXPECT_EQ(service.questions()[1].b, sizeof(out));
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 2 << 20, &seen), -EAGAIN);
  // Complete meanwhile: the last name, and nobody is asked.
  std::filesystem::rename(Copy("/data/a", ".part"), Copy("/data/a"));
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 100, &seen), 4096);
  FileTable::Set(*slot, FileState::kKept);
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), (3 << 20) - 10, &seen), 10);
  EXPECT_EQ(service.questions().size(), 3U);
  FileTable::Set(*slot, FileState::kChanged);
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, &seen), -EAGAIN);
}

TEST_F(FileClientTest, AnotherPartOfTheSameNameIsAskedAbout) {
  FileSlot* slot = table_.Add(KeyOf("/data/a"), FileState::kComing);
  FileSlot* other = table_.Add(KeyOf("/data/b"), FileState::kComing);
  Put("/data/a", std::string(8192, 'x'), ".part");
  Put("/data/b", std::string(8192, 'y'), ".part");
  std::atomic<bool> another{false};  // read by the service's thread
  FakeService service(socket_, [&](const FakeService::Question&) {
    // It goes while the answer is under way, and one with holes takes its name.
    if (another) slot->parts.fetch_add(1);
    return Say(Answer::kReady);
  });
  Client::Seen seen;
  char out[4096];
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, &seen), 4096);
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, &seen), 4096);
  EXPECT_EQ(service.questions().size(), 1U);
  slot->parts.fetch_add(1);
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, &seen), 4096);
  EXPECT_EQ(service.questions().size(), 2U);
  // What was seen of one file says nothing of another.
  EXPECT_EQ(client_.ReadPart("/data/b", out, sizeof(out), 0, &seen), 4096);
  EXPECT_EQ(service.questions().size(), 3U);
  another = true;
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, nullptr), -EAGAIN);
  FileTable::Set(*other, FileState::kChanged);
  EXPECT_EQ(client_.ReadPart("/data/b", out, sizeof(out), 0, &seen), -EAGAIN);
}

TEST_F(FileClientTest, APartThatIsCompletedWhileItIsReadIsNotReadFromTheSource) {
  FileSlot* slot = table_.Add(KeyOf("/data/a"), FileState::kComing);
  Put("/data/a", std::string(8192, 'x'), ".part");
  Put("/data/a", std::string(8192, 'y'));
  FakeService service(socket_, [&](const FakeService::Question&) {
    slot->parts.fetch_add(1);
    FileTable::Set(*slot, FileState::kKept);
    return Say(Answer::kReady);
  });
  char out[4096];
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, nullptr), 4096);
  EXPECT_EQ(out[0], 'y');
  EXPECT_EQ(service.questions().size(), 1U);
}

TEST_F(FileClientTest, AReadThatPassesByIsToldAndDoesNotWait) {
  FileSlot* slot = table_.Add(KeyOf("/data/a"), FileState::kPassedBy);
  Put("/data/a", std::string(8192, 'x'), ".part");
  FakeService service(socket_, [&](const FakeService::Question&) { return Say(Answer::kNone); });
  char out[4096];
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 4096, nullptr), -EAGAIN);
  while (service.questions().empty()) std::this_thread::yield();
  EXPECT_EQ(service.questions()[0].kind, Kind::kRange);
  EXPECT_EQ(service.questions()[0].a, 4096U);
  EXPECT_EQ(service.questions()[0].b, sizeof(out));
  FileTable::Set(*slot, FileState::kSource);
  EXPECT_EQ(client_.ReadPart("/data/a", out, sizeof(out), 0, nullptr), -EAGAIN);
  EXPECT_EQ(service.questions().size(), 1U);
}

TEST_F(FileClientTest, AServiceThatKeptSomebodyWaitingIsLeftAlone) {
  FakeService service(socket_, [](const FakeService::Question&) { return Say(Answer::kSource); });
  EXPECT_EQ(client_.OpenCopy("/data/a", 0, &found_), -1);
  EXPECT_EQ(service.questions().size(), 1U);
  table_.KeepQuiet(INT64_MAX);
  EXPECT_EQ(client_.OpenCopy("/data/a", 0, &found_), -1);
  EXPECT_EQ(service.questions().size(), 1U);
  client_.Changed("/data/a");  // it is told all the same
  EXPECT_EQ(service.questions().size(), 2U);
}

TEST_F(FileClientTest, ThreadsAndChildrenOpenAtOnce) {
  FakeService service(socket_, [this](const FakeService::Question& question) {
    Put(question.path, question.path);
    return Say(Answer::kReady);
  });
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string path = "/data/" + std::to_string(t) + "-" + std::to_string(i);
        Client::Found found{};
        if (All(client_.OpenCopy(path, 0, &found)) != path) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  const pid_t child = fork();
  if (child == 0) {
    Client::Found found{};
    const int fd = client_.OpenCopy("/data/child", 0, &found);
    _exit(fd >= 0 && All(fd) == "/data/child" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(FileIdentity, TravelsWithTheCopy) {
  std::string path = "/var/tmp/forebay_client_XXXXXX";  // has extended attributes
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  Identity none;
  EXPECT_NE(ReadIdentity(fd, &none), 0);
  Identity identity;
  identity.stat.st_ino = 1234;
  identity.stat.st_size = 99;
  std::strcpy(identity.path, "/data/a");
  identity.path_length = 7;
  ASSERT_EQ(WriteIdentity(fd, identity), 0);
  Identity read_back;
  ASSERT_EQ(ReadIdentity(fd, &read_back), 0);
  EXPECT_EQ(read_back.stat.st_ino, 1234U);
  EXPECT_STREQ(read_back.path, "/data/a");
  ASSERT_EQ(ReadIdentityAt(path.c_str(), &read_back), 0);
  close(fd);
  unlink(path.c_str());
}

}  // namespace
}  // namespace forebay::files
