// The connections of a node to the other members: who connects, proofs, beats, and their ends.
//
// Of two nodes the higher one connects, to the lower one's host and port; both prove the job's
// secret before anything is believed. Then the one who connected beats, five times a lease, and the
// other answers. What is said beyond that is the role's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/rng.h"
#include "base/status.h"
#include "peer/handshake.h"
#include "peer/membership.h"
#include "peer/membership_hosts.h"
#include "peer/membership_message.h"
#include "peer/membership_view.h"

namespace forebay::peer {

class Role;

struct Link {
  enum class Phase : uint8_t {
    kConnecting,  // connect() is under way
    kAnswer,      // said Hello, waits for the answer
    kHello,       // accepted, waits for Hello
    kProof,       // answered, waits for the proof
    kRegister,    // proven, waits for the other's registration
    kReady,
  };
  // Accepted, and the other has proven nothing.
  bool unproven() const { return accepted && phase <= Phase::kProof; }

  uint64_t id = 0;
  OwnedFd fd;
  bool accepted = false;
  std::string from;  // the other's address, without its port; accepted ones
  Phase phase = Phase::kHello;
  uint32_t node = 0;  // the other
  uint64_t incarnation = 0;
  std::optional<Handshake> handshake;  // once Hello was sent or came
  Nanos deadline = 0;  // of the phase; kReady: when the other is silent for too long
  Nanos next_beat = 0;
  uint64_t sent = 0;       // version of the table that the other has
  bool first_view = true;  // none of this connection has come
  bool writing = false;    // epoll watches for room
  std::string in;
  std::string out;
};

// A node that this one connects to.
struct Dial {
  uint32_t node = 0;
  HostPort at;
  std::optional<HostLookup> lookup;
  std::vector<HostAddress> addresses;
  size_t next_address = 0;
  uint64_t link = 0;     // 0: none
  bool reached = false;  // the last attempt: a process is there
  Nanos retry = 0;
  Nanos pause = 0;
  bool stopped = false;  // refused for good
  Nanos last_received = 0;
  Status last{Code::kUnavailable, "not asked yet"};
};

// Confined to the membership's thread once that runs, but for Wake.
class Links {
 public:
  Links(const MembershipOptions& options, PublishedView& published)
      : options_(options), published_(published) {}
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Before the thread: the role, which is told of all that happens, says where to listen and whom
  // to connect to.
  Status Open(Role* role);
  void ListenOn(const HostPort& at) { listen_at_ = at; }
  // At once, on a port that the system chooses; the members are told of it. False: health() says
  // why.
  bool ListenHere(const std::string& host);
  void StopListening();
  const std::string& own_at() const { return own_at_; }  // of ListenHere; empty: it does not
  // These two are for Begin and Tick: one dial a node. The first does nothing where there is such
  // a dial.
  void DialTo(uint32_t node, const HostPort& at);
  void EndDial(uint32_t node);

  // Ends the thread's wait; from any thread.
  void Wake();

  // One round of the thread: the time, what is due, and what comes. Between the last two the role
  // may send.
  void ReadClock() { now_ = SteadyClock().Now(); }
  void Advance();
  void Wait(int most_millis);
  int WaitMillis() const;
  // At the end.
  void SendLeaves();

  // For the role. Where a call returns false, the link is gone.
  Nanos now() const { return now_; }
  std::map<uint64_t, Link>& all() { return links_; }
  const std::vector<Dial>& dials() const { return dials_; }
  bool Send(Link& link, const frame::Frame& message);
  // Tells the other why, and closes.
  void SendLast(Link& link, const frame::Refused& refused);
  // Who has not proven itself, or sends what nobody sends.
  void Refuse(uint64_t id);
  void Close(uint64_t id, const Status& why);
  Identity self() const { return {options_.cluster.node, options_.self.incarnation}; }
  // What this node says of itself.
  frame::Register Own() const;
  // Both have registered.
  void Connected(Link& link);
  // Why there is no connection with a node, for health(); until there is one.
  void SetTrouble(uint32_t node, Status why);
  void ForgetTroubles() { troubles_.clear(); }
  // Whether it listens, then troubles.
  void PublishHealth();

 private:
  void Watch(int fd, uint64_t key, uint32_t events);
  void Listen();
  void Accept();
  Link& Add(OwnedFd fd);
  // Of those who have proven nothing, the one who goes for a new one; 0: all may stay.
  uint64_t OneTooMany();
  void Call(Dial& dial);
  void ConnectFailed(Dial& dial, int error);
  void Later(Dial& dial, Status why);
  Dial* DialOf(const Link& link);
  void KeepTime();
  bool IsCut(uint32_t node) const { return options_.cut && options_.cut(node); }
  bool Flush(Link& link);
  void End(Link& link);

  void OnReady(uint64_t id, uint32_t events);
  void Receive(uint64_t id);
  bool TakeFrames(uint64_t id);
  bool OnFrame(Link& link, frame::Frame& message);
  bool OnHello(Link& link, const frame::Hello& hello);
  bool OnAnswer(Link& link, const frame::Answer& answer);
  bool OnProven(Link& link, frame::Frame& message);
  void OnUnproven(const Link& link);

  static constexpr uint64_t kWakeKey = 0;
  static constexpr uint64_t kListenKey = 1;

  const MembershipOptions& options_;
  PublishedView& published_;
  Role* role_ = nullptr;
  OwnedFd epoll_;
  OwnedFd wake_;

  Nanos now_ = 0;
  std::optional<HostPort> listen_at_;
  std::string own_at_;  // of ListenHere
  OwnedFd listener_;
  std::optional<HostLookup> listen_lookup_;
  Nanos listen_retry_ = 0;
  Status listening_{Code::kUnavailable, "not listening yet"};
  std::map<uint32_t, Status> troubles_;  // by node
  Nanos listen_pause_ = 0;               // no descriptors: not watched until then
  std::map<uint64_t, Link> links_;       // by id: the oldest first
  uint64_t last_id_ = kListenKey;
  SplitMix64 draw_{0};  // seeded in Open
  std::vector<Dial> dials_;
  uint64_t refused_ = 0;
};

}  // namespace forebay::peer
