#include "catalog/catalog.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "base/rng.h"
#include "base/trusted_files.h"
#include "catalog/catalog_impl.h"
#include "catalog/paths.h"

namespace forebay {
namespace {

// Fields of a sample without named ones.
constexpr std::string_view kWhole = "data";

// A new file beside `file`. Another process or thread that saves the same catalog gets its own.
Result<OwnedFd> CreateBeside(const std::string& file, mode_t mode, std::string& name) {
  static std::atomic<uint64_t> counter = 0;
  while (true) {
    name = StrCat(file, ".", ::getpid(), ".", counter.fetch_add(1), ".tmp");
    OwnedFd fd(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (fd.valid()) return fd;
    if (errno != EEXIST) return ErrnoStatus(errno, StrCat("create ", name));
  }
}

Status WriteAll(int fd, std::span<const std::byte> bytes, const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, StrCat("write ", name));
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  if (::fsync(fd) != 0) return ErrnoStatus(errno, StrCat("sync ", name));
  return Status();
}

Result<Mapping> ReadWhole(int fd, size_t size, const std::string& file) {
  void* base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, StrCat("memory for the catalog ", file));
  Mapping memory(base, size);
  for (size_t have = 0; have < size;) {
    const ssize_t n = ::pread(fd, memory.data() + have, size - have, static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, StrCat("read catalog ", file));
    if (n == 0) return Status(Code::kDataLoss, StrCat("catalog ", file, ": it ends early"));
    have += static_cast<size_t>(n);
  }
  return memory;
}

Result<Mapping> MapOrRead(int fd, size_t size, const std::string& file) {
  if (!OnLocalFileSystem(fd)) return ReadWhole(fd, size, file);
  void* base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, StrCat("map catalog ", file));
  return Mapping(base, size);
}

}  // namespace

Catalog::Catalog(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Catalog::~Catalog() = default;

Result<std::unique_ptr<Catalog>> Catalog::LoadOwn(const std::string& file) {
  const std::string folder(DirName(file));
  const std::string name(BaseName(file));
  const OwnedFd parent(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!parent.valid()) return ErrnoStatus(errno, StrCat("open the folder ", folder));
  OwnedFd fd = OpenPrivateFile(parent.get(), name.c_str(), O_RDONLY);
  struct stat st = {};
  if (fd.valid()) {
    const bool readable = ::fstat(fd.get(), &st) == 0 && (st.st_mode & (S_IRGRP | S_IROTH)) != 0;
    if (readable) (void)::fchmod(fd.get(), 0600);
    return LoadFrom(std::move(fd), file);
  }
  if (errno != EPERM) return ErrnoStatus(errno, StrCat("open catalog ", file));
  const bool known = ::fstatat(parent.get(), name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0;
  return Status(Code::kPermissionDenied,
                StrCat("the saved catalog ", file, known ? StrCat(" (", OwnerAndMode(st), ")") : "",
                       " is not used: it is not a regular file of this user that nobody else may "
                       "write to"));
}

Result<std::unique_ptr<Catalog>> Catalog::Load(const std::string& file) {
  OwnedFd fd = OpenRegularFile(file.c_str());
  if (!fd.valid() && (errno == ESPIPE || errno == EISDIR)) {
    return Status(Code::kDataLoss, StrCat("catalog ", file, ": empty or not a file"));
  }
  if (!fd.valid()) return ErrnoStatus(errno, StrCat("open catalog ", file));
  return LoadFrom(std::move(fd), file);
}

Result<std::unique_ptr<Catalog>> Catalog::LoadFrom(OwnedFd fd, const std::string& file) {
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return ErrnoStatus(errno, StrCat("stat catalog ", file));
  if (!S_ISREG(st.st_mode) || st.st_size == 0) {
    return Status(Code::kDataLoss, StrCat("catalog ", file, ": empty or not a file"));
  }
  Result<Mapping> bytes = MapOrRead(fd.get(), static_cast<size_t>(st.st_size), file);
  if (!bytes) return bytes.error();
  auto impl = std::make_unique<Impl>();
  impl->mapping = *std::move(bytes);
  impl->looked_at = false;
  Result<ImageView> view = ParseImage(impl->mapping.bytes(), file);
  if (!view) return view.error();
  impl->view = *view;
  impl->root = impl->view.root;
  return std::unique_ptr<Catalog>(new Catalog(std::move(impl)));
}

Result<std::unique_ptr<Catalog>> Catalog::FromImage(std::vector<std::byte> image) {
  auto impl = std::make_unique<Impl>();
  impl->memory = std::make_shared<std::vector<std::byte>>(std::move(image));
  Result<ImageView> view = ParseImage(*impl->memory, "in memory");
  if (!view) return view.error();
  impl->view = *view;
  impl->root = impl->view.root;
  return std::unique_ptr<Catalog>(new Catalog(std::move(impl)));
}

std::unique_ptr<Catalog> Catalog::Growing(const std::string& root, const std::string& name) {
  auto impl = std::make_unique<Impl>();
  impl->root = root;
  impl->given_name = name;
  impl->growing = std::make_unique<GrowingFiles>(root);
  return std::unique_ptr<Catalog>(new Catalog(std::move(impl)));
}

Result<Appended> Catalog::Append(const NewFile& file) {
  if (impl_->growing == nullptr) {
    return Status(Code::kInvalidArgument, StrCat("the catalog of ", root(),
                                                 " does not grow: ", file.path, " is not added"));
  }
  return impl_->growing->Append(file);
}

std::optional<Appended> Catalog::Find(const NewFile& file) const {
  return impl_->growing == nullptr ? std::nullopt : impl_->growing->Find(file);
}
const std::string& Catalog::given_name() const { return impl_->given_name; }
void Catalog::OpenFile(ObjectId object, HeldFile file) const {
  if (impl_->growing != nullptr) impl_->growing->OpenFile(object, std::move(file));
}
void Catalog::CloseFile(ObjectId object) const {
  if (impl_->growing != nullptr) impl_->growing->CloseFile(object);
}
HeldFile Catalog::OpenedFile(ObjectId object) const {
  return impl_->growing == nullptr ? HeldFile() : impl_->growing->OpenedFile(object);
}
bool Catalog::IsRepeated(ObjectId object) const {
  return impl_->growing != nullptr && impl_->growing->IsRepeated(object);
}
uint32_t Catalog::ObjectBlock(ObjectId object) const {
  return impl_->growing == nullptr ? 0 : impl_->growing->ObjectBlock(object);
}

bool Catalog::complete() const { return impl_->sizer == nullptr || impl_->sizer->complete(); }
Status Catalog::WaitComplete(Nanos wait) const {
  return impl_->sizer == nullptr ? Status() : impl_->sizer->Wait(wait);
}
Sizer* Catalog::sizer() const { return impl_->sizer.get(); }

bool Catalog::looked_at() const { return impl_->looked_at; }
void Catalog::SetLookedAt(std::shared_ptr<std::vector<uint32_t>> stamps) {
  impl_->looked_at = true;
  impl_->stamps = std::move(stamps);
}
bool Catalog::LacksStamps() const {
  const bool loose = format() == Format::kFolder || format() == Format::kFileList;
  return loose && impl_->stamps == nullptr;
}
uint64_t Catalog::StampsHash() const {
  if (impl_->stamps == nullptr) return 0;
  uint64_t hash = impl_->stamps->size();
  for (const uint32_t stamp : *impl_->stamps) hash = SplitMix64(hash ^ stamp).Next();
  return hash | 1;
}
const std::shared_ptr<std::vector<uint32_t>>& Catalog::stamps() const { return impl_->stamps; }

void Catalog::SaveWhenComplete(const std::string& file) {
  if (impl_->late_save == nullptr) return;
  MutexLock lock(impl_->late_save->mutex);
  impl_->late_save->file = file;
}

std::string Catalog::SaveNote() const {
  if (impl_->late_save == nullptr || !complete()) return "";
  MutexLock lock(impl_->late_save->mutex);
  return impl_->late_save->note;
}

Status Catalog::Save(const std::string& file, Access access) const {
  if (impl_->growing != nullptr) {
    return Status(Code::kUnimplemented,
                  StrCat("the data set of files met below ", root(), " is not saved to ", file));
  }
  FOREBAY_RETURN_IF_ERROR(WaitComplete());
  if (impl_->sizer != nullptr) FOREBAY_RETURN_IF_ERROR(impl_->sizer->first_error());
  return SaveImage(image(), file, access);
}

Status SaveImage(std::span<const std::byte> image, const std::string& file,
                 Catalog::Access access) {
  Result<std::string> path = AbsolutePath(file);
  if (!path) return path.error();
  const std::string folder(DirName(*path));
  const bool own = access == Catalog::Access::kOwner;
  if (const int error = own ? MakePrivateFolder(folder) : MakeFolders(folder, 0777, 0777);
      error != 0) {
    return ErrnoStatus(error, StrCat("create folder ", folder));
  }
  std::string temporary;
  Result<OwnedFd> fd = CreateBeside(*path, own ? 0600 : 0666, temporary);
  if (!fd) return fd.error();
  Status status = WriteAll(fd->get(), image, temporary);
  if (status.ok() && ::rename(temporary.c_str(), path->c_str()) != 0) {
    status = ErrnoStatus(errno, StrCat("rename ", temporary, " to ", *path));
  }
  if (!status.ok()) {
    ::unlink(temporary.c_str());
    return status;
  }
  // The rename itself lasts only once the folder is on disk. Some network file systems refuse to
  // sync a folder; the file is whole either way.
  OwnedFd parent(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.valid()) ::fsync(parent.get());
  return Status();
}

Format Catalog::format() const {
  return impl_->growing != nullptr ? Format::kGrowing : impl_->view.format();
}
bool Catalog::knows_times() const {
  return format() != Format::kFileList || impl_->view.times[0] != 0;
}
bool Catalog::has_object_times() const {
  return impl_->growing != nullptr || impl_->view.HasObjectTimes();
}
int64_t Catalog::ObjectTime(ObjectId object) const {
  if (impl_->growing != nullptr) return impl_->growing->ObjectTime(object);
  const ImageView& view = impl_->view;
  if (view.HasObjectTimes()) return view.times[view.folders.size() + object];
  return view.times[format() == Format::kFileList ? 0 : view.objects[object].folder];
}
const std::string& Catalog::root() const { return impl_->root; }
size_t Catalog::size() const {
  return impl_->growing != nullptr ? impl_->growing->size() : impl_->view.samples.size();
}
size_t Catalog::object_count() const {
  return impl_->growing != nullptr ? impl_->growing->object_count() : impl_->view.objects.size();
}
uint64_t Catalog::total_bytes() const {
  if (impl_->growing != nullptr) return impl_->growing->total_bytes();
  (void)WaitComplete();
  return impl_->view.header->total_bytes;
}
uint32_t Catalog::max_length() const {
  if (impl_->growing != nullptr) return impl_->growing->max_length();
  (void)WaitComplete();
  return impl_->view.header->max_length;
}

uint64_t Catalog::fingerprint() const {
  if (impl_->growing != nullptr) {
    uint64_t hash = SplitMix64(static_cast<uint64_t>(Format::kGrowing)).Next();
    for (const char c : root()) hash = SplitMix64(hash ^ static_cast<unsigned char>(c)).Next();
    return hash;
  }
  (void)WaitComplete();
  uint64_t hash = SplitMix64(impl_->view.header->format).Next();
  for (const SectionRecord& section : impl_->view.SectionTable()) {
    const auto id = static_cast<SectionId>(section.id);
    // Where the data set is mounted and when it was copied there does not change what it is.
    if (id == SectionId::kRoot || id == SectionId::kTimes) continue;
    hash = SplitMix64(hash ^ section.crc).Next();
    hash = SplitMix64(hash ^ section.bytes).Next();
  }
  return hash;
}

uint64_t Catalog::version() const {
  uint64_t hash = fingerprint();
  if (impl_->growing == nullptr) {
    for (const SectionRecord& section : impl_->view.SectionTable()) {
      hash = SplitMix64(hash ^ section.crc).Next();
    }
  }
  return hash;
}

Extent Catalog::extent(SampleId sample) const {
  if (impl_->growing != nullptr) return impl_->growing->extent(sample);
  const SampleRecord& record = impl_->view.samples[sample];
  Extent extent;
  extent.object = record.object;
  extent.offset = record.offset();
  extent.length = record.length;
  extent.whole_object = !impl_->view.IsShards();
  extent.has_crc = format() == Format::kTfRecord;
  if (extent.has_crc) extent.crc = record.aux;
  return extent;
}

uint32_t Catalog::length(SampleId sample) const {
  if (impl_->growing != nullptr) return impl_->growing->extent(sample).length;
  return impl_->view.samples[sample].length;
}
ObjectId Catalog::object(SampleId sample) const {
  if (impl_->growing != nullptr) return impl_->growing->object(sample);
  return impl_->view.samples[sample].object;
}
int64_t Catalog::label(SampleId sample) const {
  return impl_->growing != nullptr ? -1 : impl_->view.samples[sample].label;
}

std::string Catalog::SampleName(SampleId sample) const {
  if (impl_->growing != nullptr) return impl_->growing->SampleName(sample);
  const ImageView& view = impl_->view;
  const SampleRecord& record = view.samples[sample];
  const std::string_view object = view.ObjectName(record.object);
  if (format() == Format::kWebDataset) return StrCat(object, "/", view.Key(sample));
  if (format() == Format::kTfRecord) return StrCat(object, "@", record.offset());
  std::string name(object);
  for (uint32_t f = view.objects[record.object].folder; f != 0; f = view.folders[f]) {
    name = StrCat(view.FolderName(f), "/", name);
  }
  return name;
}

std::string Catalog::Impl::FolderBelow(uint32_t folder) const {
  if (growing != nullptr) return std::string(growing->FolderBelow(folder));
  std::string path;
  for (uint32_t f = folder; f != 0; f = view.folders[f]) {
    path = JoinPath(view.FolderName(f), path);
  }
  return path;
}

std::string Catalog::Impl::FolderPath(uint32_t folder) const {
  return JoinPath(root, FolderBelow(folder));
}

std::string Catalog::FolderBelow(uint32_t folder) const { return impl_->FolderBelow(folder); }

std::string_view Catalog::ObjectName(ObjectId object) const {
  if (impl_->growing != nullptr) return impl_->growing->ObjectName(object);
  return impl_->view.ObjectName(object);
}
uint32_t Catalog::folder(ObjectId object) const {
  if (impl_->growing != nullptr) return impl_->growing->folder(object);
  return impl_->view.objects[object].folder;
}
size_t Catalog::folder_count() const {
  return impl_->growing != nullptr ? impl_->growing->folder_count() : impl_->view.folders.size();
}

std::string Catalog::ObjectPath(ObjectId object) const {
  return JoinPath(impl_->FolderPath(folder(object)), ObjectName(object));
}

uint64_t Catalog::ObjectSize(ObjectId object) const {
  if (impl_->growing != nullptr) return impl_->growing->ObjectSize(object);
  return impl_->view.objects[object].size;
}

std::vector<FieldView> Catalog::Fields(SampleId sample) const {
  if (impl_->growing != nullptr) return {{.name = kWhole, .offset = 0, .length = length(sample)}};
  const ImageView& view = impl_->view;
  const SampleRecord& record = view.samples[sample];
  if (record.schema() == 0) return {{.name = kWhole, .offset = 0, .length = record.length}};
  const std::span<const uint32_t> names = view.Schema(record.schema());
  std::vector<FieldView> out;
  out.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    const FieldRecord& field = view.fields[record.aux + i];
    out.push_back({view.FieldName(names[i]), field.offset, field.length});
  }
  return out;
}

std::vector<std::string> Catalog::Classes() const {
  std::vector<std::string> out;
  out.reserve(impl_->view.classes.size());
  for (uint32_t folder : impl_->view.classes) out.emplace_back(impl_->view.FolderName(folder));
  return out;
}

std::span<const std::byte> Catalog::image() const {
  if (impl_->growing != nullptr) return {};
  (void)WaitComplete();
  return impl_->mapping.size() != 0 ? impl_->mapping.bytes()
                                    : std::span<const std::byte>(*impl_->memory);
}

}  // namespace forebay
