// Threads that copy files of the source into the cache.
//
// A copy is written under another name, gets its attributes, and its name last: whoever finds a
// copy finds all of it. A file whose attributes differ after it was read is discarded. The source
// is asked as little as can be: a look-up, an open, and as many reads as there are blocks.
// The reads are the engine's, and copies that are kept are the store's, too.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/thread_annotations.h"
#include "files/copy_job.h"
#include "files/disk_turns.h"
#include "files/supply.h"
#include "metrics/registry.h"

namespace forebay::files {

struct CopierOptions {
  int copies = -1;              // the folder; stays open as long as the copier lives
  size_t threads = 64;          // the most, see SetThreads
  uint64_t block = 1 << 20;     // of one read
  uint64_t parallel = 2 << 20;  // files above this are copied in blocks
  uint64_t partial = 16 << 20;  // and those above this also if only some have room
  // Files that seem to have changed more recently are left alone until they have been seen
  // unchanged for so long, by this node's clock. 0: none does.
  Nanos young = 3 * kSecond;
  FileSupply* supply = nullptr;          // outlives the copier
  Metric* opens = nullptr;               // counts files of the source that were opened
  std::function<void(CopyResult)> done;  // called by the threads
  // The store has not taken a copy that is to be kept; called by the threads.
  std::function<void(const Status&)> not_kept = [](const Status&) {};
};

// Safe for concurrent use by multiple threads.
class Copier {
 public:
  Copier(const CopierOptions& options, Room& room);
  // Jobs that have not begun are dropped and not reported.
  ~Copier();

  void Submit(CopyJob job);
  // Drops jobs that have not begun, and waits for those that have. False: some have not ended by
  // then. Nothing may be submitted any more.
  bool Stop(Nanos wait);
  // The most that work at once, and for how many jobs: one that waits for its share of the source
  // leaves the others their part of the threads. Those under way go on.
  void SetThreads(size_t threads, size_t jobs);

  // NAME and what is put after it.
  static std::string NameIn(const FileKey& key, const char* suffix = "");

 private:
  void Work(const std::stop_token& stop);
  bool Next(std::deque<CopyJob>** queue, size_t* place) REQUIRES(mutex_);
  void Do(CopyResult& result);
  void Copy(CopyResult& result);
  void Block(CopyResult& result);
  void Finish(CopyResult& result);
  static void Examine(CopyResult& result);
  static void Resolve(CopyResult& result);
  static void List(CopyResult& result);
  // Looks at the source, and opens it where it is read here; false: `result` says why not.
  bool Open(CopyResult& result);
  // Whether another change could leave the file's times as they are; remembered in the job.
  bool IsTooYoung(CopyJob& job, const struct stat& st) const;
  bool OpenForReading(CopyResult& result, SourceFile& source);
  bool MayGrow(CopyResult& result) const;
  // Whether the store has a copy of the file as it is, which has its name in the cache then.
  bool TakeStored(CopyResult& result);
  void PrepareLarge(CopyResult& result);
  // An empty copy; none: `result` says why.
  OwnedFd MakeCopy(CopyResult& result, const char* suffix) const;
  // False: `result` says why.
  bool Read(CopyResult& result, const FileSupply::Extent& extent, FileLoan* out);
  // Attributes, then the name. The copy goes when that fails.
  void Publish(CopyResult& result, int fd, const char* suffix, uint32_t crc);
  enum class Stored : bool { kNo, kYes };
  void GiveName(CopyResult& result, const char* suffix, Stored stored, uint32_t crc);

  const CopierOptions options_;
  Room& room_;
  Mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<CopyJob> urgent_ GUARDED_BY(mutex_);
  std::deque<CopyJob> rest_ GUARDED_BY(mutex_);
  size_t idle_ GUARDED_BY(mutex_) = 0;
  size_t busy_ GUARDED_BY(mutex_) = 0;
  size_t most_ GUARDED_BY(mutex_);
  size_t most_of_job_ GUARDED_BY(mutex_);
  std::map<JobNumber, size_t> busy_of_ GUARDED_BY(mutex_);
  std::vector<std::jthread> threads_ GUARDED_BY(mutex_);
  std::stop_source stop_;
  DiskTurns disk_;
};

}  // namespace forebay::files
