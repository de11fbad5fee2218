// What a node is among the members: the registrar, one that registers with it, or one of a static
// list, where each keeps the table for itself.
#pragma once

#include <cstdint>
#include <memory>
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
  // Any message has come over it.
  virtual void OnTraffic(const Link& /*link*/) {}
  // Any message but beats and farewells.
  virtual bool OnMessage(Link& link, const frame::Frame& message) = 0;
  // A link has ended after both had registered.
  virtual void OnEnd(const Link& /*link*/) {}
  // The one that this node connects to has left, or its host is there and its process is not.
  virtual void OnLost() {}
  virtual void OnUnreached(const Dial& /*dial*/) {}
};

// All three borrow their arguments.
std::unique_ptr<Role> MakeRegistrar(const MembershipOptions& options, Links& links,
                                    PublishedView& published);
std::unique_ptr<Role> MakeRegistered(const MembershipOptions& options, Links& links,
                                     PublishedView& published);
std::unique_ptr<Role> MakeListed(const MembershipOptions& options, Links& links,
                                 PublishedView& published);

// The table of a node that decides by itself who is there, fed by its links.
class OwnTable {
 public:
  OwnTable(const MembershipOptions& options, Links& links, PublishedView& published);

  MemberTable& table() { return table_; }
  const MemberTable& table() const { return table_; }
  // This node itself, before anybody has come.
  void Begin();
  // Whether it is who it said, of the same job. False, here and below: the link is gone.
  bool Fits(Link& link, const frame::Register& theirs);
  // Into the table; an older connection of the same node is closed.
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
