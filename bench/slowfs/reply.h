// Answers to requests of the kernel.
#pragma once

#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 12)
#include <fuse_lowlevel.h>
#include <sys/statvfs.h>

#include <cstddef>
#include <memory>
#include <string>
#include <variant>

#include "base/owned.h"
#include "slowfs/inode_table.h"

namespace forebay::slowfs {

struct ErrorReply {
  int error;  // 0: success, and nothing more to say
};
struct EntryReply {
  fuse_entry_param entry;
};
struct AttrReply {
  struct stat attr;
  double timeout_s;
};
struct OpenReply {
  fuse_file_info info;  // its fh becomes the number of `fd`
  OwnedFd fd;
};
struct CreateReply {
  fuse_entry_param entry;
  OpenReply open;
};
struct DataReply {
  std::unique_ptr<char[]> data;
  size_t size;
};
struct WriteReply {
  size_t size;
};
struct StatfsReply {
  struct statvfs info;
};
struct LinkReply {
  std::string target;
};
struct AttributeSizeReply {
  size_t size;
};

struct Reply {
  fuse_req_t request;
  std::variant<ErrorReply, EntryReply, AttrReply, OpenReply, CreateReply, DataReply, WriteReply,
               StatfsReply, LinkReply, AttributeSizeReply>
      body;
};

// Answers the request. What the kernel does not take (the caller is gone) is released: descriptors
// are closed, lookups forgotten in `inodes`.
void Send(Reply& reply, InodeTable& inodes);

}  // namespace forebay::slowfs
