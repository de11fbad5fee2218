// Files and folders whose content this user's programs will believe later, and files that anybody
// may have put there.
#pragma once

#include <sys/stat.h>

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
Result<OwnedFd> OpenPrivateFolder(const std::string& path, std::string_view what, bool make);

// Opens the file `name` below a private folder with `flags`, which lack O_TRUNC; what they create
// has mode 0600, and what they open for writing has it from then on. Follows no link, not on the
// way either, and waits for nobody at the other end of a FIFO. Not valid: errno tells. EPERM: what
// lies there is not a regular file, belongs to another user, or can be written by others.
OwnedFd OpenPrivateFile(int folder, const char* name, int flags);

// Opens a file of a data set for reading, whoever's it is; links are followed. Does not wait for
// the other end of a FIFO. Not valid: errno tells. ESPIPE: there is no regular file; EISDIR: there
// is a folder.
OwnedFd OpenRegularFile(const char* path);

// "user 1000, mode 0755".
std::string OwnerAndMode(const struct stat& st);

}  // namespace forebay
