// Where a path of the program leads: into a data folder, or not.
//
// One client for the process, started by the library's constructor. Until then, and after any
// trouble, everything is outside.
#pragma once

#include <cstddef>
#include <string_view>

#include "files/client.h"
#include "files/identity.h"

namespace forebay::posix {

constexpr size_t kMostPath = 4096;

void StartPlace();
const files::Client& TheClient();

// Cheap, and right when it says no. A path that cannot be read is outside.
bool MayBeInside(int folder, const char* path);
// The normal path of a file in a data folder, which may be `path` itself or lie in `room`; empty:
// outside, or only libc can tell.
std::string_view Inside(int folder, const char* path, char (&room)[kMostPath]);

// The working folder, or the root, is another one now.
void FolderChanged();
void RootChanged();

// What the system says of a descriptor; 0 when it has no path.
size_t PathOf(int fd, char (&out)[kMostPath]);
// The path without links of what `path` names; with `follow` also of its last part.
size_t RealPath(int folder, const char* path, bool follow, char (&out)[kMostPath]);
// Whether a change of this path, which has no links in it, is the service's business. `tree`: with
// all that lies below.
bool Concerns(std::string_view real, bool tree);

// A program is about to be started with these variables. One without ours tells of no changes.
// Whether this library is to be preloaded into it, and all of them can be read.
bool Starts(char* const* variables);
// Whether a copy, just opened for a normal path that ends with a 0, may be used: where programs run
// that tell of no changes, it is compared with the source.
bool IsCurrent(int fd, const char* path);

// Whether a descriptor is a copy's, and whose.
bool IdentityOf(int fd, files::Identity* out);
// The same when its mode is known to be a copy's.
bool IdentityOfCopy(int fd, files::Identity* out);
// A descriptor named by a path, as /dev/fd/3 or /proc/self/fd/3 do: when it is a copy's, the path
// of the source, which lies in `room`; else `path` itself.
const char* PathOfSource(int folder, const char* path, files::Identity* room);
// Of the copy that a normal path has right now. `follow`: the path may be an alias.
bool IdentityAt(std::string_view path, bool follow, files::Identity* out);

}  // namespace forebay::posix
