// What TensorFlow 2's C interface for file systems looks like in memory, as far as the plugin uses
// it, so that the plugin is built without TensorFlow. tests/tensorflow_abi.cc compares it with the
// header of the TensorFlow that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::tf {

struct Status;  // TF_Status

// TF_Code, those that are used.
enum Code : int { kOk = 0, kInvalidArgument = 3, kFailedPrecondition = 9, kOutOfRange = 11 };

// A pointer that is the plugin's, in each of TF_RandomAccessFile, TF_ReadOnlyMemoryRegion and
// TF_Filesystem.
struct Object {
  void* own;
};

// TF_FileStatistics
struct FileStatistics {
  int64_t length;
  int64_t mtime_nsec;
  bool is_directory;
};

using Unused = void (*)();

// TF_RandomAccessFileOps
struct RandomAccessFileOps {
  void (*cleanup)(Object* file);
  int64_t (*read)(const Object* file, uint64_t offset, size_t n, char* buffer, Status* status);
};

// TF_ReadOnlyMemoryRegionOps
struct MemoryRegionOps {
  void (*cleanup)(Object* region);
  const void* (*data)(const Object* region);
  uint64_t (*length)(const Object* region);
};

// TF_FilesystemOps up to get_children; the plugin tells TensorFlow how long its table is.
struct FilesystemOps {
  void (*init)(Object* filesystem, Status* status);
  void (*cleanup)(Object* filesystem);
  void (*new_random_access_file)(const Object* filesystem, const char* path, Object* file,
                                 Status* status);
  Unused new_writable_file;
  Unused new_appendable_file;
  void (*new_read_only_memory_region_from_file)(const Object* filesystem, const char* path,
                                                Object* region, Status* status);
  Unused create_dir;
  Unused recursively_create_dir;
  Unused delete_file;
  Unused delete_dir;
  Unused delete_recursively;
  Unused rename_file;
  Unused copy_file;
  void (*path_exists)(const Object* filesystem, const char* path, Status* status);
  Unused paths_exist;
  void (*stat)(const Object* filesystem, const char* path, FileStatistics* stats, Status* status);
  Unused is_directory;
  Unused get_file_size;
  Unused translate_name;
  int (*get_children)(const Object* filesystem, const char* path, char*** entries, Status* status);
};

// A table of the plugin with what it was made for.
template <typename Ops>
struct Table {
  int abi;
  int api;
  size_t size;
  Ops* ops;
};

// TF_FilesystemPluginOps
struct PluginOps {
  char* scheme;
  Table<FilesystemOps> filesystem;
  Table<RandomAccessFileOps> random_access_file;
  Table<void> writable_file;
  Table<MemoryRegionOps> memory_region;
};

// TF_FilesystemPluginInfo
struct PluginInfo {
  size_t num_schemes;
  PluginOps* ops;
  void* (*allocate)(size_t size);
  void (*free)(void* memory);
};

}  // namespace forebay::tf
