#include "files/identity.h"

#include <sys/xattr.h>

#include <cerrno>

namespace forebay::files {
namespace {

int Check(ssize_t got, Identity* out) {
  if (got < 0) return errno;
  constexpr auto kHead = static_cast<ssize_t>(offsetof(Identity, path));
  if (got < kHead || out->version != Identity::kVersion || out->path_length >= sizeof(out->path) ||
      got != kHead + static_cast<ssize_t>(out->path_length)) {
    return ENODATA;
  }
  out->path[out->path_length] = 0;
  return 0;
}

}  // namespace

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
