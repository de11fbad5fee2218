// The catalog's image: what lies in a saved file, byte for byte, and what lies in memory.
//
// A header, a table of sections, then the sections in their order, each aligned to 8 bytes and
// covered by a CRC-32C. Numbers are in the byte order of the machine that wrote them; a reader of
// the other order refuses the file.
//
// Names are addressed by one table of offsets and come in this order: folders (the root's is
// empty), objects, sample keys (kWebDataset only), field names.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "catalog/catalog.h"
#include "catalog/shard.h"
#include "catalog/sizer.h"

namespace forebay {

enum class SectionId : uint32_t {
  kRoot = 0,     // path bytes
  kFolders,      // u32 parent of each folder; folder 0 is the root, parents come before children
  kTimes,        // i64 mtime in ns of each folder, then of each object. Those of a kFileList's
                 // folders are 0, but the root's, which is a hash of all files' and not 0. In
                 // version 1 objects have one in shard formats only
  kObjects,      // ObjectRecord
  kSamples,      // SampleRecord
  kFields,       // FieldRecord, in the samples' order
  kSchemas,      // u32 bounds of each schema in kSchemaNames, one more than there are schemas
  kSchemaNames,  // u32 index of a field name
  kClasses,      // u32 folder of each class
  kNameOffsets,  // u64 bounds of each name in kNameBytes, one more than there are names
  kNameBytes,
};
inline constexpr size_t kSectionCount = 11;

inline constexpr std::array<char, 8> kImageMagic = {'F', 'B', 'C', 'A', 'T', 'L', 'O', 'G'};
inline constexpr uint32_t kByteOrder = 0x01020304;
inline constexpr uint32_t kImageVersion = 2;
inline constexpr uint32_t kOldestVersion = 1;
inline constexpr uint32_t kFlagSingleShard = 1;  // built from one shard file, not from a folder

struct ImageHeader {
  std::array<char, 8> magic;
  uint32_t byte_order;
  uint32_t version;
  uint32_t format;
  uint32_t flags;
  uint64_t image_bytes;
  uint64_t total_bytes;
  uint32_t max_length;
  uint32_t crc;  // of the header and the section table, with this field zero
};
static_assert(sizeof(ImageHeader) == 48);

struct SectionRecord {
  uint32_t id;
  uint32_t crc;
  uint64_t offset;
  uint64_t bytes;
};
static_assert(sizeof(SectionRecord) == 24);

struct ObjectRecord {
  uint64_t size;
  uint32_t folder;
  uint32_t reserved;  // zero
};
static_assert(sizeof(ObjectRecord) == 16);

struct SampleRecord {
  static constexpr int kOffsetBits = 48;
  static constexpr uint64_t kOffsetLimit = uint64_t{1} << kOffsetBits;

  uint64_t place;  // offset in the low 48 bits, schema in the high 16
  uint32_t length;
  uint32_t object;
  int32_t label;
  uint32_t aux;  // the stored CRC (kTfRecord) or the first field (schema > 0), else zero

  uint64_t offset() const { return place & (kOffsetLimit - 1); }
  // 0: one unnamed field that is the whole sample; s: schema s - 1 of the table.
  uint32_t schema() const { return static_cast<uint32_t>(place >> kOffsetBits); }
};
static_assert(sizeof(SampleRecord) == 24);

// A checked view of an image. Every index that an accessor of Catalog follows has been validated.
struct ImageView {
  const ImageHeader* header = nullptr;
  std::array<SectionRecord, kSectionCount> sections{};
  std::string_view root;
  std::span<const uint32_t> folders;
  std::span<const int64_t> times;
  std::span<const ObjectRecord> objects;
  std::span<const SampleRecord> samples;
  std::span<const FieldRecord> fields;
  std::span<const uint32_t> schemas;
  std::span<const uint32_t> schema_names;
  std::span<const uint32_t> classes;
  std::span<const uint64_t> name_offsets;
  std::string_view name_bytes;

  // As it lies in the image, where SealImage changes it.
  std::span<const SectionRecord, kSectionCount> SectionTable() const {
    return std::span<const SectionRecord, kSectionCount>(
        reinterpret_cast<const SectionRecord*>(header + 1), kSectionCount);
  }

  Format format() const { return static_cast<Format>(header->format); }
  bool IsShards() const { return format() == Format::kWebDataset || format() == Format::kTfRecord; }
  // Whether each object has a time of its own.
  bool HasObjectTimes() const { return header->version > kOldestVersion || IsShards(); }
  size_t key_count() const { return format() == Format::kWebDataset ? samples.size() : 0; }

  std::string_view Name(size_t index) const {
    return name_bytes.substr(name_offsets[index], name_offsets[index + 1] - name_offsets[index]);
  }
  std::string_view FolderName(uint32_t folder) const { return Name(folder); }
  std::string_view ObjectName(ObjectId object) const { return Name(folders.size() + object); }
  std::string_view Key(SampleId sample) const {
    return Name(folders.size() + objects.size() + sample);
  }
  std::string_view FieldName(uint32_t index) const {
    return Name(folders.size() + objects.size() + key_count() + index);
  }
  std::span<const uint32_t> Schema(uint32_t schema) const {
    return schema_names.subspan(schemas[schema - 1], schemas[schema] - schemas[schema - 1]);
  }
};

// Checks the whole image. `bytes` must be aligned to 8 and outlive the view; `name` is for
// messages.
Result<ImageView> ParseImage(std::span<const std::byte> bytes, std::string_view name);

// Totals and checksums of an image of files whose lengths and times were set in place.
void SealImage(std::span<std::byte> image);

// Collects a data set in catalog order and makes the image. Limits are checked by Finish.
class CatalogWriter {
 public:
  static constexpr uint32_t kRootFolder = 0;

  CatalogWriter(Format format, std::string root, int64_t root_mtime_ns);

  uint32_t AddFolder(uint32_t parent, std::string_view name, int64_t mtime_ns);
  void AddClass(uint32_t folder);
  // An object that is one sample.
  void AddFile(uint32_t folder, std::string_view name, uint32_t size, int64_t mtime_ns,
               int32_t label, uint32_t change_stamp = 0);
  // An object of the root folder that holds samples.
  void AddShard(std::string_view name, uint64_t size, int64_t mtime_ns, const ShardIndex& index);
  void set_single_shard() { flags_ |= kFlagSingleShard; }

  size_t samples() const { return samples_.size(); }

  Result<std::unique_ptr<Catalog>> Finish() &&;
  // The same, of files that were added with no size: `make_look` gets the image that outlives the
  // catalog, and returns what looks up the size of one.
  using LookUp = std::function<Result<Sizer::Size>(SampleId)>;
  Result<std::unique_ptr<Catalog>> FinishUnsized(
      size_t threads, const std::function<LookUp(const ImageView&)>& make_look) &&;

 private:
  struct Names {
    std::vector<uint64_t> ends;
    std::string bytes;
    void Add(std::string_view name) {
      bytes.append(name);
      ends.push_back(bytes.size());
    }
  };
  uint32_t FieldNameIndex(const std::string& name);
  uint32_t SchemaIndex(const std::vector<std::string>& names);

  const Format format_;
  const std::string root_;
  uint32_t flags_ = 0;
  std::vector<uint32_t> folders_;
  std::vector<int64_t> folder_times_;
  std::vector<int64_t> object_times_;
  std::vector<uint32_t> stamps_;  // Catalog::ChangeStamp of files
  std::vector<ObjectRecord> objects_;
  std::vector<SampleRecord> samples_;
  std::vector<FieldRecord> fields_;
  std::vector<uint32_t> schema_bounds_{0};
  std::vector<uint32_t> schema_names_;
  std::vector<uint32_t> classes_;
  Names folder_names_;
  Names object_names_;
  Names keys_;
  Names field_names_;
  std::map<std::string, uint32_t, std::less<>> field_name_index_;
  std::map<std::vector<uint32_t>, uint32_t> schema_index_;
};

}  // namespace forebay
