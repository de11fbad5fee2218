// Packets to the file service: any bytes end in an error, or in a question that encodes to the same
// bytes; and whatever is asked in whatever order, with whatever outcome, the book keeps its budgets
// and answers nobody twice.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "expect.h"
#include "files/book.h"
#include "files/packet.h"

namespace {

using namespace forebay;
using namespace forebay::files;

class Input {
 public:
  Input(const uint8_t* data, size_t size) : left_(data, size) {}
  bool empty() const { return left_.empty(); }
  uint8_t Byte() {
    if (left_.empty()) return 0;
    const uint8_t out = left_[0];
    left_ = left_.subspan(1);
    return out;
  }
  std::span<const std::byte> Take(size_t bytes) {
    const auto out = std::as_bytes(left_.first(std::min(bytes, left_.size())));
    left_ = left_.subspan(out.size());
    return out;
  }

 private:
  std::span<const uint8_t> left_;
};

class World : public BookActions {
 public:
  World() : memory_(FileTable::BytesFor(64) / sizeof(uint64_t) + 1) {
    BookOptions options;
    options.in_flight = 4;
    options.partial = 4 << 20;
    options.open_files = 3;
    book_ = std::make_unique<Book>(FileTable::Make(memory_.data(), 64), options, room_, metrics_,
                                   *this);
    book_->AddSource("/d");
  }

  void Ask(std::span<const std::byte> packet, uint64_t who) {
    const auto question = ParseQuestion(packet);
    if (!question) return;
    const Header& header = question->header;
    const uint64_t waiter = 100 + asked_++;
    const auto job = static_cast<JobNumber>(header.job % 4);
    const std::vector<std::byte> again =
        header.kind == Kind::kOrder
            ? OrderPacket(header.a, question->numbers)
            : PathsPacket(header.kind, question->paths, header.a, header.b, header.job);
    FUZZ_EXPECT(again.size() == packet.size());
    switch (header.kind) {
      case Kind::kHello:
        book_->LookAgain();
        book_->SetInFlight(4, header.job % 4);
        break;
      case Kind::kGet:
        if (!question->paths.empty()) book_->Get(question->paths[0], waiter, now_, job);
        break;
      case Kind::kRange:
        if (!question->paths.empty()) {
          book_->Range(question->paths[0], header.a, header.b, waiter, now_, job);
        }
        break;
      case Kind::kDirect:
        if (!question->paths.empty()) {
          const auto process = static_cast<int64_t>(header.b % 4);
          book_->Direct(question->paths[0], process, static_cast<int64_t>(header.a % 8) - 1, waiter,
                        now_);
        }
        break;
      case Kind::kChanged:
        book_->Changed(question->paths, waiter);
        break;
      case Kind::kNames:
        (void)book_->Names(who, header.a, question->paths, job);
        break;
      case Kind::kOrder:
        (void)book_->Order(who, header.a, question->numbers);
        break;
      case Kind::kAt:
        (void)book_->At(who, header.a);
        break;
      default:
        book_->EndStream(who);
    }
  }

  void Finish(uint8_t how) {
    if (jobs_.empty()) return;
    const size_t which = how % jobs_.size();
    CopyResult result;
    result.job = std::move(jobs_[which]);
    jobs_.erase(jobs_.begin() + static_cast<ptrdiff_t>(which));
    result.outcome = static_cast<CopyResult::Outcome>((how >> 4) % 12);
    using Outcome = CopyResult::Outcome;
    CopyJob& job = result.job;
    if (job.kind != CopyJob::Kind::kCopy) {
      if (result.outcome == Outcome::kLarge || result.outcome == Outcome::kAlias ||
          result.outcome == Outcome::kNoRoom) {
        result.outcome = Outcome::kDone;
      }
      if (job.kind == CopyJob::Kind::kList) result.names = {"a", "b", "c", "d", "e", "f"};
    } else if (result.outcome == Outcome::kAlias) {
      result.real = "/d/b";
    } else {
      if (job.source == nullptr) {
        job.source = std::make_shared<SourceFile>();
        job.source->stat.st_size = how % 2 == 0 ? 5 << 20 : 5000;
      }
      const auto size = static_cast<uint64_t>(job.source->stat.st_size);
      if (job.place == CopyPlace::kNone) {
        job.reserved = OnDisk(size);
        job.place = room_.Reserve(job.reserved, job.may_stage, job.urgent);
      }
      if (job.place == CopyPlace::kNone) result.outcome = Outcome::kNoRoom;
      if (job.place != CopyPlace::kNone && result.outcome == Outcome::kNoRoom) {
        result.outcome = Outcome::kError;
      }
      if (result.outcome == Outcome::kDone && size > (2 << 20)) result.outcome = Outcome::kLarge;
    }
    book_->Done(std::move(result), now_);
  }

  void Pass(uint8_t steps) {
    now_ += steps * 20 * kMilli;
    book_->Pump(now_);
    FUZZ_EXPECT(room_.used(CopyPlace::kKept) <= room_.most(CopyPlace::kKept) + 4096);
    FUZZ_EXPECT(book_->in_flight() == jobs_.size());
  }

  void Start(CopyJob job) override { jobs_.push_back(std::move(job)); }
  void Answer(uint64_t waiter, enum Answer, uint64_t) override {
    FUZZ_EXPECT(answered_.insert(waiter).second);
  }
  void Remove(const FileKey&) override {}
  void RemovePart(const FileKey&) override {}
  void Forget(std::string_view) override {}
  bool Exists(const FileKey& key) override { return key.low % 2 == 0; }
  bool Link(const FileKey&, const FileKey&) override { return true; }
  ReadProgress Progress(int64_t process, int64_t) override {
    if (process == 3) return {};
    return {.mark = static_cast<uint64_t>(now_ / kSecond) + 1,
            .bytes = static_cast<uint64_t>(now_)};
  }
  bool GrowTable() override { return false; }  // a full table
  void Say(const std::string&) override {}

 private:
  std::vector<uint64_t> memory_;
  Room room_{12 << 20, 6 << 20};
  Registry registry_;
  BookMetrics metrics_{registry_.AddMechanism("files", "fuzz")};
  std::unique_ptr<Book> book_;
  std::deque<CopyJob> jobs_;
  std::set<uint64_t> answered_;
  uint64_t asked_ = 0;
  Nanos now_ = kSecond;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  World world;
  while (!input.empty()) {
    const uint8_t what = input.Byte();
    if (what < 100) {
      const size_t bytes = input.Byte();
      world.Ask(input.Take(bytes), what % 3);
    } else if (what < 220) {
      world.Finish(input.Byte());
    } else {
      world.Pass(what - 220);
    }
  }
  return 0;
}
