#include "wire/socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace forebay::wire {

std::string RuntimeFolder() {
  constexpr size_t kLongestName = 30;  // "/forebay/1234567-89abcdef.sock"
  constexpr size_t kLongest = sizeof sockaddr_un::sun_path - 1 - kLongestName;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/' && std::strlen(runtime) <= kLongest &&
      access(runtime, W_OK | X_OK) == 0) {
    return StrCat(runtime, "/forebay");
  }
  return StrCat("/tmp/forebay-", geteuid());
}

Status PrivateFolder(const std::string& folder, bool* made) {
  *made = mkdir(folder.c_str(), 0700) == 0;
  if (!*made && errno != EEXIST) return ErrnoStatus(errno, StrCat("making the folder ", folder));
  struct stat st = {};
  if (lstat(folder.c_str(), &st) != 0) return ErrnoStatus(errno, folder);
  if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077) != 0) {
    return Status(Code::kPermissionDenied,
                  StrCat(folder, " must be a folder that only this user can enter (mode 0700)"));
  }
  return Status();
}

Result<sockaddr_un> SocketAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Status(Code::kInvalidArgument,
                  StrCat("a socket's path has 1 to ", sizeof address.sun_path - 1,
                         " bytes, this one ", path.size(), ": ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Result<pid_t> CheckPeer(int socket) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return ErrnoStatus(errno, "asking for a socket's peer");
  }
  if (peer.uid != geteuid()) {
    return Status(Code::kPermissionDenied, StrCat("the process at the other end belongs to user ",
                                                  peer.uid, ", this one to user ", geteuid()));
  }
  return peer.pid;
}

Result<OwnedFd> WatchProcess(pid_t pid) {
  if (pid <= 0) return OwnedFd();
  OwnedFd fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!fd.valid() && errno == ESRCH) {
    return Status(Code::kNotFound, StrCat("process ", pid, " has ended"));
  }
  return fd;
}

Status SendDescriptor(int socket, std::span<const std::byte> bytes, int descriptor) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
  iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return ErrnoStatus(errno, "sending the arena's descriptor");
  if (static_cast<size_t>(sent) != bytes.size()) {
    return Status(Code::kUnavailable, "the socket took only a part of the first reply");
  }
  return Status();
}

Result<size_t> ReceiveDescriptor(int socket, std::span<std::byte> bytes, OwnedFd* descriptor) {
  constexpr size_t kMost = 8;  // extra descriptors would be lost, and stay open
  alignas(cmsghdr) char control[CMSG_SPACE(kMost * sizeof(int))] = {};
  iovec part = {bytes.data(), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return size_t{0};
    return ErrnoStatus(errno, "receiving from the engine's process");
  }
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      *descriptor = OwnedFd(fd);
    }
  }
  if (got == 0) return Status(Code::kUnavailable, "the engine's process closed the connection");
  return static_cast<size_t>(got);
}

}  // namespace forebay::wire
