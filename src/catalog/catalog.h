// Catalog: the immutable map from samples to extents, built once from data as it lies on storage.
//
// A sample is one contiguous span of one object (file). Named fields are sub-ranges of the span: a
// WebDataset sample's members lie next to each other in the tar, so one read brings them all.
// Catalogs are position-independent images, checksummed, and used memory-mapped. A Catalog is
// immutable and safe for concurrent use by multiple threads.
//
// A growing one is no image: it begins empty, files are appended as they are met, and nothing of it
// is saved. What it has never changes. A file that changed is appended once more.
//
// One that was built with BuildOptions::sizes_later knows its names and labels at once and its
// lengths later. Until it is complete() nothing that depends on them may be asked, with two
// exceptions: a single sample's length, extent and time, by who has learned from the Sizer that
// they are known; and total_bytes, max_length, fingerprint, image, Save and Verify, which wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "catalog/look_sharing.h"

namespace forebay {

class Sizer;

using SampleId = uint32_t;  // dense, 0 .. size-1
using ObjectId = uint32_t;

enum class Format : uint8_t {
  kFolder = 1,
  kWebDataset = 2,
  kTfRecord = 3,
  kFileList = 4,
  kGrowing = 5
};

struct Extent {
  ObjectId object = 0;
  uint64_t offset = 0;
  uint32_t length = 0;        // a sample is below 4 GiB
  bool whole_object = false;  // the extent is the entire file; its size is checked when it is read
  bool has_crc = false;       // the format stores a CRC-32C of the extent (TFRecord)
  uint32_t crc = 0;
};

struct FieldView {
  std::string_view name;  // "jpg", "cls", ...; "data" where a sample has one unnamed field
  uint32_t offset = 0;    // relative to the sample's span
  uint32_t length = 0;
};

// A file that is open.
struct HeldFile {
  std::shared_ptr<const OwnedFd> fd;  // null: nobody has it open
  bool readable = false;              // false: it is O_PATH, and is opened without a look-up
  bool just_opened = false;           // what is known of its attributes is not old
};

// A file for a growing catalog, as it is now.
struct NewFile {
  std::string_view path;  // absolute, below the root, without "." and ".."
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  // 0: one sample, the whole file, below 4 GiB. Else a sample for each so many bytes, the last one
  // shorter, which are read by themselves. An empty file is one sample in either case.
  uint32_t block = 0;
  uint64_t samples() const;
};

// The samples of one file: `first` and those that follow it.
struct Appended {
  SampleId first = 0;
  uint32_t count = 0;
};

// What one look at a file brings.
struct FileSize {
  uint32_t length = 0;
  int64_t mtime_ns = 0;
  uint32_t change_stamp = 0;  // see Catalog::ChangeStamp
};

// Stands for the time of a file's last change of any kind (ctime); never 0.
uint32_t StampOf(int64_t ctime_ns);
// The same, but even, as no other is, where the file seems to have been written a moment ago: it
// may be written again within the same tick of its storage's clock, which no later look could tell.
uint32_t StampOfLook(int64_t mtime_ns, int64_t ctime_ns);
inline bool WasYoung(uint32_t stamp) { return stamp != 0 && stamp % 2 == 0; }
// Whether a look that found `now` may be at other bytes than an earlier one that found `then`; 0:
// nobody had looked, or does.
inline bool MayDiffer(uint32_t then, uint32_t now) {
  return then != 0 && now != 0 && (then != now || WasYoung(then));
}

class Catalog;

// What a look at every file of a catalog has found.
struct Relooked {
  uint64_t changed = 0;  // files of another size or time
  std::string first;     // the path of one of them
  // Files that have another Catalog::ChangeStamp and nothing else, where somebody had looked
  // before: perhaps other bytes.
  uint64_t restamped = 0;
  // Of the files as they are now; null: nothing has changed.
  std::unique_ptr<Catalog> catalog;
  std::shared_ptr<std::vector<uint32_t>> stamps;  // Catalog::ChangeStamp, by object
};

class Catalog {
 public:
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  // Maps a saved catalog after checking version, bounds and checksums. Hostile files end in an
  // error, never in undefined behaviour.
  static Result<std::unique_ptr<Catalog>> Load(const std::string& file);
  // The same, but only a regular file of this user that nobody else may write to; another one is
  // kPermissionDenied. Others cannot read it from then on.
  static Result<std::unique_ptr<Catalog>> LoadOwn(const std::string& file);
  // The same from memory; takes over the bytes.
  static Result<std::unique_ptr<Catalog>> FromImage(std::vector<std::byte> image);

  // An empty one that grows; `root` is absolute. `name`: what the user calls the folder, the same
  // on nodes that have it at different paths; empty: its path.
  static std::unique_ptr<Catalog> Growing(const std::string& root, const std::string& name = "");
  // kGrowing only. Safe for concurrent use: readers of samples below size() take no lock. A path
  // may come again, with other samples.
  Result<Appended> Append(const NewFile& file);
  // The samples of the last file appended with this path, size, time and block; nothing: there is
  // none. kGrowing only.
  std::optional<Appended> Find(const NewFile& file) const;
  const std::string& given_name() const;        // kGrowing: that of Growing
  uint32_t ObjectBlock(ObjectId object) const;  // kGrowing: NewFile's
  // kGrowing: one with the same path, size, time and block was appended before it.
  bool IsRepeated(ObjectId object) const;
  // kGrowing: somebody has the file open, until as many CloseFile; whoever reads it meanwhile need
  // not open it. Safe for concurrent use by multiple threads.
  void OpenFile(ObjectId object, HeldFile file) const;
  void CloseFile(ObjectId object) const;
  HeldFile OpenedFile(ObjectId object) const;

  // Who may read a saved catalog: whom the process's umask allows, or only this user.
  enum class Access { kUmask, kOwner };
  // Crash-safe: written beside `file` and renamed. Creates the folders on the way. A kGrowing is
  // not saved: kUnimplemented.
  Status Save(const std::string& file, Access access = Access::kUmask) const;

  // Compares modification times of the folders (kFolder), or times and sizes of the shards and
  // which there are; kChanged names the first that differs. Stats run in parallel. A kFileList is
  // always fresh, though it covers its files' times: their sizes are checked when they are read.
  // Whether a saved one is, OpenFileList knows. A kGrowing is always fresh, too.
  Status CheckFresh() const;
  // Looks at every file of a kFolder or kFileList, by one statx each: CheckFresh does not see one
  // that was rewritten in place. To who looks again, `restamped` is a change, too. `tick` as
  // WorkStack::Drain takes it, or null. An error is that of a file that cannot be looked at, as one
  // that is gone. Other formats: nothing has changed. `looked`, if it is not null, counts files.
  Result<Relooked> LookAtFiles(size_t threads, const std::function<bool()>& tick,
                               std::atomic<uint64_t>* looked = nullptr) const;
  // The same by one look for all processes that ask for it now. `looks` is for this once.
  Result<Relooked> LookTogether(LookSharing& looks, size_t threads,
                                const std::function<bool()>& tick) const;
  // The same by another process's look. kChanged: that was at another list of files.
  Result<Relooked> TakeLook(const SeenFiles& seen) const;
  // For others to take: the files as this catalog knows them, with the stamps of a look at them.
  // Nothing where that makes no sense: it is not of loose files.
  std::optional<SeenFiles> Seen(const std::shared_ptr<std::vector<uint32_t>>& stamps) const;
  // Identifies which files there are, in which order and under which labels, as loose files are
  // listed, whatever their sizes and times. Once complete().
  uint64_t ListHash() const;
  // The same while it is used: a copy whose files are looked at when they are needed, by its
  // sizer(). It is saved when it is complete(), but only if something has changed. Null: it is not
  // of loose files.
  std::unique_ptr<Catalog> LookLater(size_t threads) const;
  // Of the object's last change of any kind, as a look of this process found it; 0: nobody has
  // looked. It differs by mount and node: it is neither saved nor told to anybody, and no part of
  // the version. Same size and modification time with another stamp: perhaps other bytes.
  uint32_t ChangeStamp(ObjectId object) const;
  // Sizes and times are of this process's own look. False: as they were saved.
  bool looked_at() const;
  void SetLookedAt(std::shared_ptr<std::vector<uint32_t>> stamps);
  // It is of loose files, and nobody has looked: what is read from them tells their change times.
  bool LacksStamps() const;
  // Two looks that found the same change times have the same; 0: nobody has looked. Once
  // complete().
  uint64_t StampsHash() const;
  // Of all objects; null: nobody has looked.
  const std::shared_ptr<std::vector<uint32_t>>& stamps() const;
  // Whether the shards, if it is of any, are those that it was built from: what was copied or is
  // held of them may be used without opening them. Shards that were added do not matter.
  Status CheckShards() const;
  // Checks every object's existence and size, every tar header and every TFRecord checksum.
  // `progress` counts samples and is called as in BuildOptions. The first few problems are listed
  // in the message, its code is the first one's. kGrowing: kUnimplemented.
  Status Verify(const std::function<bool(uint64_t done, uint64_t total)>& progress) const;

  // Whether all lengths are known.
  bool complete() const;
  // kUnavailable: not within `wait`. A length that could not be had is no error here: it stays 0,
  // the catalog is not saved, and reading the sample fails.
  Status WaitComplete(Nanos wait = kForever) const;
  static constexpr Nanos kForever = 1'000'000'000 * kSecond;
  // What learns the lengths; null where they were known from the start.
  Sizer* sizer() const;
  // Where it is saved once it is complete; before anybody waits or asks the sizer.
  void SaveWhenComplete(const std::string& file);
  // Why that did not happen; empty while nothing is wrong.
  std::string SaveNote() const;

  // False: an old kFileList, which has no modification times at all.
  bool knows_times() const;
  // Of its last modification when the catalog was made, in nanoseconds. An image of an older
  // version has that of the folder, or of the list, for each of its files.
  int64_t ObjectTime(ObjectId object) const;
  bool has_object_times() const;  // false: it is of such an older version

  Format format() const;
  const std::string& root() const;  // absolute
  size_t size() const;              // samples
  size_t object_count() const;
  uint64_t total_bytes() const;  // sum of extent lengths
  uint32_t max_length() const;
  // Identifies samples, names, sizes and labels; the same wherever the data set lies and whenever
  // it was written. Stored TFRecord checksums count, other contents of the files do not. Of a
  // kGrowing it is the root's, whatever it holds.
  uint64_t fingerprint() const;

  // Identifies the bytes of all samples as far as path, sizes and times tell. What one version has
  // in memory is not another's, nor that of a root that links lead elsewhere from.
  uint64_t version() const;

  Extent extent(SampleId sample) const;  // sample < size()
  uint32_t length(SampleId sample) const;
  ObjectId object(SampleId sample) const;  // that holds it
  // Class index (kFolder) or the integer in a "cls" member (kWebDataset); -1 where there is none.
  int64_t label(SampleId sample) const;
  // The path relative to root; "shard.tar/key"; "file@offset", also of a block.
  std::string SampleName(SampleId sample) const;
  std::string ObjectPath(ObjectId object) const;       // absolute
  std::string_view ObjectName(ObjectId object) const;  // in its folder
  uint32_t folder(ObjectId object) const;              // that it lies in; below folder_count()
  size_t folder_count() const;
  std::string FolderBelow(uint32_t folder) const;  // its path below the root; of the root empty
  uint64_t ObjectSize(ObjectId object) const;
  std::vector<FieldView> Fields(SampleId sample) const;
  std::vector<std::string> Classes() const;  // kFolder: class folders in ImageFolder's order
  std::span<const std::byte> image() const;  // kGrowing: empty

 private:
  friend class CatalogWriter;
  struct Impl;
  explicit Catalog(std::unique_ptr<Impl> impl);
  Status CheckTimes() const;
  // The catalog of files that are as `found`, by sample.
  Result<Relooked> Compare(std::span<const FileSize> found) const;
  // Mapped where the file system is local, else read: a file that another node replaces or cuts
  // off below a mapping ends the process that touches it (SIGBUS).
  static Result<std::unique_ptr<Catalog>> LoadFrom(OwnedFd fd, const std::string& file);
  // `look` brings the lengths and times of an image in memory; `saved`: it has earlier ones.
  static void LearnLater(Impl& impl, size_t threads, std::function<Result<FileSize>(SampleId)> look,
                         bool saved);
  std::unique_ptr<Impl> impl_;
};

class EarlySink;

struct BuildOptions {
  // Empty: decided from what lies at the path.
  std::string format;  // "folder", "webdataset", "tfrecord"
  // Folder: suffixes such as ".jpg", matched in any case; empty: every file.
  std::vector<std::string> extensions;
  size_t threads = 64;  // listing and stat calls in flight
  // Folder: return once the names are known, see Catalog. Only links, and entries whose type the
  // file system does not tell, are looked at before.
  bool sizes_later = false;
  // Of a saved catalog of loose files every file is looked at before it is used; with sizes_later
  // while it is used, see Catalog::LookLater. False: it is used
  // as it was saved, while no folder has changed: for who has no copies of earlier bytes, and reads
  // them all from where they are.
  bool look_at_files = true;
  // With both of them: which samples, of so many, somebody will need first, in that order. A few of
  // them are looked at while the folders of a saved catalog are compared with it. Called once, from
  // another thread, before the call that takes these options returns; null: nobody knows.
  std::function<std::vector<SampleId>(size_t samples)> first_needed;
  // Called from one thread at a time, at most ten times a second; false cancels (kCancelled).
  std::function<bool(uint64_t objects_done, uint64_t objects_total, uint64_t samples)> progress;
  // The way to other processes that open the same now: one of them looks at the files, for all.
  // Without sizes_later. Null: there are none. Borrowed.
  LookSharing* looks = nullptr;
  // Takes the samples of shards that are read whole on the way; null: nobody does. Borrowed.
  EarlySink* early = nullptr;
  Status Validate() const;
};

// Lists `path` (a folder of files; tar shards; TFRecord files; or one shard file).
Result<std::unique_ptr<Catalog>> BuildCatalog(const std::string& path, const BuildOptions& options);

// One sample for each path, in the order given. Files are statted in parallel.
Result<std::unique_ptr<Catalog>> BuildFileList(std::span<const std::string> paths,
                                               const BuildOptions& options);

// Where a catalog of `path` with these options is kept: $FOREBAY_CACHE_DIR, $XDG_CACHE_HOME/forebay
// or ~/.cache/forebay. Empty where the environment names none of them.
std::string DefaultCatalogFile(const std::string& path, const BuildOptions& options);

// Loads the saved catalog when it is fresh, else builds and saves it. `rebuilt` tells which. Files
// of another size or time than the saved one says are taken as they are now. A failing save is not
// an error. `note` says why a saved catalog was not used or the new one not saved. One that another
// user could have written is not used: it decides what is trained on. With sizes_later a new one is
// saved when it is complete.
struct OpenedCatalog {
  std::unique_ptr<Catalog> catalog;
  bool rebuilt = false;
  std::string note;
  std::string file = {};  // where it is saved; empty: it is not, or not yet
};
Result<OpenedCatalog> OpenOrBuild(const std::string& path, const BuildOptions& options);

// The saved catalog of the path, however old; null: there is none that may be trusted. Asks nothing
// of the data's storage.
std::unique_ptr<Catalog> LoadSaved(const std::string& path, const BuildOptions& options);

// The same for BuildFileList: the saved catalog of the same list when none of the folders that the
// files lie in has another modification time since. It has one file for each list, named by a hash
// of the list and one of these times; the first replaces the older ones of its list.
Result<OpenedCatalog> OpenFileList(std::span<const std::string> paths, const BuildOptions& options);

}  // namespace forebay
