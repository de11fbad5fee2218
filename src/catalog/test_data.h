// Data sets and hostile images for tests and fuzzers.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32c.h"
#include "catalog/catalog.h"
#include "catalog/image.h"

namespace forebay::testing {

inline std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

// A folder that is gone with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "forebay-XXXXXX").string();
    if (::mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(std::string_view name) const { return StrCat(path_, "/", name); }

  // Creates folders on the way.
  std::string Write(std::string_view name, std::string_view content) const {
    const std::string file = *this / name;
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file;
  }
  void Folder(std::string_view name) const { std::filesystem::create_directories(*this / name); }
  void Link(std::string_view target, std::string_view name) const {
    std::filesystem::create_symlink(target, *this / name);
  }

 private:
  std::string path_;
};

inline std::string PaddedTo512(std::string text) {
  text.resize((text.size() + 511) / 512 * 512, '\0');
  return text;
}

inline void SetTarChecksum(std::string& header) {
  std::memset(header.data() + 148, ' ', 8);
  unsigned sum = 0;
  for (char c : header.substr(0, 512)) sum += static_cast<unsigned char>(c);
  std::snprintf(header.data() + 148, 8, "%06o", sum);
}

inline std::string TarHeader(std::string_view name, uint64_t size, char type = '0',
                             std::string_view prefix = "") {
  std::string h(512, '\0');
  name.copy(h.data(), 100);
  std::snprintf(h.data() + 124, 12, "%011llo", static_cast<unsigned long long>(size));
  h[156] = type;
  std::memcpy(h.data() + 257,
              "ustar\0"
              "00",
              8);
  prefix.copy(h.data() + 345, 155);
  SetTarChecksum(h);
  return h;
}

inline std::string TarMember(std::string_view name, std::string_view data, char type = '0') {
  return TarHeader(name, data.size(), type) + PaddedTo512(std::string(data));
}

inline std::string PaxRecord(std::string_view key, std::string_view value) {
  const size_t body = key.size() + value.size() + 3;
  size_t length = body + 1;
  while (std::to_string(length).size() + body != length) ++length;
  return StrCat(length, " ", key, "=", value, "\n");
}

inline std::string TarEnd() { return std::string(1024, '\0'); }

template <typename T>
std::string Little(T value) {
  std::string out;
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
  return out;
}

inline std::string TfRecordHead(uint64_t length) {
  const std::string head = Little(length);
  return head + Little(MaskCrc(Crc32c(Bytes(head))));
}

inline std::string TfRecord(std::string_view data) {
  return StrCat(TfRecordHead(data.size()), data, Little(MaskCrc(Crc32c(Bytes(data)))));
}

// Makes every checksum of an image right again, so that what lies behind them is reached. False
// where the image has no room for a header or a section lies outside.
inline bool Reseal(std::vector<std::byte>& image) {
  std::array<SectionRecord, kSectionCount> sections;
  ImageHeader header;
  if (image.size() < sizeof header + sizeof sections) return false;
  std::memcpy(&header, image.data(), sizeof header);
  std::memcpy(sections.data(), image.data() + sizeof header, sizeof sections);
  bool inside = true;
  for (SectionRecord& section : sections) {
    if (section.offset > image.size() || section.bytes > image.size() - section.offset) {
      inside = false;
      continue;
    }
    section.crc = Crc32c(std::span(image).subspan(section.offset, section.bytes));
  }
  header.crc = 0;
  header.crc = Crc32c(std::as_bytes(std::span(sections)),
                      Crc32c(std::as_bytes(std::span<const ImageHeader>(&header, 1))));
  std::memcpy(image.data(), &header, sizeof header);
  std::memcpy(image.data() + sizeof header, sections.data(), sizeof sections);
  return inside;
}

// Follows every index of a catalog; the sum keeps the reads from being optimised away.
inline uint64_t Touch(const Catalog& catalog) {
  uint64_t sum = catalog.fingerprint() ^ catalog.total_bytes() ^ catalog.max_length();
  for (const std::string& name : catalog.Classes()) sum += name.size();
  for (ObjectId o = 0; o < catalog.object_count(); ++o) {
    sum += catalog.ObjectPath(o).size() + catalog.ObjectSize(o);
  }
  for (SampleId s = 0; s < catalog.size(); ++s) {
    const Extent extent = catalog.extent(s);
    sum += extent.offset + extent.length + extent.object + extent.crc + catalog.length(s);
    sum += static_cast<uint64_t>(catalog.label(s)) + catalog.SampleName(s).size();
    for (const FieldView& field : catalog.Fields(s)) {
      for (char c : field.name) sum += static_cast<unsigned char>(c);
      sum += field.offset + field.length;
    }
  }
  return sum;
}

}  // namespace forebay::testing
