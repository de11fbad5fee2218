#include "peer/membership_table.h"

#include <algorithm>
#include <limits>

namespace forebay::peer {
namespace {
constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
}  // namespace

MemberTable::MemberTable(uint32_t nodes, Nanos lease)
    : nodes_(nodes), lease_(lease), entries_(nodes) {}

void MemberTable::RegisterSelf(const Member& self) {
  Entry& entry = entries_[self.node].emplace();
  entry.member = self;
  entry.member.alive = true;
  entry.deadline = kNever;
  Changed(entry);
}

Status MemberTable::Register(const Member& member, Nanos now) {
  if (member.node >= nodes_) {
    return Status(Code::kInvalidArgument, StrCat("there is no node ", member.node, " of ", nodes_));
  }
  std::optional<Entry>& place = entries_[member.node];
  if (!place) {
    place.emplace();
  } else if (place->deadline == kNever) {
    return Status(Code::kInvalidArgument, StrCat("node ", member.node, " is the one that you ask"));
  } else if (place->member.incarnation != member.incarnation) {
    if (std::find(place->replaced.begin(), place->replaced.end(), member.incarnation) !=
        place->replaced.end()) {
      return Status(Code::kChanged,
                    StrCat("another process has taken the place of node ", member.node));
    }
    if (place->member.alive) ++deaths_;
    place->replaced[place->next_replaced++ % place->replaced.size()] = place->member.incarnation;
  }
  place->deadline = now + lease_;
  Member next = member;
  next.alive = true;
  if (place->changed == 0 || !(place->member == next)) {
    place->member = next;
    Changed(*place);
  }
  return Status();
}

void MemberTable::Adopt(std::span<const Member> known, uint64_t version, Nanos now, bool revive) {
  Above(version);
  for (const Member& member : known) {
    if (member.node >= nodes_) continue;
    if (entries_[member.node]) {
      Entry& there = *entries_[member.node];
      if (!revive || there.member.alive || !member.alive ||
          there.member.incarnation != member.incarnation) {
        continue;
      }
      there.member.alive = true;
      there.deadline = now + lease_;
      Changed(there);
      continue;
    }
    Entry& entry = entries_[member.node].emplace();
    entry.member = member;
    entry.deadline = now + lease_;
    Changed(entry);
  }
}

void MemberTable::Above(uint64_t version) {
  // Nobody's word makes the count run over.
  if (version < std::numeric_limits<uint64_t>::max() / 2) version_ = std::max(version_, version);
}

MemberTable::Entry* MemberTable::Alive(uint32_t node, uint64_t incarnation) {
  if (node >= nodes_ || !entries_[node] || !entries_[node]->member.alive ||
      entries_[node]->member.incarnation != incarnation) {
    return nullptr;
  }
  return &*entries_[node];
}

void MemberTable::Renew(uint32_t node, uint64_t incarnation, Nanos now) {
  if (node >= nodes_ || !entries_[node]) return;
  Entry& entry = *entries_[node];
  if (entry.member.incarnation != incarnation || entry.deadline == kNever) return;
  entry.deadline = now + lease_;
  if (entry.member.alive) return;
  entry.member.alive = true;
  Changed(entry);
}

void MemberTable::Die(Entry& entry) {
  entry.member.alive = false;
  ++deaths_;
  Changed(entry);
}

void MemberTable::Gone(uint32_t node, uint64_t incarnation) {
  Entry* entry = Alive(node, incarnation);
  if (entry != nullptr && entry->deadline != kNever) Die(*entry);
}

bool MemberTable::Suspect(uint32_t node, uint64_t incarnation, Nanos now) {
  Entry* entry = Alive(node, incarnation);
  if (entry == nullptr) return false;
  entry->deadline =
      entry->deadline == kNever ? kNever : std::min(entry->deadline, now + lease_ / 4);
  return true;
}

void MemberTable::Expire(Nanos now) {
  for (std::optional<Entry>& entry : entries_) {
    if (entry && entry->member.alive && entry->deadline <= now) Die(*entry);
  }
}

const Member* MemberTable::Find(uint32_t node) const {
  return node < nodes_ && entries_[node] ? &entries_[node]->member : nullptr;
}

std::vector<Member> MemberTable::Since(uint64_t version) const {
  std::vector<Member> members;
  for (const std::optional<Entry>& entry : entries_) {
    if (entry && entry->changed > version) members.push_back(entry->member);
  }
  return members;
}

View MemberTable::Current() const {
  View view;
  view.version = version_;
  view.nodes = nodes_;
  view.members = Since(0);
  return view;
}

}  // namespace forebay::peer
