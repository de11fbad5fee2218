// Tar members are a 512-byte header and the data padded to 512 bytes. Three things can stand before
// a member and change it: GNU's long name ('L') and long link ('K') records, and pax records ('x').
#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "catalog/image.h"
#include "catalog/shard.h"

namespace forebay {
namespace {

constexpr uint64_t kBlock = 512;
// After a payload: a header, a label and the header after it in one read.
constexpr size_t kSmallRead = 4096;
constexpr uint64_t kMaxExtension = uint64_t{1} << 20;
constexpr size_t kMaxLabelBytes = 24;

using Block = std::span<const std::byte>;

std::string_view Text(Block block, size_t offset, size_t length) {
  const Block part = block.subspan(offset, length);
  return {reinterpret_cast<const char*>(part.data()), part.size()};
}

std::string_view UntilNul(std::string_view text) { return text.substr(0, text.find('\0')); }

// Octal digits padded with blanks and NULs, or base 256 where the first bit is set (GNU, for sizes
// from 8 GiB). Nothing where the field is neither, is negative or does not fit.
std::optional<uint64_t> Number(Block field) {
  const auto first = static_cast<uint8_t>(field[0]);
  uint64_t value = 0;
  if ((first & 0x80) != 0) {
    if ((first & 0x40) != 0) return std::nullopt;
    value = first & 0x3f;
    for (std::byte b : field.subspan(1)) {
      if (value >> 56 != 0) return std::nullopt;
      value = value << 8 | static_cast<uint8_t>(b);
    }
    return value;
  }
  size_t i = 0;
  while (i < field.size() && static_cast<char>(field[i]) == ' ') ++i;
  for (; i < field.size(); ++i) {
    const char c = static_cast<char>(field[i]);
    if (c == '\0' || c == ' ') break;
    if (c < '0' || c > '7') return std::nullopt;
    value = value << 3 | static_cast<uint64_t>(c - '0');  // 12 digits: 36 bits at most
  }
  return value;
}

bool ChecksumMatches(Block block) {
  constexpr size_t kAt = 148;
  constexpr size_t kLength = 8;
  const std::optional<uint64_t> stored = Number(block.subspan(kAt, kLength));
  if (!stored) return false;
  // Some old writers summed signed bytes.
  int64_t plain = 0;
  int64_t with_sign = 0;
  for (size_t i = 0; i < block.size(); ++i) {
    const bool blank = i >= kAt && i < kAt + kLength;
    const auto byte = blank ? uint8_t{' '} : static_cast<uint8_t>(block[i]);
    plain += byte;
    with_sign += static_cast<int8_t>(byte);
  }
  const auto expected = static_cast<int64_t>(*stored);
  return expected == plain || expected == with_sign;
}

bool IsZero(Block block) {
  return std::all_of(block.begin(), block.end(), [](std::byte b) { return b == std::byte{0}; });
}

int32_t ParseLabel(Block data) {
  std::string_view text = Text(data, 0, data.size());
  constexpr std::string_view kBlank = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return -1;
  text = text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
  int32_t label = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), label);
  return error == std::errc() && end == text.data() + text.size() ? label : -1;
}

class TarScan {
 public:
  TarScan(ByteReader& reader, const OnSample& on_sample, const ScanContext& context)
      : reader_(reader),
        window_(reader, kSmallRead, context.plan),
        on_sample_(on_sample),
        context_(context) {
    window_.SetHints(context.hints, context.hint_threads);
  }

  Result<ShardIndex> Scan() {
    const uint64_t size = reader_.size();
    if (size == 0) return Bad(Code::kDataLoss, "the tar is empty, it was probably never written");
    while (at_ < size) {
      Result<bool> more = Header();
      if (!more) return more.error();
      if (!*more) break;
    }
    FOREBAY_RETURN_IF_ERROR(EndSample());
    return std::move(index_);
  }

 private:
  template <typename... Parts>
  Status Bad(Code code, const Parts&... parts) const {
    return Status(code, StrCat(reader_.name(), ": offset ", at_, ": ", parts...));
  }

  // Bytes that must be there; `what` names them when they are not.
  Result<Block> Exactly(uint64_t offset, uint64_t length, std::string_view what) {
    Result<Block> got = window_.At(offset, static_cast<size_t>(length));
    if (got && got->size() < length) return Bad(Code::kDataLoss, "the tar is cut off in ", what);
    return got;
  }

  // Takes one header and moves to the next; false at the end of the archive.
  Result<bool> Header() {
    Result<Block> read = window_.At(at_, kBlock);
    if (!read) return read.error();
    const Block block = *read;
    if (IsZero(block)) return false;
    if (block.size() < kBlock) return Bad(Code::kDataLoss, "the tar is cut off in a header");
    if (!ChecksumMatches(block)) {
      if (at_ == 0 && block[0] == std::byte{0x1f} && block[1] == std::byte{0x8b}) {
        return Bad(Code::kInvalidArgument, "the tar is gzip-compressed; decompress it, samples in ",
                   "compressed tars cannot be read at random");
      }
      return Bad(Code::kDataLoss, "bad tar header, its checksum does not match");
    }
    const std::optional<uint64_t> size_field = Number(block.subspan(124, 12));
    if (!size_field) return Bad(Code::kDataLoss, "bad tar header, its size is not a number");
    const char type = static_cast<char>(block[156]);
    std::string name(UntilNul(Text(block, 0, 100)));
    if (Text(block, 257, 6) == std::string_view("ustar\0", 6)) {
      const std::string_view prefix = UntilNul(Text(block, 345, 155));
      if (!prefix.empty()) name = StrCat(prefix, "/", name);
    }

    uint64_t size = *size_field;
    const bool extension = type == 'L' || type == 'K' || type == 'x' || type == 'g';
    if (!extension) {
      if (long_name_) name = *std::exchange(long_name_, std::nullopt);
      if (pax_path_) name = *std::exchange(pax_path_, std::nullopt);
      if (pax_size_) size = *std::exchange(pax_size_, std::nullopt);
    }
    // Links, devices, folders and fifos carry no data, whatever their size says.
    const bool old_folder = type == '\0' && !name.empty() && name.back() == '/';
    if ((type >= '1' && type <= '6') || old_folder) {
      at_ += kBlock;
      return true;
    }
    const uint64_t data = at_ + kBlock;
    if (size > reader_.size() - data) {
      return Bad(Code::kDataLoss, "the tar is cut off in member '", name, "' of ", size, " bytes, ",
                 reader_.size() - data, " are there");
    }
    if (extension) {
      FOREBAY_RETURN_IF_ERROR(Extension(type, data, size));
    } else if (type == 'S') {
      return Bad(Code::kUnimplemented, "member '", name, "' is a sparse file");
    } else if (type == '0' || type == '\0' || type == '7') {
      FOREBAY_RETURN_IF_ERROR(Member(name, data, size));
    }
    // The last member's padding may be missing.
    const uint64_t padding = (kBlock - size % kBlock) % kBlock;
    at_ = data + size;
    at_ += std::min(padding, reader_.size() - at_);
    return true;
  }

  Status Extension(char type, uint64_t data, uint64_t size) {
    if (type == 'K' || type == 'g') return Status();
    if (size > kMaxExtension) {
      return Bad(Code::kDataLoss, "a name record of ", size, " bytes; the tar is damaged");
    }
    Result<Block> read = Exactly(data, size, "a name record");
    if (!read) return read.error();
    const std::string_view text = Text(*read, 0, read->size());
    if (type == 'x') return Pax(text);
    long_name_ = std::string(UntilNul(text));
    return Status();
  }

  // Records "LENGTH KEY=VALUE\n", LENGTH counting itself.
  Status Pax(std::string_view text) {
    while (!text.empty() && text.front() != '\0') {
      size_t length = 0;
      const char* begin = text.data();
      const auto [end, error] = std::from_chars(begin, begin + text.size(), length);
      const auto digits = static_cast<size_t>(end - begin);
      if (error != std::errc() || length > text.size() || length < digits + 2 || *end != ' ') {
        return Bad(Code::kDataLoss, "bad pax record");
      }
      std::string_view record = text.substr(digits + 1, length - digits - 1);
      text.remove_prefix(length);
      const size_t equals = record.find('=');
      if (record.back() != '\n' || equals == std::string_view::npos) {
        return Bad(Code::kDataLoss, "bad pax record");
      }
      record.remove_suffix(1);
      const std::string_view key = record.substr(0, equals);
      const std::string_view value = record.substr(equals + 1);
      if (key == "path") {
        pax_path_ = std::string(UntilNul(value));
      } else if (key == "size") {
        uint64_t size = 0;
        const char* last = value.data() + value.size();
        const auto parsed = std::from_chars(value.data(), last, size);
        if (parsed.ec != std::errc() || parsed.ptr != last) {
          return Bad(Code::kDataLoss, "bad pax size '", value, "'");
        }
        pax_size_ = size;
      } else if (key.substr(0, 11) == "GNU.sparse.") {
        return Bad(Code::kUnimplemented, "the next member is a sparse file");
      }
    }
    return Status();
  }

  Status Member(const std::string& name, uint64_t data, uint64_t size) {
    std::string_view key;
    std::string field;
    if (!SplitTarName(name, key, field)) return Status();
    if (!open_ || key != key_) {
      FOREBAY_RETURN_IF_ERROR(EndSample());
      open_ = true;
      key_ = key;
      sample_ = ShardIndex::Sample();
      sample_.offset = data;
      window_.BeginSample(data);
      sample_.first_field = static_cast<uint32_t>(index_.fields.size());
    }
    if (std::find(field_names_.begin(), field_names_.end(), field) != field_names_.end()) {
      return Bad(Code::kInvalidArgument, "sample '", key_, "' has two members named '", field, "'");
    }
    const uint64_t span = data + size - sample_.offset;
    if (span > std::numeric_limits<uint32_t>::max()) {
      return SampleTooLarge(StrCat(reader_.name(), ": offset ", at_, ": sample '", key_, "'"),
                            span);
    }
    if (data + size >= SampleRecord::kOffsetLimit ||
        index_.fields.size() >= std::numeric_limits<uint32_t>::max()) {
      return Bad(Code::kResourceExhausted, "the shard is too large for a catalog");
    }
    index_.fields.push_back({.offset = static_cast<uint32_t>(data - sample_.offset),
                             .length = static_cast<uint32_t>(size)});
    sample_.length = static_cast<uint32_t>(span);
    if (field == "cls" && size <= kMaxLabelBytes) {
      Result<Block> label = Exactly(data, size, "a label");
      if (!label) return label.error();
      sample_.label = ParseLabel(*label);
    } else {
      FOREBAY_RETURN_IF_ERROR(window_.SkipPayload(data, size));
    }
    field_names_.push_back(std::move(field));
    return Status();
  }

  Status EndSample() {
    if (!open_) return Status();
    open_ = false;
    const auto [it, added] =
        schemas_.try_emplace(field_names_, static_cast<uint32_t>(index_.schemas.size()));
    if (added) index_.schemas.push_back(field_names_);
    sample_.schema = it->second;
    context_.Land(index_.samples.size(), window_.Held(sample_.offset, sample_.length));
    index_.samples.push_back(sample_);
    index_.keys.append(key_);
    index_.key_ends.push_back(index_.keys.size());
    field_names_.clear();
    if (on_sample_ && !on_sample_()) return Status(Code::kCancelled, "cancelled by the caller");
    return Status();
  }

  ByteReader& reader_;
  ShardReader window_;
  const OnSample& on_sample_;
  const ScanContext& context_;
  uint64_t at_ = 0;  // of the header being looked at
  ShardIndex index_;
  std::optional<std::string> long_name_;
  std::optional<std::string> pax_path_;
  std::optional<uint64_t> pax_size_;
  bool open_ = false;
  std::string key_;
  ShardIndex::Sample sample_;
  std::vector<std::string> field_names_;
  std::map<std::vector<std::string>, uint32_t> schemas_;
};

}  // namespace

Result<ShardIndex> ScanTar(ByteReader& reader, const OnSample& on_sample,
                           const ScanContext& context) {
  return TarScan(reader, on_sample, context).Scan();
}

bool SplitTarName(std::string_view path, std::string_view& key, std::string& field) {
  const size_t slash = path.rfind('/');
  const size_t base = slash == std::string_view::npos ? 0 : slash + 1;
  if (base == 0 && path.starts_with("__") && path.ends_with("__")) return false;
  const size_t dot = path.find('.', base);
  if (dot == std::string_view::npos || dot == 0) return false;
  if (dot == base) {
    // WebDataset's pattern lets the folder's own name be the key here, when it has no dot.
    const size_t before = slash == 0 ? std::string_view::npos : path.rfind('/', slash - 1);
    const size_t folder = before == std::string_view::npos ? 0 : before + 1;
    if (path.substr(folder, slash - folder).find('.') != std::string_view::npos) return false;
  }
  key = path.substr(0, dot);
  field = path.substr(dot + 1);
  for (char& c : field) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return true;
}

bool IsTarName(std::string_view name) { return name.size() > 4 && name.ends_with(".tar"); }

Status SampleTooLarge(std::string_view what, uint64_t bytes) {
  return Status(Code::kInvalidArgument,
                StrCat(what, " has ", bytes, " bytes; a sample must be below 4 GiB, split it"));
}

}  // namespace forebay
