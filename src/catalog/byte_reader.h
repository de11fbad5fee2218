// Positioned reads of one object, from a file or from memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/status.h"

namespace forebay {

class ByteReader {
 public:
  virtual ~ByteReader() = default;
  // For messages.
  virtual const std::string& name() const = 0;
  virtual uint64_t size() const = 0;
  // Fills `dest` from `offset`; the count is short only at the end of the object.
  virtual Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> dest) = 0;
};

class FileReader final : public ByteReader {
 public:
  static Result<FileReader> Open(const std::string& path);

  const std::string& name() const override { return path_; }
  uint64_t size() const override { return size_; }
  int64_t mtime_ns() const { return mtime_ns_; }
  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> dest) override;
  // kChanged: it has another size or modification time than when it was opened.
  Status CheckUnchanged() const;

 private:
  FileReader(std::string path, OwnedFd fd, uint64_t size, int64_t mtime_ns)
      : path_(std::move(path)), fd_(std::move(fd)), size_(size), mtime_ns_(mtime_ns) {}

  std::string path_;
  OwnedFd fd_;
  uint64_t size_;
  int64_t mtime_ns_;
};

// Borrows the bytes.
class MemoryReader final : public ByteReader {
 public:
  MemoryReader(std::string name, std::span<const std::byte> bytes)
      : name_(std::move(name)), bytes_(bytes) {}

  const std::string& name() const override { return name_; }
  uint64_t size() const override { return bytes_.size(); }
  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> dest) override;

 private:
  std::string name_;
  std::span<const std::byte> bytes_;
};

}  // namespace forebay
