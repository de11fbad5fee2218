// FileSupply: who reads the source for the file service, and holds whole copies beyond its life:
// the node's engine. Paths are absolute and have no links in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "files/copy_job.h"
#include "files/message.h"

namespace forebay::files {

class FileSupply;

// Bytes of a file on loan; the destructor gives them back.
class FileLoan {
 public:
  FileLoan() = default;
  FileLoan(FileSupply& supply, uint64_t lease, std::span<const std::byte> bytes, StallCause cause)
      : supply_(&supply), lease_(lease), bytes_(bytes), cause_(cause) {}
  // Its own bytes.
  FileLoan(std::vector<std::byte> bytes, StallCause cause)
      : own_(std::move(bytes)), bytes_(own_), cause_(cause) {}
  FileLoan(FileLoan&& other) noexcept
      : supply_(std::exchange(other.supply_, nullptr)),
        lease_(other.lease_),
        own_(std::move(other.own_)),
        bytes_(std::exchange(other.bytes_, {})),
        cause_(other.cause_) {}
  FileLoan& operator=(FileLoan&& other) noexcept {
    std::swap(supply_, other.supply_);
    std::swap(lease_, other.lease_);
    std::swap(own_, other.own_);
    std::swap(bytes_, other.bytes_);
    std::swap(cause_, other.cause_);
    return *this;
  }
  ~FileLoan();

  std::span<const std::byte> bytes() const { return bytes_; }
  StallCause cause() const { return cause_; }  // what they were waited for

 private:
  FileSupply* supply_ = nullptr;
  uint64_t lease_ = 0;
  std::vector<std::byte> own_;
  std::span<const std::byte> bytes_;
  StallCause cause_ = StallCause::kSource;
};

// Safe for concurrent use by multiple threads. Read, LinkCopy and KeepCopy wait for storage.
class FileSupply {
 public:
  virtual ~FileSupply() = default;

  // A data folder; what lies in none is not asked for. `name`: what nodes that have it at different
  // paths call it; empty: its path. kAlreadyExists: it is there under another name, which stays.
  virtual Status AddSource(const std::string& folder, const std::string& name) = 0;

  // The extent of `path`, which is a whole file, or a block of `block` bytes at a multiple of it.
  // `file` tells what it was when it was looked at, and is open. kNotFound and kChanged: it is no
  // longer that; kCancelled: `stop`.
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint32_t block = 0;  // 0: the whole file
  };
  struct Purpose {
    JobNumber job = 0;    // whose limits hold
    bool urgent = false;  // a program waits for it
  };
  virtual Result<FileLoan> Read(const std::string& path,
                                const std::shared_ptr<const SourceFile>& file, const Extent& extent,
                                const Purpose& purpose, const std::stop_token& stop) = 0;
  // A job has come, or has gone, and with it its part of the source once its reads have ended. What
  // is read for it all the same is read by its name; one that was never there has the supply's.
  virtual void OpenJob(JobNumber job, const std::string& name) = 0;
  virtual void CloseJob(JobNumber job) = 0;
  // Whether files are opened for reading before they are asked for: what comes from other nodes
  // need not be, and an O_PATH descriptor does.
  virtual bool opens_files() const = 0;

  // Gives the stored copy of the whole file a further name. kNotFound: there is none.
  virtual Status LinkCopy(const std::string& path, const SourceFile& file, int folder,
                          const char* name) = 0;
  // The whole copy that lies there becomes a stored one. An error: it does not, which harms nobody.
  virtual Status KeepCopy(const std::string& path, const SourceFile& file, int folder,
                          const char* name, uint32_t crc) = 0;
  // The stored copy, if there is one, is not to be used again. It has no name in the cache any
  // more.
  virtual void DropCopy(const std::string& path, const SourceFile& file) = 0;
  // The file is about to change: when this returns, nothing that was read or stored of it is given
  // out again. The caller removes the copy's name in the cache.
  virtual void Forget(const std::string& path) = 0;
  // A copy's name in the cache was removed.
  virtual void Removed(const FileKey& key) = 0;
  // Whether the disk of stored copies is used, or passed by since it hangs. Asks the disk, too, so
  // that this is known of one that nobody else asks; waits for nothing.
  virtual bool CopiesAnswer() = 0;
  // Copies whose names are in the store's way: to be removed, each followed by Removed.
  virtual std::vector<FileKey> TakeUnlinks() = 0;

 private:
  friend class FileLoan;
  virtual void Release(uint64_t lease) = 0;
};

inline FileLoan::~FileLoan() {
  if (supply_ != nullptr) supply_->Release(lease_);
}

}  // namespace forebay::files
