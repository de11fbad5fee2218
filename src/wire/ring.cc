#include "wire/ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

namespace forebay::wire {
namespace {

using internal::kAwake;
using internal::kRingReleases;
using internal::kTellReleased;
using internal::kTellWanted;
using internal::RingHeader;

// The daemon wakes up once for half of them. What a ring may hold is bounded by the daemon.
constexpr uint32_t kSlots = 32;
constexpr Nanos kShortestSleep = 100 * kMicro;
constexpr uint32_t kMostSlots = 64;
constexpr uint32_t kMostSamples = uint32_t{1} << 20;
constexpr size_t kMostBytes = size_t{4} << 20;
constexpr size_t kLeastPayload = 512;  // an error's message has room
constexpr uint8_t kBatch = 0;          // TakeKind::kBatch

// The head of a slot; behind it the offsets, the samples and the lengths, or an error's message.
struct SlotHead {
  uint8_t kind;
  uint8_t cause;
  uint16_t code;
  uint32_t count;  // samples, or bytes of the message
  uint64_t lease;
  uint64_t epoch;
  uint64_t index;
  uint32_t dataset;
};
constexpr size_t kHeadBytes = 64;
static_assert(sizeof(SlotHead) <= kHeadBytes);

Status Nonsense(std::string_view what) {
  return Status(Code::kDataLoss, StrCat("a ring that two processes share says nonsense: ", what));
}

// Shared, not private: the word lies in memory of two processes.
long Futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* wait) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, wait, nullptr, 0);
}

template <typename T>
size_t PutArray(std::byte* to, std::span<const T> values) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
  return values.size_bytes();
}

template <typename T>
size_t GetArray(const std::byte* from, uint32_t count, std::vector<T>* out) {
  out->resize(count);
  if (count != 0) std::memcpy(out->data(), from, count * sizeof(T));
  return count * sizeof(T);
}

}  // namespace

size_t RingShape::SlotBytes() const {
  const size_t payload = std::max(kLeastPayload, size_t{samples} * 16);
  return kHeadBytes + (payload + 63) / 64 * 64;
}

size_t RingShape::Bytes() const { return sizeof(RingHeader) + slots * SlotBytes(); }

RingShape RingShape::For(uint32_t batch_size) {
  RingShape shape;
  shape.samples = batch_size;
  if (batch_size == 0 || batch_size > kMostSamples) return shape;
  const size_t most = kMostBytes / shape.SlotBytes();
  shape.slots = most < 2 ? 0 : static_cast<uint32_t>(std::min<size_t>(kSlots, most));
  return shape;
}

Status RingShape::Validate() const {
  if (slots == 0 || slots > kMostSlots || samples == 0 || samples > kMostSamples) {
    return Nonsense(StrCat(slots, " slots for ", samples, " samples"));
  }
  return Status();
}

// ---- the daemon's side

void RingPace::Saw(uint32_t taken, Nanos now) {
  if (taken == 0) {
    per_entry_ = std::max(per_entry_, std::min(now - last_, kLongest));
    return;
  }
  const Nanos seen = std::clamp<Nanos>((now - last_) / taken, 1, kLongest);
  // A faster client is believed at once: its ring is soon empty. The first gap may be long.
  per_entry_ = std::min(seen, (3 * per_entry_ + seen) / 4);
  last_ = now;
}

Nanos RingPace::SleepFor(uint32_t ready) const {
  return std::clamp(per_entry_ * ready / 2, kShortestSleep, kLongest);
}

Result<RingWriter> RingWriter::Create(const RingShape& shape) {
  FOREBAY_RETURN_IF_ERROR(shape.Validate());
  RingWriter ring;
  ring.shape_ = shape;
  ring.memory_ = OwnedFd(memfd_create("forebay-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!ring.memory_.valid()) return ErrnoStatus(errno, "making a ring's memory");
  if (ftruncate(ring.memory_.get(), static_cast<off_t>(shape.Bytes())) != 0 ||
      fcntl(ring.memory_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(errno, "sizing a ring's memory");
  }
  void* base =
      mmap(nullptr, shape.Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, ring.memory_.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "mapping a ring");
  ring.mapping_ = Mapping(base, shape.Bytes());  // all zero: an empty ring
  return ring;
}

std::byte* RingWriter::Slot(uint32_t number) const {
  return mapping_.data() + sizeof(RingHeader) + (number % shape_.slots) * shape_.SlotBytes();
}

Status RingWriter::ReadPosition() {
  const uint32_t head = header().head.load(std::memory_order_seq_cst);
  // Modulo 2^32; the client can only go on, and not beyond what was published.
  if (head - head_ > tail_ - head_) return Nonsense("more entries taken than published");
  head_ = head;
  return Status();
}

bool RingWriter::wanted() const { return header().wanted.load(std::memory_order_seq_cst) != 0; }

void RingWriter::Advance() {
  header().tail.store(++tail_, std::memory_order_seq_cst);
  if (header().wanted.exchange(0, std::memory_order_seq_cst) != 0) {
    (void)Futex(header().tail, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void RingWriter::Publish(const RingEntry& entry, std::span<const uint32_t> samples,
                         std::span<const uint64_t> offsets, std::span<const uint32_t> lengths) {
  std::byte* at = Slot(tail_);
  const SlotHead head = {entry.kind,
                         entry.cause,
                         static_cast<uint16_t>(entry.code),
                         static_cast<uint32_t>(samples.size()),
                         entry.lease,
                         entry.epoch,
                         entry.index,
                         entry.dataset};
  std::memcpy(at, &head, sizeof head);
  at += kHeadBytes;
  at += PutArray(at, offsets);
  at += PutArray(at, samples);
  PutArray(at, lengths);
  Advance();
}

void RingWriter::PublishError(const Status& status, uint8_t cause, uint8_t kind) {
  std::byte* at = Slot(tail_);
  const std::string& text = status.message();
  SlotHead head = {};
  head.kind = kind;
  head.cause = cause;
  head.code = static_cast<uint16_t>(status.code());
  head.count = static_cast<uint32_t>(std::min(text.size(), shape_.SlotBytes() - kHeadBytes));
  std::memcpy(at, &head, sizeof head);
  std::memcpy(at + kHeadBytes, text.data(), head.count);
  Advance();
}

void RingWriter::Rewind() {
  tail_ = head_;
  header().tail.store(tail_, std::memory_order_seq_cst);
}

Status RingWriter::PopReleases(std::vector<uint64_t>* out) {
  const uint32_t end = header().releases_tail.load(std::memory_order_acquire);
  if (end - releases_read_ > kRingReleases) return Nonsense("more releases than there is room for");
  for (; releases_read_ != end; ++releases_read_) {
    out->push_back(
        header().releases[releases_read_ % kRingReleases].load(std::memory_order_relaxed));
  }
  // Pairs with the client's look for room.
  header().releases_read.store(releases_read_, std::memory_order_release);
  return Status();
}

bool RingWriter::Sleep(bool tell_releases, bool knows_wanted) {
  header().beat.fetch_add(1, std::memory_order_relaxed);
  header().sleeping.store(tell_releases ? kTellReleased : kTellWanted, std::memory_order_seq_cst);
  // What the client did before it could see `sleeping` is seen here.
  const bool released =
      tell_releases && header().releases_tail.load(std::memory_order_seq_cst) != releases_read_;
  return released ||
         (!knows_wanted && wanted() && header().head.load(std::memory_order_seq_cst) == tail_);
}

void RingWriter::Awake() { header().sleeping.store(kAwake, std::memory_order_relaxed); }

// ---- the client's side

Result<RingReader> RingReader::Map(const OwnedFd& memory, const RingShape& shape) {
  FOREBAY_RETURN_IF_ERROR(shape.Validate());
  struct stat st = {};
  if (!memory.valid() || fstat(memory.get(), &st) != 0 || st.st_size < 0 ||
      static_cast<uint64_t>(st.st_size) < shape.Bytes()) {
    return Nonsense("its memory is missing or too small");
  }
  void* base = mmap(nullptr, shape.Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "mapping a ring");
  RingReader ring;
  ring.shape_ = shape;
  ring.mapping_ = Mapping(base, shape.Bytes());
  return ring;
}

Result<bool> RingReader::Take(RingEntry* entry, std::vector<uint32_t>* samples,
                              std::vector<uint64_t>* offsets, std::vector<uint32_t>* lengths,
                              std::string* error) {
  const uint32_t tail = header().tail.load(std::memory_order_acquire);
  if (tail == head_) return false;
  if (tail - head_ > shape_.slots) return Nonsense("more entries than slots");
  const std::byte* at =
      mapping_.data() + sizeof(RingHeader) + (head_ % shape_.slots) * shape_.SlotBytes();
  SlotHead head;
  std::memcpy(&head, at, sizeof head);
  at += kHeadBytes;
  if (head.kind > RingEntry::kNoRoom || head.code > static_cast<uint16_t>(Code::kInternal)) {
    return Nonsense("an entry of no kind");
  }
  entry->kind = head.kind;
  entry->cause = head.cause;
  entry->code = static_cast<Code>(head.code);
  entry->lease = head.lease;
  entry->dataset = head.dataset;
  entry->epoch = head.epoch;
  entry->index = head.index;
  if (head.kind >= RingEntry::kError) {
    if (head.count > shape_.SlotBytes() - kHeadBytes) return Nonsense("a message beyond its slot");
    error->assign(reinterpret_cast<const char*>(at), head.count);
  } else {
    const uint32_t count = head.kind == kBatch ? head.count : 0;
    if (count > shape_.samples) return Nonsense("a batch beyond its slot");
    at += GetArray(at, count, offsets);
    at += GetArray(at, count, samples);
    GetArray(at, count, lengths);
  }
  header().head.store(++head_, std::memory_order_seq_cst);
  return true;
}

bool RingReader::Want(uint32_t* seen) {
  *seen = head_;
  header().wanted.store(1, std::memory_order_seq_cst);
  if (header().tail.load(std::memory_order_seq_cst) != head_) {
    header().wanted.store(0, std::memory_order_relaxed);
    return false;
  }
  return header().sleeping.load(std::memory_order_seq_cst) != kAwake &&
         header().sleeping.exchange(kAwake, std::memory_order_seq_cst) != kAwake;
}

void RingReader::Wait(uint32_t seen, Nanos wait) const {
  const timespec bound = {static_cast<time_t>(wait / kSecond), static_cast<long>(wait % kSecond)};
  (void)Futex(header().tail, FUTEX_WAIT, seen, &bound);
}

void RingReader::Wake() const { (void)Futex(header().tail, FUTEX_WAKE, INT_MAX, nullptr); }

bool RingReader::Release(uint64_t lease, bool* tell) {
  *tell = false;
  RingHeader& ring = header();
  const uint32_t tail = ring.releases_tail.load(std::memory_order_relaxed);
  if (tail - ring.releases_read.load(std::memory_order_acquire) >= kRingReleases) return false;
  ring.releases[tail % kRingReleases].store(lease, std::memory_order_relaxed);
  ring.releases_tail.store(tail + 1, std::memory_order_seq_cst);
  if (ring.sleeping.load(std::memory_order_seq_cst) == kTellReleased) {
    *tell = ring.sleeping.exchange(kAwake, std::memory_order_seq_cst) != kAwake;
  }
  return true;
}

}  // namespace forebay::wire
