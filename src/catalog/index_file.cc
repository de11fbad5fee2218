#include "catalog/index_file.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "catalog/byte_reader.h"
#include "catalog/paths.h"

namespace forebay {
namespace {

// A line for each sample of a shard of a million.
constexpr uint64_t kMaxIndex = uint64_t{256} << 20;
constexpr uint64_t kRecordFoot = 4;

std::string_view NextWord(std::string_view& line) {
  const size_t end = std::min(line.find(' '), line.size());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(std::min(line.size(), end + 1));
  return word;
}

bool ParseNumber(std::string_view word, uint64_t& value) {
  const char* last = word.data() + word.size();
  const auto parsed = std::from_chars(word.data(), last, value);
  return !word.empty() && parsed.ec == std::errc() && parsed.ptr == last;
}

// "OFFSET BYTES" of a record with its head and foot.
bool RecordLine(std::string_view line, std::vector<uint64_t>& ends) {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  if (!ParseNumber(NextWord(line), offset) || !ParseNumber(NextWord(line), bytes)) return false;
  if (bytes < kRecordFoot || offset > ~uint64_t{0} - bytes) return false;
  ends.push_back(offset + bytes - kRecordFoot);
  return line.empty();
}

// "FIELD OFFSET BYTES NAME" for each member of a sample.
bool SampleLine(std::string_view line, std::vector<uint64_t>& ends) {
  while (!line.empty()) {
    NextWord(line);
    uint64_t offset = 0;
    uint64_t bytes = 0;
    if (!ParseNumber(NextWord(line), offset) || !ParseNumber(NextWord(line), bytes)) return false;
    if (NextWord(line).empty() || offset > ~uint64_t{0} - bytes - 512) return false;
    ends.push_back((offset + bytes + 511) / 512 * 512);
  }
  return true;
}

}  // namespace

std::vector<uint64_t> ParseIndex(std::string_view text, Format format) {
  std::vector<uint64_t> ends;
  const bool tar = format == Format::kWebDataset;
  bool first = true;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(text.size(), end + 1));
    if (std::exchange(first, false) && tar) {
      if (!line.starts_with("v1.2 ")) return {};
      continue;
    }
    if (!line.empty() && !(tar ? SampleLine(line, ends) : RecordLine(line, ends))) return {};
  }
  std::sort(ends.begin(), ends.end());
  return ends;
}

std::vector<uint64_t> IndexedPayloadEnds(const std::string& shard, Format format) {
  const std::string_view name = BaseName(shard);
  const size_t dot = name.find('.', 1);
  const std::string stem = shard.substr(0, shard.size() - name.size() + std::min(dot, name.size()));
  for (const std::string& path : {StrCat(shard, ".idx"), StrCat(stem, ".idx")}) {
    Result<FileReader> reader = FileReader::Open(path);
    if (!reader || reader->size() > kMaxIndex) continue;
    std::string text(reader->size(), '\0');
    const Result<size_t> got = reader->ReadAt(0, std::as_writable_bytes(std::span(text)));
    if (!got || *got != text.size()) continue;
    std::vector<uint64_t> ends = ParseIndex(text, format);
    if (!ends.empty()) return ends;
  }
  return {};
}

}  // namespace forebay
