#include "port/rank_looks.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/owned.h"
#include "base/thread_annotations.h"
#include "wire/message.h"

namespace forebay {
namespace {

// Between two questions of who waits: as long as it has waited, within these.
constexpr Nanos kShortestPause = kMilli;
constexpr Nanos kLongestPause = 20 * kMilli;
// The daemon's own bound is for one look; several may begin and end while somebody waits.
constexpr Nanos kLongestLookWait = 600 * kSecond;
constexpr uint64_t kMostFiles = uint64_t{1} << 32;
constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

// How often this process has opened what.
class Openings {
 public:
  // 0: it is not known. There are too many, or this is a forked child, whose parent's lock may be
  // held.
  uint64_t Next(const std::string& name) {
    constexpr size_t kMost = 4096;
    if (fork_generation_ != ForkGeneration()) return 0;
    MutexLock lock(mutex_);
    if (counts_.size() >= kMost && !counts_.contains(name)) return 0;
    return ++counts_[name];
  }
  static Openings& OfProcess() {
    static Openings openings;
    return openings;
  }

 private:
  const uint64_t fork_generation_ = ForkGeneration();
  Mutex mutex_;
  std::map<std::string, uint64_t> counts_ GUARDED_BY(mutex_);
};

bool WriteAllTo(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

std::optional<SeenFiles> ReadSeen(const OwnedFd& memory, const wire::AskLookReply& reply) {
  struct stat st = {};
  // Nobody can change or shorten it any more.
  if (!memory.valid() || (fcntl(memory.get(), F_GET_SEALS) & kSeals) != kSeals ||
      fstat(memory.get(), &st) != 0 || reply.files > kMostFiles ||
      static_cast<uint64_t>(st.st_size) != reply.files * sizeof(SeenFile)) {
    return std::nullopt;
  }
  SeenFiles seen{.list = reply.list, .files = std::vector<SeenFile>(reply.files)};
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(seen.files));
  for (size_t have = 0; have < bytes.size();) {
    const ssize_t n =
        ::pread(memory.get(), bytes.data() + have, bytes.size() - have, static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    have += static_cast<size_t>(n);
  }
  return seen;
}

}  // namespace

RankLooks::~RankLooks() {
  if (ticket_ != 0) daemon_->DropLook(ticket_);
}

Result<std::optional<SeenFiles>> RankLooks::Ask(const std::string& name,
                                                const std::function<bool()>& tick) {
  const std::optional<SeenFiles> none;
  wire::AskLook request;
  request.job = rank_.job;
  request.name = name;
  request.rank = rank_.rank;
  request.ranks = rank_.ranks;
  if (!request.Valid()) return none;
  request.opening = Openings::OfProcess().Next(name);
  if (request.opening == 0) return none;
  const Nanos start = SteadyClock().Now();
  while (true) {
    const Nanos now = SteadyClock().Now();
    if (rank_.wrote_at >= 0) request.wrote_ago_ns = std::max<Nanos>(now - rank_.wrote_at, 0);
    OwnedFd memory;
    const Result<wire::AskLookReply> reply = daemon_->AskLook(request, &memory);
    if (!reply) return none;
    switch (reply->turn) {
      case wire::AskLookReply::kLook:
        ticket_ = reply->ticket;
        return none;
      case wire::AskLookReply::kTake:
        return ReadSeen(memory, *reply);
      case wire::AskLookReply::kWait:
        break;
      default:
        return none;
    }
    if (now - start > kLongestLookWait) return none;
    if (!tick()) return Status(Code::kCancelled, "cancelled");
    request.ticket = reply->ticket;
    std::this_thread::sleep_for(
        std::chrono::nanoseconds(std::clamp(now - start, kShortestPause, kLongestPause)));
  }
}

void RankLooks::Progress(uint64_t done) {
  if (ticket_ == 0 || done <= done_) return;
  done_ = done;
  daemon_->TellLookProgress(ticket_);
}

void RankLooks::HandIn(const SeenFiles& seen) {
  if (ticket_ == 0) return;
  const OwnedFd memory(memfd_create("forebay-look", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid() || !WriteAllTo(memory.get(), std::as_bytes(std::span(seen.files))) ||
      fcntl(memory.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    return;  // it is dropped
  }
  wire::HandInLook message;
  message.ticket = std::exchange(ticket_, 0);
  message.list = seen.list;
  message.files = seen.files.size();
  (void)daemon_->HandInLook(message, memory);
}

}  // namespace forebay
