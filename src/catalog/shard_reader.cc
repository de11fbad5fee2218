#include "catalog/shard_reader.h"

#include <algorithm>
#include <cstring>

#include "catalog/parallel.h"

namespace forebay {
namespace {

// Behind a payload that was read, the next header may lie a little farther than what came with it.
constexpr uint64_t kNear = 16 << 10;
// A sample of many small parts is not held together beyond this.
constexpr uint64_t kMostHeld = 4 * ScanPlan::kMaxPayload;
// Small reads grow to this at most: names and labels of one sample.
constexpr size_t kMostSmall = 8 << 10;
// Of a tar: headers begin on such a boundary.
constexpr size_t kTarBlock = 512;
// Without room for what a stream reads, everything would be read again.
constexpr double kStreamTwice = 4;

// Reads by hints before the walk goes on; their bytes are held meanwhile.
constexpr size_t kHintsAtOnce = 2048;
// Payloads below this are read through all the same.
constexpr uint64_t kWorthAHint = 16 << 10;

// Many shards are read at once, and their pieces are memory beside the budget.
size_t PieceBytes(size_t shards) { return shards > 16 ? size_t{512} << 10 : ShardReader::kPiece; }

}  // namespace

ScanPlan::ScanPlan(size_t shards, EarlySink* sink)
    : sink_(sink), piece_bytes_(PieceBytes(shards)), shards_(static_cast<int64_t>(shards)) {}

void ScanPlan::OnOpen(uint64_t bytes) {
  left_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  opened_bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  opened_.fetch_add(1, std::memory_order_relaxed);
}

void ScanPlan::OnHop(Nanos took) {
  // The quickest of late: what others' large reads add is not the storage's latency.
  Nanos known = hop_.load(std::memory_order_relaxed);
  const Nanos next = known == 0 || took < known ? took : known + (took - known) / 16;
  hop_.store(std::max<Nanos>(1, next), std::memory_order_relaxed);
}

// Both times are of what is left: of this shard by small reads, which every shard makes beside the
// others, and of all shards by large ones.
ScanPlan::Step ScanPlan::Next(uint64_t gap, uint64_t left) {
  const auto get = [](const std::atomic<int64_t>& value) {
    return static_cast<double>(value.load(std::memory_order_relaxed));
  };
  const double hop = get(hop_) / kSecond;
  const double opened = std::max(1.0, get(opened_));
  const double closed = static_cast<double>(shards_) - opened;
  const double all = std::max(0.0, get(left_) + closed * get(opened_bytes_) / opened);
  const double active = std::max(1.0, static_cast<double>(shards_) - get(done_));
  const double rate =
      hop == 0 ? kBytesPerSecond
               : std::min(kBytesPerSecond, active * static_cast<double>(piece_bytes_) / hop);
  const double stream_time = all / rate;
  const double hop_time = static_cast<double>(left) / static_cast<double>(gap + kTarBlock) * hop;
  const uint64_t room = sink_ == nullptr ? 0 : sink_->Room();
  const bool keeps_all = static_cast<double>(room) >= all;
  if (hop_time > stream_time * (keeps_all ? 1 : kStreamTwice)) return Step::kStream;
  if (gap > kMaxPayload || room < gap) return Step::kHop;
  if (payload_reads_.fetch_add(1, std::memory_order_relaxed) < kPayloadReads) return Step::kPayload;
  payload_reads_.fetch_sub(1, std::memory_order_relaxed);
  return Step::kHop;
}

ShardReader::~ShardReader() {
  if (plan_ == nullptr) return;
  plan_->OnProgress(reader_.size() - std::min(told_, reader_.size()));
  plan_->OnShardDone();
}

Status ShardReader::ReadAt(uint64_t offset, size_t length) {
  buffer_.resize(static_cast<size_t>(std::min<uint64_t>(length, reader_.size() - offset)));
  start_ = offset;
  Result<size_t> got = reader_.ReadAt(offset, buffer_);
  if (!got) {
    buffer_.clear();
    return got.error();
  }
  buffer_.resize(*got);
  return Status();
}

Status ShardReader::ReadOn(uint64_t keep, uint64_t until, size_t least) {
  if (keep > start_) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<int64_t>(keep - start_));
    start_ = keep;
  }
  const uint64_t from = end();
  const uint64_t to = std::min(reader_.size(), std::max(until, from + least));
  if (to <= from) return Status();
  const size_t had = buffer_.size();
  buffer_.resize(had + static_cast<size_t>(to - from));
  Result<size_t> got = reader_.ReadAt(from, std::span(buffer_).subspan(had));
  buffer_.resize(had + (got ? *got : 0));
  return got ? Status() : got.error();
}

bool ShardReader::HoldsSample() const {
  return plan_ != nullptr && plan_->sink() != nullptr && sample_ >= start_ && sample_ <= end() &&
         end() - sample_ <= kMostHeld;
}

Status ShardReader::Fetch(uint64_t offset, size_t length) {
  const size_t piece = plan_ == nullptr ? kPiece : plan_->piece_bytes();
  const bool behind = offset >= start_;
  // A member that is no part of a sample may lie between, however large.
  if (contiguous_ && behind && HoldsSample() && offset <= end() + ScanPlan::kMaxPayload) {
    return ReadOn(std::min(sample_, offset), offset + length, piece);
  }
  if (contiguous_) return ReadAt(offset, std::max(length, piece));
  if (behind && offset <= end() + kNear && HoldsSample()) {
    return ReadOn(std::min(sample_, offset), offset + length, small_);
  }
  hop_start_ = offset;
  if (!hints_.empty() && TakeHinted(offset, length)) return Status();
  const Nanos before = SteadyClock().Now();
  Status read = ReadAt(offset, std::max(length, small_));
  if (plan_ != nullptr) plan_->OnHop(SteadyClock().Now() - before);
  return read;
}

bool ShardReader::TakeHinted(uint64_t offset, size_t length) {
  if (hinted_.empty() || hinted_.back().offset < offset) ReadHinted(offset, length);
  auto it = std::upper_bound(hinted_.begin(), hinted_.end(), offset,
                             [](uint64_t at, const Hinted& h) { return at < h.offset; });
  if (it == hinted_.begin()) return false;
  --it;
  if (offset < it->offset || offset + length > it->offset + it->bytes.size()) return false;
  start_ = it->offset;
  buffer_ = std::move(it->bytes);
  it->bytes.clear();
  return true;
}

void ShardReader::ReadHinted(uint64_t offset, size_t length) {
  while (next_hint_ < hints_.size() && hints_[next_hint_] < offset) ++next_hint_;
  hinted_.clear();
  uint64_t covered = 0;
  // The first few teach how much is needed behind a payload.
  const size_t most = hops_ > 2 ? kHintsAtOnce : 4;
  for (; next_hint_ < hints_.size() && hinted_.size() < most; ++next_hint_) {
    const uint64_t at = hints_[next_hint_];
    if (at < covered || at >= reader_.size()) continue;  // small members follow each other
    covered = at + std::max(std::min(length, kMostSmall), small_);
    hinted_.push_back({at, static_cast<size_t>(std::min(covered, reader_.size()) - at), {}});
  }
  const auto read = [this](size_t i) {
    Hinted& hint = hinted_[i];
    hint.bytes.resize(hint.length);
    const Result<size_t> got = reader_.ReadAt(hint.offset, hint.bytes);
    hint.bytes.resize(got ? *got : 0);
    return Status();
  };
  // What fails, or has no thread to read it, stays empty: it is read again by whoever needs it, who
  // tells of it.
  (void)ParallelFor(hinted_.size(), hint_threads_, read, nullptr);
}

Result<std::span<const std::byte>> ShardReader::At(uint64_t offset, size_t length) {
  const uint64_t size = reader_.size();
  if (offset >= size || length == 0) return std::span<const std::byte>();
  length = static_cast<size_t>(std::min<uint64_t>(length, size - offset));
  if (offset < start_ || offset + length > end()) {
    FOREBAY_RETURN_IF_ERROR(Fetch(offset, length));
    if (offset >= end()) return std::span<const std::byte>();
    length = static_cast<size_t>(std::min<uint64_t>(length, end() - offset));
  }
  return std::span<const std::byte>(buffer_).subspan(static_cast<size_t>(offset - start_), length);
}

// Headers and labels between two payloads take as much as before, mostly.
void ShardReader::LearnSmall(uint64_t payload) {
  if (payload < hop_start_ || payload - hop_start_ > kMostSmall) return;
  most_needed_ = std::max(most_needed_, static_cast<size_t>(payload - hop_start_));
  if (++hops_ > 2) small_ = std::max(std::min(first_small_, kTarBlock), most_needed_);
}

Status ShardReader::SkipPayload(uint64_t offset, uint64_t length) {
  const uint64_t after = offset + length;
  if (after <= end()) return Status();
  const uint64_t gap = after - std::max(end(), offset);
  LearnSmall(offset);
  hop_start_ = after;
  if (plan_ == nullptr) {
    contiguous_ = gap <= kSkip;
    return Status();
  }
  if (offset > told_) {
    plan_->OnProgress(offset - told_);
    told_ = offset;
  }
  if (!hints_.empty() && gap >= kWorthAHint) {
    contiguous_ = false;  // what follows it is here already, or soon
    return Status();
  }
  switch (plan_->Next(gap, reader_.size() - offset)) {
    case ScanPlan::Step::kStream:
      contiguous_ = true;
      return Status();
    case ScanPlan::Step::kHop:
      contiguous_ = false;
      return Status();
    case ScanPlan::Step::kPayload:
      break;
  }
  contiguous_ = false;
  // A sample whose beginning was stepped over is not worth its end. Padding may follow it.
  Status read;
  if (HoldsSample()) read = ReadOn(sample_, after + small_ + kTarBlock, 0);
  plan_->EndPayload();
  return read;
}

std::span<const std::byte> ShardReader::Held(uint64_t offset, uint64_t length) const {
  if (offset < start_ || offset + length > end()) return {};
  return std::span<const std::byte>(buffer_).subspan(static_cast<size_t>(offset - start_),
                                                     static_cast<size_t>(length));
}

}  // namespace forebay
