// What a membership has published: its view, readable from any thread, and what it says of itself.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "peer/membership.h"

namespace forebay::peer {

// Safe for concurrent use by multiple threads.
class PublishedView {
 public:
  explicit PublishedView(uint32_t nodes);

  int event_fd() const { return event_.get(); }
  // Takes the event back.
  View Current();
  uint64_t version() const;
  // A new version where the members differ, of `version` at least.
  void Publish(std::vector<Member> members, uint64_t version);

  Status health() const;
  void SetHealth(Status health);
  // "4 are there" or "3 of 4 are there, node 2 is not".
  std::string Describe() const;
  MembershipCounts counts() const;
  void CountContact();
  void CountRefused(uint64_t total);

 private:
  const OwnedFd event_;
  mutable Mutex mutex_;
  View view_ GUARDED_BY(mutex_);
  Status health_ GUARDED_BY(mutex_);
  MembershipCounts counts_ GUARDED_BY(mutex_);
};

// What connections say of a member: that it is lost, or that it answers.
struct PeerOpinion {
  uint32_t node = 0;
  uint64_t incarnation = 0;
  bool trusted = false;
  std::string why;
};
// Opinions on their way to a membership's thread; of each node the last one counts.
void AddOpinion(PeerOpinion opinion, std::vector<PeerOpinion>* opinions);

// Members that this node gave up by itself while nobody else decides, until they answer: time alone
// would call the dead alive again, and every change is a new plan. Pure.
class OwnSuspicions {
 public:
  void OnOpinion(const PeerOpinion& opinion);
  void Clear() { list_.clear(); }
  // Marks those in `members` dead.
  void Apply(std::vector<Member>* members) const;

 private:
  std::map<uint32_t, uint64_t> list_;  // incarnations by node
};

// Each method's own; `options` are valid.
Result<std::unique_ptr<Membership>> JoinByNetwork(const MembershipOptions& options);
Result<std::unique_ptr<Membership>> JoinByEtcd(const MembershipOptions& options);

}  // namespace forebay::peer
