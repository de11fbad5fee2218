// Paths and times of files, as the catalog records them.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace forebay {

// Absolute, without "//", "/./" and a trailing slash. Links and ".." stay as they are: resolving
// them would change the names that users and frameworks see.
Result<std::string> AbsolutePath(std::string_view path);

// Links resolved; the path itself where that cannot be, as where it has just vanished.
std::string RealPath(const std::string& path);

// The folder and the last component of an absolute path.
std::string_view DirName(std::string_view path);
std::string_view BaseName(std::string_view path);

// `folder` and `name` with one slash between; either may be empty.
std::string JoinPath(std::string_view folder, std::string_view name);

// Whether it leads to something below a folder by its letters alone: relative, not empty, and
// without empty parts, ".", ".." and NUL bytes. Links may still lead elsewhere.
bool IsPathBelow(std::string_view path);

int64_t MtimeNs(const struct stat& st);
int64_t CtimeNs(const struct stat& st);

// The error for a path that does not exist or cannot be reached, with the remedy.
Status PathError(int error, const std::string& path);

}  // namespace forebay
