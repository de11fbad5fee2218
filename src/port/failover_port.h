// FailoverPort: the node's daemon while there is one, an engine of this process while there is not.
//
// The daemon is started where none runs. When it dies, or does not move any more, each stream goes
// on from an engine of this process, with what comes behind the last batch that was handed out.
// Some seconds later the port looks for a daemon again, or starts one, and the streams return to
// it, likewise. So nothing is missed and nothing is seen twice. What an engine that was left has
// lent stays valid until it is released.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "port/attach.h"
#include "port/own_decoding.h"
#include "port/port.h"
#include "port/socket_port.h"

namespace forebay {

enum class FailoverEvent : uint8_t {
  kAlone,     // this process goes on without the daemon
  kReturned,  // and is back with one
};

struct FailoverOptions {
  DaemonOptions daemon;
  // Of the engine of this process. `memory` and `memory_tier` are meant for all ranks of the node,
  // as the daemon's are: each rank's own engine gets its part of them. It has no peers: the daemon
  // was the node, and another one may come.
  EngineOptions engine;
  std::string job;  // that streams without one belong to; empty: JobName()
  // Waits before the tries to come back; after the last one the port stays where it is. A daemon
  // that was there for `lived` was worth it: the tries begin anew.
  std::vector<Nanos> retry = {2 * kSecond,  4 * kSecond,  8 * kSecond,  16 * kSecond,
                              32 * kSecond, 60 * kSecond, 60 * kSecond, 60 * kSecond};
  Nanos lived = 60 * kSecond;
  // Told once for each change, by the thread that made it and under no lock of the port. `what`:
  // why, or with whom.
  std::function<void(FailoverEvent event, const std::string& what)> tell;
};

// A stream as other processes of this user reach it.
struct StreamAddress {
  uint32_t daemon = 0;  // its process; 0: an engine of the process that opened the stream
  StreamId stream = 0;  // its number there
};

class FailoverPort;

// Deletes a port in the process that made it; a forked child has neither its thread nor its locks
// and leaves it alone.
struct FailoverPortDelete {
  void operator()(FailoverPort* port) const;
};
using FailoverPortPtr = std::unique_ptr<FailoverPort, FailoverPortDelete>;

// Batches of one stream are handed out to one thread at a time; samples are fetched by many at
// once, each over a connection of its own. Loans and what Lend gave end with the port. Destruction
// ends a try to come back that is under way, within 5 s.
class FailoverPort final : public Port {
 public:
  // Without a daemon it begins alone; but settings that a daemon refuses are the caller's error.
  static Result<FailoverPortPtr> Open(FailoverOptions options);

  // A data set is the same when samples, place and `delay` are.
  Result<DatasetId> OpenDataset(std::shared_ptr<const Catalog> catalog,
                                const std::string& delay) override;
  void CloseDataset(DatasetId dataset) override;
  std::shared_ptr<const Catalog> Find(DatasetId dataset) override;
  Result<StreamId> OpenStream(const StreamOptions& options) override;
  // One that other processes fetch from, too, under its address. This port does not know how far
  // they are: where the stream moves it is opened without the orders declared before, and who has
  // declared them sees that its address has changed. It moves in calls that name it only.
  Result<StreamId> OpenSharedStream(const StreamOptions& options);
  // One that another process has opened. Where this port is not with that daemon, or not any more,
  // or the stream was closed, one of this port's own with these options takes its place.
  Result<StreamId> AdoptStream(const StreamOptions& options, StreamAddress address);
  // Where the stream is now. Notices a daemon that has ended, and moves the stream if it has to.
  Result<StreamAddress> Address(StreamId stream);
  Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last) override;
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position) override;
  Status CloseStream(StreamId stream) override;
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out) override;
  Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, BatchLoan* out) override;
  Status Release(LeaseId lease) override;
  // What was lent is asked for anew where the port moves; refused there, it is used all the same.
  Result<std::shared_ptr<void>> Lend(uint64_t bytes, uint64_t leave, Nanos wait) override;
  uint64_t budget() override;
  uint64_t sharers() override;
  DecodePool& decode_pool() override { return decoding_.pool; }
  Registry& registry() override { return decoding_.registry; }
  StallCause WaitCause(StreamId stream) override;
  Status Blocked(StreamId stream) override;
  void CountStall(StreamId stream, StallCause cause, Nanos waited) override;
  // Of all engines that the stream was with; an epoch that several have a part of is added up.
  Result<std::vector<EpochStats>> Stats(StreamId stream) override;
  Result<ChangedFilesOf> ChangedFiles(StreamId stream) override;
  std::string WaitingFor(StreamId stream) override;
  // Of the engine, and the port's own.
  Result<std::string> MetricsText() override;

  // What the daemon says of itself, as JSON; empty while the port is alone.
  Result<std::string> Describe();
  // Metrics of the port.
  const Registry& own_metrics() const { return own_metrics_; }
  // How often a Take found no batch announced by the daemon that the stream is with.
  uint64_t EmptyRings(StreamId stream);
  // The connection; null while the port is alone.
  std::shared_ptr<SocketPort> daemon();
  // The engine of this process, which is made if nobody has needed it yet; null while the port is
  // with a daemon, or when it cannot be made.
  std::shared_ptr<Engine> engine();
  // Tries to come back at once, not when it is due. Whether the port is with a daemon then.
  bool ComeBack();
  // Whether this is a forked child, which has no use for it.
  bool forked() const { return !Alive().ok(); }
  // Whether tries to come back are still to come.
  bool returning();
  // No further tries to come back.
  void StopReturning();

 private:
  // An engine that the port is or was with. Streams, loans and shares keep it.
  struct Backend {
    explicit Backend(std::shared_ptr<SocketPort> client);
    explicit Backend(EnginePtr own);
    bool lost() const { return daemon != nullptr && !daemon->connected(); }
    // Whom to ask for a sample. A connection carries one question at a time, and all other calls
    // would wait for its answer; so there is one more to the daemon for each fetch under way.
    std::shared_ptr<SocketPort> TakeLine();
    void PutLine(std::shared_ptr<SocketPort> line);
    // What was released on lines that nobody uses now; else it waits for their next fetch.
    void SendReleases();

    const std::shared_ptr<SocketPort> daemon;  // shared with who looks on; null: this process's own
    const std::shared_ptr<Engine> engine;      // likewise; null: the daemon's
    const std::shared_ptr<Port> port;          // of either
    Mutex mutex;                               // held while a data set is opened
    std::map<DatasetId, DatasetId> datasets GUARDED_BY(mutex);  // the port's number to its own
    Mutex lines_mutex;
    std::vector<std::shared_ptr<SocketPort>> lines GUARDED_BY(lines_mutex);  // free ones
  };

  // The right to take from a stream, and to move it: one thread at a time, in the order of asking.
  class CAPABILITY("mutex") Turn {
   public:
    void Enter() ACQUIRE();
    bool TryEnter();  // the analysis does not follow it
    void Leave() RELEASE();

   private:
    Mutex mutex_;
    std::condition_variable free_;
    uint64_t next_ GUARDED_BY(mutex_) = 0;
    uint64_t now_ GUARDED_BY(mutex_) = 0;
  };
  class SCOPED_CAPABILITY InTurn {
   public:
    struct Entered {};  // by TryEnter
    explicit InTurn(Turn& turn) ACQUIRE(turn) : turn_(turn) { turn_.Enter(); }
    InTurn(Turn& turn, Entered) ACQUIRE(turn) : turn_(turn) {}
    ~InTurn() RELEASE() { turn_.Leave(); }
    InTurn(const InTurn&) = delete;
    InTurn& operator=(const InTurn&) = delete;

   private:
    Turn& turn_;
  };

  struct Declared {
    uint64_t epoch = 0;
    std::vector<SampleId> order;
    bool last = false;
  };
  struct Stream {
    Stream(const StreamOptions& given, bool with_others)
        : options(given),
          shared(with_others),
          epoch(given.shape.first_epoch),
          position(given.shape.first_position) {}
    // Past the last epoch that was asked for.
    bool PastEnd() const REQUIRES(turn);

    const StreamOptions options;  // with the port's number of the data set
    const bool shared;            // others fetch from it, too
    std::atomic<bool> closed{false};

    Turn turn;  // before every lock of the port
    // Behind what was handed out last.
    uint64_t epoch GUARDED_BY(turn);
    uint64_t position GUARDED_BY(turn);
    bool ended GUARDED_BY(turn) = false;  // its end was handed out
    // Declared streams: the orders that are not over, the first one being the one under way.
    std::deque<Declared> orders GUARDED_BY(turn);
    uint64_t fetched GUARDED_BY(turn) = 0;  // of the first one, by itemised streams
    bool last_over GUARDED_BY(turn) = false;
    // An engine that got the rest of a declared order counts its batches from there.
    uint64_t rest_epoch GUARDED_BY(turn) = 0;
    uint64_t rest_index GUARDED_BY(turn) = 0;

    Mutex mutex;                                    // nothing else is taken under it
    std::shared_ptr<Backend> at GUARDED_BY(mutex);  // null: it was left, the next call opens it
    StreamId there GUARDED_BY(mutex) = 0;
    bool opened GUARDED_BY(mutex) = false;           // once, anywhere
    bool adopted GUARDED_BY(mutex) = false;          // what it is now, another process has opened
    std::vector<EpochStats> past GUARDED_BY(mutex);  // of engines that were left
  };
  struct Dataset {
    std::shared_ptr<const Catalog> catalog;
    std::string delay;
    uint64_t version = 0;
    std::string place = {};    // where links lead from its root
    uint64_t stamps_hash = 0;  // Catalog::StampsHash
    size_t users = 0;
  };
  struct Held {
    std::shared_ptr<Backend> at;
    std::shared_ptr<Port> port;  // its own, or a line to it
    LeaseId lease = kNoLease;
  };
  struct BudgetClaim {
    uint64_t bytes = 0;
    Mutex mutex;
    std::shared_ptr<Backend> at GUARDED_BY(mutex);
    std::shared_ptr<void> token GUARDED_BY(mutex);  // goes before its engine
  };

  explicit FailoverPort(FailoverOptions options);
  ~FailoverPort() override;
  friend struct FailoverPortDelete;

  // kCancelled in a forked child.
  Status Alive() const;
  std::shared_ptr<Stream> FindStream(StreamId id);
  // Where the port is now; makes an engine of this process where there is no daemon.
  Result<std::shared_ptr<Backend>> Now();
  // Notes that there is no daemon, and when to look for one again.
  void GoAlone() REQUIRES(mutex_);
  // The daemon has gone.
  void Lost(const std::shared_ptr<Backend>& at, const Status& why);
  // The daemon that the port came back to cannot serve this process, which stays alone.
  void Refused(const std::shared_ptr<Backend>& at, const Status& why);
  void Tell(FailoverEvent event, const std::string& what) const;
  // The thread that comes back; it ends when it has, or when no try is left.
  void Run(std::stop_token stop);
  void TryToReturn(std::stop_token stop);
  // The daemon that the port is with now; null: with none, or it was with one already.
  std::shared_ptr<Backend> Return(std::stop_token stop);
  // When it is due; kNever: no try is left.
  Nanos NextTry() const REQUIRES(mutex_);
  // Streams that nobody is in follow the port, so that the node does not spend two budgets; those
  // in use do so at their next call.
  void MoveIdle();
  void MoveShares();

  Result<DatasetId> DatasetAt(Backend& at, DatasetId dataset);
  // Where nobody uses it, and no stream: gives it back to every engine that has it. `also`: one
  // that a stream was with.
  void ForgetUnused(DatasetId dataset, std::shared_ptr<Backend> also);
  // Opens the stream where it stands.
  Result<StreamId> OpenAt(Backend& at, Stream& stream) REQUIRES(stream.turn);
  // Moves the stream to where the port is, if it has to; where it is then.
  Status Settle(Stream& stream, std::shared_ptr<Backend>* at, StreamId* there)
      REQUIRES(stream.turn);
  void Leave(Stream& stream) REQUIRES(stream.turn);
  Result<StreamId> Enlist(std::shared_ptr<Stream> stream);
  // Whether the stream was another process's; the next call opens one of this port's own.
  static bool Disown(Stream& stream);
  // `*at`: who was asked; null: nobody could be.
  Result<TakeKind> TakeOnce(Stream& stream, Nanos wait, BatchLoan* out,
                            std::shared_ptr<Backend>* at);
  void Note(Stream& stream, TakeKind kind, BatchLoan* out) REQUIRES(stream.turn);
  void NoteFetched(Stream& stream);
  // `*port`: who was asked, and lends the sample.
  static Result<TakeKind> FetchOnce(Backend& at, StreamId there, SampleId sample, Nanos wait,
                                    BatchLoan* out, std::shared_ptr<Port>* port);
  // The loan becomes one of this port.
  void Hold(Held held, StreamId id, const Stream& stream, BatchLoan* out);
  static void Where(Stream& stream, std::shared_ptr<Backend>* at, StreamId* there);

  // Constant after construction.
  const FailoverOptions options_;
  const uint64_t fork_generation_;
  OwnDecoding decoding_;
  Registry own_metrics_;
  Metric& failovers_total_;
  Metric& return_tries_total_;
  Metric& returns_total_;

  Mutex trying_;  // to come back; before every lock of the port
  Mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Backend> now_ GUARDED_BY(mutex_);   // null: alone, and nobody has asked yet
  std::weak_ptr<Backend> former_ GUARDED_BY(mutex_);  // of this process, before a daemon came back
  size_t tries_ GUARDED_BY(mutex_) = 0;               // to come back
  bool stopped_ GUARDED_BY(mutex_) = false;           // nobody wants it to come back
  Nanos due_ GUARDED_BY(mutex_);                      // the next one
  Nanos attached_at_ GUARDED_BY(mutex_) = 0;
  std::map<DatasetId, Dataset> datasets_ GUARDED_BY(mutex_);
  DatasetId next_dataset_ GUARDED_BY(mutex_) = 0;  // no number is used again
  std::map<StreamId, std::shared_ptr<Stream>> streams_ GUARDED_BY(mutex_);
  StreamId next_stream_ GUARDED_BY(mutex_) = 0;
  std::vector<std::weak_ptr<BudgetClaim>> shares_ GUARDED_BY(mutex_);

  Mutex leases_mutex_;  // nothing else is taken under it
  std::unordered_map<LeaseId, Held> leases_ GUARDED_BY(leases_mutex_);
  LeaseId next_lease_ GUARDED_BY(leases_mutex_) = 1;

  bool returning_ GUARDED_BY(mutex_) = false;   // there is a thread that looks for a daemon
  bool trying_now_ GUARDED_BY(mutex_) = false;  // it does, at this moment
  std::jthread thread_ GUARDED_BY(mutex_);
};

// Epochs of two engines in one list; the one that both have a part of is added up.
std::vector<EpochStats> MergeStats(std::vector<EpochStats> past, std::vector<EpochStats> now);

}  // namespace forebay
