#include "files/service.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "files/client.h"
#include "files/copier.h"
#include "files/engine_supply.h"
#include "files/identity.h"
#include "files/packet.h"
#include "files/session.h"
#include "wire/socket.h"

namespace forebay::files {
namespace {

using Found = Client::Found;

std::string Pattern(size_t bytes, unsigned seed = 1) {
  std::string out(bytes, 0);
  for (char& c : out) c = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return out;
}

std::string Contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

class FileServiceTest : public ::testing::Test {
 protected:
  FileServiceTest() {
    char name[] = "/var/tmp/forebay_files_XXXXXX";
    root_ = mkdtemp(name);
    std::filesystem::create_directory(root_ + "/data");
    options_.cache = root_ + "/cache";
    options_.socket = root_ + "/s";
    options_.sources = {root_ + "/data"};
    options_.cache_bytes = 64 << 20;
    options_.slots = 1 << 12;
    options_.young = 0;
    options_.say = [this](const std::string&) { ++said_; };
  }
  ~FileServiceTest() override {
    client_.reset();
    session_.reset();
    Stop();
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  void Stop() {
    service_.reset();
    supply_.reset();
    engine_.reset();
  }

  // What the copies that stay lie in.
  std::string StoreFolder() const { return root_ + "/store"; }

  void StartEngine() {
    EngineOptions options;
    options.memory = 64 << 20;
    options.cache_folder = options_.store = StoreFolder();
    options.cache_bytes = std::max<uint64_t>(options_.cache_bytes, 1 << 20);
    Result<EnginePtr> engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.error().ToString();
    engine_ = *std::move(engine);
    // Reads are counted.
    ASSERT_TRUE(engine_->registry().SetKnob("hedge_one_in", 0).ok());
    supply_ = std::make_unique<EngineSupply>(*engine_, "test");
    options_.supply = supply_.get();
    options_.registry = &engine_->registry();
  }

  void Start() {
    client_.reset();
    session_.reset();
    Stop();
    StartEngine();
    Result<std::unique_ptr<Service>> service = Service::Start(options_);
    ASSERT_TRUE(service) << service.error().ToString();
    service_ = *std::move(service);
    Result<std::unique_ptr<Session>> session = Session::Connect(options_.socket, 10 * kSecond);
    ASSERT_TRUE(session) << session.error().ToString();
    session_ = *std::move(session);
    ASSERT_TRUE(session_->Hello({}).ok());
    client_ = std::make_unique<Client>();
    ASSERT_TRUE(client_->Start(options_.cache.c_str(), options_.socket.c_str(),
                               options_.sources[0].c_str()));
  }

  std::string Path(const std::string& name) const { return root_ + "/data/" + name; }
  std::string Write(const std::string& name, const std::string& bytes) const {
    const std::string path = Path(name);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  // What a program reads through the copy, or "source".
  std::string Read(const std::string& path) const {
    Found found = Found::kSource;
    const OwnedFd fd(client_->OpenCopy(path, O_CLOEXEC, &found));
    if (!fd.valid()) return found == Found::kPartial ? "partial" : "source";
    struct stat st = {};
    EXPECT_EQ(fstat(fd.get(), &st), 0);
    std::string out(static_cast<size_t>(st.st_size) + 1, 0);
    const ssize_t n = pread(fd.get(), out.data(), out.size(), 0);
    out.resize(n < 0 ? 0 : static_cast<size_t>(n));
    return out;
  }
  uint64_t Value(const std::string& name) const {
    const bool of_engine = name.starts_with("source_read");
    for (const auto& sample : service_->registry().Snapshot()) {
      if (sample.name == (of_engine ? "forebay_" : "forebay_files_") + name) return sample.value;
    }
    ADD_FAILURE() << name;
    return 0;
  }
  // 0: no limit.
  Status LimitReads(uint64_t bytes_per_second) {
    const std::vector<std::string> settings = {
        StrCat("source_bytes_per_second=", bytes_per_second)};
    return session_->SetKnobs(settings);
  }
  static constexpr size_t kSlowFileBytes = 5 << 20;  // which takes several reads
  // As a program does; `closed`: how it does not wait for the answer. Not valid when none came.
  OwnedFd AskTable(int closed) const {
    OwnedFd out;
    const OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const Result<sockaddr_un> address = wire::SocketAddress(options_.socket);
    EXPECT_TRUE(address);
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address), 0);
    if (closed >= 0) (void)shutdown(fd.get(), closed);
    const std::vector<std::byte> packet = PathsPacket(Kind::kTable, {});
    EXPECT_EQ(send(fd.get(), packet.data(), packet.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(packet.size()));
    pollfd ready = {fd.get(), POLLIN, 0};
    EXPECT_EQ(poll(&ready, 1, 10'000), 1);
    Header header;
    (void)wire::ReceiveDescriptor(fd.get(), std::as_writable_bytes(std::span(&header, 1)), &out);
    return out;
  }
  // Waits for what comes by itself.
  template <typename Condition>
  static bool Soon(Condition condition) {
    for (int i = 0; i < 2000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  size_t Copies() const {
    size_t count = 0;
    for (const auto& each : std::filesystem::directory_iterator(options_.cache + "/copies")) {
      (void)each;
      ++count;
    }
    return count;
  }

  std::string root_;
  ServiceOptions options_;
  std::atomic<size_t> said_ = 0;  // lines, by the service's own thread
  EnginePtr engine_;
  std::unique_ptr<EngineSupply> supply_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Client> client_;
};

TEST_F(FileServiceTest, AFileThatDoesNotSayHowLongItIsIsLeftToTheSource) {
  options_.sources = {"/proc/sys/kernel"};
  Start();
  EXPECT_EQ(Read("/proc/sys/kernel/ostype"), "source");
  EXPECT_EQ(Value("kept_total"), 0);
}

TEST_F(FileServiceTest, ItEndsWhenItsFolderIsGone) {
  const std::string path = Write("a", "of the source");
  for (const bool whole : {true, false}) {
    Start();
    EXPECT_EQ(Read(path), "of the source");
    session_.reset();
    if (whole) {
      std::filesystem::remove_all(options_.cache);
      std::filesystem::create_directory(options_.cache);
    } else {
      for (const auto& each : std::filesystem::directory_iterator(options_.cache)) {
        std::filesystem::remove_all(each.path());
      }
    }
    auto session = Session::Connect(options_.socket, 10 * kSecond);
    ASSERT_TRUE(session) << session.error().ToString();
    EXPECT_EQ((*session)->Hello({}).code(), Code::kUnavailable);
    pollfd ended = {service_->ended_fd(), POLLIN, 0};
    EXPECT_EQ(poll(&ended, 1, 10'000), 1);
    EXPECT_EQ(Read(path), "source");  // nobody is served old copies
  }
  options_.temporary = true;
  Start();
  EXPECT_EQ(Read(path), "of the source");
  EXPECT_EQ(Value("kept_total"), 0U);  // the store has it still
  // Another's folder of that name stays.
  std::filesystem::remove_all(options_.cache);
  std::filesystem::create_directory(options_.cache);
  service_.reset();
  EXPECT_TRUE(std::filesystem::exists(options_.cache));
}

TEST_F(FileServiceTest, AFileIsReadOnceAndOpenedByItsCopy) {
  const std::string bytes = Pattern(100'000);
  const std::string path = Write("a/b.jpg", bytes);
  const std::string empty = Write("empty", "");
  Start();
  EXPECT_TRUE(Read(path) == bytes);
  EXPECT_TRUE(Read(path) == bytes);
  EXPECT_EQ(Read(empty), "");
  EXPECT_EQ(Value("source_reads_total"), 1);
  EXPECT_EQ(Value("source_opens_total"), 2);
  EXPECT_EQ(Value("kept_total"), 2);
  Found found = Found::kSource;
  const OwnedFd fd(client_->OpenCopy(path, 0, &found));
  struct stat copy = {};
  struct stat source = {};
  ASSERT_EQ(fstat(fd.get(), &copy), 0);
  ASSERT_EQ(stat(path.c_str(), &source), 0);
  EXPECT_TRUE(MayBeCopy(copy.st_mode));
  Identity identity;
  ASSERT_EQ(ReadIdentity(fd.get(), &identity), 0);
  EXPECT_STREQ(identity.path, path.c_str());
  EXPECT_EQ(identity.stat.st_ino, source.st_ino);
  EXPECT_EQ(identity.stat.st_mtim.tv_nsec, source.st_mtim.tv_nsec);
}

TEST_F(FileServiceTest, ManyWhoAskAtOnceCostOneRead) {
  std::vector<std::string> paths;
  for (int i = 0; i < 20; ++i) {
    paths.push_back(Write(StrCat("f", i), Pattern(5000, static_cast<unsigned>(i))));
  }
  Start();
  std::vector<std::thread> readers;
  for (int t = 0; t < 8; ++t) {
    readers.emplace_back([&] {
      for (size_t i = 0; i < paths.size(); ++i) {
        EXPECT_TRUE(Read(paths[i]) == Pattern(5000, static_cast<unsigned>(i)));
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(Value("source_reads_total"), 20);
}

TEST_F(FileServiceTest, WhatIsNoPlainFileIsLeftToTheSource) {
  const std::string path = Write("real", "bytes");
  std::filesystem::create_hard_link(path, Path("second"));
  std::filesystem::create_directory(Path("folder"));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("/etc/passwd", Path("outside"));
  Start();
  // A writer that has the pipe open must not see a reader come and go.
  const OwnedFd keep(open(Path("pipe").c_str(), O_RDWR | O_NONBLOCK));
  for (const char* name : {"real", "second", "folder", "pipe", "outside", "missing"}) {
    EXPECT_EQ(Read(Path(name)), "source") << name;
  }
  EXPECT_EQ(Read("/etc/passwd"), "source");
  EXPECT_EQ(Value("source_opens_total"), 0);
  EXPECT_EQ(Value("kept_total"), 0);
}

TEST_F(FileServiceTest, AFileThatHasJustChangedIsLeftAlone) {
  options_.young = 3600 * kSecond;
  const std::string path = Write("new", "bytes");
  Start();
  EXPECT_EQ(Read(path), "source");
  EXPECT_EQ(Value("source_opens_total"), 0);
}

// A supply whose reads wait until they are let go, as of a mount whose server has gone.
class HungSupply : public FileSupply {
 public:
  Status AddSource(const std::string&, const std::string&) override { return Status(); }
  Result<FileLoan> Read(const std::string&, const std::shared_ptr<const SourceFile>&, const Extent&,
                        const Purpose&, const std::stop_token&) override {
    reading_.store(true);
    reading_.notify_all();
    hangs_.wait(true);
    return Status(Code::kUnavailable, "it came back");
  }
  void OpenJob(JobNumber, const std::string&) override {}
  void CloseJob(JobNumber) override {}
  bool opens_files() const override { return true; }
  Status LinkCopy(const std::string&, const SourceFile&, int, const char*) override {
    return Status(Code::kNotFound, "none");
  }
  Status KeepCopy(const std::string&, const SourceFile&, int, const char*, uint32_t) override {
    return Status();
  }
  void DropCopy(const std::string&, const SourceFile&) override {}
  void Forget(const std::string&) override {}
  void Removed(const FileKey&) override {}
  bool CopiesAnswer() override { return answers_.load(); }
  std::vector<FileKey> TakeUnlinks() override { return {}; }

  void AwaitRead() { reading_.wait(false); }
  void SetCopiesAnswer(bool answers) { answers_.store(answers); }
  void LetGo() {
    hangs_.store(false);
    hangs_.notify_all();
  }

 private:
  void Release(uint64_t) override {}
  std::atomic<bool> reading_ = false;
  std::atomic<bool> hangs_ = true;
  std::atomic<bool> answers_ = true;
};

// A supply that hangs while it keeps a copy, as on a disk that does not answer.
class HungKeep final : public HungSupply {
 public:
  Result<FileLoan> Read(const std::string&, const std::shared_ptr<const SourceFile>&,
                        const Extent& extent, const Purpose&, const std::stop_token&) override {
    return FileLoan(std::vector<std::byte>(extent.bytes), StallCause::kSource);
  }
  Status KeepCopy(const std::string& path, const SourceFile&, int, const char*, uint32_t) override {
    return HungSupply::Read(path, nullptr, {}, {}, {}).status();
  }
};

// Whoever hangs while it publishes a copy holds nobody up who tells of a change.
TEST_F(FileServiceTest, AChangeIsTakenWhileACopyIsPublishedOnADiskThatHangs) {
  const std::string path = Write("a", "bytes");
  HungKeep hung;
  Registry registry;
  options_.store = StoreFolder();
  options_.supply = &hung;
  options_.registry = &registry;
  auto service = Service::Start(options_);
  ASSERT_TRUE(service) << service.error().ToString();
  std::thread reader([&] {
    Client client;
    ASSERT_TRUE(
        client.Start(options_.cache.c_str(), options_.socket.c_str(), options_.sources[0].c_str()));
    Found found = Found::kCopy;
    EXPECT_EQ(client.OpenCopy(path, O_CLOEXEC, &found), -1);
    EXPECT_EQ(found, Found::kSource);
  });
  hung.AwaitRead();
  auto session = Session::Connect(options_.socket, 10 * kSecond, 0);
  ASSERT_TRUE(session) << session.error().ToString();
  EXPECT_TRUE((*session)->Changed(path).ok());
  reader.join();
  hung.LetGo();
  const std::string copy = StrCat(options_.cache, "/copies/", Copier::NameIn(KeyOf(path)));
  EXPECT_TRUE(Soon([&] { return access(copy.c_str(), F_OK) != 0; })) << "it is not taken back";
  session->reset();
  service->reset();
}

// A program that starts without the table tells of no changes.
TEST_F(FileServiceTest, WhoDoesNotTakeTheTableIsNotTrusted) {
  Start();
  Client client;
  ASSERT_TRUE(
      client.Start(options_.cache.c_str(), options_.socket.c_str(), options_.sources[0].c_str()));
  EXPECT_TRUE(AskTable(-1).valid());
  EXPECT_FALSE(client.unwatched());
  EXPECT_FALSE(AskTable(SHUT_RD).valid());
  EXPECT_TRUE(Soon([&] { return client.unwatched(); }));
  EXPECT_TRUE(client.on());
}

TEST_F(FileServiceTest, ASourceThatHangsKeepsTheFolderFromNobody) {
  const std::string path = Write("a", "bytes");
  HungSupply hung;
  Registry registry;
  options_.store = StoreFolder();
  options_.supply = &hung;
  options_.registry = &registry;
  auto first = Service::Start(options_);
  ASSERT_TRUE(first) << first.error().ToString();
  std::thread reader([&] {
    Client client;
    ASSERT_TRUE(
        client.Start(options_.cache.c_str(), options_.socket.c_str(), options_.sources[0].c_str()));
    Found found = Found::kSource;
    EXPECT_EQ(client.OpenCopy(path, O_CLOEXEC, &found), -1);
  });
  hung.AwaitRead();
  EXPECT_FALSE((*first)->End(10 * kMilli));
  reader.join();  // it reads the source by itself
  // The next one has the folder and the socket, while a thread of the first waits.
  Start();
  EXPECT_EQ(Read(path), "bytes");
  hung.LetGo();
  first->reset();
  EXPECT_EQ(Read(path), "bytes");
  EXPECT_EQ(Read(Write("b", "more")), "more");
}

// Who waits for a copy, and who opens a file later, goes to the source without the ten seconds that
// a service is waited for; those seconds are this test's own limit.
TEST_F(FileServiceTest, WhileTheDiskOfTheCopiesHangsFilesAreOpenedAtTheSource) {
  const std::string path = Write("a", "bytes");
  HungSupply hung;
  Registry registry;
  options_.store = StoreFolder();
  options_.supply = &hung;
  options_.registry = &registry;
  auto service = Service::Start(options_);
  ASSERT_TRUE(service) << service.error().ToString();
  Client client;
  ASSERT_TRUE(
      client.Start(options_.cache.c_str(), options_.socket.c_str(), options_.sources[0].c_str()));
  EXPECT_TRUE(client.uses_copies());
  std::thread waits([&] {
    Found found = Found::kCopy;
    EXPECT_EQ(client.OpenCopy(path, O_CLOEXEC, &found), -1);
    EXPECT_EQ(found, Found::kSource);
    EXPECT_FALSE(client.uses_copies());
  });
  hung.AwaitRead();
  hung.SetCopiesAnswer(false);
  waits.join();
  // Whoever waits for as long as for a service that is gone says so to all others.
  const OwnedFd table = AskTable(-1);
  int64_t quiet_until = -1;
  ASSERT_EQ(pread(table.get(), &quiet_until, sizeof quiet_until,
                  offsetof(FileTableHeader, quiet_until_ms)),
            static_cast<ssize_t>(sizeof quiet_until));
  EXPECT_EQ(quiet_until, 0);
  Found found = Found::kCopy;
  EXPECT_EQ(client.OpenCopy(path, O_CLOEXEC, &found), -1);
  EXPECT_EQ(found, Found::kSource);
  char byte = 0;
  EXPECT_EQ(client.ReadPart(path, &byte, 1, 0), -EAGAIN);
  EXPECT_FALSE(client.AwaitAll(path, 5));
  EXPECT_TRUE(client.on()) << "what changes is told all the same";
  hung.SetCopiesAnswer(true);
  ASSERT_TRUE(Soon([&] { return client.uses_copies(); })) << "never used again";
  hung.LetGo();
  service->reset();
}

// The source's clock is an hour ahead: what it has just written is of a time to come.
TEST_F(FileServiceTest, AFileOfAnotherClockIsCopiedAfterASecondLook) {
  options_.young = 100 * kMilli;
  const std::string path = Write("ahead", "bytes");
  const auto set_ahead = [&] {
    struct stat st = {};
    ASSERT_EQ(stat(path.c_str(), &st), 0);
    const timespec times[2] = {st.st_atim, {st.st_ctim.tv_sec + 3600, st.st_ctim.tv_nsec}};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  set_ahead();
  Start();
  EXPECT_EQ(Read(path), "source");
  Write("ahead", "other");  // so the second look is a first one
  set_ahead();
  ASSERT_TRUE(Soon([&] { return Read(path) != "source"; })) << "never trusted";
  EXPECT_EQ(Read(path), "other");
  EXPECT_EQ(Value("kept_total"), 1);
}

// For a run that comes while another one has a part of a large file, which changed between.
TEST_F(FileServiceTest, APartIsComparedForWhoComesLater) {
  options_.partial_bytes = 4 << 20;
  options_.cache_bytes = 4 << 20;  // so that it never becomes complete
  const std::string bytes = Pattern(9 << 20);
  const std::string same = Write("same", bytes);
  const std::string path = Write("shard", bytes);
  Start();
  std::string out(100'000, 0);
  for (const std::string& each : {same, path}) {
    ASSERT_EQ(Read(each), "partial");
    ASSERT_EQ(client_->ReadPart(each, out.data(), out.size(), 0), 100'000);
    EXPECT_TRUE(out == bytes.substr(0, out.size()));
  }
  const std::string other = Pattern(9 << 20, 2);
  Write("shard", other);
  auto next = Session::Connect(options_.socket, 10 * kSecond);
  ASSERT_TRUE(next && (*next)->Hello({}).ok());
  for (int i = 0; i < 20; ++i) {
    if (Read(path) != "partial") continue;
    const int64_t n = client_->ReadPart(path, out.data(), out.size(), 0);
    if (n <= 0) continue;
    const auto got = static_cast<size_t>(n);
    EXPECT_TRUE(out.substr(0, got) == other.substr(0, got)) << "of the file as it was";
  }
  // What has not changed is served on.
  ASSERT_TRUE(Soon([&] { return Read(same) == "partial"; }));
  ASSERT_EQ(client_->ReadPart(same, out.data(), out.size(), 0), 100'000);
  EXPECT_TRUE(out == bytes.substr(0, out.size()));
}

TEST_F(FileServiceTest, ALinkThatWasMovedIsFollowedForWhoComesLater) {
  const std::string first = Write("first", "1st");
  Write("second", "2nd");
  std::filesystem::create_symlink("first", Path("link"));
  Start();
  EXPECT_EQ(Read(Path("link")), "1st");
  std::filesystem::create_symlink("second", Path("beside"));
  std::filesystem::rename(Path("beside"), Path("link"));
  auto next = Session::Connect(options_.socket, 10 * kSecond);
  ASSERT_TRUE(next && (*next)->Hello({}).ok());
  EXPECT_EQ(Read(Path("link")), "2nd");
  EXPECT_EQ(Read(first), "1st");
  // A change under the new name is one of the new file.
  ASSERT_TRUE(session_->Changed(Path("second")).ok());
  EXPECT_EQ(Read(Path("link")), "source");
  EXPECT_EQ(Read(first), "1st");
}

TEST_F(FileServiceTest, LinksAreAliasesOfTheRealFile) {
  const std::string path = Write("real/file", "bytes");
  std::filesystem::create_directory_symlink(Path("real"), Path("link"));
  std::filesystem::create_symlink(path, Path("name"));
  Start();
  EXPECT_EQ(Read(Path("link/file")), "bytes");
  EXPECT_EQ(Read(Path("name")), "bytes");
  EXPECT_EQ(Read(path), "bytes");
  EXPECT_EQ(Value("source_reads_total"), 1);
  Found found = Found::kSource;
  EXPECT_EQ(client_->OpenCopy(Path("name"), O_NOFOLLOW, &found), -1);
  // A change under one name is one under all.
  ASSERT_TRUE(session_->Changed(Path("link/file")).ok());
  EXPECT_EQ(Read(path), "source");
  EXPECT_EQ(Read(Path("name")), "source");
  EXPECT_EQ(Read(Path("link/file")), "source");
}

TEST_F(FileServiceTest, WhatIsChangedIsNeverCopiedAgain) {
  const std::string one = Write("d/one", "1");
  const std::string two = Write("d/e/two", "2");
  const std::string other = Write("dx", "3");
  Start();
  EXPECT_EQ(Read(one), "1");
  EXPECT_EQ(Read(two), "2");
  EXPECT_EQ(Read(other), "3");
  ASSERT_TRUE(session_->Changed(one).ok());
  EXPECT_EQ(Read(one), "source");
  EXPECT_EQ(Read(two), "2");
  ASSERT_TRUE(session_->Changed(Path("d")).ok());
  EXPECT_EQ(Copies(), 1);
  EXPECT_EQ(Read(two), "source");
  EXPECT_EQ(Read(Write("d/new", "4")), "source");
  EXPECT_EQ(Read(other), "3");
  // One that was never seen before.
  ASSERT_TRUE(session_->Changed(Path("unseen")).ok());
  EXPECT_EQ(Read(Write("unseen", "5")), "source");
}

TEST_F(FileServiceTest, WhatDoesNotFitIsLeftToTheSource) {
  options_.cache_bytes = 3 * 4096;
  Start();
  size_t kept = 0;
  for (int i = 0; i < 10; ++i) {
    const std::string path = Write(StrCat("f", i), Pattern(4000, static_cast<unsigned>(i)));
    kept += Read(path) != "source" ? 1 : 0;
  }
  EXPECT_EQ(kept, 3);
  EXPECT_EQ(Value("kept_bytes"), 3 * 4096);
  EXPECT_LE(Value("source_opens_total"), 4);  // once it is full, nothing is tried
  EXPECT_EQ(Value("source_reads_total"), 3);
}

TEST_F(FileServiceTest, AnnouncedFilesAreStagedAheadAndGoWhenTheyWereOpened) {
  constexpr int kFiles = 60;
  options_.cache_bytes = 20 * 4096;
  options_.ahead_bytes = 8 * 4096;
  std::vector<std::string> paths;
  std::vector<uint32_t> order;
  for (int i = 0; i < kFiles; ++i) {
    paths.push_back(Write(StrCat("f", i), Pattern(4000, static_cast<unsigned>(i))));
    order.push_back(static_cast<uint32_t>(i));
  }
  Start();
  auto stream = *Session::Connect(options_.socket, 10 * kSecond);
  const std::vector<std::string_view> names(paths.begin(), paths.end());
  ASSERT_TRUE(stream->Names(names).ok());
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    ASSERT_TRUE(stream->Order(epoch * kFiles, order).ok());
    for (size_t i = 0; i < kFiles; ++i) {
      const size_t file = order[i];
      ASSERT_TRUE(Read(paths[file]) == Pattern(4000, static_cast<unsigned>(file)))
          << epoch << " " << i;
      ASSERT_TRUE(stream->At(epoch * kFiles + i).ok());
    }
    std::rotate(order.begin(), order.begin() + 17, order.end());
    EXPECT_LE(Copies(), 28 + 1);  // one may be on its way
  }
  // Each kept file once, each other once an epoch, and opened only once.
  EXPECT_EQ(Value("source_reads_total"), 20 + 3 * 40);
  EXPECT_EQ(Value("source_opens_total"), 60);
  EXPECT_EQ(Value("unread_total"), 0);
  // A change closes what was held open.
  EXPECT_EQ(Value("open_files"), 40);
  ASSERT_TRUE(session_->Changed(root_ + "/data").ok());
  EXPECT_EQ(Value("open_files"), 0);
  EXPECT_EQ(Copies(), 0);
}

TEST_F(FileServiceTest, CopiesAreMadeBeforeAnybodyAsks) {
  std::vector<std::string> paths;
  for (int i = 0; i < 30; ++i) paths.push_back(Write(StrCat("f", i), Pattern(4000)));
  Start();
  auto stream = *Session::Connect(options_.socket, 10 * kSecond);
  const std::vector<std::string_view> names(paths.begin(), paths.end());
  ASSERT_TRUE(stream->Names(names).ok());
  std::vector<uint32_t> order(30);
  for (uint32_t i = 0; i < 30; ++i) order[i] = i;
  ASSERT_TRUE(stream->Order(0, order).ok());
  EXPECT_TRUE(Soon([&] { return Value("kept_total") == 30; }));
  EXPECT_EQ(Value("gets_total"), 0);
  EXPECT_FALSE(stream->Order(5, std::vector<uint32_t>{30}).ok());  // no such number
}

TEST_F(FileServiceTest, FilesReadInTheOrderOfTheirNamesAreCopiedAhead) {
  std::vector<std::string> paths;
  for (int i = 0; i < 100; ++i) paths.push_back(Write(StrCat("f", 1000 + i), Pattern(4000)));
  Start();
  for (const std::string& path : paths) EXPECT_TRUE(Read(path) == Pattern(4000));
  // Some had to be asked for before the order was seen; the reader is as fast as the copiers.
  EXPECT_LT(Value("waits_total"), 100);
  EXPECT_EQ(Value("source_reads_total"), 100);
  // Without anybody who asks.
  for (int i = 0; i < 40; ++i) paths.push_back(Write(StrCat("g/f", 1000 + i), Pattern(4000)));
  for (int i = 0; i < 7; ++i) EXPECT_TRUE(Read(Path(StrCat("g/f", 1000 + i))) == Pattern(4000));
  EXPECT_TRUE(Soon([&] { return Value("kept_total") > 107; }));
}

TEST_F(FileServiceTest, ALargeFileIsReadWhileItIsCopied) {
  options_.partial_bytes = 4 << 20;
  const std::string bytes = Pattern((9 << 20) + 12345);
  const std::string path = Write("shard", bytes);
  Start();
  Found found = Found::kSource;
  uint64_t size = 0;
  const int fd = client_->OpenCopy(path, 0, &found, &size);
  if (fd < 0) {
    ASSERT_EQ(found, Found::kPartial);
    EXPECT_EQ(size, bytes.size());
  } else {
    close(fd);
  }
  std::string out(300'000, 0);
  for (const uint64_t at : {uint64_t{0}, uint64_t{1 << 20}, uint64_t{(2 << 20) - 1000}}) {
    const int64_t n = client_->ReadPart(path, out.data(), out.size(), at);
    ASSERT_GT(n, 0);
    EXPECT_TRUE(out.substr(0, static_cast<size_t>(n)) == bytes.substr(at, static_cast<size_t>(n)));
  }
  ASSERT_TRUE(Soon([&] { return Value("kept_total") == 1; }));
  EXPECT_TRUE(Read(path) == bytes);
  EXPECT_EQ(Value("source_read_bytes_total"), bytes.size());
  // Its checksum is that of all its bytes.
  options_.partial_bytes = 64 << 20;
  std::ofstream(options_.cache + "/boot") << "another";
  session_.reset();
  service_.reset();
  std::ofstream(options_.cache + "/boot") << "another";
  Start();
  EXPECT_TRUE(Read(path) == bytes);
  EXPECT_EQ(Value("source_reads_total"), 0);
}

TEST_F(FileServiceTest, ALargeFileIsReadThroughALinkWhileItIsCopied) {
  options_.partial_bytes = 4 << 20;
  const std::string bytes = Pattern(9 << 20);
  std::filesystem::create_symlink(Write("shard", bytes), Path("link"));
  Start();
  Found found = Found::kSource;
  const OwnedFd fd(client_->OpenCopy(Path("link"), 0, &found));
  std::string out(100'000, 0);
  ASSERT_EQ(client_->ReadPart(Path("link"), out.data(), out.size(), 0), 100'000);
  EXPECT_TRUE(out == bytes.substr(0, out.size()));
  ASSERT_TRUE(Soon([&] { return Value("kept_total") == 1; }));
  EXPECT_TRUE(Read(Path("link")) == bytes);
  EXPECT_EQ(Value("source_read_bytes_total"), bytes.size());
}

TEST_F(FileServiceTest, CopiesOfAnEarlierRunAreComparedWithTheSource) {
  const std::string same = Write("same", "same bytes");
  const std::string changed = Write("changed", "old bytes");
  const std::string broken = Write("broken", "right");
  Start();
  for (const std::string& path : {same, changed, broken}) EXPECT_NE(Read(path), "source");
  Stop();
  EXPECT_FALSE(std::filesystem::exists(options_.cache));  // what stays is the store's
  Write("changed", "new bytes!");
  // What a crash of the machine may do.
  size_t found = 0;
  for (const auto& each : std::filesystem::recursive_directory_iterator(StoreFolder())) {
    if (!each.is_regular_file() || Contents(each.path()) != "right") continue;
    ++found;
    ASSERT_EQ(chmod(each.path().c_str(), 0600), 0);
    std::ofstream(each.path()) << "wrong";
    ASSERT_EQ(chmod(each.path().c_str(), kCopyMode & 07777), 0);
  }
  ASSERT_EQ(found, 1);
  Start();
  EXPECT_EQ(Copies(), 0);
  EXPECT_EQ(Read(same), "same bytes");
  EXPECT_EQ(Value("source_reads_total"), 0);
  EXPECT_EQ(Read(changed), "new bytes!");
  EXPECT_EQ(Read(broken), "right");
  EXPECT_EQ(Value("source_reads_total"), 2);
  EXPECT_EQ(Value("kept_bytes"), 3 * 4096);
}

TEST_F(FileServiceTest, ARunThatComesLaterGetsWhatTheSourceHolds) {
  const std::string same = Write("same", "same bytes");
  const std::string changed = Write("changed", "old bytes");
  const std::string longer = Write("longer", "short");
  Start();
  for (const std::string& path : {same, changed, longer}) EXPECT_NE(Read(path), "source");
  // By somebody who does not tell, while the service lives on.
  Write("changed.new", "NEW bytes");
  std::filesystem::rename(Path("changed.new"), changed);
  Write("longer", "longer than before");
  auto next = Session::Connect(options_.socket, 10 * kSecond);
  ASSERT_TRUE(next);
  ASSERT_TRUE((*next)->Hello({}).ok());
  const uint64_t before = Value("source_reads_total");
  EXPECT_EQ(Read(same), "same bytes");
  EXPECT_EQ(Value("source_reads_total"), before);
  EXPECT_EQ(Read(changed), "NEW bytes");
  EXPECT_EQ(Read(longer), "longer than before");
  EXPECT_EQ(Value("source_reads_total"), before + 2);
}

TEST_F(FileServiceTest, AFullDiskLeavesFilesToTheSource) {
  const std::string large = Write("large", Pattern(200'000));
  const std::string small = Write("small", Pattern(2000));
  Start();
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 100'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string got = Read(large);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(got, "source");
  EXPECT_EQ(Copies(), 0);
  EXPECT_EQ(Value("full_total"), 1);
  EXPECT_EQ(Value("kept_bytes"), 0);
  // Nothing is tried for a while, and one line says so.
  EXPECT_EQ(Read(small), "source");
  EXPECT_EQ(said_, 1);
}

// The second half of the file is not read before the limit is taken away.
TEST_F(FileServiceTest, AFileThatChangesWhileItIsReadIsDiscarded) {
  const std::string path = Write("f", Pattern(kSlowFileBytes));
  Start();
  ASSERT_TRUE(LimitReads(1).ok());
  std::thread writer([&] {
    EXPECT_TRUE(Soon([&] { return Value("source_reads_total") >= 1; }));
    std::ofstream(path, std::ios::app) << "more";
    EXPECT_TRUE(LimitReads(0).ok());
  });
  EXPECT_TRUE(Read(path) == "source");
  writer.join();
  EXPECT_EQ(Value("discarded_total"), 1);
  EXPECT_TRUE(Soon([&] { return Copies() == 0 && Value("kept_bytes") == 0; }));
}

TEST_F(FileServiceTest, AFileThatIsToldToChangeWhileItIsReadIsDropped) {
  const std::string path = Write("f", Pattern(kSlowFileBytes));
  Start();
  ASSERT_TRUE(LimitReads(1).ok());
  std::thread teller([&] {
    EXPECT_TRUE(Soon([&] { return Value("source_reads_total") >= 1; }));
    EXPECT_TRUE(session_->Changed(path).ok());
  });
  EXPECT_TRUE(Read(path) == "source");
  teller.join();
  ASSERT_TRUE(LimitReads(0).ok());
  EXPECT_TRUE(Soon([&] { return Copies() == 0 && Value("kept_bytes") == 0; }));
}

TEST_F(FileServiceTest, APathTooLongForTheAttributeIsLeftToTheSource) {
  std::string folder = "long";
  while (folder.size() < 3800) folder += "/" + std::string(200, 'x');
  const std::string start = root_ + "/data";
  std::filesystem::create_directories(start + "/" + folder);
  const std::string path = start + "/" + folder + "/file";
  ASSERT_LT(path.size(), 4096);
  std::ofstream(path) << "bytes";
  Start();
  const std::string got = Read(path);
  EXPECT_TRUE(got == "source" || got == "bytes") << got;  // some file systems take it
  EXPECT_EQ(Value("full_total"), 0);
  EXPECT_EQ(Read(Write("f", "short")), "short");
}

TEST_F(FileServiceTest, NothingOfTheSourceIsOpenWhenEverybodyHasGone) {
  options_.partial_bytes = 4 << 20;
  const std::string path = Write("shard", Pattern(40 << 20));
  Start();
  ASSERT_TRUE(LimitReads(4'000'000).ok());
  EXPECT_EQ(Read(path), "partial");
  session_.reset();
  EXPECT_TRUE(Soon([&] { return Copies() == 0 && Value("kept_bytes") == 0; }));
}

TEST_F(FileServiceTest, WithoutItsServiceAClientUsesTheSource) {
  const std::string path = Write("f", Pattern(100'000));
  Start();
  EXPECT_EQ(Read(path).size(), 100'000);
  service_.reset();
  EXPECT_FALSE(client_->on());
  EXPECT_EQ(Read(path), "source");
  EXPECT_NE(access(options_.socket.c_str(), F_OK), 0);
}

TEST_F(FileServiceTest, TheFolderGoesWithATemporaryService) {
  options_.temporary = true;
  const std::string path = Write("f", "bytes");
  std::filesystem::create_symlink(path, Path("name"));
  Start();
  EXPECT_EQ(Read(Path("name")), "bytes");
  EXPECT_FALSE(Service::Start(options_));  // the folder is in use
  service_.reset();
  EXPECT_FALSE(std::filesystem::exists(options_.cache));
}

TEST_F(FileServiceTest, ItEndsWhenTheLastSessionHasGone) {
  options_.linger = 0;
  Start();
  pollfd ended = {service_->ended_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 50), 0);
  session_.reset();
  EXPECT_EQ(poll(&ended, 1, 5000), 1);
}

TEST_F(FileServiceTest, PacketsThatAreNoneEndTheirConnectionOnly) {
  const std::string path = Write("f", "bytes");
  Start();
  const Result<sockaddr_un> address = wire::SocketAddress(options_.socket);
  const std::string_view view = path;
  std::vector<std::byte> cut = PathsPacket(Kind::kGet, {&view, 1});
  cut.pop_back();
  std::vector<std::byte> lies = PathsPacket(Kind::kGet, {&view, 1});
  lies[8] = std::byte{200};  // count
  for (const auto& packet :
       {cut, lies, std::vector<std::byte>(5), std::vector<std::byte>(kMostPacket)}) {
    const OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address), 0);
    ASSERT_EQ(send(fd.get(), packet.data(), packet.size(), 0), static_cast<ssize_t>(packet.size()));
    Header reply;
    ASSERT_EQ(recv(fd.get(), &reply, sizeof reply, 0), static_cast<ssize_t>(sizeof reply));
    EXPECT_EQ(reply.answer, Answer::kBad);
    EXPECT_EQ(recv(fd.get(), &reply, sizeof reply, 0), 0);
  }
  EXPECT_EQ(Read(path), "bytes");
  const Result<std::string> status = session_->StatusJson();
  ASSERT_TRUE(status);
  EXPECT_NE(status->find("\"forebay_files_kept_total\":1"), std::string::npos) << *status;
}

// A session, and a program of it.
struct JobRun {
  std::unique_ptr<Session> session;
  std::unique_ptr<Client> client = std::make_unique<Client>();
  std::string Read(const std::string& path) const {
    Found found = Found::kSource;
    const OwnedFd fd(client->OpenCopy(path, O_CLOEXEC, &found));
    return fd.valid() ? "copy" : "source";
  }
};

class FileServiceJobs : public FileServiceTest {
 protected:
  JobRun Join(const std::string& job) const {
    JobRun out;
    auto session = Session::Connect(options_.socket, 10 * kSecond);
    EXPECT_TRUE(session && (*session)->Hello({}).ok() && (*session)->Join(job).ok());
    out.session = *std::move(session);
    EXPECT_TRUE(out.client->Start(options_.cache.c_str(), options_.socket.c_str(),
                                  options_.sources[0].c_str(),
                                  std::to_string(out.session->job()).c_str()));
    return out;
  }
  std::map<std::string, uint64_t> Jobs() const {
    std::map<std::string, uint64_t> out;
    for (const JobStats& job : engine_->TakeJobStats()) out[job.name] = job.bytes;
    return out;
  }
  std::string WriteZeros(const std::string& name, size_t bytes) const {
    return Write(name, std::string(bytes, 0));
  }
};

using BytesOf = std::map<std::string, uint64_t>;

TEST_F(FileServiceJobs, EachRunIsAJobOfItsOwn) {
  Start();
  JobRun a = Join("a");
  const JobRun b = Join("b");
  const JobRun again = Join("a");
  EXPECT_NE(a.session->job(), 0);
  EXPECT_NE(a.session->job(), b.session->job());
  EXPECT_EQ(a.session->job(), again.session->job());
  EXPECT_EQ(a.Read(WriteZeros("1", 10'000)), "copy");
  EXPECT_EQ(b.Read(WriteZeros("2", 20'000)), "copy");
  EXPECT_EQ(b.Read(Path("1")), "copy");  // which is there already
  EXPECT_EQ(again.Read(WriteZeros("3", 30'000)), "copy");
  EXPECT_EQ(Jobs(), (BytesOf{{"a", 40'000}, {"b", 20'000}}));
  a.session.reset();
  EXPECT_EQ(a.Read(WriteZeros("4", 1000)), "copy");
  EXPECT_EQ(Jobs(), (BytesOf{{"a", 41'000}, {"b", 20'000}}));
  EXPECT_EQ(Read(WriteZeros("5", 500)), std::string(500, 0));
  EXPECT_EQ(Jobs(), (BytesOf{{"a", 41'000}, {"b", 20'000}, {"test", 500}}));
}

TEST_F(FileServiceJobs, AJobGoesWithItsLastSession) {
  Start();
  JobRun a = Join("a");
  auto part = Session::Connect(options_.socket, 10 * kSecond, a.session->job());
  ASSERT_TRUE(part && (*part)->Hello({}).ok());  // as a mount's process
  EXPECT_EQ(a.Read(WriteZeros("1", 10'000)), "copy");
  a.session.reset();
  EXPECT_EQ(a.Read(WriteZeros("2", 1000)), "copy");
  EXPECT_EQ(Jobs(), (BytesOf{{"a", 11'000}}));
  part->reset();
  EXPECT_TRUE(Soon([&] { return Jobs().empty(); }));
  EXPECT_EQ(a.Read(WriteZeros("3", 1000)), "copy");
  EXPECT_TRUE(Soon([&] { return Jobs().empty(); }));
}

TEST_F(FileServiceJobs, WhatIsReadAheadIsReadForItsJob) {
  std::vector<std::string> paths;
  for (int i = 0; i < 20; ++i) paths.push_back(WriteZeros(StrCat(i), 1000));
  Start();
  const JobRun a = Join("a");
  std::vector<std::string_view> views(paths.begin(), paths.end());
  std::vector<uint32_t> order(paths.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  ASSERT_TRUE(a.session->Names(views).ok());
  ASSERT_TRUE(a.session->Order(0, order).ok());
  EXPECT_TRUE(Soon([&] { return Jobs() == BytesOf{{"a", 20'000}}; }));
}

TEST_F(FileServiceJobs, AJobThatIsHeldBackDoesNotHoldOthers) {
  std::vector<std::string> paths;
  for (int i = 0; i < 100; ++i) paths.push_back(WriteZeros(StrCat(i), 1000));
  options_.reads_in_flight = 4;
  Start();
  session_.reset();
  const JobRun slow = Join("slow");
  const JobRun fast = Join("fast");
  EXPECT_EQ(slow.Read(WriteZeros("first", 1000)), "copy");
  JobLimits none;
  none.source = {0, 0};
  engine_->SetJobLimits("slow", none);
  std::vector<std::string_view> views(paths.begin(), paths.end());
  std::vector<uint32_t> order(paths.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  ASSERT_TRUE(slow.session->Names(views).ok());
  ASSERT_TRUE(slow.session->Order(0, order).ok());
  std::vector<std::thread> waiting;
  for (int i = 0; i < 8; ++i) {
    waiting.emplace_back([&, i] { EXPECT_EQ(slow.Read(paths[static_cast<size_t>(i)]), "copy"); });
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(fast.Read(WriteZeros(StrCat("fast", i), 1000)), "copy");
  }
  EXPECT_LT(Jobs()["slow"], 100'000u);
  engine_->SetJobLimits("slow", JobLimits());
  for (std::thread& each : waiting) each.join();
}

TEST_F(FileServiceJobs, OnlyASessionIsAJob) {
  Start();
  auto other = Session::Connect(options_.socket, 10 * kSecond);
  ASSERT_TRUE(other);
  EXPECT_TRUE((*other)->Join("a").ok());
  EXPECT_EQ((*other)->job(), 0);
}

}  // namespace
}  // namespace forebay::files
