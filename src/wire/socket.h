// Unix sockets between processes of one user.
#pragma once

#include <sys/types.h>
#include <sys/un.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/status.h"

namespace forebay::wire {

// Where this user's sockets lie: $XDG_RUNTIME_DIR/forebay, or /tmp/forebay-<uid> when that cannot
// be written to or is too long for a socket's path.
std::string RuntimeFolder();
// Makes the folder, or checks that nobody else can get into the one that is there.
Status PrivateFolder(const std::string& folder, bool* made);

// kInvalidArgument when the path is empty or longer than the kernel takes (107 bytes).
Result<sockaddr_un> SocketAddress(const std::string& path);

// The process at the other end; 0 where this one cannot see it. kPermissionDenied for another
// user's.
Result<pid_t> CheckPeer(int socket);

// Readable once the process has ended. Invalid where the kernel has no such descriptor; kNotFound
// when there is no such process.
Result<OwnedFd> WatchProcess(pid_t pid);

// Sends all of `bytes` and `descriptor` with them, without waiting.
Status SendDescriptor(int socket, std::span<const std::byte> bytes, int descriptor);
// Receives what has come, with the descriptor that came along, if any. 0: nothing is there yet.
Result<size_t> ReceiveDescriptor(int socket, std::span<std::byte> bytes, OwnedFd* descriptor);

}  // namespace forebay::wire
