// The files of a cache folder that hold copies: names, writing, reading, removing.
//
//   <group>/<name, first two>/<name>.bin  one copy's bytes and nothing else, so that a descriptor
//                                         of it can stand for the original
//   <group>/<number>.seg                  small copies, one behind the other, only appended
//   writing/<pid>-<n>.tmp                 copies being written
//   run/copies/<32 hex digits>            second names of copies in files of their own, which
//                                         programs open; whoever gave them removes them. With a
//                                         point and more behind: what is to become one
//
// Groups have 16 hex digits, names 24 and segments 8. A key says in `group` where its copy lies.
// Errors are errno values, 0 for none. Files have mode 0600 and folders 0700, whatever the source's
// have; a copy with a second name has the mode that its giver chose. What is not a regular file of
// this user, or what others may write to, is not read. In a folder that a group shares on purpose
// (FolderTierOptions::group) files have mode 0660 and folders 2770, and the group's files are as
// good.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "base/owned.h"
#include "tier/folder_index.h"
#include "tier/tier.h"

namespace forebay {

inline constexpr uint64_t kSegmentBytes = 32 << 20;

// What the folder's file system rounds a file up to.
uint64_t BlockOf(int folder);

using CopyName = std::array<char, 64>;
CopyName GroupName(uint64_t group);
CopyName FileName(const TierKey& key);
CopyName SegmentName(uint64_t group, uint32_t segment);
// Where a copy lies, for messages.
CopyName NameOf(const TierKey& key, const CopyEntry& copy);

enum class CopyRead { kGood, kDamaged, kGone, kFailed };
// Fills `bytes`, which has the copy's length, and computes its checksum. kFailed: `error` tells.
CopyRead ReadCopy(int folder, const TierKey& key, const CopyEntry& copy, std::span<std::byte> bytes,
                  int* error);
// The same without the bytes, in little memory whatever length the log says.
CopyRead CheckCopy(int folder, const TierKey& key, const CopyEntry& copy, int* error);
// Reads a little of it, to see whether the disk answers.
void TouchCopy(int folder, const TierKey& key, const CopyEntry& copy);

// Gives a copy that has a file of its own a further name. With `check` its bytes are read and
// compared with its checksum first. kFailed: `error` tells; EEXIST: the name is taken.
CopyRead LinkCopyOut(int folder, const TierKey& key, const CopyEntry& copy, bool check, int dir,
                     const char* name, int* error);
// Makes a file that somebody else has written, on this file system, a copy; its name stays.
int LinkFileIn(int folder, const TierKey& key, int dir, const char* name);

// "writing/<process>-<number>.tmp"; `number` must be unique in the process.
CopyName TemporaryName(uint64_t number);
// A new, empty file of that name.
OwnedFd MakeTemporary(int folder, const CopyName& name);
// At an offset, whole.
int WriteBytes(int fd, std::span<const std::byte> bytes, uint64_t offset);
// Under a temporary name first: the file appears whole. `number` must be unique in the process.
int WriteFile(int folder, const TierKey& key, std::span<const std::byte> bytes, uint64_t number);

// Gives the bytes of a copy back to the disk; of a packed one, whole blocks.
void RemoveCopy(int folder, const TierKey& key, const CopyEntry& copy);
// Removes what looks like ours below a group's folder, of older formats too; leaves the rest.
void RemoveGroup(int folder, uint64_t group);
// Every file below a group's folder that has the name of a segment, or of a copy, with what it
// takes of the disk, is shown to `judge`. A segment has no key.
struct FoundFile {
  std::optional<TierKey> key;
  uint32_t segment = 0;
  uint64_t disk_bytes = 0;
};
enum class Sweep : uint8_t { kKeep, kRemove, kStop };
void SweepSegments(int folder, uint64_t group, const std::function<Sweep(const FoundFile&)>& judge);
void SweepFiles(int folder, uint64_t group, const std::function<Sweep(const FoundFile&)>& judge);
// What dead writers left: files half written, and second names, whose givers are dead, too.
void RemoveLeftovers(int folder);
// What is ours below run/, and run/ itself if nothing else is there.
void RemoveRunFolder(int folder);
// In a folder that never was a cache: something of the user's that has a name which the cache would
// take, overwrite or empty. Empty: there is none, or the folder is a cache.
std::string ForeignName(int folder);

// Whether the folder holds copies of the file service of an older Forebay: lock, boot, copies/.
bool HoldsOldFiles(int folder);
// What to do about it, in words.
std::string OldFilesRemedy(const std::string& folder);
// EWOULDBLOCK: such a service is alive.
int RemoveOldFiles(int folder);
// The folders that have a group's name.
std::vector<uint64_t> GroupFolders(int folder);

// What an older Forebay made readable for others is so no longer. Where the folder holds other
// things beside copies, its own mode stays, and only the folders below it are closed.
void TightenFolder(int folder);

// The segments that a writer appends to: one open for each of a few groups.
class SegmentWriter {
 public:
  // Appends `parts`, together `bytes` long, at the end of a segment of `group`, and says where.
  // A new segment gets `*next`, or the first number after it that no file has; `*next` moves on.
  // After an error nothing was appended. EMLINK: no numbers are left.
  int Append(int folder, uint64_t group, std::span<iovec> parts, uint64_t bytes, uint32_t* next,
             uint16_t* segment, uint32_t* offset);
  // The next append to the group starts a new segment.
  void Seal(uint64_t group) { open_.erase(group); }
  // Whether this segment is appended to.
  bool IsOpen(uint64_t group, uint16_t segment) const;
  // The segment that is appended to holds no copy any more: it starts again.
  void Rewind(uint64_t group);

 private:
  static constexpr size_t kMostOpen = 8;
  struct Segment {
    OwnedFd fd;
    uint16_t number = 0;
    uint64_t end = 0;
  };
  std::map<uint64_t, Segment> open_;
};

}  // namespace forebay
