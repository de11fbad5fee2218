#include "files/client.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "files/raw_call.h"

namespace forebay::files {
namespace {

// Nobody waits longer for the service: then the source is as good.
constexpr int64_t kPatienceMs = 10'000;
// After such a wait the service is left alone for a while.
constexpr int64_t kQuietMs = 30'000;
// A change is told in passing; a service that is this slow is gone.
constexpr int64_t kChangePatienceMs = 5'000;
// A program starts with it, once; a shell may start many.
constexpr int64_t kTablePatienceMs = 3'000;
// What one question asks for at most. More would wait for all of it before the first byte.
constexpr uint64_t kMostAsked = 4 << 20;
constexpr int kMostParts = 3;  // that end while they are read
// Between looks, while the service is waited for, at whether the disk of the copies hangs.
constexpr int64_t kLookMs = 100;

constexpr std::string_view kCopies = "/copies/";

int64_t NowMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

int OpenAt(const char* path, int flags) {
  for (;;) {
    const long fd = RawCall(SYS_openat, AT_FDCWD, RawArgument(path), flags, 0);
    if (fd != -EINTR) return static_cast<int>(fd);
  }
}

void CloseFd(int fd) { RawCall(SYS_close, fd); }

// That a block of this very part is there; never 0.
uint64_t SeenOf(const FileKey& key, uint64_t parts, uint64_t block) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  return ((key.low ^ (parts * kOdd)) + (block + 1) * 0xC2B2AE3D27D4EB4F) | 1;
}

// 0 where it is no number of a job.
JobNumber ParseJob(const char* text) {
  uint32_t number = 0;
  for (; text != nullptr && *text != 0; ++text) {
    if (*text < '0' || *text > '9') return 0;
    number = number * 10 + static_cast<uint32_t>(*text - '0');
    if (number > UINT16_MAX) return 0;
  }
  return static_cast<JobNumber>(number);
}

// A connected socket, or a negative errno. Without patience it does not wait for anything.
int Connect(const char* path, int64_t patience_ms) {
  const int how = SOCK_SEQPACKET | SOCK_CLOEXEC | (patience_ms > 0 ? 0 : SOCK_NONBLOCK);
  const auto fd = static_cast<int>(RawCall(SYS_socket, AF_UNIX, how, 0));
  if (fd < 0) return fd;
  if (patience_ms > 0) {
    // Bounds the wait for a place in the queue of those who connect.
    const timeval wait{.tv_sec = patience_ms / 1000, .tv_usec = 0};
    RawCall(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, RawArgument(&wait), sizeof(wait));
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, std::strlen(path) + 1);
  long rc = -EINTR;
  while (rc == -EINTR) rc = RawCall(SYS_connect, fd, RawArgument(&address), sizeof(address));
  if (rc == 0) return fd;
  CloseFd(fd);
  return static_cast<int>(rc);
}

// Without a path where it is empty.
bool SendQuestion(int fd, Header header, std::string_view path) {
  auto length = static_cast<uint16_t>(path.size());
  header.count = path.empty() ? 0 : 1;
  header.bytes = path.empty() ? 0 : static_cast<uint32_t>(sizeof(length) + path.size());
  iovec parts[] = {{.iov_base = &header, .iov_len = sizeof(header)},
                   {.iov_base = &length, .iov_len = sizeof(length)},
                   {.iov_base = const_cast<char*>(path.data()), .iov_len = path.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = path.empty() ? 1 : 3;
  long rc = -EINTR;
  while (rc == -EINTR) rc = RawCall(SYS_sendmsg, fd, RawArgument(&message), MSG_NOSIGNAL);
  return rc > 0;
}

// Until something can be read, or `end`, or, with `gives_up`, copies are not to be used.
bool WaitForAnswer(int fd, int64_t end, const FileTable& table, bool gives_up) {
  for (;;) {
    int64_t left = end - NowMs();
    if (left <= 0 || (gives_up && table.passed_by())) return false;
    if (gives_up && left > kLookMs) left = kLookMs;
    pollfd poll{.fd = fd, .events = POLLIN, .revents = 0};
    timespec wait{.tv_sec = left / 1000, .tv_nsec = (left % 1000) * 1'000'000};
    const long rc = RawCall(SYS_ppoll, RawArgument(&poll), 1, RawArgument(&wait), 0, 0);
    if (rc > 0) return true;
    if (rc != -EINTR && rc != 0) return false;
  }
}

// An answer and the descriptor that comes with it; -1: none of both has come.
int TakeDescriptor(int fd, Header* reply) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{.iov_base = reply, .iov_len = sizeof(*reply)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  long rc = -EINTR;
  while (rc == -EINTR) {
    rc = RawCall(SYS_recvmsg, fd, RawArgument(&message), MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  }
  const cmsghdr* const rights = rc < 0 ? nullptr : CMSG_FIRSTHDR(&message);
  int got = -1;
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof(got))) {
    std::memcpy(&got, CMSG_DATA(rights), sizeof(got));
  }
  if (got >= 0 && (rc != sizeof(*reply) || reply->magic != Header::kMagic)) {
    CloseFd(got);
    got = -1;
  }
  return got;
}

// The table's descriptor and how much of it to map; -1: the service does not give it.
int AskTable(const char* socket, JobNumber job, size_t* bytes) {
  const int64_t end = NowMs() + kTablePatienceMs;
  const int fd = Connect(socket, kTablePatienceMs);
  if (fd < 0) return -1;
  int got = -1;
  if (SendQuestion(fd, {.kind = Kind::kTable, .job = job}, {})) {
    // Who is not waited for any more is told so, unless the answer has come: it must know of
    // programs that do not tell of changes.
    if (!WaitForAnswer(fd, end, FileTable(), false)) RawCall(SYS_shutdown, fd, SHUT_RDWR);
    Header reply{};
    got = TakeDescriptor(fd, &reply);
    *bytes = reply.a;
  }
  CloseFd(fd);
  return got;
}

}  // namespace

bool Client::Start(const char* cache, const char* socket, const char* sources, const char* job) {
  if (mapping_ != nullptr || cache == nullptr || socket == nullptr || sources == nullptr) {
    return false;
  }
  const size_t cache_length = NormalPath({}, cache, cache_, sizeof(cache_));
  const size_t socket_length = std::strlen(socket);
  if (cache_length == 0 || cache[0] != '/' || socket_length == 0 ||
      socket_length >= sizeof(socket_) || cache_length + kCopies.size() > sizeof(cache_)) {
    return false;
  }
  std::memcpy(socket_, socket, socket_length + 1);
  job_ = ParseJob(job);
  size_t used = 0;
  source_count_ = 0;
  for (const char* at = sources; *at != 0;) {
    const char* end = at;
    while (*end != 0 && *end != ':') ++end;
    if (end != at) {
      const size_t length = NormalPath({}, {at, static_cast<size_t>(end - at)}, sources_ + used,
                                       sizeof(sources_) - 1 - used);
      if (*at != '/' || length == 0 || source_count_ == kMostSources) return false;
      source_lengths_[source_count_++] = static_cast<uint32_t>(length);
      if (length > longest_source_) longest_source_ = length;
      used += length + 1;
    }
    at = *end == 0 ? end : end + 1;
  }
  sources_[used] = 0;
  if (used == 0) return false;

  if (!MapTable()) return false;
  cache_inside_ = false;
  for (const char* at = sources_; *at != 0; at += std::strlen(at) + 1) {
    if (IsBelow({cache_, cache_length}, at)) cache_inside_ = true;
  }
  std::memcpy(cache_ + cache_length, kCopies.data(), kCopies.size());
  cache_length_ = cache_length;
  return true;
}

bool Client::MapTable() {
  size_t bytes = 0;
  const int fd = AskTable(socket_, job_, &bytes);
  if (fd < 0) return false;
  const long there = RawCall(SYS_lseek, fd, 0, SEEK_END);
  void* mapping = MAP_FAILED;
  if (there >= static_cast<long>(sizeof(FileTableHeader))) {
    // As all calls on this descriptor: whoever watches libc's sees none of them.
    const long at =
        RawCall(SYS_mmap, 0, static_cast<long>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at > 0 || at < -4095) mapping = reinterpret_cast<void*>(at);
  }
  const FileTable found = mapping == MAP_FAILED ? FileTable() : FileTable::Of(mapping, bytes);
  if (!found.valid()) {
    // This program has no room for it, and will tell of no changes.
    const uint32_t one = 1;
    RawCall(SYS_pwrite64, fd, RawArgument(&one), sizeof(one), offsetof(FileTableHeader, unwatched));
  }
  CloseFd(fd);
  if (mapping == MAP_FAILED) return false;
  if (!found.valid()) {
    munmap(mapping, bytes);
    return false;
  }
  mapping_ = mapping;
  mapping_bytes_ = bytes;
  table_ = found;
  return true;
}

void Client::Stop() {
  if (mapping_ == nullptr) return;
  table_ = FileTable();
  munmap(mapping_, mapping_bytes_);
  mapping_ = nullptr;
}

bool Client::Covers(std::string_view path) const {
  for (const char* at = sources_; *at != 0;) {
    const std::string_view source(at);
    if (IsBelow(path, source)) {
      return !cache_inside_ || !IsBelow(path, {cache_, cache_length_});
    }
    at += source.size() + 1;
  }
  return false;
}

bool Client::Plainly(std::string_view path) const {
  const char* at = sources_;
  for (size_t n = 0; n < source_count_; at += source_lengths_[n] + 1, ++n) {
    const size_t length = source_lengths_[n];
    if (length >= path.size() || SameBytes(path.data(), at, length) != length ||
        path[length] != '/') {
      continue;
    }
    if (path.back() == '/' || HasOddName(path, length)) return false;
    return !cache_inside_ || !IsBelow(path, {cache_, cache_length_});
  }
  return false;
}

bool Client::Knows(std::string_view path) const {
  return on() && table_.Find(KeyOf(path)) != nullptr;
}

size_t Client::CopyName(const FileKey& key, std::string_view ending, char* out, size_t size) const {
  const size_t folder = cache_length_ + kCopies.size();
  const size_t length = folder + kNameLength + ending.size();
  if (length + 1 > size) return 0;
  std::memcpy(out, cache_, folder);
  WriteName(key, out + folder);
  std::memcpy(out + folder + kNameLength, ending.data(), ending.size());
  out[length] = 0;
  return length;
}

int Client::OpenCopy(std::string_view path, int flags, Found* found, uint64_t* size) const {
  *found = Found::kSource;
  if (!uses_copies()) return -1;
  const FileKey key = KeyOf(path);
  char name[kMostCopyPath];
  if (CopyName(key, "", name, sizeof(name)) == 0) return -1;
  // The second time round, the service has said that the copy is there.
  for (const bool asked : {false, true}) {
    FileSlot* slot = table_.Find(key);
    const FileState state = slot == nullptr ? FileState::kKnown : FileTable::StateOf(*slot);
    if (state == FileState::kChanged || state == FileState::kSource) return -1;
    if (asked || state == FileState::kKept || state == FileState::kStaged) {
      const int fd = OpenAt(name, O_RDONLY | (flags & kFlags));
      if (fd >= 0) {
        if (state == FileState::kKept) {
          // Only counted, and one lost to another thread is no matter.
          slot->opens.store(slot->opens.load(std::memory_order_relaxed) + 1,
                            std::memory_order_relaxed);
        } else if (slot != nullptr) {
          slot->opens.fetch_add(1, std::memory_order_relaxed);
        }
        *found = Found::kCopy;
        return fd;
      }
      // Whatever else it is, the source shows it, too: a link not to be followed, no descriptor.
      if (fd != -ENOENT) return -1;
    }
    if (asked) return -1;
    uint64_t a = 0;
    uint64_t b = 0;
    const Answer answer = Ask(Kind::kGet, path, &a, &b);
    if (answer == Answer::kPartial) {
      *found = Found::kPartial;
      if (size != nullptr) *size = a;
    }
    if (answer != Answer::kReady) return -1;
  }
  return -1;
}

[[gnu::noinline]] bool Client::AwaitAll(std::string_view path, uint64_t size) const {
  uint64_t a = 0;
  uint64_t b = size;
  if (!uses_copies() || Ask(Kind::kRange, path, &a, &b) != Answer::kReady) return false;
  // The last byte is there; its name follows.
  char name[kMostCopyPath];
  for (int i = 0; i < 40 && !CopyPath(path, name, sizeof(name)); ++i) {
    const timespec pause{.tv_sec = 0, .tv_nsec = 5'000'000};
    RawCall(SYS_nanosleep, RawArgument(&pause), 0);
  }
  return CopyPath(path, name, sizeof(name));
}

bool Client::ReadsDirectly(std::string_view path, int fd) const {
  uint64_t a = fd < 0 ? 0 : static_cast<uint64_t>(fd) + 1;
  uint64_t b = 0;
  return uses_copies() && Ask(Kind::kDirect, path, &a, &b) == Answer::kReady;
}

bool Client::CopyPath(std::string_view path, char* out, size_t size) const {
  if (!uses_copies()) return false;
  const FileKey key = KeyOf(path);
  const FileSlot* slot = table_.Find(key);
  if (slot == nullptr) return false;
  const FileState state = FileTable::StateOf(*slot);
  if (state != FileState::kKept && state != FileState::kStaged) return false;
  return CopyName(key, "", out, size) > 0;
}

void Client::Changed(std::string_view path, bool follow) const {
  if (!on()) return;
  uint64_t a = follow ? 0 : kOnlyTheName;
  uint64_t b = 0;
  if (Ask(Kind::kChanged, path, &a, &b) == Answer::kBad) {
    // Nobody drops the copy, so nobody may use one.
    FileTable table = table_;
    table.Close();
  }
}

void Client::FileChanged(std::string_view path, bool follow) const {
  if (!on()) return;
  const FileSlot* slot = table_.Find(KeyOf(path));
  if (slot != nullptr && FileTable::StateOf(*slot) == FileState::kChanged) return;
  Changed(path, follow);
}

size_t Client::Piece(uint64_t offset, size_t bytes) {
  const uint64_t end = (offset / kBlock + kMostAsked / kBlock) * kBlock;
  return bytes < end - offset ? bytes : static_cast<size_t>(end - offset);
}

int64_t Client::ReadPart(std::string_view path, void* out, size_t bytes, uint64_t offset,
                         Seen* seen) const {
  if (!uses_copies() || bytes == 0 || offset > UINT64_MAX / 4) return -EAGAIN;
  // A part that ended meanwhile most often is complete now: the source would read it once more.
  int64_t got = -ESTALE;
  for (int i = 0; i < kMostParts && got == -ESTALE; ++i)
    got = TryPart(path, out, bytes, offset, seen);
  return got == -ESTALE ? -EAGAIN : got;
}

// -ESTALE: what was read is of a part that is no more.
int64_t Client::TryPart(std::string_view path, void* out, size_t bytes, uint64_t offset,
                        Seen* seen) const {
  const FileKey key = KeyOf(path);
  const FileSlot* slot = table_.Find(key);
  if (slot == nullptr) return -EAGAIN;
  // A part of this name that is another than the one asked about has holes.
  const uint64_t parts = slot->parts.load(std::memory_order_acquire);
  const FileState state = FileTable::StateOf(*slot);
  if (state == FileState::kChanged || state == FileState::kSource) return -EAGAIN;
  if (state == FileState::kPassedBy) {
    Tell(Kind::kRange, path, offset, bytes);
    return -EAGAIN;
  }
  const bool whole = state == FileState::kKept || state == FileState::kStaged;
  if (!whole) {
    // Whole blocks come: most programs come back for the rest of one.
    bytes = Piece(offset, bytes);
    const uint64_t first = offset / kBlock;
    const uint64_t last = (offset + bytes - 1) / kBlock;
    const bool known = seen != nullptr && first == last &&
                       seen->block.load(std::memory_order_relaxed) == SeenOf(key, parts, first);
    if (!known) {
      uint64_t a = offset;
      uint64_t b = bytes;
      if (Ask(Kind::kRange, path, &a, &b) != Answer::kReady) return -EAGAIN;
      if (seen != nullptr) {
        seen->block.store(SeenOf(key, parts, last), std::memory_order_relaxed);
      }
    }
  }
  char name[kMostCopyPath];
  for (const bool part : {true, false}) {
    if (part && whole) continue;
    if (CopyName(key, part ? ".part" : "", name, sizeof(name)) == 0) return -EAGAIN;
    const int fd = OpenAt(name, O_RDONLY | O_CLOEXEC);
    if (fd == -ENOENT) continue;  // complete by now, or dropped
    if (fd < 0) return -EAGAIN;
    size_t done = 0;
    while (done < bytes) {
      const long got = RawCall(SYS_pread64, fd, RawArgument(static_cast<char*>(out) + done),
                               static_cast<long>(bytes - done), static_cast<long>(offset + done));
      if (got == -EINTR) continue;
      if (got <= 0) break;
      done += static_cast<size_t>(got);
    }
    CloseFd(fd);
    if (part && slot->parts.load(std::memory_order_acquire) != parts) return -ESTALE;
    // The next service makes its own, of which this table knows nothing.
    if (part && !on()) return -EAGAIN;
    return done > 0 ? static_cast<int64_t>(done) : -EAGAIN;
  }
  return -EAGAIN;
}

// One that is not told is no matter: what is told decides what is copied, not what is read.
void Client::Tell(Kind kind, std::string_view path, uint64_t a, uint64_t b) const {
  if (path.size() > 4096 || NowMs() < table_.quiet_until_ms()) return;
  const int fd = Connect(socket_, 0);
  if (fd < 0) return;
  (void)SendQuestion(fd, {.kind = kind, .job = job_, .a = a, .b = b}, path);
  CloseFd(fd);
}

[[gnu::noinline]] Answer Client::Ask(Kind kind, std::string_view path, uint64_t* a,
                                     uint64_t* b) const {
  if (path.size() > 4096) return Answer::kBad;
  const int64_t patience = kind == Kind::kChanged ? kChangePatienceMs : kPatienceMs;
  const int64_t now = NowMs();
  if (kind != Kind::kChanged && now < table_.quiet_until_ms()) return Answer::kBad;
  const int64_t end = now + patience;
  const int fd = Connect(socket_, patience);
  if (fd < 0) return Answer::kBad;

  Answer answer = Answer::kBad;
  if (SendQuestion(fd, {.kind = kind, .job = job_, .a = *a, .b = *b}, path) &&
      WaitForAnswer(fd, end, table_, kind != Kind::kChanged)) {
    Header reply{};
    long rc = -EINTR;
    while (rc == -EINTR) {
      rc = RawCall(SYS_recvfrom, fd, RawArgument(&reply), sizeof(reply), MSG_DONTWAIT, 0, 0);
    }
    if (rc == sizeof(reply) && reply.magic == Header::kMagic) {
      answer = reply.answer;
      *a = reply.a;
      *b = reply.b;
    }
  }
  CloseFd(fd);
  if (answer == Answer::kBad && kind != Kind::kChanged && NowMs() >= end) {
    // It may be stopped: one wait is enough, for all who share the table.
    FileTable table = table_;
    table.KeepQuiet(NowMs() + kQuietMs);
  }
  return answer;
}

}  // namespace forebay::files
