#include "catalog/look.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/rng.h"
#include "catalog/catalog_impl.h"
#include "catalog/parallel.h"
#include "catalog/paths.h"
#include "catalog/shard.h"

namespace forebay {
namespace {

// Files that one task looks at: a folder is opened once for each.
constexpr size_t kAtOnce = 32;
// Descriptors that looks keep until all are made: a program may have 1,024 in all.
constexpr size_t kFoldersOpen = 64;
// A file that was written less than this before it was looked at may be written again unnoticed.
constexpr Nanos kYoungFile = 3 * kSecond;

// Lengths and times of files in an image.
class FileRecords {
 public:
  explicit FileRecords(std::span<std::byte> image, const ImageView& view)
      : objects_(At<ObjectRecord>(image, view, SectionId::kObjects)),
        samples_(At<SampleRecord>(image, view, SectionId::kSamples)),
        times_(At<int64_t>(image, view, SectionId::kTimes)),
        folders_(view.folders.size()),
        count_(view.objects.size()),
        list_(view.format() == Format::kFileList) {}

  void Set(SampleId sample, const FileSize& size) {
    const uint32_t object = samples_[sample].object;
    if (samples_[sample].length != size.length || times_[folders_ + object] != size.mtime_ns) {
      ++changed_;
    }
    objects_[object].size = size.length;
    times_[folders_ + object] = size.mtime_ns;
    samples_[sample].length = size.length;
  }
  // Files that were set to what they were not.
  uint64_t changed() const { return changed_; }
  // A list stands for the times of its files with its root's.
  void Finish() {
    if (list_) times_[0] = TimeOfAll({times_ + folders_, count_});
  }

 private:
  template <typename Record>
  static Record* At(std::span<std::byte> image, const ImageView& view, SectionId id) {
    return reinterpret_cast<Record*>(image.data() + view.sections[static_cast<size_t>(id)].offset);
  }

  ObjectRecord* const objects_;
  SampleRecord* const samples_;
  int64_t* const times_;
  const size_t folders_;
  const size_t count_;
  const bool list_;
  uint64_t changed_ = 0;
};

}  // namespace

int64_t TimeOfAll(std::span<const int64_t> times) {
  uint64_t hash = times.size();
  for (const int64_t time : times) hash = SplitMix64(hash ^ static_cast<uint64_t>(time)).Next();
  return static_cast<int64_t>(hash | 1);
}

FileLooks::FileLooks(const ImageView& view)
    : view_(view), opened_(std::min(view.folders.size(), kFoldersOpen)) {
  for (std::atomic<int>& fd : opened_) fd.store(-1, std::memory_order_relaxed);
}

FileLooks::~FileLooks() {
  for (const std::atomic<int>& fd : opened_) {
    const OwnedFd closed(fd.load(std::memory_order_relaxed));
  }
}

int FileLooks::Folder(uint32_t folder) const {
  if (folder < folders_.size()) return folders_[folder].get();
  if (folder >= opened_.size()) return -1;
  int known = opened_[folder].load(std::memory_order_acquire);
  if (known >= 0) return known;
  OwnedFd own(::open(FolderPath(folder).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (own.valid() &&
      opened_[folder].compare_exchange_strong(known, own.get(), std::memory_order_acq_rel)) {
    return own.Release();
  }
  return known;
}

Result<FileSize> FileLooks::LookAt(SampleId sample) const {
  return LookAt(sample, Folder(view_.objects[view_.samples[sample].object].folder));
}

Result<FileSize> FileLooks::LookAt(SampleId sample, int folder) const {
  const ObjectId object = view_.samples[sample].object;
  const std::string name = folder >= 0 ? std::string(view_.ObjectName(object)) : Path(object);
  struct statx st = {};
  // A network file system would answer from what it was told up to a minute ago.
  if (::statx(folder >= 0 ? folder : AT_FDCWD, name.c_str(), AT_STATX_FORCE_SYNC,
              STATX_TYPE | STATX_SIZE | STATX_MTIME | STATX_CTIME, &st) != 0) {
    const int error = errno;
    if (error != ENOENT && error != ENOTDIR) {
      return ErrnoStatus(error, StrCat("stat ", Path(object)));
    }
    return Status(Code::kNotFound,
                  StrCat(Path(object), ": no such file; it was there when its folder was listed"));
  }
  if (!S_ISREG(st.stx_mode)) {
    return Status(Code::kChanged,
                  StrCat(Path(object), ": no longer a file, as when its folder was listed"));
  }
  if (st.stx_size > std::numeric_limits<uint32_t>::max()) {
    return SampleTooLarge(Path(object), st.stx_size);
  }
  const int64_t mtime = st.stx_mtime.tv_sec * kSecond + st.stx_mtime.tv_nsec;
  const int64_t ctime = st.stx_ctime.tv_sec * kSecond + st.stx_ctime.tv_nsec;
  return FileSize{.length = static_cast<uint32_t>(st.stx_size),
                  .mtime_ns = mtime,
                  .change_stamp = StampOfLook(mtime, ctime)};
}

uint32_t StampOf(int64_t ctime_ns) {
  return static_cast<uint32_t>(SplitMix64(static_cast<uint64_t>(ctime_ns)).Next()) | 1;
}

uint32_t StampOfLook(int64_t mtime_ns, int64_t ctime_ns) {
  const bool coarse = mtime_ns % kSecond == 0 && ctime_ns % kSecond == 0;
  if (!SeemsYoung(mtime_ns, coarse, kYoungFile)) return StampOf(ctime_ns);
  return std::max(StampOf(ctime_ns) - 1, 2U);
}

uint32_t Catalog::ChangeStamp(ObjectId object) const {
  return impl_->stamps == nullptr ? 0 : (*impl_->stamps)[object];
}

std::string FileLooks::Path(ObjectId object) const {
  return JoinPath(FolderPath(view_.objects[object].folder), view_.ObjectName(object));
}

std::string FileLooks::FolderPath(uint32_t folder) const {
  std::string path;
  for (uint32_t f = folder; f != 0; f = view_.folders[f]) {
    path = JoinPath(view_.FolderName(f), path);
  }
  return JoinPath(view_.root, path);
}

void Catalog::LearnLater(Impl& impl, size_t threads, std::function<Result<FileSize>(SampleId)> look,
                         bool saved) {
  impl.late_save = std::make_shared<LateSave>();
  Sizer::Work work;
  work.samples = impl.view.samples.size();
  work.threads = threads;
  if (saved && work.samples > 0) {
    work.guess = static_cast<uint32_t>(impl.view.header->total_bytes / work.samples);
  }
  work.look = std::move(look);
  const auto records = std::make_shared<FileRecords>(*impl.memory, impl.view);
  impl.stamps = std::make_shared<std::vector<uint32_t>>(impl.view.objects.size());
  work.set = [records, view = impl.view, stamps = impl.stamps](SampleId s, const FileSize& size) {
    records->Set(s, size);
    (*stamps)[view.samples[s].object] = size.change_stamp;
  };
  work.finish = [memory = impl.memory, save = impl.late_save, root = impl.root, records,
                 saved](const Status& error) {
    records->Finish();
    SealImage(*memory);
    MutexLock lock(save->mutex);
    if (save->file.empty() || (saved && records->changed() == 0)) return;
    const Status status =
        error.ok() ? SaveImage(*memory, save->file, Catalog::Access::kOwner) : error;
    if (status.ok()) return;
    save->note = StrCat("the catalog of ", root,
                        " is not saved, the next start lists it again: ", status.message());
  };
  impl.sizer = std::make_unique<Sizer>(std::move(work));
}

std::unique_ptr<Catalog> Catalog::LookLater(size_t threads) const {
  const std::span<const std::byte> image = this->image();
  if (image.empty() || impl_->view.IsShards()) return nullptr;
  Result<std::unique_ptr<Catalog>> made =
      FromImage(std::vector<std::byte>(image.begin(), image.end()));
  if (!made) return nullptr;
  Impl& impl = *(*made)->impl_;
  const auto looks = std::make_shared<const FileLooks>(impl.view);
  LearnLater(
      impl, threads, [looks](SampleId s) { return looks->LookAt(s); }, true);
  return *std::move(made);
}

Result<Relooked> Catalog::LookAtFiles(size_t threads, const std::function<bool()>& tick,
                                      std::atomic<uint64_t>* looked) const {
  const std::span<const std::byte> image = this->image();
  const ImageView& view = impl_->view;
  if (image.empty() || view.IsShards()) return Relooked();
  const FileLooks looks(view, {});
  std::vector<FileSize> found(view.samples.size());
  const auto look = [&](size_t piece) -> Status {
    OwnedFd open;
    uint32_t folder = 0;
    const size_t end = std::min(found.size(), (piece + 1) * kAtOnce);
    for (size_t s = piece * kAtOnce; s < end; ++s) {
      const uint32_t in = view.objects[view.samples[s].object].folder;
      if (!open.valid() || in != folder) {
        folder = in;
        open = OwnedFd(::open(looks.FolderPath(in).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
      }
      Result<FileSize> size = looks.LookAt(static_cast<SampleId>(s), open.get());
      if (!size) return size.error();
      found[s] = *size;
      if (looked != nullptr) looked->fetch_add(1, std::memory_order_relaxed);
    }
    return Status();
  };
  const size_t pieces = (found.size() + kAtOnce - 1) / kAtOnce;
  FOREBAY_RETURN_IF_ERROR(ParallelFor(pieces, std::min(threads, pieces), look, tick));
  return Compare(found);
}

Result<Relooked> Catalog::LookTogether(LookSharing& looks, size_t threads,
                                       const std::function<bool()>& tick) const {
  const auto go_on = [&] { return !tick || tick(); };
  Result<std::optional<SeenFiles>> seen = looks.Ask(StrCat(root(), " ", ListHash()), go_on);
  if (!seen) return seen.error();
  if (*seen) {
    Result<Relooked> taken = TakeLook(**seen);
    if (taken) return taken;
  }
  std::atomic<uint64_t> looked = 0;
  const auto tell = [&] {
    looks.Progress(looked.load(std::memory_order_relaxed));
    return go_on();
  };
  Result<Relooked> found = LookAtFiles(threads, tell, &looked);
  if (!found) return found;
  const Catalog& now = found->catalog != nullptr ? *found->catalog : *this;
  if (const std::optional<SeenFiles> own = now.Seen(found->stamps)) looks.HandIn(*own);
  return found;
}

Result<Relooked> Catalog::TakeLook(const SeenFiles& seen) const {
  const bool loose = format() == Format::kFolder || format() == Format::kFileList;
  if (!loose || seen.list != ListHash() || seen.files.size() != size()) {
    return Status(Code::kChanged, StrCat("another process looked at other files of ", root()));
  }
  std::vector<FileSize> found(seen.files.size());
  for (size_t s = 0; s < found.size(); ++s) {
    const SeenFile& file = seen.files[s];
    found[s] = {
        .length = file.length, .mtime_ns = file.mtime_ns, .change_stamp = file.change_stamp};
  }
  return Compare(found);
}

std::optional<SeenFiles> Catalog::Seen(const std::shared_ptr<std::vector<uint32_t>>& stamps) const {
  const bool loose = format() == Format::kFolder || format() == Format::kFileList;
  if (!loose || stamps == nullptr || !complete() || !has_object_times()) return std::nullopt;
  SeenFiles seen{.list = ListHash(), .files = std::vector<SeenFile>(size())};
  for (SampleId s = 0; s < seen.files.size(); ++s) {
    const ObjectId in = object(s);
    seen.files[s] = {
        .mtime_ns = ObjectTime(in), .length = length(s), .change_stamp = (*stamps)[in]};
  }
  return seen;
}

uint64_t Catalog::ListHash() const {
  if (impl_->growing != nullptr) return 0;
  (void)WaitComplete();
  const ImageView& view = impl_->view;
  uint64_t hash = SplitMix64(view.header->format).Next();
  const auto add = [&hash](uint64_t number) { hash = SplitMix64(hash ^ number).Next(); };
  for (const SectionRecord& section : view.SectionTable()) {
    const auto id = static_cast<SectionId>(section.id);
    add(section.bytes);
    // These have sizes and times in them.
    if (id == SectionId::kTimes || id == SectionId::kObjects || id == SectionId::kSamples) continue;
    add(section.crc);
  }
  for (const ObjectRecord& object : view.objects) add(object.folder);
  for (const SampleRecord& sample : view.samples) {
    add(uint64_t{sample.object} << 32 | static_cast<uint32_t>(sample.label));
  }
  // Of folders: another one may have been there for a moment. A list's root has that of its files.
  for (size_t f = format() == Format::kFileList ? 1 : 0; f < view.folders.size(); ++f) {
    add(static_cast<uint64_t>(view.times[f]));
  }
  return hash;
}

Result<Relooked> Catalog::Compare(std::span<const FileSize> found) const {
  const std::span<const std::byte> image = this->image();
  const ImageView& view = impl_->view;
  Relooked out;
  out.stamps = std::make_shared<std::vector<uint32_t>>(view.objects.size());
  std::vector<std::byte> changed;
  for (SampleId s = 0; s < found.size(); ++s) {
    const ObjectId object = view.samples[s].object;
    (*out.stamps)[object] = found[s].change_stamp;
    const uint32_t before = ChangeStamp(object);
    if (found[s].length == view.samples[s].length && found[s].mtime_ns == ObjectTime(object)) {
      out.restamped += MayDiffer(before, found[s].change_stamp) ? 1 : 0;
      continue;
    }
    if (out.changed++ == 0) {
      out.first = ObjectPath(object);
      changed.assign(image.begin(), image.end());
    }
    FileRecords(changed, view).Set(s, found[s]);
  }
  if (out.changed == 0 && out.restamped == 0) return out;
  if (out.changed == 0) {
    changed.assign(image.begin(), image.end());
  } else {
    FileRecords(changed, view).Finish();
    SealImage(changed);
  }
  Result<std::unique_ptr<Catalog>> made = FromImage(std::move(changed));
  if (!made) return made.error();
  out.catalog = *std::move(made);
  out.catalog->impl_->stamps = out.stamps;
  return out;
}

}  // namespace forebay
