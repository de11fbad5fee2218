// SocketClient: an engine in another process of the same user and machine.
//
// Control goes through a Unix socket; samples are read where the engine put them, in its arena
// mapped read-only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "client/client.h"
#include "wire/frame.h"

namespace forebay {

// One request at a time; a Release never waits for another thread's Take. Once the connection is
// lost every call returns kUnavailable at once; loans stay mapped, and their bytes are right when
// the engine's process died, but not when it went on without its server. Destruction gives back
// every loan and closes the streams that this client opened.
class SocketClient final : public Client {
 public:
  // `timeout` bounds the whole of it.
  static Result<std::unique_ptr<SocketClient>> Attach(const std::string& socket_path,
                                                      Nanos timeout);

  Result<StreamId> OpenStream(const StreamOptions& options) override;
  Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last) override;
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Status CloseStream(StreamId stream) override;
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) override;
  // Sent with the next request, or once more than a few wait.
  Status Release(LeaseId lease) override;
  const std::byte* base() const override { return arena_.data(); }

  // Adds to the counts of reads that this process answered from the arena, and left to the file
  // system.
  Status Served(uint64_t reads, uint64_t passes);

  uint64_t arena_bytes() const { return arena_.size(); }
  uint64_t budget() const { return hello_.budget; }
  uint32_t dataset_count() const { return hello_.datasets; }
  bool connected() const { return !lost_.load(std::memory_order_relaxed); }

 private:
  SocketClient(OwnedFd socket, OwnedFd server, std::string path);

  Status Greet(Nanos deadline);
  // kCancelled in a forked child, kUnavailable once the connection is lost.
  Status Alive() const;
  // Ends the connection: nothing after this can be in step.
  Status Lose(const Status& why);
  // Waits until the socket is ready; kUnavailable when the server's process has ended.
  Status Await(short events, Nanos deadline);
  Status Send(std::vector<std::byte>& bytes, Nanos deadline) REQUIRES(write_mutex_);
  Status SendReleases(Nanos deadline) REQUIRES(write_mutex_);
  Status AppendReleases() REQUIRES(write_mutex_);
  Status Receive(uint64_t request, Nanos deadline, wire::Frame* out) REQUIRES(call_mutex_);

  // Sends a request and receives its answer, decoded into `reply`; a peer's error is returned.
  template <typename Request, typename Reply>
  Status Call(const Request& request, Nanos wait, Reply* reply) REQUIRES(call_mutex_);
  template <typename Request>
  Result<TakeKind> Ask(const Request& request, Nanos wait, BatchLoan* out);

  // Constant after construction.
  const uint64_t fork_generation_;
  const std::string path_;
  OwnedFd socket_;
  OwnedFd server_;  // readable once the server's process has ended; may be invalid
  Mapping arena_;
  wire::HelloReply hello_;
  std::atomic<bool> lost_{false};  // pairs with nothing: late readers fail on the socket

  // One request at a time; taken before write_mutex_.
  Mutex call_mutex_;
  wire::FrameReader in_ GUARDED_BY(call_mutex_);
  wire::Loan loan_ GUARDED_BY(call_mutex_);
  uint64_t next_request_ GUARDED_BY(call_mutex_) = 1;

  // The sending side, so that a Release goes out while another thread waits for an answer.
  Mutex write_mutex_;
  bool answer_awaited_ GUARDED_BY(write_mutex_) = false;
  std::vector<std::byte> out_ GUARDED_BY(write_mutex_);
  wire::Release releases_ GUARDED_BY(write_mutex_);
  uint64_t release_bytes_ GUARDED_BY(write_mutex_) = 0;
  std::unordered_map<LeaseId, uint64_t> held_ GUARDED_BY(write_mutex_);  // bytes by lease
};

}  // namespace forebay
