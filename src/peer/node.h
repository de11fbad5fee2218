// Node: the peer thread. It alone talks to the transport: asks other nodes for this one's sources,
// serves them from the engine, and keeps the plan up with who is there.
//
// For every pair of nodes there are two connections, one for each direction of asking: who connects
// asks, who accepted serves and tells what it holds. A connection does nothing before both sides
// have proven the job's secret.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/slots.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "core/directory.h"
#include "core/turns.h"
#include "metrics/registry.h"
#include "peer/exchange.h"
#include "peer/handshake.h"
#include "peer/membership.h"
#include "peer/message.h"
#include "peer/peers.h"
#include "peer/plan_worker.h"
#include "peer/requests.h"
#include "peer/sample_names.h"
#include "stage/engine.h"
#include "transport/transport.h"

namespace forebay::peer {

// What Attach makes from the options, and tests make themselves.
struct NodeParts {
  std::string secret;
  std::function<Result<std::unique_ptr<Transport>>(TransportHandler&)> transport;
  std::function<Result<std::unique_ptr<Membership>>(const Member& self)> membership;
  // Set by making the transport (MakeTransport); shared with the function that makes it.
  std::shared_ptr<std::string> trust = std::make_shared<std::string>();
  uint64_t corrupt_every = 0;  // a bit of every nth reply is flipped, for tests; 0: none
  bool own_thread = true;      // false: the node goes on in Step only, for simulators
};

Result<std::unique_ptr<Peers>> AttachWith(Engine& engine, const PeerOptions& options,
                                          NodeParts parts);

struct PeerMetrics {
  PeerMetrics(Registry& registry, const PeerOptions& options);
  Mechanism& mechanism;
  Metric& served;
  Metric& served_bytes;
  Metric& timeouts;
  Metric& refused;
  Metric& corrupt;
  Metric& lost;
  Metric& avoided;
  Metric& strangers;
  Metric& pulled;
  Metric& connected;
  Metric& alive;
  Metric& unkept;
  Metric& planned;
  Metric& deaths;
  Knob& bytes_per_second;
  Knob& link_bytes_per_second;
  Knob& requests;
  Knob& pull;
};

class Node final : public Peers, private TransportHandler {
 public:
  Node(Engine& engine, const PeerOptions& options, NodeParts parts);
  ~Node() override;
  Status Start();
  // Without own_thread: one round of what that would do now. Returns for how long it would sleep
  // then, unless woken; 0: there is more to do.
  Nanos Step() { return Round(); }
  // A descriptor that ends such a sleep is readable.
  bool Woken() const;
  Membership& membership() { return *membership_; }
  // The plan of a fixed data set; nothing: there is none yet.
  std::optional<Directory> PlanOf(DatasetId dataset) const;

  std::vector<PeerStatus> Seen() const override;
  std::string Describe() const override;
  std::string Trust() const override { return *parts_.trust; }

 private:
  static constexpr size_t kMostServes = 512;

  // What this node has to do with another one.
  struct Other {
    Member member;
    bool known = false;      // in the view, and alive
    bool suspected = false;  // by this node only: tried again
    // Asking: the connection that this node made.
    ConnectionId out = 0;
    bool out_ready = false;
    bool was_ready = false;    // and is not any more: nobody waits for it
    bool went_silent = false;  // and has not been reached since
    Nanos retry_at = 0;
    Nanos backoff = 0;
    Nanos last_received = 0;
    Nanos pinged = 0;
    Nanos oldest = 0;   // since when something is under way without an answer
    Nanos gave_up = 0;  // the last request that took too long
    std::map<uint64_t, DatasetMessage> theirs;  // by name
    std::set<uint64_t> announced;               // of these, whose held samples it has announced
    std::map<uint64_t, PlanMessage> plans;      // of these, its last plan
    std::deque<uint32_t> queue;                 // requests that wait for credit
    size_t flying = 0;
    uint64_t flying_bytes = 0;
    // Serving: the connection that it made.
    ConnectionId in = 0;
    size_t gather = SIZE_MAX;  // buffer that small samples are gathered in
    uint64_t gathered = 0;
    DataMessage gather_message;
    PeerStatus seen;
  };
  struct Connection {
    bool asking = false;  // made by this node
    uint32_t node = kNoNode;
    bool open = false;
    bool closing = false;
    Nanos since = 0;
    std::optional<Handshake> handshake;
    std::string why;    // it is being closed
    bool late = false;  // closed for a request that took too long
  };
  struct PeerDatasetState {
    std::shared_ptr<PeerDataset> dataset;
    bool ready = false;  // the engine has it
    bool left = false;   // and has it no more for other nodes
    StreamId serving = 0;
    std::optional<Directory> early;   // before the first plan; growing: none
    std::optional<NamedHomes> homes;  // growing
    // Homes by use: what was asked for last, the plan of it once there is one, and the plan in use.
    std::optional<HomePlanSpec> wanted;
    // Both shared with the directories that adopt them.
    std::shared_ptr<const HomePlan> plan;
    std::shared_ptr<const HomePlan> in_use;
    bool plan_told = false;         // to the others: they may take it into use
    Nanos tell_at = 0;              // when that is looked at again
    Nanos adopted_at = 0;           // when in_use came into use
    uint64_t home_bytes = 0;        // of this node, as planned
    std::vector<std::byte> held;    // bit by sample
    std::vector<Answer> answers;    // to be delivered
    std::vector<Turn> early_turns;  // asked before the first plan
    Nanos pull_at = 0;
    Nanos pull_pause = 0;
  };
  // A sample on its way to a peer, or pulled for this node.
  struct Serve {
    enum class At : uint8_t { kFree, kReading, kSending } at = At::kFree;
    Turn turn;
    ConnectionId connection = 0;
    bool pull = false;
    LeaseId lease = kNoLease;
    BatchLoan loan;
    std::vector<std::byte> damaged;  // a copy with a flipped bit, for tests
  };
  // A payload: one sample, or small ones together.
  struct Gathered {
    std::unique_ptr<std::byte[]> bytes;
    uint64_t size = 0;
    std::vector<Given> given;
    std::optional<uint32_t> crc;  // of the one sample, if this node has copied it
  };

  // TransportHandler
  void OnOpen(ConnectionId connection, bool accepted) override;
  void OnClosed(ConnectionId connection, const Status& why) override;
  std::span<std::byte> OnMessage(ConnectionId connection, std::span<const std::byte> header,
                                 uint64_t payload_bytes, uint64_t* tag) override;
  void OnCopy(uint64_t tag, std::span<std::byte> place,
              std::span<const std::byte> payload) override;
  void OnPayload(ConnectionId connection, uint64_t tag, const Status& status) override;
  void OnSent(ConnectionId connection, uint64_t tag, const Status& status) override;

  void Run(const std::stop_token& stop);
  Nanos Round();
  void Tick(Nanos now);
  void Shutdown();

  // Connections and the view.
  void TakeView(Nanos now);
  void Forget(uint32_t node, const std::string& why, uint64_t incarnation = 0);
  void Reconnect(Nanos now);
  Nanos SilencePatience(const Other& other) const;
  void CheckSilence(Nanos now);
  void Close(ConnectionId connection, const std::string& why);
  void CloseOldestStranger();
  bool Send(ConnectionId connection, const Message& message);
  void Shake(ConnectionId id, Connection& connection, const Message& message, bool payload);
  void Proven(ConnectionId id, Connection& connection);
  void LostOut(uint32_t node);
  void Fault(uint32_t node, std::string what);
  void Publish();

  // Data sets.
  void AddDatasets(std::vector<std::shared_ptr<PeerDataset>>& datasets);
  // Ends what others read of data sets that this node has closed, and forgets those.
  void LeaveDatasets();
  void Leave(uint32_t number, PeerDatasetState& state);
  void ReadyDatasets();
  void PlanDatasets(Nanos now);
  void Plan(uint32_t number, Directory plan);
  void PlanGrowing(uint32_t number);
  // Homes by use (docs/decisions/0065): asks for plans, tells of those that are there, and takes
  // one into use once every node that is alive has the same.
  void WantPlans(Nanos now);
  void TakePlans();
  void TellPlan(uint32_t node, uint32_t number);
  void TellPlansInTime(Nanos now);
  // Whether nothing loses its room when the plan is taken into use now.
  bool LosesNothing(const PeerDatasetState& state) const;
  // What `node` has told of that plan; null: nothing.
  const PlanMessage* PlanOf(const PeerDatasetState& state, uint32_t node, uint64_t digest) const;
  void AdoptIfAgreed(uint32_t number);
  // Once both place by the same plan, each tells the other all that it has: only that is kept.
  void OnPlanUsed(PeerDatasetState& state, uint32_t number, uint32_t node);
  void AdoptPlan(uint32_t number);
  // Another node uses this plan, so all have it.
  void OnPlanInUse(PeerDatasetState& state, uint32_t number, uint64_t digest);
  void ServeEarly(PeerDatasetState& state);
  void UpdateReach(uint32_t node);
  void Announce(uint32_t node, uint32_t number);
  void AnnounceHeld(Nanos now);
  void LetGo(PeerDatasetState& state);
  void AnnounceChanges(uint32_t number, const HeldChanges& changes);
  void NoteHeld(PeerDatasetState& state, const HeldChanges& changes);
  void SendHave(ConnectionId connection, uint32_t number, bool all);
  void Correct(PeerDatasetState& state, const std::function<void(Directory&)>& change);
  PeerDatasetState* DatasetOf(uint32_t node, uint32_t their_number);

  // Asking.
  void Enqueue(std::vector<Ask>& asks);
  void SendAsks(Nanos now);
  void SendAsksTo(uint32_t node);
  void GiveUpLate(Nanos now);
  void End(uint32_t id, Outcome outcome, uint32_t crc = 0);
  void EndAllOf(uint32_t node, ConnectionId connection, Outcome outcome);
  std::span<std::byte> OnData(ConnectionId id, const DataMessage& data, uint64_t payload_bytes,
                              uint64_t* tag);
  void OnRefused(ConnectionId id, const RefusedMessage& refused);
  void Deliver(bool more, Nanos now);

  // Serving.
  void OnGet(ConnectionId id, uint32_t node, const GetMessage& get);
  void OnGetNamed(ConnectionId id, uint32_t node, const GetNamedMessage& get);
  // This node's number of it, which it gets now where it is new; what others know by another home
  // is refused.
  struct Resolved {
    std::optional<SampleId> sample = std::nullopt;
    Refusal why = Refusal::kNoSuchSample;
  };
  Resolved Resolve(PeerDatasetState& state, const FileSample& wanted);
  void OnCancel(uint32_t node, uint32_t request);
  // Ends what this node has asked the asker for before the plan in use: the same sample, whose home
  // it is itself now. Each would wait for the other.
  void EndCrossing(const PeerDatasetState& state, const Turn& turn);
  void DropServing(uint32_t node, ConnectionId id);
  Nanos TurnAt() const;
  void TakeTurns(Nanos now);
  void StartServe(const Turn& turn);
  void Refuse(const Turn& turn, Refusal why);
  bool Holds(const PeerDatasetState& state, SampleId sample) const;
  void PollServe(size_t serve);
  void PollReading();
  void Reply(size_t serve);
  bool Gather(Serve& serve, std::span<const std::byte> bytes, uint32_t crc);
  void FlushGather(uint32_t node);
  void EndServe(size_t serve);
  size_t NewServe();
  void Pull(Nanos now);
  uint64_t Room() const;
  // Of what lives here: for how much the tiers have no room.
  uint64_t UnkeptBytes() const;

  Engine& engine_;
  const PeerOptions options_;
  const uint32_t self_;
  const uint32_t nodes_;
  const Identity identity_;
  const pid_t creator_;
  NodeParts parts_;
  PeerMetrics metrics_;
  const std::shared_ptr<Exchange> exchange_;  // shared with the sources, which outlive this
  const Nanos attached_;

  // Peer thread only, from Start on.
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Membership> membership_;
  View view_;
  MembershipCounts counted_;  // in the metrics already
  uint64_t counted_strangers_ = 0;
  bool planned_ = false;
  std::unique_ptr<PlanWorker> plan_worker_;
  Nanos plans_at_ = 0;  // when streams are looked at for plans again
  std::vector<Other> others_;
  std::unordered_map<ConnectionId, Connection> connections_;
  size_t strangers_ = 0;  // accepted connections that have proven nothing
  // By the number that others know it by, which is never used again.
  std::map<uint32_t, PeerDatasetState> datasets_;
  uint32_t next_dataset_ = 0;
  Requests requests_;
  std::vector<uint32_t> asking_;  // nodes whose queue is not empty
  size_t answers_ = 0;            // not delivered yet
  Nanos deliver_at_ = 0;
  Slots<Gathered> gathered_;
  Turns turns_;
  Slots<Serve> serves_;
  std::vector<size_t> reading_;
  Slots<std::unique_ptr<std::byte[]>> send_buffers_;  // null: never used
  std::vector<uint32_t> gathering_;                   // nodes with a reply to be flushed
  uint64_t pinned_ = 0;                               // bytes of samples that are being served
  size_t pulls_ = 0;
  uint64_t replies_ = 0;
  uint64_t knobs_seen_ = 0;
  Nanos tick_at_ = 0;
  Nanos held_at_ = 0;
  // What was asked and handed over since the last round; kept for their memory.
  std::vector<Ask> asks_;
  std::vector<std::shared_ptr<PeerDataset>> new_datasets_;
  bool slept_ = true;

  mutable Mutex mutex_;
  std::vector<PeerStatus> seen_ GUARDED_BY(mutex_);
  std::string reached_by_ GUARDED_BY(mutex_);  // the nodes, and where this one serves
  std::string describe_ GUARDED_BY(mutex_);
  std::string health_ GUARDED_BY(mutex_);

  std::jthread thread_;
};

}  // namespace forebay::peer
