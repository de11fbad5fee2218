#include "decode/npy.h"

#include <charconv>
#include <cstring>
#include <optional>

namespace forebay {
namespace {

Status Bad(std::string what) { return Status(Code::kDataLoss, std::move(what)); }

uint64_t Little(std::span<const std::byte> file, uint64_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= std::to_integer<uint64_t>(file[at + i]) << (8 * i);
  return value;
}

// What follows 'key': in the header's dictionary.
std::optional<std::string_view> After(std::string_view header, std::string_view key) {
  const size_t at = header.find(StrCat("'", key, "':"));
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = header.substr(at + key.size() + 3);
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  return rest;
}

// "(3, 224, 224)", "(5,)", "()"
bool ParseShape(std::string_view text, std::vector<uint64_t>* shape) {
  if (text.empty() || text.front() != '(') return false;
  const char* at = text.data() + 1;
  const char* const end = text.data() + text.size();
  while (at < end && *at != ')') {
    uint64_t value = 0;
    const auto parsed = std::from_chars(at, end, value);
    if (parsed.ec != std::errc()) return false;
    shape->push_back(value);
    at = parsed.ptr;
    while (at < end && (*at == ',' || *at == ' ' || *at == 'L')) ++at;
  }
  return at < end;
}

// Where a member's bytes lie, from the archive's central directory.
struct Member {
  std::string_view name;
  uint64_t method = 0;
  uint64_t bytes = 0;
  uint64_t header = 0;
};

Result<std::vector<Member>> ListZip(std::span<const std::byte> file) {
  constexpr uint64_t kEnd = 22, kEntry = 46;
  if (file.size() < kEnd) return Bad("the archive ends early");
  uint64_t at = file.size() - kEnd;
  const uint64_t lowest = file.size() > kEnd + 65535 ? file.size() - kEnd - 65535 : 0;
  while (Little(file, at, 4) != 0x06054b50) {
    if (at == lowest) return Bad("the archive has no directory: it ends early");
    --at;
  }
  const uint64_t count = Little(file, at + 10, 2);
  uint64_t entry = Little(file, at + 16, 4);
  std::vector<Member> members;
  for (uint64_t i = 0; i < count; ++i) {
    if (entry + kEntry > file.size() || Little(file, entry, 4) != 0x02014b50) {
      return Bad("the archive's directory is damaged");
    }
    const uint64_t name_bytes = Little(file, entry + 28, 2);
    const uint64_t next =
        entry + kEntry + name_bytes + Little(file, entry + 30, 2) + Little(file, entry + 32, 2);
    if (next > file.size()) return Bad("the archive's directory is damaged");
    members.push_back({{reinterpret_cast<const char*>(file.data() + entry + kEntry), name_bytes},
                       Little(file, entry + 10, 2),
                       Little(file, entry + 20, 4),
                       Little(file, entry + 42, 4)});
    entry = next;
  }
  return members;
}

}  // namespace

uint64_t ItemBytes(std::string_view dtype) {
  if (dtype.size() < 3 || (dtype[0] != '<' && dtype[0] != '|')) return 0;
  if (std::string_view("biufc").find(dtype[1]) == std::string_view::npos) return 0;
  uint64_t bytes = 0;
  const auto parsed = std::from_chars(dtype.data() + 2, dtype.data() + dtype.size(), bytes);
  if (parsed.ec != std::errc() || parsed.ptr != dtype.data() + dtype.size()) return 0;
  const uint64_t most = dtype[1] == 'c' ? 16 : 8;
  return bytes <= most && (bytes & (bytes - 1)) == 0 ? bytes : 0;
}

Result<NpyArray> ReadNpy(std::span<const std::byte> file) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  if (file.size() < 10 || std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    return Bad("this is no .npy file");
  }
  const bool wide = std::to_integer<int>(file[6]) >= 2;
  const uint64_t start = wide ? 12 : 10;
  if (file.size() < start) return Bad("the header ends early");
  const uint64_t header_bytes = Little(file, 8, wide ? 4 : 2);
  if (header_bytes > file.size() - start) return Bad("the header ends early");
  const std::string_view header(reinterpret_cast<const char*>(file.data() + start), header_bytes);
  const auto descr = After(header, "descr");
  const auto fortran = After(header, "fortran_order");
  const auto shape = After(header, "shape");
  NpyArray array;
  if (!descr || !fortran || !shape || !ParseShape(*shape, &array.shape)) {
    return Bad("the .npy header does not parse");
  }
  const size_t quote =
      descr->size() > 1 && descr->front() == '\'' ? descr->find('\'', 1) : std::string_view::npos;
  if (quote != std::string_view::npos) array.dtype = descr->substr(1, quote - 1);
  const uint64_t item = ItemBytes(array.dtype);
  if (item == 0) {
    return Status(
        Code::kUnimplemented,
        StrCat("the array's type is ", descr->substr(0, std::min<size_t>(descr->size(), 24)),
               "; plain little-endian numbers are read"));
  }
  if (!fortran->starts_with("False")) {
    return Status(Code::kUnimplemented, "the array is in Fortran order; save it in C order");
  }
  uint64_t bytes = item;
  for (const uint64_t n : array.shape) {
    if (n != 0 && bytes > (uint64_t{1} << 40) / n) return Bad("the shape is beyond any memory");
    bytes *= n;
  }
  const uint64_t have = file.size() - start - header_bytes;
  if (have < bytes) return Bad(StrCat("the array takes ", bytes, " bytes, the file has ", have));
  array.bytes = file.subspan(start + header_bytes, bytes);
  return array;
}

Result<NpyArray> ReadNpz(std::span<const std::byte> file, std::string_view name) {
  const Result<std::vector<Member>> members = ListZip(file);
  if (!members) return members.error();
  std::string known;
  for (const Member& member : *members) {
    std::string_view stem = member.name;
    if (stem.ends_with(".npy")) stem.remove_suffix(4);
    known += StrCat(known.empty() ? "" : ", ", stem);
    const bool wanted = name.empty() ? members->size() == 1 : name == stem || name == member.name;
    if (!wanted) continue;
    if (member.method != 0) {
      return Status(Code::kUnimplemented,
                    StrCat("'", stem, "' is compressed; write it with np.savez"));
    }
    constexpr uint64_t kLocal = 30;
    if (member.header + kLocal > file.size() || Little(file, member.header, 4) != 0x04034b50) {
      return Bad("the archive's directory is damaged");
    }
    const uint64_t data = member.header + kLocal + Little(file, member.header + 26, 2) +
                          Little(file, member.header + 28, 2);
    if (data > file.size()) return Bad("the archive ends early");
    // NumPy writes 64-bit sizes beside the entry; the array's own header bounds it in any case.
    const uint64_t most = file.size() - data;
    return ReadNpy(
        file.subspan(data, member.bytes == 0xffffffff ? most : std::min(most, member.bytes)));
  }
  if (name.empty()) {
    return Status(
        Code::kInvalidArgument,
        StrCat("the archive holds several arrays; name one, as in decode=\"npz:NAME\": ", known));
  }
  return Status(Code::kInvalidArgument, StrCat("the archive has no '", name, "'; it has: ", known));
}

Result<NpyArray> ReadArray(std::span<const std::byte> file, std::string_view name) {
  const bool zip = file.size() >= 4 && Little(file, 0, 4) == 0x04034b50;
  return zip ? ReadNpz(file, name) : ReadNpy(file);
}

}  // namespace forebay
