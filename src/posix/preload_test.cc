// Programs under the preloaded library, against a cache that the test has made and a service that
// answers as the test says.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "files/client.h"
#include "files/engine_supply.h"
#include "files/fake_service.h"
#include "files/identity.h"
#include "files/service.h"
#include "files/table.h"
#include "stage/engine.h"

namespace forebay::posix {
namespace {

using files::Answer;
using files::FakeService;
using files::FileSlot;
using files::FileState;
using files::FileTable;
using files::Header;
using files::Kind;
using files::Say;

namespace fs = std::filesystem;

class PreloadTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/var/tmp/forebay_posix_XXXXXX";  // has extended attributes
    ASSERT_NE(mkdtemp(pattern), nullptr);
    root_ = fs::canonical(pattern).string();
    data_ = root_ + "/data";
    fs::create_directories(data_ + "/sub");
  }
  void TearDown() override {
    service_.reset();
    real_.reset();
    supply_.reset();
    engine_.reset();
    fs::remove_all(root_);
  }

  // A cache that the test fills itself.
  void MakeCache() {
    fs::create_directories(root_ + "/cache/copies");
    Result<files::TableMemory> memory = files::TableMemory::Make(256);
    ASSERT_TRUE(memory) << memory.error().message();
    memory_.emplace(*std::move(memory));
    table_ = memory_->table();
    GiveTableOnly();
  }
  // Nobody answers anything else.
  void GiveTableOnly() {
    service_.reset();
    service_ = std::make_unique<FakeService>(
        root_ + "/s", [](const auto&) { return Say(Answer::kNone); }, &*memory_);
  }
  // The real service, in this process.
  void StartReal(uint64_t partial_bytes = 16 << 20) {
    EngineOptions node;
    node.memory = 64 << 20;
    node.cache_folder = root_ + "/store";
    node.cache_bytes = 64 << 20;
    Result<EnginePtr> engine = Engine::Create(node);
    ASSERT_TRUE(engine) << engine.error().ToString();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->registry().SetKnob("hedge_one_in", 0).ok());  // reads are counted
    supply_ = std::make_unique<files::EngineSupply>(*engine_, "test");
    files::ServiceOptions options;
    options.supply = supply_.get();
    options.registry = &engine_->registry();
    options.store = node.cache_folder;
    options.cache = root_ + "/cache";
    options.socket = root_ + "/s";
    options.sources = {data_};
    options.cache_bytes = 64 << 20;
    options.slots = 1 << 12;
    options.young = 0;
    options.partial_bytes = partial_bytes;
    Result<std::unique_ptr<files::Service>> service = files::Service::Start(options);
    ASSERT_TRUE(service) << service.error().ToString();
    real_ = *std::move(service);
  }
  uint64_t Value(const std::string& name) const {
    for (const auto& sample : real_->registry().Snapshot()) {
      const bool of_engine = name.starts_with("source_read");
      if (sample.name == (of_engine ? "forebay_" : "forebay_files_") + name) return sample.value;
    }
    ADD_FAILURE() << name;
    return 0;
  }

  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  std::string CopyOf(const std::string& path) const {
    char name[files::kNameLength + 1];
    files::NameOf(files::KeyOf(path), name);
    return root_ + "/cache/copies/" + name;
  }
  void Set(const std::string& path, FileState state) {
    const std::lock_guard lock(mutex_);  // the service sets states, too
    FileSlot* slot = table_.Find(files::KeyOf(path));
    if (slot == nullptr) {
      table_.Add(files::KeyOf(path), state);
    } else {
      FileTable::Set(*slot, state);
    }
  }
  // As the service would make one.
  void Copy(const std::string& path, const std::string& text) {
    files::Identity identity;
    ASSERT_EQ(stat(path.c_str(), &identity.stat), 0);
    struct statx birth {};
    ASSERT_EQ(statx(AT_FDCWD, path.c_str(), 0, STATX_BTIME, &birth), 0);
    identity.birth_seconds = birth.stx_btime.tv_sec;
    identity.birth_nanoseconds = birth.stx_btime.tv_nsec;
    std::strncpy(identity.path, path.c_str(), sizeof(identity.path) - 1);
    identity.path_length = static_cast<uint32_t>(path.size());
    fs::remove(CopyOf(path));
    const int fd = open(CopyOf(path).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ASSERT_EQ(files::WriteIdentity(fd, identity), 0);
    ASSERT_EQ(fchmod(fd, files::kCopyMode & 07777), 0);
    close(fd);
    Set(path, FileState::kKept);
  }
  // A file of the data folder and its copy.
  std::string Both(const std::string& name, const std::string& source, const std::string& copy) {
    const std::string path = data_ + "/" + name;
    Write(path, source);
    Copy(path, copy);
    return path;
  }

  // Changes as the real service takes them; questions for copies as `reply` says.
  void Serve(FakeService::Reply reply = [](const auto&) { return Say(Answer::kSource); }) {
    service_.reset();
    service_ = std::make_unique<FakeService>(
        root_ + "/s",
        [this, reply](const FakeService::Question& question) {
          if (question.kind != Kind::kChanged) return reply(question);
          for (const auto& entry : fs::recursive_directory_iterator(data_)) {
            const std::string path = entry.path().string();
            if (files::IsBelow(path, question.path)) Drop(path);
          }
          Drop(question.path);
          return Say(Answer::kReady);
        },
        &*memory_);
  }
  void Drop(const std::string& path) {
    fs::remove(CopyOf(path));
    Set(path, FileState::kChanged);
  }
  bool Told(const std::string& path) const {
    const auto asked = service_->questions();
    return std::any_of(asked.begin(), asked.end(), [&](const auto& question) {
      return question.kind == Kind::kChanged && question.path == path;
    });
  }

  struct Outcome {
    int status = -1;
    std::string text;
    std::vector<std::string> lines() const {
      std::vector<std::string> all;
      std::istringstream in(text);
      for (std::string line; std::getline(in, line);) all.push_back(line);
      return all;
    }
    bool operator==(const Outcome&) const = default;
  };

  enum class With { kNothing, kLibrary, kLibraryAlone, kEarly };
  Outcome Run(With with, std::vector<std::string> arguments) const {
    std::vector<std::string> variables;
    for (char** at = environ; *at != nullptr; ++at) {
      if (std::strncmp(*at, "LD_PRELOAD=", 11) != 0) variables.emplace_back(*at);
    }
    if (with != With::kNothing) {
      variables.push_back(std::string("LD_PRELOAD=") + POSIX_LIBRARY +
                          (with == With::kEarly ? std::string(":") + EARLY_LIBRARY : ""));
    }
    if (with == With::kLibrary || with == With::kEarly) {
      variables.push_back(files::kCacheVariable + ("=" + root_ + "/cache"));
      variables.push_back(files::kSocketVariable + ("=" + root_ + "/s"));
      variables.push_back(files::kSourcesVariable + ("=/nowhere:" + data_));
    }
    arguments.insert(arguments.begin(), PROBE);
    const auto pointers = [](std::vector<std::string>& from) {
      std::vector<char*> all;
      for (std::string& text : from) all.push_back(text.data());
      all.push_back(nullptr);
      return all;
    };
    int pipes[2];
    Outcome outcome;
    if (pipe2(pipes, O_CLOEXEC) != 0) return outcome;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipes[1], 1);
    pid_t child = -1;
    const int rc = posix_spawn(&child, PROBE, &actions, nullptr, pointers(arguments).data(),
                               pointers(variables).data());
    posix_spawn_file_actions_destroy(&actions);
    close(pipes[1]);
    char buffer[4096];
    for (ssize_t got = 0; rc == 0 && (got = read(pipes[0], buffer, sizeof(buffer))) > 0;) {
      outcome.text.append(buffer, static_cast<size_t>(got));
    }
    close(pipes[0]);
    if (rc == 0) waitpid(child, &outcome.status, 0);
    return outcome;
  }
  // What the program does without and with the library; it must be the same.
  void ExpectSame(const std::vector<std::string>& arguments) const {
    const Outcome plain = Run(With::kNothing, arguments);
    const Outcome with = Run(With::kLibrary, arguments);
    EXPECT_EQ(plain.status, 0);
    EXPECT_EQ(with.status, plain.status);
    EXPECT_EQ(with.text, plain.text);
  }

  std::string root_;
  std::string data_;
  std::optional<files::TableMemory> memory_;
  FileTable table_;
  std::mutex mutex_;
  std::unique_ptr<FakeService> service_;
  EnginePtr engine_;
  std::unique_ptr<files::EngineSupply> supply_;
  std::unique_ptr<files::Service> real_;
};

// With a cache that the test fills.
class PreloadCopyTest : public PreloadTest {
 protected:
  void SetUp() override {
    PreloadTest::SetUp();
    MakeCache();
  }
};

// Every way to change a file that the probe knows.
constexpr const char* kChanges[] = {
    "open",     "openat",        "creat",          "syscall",          "fopen",
    "freopen",  "unlink",        "remove",         "unlinkat",         "rename",
    "renameat", "link",          "renameat2",      "replace",          "linkat",
    "truncate", "rename folder", "chmod",          "fchmod",           "fchmodat",
    "chown",    "fchown",        "utime",          "utimensat",        "futimens",
    "setxattr", "fsetxattr",     "syscall linkat", "syscall fchmodat", "syscall fchmod"};

TEST_F(PreloadCopyTest, EveryReadComesFromTheCopy) {
  Serve();
  const std::string path = Both("sub/a", "of the source", "of the copy!!");
  const Outcome plain = Run(With::kNothing, {"read", path});
  const Outcome with = Run(With::kLibrary, {"read", path});
  ASSERT_EQ(with.status, 0);
  // Where the source is read without the library, the copy is with it; all else is the same.
  std::string expected = plain.text;
  for (size_t at = 0; (at = expected.find("source", at)) != std::string::npos;) {
    expected.replace(at, 6, "copy!!");
  }
  EXPECT_EQ(with.text, expected);
  EXPECT_NE(with.text, plain.text);
  EXPECT_GT(table_.Find(files::KeyOf(path))->opens.load(), 10U);
  EXPECT_TRUE(service_->questions().empty());
}

TEST_F(PreloadCopyTest, AFileIsWhatItWas) {
  Serve();
  const std::string path = Both("sub/a", "the same", "the same");
  Write(data_ + "/uncopied", "only here");
  ExpectSame({"read", path});
  ExpectSame({"stat", path});
  ExpectSame({"exec", path});
  ExpectSame({"stat", data_ + "/uncopied"});
  ExpectSame({"read", data_ + "/uncopied"});
  // By a link, whose copy is an alias.
  const std::string link = data_ + "/link";
  fs::create_symlink(path, link);
  fs::create_symlink(CopyOf(path), CopyOf(link));
  Set(link, FileState::kKept);
  ExpectSame({"read", link});
  ExpectSame({"stat", link});
}

TEST_F(PreloadCopyTest, TheIdentityIsTheCopysNotThePaths) {
  // Shows that stat() is answered without the source.
  const std::string path = Both("a", "text", "text");
  const Outcome before = Run(With::kLibrary, {"stat", path});
  Write(path, "another length");  // unseen
  const Outcome after = Run(With::kLibrary, {"stat", path});
  const auto first = before.lines();
  const auto second = after.lines();
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].starts_with("fstatfs") || first[i].starts_with("fstatvfs")) continue;
    EXPECT_EQ(first[i], second[i]);
  }
}

TEST_F(PreloadCopyTest, WithoutAServiceNothingHappens) {
  const std::string path = Both("a", "of the source", "of the copy");
  EXPECT_EQ(Run(With::kLibraryAlone, {"read", path}), Run(With::kNothing, {"read", path}));
  service_.reset();
  EXPECT_EQ(Run(With::kLibrary, {"read", path}), Run(With::kNothing, {"read", path}));
}

TEST_F(PreloadCopyTest, OutsideNobodyIsAsked) {
  Serve();
  fs::create_directories(root_ + "/database");
  Write(root_ + "/database/a", "of the source");
  ExpectSame({"read", root_ + "/database/a"});
  ExpectSame({"stat", root_ + "/database/a"});
  ExpectSame({"change", "open", root_ + "/database/a"});
  EXPECT_EQ(Run(With::kLibrary, {"change", "unlink", root_ + "/database/a"}).status, 0);
  EXPECT_TRUE(service_->questions().empty());
}

TEST_F(PreloadCopyTest, AMissingCopyIsAskedForAndWaitedFor) {
  const std::string path = data_ + "/a";
  Write(path, "of the source");
  Serve([=, this](const FakeService::Question& question) {
    if (question.kind != Kind::kGet || question.path != path) return Say(Answer::kSource);
    Copy(path, "of the copy");
    return Say(Answer::kReady);
  });
  const Outcome with = Run(With::kLibrary, {"read", path});
  EXPECT_TRUE(with.text.starts_with("open: of the copy\n")) << with.text;
  EXPECT_EQ(service_->questions().size(), 1U);
}

TEST_F(PreloadCopyTest, ACopyNeedsNoAnswerAndTheRestIsTheSource) {
  const std::string copied = Both("a", "of the source", "of the copy");
  Write(data_ + "/b", "of the source");
  EXPECT_TRUE(Run(With::kLibrary, {"read", copied}).text.starts_with("open: of the copy\n"));
  ExpectSame({"read", data_ + "/b"});
  // A change that nobody hears: no copy is right for sure.
  EXPECT_EQ(Run(With::kLibrary, {"change", "chmod", data_ + "/b"}).status, 0);
  EXPECT_TRUE(table_.closed());
  ExpectSame({"read", copied});
}

TEST_F(PreloadCopyTest, AfterAChangeTheSourceIsRead) {
  Serve();
  for (const std::string how : kChanges) {
    SCOPED_TRACE(how);
    std::string plain = "-";
    for (const With with : {With::kNothing, With::kLibrary}) {
      const std::string folder = how + (with == With::kNothing ? " plain" : " with");
      fs::create_directories(data_ + "/" + folder);
      const std::string path = Both(folder + "/a", "of the source", "of the source");
      const Outcome outcome = Run(with, {"change", how, path});
      EXPECT_EQ(outcome.status, 0);
      if (with == With::kNothing) {
        plain = outcome.text;
      } else {
        EXPECT_EQ(outcome.text, plain);
        EXPECT_TRUE(Told(path) || Told(fs::path(path).parent_path().string()));
        EXPECT_FALSE(fs::exists(CopyOf(path)));
      }
    }
  }
}

TEST_F(PreloadCopyTest, LinksThroughSyscallAreTold) {
  Serve();
  const std::string path = Both("a", "of the source", "of the source");
  const std::vector<std::string> made = {data_ + "/symlinkat", data_ + "/symlink", data_ + "/link"};
  const Outcome outcome = Run(With::kLibrary, {"links", path, made[0], made[1], made[2]});
  EXPECT_EQ(outcome.text, "0 wrong\n");
  EXPECT_TRUE(Told(made[0]));
#ifdef SYS_symlink
  EXPECT_TRUE(Told(made[1]));
#endif
#ifdef SYS_link
  EXPECT_TRUE(Told(path)) << "it has two names now";
#endif
}

TEST_F(PreloadCopyTest, BadPointersAreRefusedByTheKernel) {
  Serve();
  ExpectSame({"bad", Both("sub/a", "the same", "the same")});
  EXPECT_TRUE(service_->questions().empty());
}

TEST_F(PreloadCopyTest, AChangeByAnotherWayIsSeen) {
  Serve();
  const std::string path = Both("a", "of the source", "of the source");
  EXPECT_EQ(Run(With::kLibrary, {"around", data_, "a"}).text, "written\n");
  EXPECT_TRUE(Told(path));
}

TEST_F(PreloadCopyTest, ThreadsAndTheirChildren) {
  Serve();
  std::vector<std::string> arguments = {"threads"};
  for (int i = 0; i < 20; ++i) {
    const std::string name = "file" + std::to_string(i);
    // Every other one has no copy.
    if (i % 2 == 0) {
      arguments.push_back(Both(name, "wrong", name));
    } else {
      Write(data_ + "/" + name, name);
      Set(data_ + "/" + name, FileState::kSource);
      arguments.push_back(data_ + "/" + name);
    }
  }
  const Outcome outcome = Run(With::kLibrary, arguments);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.text, "0\n");
}

TEST_F(PreloadCopyTest, SignalHandlersMayOpen) {
  Serve();
  const std::string path = Both("x", "wrong", "x");
  const std::string other = Both("y", "text", "text");
  const Outcome outcome = Run(With::kLibrary, {"signals", path, other});
  EXPECT_EQ(outcome.text, "0 wrong, many\n");
}

TEST_F(PreloadCopyTest, SignalHandlersWithASmallStackMayOpen) {
  Serve();
  const std::string path = Both("x", "wrong", "x");
  EXPECT_EQ(Run(With::kLibrary, {"small", path}).text, "0 wrong of 100\n");
  // One that is asked for, and is the source's.
  Write(data_ + "/sub/x", "x");
  EXPECT_EQ(Run(With::kLibrary, {"small", data_ + "/sub/x"}).text, "0 wrong of 100\n");
}

TEST_F(PreloadCopyTest, ThreadsMayBeCancelled) {
  Serve();
  const std::string copied = Both("x", "wrong", "x");
  Write(data_ + "/sub/x", "x");
  const Outcome outcome = Run(With::kLibrary, {"cancel", copied, data_ + "/sub/x"});
  EXPECT_EQ(outcome.text, "0 wrong\n") << "descriptors, threads or files";
  EXPECT_EQ(outcome.status, 0);
}

TEST_F(PreloadCopyTest, DescriptorsHaveTheNumbersTheyWouldHave) {
  Serve();
  const std::string copied = Both("a", "text", "text");
  Write(data_ + "/b", "text");
  EXPECT_EQ(Run(With::kLibrary, {"numbers", copied, data_ + "/b", data_ + "/none"}).text, "same\n");
}

TEST_F(PreloadTest, ACopyInAnotherFileSystemIsCopiedAsItsSourceWouldBe) {
  char far[] = "/dev/shm/forebay_posix_XXXXXX";
  ASSERT_NE(mkdtemp(far), nullptr);
  fs::create_directory_symlink(far, root_ + "/cache");
  const bool has_attributes = setxattr(far, "user.forebay.try", "x", 1, 0) == 0;
  if (has_attributes) {
    MakeCache();
    Serve();
    ExpectSame({"range", Both("a", "of the source", "of the source")});
    EXPECT_EQ(table_.Find(files::KeyOf(data_ + "/a"))->opens.load(), 1U);
  }
  fs::remove_all(far);
  if (!has_attributes) GTEST_SKIP() << "no second file system with extended attributes";
}

TEST_F(PreloadCopyTest, AnotherLibraryMayOpenBeforeOursHasStarted) {
  const std::string path = Both("a", "of the source", "of the copy");
  const Outcome outcome = Run(With::kEarly, {"read", path});
  EXPECT_TRUE(outcome.text.starts_with("early\nopen: of the copy\n")) << outcome.text;
}

TEST_F(PreloadCopyTest, ALargeFileIsReadAsItIsCopied) {
  constexpr size_t kSize = 3'300'000;
  constexpr size_t kCopied = 2 << 20;
  const std::string path = data_ + "/large";
  // What is copied is wrong in the source, and what is not copied yet in the copy.
  const auto fill = [&](const std::string& to, size_t first, size_t last) {
    EXPECT_EQ(Run(With::kNothing,
                  {"fill", to, std::to_string(kSize), std::to_string(first), std::to_string(last)})
                  .status,
              0);
  };
  fill(path, kCopied, kSize);
  fill(CopyOf(path) + ".part", 0, kCopied);
  table_.Add(files::KeyOf(path), FileState::kComing);
  Serve([=](const FakeService::Question& question) {
    if (question.kind == Kind::kGet) return Say(Answer::kPartial, kSize);
    const bool there = question.kind == Kind::kRange && question.a + question.b <= kCopied;
    return Say(there ? Answer::kReady : Answer::kSource);
  });
  const Outcome outcome = Run(With::kLibrary, {"large", path});
  EXPECT_EQ(outcome.text, "0 wrong\n");
  EXPECT_NE(Run(With::kNothing, {"large", path}).status, 0);
}

TEST_F(PreloadCopyTest, AStreamIsReadAsItIsCopied) {
  constexpr size_t kSize = 3'300'000;
  const std::string path = data_ + "/large";
  const std::string size = std::to_string(kSize);
  EXPECT_EQ(Run(With::kNothing, {"fill", path, size, "0", size}).status, 0);
  EXPECT_EQ(Run(With::kNothing, {"fill", CopyOf(path) + ".part", size, "0", size}).status, 0);
  table_.Add(files::KeyOf(path), FileState::kComing);
  Serve([=](const FakeService::Question& question) {
    // Larger than what a stream waits for.
    if (question.kind == Kind::kGet) return Say(Answer::kPartial, 100 << 20);
    const bool there = question.kind == Kind::kRange && question.a < (2 << 20);
    return Say(there ? Answer::kReady : Answer::kSource);
  });
  EXPECT_EQ(Run(With::kLibrary, {"stream", path}).text, "0 wrong\n");
  EXPECT_EQ(Run(With::kNothing, {"stream", path}).text, "0 wrong\n");
  const auto asked = service_->questions();
  const auto count = [&](Kind kind) {
    return std::count_if(asked.begin(), asked.end(),
                         [&](const auto& question) { return question.kind == kind; });
  };
  EXPECT_GT(count(Kind::kRange), 8);
  EXPECT_EQ(count(Kind::kDirect), 1);
}

TEST_F(PreloadCopyTest, AMappingMovesToTheCopyAndNothingElseDoes) {
  constexpr size_t kSize = 2 << 20;
  const std::string ending = ".copied";
  Serve([=, this](const FakeService::Question& question) {
    if (question.path.ends_with(ending)) {
      Copy(question.path.substr(0, question.path.size() - ending.size()), std::string(kSize, 'c'));
      table_.CountLarge();
      return Say(Answer::kSource);
    }
    return Say(question.kind == Kind::kGet ? Answer::kPartial : Answer::kSource, kSize);
  });
  for (const std::string how :
       {"shared", "private", "offset", "threads", "written", "cut", "cut behind us",
        "replaced behind us", "covered", "protected", "moved", "advised", "forked", "again"}) {
    SCOPED_TRACE(how);
    const std::string path = data_ + "/" + how;
    Write(path, std::string(kSize, 's'));
    Set(path, FileState::kComing);
    EXPECT_EQ(Run(With::kLibrary, {"mapping", path, how}).text, "0 wrong\n");
  }
}

TEST_F(PreloadCopyTest, AMappingOfAFileThatChangesStays) {
  constexpr size_t kSize = 2 << 20;
  const std::string path = data_ + "/large";
  Write(path, std::string(kSize, 's'));
  Set(path, FileState::kComing);
  Serve([=, this](const FakeService::Question& question) {
    if (question.path == path + ".copied") {
      // The copy is of another file of that name.
      fs::rename(path, path + ".old");
      Write(path, std::string(kSize, 'n'));
      Copy(path, std::string(kSize, 'c'));
      table_.CountLarge();
      return Say(Answer::kSource);
    }
    return Say(question.kind == Kind::kGet ? Answer::kPartial : Answer::kSource, kSize);
  });
  EXPECT_NE(Run(With::kLibrary, {"mapping", path, "shared"}).text, "0 wrong\n");
}

TEST_F(PreloadCopyTest, AStreamWaitsForTheWholeCopy) {
  const std::string path = data_ + "/large";
  Write(path, "of the source");
  Serve([=, this](const FakeService::Question& question) {
    if (question.kind == Kind::kGet) return Say(Answer::kPartial, 13);
    Copy(path, "of the copy!!");
    return Say(Answer::kReady);
  });
  const auto lines = Run(With::kLibrary, {"read", path}).lines();
  EXPECT_NE(std::find(lines.begin(), lines.end(), "fopen: of the copy!!"), lines.end());
}

TEST_F(PreloadTest, WithTheRealServiceProgramsSeeTheSame) {
  const std::string path = data_ + "/sub/a";
  Write(path, "of the source");
  fs::create_symlink("sub", data_ + "/linked");
  fs::create_symlink("sub/a", data_ + "/link");
  StartReal();
  for (int round = 0; round < 2; ++round) {
    for (const char* what : {"read", "stat", "exec"}) {
      for (const char* name : {"/sub/a", "/linked/a", "/link"}) {
        SCOPED_TRACE(std::string(what) + name);
        ExpectSame({what, data_ + name});
      }
    }
  }
  ExpectSame({"numbers", path, data_ + "/link", data_ + "/none"});
  EXPECT_EQ(Value("source_reads_total"), 1U);
}

TEST_F(PreloadTest, WithTheRealServiceAChangedFileIsTheSources) {
  StartReal();
  for (const std::string how : kChanges) {
    SCOPED_TRACE(how);
    std::string plain;
    for (const With with : {With::kNothing, With::kLibrary}) {
      const std::string folder = data_ + "/" + how + (with == With::kNothing ? " plain" : " with");
      fs::create_directories(folder);
      Write(folder + "/a", "of the source");
      EXPECT_EQ(Run(with, {"read", folder + "/a"}).status, 0);
      const Outcome outcome = Run(with, {"change", how, folder + "/a"});
      EXPECT_EQ(outcome.status, 0);
      if (with == With::kNothing) plain = outcome.text;
      EXPECT_EQ(outcome.text, plain);
    }
  }
  EXPECT_GE(Value("source_reads_total"), std::size(kChanges));
  const std::string path = data_ + "/around";
  Write(path, "of the source");
  EXPECT_EQ(Run(With::kLibrary, {"read", path}).status, 0);
  EXPECT_EQ(Run(With::kLibrary, {"around", data_, "around"}).text, "written\n");
}

TEST_F(PreloadTest, WhatChangesNoFileKeepsTheCopies) {
  StartReal();
  Write(data_ + "/sub/a", "of the source");
  Write(data_ + "/sub/b", "of the source");
  const auto read = [&] {
    for (const char* name : {"/sub/a", "/sub/b"}) {
      EXPECT_EQ(Run(With::kLibrary, {"read", data_ + name}).status, 0);
    }
  };
  read();
  EXPECT_EQ(Value("source_reads_total"), 2U);
  EXPECT_EQ(Run(With::kLibrary, {"keep", data_ + "/sub"}).text, "0 wrong\n");
  for (const char* name : {"/sub/a", "/sub/b"}) EXPECT_TRUE(fs::exists(CopyOf(data_ + name)));
  read();
  EXPECT_EQ(Value("source_reads_total"), 2U);
  // What the new links lead to is the same file.
  ExpectSame({"read", data_ + "/sub/link2"});
  // A folder that cannot be searched any more shows none of its files.
  EXPECT_EQ(Run(With::kLibrary, {"change", "chmod folder", data_ + "/sub/a"}).status, 0);
  EXPECT_FALSE(fs::exists(CopyOf(data_ + "/sub/a")));
}

TEST_F(PreloadTest, WithTheRealServiceALargeFileIsReadOnce) {
  constexpr size_t kSize = 3'300'000;
  const std::string path = data_ + "/large";
  const std::string size = std::to_string(kSize);
  EXPECT_EQ(Run(With::kNothing, {"fill", path, size, "0", size}).status, 0);
  StartReal(1 << 20);
  const Outcome outcome = Run(With::kLibrary, {"large", path});
  EXPECT_EQ(outcome.text, "0 wrong\n");
  EXPECT_EQ(Value("source_read_bytes_total"), kSize);
}

}  // namespace
}  // namespace forebay::posix
