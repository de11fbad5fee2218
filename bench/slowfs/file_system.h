// FileSystem: a folder shown through FUSE, as slow as a StorageModel says; read-only, unless it is
// to stand for a disk that is written to. Then writes pass through a pipe of their own.
//
// The source folder is asked as soon as a request arrives; only the answer waits. Below `.slowfs`
// in the root lie control files, in no listing and without delay:
//   stats     counters as JSON
//   settings  the model's settings as text; one write of key=value lines changes them
//   reset     any write sets the counters back
#pragma once

#include <dirent.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "core/storage_model.h"
#include "slowfs/counters.h"
#include "slowfs/inode_table.h"
#include "slowfs/read_pool.h"
#include "slowfs/reply.h"
#include "slowfs/serve_loop.h"

namespace forebay::slowfs {

class FileSystem {
 public:
  struct Options {
    std::string source;
    StorageSettings settings;
    bool cache = false;  // the kernel may keep data, attributes and names
    bool writable = false;
    double write_bytes_per_s = 0;  // 0: no limit
  };

  static Result<std::unique_ptr<FileSystem>> Open(const Options& options);

  // The session's operations; its user data must be the FileSystem.
  static const fuse_lowlevel_ops& Operations();

  // Serves until the session ends, in this thread, which gets the signals, and `threads` - 1
  // others. What still waits then is answered at once. Returns 0, or an errno value.
  int Serve(fuse_session* session, unsigned threads);

 private:
  struct Operation;  // the functions that FUSE calls
  struct Parked {    // swallowed by a stall without end
    OpKind kind;
    uint64_t bytes;
    std::unique_ptr<Reply> reply;
  };

  FileSystem(OwnedFd source, const Options& options);

  // Answers `reply` when the model says so, with the error that it says.
  void Answer(OpKind kind, uint64_t bytes, Nanos arrived, Reply reply, ServeLoop& loop);
  void Answer(OpKind kind, uint64_t bytes, Nanos arrived, Reply reply) {
    Answer(kind, bytes, arrived, std::move(reply), *ServeLoop::Current());
  }
  // Answers what has been changed, when the pipe of written bytes lets `bytes` more through.
  void AnswerChange(uint64_t bytes, Reply reply);
  void Deliver(StorageModel::Decision decision, uint64_t bytes, Reply reply, ServeLoop& loop);
  // Answers whatever a stall without end has swallowed.
  void ReleaseParked();
  // Reads what `data` lacks of `size` bytes, and answers.
  void ReadRest(fuse_req_t request, int fd, size_t size, off_t offset, Nanos arrived,
                DataReply data, ServeLoop& loop);
  // Looks `path` up in the source folder, for the kernel to know. Returns 0 or an errno value.
  int FillEntry(std::string path, fuse_entry_param& entry);
  // Where `name` of the folder `parent` lies, for an operation that changes it; nothing, with the
  // request answered, where nothing may be changed.
  std::optional<std::string> PathToChange(fuse_req_t request, NodeId parent, const char* name);
  // There are no calls for extended attributes that take a folder and a name in it.
  std::optional<std::string> PathForAttributes(NodeId node) const;
  // Appends a line of a listing if it fits into `space`; returns the space that it needs.
  size_t AddEntry(fuse_req_t request, const std::string& folder, const dirent& entry, bool plus,
                  char* out, size_t space);

  Status ChangeSettings(std::string_view text);
  std::string SettingsText();

  const OwnedFd source_;
  const bool cache_;
  const bool writable_;
  const double timeout_s_;  // how long the kernel may keep names and attributes

  InodeTable inodes_;
  Counters counters_;
  ReadPool cold_reads_;

  Mutex mutex_;
  StorageModel model_ GUARDED_BY(mutex_);
  StorageModel writes_ GUARDED_BY(mutex_);
  std::vector<Parked> parked_ GUARDED_BY(mutex_);
  std::string rejected_ GUARDED_BY(mutex_);  // why the last change of settings was refused
};

}  // namespace forebay::slowfs
