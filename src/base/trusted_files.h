// Files and folders whose content this user's programs will believe later, and files that anybody
// may have put there.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/owned.h"
#include "base/status.h"

namespace forebay {

// Makes `folder` with `mode`, and with `above` the folders above it that are missing; the umask
// takes its part. 0 or an errno value; that it is there already is no error.
int MakeFolders(const std::string& folder, mode_t mode, mode_t above);
// For this user alone; into those above it others can look.
inline int MakePrivateFolder(const std::string& folder) { return MakeFolders(folder, 0700, 0755); }

// Opens a folder that nobody but this user can have written to: one of this user, not writable by
// its group or by others. A link to one is followed when it is this user's or root's. A sticky
// folder above it, such as /tmp, does no harm. With `make` one that is missing is made
// (MakePrivateFolder). `what` names it in
// messages ("cache folder"). kPermissionDenied: it is not such a folder; the message has the
// remedy.
//
// `group`, a name or a number: its members are trusted as this user is. Then the folder is
// anybody's, has that group, and the group may write to it; one that is made has mode 2770. This
// user must be a member. Others may still not write.
Result<OwnedFd> OpenPrivateFolder(const std::string& path, std::string_view what, bool make,
                                  const std::string& group = "");

// Opens the file `name` below a private folder with `flags`, which lack O_TRUNC; what they create
// has mode 0600, and what they open for writing has it from then on. Follows no link, not on the
// way either, and waits for nobody at the other end of a FIFO. Not valid: errno tells. EPERM: what
// lies there is not a regular file, belongs to another user, or can be written by others.
OwnedFd OpenPrivateFile(int folder, const char* name, int flags);

// The same, below a folder that OpenPrivateFolder has opened: if its group may write to it, that
// group is trusted. Then what is created has that group and mode 0660, whatever the umask, and a
// file of that group is as good as one of this user.
OwnedFd OpenTrustedFile(int folder, const char* name, int flags);
// Makes the folder `name` below such a folder, with mode 0700, or 2770 and its group. 0 or an errno
// value; that it is there already is no error.
int MakeTrustedFolder(int folder, const char* name);
// The group that is trusted in such a folder.
std::optional<gid_t> TrustedGroup(int folder);

// A file with a secret in it, which only this user can read: no link, no other user's, nothing that
// its group or others may touch; otherwise kPermissionDenied. `what` names it in messages ("the
// secret"), `remedy` ends those that are about its owner or mode. Longer than `longest` bytes:
// kInvalidArgument. kNotFound: it is not there.
struct SecretText {
  OwnedFd file;
  std::string text;
};
Result<SecretText> ReadSecretFile(const std::string& path, std::string_view what,
                                  std::string_view remedy, size_t longest);

// Opens a file of a data set for reading, whoever's it is; links are followed. Does not wait for
// the other end of a FIFO. Not valid: errno tells. ESPIPE: there is no regular file; EISDIR: there
// is a folder.
OwnedFd OpenRegularFile(const char* path);

// Whether no other machine can change the file behind this one's back: its file system is one of
// those that are known to be on this machine alone.
bool OnLocalFileSystem(int fd);
// By the number that statfs gives.
bool IsLocalFileSystem(uint64_t magic);

// "user 1000, mode 0755".
std::string OwnerAndMode(const struct stat& st);

}  // namespace forebay
