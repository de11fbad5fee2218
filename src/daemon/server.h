// Server: lends an engine to other processes of the same user, over a Unix socket.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "daemon/look_board.h"
#include "daemon/program_watch.h"
#include "daemon/stream_watch.h"
#include "metrics/registry.h"
#include "metrics/stall.h"
#include "stage/engine.h"
#include "wire/frame.h"
#include "wire/ring.h"

namespace forebay {

struct ServerOptions {
  // Its folder must belong to this user alone, or is made so. Empty: a new name in
  // $XDG_RUNTIME_DIR/forebay, or in /tmp/forebay-<uid>.
  std::string socket_path;
  size_t max_clients = 1024;
  size_t max_pending = 64;                     // waiting requests of one client
  size_t max_output_bytes = size_t{32} << 20;  // replies a client has not read
  // How long a request waits for memory that only unreleased loans hold, and how long at most when
  // they are mostly those of other clients.
  Nanos release_wait = 10 * kSecond;
  Nanos others_wait = 3 * kSecond;
  // Clients may add data sets of their own.
  bool open_datasets = false;
  // Loans stay made when the server ends: the engine's process ends with it, and clients go on
  // reading what they hold.
  bool keep_loans = false;
  // Set: the server ends by itself when nobody has been there for as long as it says. Asked by the
  // server's thread.
  std::function<Nanos()> linger;
  // Set: while it says so the server stays, also without clients. As `linger`.
  std::function<bool()> occupied;
  std::string settings;  // told to every client, see wire::HelloReply
  std::string url;       // where people can look at it; told in Describe
  // The node's policy as JSON, and what the control loop says of itself; asked by the server's
  // thread, so none of them may wait. Unset: there is no control loop.
  std::function<Status(const std::string&)> set_policy;
  std::function<std::string()> policy;
  std::function<std::string()> control;
  // Programs that open files by this engine; told of like clients. Outlives the server.
  ProgramWatch* programs = nullptr;
  Status Validate() const;
};

class Server;

// Deletes a server in the process that made it; in a forked child its thread does not exist and the
// socket's name is the parent's, so it is left alone.
struct ServerDelete {
  void operator()(Server* server) const;
};
using ServerPtr = std::unique_ptr<Server, ServerDelete>;

// Any client may Take and Fetch from any stream, but a stream with a ring is its opener's alone:
// its batches are lent and announced ahead of the asking, as far as an eighth of the arena goes,
// and each stream's even part of another eighth. Loans belong to the client that they were made to,
// streams to the client that opened them: both end with its connection or its process. A client
// that breaks the protocol or does not read its replies is disconnected.
class Server {
 public:
  // Listens when it returns. Replaces a socket that a dead process left behind; kUnavailable when
  // another one listens there. `engine` must outlive the server; it has at most one at a time.
  static Result<ServerPtr> Start(Engine& engine, const ServerOptions& options);
  // Disconnects every client, takes back their loans, and removes the socket.
  ~Server();

  const std::string& socket_path() const { return path_; }
  // Readable once the server has ended by itself: it takes no client any more.
  int ended_fd() const { return ended_.get(); }

  // For other threads; kUnavailable when the server's own does not come to it. What is going on, as
  // JSON (docs/daemon.md), and every metric as Prometheus text.
  Result<std::string> StatusJson() { return Render(kStatusView); }
  Result<std::string> MetricsText() { return Render(kPrometheusView); }

 private:
  // A stream whose batches are announced in memory that the client maps.
  struct Ring {
    Ring(StreamId id, wire::RingWriter made) : stream(id), writer(std::move(made)) {}
    struct Announced {
      LeaseId lease = kNoLease;  // kNoLease: an end, or an error
      uint64_t bytes = 0;
      uint64_t samples = 0;
      uint64_t epoch = 0;
      uint64_t index = 0;
      bool ends_epoch = false;
    };
    const StreamId stream;
    wire::RingWriter writer;
    std::deque<Announced> announced;  // as many as the writer has outstanding
    uint64_t batch_bytes = 0;         // of the last one; of a mean one before
    uint64_t ahead_bytes = 0;         // of all of them
    wire::RingPace pace;
    bool ended = false;
    bool failed = false;   // tried again when the client asks, not before
    bool waiting = false;  // for the engine
    Nanos wanted_since = -1;
    StallCause cause = StallCause::kSource;
    std::array<Nanos, kStallCauses> waits{};  // of the entry that is asked for, by cause
    Nanos blocked_since = -1;
  };
  // What Describe tells of a stream.
  struct StreamInfo {
    StreamOptions opened;  // as the client said it
    StreamWatch watch;
  };
  // A text that another thread asks for.
  enum View : uint8_t { kStatusView, kPrometheusView };
  static constexpr size_t kViews = 2;
  struct Asked {
    bool wanted = false;
    uint64_t version = 0;
    std::string text;
  };
  struct BudgetClaim {
    MemoryShare memory;
    uint64_t bytes = 0;
  };
  struct Peer {
    uint64_t id = 0;
    OwnedFd socket;
    OwnedFd process;  // readable once the client's process has ended; may be invalid
    bool greeted = false;
    bool viewer = false;  // it keeps nobody here
    bool gone = false;    // to be removed at the end of the round
    bool wants_room = false;
    wire::FrameReader in;
    std::vector<std::byte> out;
    size_t sent = 0;  // of `out`
    size_t pending = 0;
    std::unordered_map<LeaseId, uint64_t> leases;  // and their bytes
    std::map<StreamId, StreamInfo> streams;
    std::map<StreamId, std::unique_ptr<Ring>> rings;
    std::map<DatasetId, uint32_t> datasets;  // that it has open, and how often
    size_t opening = 0;                      // requests with the openers
    std::map<uint64_t, BudgetClaim> shares;  // of the budget, by number
    uint64_t next_share = 1;
    OwnedFd received;             // the descriptor that came last
    uint32_t pid = 0;             // as the client says
    std::vector<SampleId> order;  // the parts of a Declare so far
    bool declaring = false;
    StreamId declare_stream = 0;
    uint64_t declare_epoch = 0;
  };
  // A data set to be added, away from the thread that serves everybody: reading its catalog and
  // making its tables take seconds where it has 100 M samples.
  struct Opening {
    uint64_t peer = 0;
    uint64_t request = 0;
    wire::OpenDataset open;
    OwnedFd image;
  };
  struct Opened {
    uint64_t peer = 0;
    uint64_t request = 0;
    Result<DatasetId> dataset;
  };
  // A Take or Fetch that waits.
  struct Pending {
    Peer* peer = nullptr;
    uint64_t request = 0;
    bool fetch = false;
    StreamId stream = 0;
    SampleId sample = 0;
    LeaseId lease = kNoLease;  // of a Fetch that the engine works on
    Nanos deadline = 0;
    Nanos blocked_since = -1;
    Nanos since = -1;  // it waits, for `cause`
    StallCause cause = StallCause::kSource;
    std::array<Nanos, kStallCauses> waits{};  // before `since`
  };

  Server(Engine& engine, const ServerOptions& options);
  friend struct ServerDelete;
  Status Bind();

  void Run(std::stop_token stop);
  void Accept();
  void Read(Peer& peer);
  // An error is the peer's fault and ends its connection.
  Status OnFrame(Peer& peer, const wire::Frame& frame);
  Status OnHello(Peer& peer, const wire::Frame& frame);
  // What the request came to, for its reply.
  Status OnDeclare(Peer& peer, wire::Declare& declare);
  void OnOpenStream(Peer& peer, uint64_t request, const wire::OpenStream& open);
  Status OnOpenDataset(Peer& peer, uint64_t request, const wire::OpenDataset& open);
  void OnCloseDataset(Peer& peer, DatasetId dataset);
  Status StartOpener() REQUIRES(open_mutex_);
  void RunOpener(std::stop_token stop);
  Result<DatasetId> AddDataset(const wire::OpenDataset& open, int image);
  // Tells clients what the openers have done.
  void AnswerOpened();
  Status OnSeek(Peer& peer, const wire::Seek& seek);
  Status OnSetKnobs(const wire::SetKnobs& set);
  void OnQuery(Peer& peer, uint64_t request, const wire::Query& query);
  void OnStats(Peer& peer, uint64_t request, StreamId stream);
  void OnLend(Peer& peer, uint64_t request, const wire::Lend& lend);
  void OnStalled(Peer& peer, const wire::Stalled& stalled);
  void OnAskLook(Peer& peer, uint64_t request, const wire::AskLook& ask);
  Status OnHandInLook(Peer& peer, const wire::HandInLook& look);
  // Looks of clients that have ended by now, though nobody was told so yet.
  void DropLooksOfEnded(const Peer& asker);
  std::string Describe() const;
  std::string PrometheusText() const;
  // Of a stream as of now, a wait that is going on included.
  StreamWatch Watched(const Peer& peer, StreamId stream, Nanos now) const;
  // What a stream's job is called.
  static std::string JobOf(const Peer& peer, const StreamInfo& info);
  Result<std::string> Render(View view);
  void AnswerLooks();
  Status OnAsk(Peer& peer, Pending ask, int64_t wait);
  bool HasRing(StreamId stream) const;
  // Whose batches are announced, where the stream stands is its opener's to say.
  Status MayMove(const Peer& peer, StreamId stream) const;
  void Reply(Peer& peer, uint64_t request, const Status& status);
  void Flush(Peer& peer);
  // Asks the engine once; true when the request has its answer.
  bool Answer(Pending& ask, Nanos now);
  void Cancel(Pending& ask);
  void Retry();
  // Sees what the client took and gave back, and announces what is ready. An error is the client's.
  Status Pump(Peer& peer, Ring& ring, Nanos now);
  // Whether one more batch may be announced before it is asked for.
  bool MayGoAhead(const Ring& ring) const;
  void Forget(Ring& ring, const Ring::Announced& entry);
  // One more entry; false when nothing is ready or may be announced.
  bool Announce(Peer& peer, Ring& ring, Nanos now);
  // Ok while others than this client hold less than half of what is lent; else who holds most.
  Status HeldByOthers(const Peer& peer) const;
  void PumpAll();
  // Nobody is there, but for those who only look on.
  bool Deserted() const;
  void StayWhileOccupied(Nanos now);
  // How long a client is to be waited for; 0: nobody came for long enough.
  Nanos LingerLeft(Nanos now) const;
  // How long the thread may sleep as far as the rings go; 0 when one has news.
  Nanos SleepOnRings();
  int WaitForEvents(std::span<epoll_event> events, Nanos wait);
  // The client has taken it.
  static void CountTaken(Peer& peer, const Ring& ring, const Ring::Announced& entry);
  void ChargeWait(Peer& peer, Ring& ring, Nanos now);
  void ChargeWait(Pending& ask, Nanos now);
  // Of a stream that this client or another one has opened; null: the engine's own process did.
  StreamInfo* Find(Peer& peer, StreamId stream);
  static uint8_t MainCause(Ring& ring);
  // Takes back what was announced and not taken.
  void DropAnnounced(Peer& peer, Ring& ring);
  void DropRing(Peer& peer, StreamId stream);
  void MarkGone(Peer& peer);
  // Takes back what those who are gone held.
  void RemoveGone();

  // Constant after Start.
  Engine& engine_;
  const ServerOptions options_;
  const uint64_t fork_generation_;
  std::string path_;
  std::string folder_;  // to be removed at the end; empty when it is not ours
  bool bound_ = false;
  OwnedFd arena_;  // opened for reading only
  OwnedFd listen_;
  OwnedFd epoll_;
  OwnedFd wake_;
  OwnedFd ended_;
  Metric& clients_;
  Metric& dropped_total_;
  Metric& served_total_;
  Metric& passed_total_;
  Metric& fetch_wait_total_;
  Metric& ready_batches_;
  Metric& rings_;
  Metric& looks_handed_in_total_;
  Metric& looks_taken_total_;
  Metric& look_bytes_;
  const Nanos started_;
  const uint64_t ahead_limit_;  // bytes that may be announced and not taken

  // The thread's own.
  std::unordered_map<uint64_t, std::unique_ptr<Peer>> peers_;
  std::vector<Pending> pending_;  // in order of arrival
  uint64_t next_id_;
  bool some_gone_ = false;
  Nanos accept_again_ = 0;  // not 0: out of descriptors until then
  BatchLoan loan_;
  wire::Loan reply_;
  std::vector<uint64_t> released_;
  LookBoard board_;
  uint64_t ahead_bytes_ = 0;
  size_t ring_count_ = 0;
  bool pressed_ = false;     // somebody waits for memory that only loans hold
  Nanos idle_since_;         // counts while there is no client
  bool had_client_ = false;  // the first is waited for longer

  Mutex look_mutex_;
  std::condition_variable looked_;
  std::array<Asked, kViews> asked_ GUARDED_BY(look_mutex_);

  static constexpr size_t kMostOpeners = 4;
  Mutex open_mutex_;
  std::condition_variable_any open_ready_;
  std::deque<Opening> openings_ GUARDED_BY(open_mutex_);  // at most one of each client
  std::vector<Opened> opened_ GUARDED_BY(open_mutex_);
  size_t idle_openers_ GUARDED_BY(open_mutex_) = 0;
  std::vector<std::jthread> openers_ GUARDED_BY(open_mutex_);

  std::jthread thread_;
};

}  // namespace forebay
