#include "tier/tiered_source.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/rng.h"
#include "catalog/image.h"

namespace forebay {
namespace {

constexpr uint64_t kWriteTag = uint64_t{1} << 32;
constexpr uint64_t kDropTag = uint64_t{1} << 33;
constexpr Nanos kDrain = 2 * kSecond;

}  // namespace

uint64_t TierDataset(const Catalog& catalog) {
  // The image's header and section table hold a checksum of every section.
  const std::span<const std::byte> image = catalog.image();
  const std::span<const std::byte> head = image.first(
      std::min(image.size(), sizeof(ImageHeader) + kSectionCount * sizeof(SectionRecord)));
  uint64_t hash = SplitMix64(catalog.fingerprint()).Next();
  for (const std::byte b : head) hash = SplitMix64(hash ^ static_cast<uint64_t>(b)).Next();
  return hash;
}

bool MayOutliveTheJob(const Catalog& catalog) { return catalog.knows_times(); }

bool WriteBuffer::Take(uint64_t bytes) {
  bytes = Charge(bytes);
  uint64_t left = left_.load(std::memory_order_relaxed);
  while (left >= bytes) {
    if (left_.compare_exchange_weak(left, left - bytes, std::memory_order_relaxed)) return true;
  }
  return false;
}

TierMetrics::TierMetrics(Registry& registry)
    : TierMetrics(registry.AddMechanism("cache_folder", "copies in a folder on a local disk")) {}

TierMetrics::TierMetrics(Mechanism& mechanism)
    : hits(mechanism.AddCounter("forebay_tier_hits_total",
                                "Samples read from the cache folder instead of the source")),
      misses(mechanism.AddCounter(
          "forebay_tier_misses_total",
          "Copies in the cache folder that were gone or damaged when they were read")),
      writes(mechanism.AddCounter("forebay_tier_writes_total",
                                  "Samples copied into the cache folder")),
      skipped(mechanism.AddCounter("forebay_tier_skipped_writes_total",
                                   "Samples not copied into the cache folder because it hung")),
      used(mechanism.AddGauge("forebay_tier_used_bytes", "Bytes the cache folder holds")),
      passed_by(mechanism.AddGauge("forebay_tier_passed_by",
                                   "1 while the cache folder does not answer and is not asked")),
      under_way(mechanism.AddGauge("forebay_tier_copies_under_way",
                                   "Copies that wait to be written, or are being written")),
      held(mechanism.AddGauge("forebay_tier_held_bytes",
                              "Bytes in memory only because their copy waits to be written")) {}

Result<std::unique_ptr<TieredSource>> TieredSource::Make(std::unique_ptr<Source> inner,
                                                         std::unique_ptr<Tier> tier,
                                                         CopyNames names, WriteBuffer& buffer,
                                                         TierMetrics& metrics, bool as_files) {
  Result<WakeFd> wake = WakeFd::Make();
  if (!wake) return wake.error();
  FOREBAY_RETURN_IF_ERROR(wake->Watch(inner->event_fd()));
  FOREBAY_RETURN_IF_ERROR(wake->Watch(tier->event_fd()));
  return std::unique_ptr<TieredSource>(new TieredSource(std::move(inner), std::move(tier),
                                                        std::move(names), buffer, metrics, as_files,
                                                        *std::move(wake)));
}

TieredSource::TieredSource(std::unique_ptr<Source> inner, std::unique_ptr<Tier> tier,
                           CopyNames names, WriteBuffer& buffer, TierMetrics& metrics,
                           bool as_files, WakeFd wake)
    : names_(std::move(names)),
      as_files_(as_files),
      creator_(getpid()),
      buffer_(buffer),
      metrics_(metrics),
      slots_(inner->capacity()),
      writes_(kMostWrites),
      wake_(std::move(wake)),
      tier_(std::move(tier)),
      inner_(std::move(inner)) {
  for (size_t i = slots_.size(); i > 0; --i) free_.push_back(static_cast<uint32_t>(i - 1));
  for (size_t i = writes_.size(); i > 0; --i) free_writes_.push_back(static_cast<uint32_t>(i - 1));
  metrics_.used.Set(tier_->used_bytes());
}

TieredSource::~TieredSource() {
  inner_.reset();
  if (getpid() != creator_) return;
  const Nanos until = SteadyClock().Now() + kDrain;
  std::array<TierDone, 32> batch;
  while (writes_in_flight() > 0 && SteadyClock().Now() < until) {
    pollfd waiting{tier_->event_fd(), POLLIN, 0};
    poll(&waiting, 1, 50);
    const size_t n = tier_->Reap(batch);
    for (const TierDone& done : std::span(batch).first(n)) {
      if (done.tag & kWriteTag) EndWrite(done);
    }
  }
  if (writes_in_flight() == 0) return;
  // A write hangs: it is left behind with the bytes it reads.
  (void)tier_.release();
  (void)new std::vector<Write>(std::move(writes_));
}

size_t TieredSource::Submit(std::span<const SourceRead> reads) {
  const size_t taken = std::min(reads.size(), free_.size());
  const Nanos now = taken > 0 ? SteadyClock().Now() : 0;
  for (const SourceRead& read : reads.first(taken)) {
    const uint32_t index = free_.back();
    free_.pop_back();
    slots_[index] = {.read = read, .start = now};
    const TierKey key = names_.Of(read.sample);
    const bool has = !read.skip_tier && tier_->Has(key);
    const bool doubtful = has && Doubtful(read.sample, key);
    if (has && !doubtful) {
      const TierOp get{
          .tag = index, .kind = TierOp::Kind::kGet, .key = key, .bytes = read.dest, .crc = 0};
      slots_[index].at_tier = tier_->Submit(std::span(&get, 1)) == 1;
      if (slots_[index].at_tier) continue;
    }
    to_inner_.push_back({.tag = index,
                         .sample = read.sample,
                         .dest = read.dest,
                         .group = read.group,
                         // A peer knows no more of it than the copy does.
                         .skip_tier = read.skip_tier || doubtful,
                         .urgent = read.urgent});
  }
  FlushInner();
  return taken;
}

size_t TieredSource::Reap(std::span<SourceDone> out) {
  from_tier_.clear();
  passed_by_.clear();
  size_t taken = ReapTier(out);
  from_tier_.resize(taken, true);
  passed_by_.resize(taken, false);
  FlushInner();
  taken += ReapInner(out.subspan(taken));
  from_tier_.resize(taken, false);
  return taken;
}

std::string TieredSource::Describe() const {
  return StrCat(inner_->Describe(), ", copies in ", tier_->Describe());
}

size_t TieredSource::ReapTier(std::span<SourceDone> out) {
  size_t taken = 0;
  std::array<TierDone, 32> batch;
  while (taken < out.size()) {
    const size_t n =
        tier_->Reap(std::span(batch).first(std::min(batch.size(), out.size() - taken)));
    if (n == 0) break;
    for (const TierDone& done : std::span(batch).first(n)) {
      if (done.tag & kWriteTag) {
        EndWrite(done);
        continue;
      }
      if (done.tag & kDropTag) {
        dropped_.push_back(static_cast<SampleId>(done.tag));
        continue;
      }
      const auto index = static_cast<uint32_t>(done.tag);
      Slot& slot = slots_[index];
      slot.at_tier = false;
      if (!done.hit) {
        slot.passed_by = done.passed;
        if (!done.passed) metrics_.misses.Add(1);
        to_inner_.push_back({.tag = index,
                             .sample = slot.read.sample,
                             .dest = slot.read.dest,
                             .urgent = slot.read.urgent});
        continue;
      }
      metrics_.hits.Add(1);
      out[taken++] = {
          .tag = slot.read.tag,
          .status = Status(),
          .crc = done.crc,
          .latency_ns = SteadyClock().Now() - slot.start,
          .retries = 0,
          .stamp = names_.LackStamps() ? tier_->StampOfCopy(names_.Of(slot.read.sample)) : 0};
      free_.push_back(index);
    }
    metrics_.used.Set(tier_->used_bytes());
  }
  return taken;
}

size_t TieredSource::ReapInner(std::span<SourceDone> out) {
  const size_t taken = inner_->Reap(out);
  for (SourceDone& done : out.first(taken)) {
    const auto index = static_cast<uint32_t>(done.tag);
    const SourceRead& read = slots_[index].read;
    done.tag = read.tag;
    passed_by_.push_back(slots_[index].passed_by);
    free_.push_back(index);
  }
  return taken;
}

std::vector<uint64_t> TieredSource::AtTier() const {
  std::vector<uint64_t> tags;
  for (const Slot& slot : slots_) {
    if (slot.at_tier) tags.push_back(slot.read.tag);
  }
  return tags;
}

void TieredSource::FlushInner() {
  if (!to_inner_.empty()) {
    const size_t taken = inner_->Submit(to_inner_);
    to_inner_.erase(to_inner_.begin(), to_inner_.begin() + static_cast<ptrdiff_t>(taken));
  }
  // There is a place in the inner source for each of our slots; should it refuse all the same, ask
  // again soon.
  wake_.SetTime(to_inner_.empty() ? WakeFd::kNever : SteadyClock().Now() + kMilli);
}

std::optional<uint32_t> TieredSource::ReserveCopy(size_t bytes) {
  if (free_writes_.empty() || !buffer_.Take(bytes)) return std::nullopt;
  const uint32_t index = free_writes_.back();
  free_writes_.pop_back();
  writes_[index].size = bytes;
  return index;
}

bool TieredSource::Store(uint32_t reserved, SampleId sample, std::span<const std::byte> bytes,
                         uint32_t crc) {
  const TierKey key = names_.Of(sample);
  const size_t size = bytes.size();
  Write& write = writes_[reserved];
  if (tier_->Has(key) ? Doubtful(sample, key) : tier_->HasRoom(size)) {
    write.sample = sample;
    write.bytes = std::make_unique_for_overwrite<std::byte[]>(size);
    if (size > 0) std::memcpy(write.bytes.get(), bytes.data(), size);
    const TierOp put{.tag = kWriteTag | reserved,
                     .kind = TierOp::Kind::kPut,
                     .key = key,
                     .bytes = {write.bytes.get(), size},
                     .crc = crc,
                     .as_file = as_files_,
                     .stamp = names_.StampOfFile(sample)};
    if (tier_->Submit(std::span(&put, 1)) == 1) return true;
    metrics_.skipped.Add(1);
  }
  FreeWrite(reserved);
  return false;
}

bool TieredSource::Drop(SampleId sample) {
  const TierOp drop{.tag = kDropTag | sample,
                    .kind = TierOp::Kind::kDrop,
                    .key = names_.Of(sample),
                    .bytes = {},
                    .crc = 0};
  return tier_->Submit(std::span(&drop, 1)) == 1;
}

void TieredSource::EndWrite(const TierDone& done) {
  const auto index = static_cast<uint32_t>(done.tag);
  if (done.stored) metrics_.writes.Add(1);
  ended_.push_back({writes_[index].sample, done.stored});
  FreeWrite(index);
}

void TieredSource::FreeWrite(uint32_t index) {
  buffer_.Give(writes_[index].size);
  writes_[index] = {};
  free_writes_.push_back(index);
}

}  // namespace forebay
