// forebay:// for TensorFlow: files are opened from local copies, or the source.
//
// Listing and attributes are the source's. Nothing can be written: TensorFlow says so by itself
// where a table has no function. Safe for concurrent use by TensorFlow's threads; a file's state is
// constant after its opening.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "abi.h"
#include "files/client.h"
#include "files/current.h"
#include "files/key.h"

namespace forebay::tf {
namespace {

using files::Client;

// TensorFlow's own, found in the process: it is loaded with local symbols.
void (*set_status)(Status*, Code, const char*) = nullptr;
void (*set_io_error)(Status*, int, const char*) = nullptr;

// Off until forebay_tensorflow_start(): then the source itself is opened, which the preloaded
// library may still serve from copies.
constinit Client client;

void Ok(Status* status) { set_status(status, kOk, ""); }

int FindSymbols(dl_phdr_info* info, size_t /*size*/, void* /*data*/) {
  if (std::strstr(info->dlpi_name, "tensorflow") == nullptr) return 0;
  void* library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  void* set = dlsym(library, "TF_SetStatus");
  void* set_error = dlsym(library, "TF_SetStatusFromIOError");
  dlclose(library);  // TensorFlow itself is never unloaded
  if (set == nullptr || set_error == nullptr) return 0;
  std::memcpy(&set_status, &set, sizeof(set));
  std::memcpy(&set_io_error, &set_error, sizeof(set_error));
  return 1;
}

// ---- files

struct File {
  ~File() {
    if (fd >= 0) close(fd);
  }
  int fd = -1;
  std::string path;  // the normal form of a file that is being copied; else empty
  mutable Client::Seen seen;
};

// nullptr with errno.
std::unique_ptr<File> Open(const char* path) {
  auto file = std::make_unique<File>();
  char normal[4096];
  const size_t length = files::NormalPath({}, path, normal, sizeof(normal));
  if (length > 0 && client.on() && client.Covers({normal, length})) {
    Client::Found found = Client::Found::kSource;
    file->fd = files::OpenCurrentCopy(client, normal, O_CLOEXEC, &found);
    if (file->fd >= 0) return file;
    if (found == Client::Found::kPartial) file->path.assign(normal, length);
  }
  do {
    file->fd = open(path, O_RDONLY | O_CLOEXEC);
  } while (file->fd < 0 && errno == EINTR);
  struct stat st = {};
  if (file->fd < 0 || fstat(file->fd, &st) != 0) return nullptr;
  if (S_ISDIR(st.st_mode)) {
    errno = EISDIR;
    return nullptr;
  }
  return file;
}

void SetOpenError(Status* status, const char* path) {
  if (errno == EISDIR) {
    set_status(status, kFailedPrecondition, (std::string(path) + " is a folder").c_str());
  } else {
    set_io_error(status, errno, path);
  }
}

void NewRandomAccessFile(const Object*, const char* path, Object* out, Status* status) {
  std::unique_ptr<File> file = Open(path);
  if (file == nullptr) {
    SetOpenError(status, path);
    return;
  }
  out->own = file.release();
  Ok(status);
}

void CleanupFile(Object* object) { delete static_cast<File*>(object->own); }

int64_t Read(const Object* object, uint64_t offset, size_t n, char* buffer, Status* status) {
  const File& file = *static_cast<const File*>(object->own);
  size_t done = 0;
  while (done < n) {
    int64_t got = -EAGAIN;
    if (!file.path.empty()) {
      got = client.ReadPart(file.path, buffer + done, n - done, offset + done, &file.seen);
    }
    if (got <= 0) got = pread(file.fd, buffer + done, n - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      set_io_error(status, errno, "reading");
      return -1;
    }
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  set_status(status, done == n ? kOk : kOutOfRange, done == n ? "" : "the end of the file");
  return static_cast<int64_t>(done);
}

// ---- mapped files

struct Region {
  ~Region() { munmap(memory, bytes); }
  void* memory;
  size_t bytes;
};

void NewMemoryRegion(const Object*, const char* path, Object* out, Status* status) {
  const std::unique_ptr<File> file = Open(path);
  struct stat st = {};
  if (file == nullptr || fstat(file->fd, &st) != 0) {
    SetOpenError(status, path);
    return;
  }
  const auto bytes = static_cast<size_t>(st.st_size);
  if (bytes == 0) {
    set_status(status, kInvalidArgument, "an empty file cannot be mapped");
    return;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file->fd, 0);
  if (memory == MAP_FAILED) {
    set_io_error(status, errno, path);
    return;
  }
  out->own = new Region{memory, bytes};
  Ok(status);
}

void CleanupRegion(Object* object) { delete static_cast<Region*>(object->own); }
const void* RegionData(const Object* object) {
  return static_cast<const Region*>(object->own)->memory;
}
uint64_t RegionLength(const Object* object) {
  return static_cast<const Region*>(object->own)->bytes;
}

// ---- names

void Init(Object*, Status* status) { Ok(status); }
void Cleanup(Object*) {}

void PathExists(const Object*, const char* path, Status* status) {
  if (access(path, F_OK) == 0) {
    Ok(status);
  } else {
    set_io_error(status, errno, path);
  }
}

void Stat(const Object*, const char* path, FileStatistics* out, Status* status) {
  struct stat st = {};
  if (stat(path, &st) != 0) {
    set_io_error(status, errno, path);
    return;
  }
  out->length = st.st_size;
  out->mtime_nsec = int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
  out->is_directory = S_ISDIR(st.st_mode);
  Ok(status);
}

void* Allocate(size_t size) { return std::calloc(1, size); }
void Free(void* memory) { std::free(memory); }

int GetChildren(const Object*, const char* path, char*** entries, Status* status) {
  DIR* folder = opendir(path);
  if (folder == nullptr) {
    set_io_error(status, errno, path);
    return -1;
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(folder)) {
    const std::string_view name(entry->d_name);
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int error = errno;
  closedir(folder);
  if (error != 0) {
    set_io_error(status, error, path);
    return -1;
  }
  *entries = static_cast<char**>(Allocate((names.size() + 1) * sizeof(char*)));
  for (size_t i = 0; i < names.size(); ++i) {
    (*entries)[i] = static_cast<char*>(Allocate(names[i].size() + 1));
    std::memcpy((*entries)[i], names[i].c_str(), names[i].size() + 1);
  }
  Ok(status);
  return static_cast<int>(names.size());
}

template <typename Ops>
Ops* Made(const Ops& ops) {
  return new (Allocate(sizeof(Ops))) Ops(ops);
}

}  // namespace
}  // namespace forebay::tf

extern "C" {

// Called by TensorFlow, which copies the tables. Without TensorFlow's functions it offers nothing.
__attribute__((visibility("default"))) void TF_InitPlugin(forebay::tf::PluginInfo* info) {
  using namespace forebay::tf;
  info->allocate = &Allocate;
  info->free = &Free;
  info->num_schemes = 0;
  info->ops = nullptr;
  dl_iterate_phdr(&FindSymbols, nullptr);
  if (set_status == nullptr || set_io_error == nullptr) return;

  FilesystemOps filesystem = {};
  filesystem.init = &Init;
  filesystem.cleanup = &Cleanup;
  filesystem.new_random_access_file = &NewRandomAccessFile;
  filesystem.new_read_only_memory_region_from_file = &NewMemoryRegion;
  filesystem.path_exists = &PathExists;
  filesystem.stat = &Stat;
  filesystem.get_children = &GetChildren;

  constexpr std::string_view kScheme = "forebay";
  auto* ops = static_cast<PluginOps*>(Allocate(sizeof(PluginOps)));
  ops->scheme = static_cast<char*>(Allocate(kScheme.size() + 1));
  std::memcpy(ops->scheme, kScheme.data(), kScheme.size());
  ops->filesystem = {0, 0, sizeof(FilesystemOps), Made(filesystem)};
  ops->random_access_file = {0, 0, sizeof(RandomAccessFileOps),
                             Made(RandomAccessFileOps{&CleanupFile, &Read})};
  ops->memory_region = {0, 0, sizeof(MemoryRegionOps),
                        Made(MemoryRegionOps{&CleanupRegion, &RegionData, &RegionLength})};
  info->num_schemes = 1;
  info->ops = ops;
}

// From now on files are opened through the file service that these name (files/message.h). Once,
// before TensorFlow opens a file. Not 0: it is off, and sources are read.
__attribute__((visibility("default"))) int forebay_tensorflow_start(const char* cache,
                                                                    const char* socket,
                                                                    const char* sources,
                                                                    const char* job) {
  return forebay::tf::client.Start(cache, socket, sources, job) ? 0 : -1;
}

}  // extern "C"
