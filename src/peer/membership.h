// Membership: which nodes of the job are there, and where.
//
// Nothing else has to be started: node 0 listens for the others, or every node knows all addresses,
// or etcd's leases tell. A member that is silent for the lease is gone; one that comes back is a
// new incarnation. When node 0 is gone the lowest living node takes its part; while nobody can be
// reached the last view stays, and connections tell.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "core/view.h"
#include "peer/cluster.h"

namespace forebay::peer {

struct MembershipOptions {
  ClusterSpec cluster;
  Member self;
  Nanos lease = 5 * kSecond;  // silent for so long: dead
  std::string secret;         // of the job, see secret.h
  bool own_thread = true;     // false: it goes on in Step only, for simulators; not with etcd
  // kLauncher: the numeric address at which others reach this host. Empty: this node never takes
  // node 0's part.
  std::string host;
  std::string holder_file;  // kLauncher: tells late joiners who has taken it; empty: nothing does
  // For tests: the link to a node is cut. Called on the membership's thread.
  std::function<bool(uint32_t node)> cut = {};
  Status Validate() const;
};

// What has happened so far, for metrics and status.
struct MembershipCounts {
  uint64_t views = 0;     // changes of the view
  uint64_t deaths = 0;    // members that went without leaving, or left
  uint64_t contacts = 0;  // with the registrar, a peer or etcd: the first, and each new one
  uint64_t refused = 0;   // connections that did not prove the secret, or sent garbage
};

// Has threads of its own; calls are safe from any thread and never wait for the network.
class Membership {
 public:
  virtual ~Membership() = default;  // leaves: others see it at once
  virtual View Current() const = 0;
  // Readable (poll) after the view has changed, until Current is called.
  virtual int event_fd() const = 0;
  // A connection to the node failed: whoever decides looks again. `why` is for logs.
  virtual void Suspect(uint32_t node, uint64_t incarnation, const std::string& why) = 0;
  // The node has proven itself on a connection that this one made: ends a suspicion of its own.
  virtual void Trust(uint32_t node, uint64_t incarnation) = 0;
  // Ok, or why this node knows nothing new: "node 0 at 10.0.0.1:7421 does not answer".
  virtual Status health() const = 0;
  // "node 2 of 4 by torchrun's variables, registered with node 0 at 10.0.0.1:7421; 4 are there".
  virtual std::string Describe() const = 0;
  virtual MembershipCounts counts() const { return {}; }
  // Without own_thread: what that would do now. Returns for how long it would sleep then, unless
  // something comes.
  virtual Nanos Step() { return kSecond; }
  // Who keeps the list of members, of which this node is one, in words; empty: each for itself.
  virtual std::string Holder() const { return ""; }
};

// Returns at once; the view fills as members come. What goes wrong later (a port that is taken, a
// registrar that is not there) is health()'s, and is tried again. kNone is an error.
Result<std::unique_ptr<Membership>> Join(const MembershipOptions& options);

}  // namespace forebay::peer
