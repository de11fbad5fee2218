#include "files/current.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "files/identity.h"

namespace forebay::files {
namespace {

bool SameTime(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

}  // namespace

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_size == b.st_size && SameTime(a.st_mtim, b.st_mtim) && SameTime(a.st_ctim, b.st_ctim);
}

int OpenCurrentCopy(const Client& client, const char* path, int flags, Client::Found* found) {
  const int fd = client.OpenCopy(path, flags, found);
  if (fd < 0) return -1;
  Identity identity;
  struct stat now = {};
  const bool known = ReadIdentity(fd, &identity) == 0;
  const bool there = stat(path, &now) == 0;
  if (known && there && SameFile(identity.stat, now)) return fd;
  close(fd);
  *found = Client::Found::kSource;
  if (there) client.FileChanged(path);
  return -1;
}

bool IsCurrentPart(const Client& client, const char* path, int source) {
  char name[Client::kMostCopyPath];
  Identity identity;
  struct stat now = {};
  if (fstat(source, &now) != 0 || !client.PartPath(path, name, sizeof name)) return false;
  int unknown = ReadIdentityAt(name, &identity);
  // Complete by now.
  if (unknown == ENOENT && client.CopyPath(path, name, sizeof name)) {
    unknown = ReadIdentityAt(name, &identity);
  }
  if (unknown != 0) return false;
  if (SameFile(identity.stat, now)) return true;
  client.FileChanged(path);
  return false;
}

}  // namespace forebay::files
