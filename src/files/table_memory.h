// The memory of the file service's table (files/table.h): no disk can make it wait, and it goes
// with the last process that maps it.
#pragma once

#include <linux/futex.h>

#include <cstdint>

#include "base/owned.h"
#include "base/status.h"
#include "files/table.h"

namespace forebay::files {

class TableMemory {
 public:
  // `most`: slots of its last part, a power of two. The first part has its memory then: a machine
  // that has none says so here, and not by SIGBUS later.
  static Result<TableMemory> Make(uint64_t most);
  TableMemory(TableMemory&&) = default;
  TableMemory& operator=(TableMemory&&) = delete;
  ~TableMemory() = default;

  FileTable& table() { return table_; }
  int fd() const { return fd_.get(); }
  size_t bytes() const { return bytes_; }  // to be mapped, of which parts have memory
  // One more part; false when it has all, or there is no memory.
  bool Grow();

 private:
  TableMemory() = default;

  OwnedFd fd_;
  size_t bytes_ = 0;
  Mapping mapping_;
  FileTable table_;
};

// While it lives, the thread that made it holds the table: if that thread ends, or is killed with
// its process, the kernel says so in FileTableHeader::owner, where all clients see it (it is a
// robust futex, of which nobody waits).
class TableHold {
 public:
  static Status Check();  // that the kernel does this
  explicit TableHold(const FileTable& table);
  TableHold(const TableHold&) = delete;
  TableHold& operator=(const TableHold&) = delete;
  ~TableHold();

 private:
  robust_list_head head_ = {};
  robust_list node_ = {};
  robust_list_head* before_ = nullptr;  // libc's
};

}  // namespace forebay::files
