#include "peer/membership_role.h"

namespace forebay::peer {

OwnTable::OwnTable(const MembershipOptions& options, Links& links, PublishedView& published)
    : options_(options),
      links_(links),
      published_(published),
      table_(options.cluster.nodes, options.lease) {}

bool Fits(const MembershipOptions& options, Links& links, Link& link,
          const frame::Register& theirs) {
  if (theirs.member.node != link.node || theirs.member.incarnation != link.incarnation) {
    links.Refuse(link.id);
    return false;
  }
  if (theirs.nodes != options.cluster.nodes) {
    links.SendLast(link, frame::Refused{false, StrCat("the job has ", options.cluster.nodes,
                                                      " nodes here, not ", theirs.nodes)});
    return false;
  }
  return true;
}

void OwnTable::Begin(std::span<const Member> known) {
  // Above what the others know, by more than what a view of theirs may differ in.
  if (!known.empty()) table_.Above(published_.version() + options_.cluster.nodes);
  table_.RegisterSelf(links_.Own().member);
  if (!known.empty()) table_.Adopt(known, table_.version(), links_.now());
  published_.Publish(table_.Since(0), table_.version());
  links_.PublishHealth();
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
