// A record is its length (u64), a masked CRC-32C of those 8 bytes, the data, and a masked CRC-32C
// of the data; all little-endian. One record's data checksum and the next one's head are
// neighbours, so one read of 16 bytes steps over a large record.
#include <algorithm>
#include <limits>
#include <string_view>

#include "base/crc32c.h"
#include "catalog/image.h"
#include "catalog/shard.h"

namespace forebay {
namespace {

constexpr size_t kHead = 12;
constexpr size_t kFoot = 4;

template <typename T>
T LittleEndian(std::span<const std::byte> bytes) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(bytes[i]) << (8 * i);
  return value;
}

}  // namespace

Result<ShardIndex> ScanTfRecord(ByteReader& reader, const OnSample& on_sample,
                                const ScanContext& context) {
  using Bytes = std::span<const std::byte>;
  const uint64_t size = reader.size();
  ShardReader window(reader, kHead + kFoot, context.plan);
  window.SetHints(context.hints, context.hint_threads);
  ShardIndex index;
  uint64_t at = 0;
  const auto bad = [&](Code code, const auto&... parts) {
    return Status(code, StrCat(reader.name(), ": offset ", at, ": ", parts...));
  };
  Result<Bytes> head = window.At(0, kHead);
  while (at < size) {
    if (!head) return head.error();
    if (head->size() < kHead) return bad(Code::kDataLoss, "the TFRecord file is cut off");
    const auto length = LittleEndian<uint64_t>(head->first(8));
    if (UnmaskCrc(LittleEndian<uint32_t>(head->subspan(8, 4))) != Crc32c(head->first(8))) {
      if (at == 0 && (*head)[0] == std::byte{0x1f} && (*head)[1] == std::byte{0x8b}) {
        return bad(Code::kInvalidArgument, "the TFRecord file is gzip-compressed; decompress it, ",
                   "compressed records cannot be read at random");
      }
      return bad(Code::kDataLoss,
                 "the checksum of a record's length does not match; the file is damaged or not a "
                 "TFRecord file");
    }
    const uint64_t left = size - at - kHead;
    if (left < kFoot || length > left - kFoot) {
      return bad(Code::kDataLoss, "the TFRecord file is cut off in a record of ", length, " bytes");
    }
    if (length > std::numeric_limits<uint32_t>::max()) {
      return SampleTooLarge(StrCat(reader.name(), ": offset ", at, ": record"), length);
    }
    const uint64_t data = at + kHead;
    if (data + length >= SampleRecord::kOffsetLimit) {
      return bad(Code::kResourceExhausted, "the file is too large for a catalog");
    }
    window.BeginSample(data);
    FOREBAY_RETURN_IF_ERROR(window.SkipPayload(data, length));
    Result<Bytes> both = window.At(data + length, kFoot + kHead);
    if (!both) return both.error();
    if (both->size() < kFoot) return bad(Code::kDataLoss, "the TFRecord file is cut off");
    const uint32_t crc = UnmaskCrc(LittleEndian<uint32_t>(both->first(kFoot)));
    // Damaged ones are left to whoever reads them, who tells of it.
    const Bytes held = window.Held(data, length);
    if (!held.empty() && Crc32c(held) == crc) context.Land(index.samples.size(), held);
    index.samples.push_back({.offset = data,
                             .length = static_cast<uint32_t>(length),
                             .label = -1,
                             .crc = crc,
                             .first_field = 0,
                             .schema = 0});
    if (on_sample && !on_sample()) return Status(Code::kCancelled, "cancelled by the caller");
    at = data + length + kFoot;
    head = both->subspan(kFoot);
  }
  return index;
}

bool IsTfRecordName(std::string_view name) {
  if (name.ends_with(".idx")) return false;  // an index beside a shard
  if (name.ends_with(".tfrecord") || name.ends_with(".tfrecords")) return true;
  if (name.find(".tfrecord-") != std::string_view::npos) return true;
  // "train-00000-of-01024": digits are asked for, "view-of-town.jpg" is a picture.
  const size_t of = name.rfind("-of-");
  if (of == std::string_view::npos || of == 0 || of + 4 == name.size()) return false;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const std::string_view total = name.substr(of + 4);
  return digit(name[of - 1]) && std::all_of(total.begin(), total.end(), digit);
}

}  // namespace forebay
