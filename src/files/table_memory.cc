#include "files/table_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace forebay::files {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// Reserves memory up to there; an errno.
int Reserve(int fd, size_t from, size_t to) {
  int failed = EINTR;
  while (failed == EINTR) {
    failed =
        fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(to - from)) == 0 ? 0 : errno;
  }
  return failed;
}

}  // namespace

Result<TableMemory> TableMemory::Make(uint64_t most) {
  const uint64_t first = std::min(most, FileTable::kFirstSlots);
  const size_t first_bytes = FileTable::BytesFor(first, most, 1);
  TableMemory out;
  out.bytes_ = FileTable::BytesFor(first, most);
  out.fd_ = OwnedFd(memfd_create("forebay-files", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  // Nobody who has the descriptor can take pages from under the others.
  if (!out.fd_.valid() || fcntl(out.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    return ErrnoStatus(errno, "making the memory of the table of files");
  }
  if (const int failed = Reserve(out.fd_.get(), 0, first_bytes); failed != 0) {
    return ErrnoStatus(failed, StrCat("the table of files gets no memory (", first_bytes / kMiB + 1,
                                      " MiB): free some, or raise the limit of this job's "
                                      "memory or file sizes"));
  }
  void* at = mmap(nullptr, out.bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, out.fd_.get(), 0);
  if (at == MAP_FAILED) return ErrnoStatus(errno, "mapping the table of files");
  out.mapping_ = Mapping(at, out.bytes_);
  out.table_ = FileTable::Make(at, first, most);
  return out;
}

bool TableMemory::Grow() {
  const size_t parts = table_.parts();
  if (parts == table_.most_parts()) return false;
  const auto* header = reinterpret_cast<const FileTableHeader*>(mapping_.data());
  const size_t from = FileTable::BytesFor(header->slots, header->most, parts);
  const size_t to = FileTable::BytesFor(header->slots, header->most, parts + 1);
  if (Reserve(fd_.get(), from, to) != 0) return false;
  table_.AddPart();
  return true;
}

Status TableHold::Check() {
  robust_list_head* head = nullptr;
  size_t size = 0;
  if (syscall(SYS_get_robust_list, 0, &head, &size) == 0 && size == sizeof *head) return Status();
  return Status(Code::kUnimplemented,
                "this kernel does not tell when a service has ended (robust futexes), which "
                "programs that read its copies must know");
}

TableHold::TableHold(const FileTable& table) {
  std::atomic<uint32_t>& owner = table.owner();
  owner.store(static_cast<uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
  node_.next = &head_.list;
  head_.list.next = &node_;
  head_.futex_offset = reinterpret_cast<char*>(&owner) - reinterpret_cast<char*>(&node_);
  size_t size = 0;
  (void)syscall(SYS_get_robust_list, 0, &before_, &size);
  (void)syscall(SYS_set_robust_list, &head_, sizeof head_);
}

TableHold::~TableHold() { (void)syscall(SYS_set_robust_list, before_, sizeof *before_); }

}  // namespace forebay::files
