#include "files/book.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"

namespace forebay::files {
namespace {

using Outcome = CopyResult::Outcome;
using Kind = CopyJob::Kind;

// A source and a cache in memory; jobs end when the test says so.
class BookTest : public ::testing::Test, public BookActions {
 protected:
  static constexpr uint64_t kSlots = 1 << 10;  // of the table's first part
  static constexpr uint64_t kMostSlots = 1 << 12;

  BookTest() { Make(10 * 4096, 4 * 4096); }

  void Make(uint64_t kept, uint64_t staged, BookOptions options = {}) {
    memory_.assign(FileTable::BytesFor(kSlots, kMostSlots) / sizeof(uint64_t) + 1, 0);
    table_ = FileTable::Make(memory_.data(), kSlots, kMostSlots);
    table_grows_ = 0;
    jobs_.clear();
    copies_.clear();
    answers_.clear();
    reads_.clear();
    room_ = std::make_unique<Room>(kept, staged);
    registry_ = std::make_unique<Registry>();
    metrics_ = std::make_unique<BookMetrics>(registry_->AddMechanism("files", "test"));
    book_ = std::make_unique<Book>(table_, options, *room_, *metrics_, *this);
    book_->AddSource("/data");
    book_->SetCache("/data/cache");
  }

  static std::string Path(size_t i) { return StrCat("/data/f", i); }
  static std::pair<uint64_t, uint64_t> Id(const FileKey& key) { return {key.high, key.low}; }
  bool There(const std::string& path) const { return copies_.contains(Id(KeyOf(path))); }
  FileState State(const std::string& path) const {
    const FileSlot* slot = table_.Find(KeyOf(path));
    return slot == nullptr ? FileState::kEmpty : FileTable::StateOf(*slot);
  }
  // As a program does: opens the copy, or asks for it. True when it had the copy.
  bool Open(const std::string& path) {
    FileSlot* slot = table_.Find(KeyOf(path));
    if (slot != nullptr && There(path)) {
      slot->opens.fetch_add(1);
      return true;
    }
    return false;
  }
  uint64_t Ask(const std::string& path) {
    book_->Get(path, ++waiter_, now_);
    return waiter_;
  }
  // Ends the oldest job, as a copier would.
  void Finish(Outcome outcome = Outcome::kDone) {
    ASSERT_FALSE(jobs_.empty());
    CopyResult result;
    result.job = std::move(jobs_.front());
    jobs_.erase(jobs_.begin());
    result.outcome = outcome;
    CopyJob& job = result.job;
    if (job.kind == Kind::kResolve) {
      const auto link = links_.find(job.path);
      result.real = link == links_.end() || !job.follow ? job.path : link->second;
    } else if (outcome == Outcome::kDone && job.kind == Kind::kCopy) {
      if (const auto link = links_.find(job.path); link != links_.end()) {
        result.outcome = Outcome::kAlias;
        result.real = link->second;
      } else {
        Copy(result);
      }
    } else if (outcome == Outcome::kDone && job.kind == Kind::kFinish) {
      copies_.insert(Id(job.key));
    }
    book_->Done(std::move(result), now_);
  }
  void Copy(CopyResult& result) {
    CopyJob& job = result.job;
    if (job.source == nullptr) {
      job.source = std::make_shared<SourceFile>();
      job.source->stat.st_size =
          static_cast<off_t>(sizes_.contains(job.path) ? sizes_[job.path] : 4000);
      ++opens_;
    }
    const auto size = static_cast<uint64_t>(job.source->stat.st_size);
    if (job.place == CopyPlace::kNone) {
      job.reserved = OnDisk(size);
      job.place = room_->Reserve(job.reserved, job.may_stage, job.urgent);
      if (job.place == CopyPlace::kNone && grows_) {
        job.grows = true;
        job.place = CopyPlace::kKept;
        job.reserved = 0;
      } else if (job.place == CopyPlace::kNone) {
        result.outcome = Outcome::kNoRoom;
        return;
      }
    }
    if (size > (2 << 20)) {
      result.outcome = Outcome::kLarge;
      return;
    }
    ++reads_[job.path];
    if (job.ticket->dropped()) {
      result.outcome = Outcome::kDropped;
      return;
    }
    copies_.insert(Id(job.key));
  }
  void FinishAll() {
    book_->Pump(now_);
    for (int i = 0; !jobs_.empty() && i < 100'000; ++i) {
      Finish();
      book_->Pump(now_);
    }
    EXPECT_TRUE(jobs_.empty());
  }
  void Announce(uint64_t stream, size_t files) {
    std::vector<std::string> paths;
    for (size_t i = 0; i < files; ++i) paths.push_back(Path(i));
    const std::vector<std::string_view> views(paths.begin(), paths.end());
    ASSERT_TRUE(book_->Names(stream, 0, views));
  }

  void Start(CopyJob job) override {
    const auto at = std::find_if(jobs_.begin(), jobs_.end(),
                                 [&](const CopyJob& other) { return job.urgent && !other.urgent; });
    jobs_.insert(at, std::move(job));
  }
  void Answer(uint64_t waiter, enum Answer answer, uint64_t) override {
    EXPECT_FALSE(answers_.contains(waiter)) << "two answers";
    answers_[waiter] = answer;
  }
  void Remove(const FileKey& key) override { copies_.erase(Id(key)); }
  void RemovePart(const FileKey&) override { ++parts_removed_; }
  void Forget(std::string_view) override {}
  bool Exists(const FileKey& key) override {
    const auto link = copy_links_.find(Id(key));
    return copies_.contains(link == copy_links_.end() ? Id(key) : link->second);
  }
  bool Link(const FileKey& alias, const FileKey& copy) override {
    copy_links_[Id(alias)] = Id(copy);
    return true;
  }
  ReadProgress Progress(int64_t process, int64_t) override { return progress_[process]; }
  bool GrowTable() override {
    if (table_.parts() == table_.most_parts()) return false;
    table_.AddPart();
    ++table_grows_;
    return true;
  }
  void Say(const std::string& what) override { said_.push_back(what); }
  // Blocks of jobs that have not ended.
  std::vector<size_t> Blocks() const {
    std::vector<size_t> out;
    for (const CopyJob& job : jobs_) {
      if (job.kind == Kind::kBlock) out.push_back(static_cast<size_t>(job.offset >> 20));
    }
    return out;
  }
  // A large file that somebody has opened.
  void OpenLarge(uint64_t bytes) {
    Make(4 * bytes, 0);
    sizes_[Path(0)] = bytes;
    const uint64_t asked = Ask(Path(0));
    Finish();
    EXPECT_EQ(answers_[asked], Answer::kPartial);
  }
  // 0 when it has to wait.
  enum Answer ReadRange(uint64_t offset, uint64_t bytes) {
    book_->Range(Path(0), offset, bytes, ++waiter_, now_);
    return answers_.contains(waiter_) ? answers_[waiter_] : Answer::kNone;
  }

  std::vector<uint64_t> memory_;
  size_t table_grows_ = 0;
  FileTable table_;
  std::unique_ptr<Room> room_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<BookMetrics> metrics_;
  std::unique_ptr<Book> book_;
  std::vector<CopyJob> jobs_;
  std::set<std::pair<uint64_t, uint64_t>> copies_;
  std::map<std::pair<uint64_t, uint64_t>, std::pair<uint64_t, uint64_t>> copy_links_;
  std::map<std::string, std::string> links_;
  std::map<std::string, uint64_t> sizes_;
  std::map<std::string, int> reads_;
  std::map<uint64_t, enum Answer> answers_;
  std::map<int64_t, ReadProgress> progress_;
  std::vector<std::string> said_;
  size_t opens_ = 0;
  size_t parts_removed_ = 0;
  uint64_t waiter_ = 0;
  bool grows_ = false;
  Nanos now_ = kSecond;
};

TEST_F(BookTest, AllWhoAskGetOneCopy) {
  const uint64_t first = Ask(Path(0));
  const uint64_t second = Ask(Path(0));
  ASSERT_EQ(jobs_.size(), 1);
  EXPECT_TRUE(answers_.empty());
  Finish();
  EXPECT_EQ(answers_[first], Answer::kReady);
  EXPECT_EQ(answers_[second], Answer::kReady);
  EXPECT_EQ(State(Path(0)), FileState::kKept);
  EXPECT_EQ(answers_[Ask(Path(0))], Answer::kReady);  // who missed it a moment ago
  EXPECT_EQ(reads_[Path(0)], 1);
}

TEST_F(BookTest, OnlyDataFoldersAreCopied) {
  for (const char* path : {"/etc/passwd", "/data/cache/x", "/data/../etc/passwd", "/data//x",
                           "relative", "/database/x"}) {
    EXPECT_EQ(answers_[Ask(path)], Answer::kSource) << path;
  }
  EXPECT_TRUE(jobs_.empty());
  EXPECT_EQ(book_->files(), 0);
}

TEST_F(BookTest, AFileThatIsNotThereLeavesNoTrace) {
  const uint64_t asked = Ask("/data/none");
  Finish(Outcome::kMissing);
  EXPECT_EQ(answers_[asked], Answer::kSource);
  EXPECT_EQ(book_->files(), 0);
  EXPECT_EQ(State("/data/none"), FileState::kEmpty);
  EXPECT_EQ(metrics_->missing.value(), 1U);
  EXPECT_EQ(metrics_->errors.value(), 0U);
  EXPECT_EQ(metrics_->left.value(), 0U);
}

TEST_F(BookTest, ErrorsOfTheSourceAreNotAskedForAgainAtOnce) {
  const uint64_t asked = Ask(Path(0));
  Finish(Outcome::kError);
  EXPECT_EQ(answers_[asked], Answer::kSource);
  (void)Ask(Path(0));  // a file that nobody announced is forgotten
  Announce(7, 2);
  Finish(Outcome::kError);
  EXPECT_EQ(answers_[Ask(Path(0))], Answer::kSource);
  now_ += 2 * kSecond;
  const uint64_t later = Ask(Path(0));
  Finish();
  EXPECT_EQ(answers_[later], Answer::kReady);
}

TEST_F(BookTest, ALinkThatIsMadeChangesNothingButItsName) {
  (void)Ask("/data/sub/a");
  Finish();
  links_["/data/link"] = "/data/sub";
  const std::string_view link = "/data/link";
  book_->Changed({&link, 1}, ++waiter_, false);
  Finish();
  EXPECT_EQ(answers_[waiter_], Answer::kReady);
  EXPECT_TRUE(There("/data/sub/a"));
  EXPECT_EQ(State("/data/link"), FileState::kChanged);
  // One that is removed, or led elsewhere, may have led others there.
  book_->Changed({&link, 1}, ++waiter_);
  Finish();
  EXPECT_FALSE(There("/data/sub/a"));
}

TEST_F(BookTest, AChangeDropsWhatIsBeingCopied) {
  const uint64_t asked = Ask(Path(0));
  const std::string path = Path(0);
  const std::string_view view = path;
  book_->Changed({&view, 1}, 99);
  EXPECT_EQ(answers_[asked], Answer::kSource);
  EXPECT_FALSE(answers_.contains(99));  // links have to be followed first
  ASSERT_EQ(jobs_.size(), 2);
  std::swap(jobs_[0], jobs_[1]);
  Finish();
  Finish();
  EXPECT_EQ(answers_[99], Answer::kReady);
  EXPECT_FALSE(There(Path(0)));
  EXPECT_EQ(State(Path(0)), FileState::kChanged);
  EXPECT_EQ(room_->used(CopyPlace::kKept), 0);
  EXPECT_EQ(answers_[Ask(Path(0))], Answer::kSource);
  EXPECT_TRUE(jobs_.empty());
}

TEST_F(BookTest, AChangeReachesAllNamesOfAFile) {
  links_["/data/link"] = Path(0);
  const uint64_t asked = Ask("/data/link");
  Finish();
  Finish();
  EXPECT_EQ(answers_[asked], Answer::kReady);
  EXPECT_TRUE(There(Path(0)));
  const std::string_view view = "/data/link";
  book_->Changed({&view, 1}, 99);
  Finish();
  EXPECT_EQ(answers_[99], Answer::kReady);
  EXPECT_FALSE(There(Path(0)));
  EXPECT_EQ(State(Path(0)), FileState::kChanged);
}

TEST_F(BookTest, ATableThatIsFullEndsAllTrust) {
  std::vector<std::string> paths;
  const size_t fit = (kSlots + kMostSlots) / 4 * 3;
  for (size_t i = 0; i <= fit; ++i) paths.push_back(Path(i));
  const std::vector<std::string_view> views(paths.begin(), paths.end());
  book_->Changed({views.data(), fit}, 98);
  EXPECT_FALSE(table_.closed());
  EXPECT_EQ(table_grows_, 1U);
  EXPECT_EQ(State(Path(0)), FileState::kChanged);
  EXPECT_EQ(State(Path(fit - 1)), FileState::kChanged);
  book_->Changed(views, 99);
  EXPECT_TRUE(table_.closed());
  EXPECT_EQ(said_.size(), 1);
}

TEST_F(BookTest, AFullDiskStopsCopyingForAWhile) {
  const uint64_t asked = Ask(Path(0));
  (void)Ask(Path(1));
  Finish(Outcome::kNoSpace);
  Finish(Outcome::kNoSpace);
  EXPECT_EQ(answers_[asked], Answer::kSource);
  EXPECT_EQ(answers_[Ask(Path(2))], Answer::kSource);
  ASSERT_EQ(said_.size(), 1);
  EXPECT_NE(said_[0].find("/data/cache takes no copies"), std::string::npos) << said_[0];
  EXPECT_NE(said_[0].find("--cache"), std::string::npos) << said_[0];
  EXPECT_GT(book_->Pump(now_), 0);
  now_ += 11 * kSecond;
  (void)Ask(Path(2));
  EXPECT_EQ(jobs_.size(), 1);
}

TEST_F(BookTest, TwoReadersOfOneStagedCopyReadItOnce) {
  Make(0, 4 * 4096);
  Announce(7, 8);
  Announce(8, 8);
  const std::vector<uint32_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
  ASSERT_TRUE(book_->Order(7, 0, order));
  ASSERT_TRUE(book_->Order(8, 0, order));
  for (size_t i = 0; i < 8; ++i) {
    FinishAll();
    EXPECT_TRUE(Open(Path(i))) << i;
    FinishAll();
    EXPECT_TRUE(Open(Path(i))) << i;  // the other, later
  }
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(reads_[Path(i)], 1);
  EXPECT_EQ(metrics_->unread.value(), 0);
}

TEST_F(BookTest, WhoWaitsGetsItsCopyThoughWhatIsAheadTakesTheRoom) {
  BookOptions options;
  options.in_flight = 4;
  Make(0, 8 * 4096, options);
  Announce(7, 40);
  std::vector<uint32_t> order(40);
  for (uint32_t i = 0; i < 40; ++i) order[i] = i;
  ASSERT_TRUE(book_->Order(7, 20, order));  // the reader is not where it seems to be
  FinishAll();
  EXPECT_TRUE(There(Path(7)));
  for (size_t i = 8; i < 40; ++i) {
    if (Open(Path(i))) continue;
    const uint64_t asked = Ask(Path(i));
    while (!jobs_.empty()) Finish();
    EXPECT_EQ(answers_[asked], Answer::kReady) << i;
    EXPECT_TRUE(Open(Path(i)));
  }
}

TEST_F(BookTest, WhatAReaderHasPassedMakesRoom) {
  Make(0, 4 * 4096);
  Announce(7, 100);
  std::vector<uint32_t> order(100);
  for (uint32_t i = 0; i < 100; ++i) order[i] = i;
  ASSERT_TRUE(book_->Order(7, 0, order));
  FinishAll();
  EXPECT_TRUE(There(Path(3)));
  EXPECT_FALSE(There(Path(4)));
  // It skipped them; after a while they are not waited for.
  ASSERT_TRUE(book_->At(7, 50));
  FinishAll();
  now_ += kSecond;
  FinishAll();
  FinishAll();
  EXPECT_TRUE(There(Path(50)));
  EXPECT_TRUE(There(Path(53)));
  EXPECT_EQ(metrics_->unread.value(), 4);
  // Another order from here on.
  std::reverse(order.begin(), order.end());
  ASSERT_TRUE(book_->Order(7, 50, order));
  FinishAll();
  EXPECT_TRUE(There(Path(99)));
  book_->EndStream(7);
  EXPECT_EQ(answers_[Ask(Path(70))], Answer::kSource);  // nobody announces it any more
}

TEST_F(BookTest, WhatHadNoRoomIsStagedOnceItIsAnnounced) {
  Make(0, 4 * 4096);
  sizes_[Path(1)] = 100'000;  // more than both budgets
  const uint64_t asked = Ask(Path(0));
  Finish();
  EXPECT_EQ(answers_[asked], Answer::kSource);
  EXPECT_EQ(State(Path(0)), FileState::kSource);
  EXPECT_EQ(answers_[Ask(Path(1))], Answer::kSource);
  EXPECT_TRUE(jobs_.empty());  // once it is full, nothing is tried
  Announce(7, 3);
  EXPECT_EQ(State(Path(0)), FileState::kKnown);
  const std::vector<uint32_t> order = {0, 1, 2};
  ASSERT_TRUE(book_->Order(7, 0, order));
  FinishAll();
  EXPECT_TRUE(There(Path(0)));
  EXPECT_FALSE(There(Path(1)));
  EXPECT_TRUE(There(Path(2)));
  EXPECT_EQ(State(Path(1)), FileState::kSource);
  EXPECT_EQ(answers_[Ask(Path(1))], Answer::kSource);
  EXPECT_TRUE(jobs_.empty());
}

TEST_F(BookTest, RangesOfALargeFileComeFirst) {
  OpenLarge((20 << 20) + 5);
  book_->Pump(now_);
  EXPECT_TRUE(jobs_.empty());
  now_ += kSecond;  // nobody reads: the rest of it
  book_->Pump(now_);
  EXPECT_EQ(Blocks(), (std::vector<size_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}));
  // It is under way already.
  EXPECT_EQ(ReadRange(10 << 20, 2 << 20), Answer::kNone);
  for (int i = 0; i < 12; ++i) {
    EXPECT_FALSE(answers_.contains(waiter_));
    Finish();
  }
  EXPECT_EQ(answers_[waiter_], Answer::kReady);
  EXPECT_EQ(ReadRange((20 << 20) + 5, 100), Answer::kReady);  // at its end
  now_ += kSecond;
  FinishAll();
  EXPECT_EQ(State(Path(0)), FileState::kKept);
  EXPECT_EQ(ReadRange(0, 100), Answer::kReady);
  EXPECT_EQ(table_.large(), 1U);
}

TEST_F(BookTest, WhatIsReadAtRandomIsNotCopied) {
  OpenLarge(200 << 20);
  SplitMix64 rng(1);
  for (int i = 0; i < 100; ++i) {
    // A record: its head, then the rest of it.
    const uint64_t at = (3 << 20) + rng.Next() % (190 << 20);
    EXPECT_EQ(ReadRange(at, 8), Answer::kSource);
    EXPECT_EQ(ReadRange(at + 8, 150'000), Answer::kSource);
    now_ += 10 * kMilli;
    book_->Pump(now_);
    EXPECT_TRUE(jobs_.empty());
  }
  // What has been read twice over is copied.
  for (int i = 0; i < 2000; ++i) {
    (void)ReadRange((3 << 20) + rng.Next() % (190 << 20), 1 << 20);
    FinishAll();
  }
  EXPECT_EQ(ReadRange(50 << 20, 1 << 20), Answer::kReady);
  EXPECT_EQ(ReadRange(198 << 20, 100'000), Answer::kSource);
}

TEST_F(BookTest, WhoReadsALargeFileAtRandomNeedNotWaitForAnswers) {
  OpenLarge(200 << 20);
  EXPECT_EQ(ReadRange(0, 65536), Answer::kNone);  // a head, which is copied
  FinishAll();
  const auto pass = [this](uint64_t begin) {
    for (uint64_t at = begin; at < begin + 8 * (5 << 20); at += 5 << 20) {
      EXPECT_EQ(State(Path(0)), FileState::kComing);
      EXPECT_EQ(ReadRange(at, 100'000), Answer::kSource);
    }
    EXPECT_EQ(State(Path(0)), FileState::kPassedBy);
  };
  pass(10 << 20);
  EXPECT_EQ(ReadRange(0, 4096), Answer::kReady);  // somebody comes to what is there
  pass(60 << 20);
  for (int i = 0; i < 5 && State(Path(0)) == FileState::kPassedBy; ++i) {
    (void)ReadRange((120 + i) << 20, 1 << 20);  // goes on in order
  }
  EXPECT_EQ(State(Path(0)), FileState::kComing);
  FinishAll();
  pass(160 << 20);
  now_ += 2 * kSecond;
  book_->Pump(now_);  // nobody reads: it is copied, and who comes asks
  EXPECT_EQ(State(Path(0)), FileState::kComing);
  FinishAll();
  for (int i = 0; i < 300 && State(Path(0)) != FileState::kKept; ++i) {
    now_ += 2 * kSecond;
    book_->Pump(now_);
    FinishAll();
  }
  EXPECT_EQ(State(Path(0)), FileState::kKept);
}

TEST_F(BookTest, WhoReadsALargeFileFromItsStartFindsItCopied) {
  OpenLarge(300 << 20);
  size_t waited = 0;
  for (uint64_t at = 0; at < (300 << 20); at += 65536) {
    if (at % (1 << 20) != 0) continue;  // a client that has a block asks for no other
    if (ReadRange(at, 65536) != Answer::kReady) ++waited;
    FinishAll();
    ASSERT_EQ(answers_[waiter_], Answer::kReady);
  }
  EXPECT_LT(waited, 8U);
  EXPECT_EQ(State(Path(0)), FileState::kKept);
}

TEST_F(BookTest, ALongRunInTheMiddleIsCopied) {
  OpenLarge(300 << 20);
  uint64_t at = (100 << 20) + 77;
  const uint64_t begin = at;
  while (ReadRange(at, 1 << 20) == Answer::kSource) at += 1 << 20;
  EXPECT_LE(at - begin, 4U << 20);
  for (int i = 0; i < 20; ++i) {
    book_->Pump(now_);
    while (!jobs_.empty()) Finish();
    EXPECT_EQ(answers_[waiter_], Answer::kReady);
    at += 1 << 20;
    (void)ReadRange(at, 1 << 20);
  }
  EXPECT_EQ(answers_[waiter_], Answer::kReady);
  EXPECT_EQ(State(Path(0)), FileState::kComing);
}

TEST_F(BookTest, WhileAMappingIsReadNothingIsCopied) {
  OpenLarge(100 << 20);
  progress_[77].mark = 5;
  book_->Direct(Path(0), 77, -1, 50, now_);
  EXPECT_EQ(answers_[50], Answer::kSource);
  for (int i = 0; i < 50; ++i) {
    ++progress_[77].mark;
    now_ += 200 * kMilli;
    EXPECT_GT(book_->Pump(now_), 0);
    EXPECT_TRUE(jobs_.empty());
  }
  now_ += 2 * kSecond;  // it has come to rest
  book_->Pump(now_);
  now_ += 2 * kSecond;
  EXPECT_EQ(answers_[Ask(Path(0))], Answer::kPartial);  // opened, and not read
  book_->Pump(now_);
  ASSERT_FALSE(jobs_.empty());
  for (int i = 0; i < 80; ++i) {
    Finish();
    book_->Pump(now_);
  }
  // The most of it is there: who maps it now waits for the rest.
  book_->Direct(Path(0), 77, -1, 51, now_);
  EXPECT_FALSE(answers_.contains(51));
  while (!jobs_.empty()) Finish();
  EXPECT_EQ(answers_[51], Answer::kReady);
  book_->Direct(Path(0), 77, -1, 52, now_);
  EXPECT_EQ(answers_[52], Answer::kReady);
}

TEST_F(BookTest, AMappingThatIsReadWithoutRestIsCopiedWhenItIsReadAgain) {
  OpenLarge(100 << 20);
  progress_[77] = {.mark = 1, .bytes = 1 << 30};
  book_->Direct(Path(0), 77, -1, 50, now_);
  for (int i = 0; i < 300 && State(Path(0)) != FileState::kKept; ++i) {
    now_ += 100 * kMilli;
    book_->Pump(now_);
    if (i < 100) {
      EXPECT_TRUE(jobs_.empty()) << i;  // for the first time
    }
    while (!jobs_.empty()) Finish();
    progress_[77] = {.mark = progress_[77].mark + 1, .bytes = progress_[77].bytes + (1 << 20)};
  }
  EXPECT_EQ(State(Path(0)), FileState::kKept);
}

TEST_F(BookTest, AFileLargerThanTheRoomIsKeptInPart) {
  constexpr uint64_t kPiece = 128 << 10;
  constexpr uint64_t kPieces = 800;  // 100 MiB
  Make(50 << 20, 0);
  grows_ = true;
  sizes_[Path(0)] = kPieces * kPiece;
  (void)Ask(Path(0));
  Finish();
  SplitMix64 rng(5);
  std::vector<uint64_t> order(kPieces);
  for (uint64_t i = 0; i < kPieces; ++i) order[i] = i;
  size_t past = 0;
  for (int pass = 0; pass < 3; ++pass) {
    std::shuffle(order.begin(), order.end(), std::mt19937_64(rng.Next()));
    past = 0;
    for (const uint64_t i : order) {
      if (ReadRange(i * kPiece, kPiece) == Answer::kSource) ++past;
      now_ += kSecond;  // also when nobody else reads
      book_->Pump(now_);
      while (!jobs_.empty()) Finish();
    }
  }
  EXPECT_EQ(past, kPieces / 2);
  EXPECT_EQ(room_->used(CopyPlace::kKept), 50U << 20);
  book_->OnAllLeft();
  EXPECT_EQ(room_->used(CopyPlace::kKept), 0U);
}

TEST_F(BookTest, AProcessThatHasGoneReadsNoMore) {
  OpenLarge(100 << 20);
  book_->Direct(Path(0), 77, -1, 50, now_);
  book_->Direct("/data/other", 77, -1, 51, now_);
  EXPECT_EQ(answers_[51], Answer::kSource);
  now_ += kSecond;
  book_->Pump(now_);
  EXPECT_FALSE(jobs_.empty());
  book_->OnAllLeft();
  EXPECT_EQ(parts_removed_, 1U);
}

TEST_F(BookTest, ALargeFileThatFailsIsLeftToTheSource) {
  Make(64 << 20, 0);
  sizes_[Path(0)] = 20 << 20;
  (void)Ask(Path(0));
  Finish();
  book_->Range(Path(0), 0, 1 << 20, 50, now_);
  book_->Pump(now_);
  Finish(Outcome::kError);
  EXPECT_EQ(answers_[50], Answer::kSource);
  EXPECT_EQ(parts_removed_, 1);
  EXPECT_EQ(room_->used(CopyPlace::kKept), 0);
  while (!jobs_.empty()) Finish();  // what was under way changes nothing
  EXPECT_FALSE(There(Path(0)));
  EXPECT_EQ(book_->in_flight(), 0);
}

// Readers that open what was announced, in any interleaving: right budgets, few reads, no question
// without an answer.
TEST_F(BookTest, RandomReadersNeverReadMoreThanTheyMust) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SplitMix64 rng(seed);
    const size_t files = 20 + rng.Below(60);
    const uint64_t kept = rng.Below(files) * 4096;
    const uint64_t staged = (4 + rng.Below(12)) * 4096;
    BookOptions options;
    options.in_flight = 1 + rng.Below(16);
    Make(kept, staged, options);
    Announce(7, files);
    uint64_t position = 0;
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::vector<uint32_t> order(files);
      for (uint32_t i = 0; i < files; ++i) order[i] = i;
      for (size_t i = files; i > 1; --i) std::swap(order[i - 1], order[rng.Below(i)]);
      ASSERT_TRUE(book_->Order(7, position, order));
      // Several workers read what was announced a bit out of order.
      if (seed % 2 == 1) {
        for (size_t i = 0; i + 8 <= files; i += 8) {
          std::reverse(order.begin() + static_cast<ptrdiff_t>(i),
                       order.begin() + static_cast<ptrdiff_t>(i + 8));
        }
      }
      for (const uint32_t file : order) {
        for (uint64_t n = rng.Below(4); n > 0 && !jobs_.empty(); --n) Finish();
        now_ += kMilli;
        book_->Pump(now_);
        ASSERT_LE(room_->used(CopyPlace::kKept), kept);
        ASSERT_LE(room_->used(CopyPlace::kStaged), staged + staged / 4);
        if (!Open(Path(file))) {
          const uint64_t asked = Ask(Path(file));
          for (int i = 0; !answers_.contains(asked) && i < 1000; ++i) {
            book_->Pump(now_);
            if (!jobs_.empty()) Finish();
          }
          ASSERT_TRUE(answers_.contains(asked)) << "seed " << seed;
          ASSERT_EQ(answers_[asked], Answer::kReady) << "seed " << seed;
          ASSERT_TRUE(Open(Path(file)));
        }
        ++position;
        // Some readers say where they are only now and then.
        if (seed % 2 == 0 || position % 32 == 0) {
          ASSERT_TRUE(book_->At(7, position));
        }
      }
    }
    FinishAll();
    int total = 0;
    for (const auto& [path, reads] : reads_) total += reads;
    const size_t fits = std::min<size_t>(files, kept / 4096);
    EXPECT_LE(total, static_cast<int>(fits + 3 * (files - fits))) << "seed " << seed;
    EXPECT_EQ(opens_, files) << "seed " << seed;
    opens_ = 0;
  }
}

TEST_F(BookTest, AFileIsReadForTheJobThatAskedFirst) {
  book_->Get(Path(0), ++waiter_, now_, 2);
  book_->Get(Path(0), ++waiter_, now_, 3);
  book_->Get(Path(1), ++waiter_, now_, 3);
  ASSERT_EQ(jobs_.size(), 2u);
  EXPECT_EQ(jobs_[0].job, 2);
  EXPECT_EQ(jobs_[1].job, 3);
  FinishAll();
  EXPECT_EQ(answers_[1], Answer::kReady);
  EXPECT_EQ(answers_[2], Answer::kReady);
}

TEST_F(BookTest, BlocksAreReadForWhoReadsThem) {
  OpenLarge(64 << 20);
  book_->Range(Path(0), 0, 1 << 20, ++waiter_, now_, 2);
  ASSERT_EQ(jobs_.size(), 1u);
  EXPECT_EQ(jobs_[0].job, 2);
  book_->Range(Path(0), 1 << 20, 3 << 20, ++waiter_, now_, 2);
  book_->Pump(now_);
  ASSERT_GT(jobs_.size(), 4u) << "nothing is read ahead";
  for (const CopyJob& job : jobs_) EXPECT_EQ(job.job, 2);
}

TEST_F(BookTest, JobsHaveEqualPartsOfWhatIsReadAhead) {
  BookOptions options;
  options.in_flight = 8;
  Make(1000 * 4096, 0, options);
  book_->SetInFlight(8, 2);
  std::vector<uint32_t> order;
  std::vector<std::string> paths;
  for (uint32_t i = 0; i < 20; ++i) order.push_back(i);
  for (size_t i = 0; i < 40; ++i) paths.push_back(Path(i));
  const std::vector<std::string_view> views(paths.begin(), paths.end());
  ASSERT_TRUE(book_->Names(1, 0, std::span(views).first(20), 1));
  ASSERT_TRUE(book_->Order(1, 0, order));
  book_->Pump(now_);
  EXPECT_EQ(jobs_.size(), 4u);  // none ends: its job waits for its share of the source
  ASSERT_TRUE(book_->Names(2, 0, std::span(views).last(20), 2));
  ASSERT_TRUE(book_->Order(2, 0, order));
  book_->Pump(now_);
  EXPECT_EQ(std::count_if(jobs_.begin(), jobs_.end(), [](const CopyJob& j) { return j.job == 2; }),
            4);
  FinishAll();
  for (const std::string& path : paths) EXPECT_TRUE(There(path));
}

}  // namespace
}  // namespace forebay::files
