#include "peer/membership.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "peer/membership_message.h"
#include "peer/membership_view.h"

namespace forebay::peer {

Status MembershipOptions::Validate() const {
  const auto wrong = [](std::string why) { return Status(Code::kInvalidArgument, std::move(why)); };
  FOREBAY_RETURN_IF_ERROR(cluster.Validate());
  if (cluster.method == ClusterSpec::Method::kNone) return wrong("there is one node only");
  if (self.node != cluster.node) {
    return wrong(StrCat("node ", self.node, " is not node ", cluster.node, " of the cluster"));
  }
  if (self.incarnation == 0) return wrong("an incarnation is a number above 0");
  if (self.address.empty() || self.address.size() > frame::kLongestAddress) {
    return wrong(StrCat("the transport's address '", self.address, "' is too short or too long"));
  }
  if (lease < 10 * kMilli || lease > 3600 * kSecond) {
    return wrong("a lease is from 10 ms to an hour");
  }
  if (secret.size() < 32) return wrong("the job's secret is shorter than 32 bytes");
  return Status();
}

Result<std::unique_ptr<Membership>> Join(const MembershipOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  return options.cluster.method == ClusterSpec::Method::kEtcd ? JoinByEtcd(options)
                                                              : JoinByNetwork(options);
}

PublishedView::PublishedView(uint32_t nodes) : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  view_.nodes = nodes;
}

View PublishedView::Current() {
  MutexLock lock(mutex_);
  uint64_t count = 0;
  (void)!::read(event_.get(), &count, sizeof count);
  return view_;
}

uint64_t PublishedView::version() const {
  MutexLock lock(mutex_);
  return view_.version;
}

void PublishedView::Publish(std::vector<Member> members, uint64_t version) {
  MutexLock lock(mutex_);
  if (members == view_.members) {
    view_.version = std::max(view_.version, version);
    return;
  }
  auto before = view_.members.begin();  // both are by node
  for (const Member& member : members) {
    while (before != view_.members.end() && before->node < member.node) ++before;
    if (before != view_.members.end() && before->node == member.node && before->alive &&
        (!member.alive || before->incarnation != member.incarnation)) {
      ++counts_.deaths;
    }
  }
  view_.members = std::move(members);
  view_.version = std::max(view_.version + 1, version);
  ++counts_.views;
  const uint64_t one = 1;
  (void)!::write(event_.get(), &one, sizeof one);
}

Status PublishedView::health() const {
  MutexLock lock(mutex_);
  return health_;
}

void PublishedView::SetHealth(Status health) {
  MutexLock lock(mutex_);
  health_ = std::move(health);
}

std::string PublishedView::Describe() const {
  MutexLock lock(mutex_);
  std::string absent;
  uint32_t there = 0;
  size_t named = 0;
  auto at = view_.members.begin();
  for (uint32_t node = 0; node < view_.nodes; ++node) {
    const bool known = at != view_.members.end() && at->node == node;
    const bool alive = known && at->alive;
    if (known) ++at;
    if (alive) {
      ++there;
    } else if (++named <= 8) {
      absent += StrCat(absent.empty() ? " " : ", ", node);
    } else if (named == 9) {
      absent += ", ...";
    }
  }
  if (there == view_.nodes) return StrCat("all ", there, " are there");
  return StrCat(there, " of ", view_.nodes, " are there, not node", named > 1 ? "s" : "", absent);
}

MembershipCounts PublishedView::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

void PublishedView::CountContact() {
  MutexLock lock(mutex_);
  ++counts_.contacts;
}

void PublishedView::CountRefused(uint64_t total) {
  MutexLock lock(mutex_);
  counts_.refused = total;
}

void AddOpinion(PeerOpinion opinion, std::vector<PeerOpinion>* opinions) {
  std::erase_if(*opinions, [&](const PeerOpinion& one) { return one.node == opinion.node; });
  opinions->push_back(std::move(opinion));
}

void OwnSuspicions::OnOpinion(const PeerOpinion& opinion) {
  if (!opinion.trusted) {
    list_[opinion.node] = opinion.incarnation;
    return;
  }
  const auto at = list_.find(opinion.node);
  if (at != list_.end() && at->second == opinion.incarnation) list_.erase(at);
}

void OwnSuspicions::Apply(std::vector<Member>* members) const {
  for (Member& member : *members) {
    const auto at = list_.find(member.node);
    if (at == list_.end() || at->second != member.incarnation || !member.alive) continue;
    member.alive = false;
    member.suspected = true;
  }
}

}  // namespace forebay::peer
