#include "io/scatter.h"

#include <algorithm>

#include "base/crc32c.h"

namespace forebay {

uint64_t RangeBytes(const ReadOp& op) {
  if (op.parts.empty()) return op.dest.size();
  uint64_t bytes = 0;
  for (const ReadPart& part : op.parts) bytes += part.gap + part.dest.size();
  return bytes;
}

size_t Vectors(const ReadOp& op, uint64_t done, std::span<std::byte> waste, std::span<iovec> out,
               uint64_t& bytes) {
  bytes = 0;
  if (op.parts.empty()) {
    bytes = op.dest.size() - done;
    out[0] = {op.dest.data() + done, op.dest.size() - done};
    return 1;
  }
  size_t count = 0;
  for (const ReadPart& part : op.parts) {
    const uint64_t skipped = std::min<uint64_t>(done, part.gap);
    done -= skipped;
    for (uint64_t gap = part.gap - skipped; gap > 0 && count < out.size();) {
      const size_t piece = std::min<uint64_t>(gap, waste.size());
      out[count++] = {waste.data(), piece};
      bytes += piece;
      gap -= piece;
    }
    const size_t from = std::min<uint64_t>(done, part.dest.size());
    done -= from;
    if (count == out.size()) break;
    if (from == part.dest.size()) continue;
    out[count++] = {part.dest.data() + from, part.dest.size() - from};
    bytes += part.dest.size() - from;
  }
  return count;
}

void Checksum(const ReadOp& op, Completion& done) {
  if (!op.checksum || done.error != 0) return;
  if (op.parts.empty()) {
    done.crc = Crc32c(op.dest.first(done.bytes));
    return;
  }
  if (done.bytes < RangeBytes(op)) return;
  for (ReadPart& part : op.parts) part.crc = Crc32c(part.dest);
}

}  // namespace forebay
