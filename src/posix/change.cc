#include "posix/change.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>

#include "files/raw_call.h"
#include "posix/memory.h"

namespace forebay::posix {
namespace {

bool IsFolder(int folder, const char* path, int flags) {
  struct stat stat {};
  return files::RawCall(SYS_newfstatat, folder, files::RawArgument(path), files::RawArgument(&stat),
                        flags) == 0 &&
         S_ISDIR(stat.st_mode);
}

}  // namespace

Change::Change(int folder, const char* path, What what) : what_(what) {
  const files::Client& client = TheClient();
  if (!client.on() || !PathReadable(path) || path[0] == 0) return;
  if ((what == What::kAttributes && IsFolder(folder, path, 0)) ||
      (what == What::kName && IsFolder(folder, path, AT_SYMLINK_NOFOLLOW))) {
    return;
  }
  if (MayBeInside(folder, path)) {
    std::string_view text(path);
    // A folder is named with a slash as well as without.
    while (text.size() > 1 && text.ends_with('/')) text.remove_suffix(1);
    if (text.size() < sizeof(real_room_)) {
      std::memcpy(real_room_, text.data(), text.size());
      real_room_[text.size()] = 0;
      named_ = Inside(folder, real_room_, named_room_);
      if (!named_.empty() && named_.data() != named_room_) {
        std::memcpy(named_room_, named_.data(), named_.size());
        named_ = {named_room_, named_.size()};
      }
    }
  }
  real_ = {real_room_,
           RealPath(folder, path, what == What::kFile || what == What::kAttributes, real_room_)};
  if (real_ == named_ || !Concerns(real_, what == What::kTree)) real_ = {};
  Tell();
}

Change::Change(int fd, What what) : what_(what) {
  if (!TheClient().on()) return;
  if (what == What::kAttributes && IsFolder(fd, "", AT_EMPTY_PATH)) return;
  real_ = {real_room_, PathOf(fd, real_room_)};
  if (!Concerns(real_, false)) real_ = {};
  Tell();
}

void Change::Tell() const {
  for (const std::string_view path : {named_, real_}) {
    if (path.empty()) continue;
    if (what_ == What::kTree) {
      TheClient().Changed(path);
    } else {
      TheClient().FileChanged(path, what_ != What::kNewLink);
    }
  }
}

void OpensToWrite(int folder, const char* path) {
  char room[kMostPath];
  if (!MayBeInside(folder, path)) return;
  const std::string_view normal = Inside(folder, path, room);
  if (!normal.empty()) TheClient().FileChanged(normal);
}

void OpenedToWrite(int fd) {
  char real[kMostPath];
  if (fd < 0 || !TheClient().on()) return;
  const size_t length = PathOf(fd, real);
  if (length > 0 && Concerns({real, length}, false)) TheClient().FileChanged({real, length});
}

}  // namespace forebay::posix
