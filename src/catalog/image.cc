#include "catalog/image.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/crc32c.h"
#include "catalog/catalog_impl.h"

namespace forebay {
namespace {

constexpr size_t kAlign = 8;
constexpr size_t kTableEnd = sizeof(ImageHeader) + kSectionCount * sizeof(SectionRecord);
// Deeper trees than a path can name are hostile; the bound keeps ObjectPath short.
constexpr uint32_t kMaxDepth = 4096;
constexpr size_t kMaxSchemas = std::numeric_limits<uint16_t>::max();
constexpr uint64_t kMaxCount = std::numeric_limits<uint32_t>::max();

constexpr uint64_t AlignUp(uint64_t n) { return (n + kAlign - 1) & ~uint64_t{kAlign - 1}; }

uint32_t HeaderCrc(ImageHeader header, std::span<const SectionRecord> sections) {
  header.crc = 0;
  const uint32_t crc = Crc32c(std::as_bytes(std::span<const ImageHeader>(&header, 1)));
  return Crc32c(std::as_bytes(sections), crc);
}

class Parser {
 public:
  Parser(std::span<const std::byte> bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  Result<ImageView> Parse() {
    FOREBAY_RETURN_IF_ERROR(Header());
    FOREBAY_RETURN_IF_ERROR(Sections());
    FOREBAY_RETURN_IF_ERROR(Names());
    FOREBAY_RETURN_IF_ERROR(Folders());
    FOREBAY_RETURN_IF_ERROR(Objects());
    FOREBAY_RETURN_IF_ERROR(Schemas());
    FOREBAY_RETURN_IF_ERROR(Samples());
    return view_;
  }

 private:
  template <typename... Parts>
  Status Bad(const Parts&... parts) const {
    return Status(Code::kDataLoss, StrCat("catalog ", name_, ": ", parts...));
  }

  Status Header() {
    if (bytes_.size() < kTableEnd) return Bad("only ", bytes_.size(), " bytes, cut off");
    if (reinterpret_cast<uintptr_t>(bytes_.data()) % kAlign != 0) {
      return Status(Code::kInternal, StrCat("catalog ", name_, ": image is not aligned"));
    }
    const auto* header = reinterpret_cast<const ImageHeader*>(bytes_.data());
    if (header->magic != kImageMagic) return Bad("not a Forebay catalog");
    if (header->byte_order != kByteOrder) return Bad("written by a machine of other byte order");
    if (header->version < kOldestVersion || header->version > kImageVersion) {
      return Status(Code::kUnimplemented, StrCat("catalog ", name_, ": version ", header->version,
                                                 ", this build reads versions ", kOldestVersion,
                                                 " to ", kImageVersion, "; build it again"));
    }
    std::memcpy(view_.sections.data(), bytes_.data() + sizeof(ImageHeader),
                kTableEnd - sizeof(ImageHeader));
    if (header->crc != HeaderCrc(*header, view_.sections)) return Bad("header checksum mismatch");
    if (header->image_bytes != bytes_.size()) {
      return Bad(bytes_.size(), " bytes, its header says ", header->image_bytes);
    }
    if (header->format < static_cast<uint32_t>(Format::kFolder) ||
        header->format > static_cast<uint32_t>(Format::kFileList)) {
      return Bad("unknown data format ", header->format);
    }
    if ((header->flags & ~kFlagSingleShard) != 0) return Bad("unknown flags");
    view_.header = header;
    return Status();
  }

  Status Sections() {
    uint64_t expected = kTableEnd;
    for (size_t i = 0; i < kSectionCount; ++i) {
      const SectionRecord& section = view_.sections[i];
      expected = AlignUp(expected);
      if (section.id != i || section.offset != expected || expected > bytes_.size() ||
          section.bytes > bytes_.size() - expected) {
        return Bad("section ", i, " lies out of bounds");
      }
      if (Crc32c(bytes_.subspan(section.offset, section.bytes)) != section.crc) {
        return Bad("section ", i, ": checksum mismatch");
      }
      expected += section.bytes;
    }
    if (expected != bytes_.size()) return Bad("bytes after the last section");
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kFolders, view_.folders));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kTimes, view_.times));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kObjects, view_.objects));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kSamples, view_.samples));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kFields, view_.fields));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kSchemas, view_.schemas));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kSchemaNames, view_.schema_names));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kClasses, view_.classes));
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kNameOffsets, view_.name_offsets));
    std::span<const char> text;
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kRoot, text));
    view_.root = std::string_view(text.data(), text.size());
    FOREBAY_RETURN_IF_ERROR(Take(SectionId::kNameBytes, text));
    view_.name_bytes = std::string_view(text.data(), text.size());
    if (view_.root.empty() || view_.root.front() != '/') return Bad("its root is not absolute");
    if (view_.root.find('\0') != std::string_view::npos ||
        view_.name_bytes.find('\0') != std::string_view::npos) {
      return Bad("a name holds a NUL byte");
    }
    if (view_.folders.empty() || view_.folders.size() > kMaxCount ||
        view_.objects.size() > kMaxCount || view_.samples.size() > kMaxCount ||
        view_.fields.size() > kMaxCount) {
      return Bad("a count is out of range");
    }
    return Status();
  }

  template <typename T>
  Status Take(SectionId id, std::span<const T>& out) {
    const SectionRecord& section = view_.sections[static_cast<size_t>(id)];
    if (section.bytes % sizeof(T) != 0) return Bad("section ", section.id, " has an odd size");
    out = std::span<const T>(reinterpret_cast<const T*>(bytes_.data() + section.offset),
                             section.bytes / sizeof(T));
    return Status();
  }

  Status Names() {
    const std::span<const uint64_t> offsets = view_.name_offsets;
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != view_.name_bytes.size()) {
      return Bad("its name table does not fit its names");
    }
    bool sorted = true;
    for (size_t i = 1; i < offsets.size(); ++i) sorted &= offsets[i - 1] <= offsets[i];
    if (!sorted) return Bad("its name table is not in order");
    const uint64_t named =
        uint64_t{view_.folders.size()} + view_.objects.size() + view_.key_count();
    if (offsets.size() - 1 < named) return Bad("names are missing");
    field_names_ = offsets.size() - 1 - named;
    return Status();
  }

  Status Folders() {
    const uint64_t times =
        view_.folders.size() + (view_.HasObjectTimes() ? view_.objects.size() : 0);
    if (view_.times.size() != times) return Bad("its times do not match its folders and files");
    if (view_.folders[0] != 0 || !view_.FolderName(0).empty()) return Bad("its root folder is odd");
    std::vector<uint16_t> depth(view_.folders.size());
    for (size_t i = 1; i < view_.folders.size(); ++i) {
      const uint32_t parent = view_.folders[i];
      if (parent >= i) return Bad("folder ", i, " comes before its parent");
      if (depth[parent] >= kMaxDepth) return Bad("folder ", i, " lies too deep");
      depth[i] = static_cast<uint16_t>(depth[parent] + 1);
    }
    for (uint32_t folder : view_.classes) {
      if (folder >= view_.folders.size()) return Bad("a class has no folder");
    }
    if (view_.format() != Format::kFolder && !view_.classes.empty())
      return Bad("classes in a format without them");
    return Status();
  }

  Status Objects() {
    const size_t folders = view_.folders.size();
    for (const ObjectRecord& object : view_.objects) {
      if (object.folder >= folders || object.reserved != 0) return Bad("an object has no folder");
    }
    return Status();
  }

  Status Schemas() {
    const std::span<const uint32_t> bounds = view_.schemas;
    if (bounds.empty() || bounds.front() != 0 || bounds.back() != view_.schema_names.size() ||
        bounds.size() - 1 > kMaxSchemas) {
      return Bad("its schema table does not fit");
    }
    for (size_t i = 1; i < bounds.size(); ++i) {
      if (bounds[i] <= bounds[i - 1]) return Bad("schema ", i, " is empty");
    }
    for (uint32_t name : view_.schema_names) {
      if (name >= field_names_) return Bad("a field has no name");
    }
    return Status();
  }

  Status Samples() {
    const Format format = view_.format();
    const bool whole = !view_.IsShards();
    const size_t schemas = view_.schemas.size() - 1;
    uint64_t total = 0;
    uint64_t next_field = 0;
    uint32_t longest = 0;
    for (size_t i = 0; i < view_.samples.size(); ++i) {
      const SampleRecord& sample = view_.samples[i];
      if (sample.object >= view_.objects.size()) return Bad("sample ", i, " has no object");
      const uint64_t size = view_.objects[sample.object].size;
      if (sample.offset() > size || sample.length > size - sample.offset()) {
        return Bad("sample ", i, " lies outside its object");
      }
      if (whole && (sample.place != 0 || sample.length != size || sample.aux != 0)) {
        return Bad("sample ", i, " is not its whole file");
      }
      if (format == Format::kFolder &&
          (sample.label < -1 || sample.label >= static_cast<int64_t>(view_.classes.size()))) {
        return Bad("sample ", i, " has no class");
      }
      if (const uint32_t schema = sample.schema(); schema != 0) {
        if (format != Format::kWebDataset || schema > schemas)
          return Bad("sample ", i, " has an unknown schema");
        // Fields follow each other as the samples do, which also bounds the work of this loop.
        const size_t count = view_.Schema(schema).size();
        if (sample.aux != next_field || count > view_.fields.size() - next_field) {
          return Bad("sample ", i, " has fields out of bounds");
        }
        for (const FieldRecord& field : view_.fields.subspan(next_field, count)) {
          if (field.offset > sample.length || field.length > sample.length - field.offset) {
            return Bad("sample ", i, " has a field outside its span");
          }
        }
        next_field += count;
      }
      total += sample.length;
      longest = std::max(longest, sample.length);
    }
    if (next_field != view_.fields.size()) return Bad("fields without a sample");
    if (total != view_.header->total_bytes || longest != view_.header->max_length) {
      return Bad("its totals do not match its samples");
    }
    return Status();
  }

  const std::span<const std::byte> bytes_;
  const std::string_view name_;
  ImageView view_;
  uint64_t field_names_ = 0;
};

}  // namespace

Result<ImageView> ParseImage(std::span<const std::byte> bytes, std::string_view name) {
  return Parser(bytes, name).Parse();
}

CatalogWriter::CatalogWriter(Format format, std::string root, int64_t root_mtime_ns)
    : format_(format), root_(std::move(root)) {
  folders_.push_back(0);
  folder_times_.push_back(root_mtime_ns);
  folder_names_.Add("");
}

uint32_t CatalogWriter::AddFolder(uint32_t parent, std::string_view name, int64_t mtime_ns) {
  folders_.push_back(parent);
  folder_times_.push_back(mtime_ns);
  folder_names_.Add(name);
  return static_cast<uint32_t>(folders_.size() - 1);
}

void CatalogWriter::AddClass(uint32_t folder) { classes_.push_back(folder); }

void CatalogWriter::AddFile(uint32_t folder, std::string_view name, uint32_t size, int64_t mtime_ns,
                            int32_t label, uint32_t change_stamp) {
  const auto object = static_cast<uint32_t>(objects_.size());
  objects_.push_back({.size = size, .folder = folder, .reserved = 0});
  object_times_.push_back(mtime_ns);
  stamps_.push_back(change_stamp);
  object_names_.Add(name);
  samples_.push_back({.place = 0, .length = size, .object = object, .label = label, .aux = 0});
}

void CatalogWriter::AddShard(std::string_view name, uint64_t size, int64_t mtime_ns,
                             const ShardIndex& index) {
  const auto object = static_cast<uint32_t>(objects_.size());
  objects_.push_back({.size = size, .folder = kRootFolder, .reserved = 0});
  object_times_.push_back(mtime_ns);
  object_names_.Add(name);
  std::vector<uint32_t> schemas;
  for (const std::vector<std::string>& names : index.schemas) schemas.push_back(SchemaIndex(names));
  const size_t first_field = fields_.size();
  for (size_t i = 0; i < index.samples.size(); ++i) {
    const ShardIndex::Sample& from = index.samples[i];
    SampleRecord to{.place = from.offset,
                    .length = from.length,
                    .object = object,
                    .label = from.label,
                    .aux = from.crc};
    if (!schemas.empty()) {
      to.place |= uint64_t{schemas[from.schema]} << SampleRecord::kOffsetBits;
      to.aux = static_cast<uint32_t>(first_field + from.first_field);
      keys_.Add(index.Key(i));
    }
    samples_.push_back(to);
  }
  fields_.insert(fields_.end(), index.fields.begin(), index.fields.end());
}

uint32_t CatalogWriter::FieldNameIndex(const std::string& name) {
  const auto [it, added] =
      field_name_index_.try_emplace(name, static_cast<uint32_t>(field_name_index_.size()));
  if (added) field_names_.Add(name);
  return it->second;
}

uint32_t CatalogWriter::SchemaIndex(const std::vector<std::string>& names) {
  std::vector<uint32_t> indices;
  for (const std::string& name : names) indices.push_back(FieldNameIndex(name));
  const auto [it, added] =
      schema_index_.try_emplace(indices, static_cast<uint32_t>(schema_index_.size() + 1));
  if (added) {
    schema_names_.insert(schema_names_.end(), indices.begin(), indices.end());
    schema_bounds_.push_back(static_cast<uint32_t>(schema_names_.size()));
  }
  return it->second;
}

Result<std::unique_ptr<Catalog>> CatalogWriter::Finish() && {
  const auto too_many = [&](std::string_view what, uint64_t count, uint64_t limit) {
    return Status(Code::kResourceExhausted,
                  StrCat(root_, ": ", count, " ", what, ", a catalog holds at most ", limit));
  };
  if (samples_.size() > kMaxCount) return too_many("samples", samples_.size(), kMaxCount);
  if (objects_.size() > kMaxCount) return too_many("files", objects_.size(), kMaxCount);
  if (folders_.size() > kMaxCount) return too_many("folders", folders_.size(), kMaxCount);
  if (fields_.size() > kMaxCount) return too_many("fields", fields_.size(), kMaxCount);
  if (schema_bounds_.size() - 1 > kMaxSchemas) {
    return too_many("different lists of field names", schema_bounds_.size() - 1, kMaxSchemas);
  }

  std::vector<uint64_t> name_offsets{0};
  std::string name_bytes;
  for (Names* names : {&folder_names_, &object_names_, &keys_, &field_names_}) {
    const uint64_t base = name_bytes.size();
    for (uint64_t end : names->ends) name_offsets.push_back(base + end);
    name_bytes.append(names->bytes);
    *names = Names();
  }
  std::vector<int64_t> times = std::move(folder_times_);
  times.insert(times.end(), object_times_.begin(), object_times_.end());

  const std::array<std::span<const std::byte>, kSectionCount> contents = {
      std::as_bytes(std::span(root_)),          std::as_bytes(std::span(folders_)),
      std::as_bytes(std::span(times)),          std::as_bytes(std::span(objects_)),
      std::as_bytes(std::span(samples_)),       std::as_bytes(std::span(fields_)),
      std::as_bytes(std::span(schema_bounds_)), std::as_bytes(std::span(schema_names_)),
      std::as_bytes(std::span(classes_)),       std::as_bytes(std::span(name_offsets)),
      std::as_bytes(std::span(name_bytes)),
  };
  ImageHeader header{};
  header.magic = kImageMagic;
  header.byte_order = kByteOrder;
  header.version = kImageVersion;
  header.format = static_cast<uint32_t>(format_);
  header.flags = flags_;
  for (const SampleRecord& sample : samples_) {
    header.total_bytes += sample.length;
    header.max_length = std::max(header.max_length, sample.length);
  }
  std::array<SectionRecord, kSectionCount> sections{};
  uint64_t end = kTableEnd;
  for (size_t i = 0; i < kSectionCount; ++i) {
    end = AlignUp(end);
    sections[i] = {.id = static_cast<uint32_t>(i),
                   .crc = Crc32c(contents[i]),
                   .offset = end,
                   .bytes = contents[i].size()};
    end += contents[i].size();
  }
  header.image_bytes = end;
  header.crc = HeaderCrc(header, sections);

  std::vector<std::byte> image(end);
  std::memcpy(image.data(), &header, sizeof header);
  std::memcpy(image.data() + sizeof header, sections.data(), sizeof sections);
  for (size_t i = 0; i < kSectionCount; ++i) {
    if (contents[i].empty()) continue;
    std::memcpy(image.data() + sections[i].offset, contents[i].data(), contents[i].size());
  }
  Result<std::unique_ptr<Catalog>> made = Catalog::FromImage(std::move(image));
  if (made && !stamps_.empty() && stamps_.size() == objects_.size()) {
    (*made)->SetLookedAt(std::make_shared<std::vector<uint32_t>>(std::move(stamps_)));
  }
  return made;
}

void SealImage(std::span<std::byte> image) {
  auto* const header = reinterpret_cast<ImageHeader*>(image.data());
  const std::span<SectionRecord> sections(
      reinterpret_cast<SectionRecord*>(image.data() + sizeof(ImageHeader)), kSectionCount);
  for (const SectionId id : {SectionId::kTimes, SectionId::kObjects, SectionId::kSamples}) {
    SectionRecord& section = sections[static_cast<size_t>(id)];
    section.crc = Crc32c(image.subspan(section.offset, section.bytes));
  }
  const SectionRecord& samples = sections[static_cast<size_t>(SectionId::kSamples)];
  header->total_bytes = 0;
  header->max_length = 0;
  for (const SampleRecord& sample : std::span<const SampleRecord>(
           reinterpret_cast<const SampleRecord*>(image.data() + samples.offset),
           samples.bytes / sizeof(SampleRecord))) {
    header->total_bytes += sample.length;
    header->max_length = std::max(header->max_length, sample.length);
  }
  header->crc = HeaderCrc(*header, sections);
}

Result<std::unique_ptr<Catalog>> CatalogWriter::FinishUnsized(
    size_t threads, const std::function<LookUp(const ImageView&)>& make_look) && {
  Result<std::unique_ptr<Catalog>> made = std::move(*this).Finish();
  if (!made) return made.error();
  Catalog::Impl& impl = *(*made)->impl_;
  Catalog::LearnLater(impl, threads, make_look(impl.view), false);
  return made;
}

}  // namespace forebay
