#include "peer/membership_role.h"

namespace forebay::peer {

OwnTable::OwnTable(const MembershipOptions& options, Links& links, PublishedView& published)
    : options_(options),
      links_(links),
      published_(published),
      table_(options.cluster.nodes, options.lease) {}

void OwnTable::Begin() {
  table_.RegisterSelf(options_.self);
  published_.Publish(table_.Since(0), table_.version());
  published_.SetHealth(Status(Code::kUnavailable, "not listening yet"));
}

bool OwnTable::Fits(Link& link, const frame::Register& theirs) {
  if (theirs.member.node != link.node || theirs.member.incarnation != link.incarnation) {
    links_.Refuse(link.id);
    return false;
  }
  if (theirs.nodes != options_.cluster.nodes) {
    links_.SendLast(link, frame::Refused{false, StrCat("the job has ", options_.cluster.nodes,
                                                       " nodes here, not ", theirs.nodes)});
    return false;
  }
  return true;
}

bool OwnTable::Admit(Link& link, const frame::Register& theirs) {
  const Status status = table_.Register(theirs.member, links_.now());
  if (!status.ok()) {
    links_.SendLast(link, frame::Refused{status.code() == Code::kChanged, status.message()});
    return false;
  }
  // An older connection is a process that was replaced, or has lost its way.
  for (auto& [id, other] : links_.all()) {
    if (id == link.id || other.node != link.node || other.phase < Link::Phase::kRegister) continue;
    const bool same = other.incarnation == link.incarnation;
    other.incarnation = 0;  // its end is nobody's death
    if (!same) {
      links_.SendLast(other, frame::Refused{true, StrCat("another process has taken the place of "
                                                         "node ",
                                                         link.node)});
    } else {
      links_.Close(other.id, Status(Code::kCancelled, "it has connected anew"));
    }
    break;
  }
  return true;
}

void OwnTable::OnOpinion(const PeerOpinion& opinion) {
  if (opinion.node == options_.cluster.node || opinion.trusted) return;
  if (!table_.Suspect(opinion.node, opinion.incarnation, links_.now())) return;
  for (auto& [id, link] : links_.all()) {
    if (link.phase != Link::Phase::kReady || link.node != opinion.node) continue;
    if (link.out.empty()) (void)links_.Send(link, frame::Beat{});
    return;
  }
}

void OwnTable::PublishIfChanged() {
  if (published_.version() >= table_.version()) return;
  published_.Publish(table_.Since(0), table_.version());
}

}  // namespace forebay::peer
