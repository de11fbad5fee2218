#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <map>
#include <utility>

#include "base/owned.h"
#include "catalog/byte_reader.h"
#include "catalog/catalog.h"
#include "catalog/early_sink.h"
#include "catalog/image.h"
#include "catalog/index_file.h"
#include "catalog/lister.h"
#include "catalog/look.h"
#include "catalog/parallel.h"
#include "catalog/paths.h"
#include "catalog/shard.h"

namespace forebay {
namespace {

constexpr size_t kMaxThreads = 1024;
// Small reads in flight where an index tells what to read; each costs a latency and little else.
constexpr size_t kHintThreads = 256;

Result<Format> FormatNamed(const std::string& name) {
  if (name == "folder") return Format::kFolder;
  if (name == "webdataset") return Format::kWebDataset;
  if (name == "tfrecord") return Format::kTfRecord;
  return Status(Code::kInvalidArgument, StrCat("unknown data format '", name,
                                               "'; use 'folder', 'webdataset' or 'tfrecord'"));
}

bool IsShardName(Format format, std::string_view name) {
  return format == Format::kWebDataset ? IsTarName(name) : IsTfRecordName(name);
}

Result<Format> FormatOfFile(const std::string& path) {
  const std::string_view name = BaseName(path);
  if (IsTarName(name)) return Format::kWebDataset;
  if (IsTfRecordName(name)) return Format::kTfRecord;
  return Status(Code::kInvalidArgument,
                StrCat(path,
                       ": one file, but its name says neither .tar nor .tfrecord; give the "
                       "format ('webdataset' or 'tfrecord'), or the folder it lies in"));
}

Result<Format> FormatOfFolder(const std::string& path, const FolderListing& listing) {
  const auto& files = listing.files;
  const bool tar = std::any_of(files.begin(), files.end(), IsTarName);
  const bool tfrecord = std::any_of(files.begin(), files.end(), IsTfRecordName);
  if (!tar && !tfrecord) return Format::kFolder;
  const bool folders = std::any_of(listing.folders.begin(), listing.folders.end(),
                                   [](const std::string& name) { return name.front() != '.'; });
  // Half-unpacked archives look like this; a wrong guess would train on the wrong data.
  if (folders || (tar && tfrecord)) {
    return Status(Code::kInvalidArgument,
                  StrCat(path, " holds ", tar ? ".tar" : "TFRecord", " files beside ",
                         folders ? "sub-folders" : "TFRecord files",
                         "; say which are the data set: format 'folder', 'webdataset' or "
                         "'tfrecord'"));
  }
  return tar ? Format::kWebDataset : Format::kTfRecord;
}

std::string Wanted(const std::vector<std::string>& extensions) {
  if (extensions.empty()) return "any file";
  std::string out = "files ending in ";
  for (size_t i = 0; i < extensions.size(); ++i) {
    out.append(i == 0 ? "" : ", ").append(extensions[i]);
  }
  return out;
}

Result<std::unique_ptr<Catalog>> BuildFolder(const std::string& root, FolderListing top,
                                             const BuildOptions& options, BuildWatch& watch) {
  const size_t classes = top.folders.size();
  const size_t top_files = top.files.size();
  auto listed = WalkFolders(root, std::move(top), options, watch);
  if (!listed) return listed.error();
  CatalogWriter writer(Format::kFolder, root, listed->front()->identity.mtime_ns);
  std::map<const ListedFolder*, uint32_t> ids = {{listed->front().get(), 0}};
  std::vector<OwnedFd> open;  // by folder
  for (std::unique_ptr<ListedFolder>& folder : *listed) {
    uint32_t id = CatalogWriter::kRootFolder;
    if (folder->parent != nullptr) {
      id = writer.AddFolder(ids.at(folder->parent), BaseName(folder->path),
                            folder->identity.mtime_ns);
      ids[folder.get()] = id;
      if (folder->parent->parent == nullptr) writer.AddClass(id);
    }
    open.resize(id + 1);
    open[id] = std::move(folder->fd);
    uint64_t begin = 0;
    for (size_t i = 0; i < folder->sizes.size(); ++i) {
      const std::string_view names = folder->names;
      writer.AddFile(id, names.substr(begin, folder->name_ends[i] - begin), folder->sizes[i],
                     folder->times[i], folder->label, folder->stamps[i]);
      begin = folder->name_ends[i];
    }
    folder->names = std::string();
    folder->name_ends = std::vector<uint64_t>();
  }
  if (writer.samples() == 0) {
    std::string where = classes == 0 ? "" : StrCat(" in its ", classes, " sub-folders");
    std::string hint;
    if (classes != 0 && top_files != 0) {
      hint = StrCat("; the ", top_files, " files beside the sub-folders are not part of a class");
    }
    return Status(Code::kNotFound, StrCat(root, " holds no sample: looked for ",
                                          Wanted(options.extensions), where, hint));
  }
  if (options.sizes_later) {
    return std::move(writer).FinishUnsized(options.threads, [&](const ImageView& view) {
      auto looks = std::make_shared<const FileLooks>(view, std::move(open));
      return [looks](SampleId sample) { return looks->LookAt(sample); };
    });
  }
  return std::move(writer).Finish();
}

struct Shard {
  std::string name;
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  ShardIndex index;
};

Result<std::unique_ptr<Catalog>> BuildShards(const std::string& root, int64_t root_mtime_ns,
                                             std::vector<std::string> names, Format format,
                                             bool single, bool indexed, const BuildOptions& options,
                                             BuildWatch& watch) {
  const std::string_view kind = format == Format::kWebDataset ? "tar" : "TFRecord";
  if (names.empty()) {
    return Status(Code::kNotFound,
                  StrCat(root, " holds no sample: looked for ", kind, " files (",
                         format == Format::kWebDataset
                             ? "*.tar"
                             : "*.tfrecord, *.tfrecords, *.tfrecord-*, *-NNNNN-of-NNNNN",
                         ")"));
  }
  std::vector<Shard> shards(names.size());
  watch.objects_total = names.size();
  ScanPlan plan(names.size(), options.early);
  std::atomic<bool> stopped = false;
  const OnSample on_sample = [&] {
    ++watch.samples;
    return !stopped.load(std::memory_order_relaxed);
  };
  const auto scan = [&](size_t i) -> Status {
    Result<FileReader> reader = FileReader::Open(JoinPath(root, names[i]));
    if (!reader) return reader.error();
    ScanContext context = {.plan = &plan, .shard = static_cast<uint32_t>(i)};
    if (indexed) {
      context.hints = IndexedPayloadEnds(reader->name(), format);
      context.hint_threads = std::max<size_t>(1, kHintThreads / names.size());
    }
    Result<ShardIndex> index = format == Format::kWebDataset
                                   ? ScanTar(*reader, on_sample, context)
                                   : ScanTfRecord(*reader, on_sample, context);
    // What a shard that is being rewritten looks like says nothing, an error in it neither.
    const Status unchanged = reader->CheckUnchanged();
    if (!index || !unchanged.ok()) {
      stopped.store(true, std::memory_order_relaxed);
      return unchanged.ok() ? index.error() : unchanged;
    }
    shards[i] = {names[i], reader->size(), reader->mtime_ns(), std::move(*index)};
    ++watch.objects_done;
    return Status();
  };
  const auto tick = [&, base = watch.Tick()] {
    if (base()) return true;
    stopped.store(true, std::memory_order_relaxed);
    return false;
  };
  FOREBAY_RETURN_IF_ERROR(ParallelFor(shards.size(), options.threads, scan, tick));
  CatalogWriter writer(format, root, root_mtime_ns);
  if (single) writer.set_single_shard();
  std::vector<SampleId> first_of_shard;
  for (Shard& shard : shards) {
    first_of_shard.push_back(static_cast<SampleId>(writer.samples()));
    writer.AddShard(shard.name, shard.size, shard.mtime_ns, shard.index);
    shard.index = ShardIndex();
  }
  if (writer.samples() == 0) {
    return Status(
        Code::kNotFound,
        StrCat(single ? JoinPath(root, names[0]) : root, " holds no sample: looked for ",
               format == Format::kWebDataset ? "tar members named KEY.FIELD" : "TFRecord records",
               " in ", names.size(), " ", kind, " file(s)"));
  }
  if (options.early != nullptr) options.early->Number(first_of_shard);
  return std::move(writer).Finish();
}

// The deepest folder that all of the absolute `paths` lie in.
std::string CommonFolder(std::span<const std::string> paths) {
  std::string_view common = DirName(paths.front());
  for (const std::string& path : paths) {
    const auto inside = [&] {
      return path.starts_with(common) &&
             (common.size() == 1 || (path.size() > common.size() && path[common.size()] == '/'));
    };
    while (!inside()) common = DirName(common);
  }
  return std::string(common);
}

}  // namespace

Status BuildOptions::Validate() const {
  if (!format.empty()) {
    Result<Format> named = FormatNamed(format);
    if (!named) return named.error();
  }
  if (threads == 0 || threads > kMaxThreads) {
    return Status(Code::kInvalidArgument,
                  StrCat("threads is ", threads, ", it must be 1 to ", kMaxThreads));
  }
  for (const std::string& extension : extensions) {
    if (extension.empty()) return Status(Code::kInvalidArgument, "an extension is empty");
  }
  return Status();
}

Result<std::unique_ptr<Catalog>> BuildCatalog(const std::string& path,
                                              const BuildOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<std::string> root = AbsolutePath(path);
  if (!root) return root.error();
  struct stat st;
  if (::stat(root->c_str(), &st) != 0) return PathError(errno, *root);
  BuildWatch watch(options);
  if (S_ISREG(st.st_mode)) {
    Result<Format> format =
        options.format.empty() ? FormatOfFile(*root) : FormatNamed(options.format);
    if (!format) return format.error();
    if (*format == Format::kFolder) {
      return Status(Code::kInvalidArgument,
                    StrCat(*root, " is a file, format 'folder' needs a folder"));
    }
    return BuildShards(std::string(DirName(*root)), 0, {std::string(BaseName(*root))}, *format,
                       true, true, options, watch);
  }
  if (!S_ISDIR(st.st_mode)) {
    return Status(Code::kInvalidArgument, StrCat(*root, " is neither a folder nor a file"));
  }
  Result<FolderListing> listing = ListFolder(*root, options.threads, watch.Tick());
  if (!listing) return listing.error();
  Result<Format> format =
      options.format.empty() ? FormatOfFolder(*root, *listing) : FormatNamed(options.format);
  if (!format) return format.error();
  if (*format == Format::kFolder) return BuildFolder(*root, std::move(*listing), options, watch);
  const bool indexed = std::any_of(listing->files.begin(), listing->files.end(),
                                   [](const std::string& name) { return name.ends_with(".idx"); });
  std::erase_if(listing->files, [&](const std::string& n) { return !IsShardName(*format, n); });
  return BuildShards(*root, listing->identity.mtime_ns, std::move(listing->files), *format, false,
                     indexed, options, watch);
}

Result<std::unique_ptr<Catalog>> BuildFileList(std::span<const std::string> paths,
                                               const BuildOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  if (paths.empty()) return Status(Code::kInvalidArgument, "the list of files is empty");
  std::vector<std::string> files;
  files.reserve(paths.size());
  for (const std::string& path : paths) {
    Result<std::string> file = AbsolutePath(path);
    if (!file) return file.error();
    files.push_back(std::move(*file));
  }
  BuildWatch watch(options);
  watch.objects_total = files.size();
  std::vector<uint32_t> sizes(files.size());
  std::vector<int64_t> times(files.size());
  std::vector<uint32_t> stamps(files.size());
  const auto stat_one = [&](size_t i) -> Status {
    struct stat st;
    if (::stat(files[i].c_str(), &st) != 0) return PathError(errno, files[i]);
    if (!S_ISREG(st.st_mode)) {
      return Status(Code::kInvalidArgument, StrCat(files[i], " is not a regular file"));
    }
    const auto size = static_cast<uint64_t>(st.st_size);
    if (size > std::numeric_limits<uint32_t>::max()) return SampleTooLarge(files[i], size);
    sizes[i] = static_cast<uint32_t>(size);
    times[i] = MtimeNs(st);
    stamps[i] = StampOfLook(MtimeNs(st), CtimeNs(st));
    ++watch.objects_done;
    ++watch.samples;
    return Status();
  };
  FOREBAY_RETURN_IF_ERROR(ParallelFor(files.size(), options.threads, stat_one, watch.Tick()));

  const std::string root = CommonFolder(files);
  CatalogWriter writer(Format::kFileList, root, TimeOfAll(times));
  std::map<std::string, uint32_t, std::less<>> folders = {{root, CatalogWriter::kRootFolder}};
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string_view folder = DirName(files[i]);
    auto it = folders.find(folder);
    if (it == folders.end()) {
      const std::string_view below = folder.substr(root.size() == 1 ? 1 : root.size() + 1);
      const uint32_t id = writer.AddFolder(CatalogWriter::kRootFolder, below, 0);
      it = folders.emplace(folder, id).first;
    }
    writer.AddFile(it->second, BaseName(files[i]), sizes[i], times[i], -1, stamps[i]);
  }
  return std::move(writer).Finish();
}

}  // namespace forebay
