#include "files/identity.h"

#include <sys/xattr.h>

#include <cerrno>

namespace forebay::files {
namespace {

int Check(ssize_t got, Identity* out) {
  if (got < 0) return errno;
  return CheckIdentity(static_cast<size_t>(got), out) ? 0 : ENODATA;
}

}  // namespace

bool CheckIdentity(size_t bytes, Identity* out) {
  if (bytes < offsetof(Identity, path) || out->version != Identity::kVersion ||
      out->path_length >= sizeof(out->path) || bytes != out->bytes()) {
    return false;
  }
  out->path[out->path_length] = 0;
  return true;
}

int ReadIdentity(int fd, Identity* out) {
  return Check(fgetxattr(fd, kIdentityName, out, sizeof(*out)), out);
}

int ReadIdentityAt(const char* copy, Identity* out) {
  return Check(getxattr(copy, kIdentityName, out, sizeof(*out)), out);
}

int WriteIdentity(int fd, const Identity& identity) {
  return fsetxattr(fd, kIdentityName, &identity, identity.bytes(), 0) == 0 ? 0 : errno;
}

}  // namespace forebay::files
