// The file service's book: which files it knows, which of them have copies, who waits for what,
// and what is to be copied next.
//
// It decides and does nothing else: what is to be done goes to a BookActions, what was done comes
// back by Done(). Confined to one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "files/copy_job.h"
#include "files/message.h"
#include "files/read_progress.h"
#include "files/table.h"
#include "metrics/registry.h"

namespace forebay::files {

class BookActions {
 public:
  virtual ~BookActions() = default;
  virtual void Start(CopyJob job) = 0;
  // To who waits under that number; it may have gone.
  virtual void Answer(uint64_t waiter, Answer answer, uint64_t a) = 0;
  virtual void Remove(const FileKey& key) = 0;      // the copy, if there is one
  virtual void RemovePart(const FileKey& key) = 0;  // what was copied of a large file
  virtual bool Exists(const FileKey& key) = 0;      // the copy
  virtual void Forget(std::string_view path) = 0;   // all that was read of a file that changes
  virtual bool Link(const FileKey& alias, const FileKey& copy) = 0;
  // Of the process, by that descriptor or, with -1, by mappings.
  virtual ReadProgress Progress(int64_t process, int64_t fd) = 0;
  // Room for more files; false: there is none.
  virtual bool GrowTable() = 0;
  virtual void Say(const std::string& what) = 0;
};

struct BookOptions {
  size_t in_flight = 64;          // jobs at once; what is waited for comes on top
  uint64_t block = 1 << 20;       // of large files
  uint64_t partial = 16 << 20;    // files above this are read while they are copied
  size_t open_files = 1 << 14;    // of the source, kept open for the next time
  uint64_t most_names = 1 << 22;  // a stream may announce
  Nanos pause = 10 * kSecond;     // after the disk was full
  Nanos retry = kSecond;          // after an error of the source
  Nanos open_idle = 5 * kSecond;  // files stay open after the last stream has ended
  Nanos idle = 500 * kMilli;      // without a read of the source, before large files are copied on
};

struct BookMetrics {
  explicit BookMetrics(Mechanism& mechanism);
  Metric& gets;
  Metric& waits;
  Metric& kept;
  Metric& staged;
  Metric& left;
  Metric& unread;
  Metric& changed;
  Metric& discarded;
  Metric& errors;
  Metric& missing;
  Metric& full;
  Metric& kept_bytes;
  Metric& staged_bytes;
  Metric& open_files;
};

class Book {
 public:
  Book(FileTable table, const BookOptions& options, Room& room, BookMetrics& metrics,
       BookActions& actions);
  ~Book();

  // A data folder, in its normal form. What lies in none is left alone.
  void AddSource(std::string_view folder);
  // The cache itself is no source.
  void SetCache(std::string folder) { cache_ = std::move(folder); }
  // Copies under way, and for how many jobs, which have equal parts of them.
  void SetInFlight(size_t copies, size_t jobs) {
    options_.in_flight = copies;
    jobs_ = std::max<size_t>(1, jobs);
  }
  void RoomChanged() { full_ = false; }  // it is found out anew
  // Somebody has come who knows nothing of what was told of changes before: each copy is compared
  // with its source once more, when it is next asked for, or ahead of that.
  void LookAgain();

  // What is read for several jobs is read for the first that asked.
  void Get(std::string_view path, uint64_t waiter, Nanos now, JobNumber job = 0);
  void Range(std::string_view path, uint64_t offset, uint64_t bytes, uint64_t waiter, Nanos now,
             JobNumber job = 0);
  // The process (0: it cannot be seen from here) reads the source by itself, by that descriptor or,
  // with -1, by a mapping.
  void Direct(std::string_view path, int64_t process, int64_t fd, uint64_t waiter, Nanos now);
  // `follow`: and what the paths lead to.
  void Changed(std::span<const std::string_view> paths, uint64_t waiter, bool follow = true);

  // A reader's coming order; false when there is something wrong with it.
  bool Names(uint64_t stream, uint64_t first, std::span<const std::string_view> paths,
             JobNumber job = 0);
  bool Order(uint64_t stream, uint64_t position, std::span<const uint32_t> numbers);
  bool At(uint64_t stream, uint64_t position);
  void EndStream(uint64_t stream);

  // Everybody has gone: nothing of the source stays open, and large files are not copied on.
  void OnAllLeft();

  void Done(CopyResult result, Nanos now);
  // Starts what can be started. Returns when to come again: 0, when something has happened.
  Nanos Pump(Nanos now);

  // Files of the source that are open for the next time.
  void CloseIdle();

  size_t in_flight() const { return in_flight_; }
  bool full() const { return full_; }
  size_t files() const { return entries_.size(); }
  size_t streams() const { return streams_.size(); }
  const std::vector<std::string>& sources() const { return sources_; }

 private:
  struct Entry;
  struct Large;
  struct Rare;
  struct Stream;
  struct Want;
  struct Folder;
  using Entries = std::map<std::string, Entry, std::less<>>;

  bool Covers(std::string_view path) const;
  Entry* FindOrAdd(std::string_view path);
  bool BelowChanged(std::string_view path) const;
  FileSlot* AddSlot(const FileKey& key, FileState state);
  bool SetState(Entry& entry, FileState state);
  FileState IdleState(const Entry& entry) const;
  void ShowRoom();
  void AnswerAll(Entry& entry, Answer answer, uint64_t a = 0);
  bool MayStart(JobNumber job) const;
  void StartCopy(Entry& entry, bool urgent, JobNumber job);
  void Submit(CopyJob job);
  void Wait(Entry& entry, uint64_t waiter);
  void ChangeAll(std::string_view path);
  void Change(Entry& entry);
  void Forget(Entry& entry);
  void MaybeErase(Entry& entry);
  // A name that is a link may lead elsewhere by now.
  void ForgetAlias(Entry& entry);
  // Gives up a copy that has not been compared since LookAgain: what is stored is found again.
  void ForgetUnlooked(Entry& entry);
  void Refuse(Entry& entry);
  void Retain(Entry& entry, std::shared_ptr<SourceFile> source);
  void Drop(Entry& entry);
  void CloseSource(Entry& entry);

  // Of finished jobs.
  void DoneCopy(Entry& entry, CopyResult& result, Nanos now);
  void DoneBlock(Entry& entry, CopyResult& result, Nanos now);
  void DoneResolve(CopyResult& result);
  void DoneLook(Entry& entry, const CopyResult& result, Nanos now);
  void Placed(Entry& entry, CopyResult& result);
  void FoundAlias(Entry& entry, const CopyResult& result, Nanos now);
  void FoundLarge(Entry& entry, CopyResult& result);
  void FoundNoRoom(Entry& entry, CopyResult& result);
  void Failed(Entry& entry, const CopyResult& result, Nanos now);
  void FailedLarge(Entry& entry, const CopyResult& result, Nanos now);

  // Of large files.
  struct DirectReader {
    int64_t process;
    int64_t fd;
    ReadProgress seen;
  };
  Entry* Find(std::string_view path);
  struct Run;
  Run& RunOf(Large& large, uint64_t offset, uint64_t bytes, Nanos now) const;
  bool IsSequential(const Run& run) const;
  bool Follow(Large& large, uint64_t offset, uint64_t bytes, Nanos now, JobNumber job) const;
  bool CopiesAll(const Entry& entry) const;
  bool NextAhead(Entry& entry);
  void LookAtDirect(Nanos now);
  bool HasPaidForMapped() const;
  Nanos PumpIdle(Nanos now);
  // False: there is no room.
  bool StartBlock(Entry& entry, size_t block, bool urgent, JobNumber job);
  bool IsWorn(Large& large, uint64_t offset, uint64_t bytes) const;
  void PassBy(Entry& entry, uint64_t bytes);
  void EndPassingBy(Entry& entry);
  bool NextBlock(Entry& entry);
  bool PumpBegun();
  bool PumpLarge();
  void HurryLarge(Entry& entry, JobNumber job);
  void EndParts(Entry& entry);
  void EndLarge(Entry& entry);
  void LookAtLarge(Entry& entry);

  // Of folders whose files are read in the order of their names.
  void Observe(std::string_view path, Nanos now, JobNumber job);
  void DoneList(CopyResult& result, Nanos now);
  void ReadOn(Folder& folder, Nanos now);
  bool PumpFolders(Nanos now);

  // Of streams.
  uint32_t OpensOf(const Entry& entry) const;
  void CountOpens(size_t most);
  bool MakeRoom(uint64_t bytes);
  void Unstage(Entry& entry);
  void ReleaseWant(const Want& want);
  void Rewind(const Entry& entry);
  bool PumpStream(Stream& stream, Nanos now);
  void AddWant(Stream& stream, Entry& entry);
  void ReleasePassed(Stream& stream, uint64_t before);
  bool HasRoom(const Entry& entry);

  FileTable table_;
  BookOptions options_;
  Room& room_;
  BookMetrics& metrics_;
  BookActions& actions_;
  std::vector<std::string> sources_;
  std::string cache_;
  Entries entries_;
  std::unordered_map<uint64_t, Entry*> owners_;  // of jobs
  uint64_t next_owner_ = 1;
  std::unordered_map<uint64_t, uint64_t> resolving_;      // job to waiter
  std::unordered_map<uint64_t, uint32_t> resolves_left_;  // waiter to how many
  std::map<uint64_t, Stream> streams_;
  std::deque<std::pair<Entry*, uint32_t>> staged_;    // with the number of their staging
  std::deque<std::pair<Entry*, uint32_t>> consumed_;  // may go when there is no room
  std::vector<Entry*> retained_;                      // with an open file of the source
  std::vector<Entry*> large_;                         // being copied
  std::vector<DirectReader> direct_;                  // of those, past the service
  bool sequential_ = false;    // the last one that was read in part was read from its start on
  Nanos last_read_ = 0;        // of the source, for somebody who waits
  Nanos looked_ = 0;           // at who reads directly
  uint64_t mapped_bytes_ = 0;  // that were read through mappings, about
  std::map<std::string, Folder, std::less<>> folders_;
  std::vector<Folder*> reading_;                   // those in which reading goes on
  std::unordered_map<uint64_t, Folder*> listing_;  // by job
  size_t jobs_ = 1;
  size_t in_flight_ = 0;
  std::unordered_map<JobNumber, size_t> in_flight_of_;
  size_t unknown_ = 0;    // of those, files whose size is not known yet
  uint64_t average_ = 0;  // size of a copy, roughly
  uint64_t changes_ = 0;
  uint32_t looks_ = 0;  // grows with LookAgain
  uint64_t opened_ = 0;
  bool full_ = false;
  bool stalled_ = false;
  Nanos stalled_since_ = 0;
  Nanos idle_since_ = 0;
  Nanos paused_until_ = 0;
};

}  // namespace forebay::files
