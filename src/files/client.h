// Opens files of data folders by their copies, and asks the service for what is missing. Used by
// the preloaded library, the mount, the C interface and Python.
//
// Safe for concurrent use by threads, across fork and in signal handlers: it holds a mapping of the
// table, three strings and a number, all constant after Start(), and neither locks nor allocates.
// It calls the system directly, never through libc, and leaves errno alone. On any trouble, and
// once the service has ended, the source itself is opened.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "files/key.h"
#include "files/message.h"
#include "files/table.h"

namespace forebay::files {

class Client {
 public:
  constexpr Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // From the variables; false when one of the first three is missing or wrong, and the client stays
  // off. So it does when the service is gone or gives no table in time. No descriptor is held open.
  // Called once.
  bool Start(const char* cache, const char* socket, const char* sources, const char* job = nullptr);
  // Gives the mapping back. A client that lives as long as its process needs no Stop().
  void Stop();
  bool on() const { return table_.valid() && table_.usable(); }
  // Whether copies may be opened: not while their disk hangs.
  bool uses_copies() const { return on() && !table_.passed_by(); }

  // A program that is about to start tells of no changes: from now on, copies may not be trusted
  // without a look at the source.
  void SetUnwatched() const {
    FileTable table = table_;
    if (table.valid()) table.SetUnwatched();
  }
  // The same for one that is started without the library, since that does not fit it.
  void StartsPlain() const {
    SetUnwatched();
    FileTable table = table_;
    if (table.valid()) table.CountPlain();
  }
  bool unwatched() const { return table_.valid() && table_.unwatched(); }

  // Whether a normal path lies in a data folder, and not in the cache.
  bool Covers(std::string_view path) const;
  // Whether a path, which ends with a 0, is absolute, normal as it stands, and Covers(). false: it
  // takes a closer look.
  bool Plainly(std::string_view path) const;
  // Whether the cache knows this very path. Files outside of the data folders are known when a link
  // of a data folder leads to them.
  bool Knows(std::string_view path) const;
  // Data folders in their normal form, each ended by a 0, the last by two.
  const char* sources() const { return sources_; }
  size_t source_count() const { return source_count_; }
  JobNumber job() const { return job_; }
  size_t source_length(size_t number) const { return source_lengths_[number]; }
  size_t longest_source() const { return longest_source_; }

  enum class Found : uint8_t { kCopy, kSource, kPartial };
  // The copy of a normal path, opened with O_RDONLY and `flags`, which are of kFlags; asks and
  // waits for one that is not there. -1 with kSource or kPartial: open the source. With kPartial,
  // `size` is what the service says of the source.
  int OpenCopy(std::string_view path, int flags, Found* found, uint64_t* size = nullptr) const;
  // What an open of a copy can honour.
  static constexpr int kFlags =
      O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_LARGEFILE;

  static constexpr size_t kMostCopyPath = 1024 + 64;
  // Waits until all of a file that is being copied is there; false when that is not to be had.
  bool AwaitAll(std::string_view path, uint64_t size) const;

  // This process is about to read a file that is being copied past the service, by that descriptor
  // or, with -1, by a mapping. Whether it can open the copy instead, which is complete.
  bool ReadsDirectly(std::string_view path, int fd = -1) const;
  // Copies of large files that are complete: grows with each.
  uint64_t large_copies() const { return on() ? table_.large() : 0; }

  // The name of what is there of a file that is being copied.
  bool PartPath(std::string_view path, char* out, size_t size) const {
    return on() && CopyName(KeyOf(path), ".part", out, size) > 0;
  }
  // The copy's name when there is one right now; asks nobody.
  bool CopyPath(std::string_view path, char* out, size_t size) const;

  // Before and after a change of a path, and of all below it. Closes the table when the service
  // does not answer. Without `follow`, what a link of that name leads to is as it was.
  void Changed(std::string_view path, bool follow = true) const;
  // The same for one that is no folder: asks nobody when the service knows already.
  void FileChanged(std::string_view path, bool follow = true) const;

  // Which block of which part was last seen to be there; kept by whoever reads the file.
  static constexpr uint64_t kBlock = 1 << 20;
  struct Seen {
    std::atomic<uint64_t> block{0};
  };
  // How much of a read is asked for at once: what is there of it, or else at the source, is read
  // before the rest is asked for.
  static size_t Piece(uint64_t offset, size_t bytes);
  // Bytes of a file that is being copied, or has been: as pread(), or -EAGAIN when Piece() of them
  // are to be read from the source. It may read less than there is.
  int64_t ReadPart(std::string_view path, void* out, size_t bytes, uint64_t offset,
                   Seen* seen = nullptr) const;

 private:
  int64_t TryPart(std::string_view path, void* out, size_t bytes, uint64_t offset,
                  Seen* seen) const;
  // One question and its answer; kBad when there is none in time. `a` and `b` go out and come back.
  Answer Ask(Kind kind, std::string_view path, uint64_t* a, uint64_t* b) const;
  void Tell(Kind kind, std::string_view path, uint64_t a, uint64_t b) const;
  bool MapTable();
  size_t CopyName(const FileKey& key, std::string_view ending, char* out, size_t size) const;

  static constexpr size_t kMostSources = 64;
  // What every open() looks at lies together.
  FileTable table_;
  size_t source_count_ = 0;
  size_t longest_source_ = 0;
  size_t cache_length_ = 0;
  bool cache_inside_ = false;  // of a data folder
  JobNumber job_ = 0;
  uint32_t source_lengths_[kMostSources] = {};
  char cache_[1024] = {};    // goes on with "/copies/"
  char sources_[4096] = {};  // each ends with a 0, the last with two
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  char socket_[108] = {};
};

}  // namespace forebay::files
