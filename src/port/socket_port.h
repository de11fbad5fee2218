// SocketPort: an engine in another process of the same user and machine.
//
// Control goes through a Unix socket; samples are read where the engine put them, in its arena
// mapped read-only.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "metrics/epoch_log.h"
#include "metrics/stall.h"
#include "port/own_decoding.h"
#include "port/port.h"
#include "wire/frame.h"
#include "wire/ring.h"

namespace forebay {

// One request at a time; a Release never waits for another thread's Take. Once the connection is
// lost every call returns kUnavailable at once; loans stay mapped, and their bytes are right when
// the engine's process died, but not when it went on without its server. Destruction gives back
// every loan and closes the streams that this client opened.
class SocketPort final : public Port {
 public:
  // `timeout` bounds the whole of it. `rings`: streams that this client opens and takes batches
  // from are its own, and their batches come announced through a ring: one that is ready costs no
  // system call. `viewer`: the daemon does not stay for this client.
  static Result<std::unique_ptr<SocketPort>> Attach(const std::string& socket_path, Nanos timeout,
                                                    bool rings = false, bool viewer = false);
  ~SocketPort() override;

  Result<StreamId> OpenStream(const StreamOptions& options) override;
  Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last) override;
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Status CloseStream(StreamId stream) override;
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) override;
  // Sent with the next request, or once more than a few wait.
  Status Release(LeaseId lease) override;
  // Sends the releases that wait for a request.
  void SendReleases();
  // Remembers the catalog for Find.
  Result<DatasetId> OpenDataset(std::shared_ptr<const Catalog> catalog,
                                const std::string& delay) override;
  void CloseDataset(DatasetId dataset) override;
  std::shared_ptr<const Catalog> Find(DatasetId dataset) override;
  // Of the daemon's budget, so that all processes of a node together stay within it. What was
  // refused with no wait is refused again for a moment without asking.
  Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) override;
  uint64_t budget() override { return hello_.budget; }
  uint64_t sharers() override { return decoding_->sharers; }
  DecodePool& decode_pool() override { return decoding_->pool; }
  Registry& registry() override { return decoding_->registry; }
  // What the last batch was waited for, which is known with it.
  StallCause WaitCause(StreamId stream) override;
  // The daemon answers with an error where only a release would help.
  Status Blocked(StreamId /*stream*/) override { return Status(); }
  void CountStall(StreamId stream, StallCause cause, Nanos waited) override;
  // Of a stream that this port opened. Waits and times are this process's.
  Result<std::vector<EpochStats>> Stats(StreamId stream) override;
  Result<ChangedFilesOf> ChangedFiles(StreamId stream) override;
  std::string WaitingFor(StreamId stream) override;
  Result<std::string> MetricsText() override;
  const std::byte* base() const { return arena_.data(); }

  // Adds to the counts of reads that this process answered from the arena, and left to the file
  // system.
  Status Served(uint64_t reads, uint64_t passes);

  // Adds a data set to a daemon, or finds it there. `delay`: settings of an emulated slow storage.
  Result<DatasetId> AddDataset(const Catalog& catalog, const std::string& delay);
  // One of wire::Query's questions.
  Result<std::string> Query(uint8_t what, StreamId stream = 0);
  // All of them, or none.
  Status SetKnobs(std::vector<std::string> names, std::vector<int64_t> values);
  // A node's policy as JSON (core/policy.h); empty: none.
  Status SetPolicy(std::string json);
  // Looks at files that ranks of a job share, see wire::AskLook. With kTake `*memory` is what was
  // handed in.
  Result<wire::AskLookReply> AskLook(const wire::AskLook& request, OwnedFd* memory);
  Status HandInLook(const wire::HandInLook& look, const OwnedFd& memory);
  void TellLookProgress(uint64_t ticket);
  void DropLook(uint64_t ticket);
  // What Fetch has waited for so far, by cause, in nanoseconds. An error has no causes: it counts
  // as waiting for memory where that was short, else for the source.
  std::array<Nanos, kStallCauses> FetchWaits() const;
  // How often a Take of this process found the stream's ring empty; every other batch was ready.
  uint64_t EmptyRings(StreamId stream);

  // kUnavailable when the server or the connection has gone. Does not wait.
  Status ServerLives();
  const std::string& path() const { return path_; }
  uint32_t server_pid() const { return hello_.pid; }
  const std::string& settings() const { return hello_.settings; }
  uint64_t arena_bytes() const { return arena_.size(); }
  uint32_t dataset_count() const { return hello_.datasets; }
  bool connected() const { return !lost_.load(std::memory_order_relaxed); }

 private:
  // A stream that this client opened.
  struct Stream {
    std::atomic<bool> closed{false};  // pairs with nothing: a late waiter wakes by itself
    // Constant once it is opened; `mutex` is held for the reader's Take and Want, write_mutex_ for
    // its Release.
    bool ring = false;
    wire::RingReader reader;
    Mutex mutex;  // taken before call_mutex_ and write_mutex_
    bool ended GUARDED_BY(mutex) = false;
    EpochLog epochs GUARDED_BY(mutex);
    Nanos waited GUARDED_BY(mutex) = 0;  // for what comes next
    uint64_t empty GUARDED_BY(mutex) = 0;
    uint32_t beat GUARDED_BY(mutex) = 0;
    Nanos silent GUARDED_BY(mutex) = 0;  // waited since the daemon's beat has changed
    StallCause last_cause GUARDED_BY(mutex) = StallCause::kSource;
    void Account(TakeKind kind, const BatchLoan& loan, StallCause cause, Nanos now) REQUIRES(mutex);
  };
  // What gives a share of the budget back; it may outlive the port, whose end gives back all.
  struct Shares {
    explicit Shares(SocketPort* owner) : port(owner) {}
    Mutex mutex;
    SocketPort* port GUARDED_BY(mutex);
  };
  struct Held {
    uint64_t bytes = 0;
    std::shared_ptr<Stream> ring;  // shared with the streams, which may be closed before
  };

  SocketPort(OwnedFd socket, OwnedFd server, std::string path, bool rings, bool viewer);

  Status Greet(Nanos deadline);
  // As Engine::Lend with no wait; the number is for GiveBack.
  Result<uint64_t> AskShare(uint64_t bytes, uint64_t leave);
  void GiveBack(uint64_t share);
  // kCancelled in a forked child, kUnavailable once the connection is lost.
  Status Alive() const;
  // Nothing after this can be in step. A server that lives takes back what it lent as soon as the
  // connection ends, so it ends with the last loan.
  Status Lose(const Status& why);
  // The loan is this client's; an error once the connection is lost.
  Status Hold(LeaseId lease, uint64_t bytes, std::shared_ptr<Stream> ring) REQUIRES(write_mutex_);
  // A loan less.
  void LetGo();
  // Waits until the socket is ready; kUnavailable when the server's process has ended.
  Status Await(short events, Nanos deadline);
  Status Send(std::vector<std::byte>& bytes, Nanos deadline) REQUIRES(write_mutex_);
  Status SendReleasesBy(Nanos deadline) REQUIRES(write_mutex_);
  Status AppendReleases() REQUIRES(write_mutex_);
  Status Receive(uint64_t request, Nanos deadline, wire::Frame* out) REQUIRES(call_mutex_);

  // Sends a request and receives its answer, decoded into `reply`; a peer's error is returned.
  template <typename Request, typename Reply>
  Status Call(const Request& request, Nanos wait, Reply* reply, int descriptor = -1)
      REQUIRES(call_mutex_);
  // `waits`: what the server says that it waited for, by cause.
  using Waits = std::array<Nanos, kStallCauses>;
  template <typename Request>
  Result<TakeKind> Ask(const Request& request, Nanos wait, BatchLoan* out, Waits* waits);
  std::shared_ptr<Stream> FindStream(StreamId stream);
  Result<TakeKind> TakeFromRing(StreamId id, const std::shared_ptr<Stream>& stream, Nanos wait,
                                BatchLoan* out);
  // The next entry of the ring, or kPending.
  Result<TakeKind> TakeReady(StreamId id, const std::shared_ptr<Stream>& stream, BatchLoan* out);
  Status CheckLoan(const BatchLoan& loan, uint64_t* bytes);
  Status SendNudge() REQUIRES(write_mutex_);
  // What has no answer.
  template <typename Message>
  Status Tell(const Message& message) REQUIRES(write_mutex_);

  // Constant after construction.
  const uint64_t fork_generation_;
  const std::string path_;
  const bool rings_;
  const bool viewer_;
  OwnedFd socket_;
  OwnedFd server_;  // readable once the server's process has ended; may be invalid
  Mapping arena_;
  wire::HelloReply hello_;
  // In one total order: who loses the connection sees the loan, or who takes it sees the loss.
  std::atomic<bool> lost_{false};
  std::atomic<size_t> loans_{0};  // of held_

  // One request at a time; taken before write_mutex_.
  Mutex call_mutex_;
  wire::FrameReader in_ GUARDED_BY(call_mutex_);
  wire::Loan loan_ GUARDED_BY(call_mutex_);
  uint64_t next_request_ GUARDED_BY(call_mutex_) = 1;
  OwnedFd received_ GUARDED_BY(call_mutex_);  // the descriptor that came last

  // The sending side, so that a Release goes out while another thread waits for an answer.
  Mutex write_mutex_;
  bool answer_awaited_ GUARDED_BY(write_mutex_) = false;
  std::vector<std::byte> out_ GUARDED_BY(write_mutex_);
  wire::Release releases_ GUARDED_BY(write_mutex_);
  uint64_t release_bytes_ GUARDED_BY(write_mutex_) = 0;
  std::unordered_map<LeaseId, Held> held_ GUARDED_BY(write_mutex_);

  std::array<std::atomic<Nanos>, kStallCauses> fetch_waits_{};  // counts, which order nothing

  Mutex streams_mutex_;  // nothing else is taken under it
  std::map<StreamId, std::shared_ptr<Stream>> streams_ GUARDED_BY(streams_mutex_);
  struct Opened {
    std::shared_ptr<const Catalog> catalog;
    size_t times = 0;
  };
  std::map<DatasetId, Opened> catalogs_ GUARDED_BY(streams_mutex_);
  // Memory that is no necessity was refused until then.
  Nanos ask_again_ GUARDED_BY(streams_mutex_) = 0;
  const std::shared_ptr<Shares> shares_;   // shared with what was lent
  std::unique_ptr<OwnDecoding> decoding_;  // left alone in a forked child
};

}  // namespace forebay
