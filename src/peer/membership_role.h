// What a node is among the members: under a launcher it holds the list or registers with whoever
// does; in a static list each keeps the table for itself.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/clock.h"
#include "peer/membership.h"
#include "peer/membership_links.h"
#include "peer/membership_message.h"
#include "peer/membership_table.h"
#include "peer/membership_view.h"

namespace forebay::peer {

// Confined to the membership's thread, but for Describe. Calls that return false have ended the
// link.
class Role {
 public:
  virtual ~Role() = default;
  // "registrar at 10.0.0.1:7421".
  virtual std::string Describe() const = 0;
  // Before the thread runs: where to listen, whom to connect to, and what is known at once.
  virtual void Begin() = 0;
  // After each round: what is due, and the view where it has changed.
  virtual void Tick() = 0;
  // What this node's own connections say of another member.
  virtual void OnOpinion(const PeerOpinion& opinion) = 0;

  // The version that an answer to Hello carries.
  virtual uint64_t version() const { return 0; }
  // Who answers has proven itself: adds to what this node registers with.
  virtual void OnAnswer(const frame::Answer& /*answer*/, frame::Register* /*own*/) {}
  // Over a link whose other side has proven itself.
  virtual bool OnRegister(Link& link, const frame::Register& theirs) = 0;
  // The other side does not register: its first message stands for that.
  virtual bool registers_alone() const { return false; }
  // Of two nodes not only the higher one may connect.
  virtual bool any_may_connect() const { return false; }
  // Who connects with a wrong secret is this node's trouble.
  virtual bool decides() const { return true; }
  // Any message has come over it.
  virtual void OnTraffic(const Link& /*link*/) {}
  // Any message but beats and farewells.
  virtual bool OnMessage(Link& link, const frame::Frame& message) = 0;
  // A link has ended after both had registered.
  virtual void OnEnd(const Link& /*link*/) {}
  // One that this node connects to has left, or its host is there and its process is not.
  virtual void OnLost(uint32_t /*node*/) {}
  virtual void OnUnreached(const Dial& /*dial*/) {}
};

// Both borrow their arguments.
std::unique_ptr<Role> MakeLaunched(const MembershipOptions& options, Links& links,
                                   PublishedView& published);
std::unique_ptr<Role> MakeListed(const MembershipOptions& options, Links& links,
                                 PublishedView& published);

// Whether who registers is who it said, of the same job. False: the link is gone.
bool Fits(const MembershipOptions& options, Links& links, Link& link,
          const frame::Register& theirs);

// The table of a node that decides by itself who is there, fed by its links.
class OwnTable {
 public:
  OwnTable(const MembershipOptions& options, Links& links, PublishedView& published);

  MemberTable& table() { return table_; }
  const MemberTable& table() const { return table_; }
  // This node itself, before anybody has come, and what it knows from the view that there was.
  void Begin(std::span<const Member> known = {});
  // Into the table; an older connection of the same node is closed. False: the link is gone.
  bool Admit(Link& link, const frame::Register& theirs);
  // Looks at once whether the member is still there.
  void OnOpinion(const PeerOpinion& opinion);
  void PublishIfChanged();

 private:
  const MembershipOptions& options_;
  Links& links_;
  PublishedView& published_;
  MemberTable table_;
};

}  // namespace forebay::peer
