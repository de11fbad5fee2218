// Opening copies in programs that nobody watches: no preloaded library tells the service what they
// change.
#pragma once

#include <sys/stat.h>

#include "files/client.h"

namespace forebay::files {

// As Client::OpenCopy, for a normal path that ends with a 0, but only while the source is what it
// was when it was copied: each call asks for its attributes. The service is told of one that has
// changed, and the source is to be opened; likewise where it cannot be asked.
int OpenCurrentCopy(const Client& client, const char* path, int flags, Client::Found* found);

// Whether what is there of a file that is being copied, or its copy, is of the file that `source`
// is open of; otherwise the service is told of the change.
bool IsCurrentPart(const Client& client, const char* path, int source);

// Whether nothing was written in between: sizes and times agree. Not the number: file systems in
// user space may give another one each time.
bool SameFile(const struct stat& a, const struct stat& b);

}  // namespace forebay::files
