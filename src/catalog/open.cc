#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "base/trusted_files.h"
#include "catalog/catalog.h"
#include "catalog/lister.h"
#include "catalog/parallel.h"
#include "catalog/paths.h"
#include "catalog/sizer.h"

namespace forebay {
namespace {

// FNV-1a with a final mix. File names must not change between builds of Forebay.
class NameHash {
 public:
  void Add(std::string_view text) {
    for (char c : text) {
      hash_ ^= static_cast<uint8_t>(c);
      hash_ *= 0x100000001b3ULL;
    }
  }
  void Add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      const char byte = static_cast<char>(number >> shift);
      Add(std::string_view(&byte, 1));
    }
  }
  uint64_t value() const {
    uint64_t hash = hash_ ^ hash_ >> 32;
    hash *= 0xd6e8feb86659fd93ULL;
    return hash ^ (hash >> 32);
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

uint64_t Hash(std::string_view text) {
  NameHash hash;
  hash.Add(text);
  return hash.value();
}

std::string Hex(uint64_t value) {
  std::string out(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) out[i] = "0123456789abcdef"[value & 15];
  return out;
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Empty where the environment names none.
std::string CacheFolder() {
  if (std::string folder = Variable("FOREBAY_CACHE_DIR"); !folder.empty()) return folder;
  // The XDG specification says to ignore relative values.
  if (std::string xdg = Variable("XDG_CACHE_HOME"); !xdg.empty() && xdg.front() == '/') {
    return JoinPath(xdg, "forebay");
  }
  if (std::string home = Variable("HOME"); !home.empty()) return JoinPath(home, ".cache/forebay");
  return "";
}

// Not ok: somebody else could put files into the folder, or move those that are there. A sticky
// folder, such as /tmp, is none: there a file's owner tells who put it there.
Status CheckFolder(const std::string& folder) {
  struct stat st = {};
  if (::stat(folder.c_str(), &st) != 0) return Status();  // Load and Save tell
  const bool own = st.st_uid == ::geteuid();
  // The folder of our own name was made by Forebay, once for others to see. What others have put
  // into it is theirs, or theirs to write, and not loaded.
  if (own && Variable("FOREBAY_CACHE_DIR").empty()) {
    if ((st.st_mode & (S_IRWXG | S_IRWXO)) != 0) (void)::chmod(folder.c_str(), 0700);
    return Status();
  }
  const bool shared = (st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0;
  if ((own || st.st_uid == 0) && !shared) return Status();
  return Status(Code::kPermissionDenied,
                StrCat("others may write to ", folder, " (", OwnerAndMode(st),
                       "): no catalog is loaded from there or saved there; ",
                       own ? StrCat("chmod go-w ", folder, ", or ") : "",
                       "set FOREBAY_CACHE_DIR to a folder that only you can write to"));
}

// Two data sets whose names collide share a file.
bool IsOf(const Catalog& catalog, const std::string& path) {
  return catalog.root() == path || (catalog.object_count() == 1 && catalog.ObjectPath(0) == path);
}

// Looks at what a stream begins with, beside whatever else opening a catalog waits for. A first
// batch would otherwise wait for the one after the other.
class FirstLooks {
 public:
  // Null where nothing is looked at later. Borrows the options.
  static std::unique_ptr<FirstLooks> Begin(const Catalog& catalog, const std::string& file,
                                           const BuildOptions& options) {
    if (!options.look_at_files || !options.sizes_later) return nullptr;
    std::unique_ptr<Catalog> later = catalog.LookLater(options.threads);
    if (later == nullptr) return nullptr;
    later->SaveWhenComplete(file);
    return std::unique_ptr<FirstLooks>(new FirstLooks(std::move(later), options));
  }

  // What is looked at later, when all that was to be looked at first is under way.
  std::unique_ptr<Catalog> Take() {
    if (thread_.joinable()) thread_.join();
    return std::move(catalog_);
  }

 private:
  // A batch or a few: what is looked at for a catalog that proves to be old is looked at in vain.
  static constexpr size_t kFirst = 128;

  FirstLooks(std::unique_ptr<Catalog> catalog, const BuildOptions& options)
      : catalog_(std::move(catalog)) {
    if (!options.first_needed) return;
    // The order of a million samples takes some milliseconds.
    auto started = StartThread("forebay-size", [catalog = catalog_.get(), &options] {
      std::vector<SampleId> first = options.first_needed(catalog->size());
      first.resize(std::min(first.size(), kFirst));
      catalog->sizer()->Want(first);
    });
    if (started) thread_ = *std::move(started);  // without it they are looked at when needed
  }

  std::unique_ptr<Catalog> catalog_;
  std::jthread thread_;  // ends before the catalog, which it uses
};

// One look at the files for all processes that open them now.
class CommonLook {
 public:
  // Borrows the options.
  explicit CommonLook(const BuildOptions& options)
      : looks_(options.look_at_files && !options.sizes_later ? options.looks : nullptr),
        options_(options) {}

  // What is saved in `file`, as another process has just found it; null: this one is to look, with
  // options(). Only kCancelled is an error.
  Result<std::unique_ptr<Catalog>> Take(const std::string& file,
                                        const std::function<bool(const Catalog&)>& is_it) {
    if (looks_ == nullptr || file.empty()) return std::unique_ptr<Catalog>();
    BuildWatch watch(options_);
    Result<std::optional<SeenFiles>> seen = looks_->Ask(file, watch.Tick());
    if (!seen) return seen.error();
    if (!*seen) {
      asked_ = true;
      return std::unique_ptr<Catalog>();
    }
    // Who looked has compared the folders, too, and saved what it found: it is the same list.
    Result<std::unique_ptr<Catalog>> saved = Catalog::LoadOwn(file);
    if (!saved || !(*saved)->has_object_times() || !is_it(**saved)) {
      return std::unique_ptr<Catalog>();
    }
    Result<Relooked> looked = (*saved)->TakeLook(**seen);
    if (!looked) return std::unique_ptr<Catalog>();
    if (looked->catalog != nullptr) return std::move(looked->catalog);
    (*saved)->SetLookedAt(std::move(looked->stamps));
    return *std::move(saved);
  }

  // Those that were given, but that others see how far it is.
  BuildOptions options() const {
    BuildOptions out = options_;
    if (!asked_) return out;
    out.progress = [this](uint64_t done, uint64_t total, uint64_t samples) {
      looks_->Progress(done + total + samples);
      return !options_.progress || options_.progress(done, total, samples);
    };
    return out;
  }

  // It is saved, where it can be.
  void HandIn(const Catalog& catalog) {
    if (!asked_ || !catalog.looked_at()) return;
    if (const std::optional<SeenFiles> seen = catalog.Seen(catalog.stamps())) looks_->HandIn(*seen);
  }

 private:
  LookSharing* const looks_;
  const BuildOptions& options_;
  bool asked_ = false;  // and this process is to look
};

// Takes the files of a saved catalog as they are now. False: it is to be built again.
bool LookAgain(std::unique_ptr<Catalog>& catalog, const std::string& file,
               const BuildOptions& options, std::string& note) {
  BuildWatch watch(options);
  watch.objects_total = catalog->object_count();
  Result<Relooked> looked =
      catalog->LookAtFiles(options.threads, watch.Tick(), &watch.objects_done);
  if (!looked) return false;  // building names the file, or is cancelled likewise
  if (looked->catalog == nullptr) {
    catalog->SetLookedAt(std::move(looked->stamps));
    return true;
  }
  note = StrCat(
      looked->first,
      looked->changed == 1 ? std::string() : StrCat(" and ", looked->changed - 1, " more files"),
      " changed since the catalog was saved: taken as they are now");
  catalog = std::move(looked->catalog);
  const Status saved = catalog->Save(file, Catalog::Access::kOwner);
  if (!saved.ok()) {
    note =
        StrCat(note, "; the catalog is not saved, the next start looks again: ", saved.message());
  }
  return true;
}

// The saved catalog when it can be used; else nothing, with the reason in `note` where a person
// would want to know it.
std::unique_ptr<Catalog> LoadFresh(const std::string& file, const std::string& path,
                                   const BuildOptions& options, std::string& note) {
  Result<std::unique_ptr<Catalog>> saved = Catalog::LoadOwn(file);
  if (!saved) {
    if (saved.error().code() != Code::kNotFound) note = saved.error().message();
    return nullptr;
  }
  const Catalog& catalog = **saved;
  if (!IsOf(catalog, path)) return nullptr;
  if (!catalog.has_object_times()) {
    note = StrCat(file, " is of an older version: ", path, " is listed again");
    return nullptr;
  }
  const std::unique_ptr<FirstLooks> looks = FirstLooks::Begin(catalog, file, options);
  const Status fresh = catalog.CheckFresh();
  if (!fresh.ok()) {
    note = fresh.message();
    return nullptr;
  }
  if (looks != nullptr) return looks->Take();
  if (options.look_at_files && !LookAgain(*saved, file, options, note)) return nullptr;
  return std::move(*saved);
}

// A readable part of a file's name, for those who look into the folder.
std::string Label(std::string_view path) {
  std::string label(BaseName(path).substr(0, 48));
  for (char& c : label) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.';
    if (!plain) c = '_';
  }
  return label;
}

// Saves what was built, unless nobody may, and uses it as it was saved.
OpenedCatalog Keep(std::unique_ptr<Catalog> built, const std::string& file, const Status& trusted,
                   const std::string& name, std::string note) {
  OpenedCatalog out = {.catalog = std::move(built), .rebuilt = true, .note = std::move(note)};
  if (!trusted.ok()) return out;
  if (out.catalog->sizer() != nullptr && !file.empty()) {
    out.catalog->SaveWhenComplete(file);
    return out;
  }
  const Status saved =
      file.empty() ? Status(Code::kNotFound, "no cache folder; set FOREBAY_CACHE_DIR or HOME")
                   : out.catalog->Save(file, Catalog::Access::kOwner);
  if (!saved.ok()) {
    out.note = StrCat(out.note, out.note.empty() ? "" : "; ", "the catalog of ", name,
                      " is not saved, the next start lists it again: ", saved.message());
    return out;
  }
  out.file = file;
  // Mapped from the file it costs page cache, not this process's memory.
  Result<std::unique_ptr<Catalog>> mapped = Catalog::LoadOwn(file);
  if (mapped && (*mapped)->fingerprint() == out.catalog->fingerprint()) {
    (*mapped)->SetLookedAt(out.catalog->stamps());
    out.catalog = std::move(*mapped);
  }
  return out;
}

// Stands for the modification times of all folders that the files lie in.
Result<uint64_t> FolderTimes(std::span<const std::string> files, size_t threads) {
  std::vector<std::string_view> folders;
  for (const std::string& file : files) {
    const std::string_view folder = DirName(file);
    if (folders.empty() || folders.back() != folder) folders.push_back(folder);
  }
  std::sort(folders.begin(), folders.end());
  folders.erase(std::unique(folders.begin(), folders.end()), folders.end());
  std::vector<int64_t> times(folders.size());
  const auto stat_one = [&](size_t i) -> Status {
    const std::string folder(folders[i]);
    struct stat st = {};
    if (::stat(folder.c_str(), &st) != 0) return PathError(errno, folder);
    times[i] = MtimeNs(st);
    return Status();
  };
  FOREBAY_RETURN_IF_ERROR(
      ParallelFor(folders.size(), std::min(threads, folders.size()), stat_one, nullptr));
  NameHash hash;
  for (const int64_t time : times) hash.Add(static_cast<uint64_t>(time));
  return hash.value();
}

bool Lists(const Catalog& catalog, std::span<const std::string> files) {
  if (catalog.format() != Format::kFileList || catalog.size() != files.size()) return false;
  for (size_t i = 0; i < files.size(); ++i) {
    if (catalog.ObjectPath(catalog.object(static_cast<SampleId>(i))) != files[i]) return false;
  }
  return true;
}

// Removes the folder's files whose names begin so, but for one.
void RemoveOthers(const std::string& folder, std::string_view prefix, std::string_view keep) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), &::closedir);
  if (open == nullptr) return;
  std::vector<std::string> old;
  while (const dirent* entry = ::readdir(open.get())) {
    const std::string_view name = entry->d_name;
    if (name.starts_with(prefix) && name.ends_with(".catalog") && name != keep) {
      old.emplace_back(name);
    }
  }
  for (const std::string& name : old) (void)::unlink(JoinPath(folder, name).c_str());
}

}  // namespace

std::string DefaultCatalogFile(const std::string& path, const BuildOptions& options) {
  const std::string folder = CacheFolder();
  if (folder.empty()) return "";
  const Result<std::string> absolute = AbsolutePath(path);
  const std::string& full = absolute ? *absolute : path;
  std::string key = full;
  key.append(1, '\0').append(options.format);
  for (const std::string& extension : options.extensions) key.append(1, '\0').append(extension);
  return JoinPath(folder, StrCat(Label(full), "-", Hex(Hash(key)), ".catalog"));
}

Result<OpenedCatalog> OpenOrBuild(const std::string& path, const BuildOptions& given) {
  FOREBAY_RETURN_IF_ERROR(given.Validate());
  Result<std::string> absolute = AbsolutePath(path);
  if (!absolute) return absolute.error();
  const std::string file = DefaultCatalogFile(*absolute, given);
  OpenedCatalog out;
  const Status trusted = CheckFolder(std::string(DirName(file)));
  out.note = trusted.message();
  CommonLook common(given);
  if (!file.empty() && trusted.ok()) {
    Result<std::unique_ptr<Catalog>> taken =
        common.Take(file, [&](const Catalog& catalog) { return IsOf(catalog, *absolute); });
    if (!taken) return taken.error();
    out.catalog = *std::move(taken);
    out.file = file;
    if (out.catalog != nullptr) return out;
  }
  const BuildOptions options = common.options();
  if (!file.empty() && trusted.ok()) {
    out.catalog = LoadFresh(file, *absolute, options, out.note);
    if (out.catalog != nullptr) {
      common.HandIn(*out.catalog);
      return out;
    }
  }
  Result<std::unique_ptr<Catalog>> built = BuildCatalog(*absolute, options);
  if (!built) return built.error();
  out = Keep(*std::move(built), file, trusted, *absolute, std::move(out.note));
  if (!out.file.empty()) common.HandIn(*out.catalog);
  return out;
}

std::unique_ptr<Catalog> LoadSaved(const std::string& path, const BuildOptions& options) {
  const std::string file = DefaultCatalogFile(path, options);
  if (file.empty() || !CheckFolder(std::string(DirName(file))).ok()) return nullptr;
  Result<std::unique_ptr<Catalog>> saved = Catalog::LoadOwn(file);
  const bool usable = saved && IsOf(**saved, path) && (*saved)->has_object_times();
  return usable ? *std::move(saved) : nullptr;
}

Result<OpenedCatalog> OpenFileList(std::span<const std::string> paths, const BuildOptions& given) {
  FOREBAY_RETURN_IF_ERROR(given.Validate());
  if (paths.empty()) return Status(Code::kInvalidArgument, "the list of files is empty");
  std::vector<std::string> files;
  files.reserve(paths.size());
  NameHash list;
  for (const std::string& path : paths) {
    Result<std::string> file = AbsolutePath(path);
    if (!file) return file.error();
    list.Add(*file);
    list.Add(std::string_view("", 1));
    files.push_back(*std::move(file));
  }
  const std::string folder = CacheFolder();
  const Status trusted = CheckFolder(folder);
  OpenedCatalog out;
  out.note = trusted.message();
  // Looked at before the files are: what changes meanwhile shows the next time.
  const Result<uint64_t> times = FolderTimes(files, given.threads);
  const std::string prefix = StrCat(Label(DirName(files[0])), "-", Hex(list.value()), "-");
  const std::string name = StrCat(prefix, times ? Hex(*times) : "", ".catalog");
  const std::string file = folder.empty() || !times ? "" : JoinPath(folder, name);
  CommonLook common(given);
  if (!file.empty() && trusted.ok()) {
    Result<std::unique_ptr<Catalog>> taken =
        common.Take(file, [&](const Catalog& catalog) { return Lists(catalog, files); });
    if (!taken) return taken.error();
    out.catalog = *std::move(taken);
    out.file = file;
    if (out.catalog != nullptr) return out;
  }
  const BuildOptions options = common.options();
  if (!file.empty() && trusted.ok()) {
    Result<std::unique_ptr<Catalog>> saved = Catalog::LoadOwn(file);
    const bool known = saved && Lists(**saved, files);
    const std::unique_ptr<FirstLooks> looks =
        known ? FirstLooks::Begin(**saved, file, options) : nullptr;
    if (looks != nullptr) *saved = looks->Take();
    if (known && (looks != nullptr || !options.look_at_files ||
                  LookAgain(*saved, file, options, out.note))) {
      out.catalog = *std::move(saved);
      common.HandIn(*out.catalog);
      return out;
    }
    if (!saved && saved.error().code() != Code::kNotFound) out.note = saved.error().message();
  }
  Result<std::unique_ptr<Catalog>> built = BuildFileList(files, options);
  if (!built) return built.error();
  out = Keep(*std::move(built), file, trusted, StrCat(files.size(), " listed files"),
             std::move(out.note));
  if (out.file.empty()) return out;
  RemoveOthers(folder, prefix, name);
  common.HandIn(*out.catalog);
  return out;
}

}  // namespace forebay
