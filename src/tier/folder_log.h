// The index log of a cache folder: which copy lies where, with its length and checksum.
//
// A header and records of 40 bytes, each with its own CRC-32C, in the order in which things
// happened; a later record about a copy replaces an earlier one. A record is appended only when
// the bytes it speaks of are completely written, so what the log names is whole, whenever a writer
// dies. A torn tail is cut off by the next writer; a record that is damaged in the middle is left
// out, and the ones after it still count, as all have one size. Bytes are in the machine's order,
// which the header's checksum covers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/owned.h"
#include "base/status.h"

namespace forebay {

struct LogRecord {
  enum class Kind : uint8_t {
    kFile = 1,  // a copy in a file of its own
    kPacked,    // a copy in a segment, at `offset`
    kDrop,      // no such copy any more
    kForget,    // no copy of this group any more
    kUse,       // somebody named the group at a time: ValueOf tells, in seconds since 1970
    kPath,      // a piece of the group's path, for people: PathPiece
    kLimit,     // the folder's limit, for people: ValueOf, in bytes
    kLost,      // what a segment takes beside the copies in it: ValueOf, in bytes
    kStamp,     // what the node knew of a copy's file beyond the name: ValueOf. Older programs pass
                // it by
  };
  uint64_t name = 0;  // with `name_check`: what it is a copy of. kPath: number of the piece
  uint64_t group = 0;
  uint32_t name_check = 0;
  uint32_t length = 0;
  uint32_t crc = 0;
  uint32_t offset = 0;
  uint16_t segment = 0;
  Kind kind = Kind::kDrop;
  uint8_t count = 0;   // kPath: bytes of text here
  uint32_t check = 0;  // CRC-32C of the bytes before; Append fills it in
};
static_assert(sizeof(LogRecord) == 40);

LogRecord UseRecord(uint64_t group, int64_t seconds);
LogRecord LimitRecord(uint64_t bytes);
LogRecord LostRecord(uint64_t group, uint16_t segment, uint64_t bytes);
// The number of the three.
uint64_t ValueOf(const LogRecord& record);
inline constexpr size_t kLongestPath = 4096;
// As many pieces as the text takes, at most kLongestPath bytes of it.
std::vector<LogRecord> PathRecords(uint64_t group, std::string_view path);
std::string_view PathPiece(const LogRecord& record);

// Not safe for concurrent use. Errors are errno values, 0 for none.
class FolderLog {
 public:
  static constexpr const char* kName = "index.log";
  static constexpr const char* kTemporary = "writing/index.tmp";
  // Behind so many damaged records in a row no good one is looked for: the file is not ours, or has
  // a length that was never written.
  static constexpr uint64_t kMostDamaged = 1 << 20;

  // kNotFound: there is none. kDataLoss: the file is not such a log, or not this user's.
  static Result<FolderLog> Open(int folder, bool write);
  // Whether the file begins as such a log does, of any version, or as one does whose first bytes
  // were lost with the power: empty, or zeros.
  static bool LooksLikeOne(int folder);
  // Writes a new log with the records that `fill` hands to its argument, and puts it in the place
  // of the old one, whole or not at all. `fill` is called once.
  using Emit = std::function<void(const LogRecord&)>;
  static Result<FolderLog> Create(int folder, const std::function<void(const Emit&)>& fill);

  // Hands over the good records that were added since the last call, in groups.
  int ReadNew(const std::function<void(std::span<const LogRecord>)>& take);
  // True: the folder's log is another file now, or this one got shorter. Open it anew.
  bool Replaced(int folder) const;
  // Cuts off what follows the last good record that was read.
  int Cut();
  // All of them or none.
  int Append(std::span<LogRecord> records);
  // False: somebody removed the file.
  bool Linked() const;

  uint64_t bytes() const { return end_; }
  uint64_t records() const { return records_; }  // read or appended, good ones
  uint64_t damaged() const { return damaged_; }  // left out, with good ones behind them

 private:
  explicit FolderLog(OwnedFd fd) : fd_(std::move(fd)) {}

  OwnedFd fd_;
  uint64_t end_ = sizeof(LogRecord);  // behind the last good record
  uint64_t records_ = 0;
  uint64_t damaged_ = 0;
};

}  // namespace forebay
