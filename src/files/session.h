// A connection to the file service that lasts: a session, a reader's announcements, a look at it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "files/message.h"

namespace forebay::files {

struct SessionOptions {
  std::string program;  // forebayd
  std::string folder;   // of the socket; empty: wire::RuntimeFolder()
  std::string cache;
  std::vector<std::string> sources;
  std::vector<std::string> settings;  // each "name=value"; those of the first session hold
  std::string job;                    // empty: the daemon's own
  Nanos timeout = 20 * kSecond;
};

// Safe for concurrent use by multiple threads; a forked child must not use its parent's.
class Session {
 public:
  // Of the service that runs for the cache folder, or one that this call has started. It stays as
  // long as this object.
  static Result<std::unique_ptr<Session>> Start(const SessionOptions& options);
  // To the service at that socket, which does not stay for it. kUnavailable when there is none.
  // `job`: for which it asks, as a session was told.
  static Result<std::unique_ptr<Session>> Connect(const std::string& socket, Nanos timeout,
                                                  JobNumber job = 0);

  const std::string& socket() const { return socket_; }
  // What programs are told as kCacheVariable: known after Hello.
  const std::string& cache() const { return cache_; }

  Status Hello(std::span<const std::string> sources);
  // After Hello: all that is read for this session is read for the job of that name. A service that
  // knows no jobs, or has too many, leaves it with the daemon's own.
  Status Join(std::string_view job);
  JobNumber job() const { return job_; }
  Result<Answer> Get(std::string_view path);
  Status Changed(std::string_view path);
  // A reader's coming order, see Kind::kNames. However many: they travel in several packets.
  Status Names(std::span<const std::string_view> paths);
  Status Order(uint64_t position, std::span<const uint32_t> numbers);
  Status At(uint64_t position);
  Result<std::string> StatusJson();
  // Each "name=value": all, or none.
  Status SetKnobs(std::span<const std::string> settings);

 private:
  Session(OwnedFd fd, std::string socket, Nanos timeout, JobNumber job)
      : fd_(std::move(fd)), socket_(std::move(socket)), timeout_(timeout), job_(job) {}
  // The answer's text; kUnavailable when there is none, kInvalidArgument when it is kBad.
  Result<std::string> Ask(std::span<const std::byte> packet, Header* header) EXCLUDES(mutex_);
  Status Tell(std::span<const std::byte> packet);

  Mutex mutex_;
  OwnedFd fd_;  // constant; whose turn it is, is guarded
  const std::string socket_;
  const Nanos timeout_;
  std::string cache_;
  JobNumber job_;  // constant after Join
  uint64_t names_ = 0;
};

}  // namespace forebay::files
