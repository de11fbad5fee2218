#include "files/engine_supply.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "tier/copy_names.h"
#include "tier/held_page_testing.h"

namespace forebay::files {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLarge = 1 << 20;

class EngineSupplyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/var/tmp/forebay_supply_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    fs::create_directories(root_ + "/data");
    EngineOptions options;
    options.memory = 32 << 20;
    options.cache_folder = root_ + "/store";
    options.cache_bytes = 64 << 20;
    Result<EnginePtr> engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.error().ToString();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->cache_store()->WaitScanned(20 * kSecond));
    supply_ = std::make_unique<EngineSupply>(*engine_, "test");
    ASSERT_TRUE(supply_->AddSource(root_ + "/data", "").ok());
    fs::create_directories(root_ + "/store/run/copies");
    copies_ = OwnedFd(open((root_ + "/store/run/copies").c_str(), O_RDONLY | O_DIRECTORY));
  }
  void TearDown() override {
    supply_.reset();
    engine_.reset();
    fs::remove_all(root_);
  }

  std::string Write(const std::string& name, uint64_t bytes) const {
    const std::string path = root_ + "/data/" + name;
    std::ofstream(path, std::ios::binary) << std::string(bytes, 'x');
    return path;
  }
  static std::shared_ptr<const SourceFile> Look(const std::string& path) {
    auto file = std::make_shared<SourceFile>();
    file->fd = OwnedFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_EQ(fstat(file->fd.get(), &file->stat), 0);
    return file;
  }
  Result<FileLoan> Read(const std::string& path, const std::shared_ptr<const SourceFile>& file,
                        JobNumber job = 0) {
    const auto bytes = static_cast<uint64_t>(file->stat.st_size);
    return supply_->Read(path, file, {.offset = 0, .bytes = bytes, .block = 0},
                         {.job = job, .urgent = true}, std::stop_token());
  }
  // What was read for those that have a share of the source.
  std::map<std::string, uint64_t> Jobs() const {
    std::map<std::string, uint64_t> out;
    for (const JobStats& job : engine_->TakeJobStats()) out[job.name] = job.bytes;
    return out;
  }
  // A copy as the service makes one, which the store has, too.
  void Keep(const std::string& path, const SourceFile& file) {
    const auto bytes = static_cast<size_t>(file.stat.st_size);
    const std::string content(bytes, 'x');
    std::ofstream(root_ + "/store/run/copies/name", std::ios::binary) << content;
    ASSERT_EQ(fchmodat(copies_.get(), "name", 0600, 0), 0);
    const uint32_t crc = Crc32c(std::as_bytes(std::span(content)));
    const Status kept = supply_->KeepCopy(path, file, copies_.get(), "name", crc);
    ASSERT_TRUE(kept.ok()) << kept.ToString();
  }
  void RemoveName(const std::string& path) {
    EXPECT_EQ(unlinkat(copies_.get(), "name", 0), 0);
    supply_->Removed(KeyOf(path));
  }
  TierKey CopyOf(const std::string& path, const SourceFile& file) const {
    return WholeFileName(root_ + "/data", path, static_cast<uint64_t>(file.stat.st_size),
                         file.stat.st_mtim.tv_sec * kSecond + file.stat.st_mtim.tv_nsec);
  }
  uint64_t Value(std::string_view name) const {
    for (const Registry::Sample& sample : engine_->registry().Snapshot()) {
      if (sample.name == name) return sample.value;
    }
    ADD_FAILURE() << name;
    return 0;
  }
  FolderStore& store() const { return *engine_->cache_store(); }

  std::string root_;
  EnginePtr engine_;
  std::unique_ptr<EngineSupply> supply_;
  OwnedFd copies_;
};

TEST_F(EngineSupplyTest, AReadThatFailsLeavesNoLoan) {
  const std::string path = Write("file", 10'000);
  const auto file = Look(path);
  fs::resize_file(path, 100);
  const Result<FileLoan> read = Read(path, file);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code(), Code::kChanged) << read.error().ToString();
  EXPECT_EQ(Value("forebay_stage_leases"), 0u);
  const std::string good = Write("good", 10'000);
  EXPECT_TRUE(Read(good, Look(good)));
  EXPECT_EQ(Value("forebay_stage_leases"), 0u);
}

TEST_F(EngineSupplyTest, ACopyOfAFileThatChangesGivesItsRoomBack) {
  const std::string path = Write("file", kLarge);
  const auto file = Look(path);
  const uint64_t before = store().used_bytes();
  ASSERT_TRUE(Read(path, file));
  Keep(path, *file);
  ASSERT_GE(store().used_bytes(), before + kLarge);
  supply_->Forget(path);
  RemoveName(path);
  EXPECT_FALSE(store().Has(CopyOf(path, *file)));
  EXPECT_LT(store().used_bytes(), before + kLarge / 2);
  EXPECT_TRUE(supply_->TakeUnlinks().empty());
}

TEST_F(EngineSupplyTest, TheNameOfAnEmptyCopyIsKnown) {
  const std::string path = Write("empty", 0);
  const auto file = Look(path);
  Keep(path, *file);
  RemoveName(path);
  store().Drop(CopyOf(path, *file));
  EXPECT_TRUE(store().TakeUnlinks().empty()) << "it has no name in the cache any more";
}

// What the store has of a file, and the service has no name for, waits for nobody.
TEST_F(EngineSupplyTest, ACopyWithoutANameIsNotWaitedFor) {
  const std::string path = Write("file", kLarge);
  const auto file = Look(path);
  const uint64_t before = store().used_bytes();
  const TierKey copy{.group = 7, .name = 7, .check = 7};
  const std::string content(kLarge, 'x');
  std::ofstream(root_ + "/store/run/copies/name", std::ios::binary) << content;
  ASSERT_EQ(fchmodat(copies_.get(), "name", 0600, 0), 0);
  const uint32_t crc = Crc32c(std::as_bytes(std::span(content)));
  ASSERT_TRUE(store().AdoptFile(copy, copies_.get(), "name", kLarge, crc).ok());
  store().Drop(copy);
  ASSERT_GE(store().used_bytes(), before + kLarge);
  EXPECT_TRUE(supply_->TakeUnlinks().empty());
  EXPECT_LT(store().used_bytes(), before + kLarge / 2);
}

// Programs read copies by themselves, so no read of the engine tells that their disk hangs.
TEST_F(EngineSupplyTest, ADiskThatHangsIsLeftAlthoughTheEngineReadsNothing) {
  EXPECT_TRUE(supply_->CopiesAnswer());
  constexpr TierKey kPage = {9, 77};
  auto tier = *FolderStore::MakeTier(engine_->cache_store(), 64);
  std::vector<std::byte> page(4096);
  const TierOp put{
      .tag = 1, .kind = TierOp::Kind::kPut, .key = kPage, .bytes = page, .crc = Crc32c(page)};
  ASSERT_EQ(tier->Submit(std::span(&put, 1)), 1u);
  std::array<TierDone, 8> done;
  while (tier->Reap(done) == 0) poll(nullptr, 0, 1);
  ASSERT_TRUE(done[0].stored);
  // Every reader hangs, in gets that nobody waits for.
  std::array<tier_testing::HeldPage, 4> pages;
  for (tier_testing::HeldPage& each : pages) {
    if (!each.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd";
    const TierOp get{.tag = 2, .kind = TierOp::Kind::kGet, .key = kPage, .bytes = each.bytes()};
    ASSERT_EQ(tier->Submit(std::span(&get, 1)), 1u);
  }
  for (tier_testing::HeldPage& each : pages) ASSERT_TRUE(each.SomebodyWaits());
  store().PassBy(true);
  store().PassBy(false);
  const Nanos until = SteadyClock().Now() + 60 * kSecond;
  while (supply_->CopiesAnswer() && SteadyClock().Now() < until) poll(nullptr, 0, 10);
  EXPECT_EQ(Value("forebay_tier_passed_by"), 1u);
  for (tier_testing::HeldPage& each : pages) EXPECT_TRUE(each.Fill());
  while (!supply_->CopiesAnswer() && SteadyClock().Now() < until) poll(nullptr, 0, 10);
  EXPECT_EQ(Value("forebay_tier_passed_by"), 0u) << "it is not used again";
  for (size_t ended = 0; ended < pages.size(); ended += tier->Reap(done)) poll(nullptr, 0, 1);
}

TEST_F(EngineSupplyTest, EachJobReadsByItsName) {
  const auto read = [&](const std::string& name, uint64_t bytes, JobNumber job) {
    const std::string path = Write(name, bytes);
    EXPECT_TRUE(Read(path, Look(path), job));
  };
  supply_->OpenJob(1, "a");
  supply_->OpenJob(2, "b");
  EXPECT_TRUE(Jobs().empty()) << "who reads nothing has no share";
  read("1", 10'000, 1);
  read("2", 20'000, 2);
  read("3", 30'000, 1);
  using Bytes = std::map<std::string, uint64_t>;
  EXPECT_EQ(Jobs(), (Bytes{{"a", 40'000}, {"b", 20'000}}));
  supply_->CloseJob(1);
  EXPECT_EQ(Jobs(), (Bytes{{"b", 20'000}}));
  read("4", 1000, 1);  // by a program that its run has left behind
  EXPECT_EQ(Jobs(), (Bytes{{"b", 20'000}}));
  supply_->OpenJob(0, "");
  read("5", 2000, 7);  // nobody's
  EXPECT_EQ(Jobs(), (Bytes{{"b", 20'000}, {"test", 2000}}));
}

}  // namespace
}  // namespace forebay::files
