#include "catalog/byte_reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/trusted_files.h"
#include "catalog/paths.h"

namespace forebay {

Result<FileReader> FileReader::Open(const std::string& path) {
  OwnedFd fd = OpenRegularFile(path.c_str());
  if (!fd.valid() && (errno == ESPIPE || errno == EISDIR)) {
    return Status(Code::kInvalidArgument, StrCat(path, ": not a regular file"));
  }
  if (!fd.valid()) return ErrnoStatus(errno, StrCat("open ", path));
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return ErrnoStatus(errno, StrCat("stat ", path));
  return FileReader(path, std::move(fd), static_cast<uint64_t>(st.st_size), MtimeNs(st));
}

Result<size_t> FileReader::ReadAt(uint64_t offset, std::span<std::byte> dest) {
  size_t done = 0;
  while (done < dest.size()) {
    const ssize_t n = ::pread(fd_.get(), dest.data() + done, dest.size() - done,
                              static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, StrCat("read ", path_, " at offset ", offset + done));
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

Status FileReader::CheckUnchanged() const {
  struct stat st;
  if (::fstat(fd_.get(), &st) != 0) return ErrnoStatus(errno, StrCat("stat ", path_));
  if (static_cast<uint64_t>(st.st_size) == size_ && MtimeNs(st) == mtime_ns_) return Status();
  return Status(Code::kChanged,
                StrCat(path_, ": was written to while it was indexed; try again when it is whole"));
}

Result<size_t> MemoryReader::ReadAt(uint64_t offset, std::span<std::byte> dest) {
  if (offset >= bytes_.size()) return size_t{0};
  const size_t n = std::min<uint64_t>(dest.size(), bytes_.size() - offset);
  if (n > 0) std::memcpy(dest.data(), bytes_.data() + offset, n);
  return n;
}

}  // namespace forebay
