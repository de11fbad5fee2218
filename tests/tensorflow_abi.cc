// Compared by the compiler: python/tensorflow/abi.h and the header of an installed TensorFlow.
// Compiled by tests/test_tensorflow.py, never linked.
#include "python/tensorflow/abi.h"
#include "tensorflow/c/experimental/filesystem/filesystem_interface.h"

#define SAME_PLACE(ours, our_field, theirs, their_field)                                    \
  static_assert(offsetof(forebay::tf::ours, our_field) == offsetof(::theirs, their_field)); \
  static_assert(sizeof(forebay::tf::ours::our_field) == sizeof(::theirs::their_field))
#define SAME_OP(ours, theirs, field) SAME_PLACE(ours, field, theirs, field)

static_assert(TF_FILESYSTEM_OPS_ABI == 0 && TF_RANDOM_ACCESS_FILE_OPS_ABI == 0 &&
              TF_WRITABLE_FILE_OPS_ABI == 0 && TF_READ_ONLY_MEMORY_REGION_OPS_ABI == 0);
static_assert(forebay::tf::kOk == int{TF_OK});
static_assert(forebay::tf::kInvalidArgument == int{TF_INVALID_ARGUMENT});
static_assert(forebay::tf::kFailedPrecondition == int{TF_FAILED_PRECONDITION});
static_assert(forebay::tf::kOutOfRange == int{TF_OUT_OF_RANGE});

static_assert(sizeof(forebay::tf::Object) == sizeof(TF_RandomAccessFile));
static_assert(sizeof(forebay::tf::Object) == sizeof(TF_ReadOnlyMemoryRegion));
static_assert(sizeof(forebay::tf::Object) == sizeof(TF_Filesystem));

static_assert(sizeof(forebay::tf::FileStatistics) == sizeof(TF_FileStatistics));
SAME_OP(FileStatistics, TF_FileStatistics, length);
SAME_OP(FileStatistics, TF_FileStatistics, mtime_nsec);
SAME_OP(FileStatistics, TF_FileStatistics, is_directory);

static_assert(sizeof(forebay::tf::RandomAccessFileOps) == sizeof(TF_RandomAccessFileOps));
SAME_OP(RandomAccessFileOps, TF_RandomAccessFileOps, cleanup);
SAME_OP(RandomAccessFileOps, TF_RandomAccessFileOps, read);
static_assert(sizeof(forebay::tf::MemoryRegionOps) == sizeof(TF_ReadOnlyMemoryRegionOps));
SAME_OP(MemoryRegionOps, TF_ReadOnlyMemoryRegionOps, cleanup);
SAME_OP(MemoryRegionOps, TF_ReadOnlyMemoryRegionOps, data);
SAME_OP(MemoryRegionOps, TF_ReadOnlyMemoryRegionOps, length);

// Ours ends where the next function of theirs begins.
static_assert(sizeof(forebay::tf::FilesystemOps) == offsetof(TF_FilesystemOps, get_matching_paths));
SAME_OP(FilesystemOps, TF_FilesystemOps, init);
SAME_OP(FilesystemOps, TF_FilesystemOps, cleanup);
SAME_OP(FilesystemOps, TF_FilesystemOps, new_random_access_file);
SAME_OP(FilesystemOps, TF_FilesystemOps, new_read_only_memory_region_from_file);
SAME_OP(FilesystemOps, TF_FilesystemOps, path_exists);
SAME_OP(FilesystemOps, TF_FilesystemOps, stat);
SAME_OP(FilesystemOps, TF_FilesystemOps, get_children);

static_assert(sizeof(forebay::tf::PluginOps) == sizeof(TF_FilesystemPluginOps));
SAME_OP(PluginOps, TF_FilesystemPluginOps, scheme);
SAME_PLACE(PluginOps, filesystem.abi, TF_FilesystemPluginOps, filesystem_ops_abi);
SAME_PLACE(PluginOps, filesystem.api, TF_FilesystemPluginOps, filesystem_ops_api);
SAME_PLACE(PluginOps, filesystem.size, TF_FilesystemPluginOps, filesystem_ops_size);
SAME_PLACE(PluginOps, filesystem.ops, TF_FilesystemPluginOps, filesystem_ops);
SAME_PLACE(PluginOps, random_access_file.abi, TF_FilesystemPluginOps, random_access_file_ops_abi);
SAME_PLACE(PluginOps, random_access_file.ops, TF_FilesystemPluginOps, random_access_file_ops);
SAME_PLACE(PluginOps, writable_file.abi, TF_FilesystemPluginOps, writable_file_ops_abi);
SAME_PLACE(PluginOps, writable_file.ops, TF_FilesystemPluginOps, writable_file_ops);
SAME_PLACE(PluginOps, memory_region.abi, TF_FilesystemPluginOps, read_only_memory_region_ops_abi);
SAME_PLACE(PluginOps, memory_region.ops, TF_FilesystemPluginOps, read_only_memory_region_ops);

static_assert(sizeof(forebay::tf::PluginInfo) == sizeof(TF_FilesystemPluginInfo));
SAME_OP(PluginInfo, TF_FilesystemPluginInfo, num_schemes);
SAME_OP(PluginInfo, TF_FilesystemPluginInfo, ops);
SAME_PLACE(PluginInfo, allocate, TF_FilesystemPluginInfo, plugin_memory_allocate);
SAME_PLACE(PluginInfo, free, TF_FilesystemPluginInfo, plugin_memory_free);
