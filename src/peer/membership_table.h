// MemberTable: the registrar's knowledge of who is there. Times are given.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "peer/membership.h"

namespace forebay::peer {

// Pure: no clock, thread or I/O. Every change gives the view a new version.
class MemberTable {
 public:
  MemberTable(uint32_t nodes, Nanos lease);

  // The table's own node; never expires.
  void RegisterSelf(const Member& self);
  // Somebody is there: new, back with a new incarnation, or again as before. kChanged: another
  // process has taken its place since.
  Status Register(const Member& member, Nanos now);
  // What a member knows from before this table was made. It is believed for a lease, so that a
  // registrar that was started anew goes on with the view that there was. `revive`: so are those
  // that this table calls dead.
  void Adopt(std::span<const Member> known, uint64_t version, Nanos now, bool revive = false);
  // Versions from now on are above it.
  void Above(uint64_t version);
  // A message of it has come: its lease begins anew. One that was too late lives again: while its
  // connection holds it has no reason to register once more.
  void Renew(uint32_t node, uint64_t incarnation, Nanos now);
  // It has left, or its connection has ended.
  void Gone(uint32_t node, uint64_t incarnation);
  // Unless it is heard of within a quarter of the lease it is dead. True: it is alive so far.
  bool Suspect(uint32_t node, uint64_t incarnation, Nanos now);
  // Those that were silent for the lease are dead.
  void Expire(Nanos now);

  uint64_t version() const { return version_; }
  const Member* Find(uint32_t node) const;
  // Those that have changed since that version, by node.
  std::vector<Member> Since(uint64_t version) const;
  View Current() const;
  uint64_t deaths() const { return deaths_; }

 private:
  struct Entry {
    Member member;
    uint64_t changed = 0;  // version of the last change
    Nanos deadline = 0;
    std::array<uint64_t, 4>
        replaced{};  // its last incarnations; a late message of theirs is refused
    size_t next_replaced = 0;
  };
  void Changed(Entry& entry) { entry.changed = ++version_; }
  void Die(Entry& entry);
  // Null: no such member, or another incarnation.
  Entry* Alive(uint32_t node, uint64_t incarnation);

  const uint32_t nodes_;
  const Nanos lease_;
  std::vector<std::optional<Entry>> entries_;  // by node
  uint64_t version_ = 0;
  uint64_t deaths_ = 0;
};

}  // namespace forebay::peer
