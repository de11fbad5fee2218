// What the book knows of a file. Only its own parts include this.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "files/book.h"

namespace forebay::files {

// Reads of a large file that followed each other.
struct Book::Run {
  uint64_t begin = 0;
  uint64_t end = 0;
  size_t ahead = 0;  // blocks before this one are copied before they are asked for
  Nanos at = 0;
  JobNumber job = 0;  // that was the last to read
};

// A file that is copied in blocks.
struct Book::Large {
  enum : uint8_t { kAbsent, kComing, kThere };
  struct Reader {
    uint64_t waiter;
    size_t first;
    size_t end;
  };
  uint64_t size = 0;
  JobNumber job = 0;  // that opened it
  CopyPlace place = CopyPlace::kNone;
  uint64_t reserved = 0;
  std::shared_ptr<SourceFile> source;
  std::shared_ptr<OwnedFd> part;
  std::shared_ptr<Ticket> ticket;
  std::vector<uint8_t> blocks;
  std::vector<uint32_t> crcs;
  size_t left = 0;
  size_t cursor = 0;                // where reading goes on when nobody asks
  bool whole = false;               // its reader is likely to want all of it
  bool grows = false;               // room is reserved block by block
  bool full = false;                // and there is no more
  bool mapped = false;              // by somebody who reads past the service
  uint64_t passed = 0;              // bytes that readers were sent to the source for
  uint32_t passed_in_row = 0;       // reads, since a block was last begun
  std::vector<uint32_t> passed_of;  // the same of each block
  std::vector<Run> runs;
  std::vector<Reader> readers;
  std::vector<uint64_t> awaiting;  // who waits until it is complete
  uint32_t looks = 0;              // under way: until they end, nobody new reads the part
};

// What few files have at a time.
struct Book::Rare {
  std::vector<uint64_t> waiters;
  std::shared_ptr<Ticket> ticket;
  std::shared_ptr<SourceFile> source;  // open, for the next time
  std::shared_ptr<YoungFile> young;    // not copied yet, for it seemed too young
  bool retained = false;               // counts as open
  uint64_t owner = 0;                  // of the job under way
  std::unique_ptr<Large> large;
  std::vector<Entry*> aliases;
};

struct Book::Entry {
  const std::string* path = nullptr;
  FileKey key;
  FileSlot* slot = nullptr;
  Entry* real = nullptr;  // this is a link to it
  std::unique_ptr<Rare> rare;
  uint64_t bytes = 0;  // of the copy, as they were reserved
  Nanos retry_at = 0;
  uint32_t opens_base = 0;
  uint32_t wanted = 0;     // by streams, of the copy that is staged or coming
  uint32_t opened = 0;     // of those
  uint32_t early = 0;      // readers that came before the stream did
  uint32_t announced = 0;  // streams that have it among their names
  uint32_t staging = 0;    // grows when a copy goes
  uint32_t looked = 0;     // looks_ when the source was last looked at for its copy
  CopyPlace place = CopyPlace::kNone;
  bool copying = false;
  bool changed = false;
  bool refused = false;
  bool too_large = false;
  bool pinned = false;  // others point to it

  Rare& rare_part() {
    if (rare == nullptr) rare = std::make_unique<Rare>();
    return *rare;
  }
  Large* large() const { return rare == nullptr ? nullptr : rare->large.get(); }
};

// That a stream counts on a copy.
struct Book::Want {
  Entry* entry;
  uint32_t staging;
};

// What is seen of a folder whose files nobody announces.
struct Book::Folder {
  std::string path;
  std::string last;     // name that was asked for
  uint32_t rising = 0;  // names that came after the one before
  bool listed = false;
  bool listing = false;
  std::vector<std::string> names;  // sorted
  size_t at = 0;                   // where the reader is
  size_t end = 0;                  // what is before this has been seen to
  size_t window = 0;
  size_t trigger = 0;  // once this one was opened, it goes on
  JobNumber job = 0;   // that was the last to ask
  Nanos until = 0;     // this is looked for
};

struct Book::Stream {
  std::vector<Entry*> names;  // null: none of ours
  std::deque<uint32_t> order;
  uint64_t first = 0;              // the position of order's first
  uint64_t at = 0;                 // where the reader is
  uint64_t cursor = 0;             // what is before this has been seen to
  std::map<uint64_t, Want> wants;  // by position
  bool stalled = false;
  JobNumber job = 0;

  uint64_t end() const { return first + order.size(); }
  bool done() const { return cursor >= end(); }
  uint64_t lead() const { return cursor > at ? cursor - at : 0; }
};

}  // namespace forebay::files
