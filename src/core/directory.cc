#include "core/directory.h"

#include <algorithm>
#include <array>
#include <queue>
#include <utility>

#include "base/planted_bug.h"
#include "core/home.h"

namespace forebay::peer {
namespace {

// Choices after the home that are tried before the emptiest node gets a sample.
constexpr uint32_t kMoreChoices = 16;
// A tier of a node, in bytes: sums over all nodes stay within 64 bits.
constexpr uint64_t kMostRoom = uint64_t{1} << 50;

// How soon a sample would leave its home if nodes were added: 0 is last. Who would leave first has
// the weakest claim on room, so that a job that was restarted with fewer nodes leaves out what the
// lost nodes held, not what those that stayed still have.
constexpr uint8_t kClaims = 7;
uint8_t Claim(uint64_t until, uint64_t nodes) {
  // until / nodes against 4, 3, 2, 3/2, 5/4, 9/8.
  constexpr std::array<uint64_t, kClaims - 1> kEighths = {32, 24, 16, 12, 10, 9};
  uint8_t claim = 0;
  while (claim < kEighths.size() && until * 8 < nodes * kEighths[claim]) ++claim;
  return claim;
}

uint64_t MostFree(const auto& rooms, const std::vector<bool>& open) {
  uint64_t most = 0;
  for (size_t n = 0; n < rooms.size(); ++n) {
    if (open[n]) most = std::max(most, rooms[n].most());
  }
  return most;
}

}  // namespace

bool Directory::Room::Take(uint64_t length) {
  uint64_t& room = memory >= length ? memory : folder;
  if (room < length) return false;
  room -= length;
  return true;
}

Directory::Directory(uint32_t self, std::vector<uint32_t> lengths)
    : self_(self),
      lengths_(std::move(lengths)),
      homes_(lengths_.size(), kNowhere),
      known_(lengths_.size(), kOther),
      homeless_(static_cast<uint32_t>(lengths_.size())) {}

std::vector<NodeTiers> Directory::Rooms(const View& view) {
  const uint32_t nodes = std::clamp(view.nodes, 1u, kMostNodes);
  std::vector<NodeTiers> rooms(nodes);
  std::vector<bool> came(nodes);
  uint64_t memory = 0, folder = 0, known = 0;
  for (const Member& member : view.members) {
    if (member.node >= nodes || came[member.node]) continue;
    came[member.node] = true;
    rooms[member.node] = {std::min(member.memory, kMostRoom), std::min(member.folder, kMostRoom)};
    ++known;
    memory += rooms[member.node].memory;
    folder += rooms[member.node].nvme;
  }
  for (uint32_t n = 0; n < nodes; ++n) {
    if (!came[n] && known > 0) rooms[n] = {memory / known, folder / known};
  }
  return rooms;
}

void Directory::Adopt(std::shared_ptr<const HomePlan> plan, std::span<const std::byte> here) {
  if (plan == nullptr || plan->homes.size() != lengths_.size() || plan->digest == plan_digest())
    return;
  plan_ = std::move(plan);
  adopted_ = true;
  by_plan_.clear();
  leaving_.resize(lengths_.size());
  for (SampleId s = 0; s < lengths_.size(); ++s) {
    const bool has =
        s / 8 < here.size() && (std::to_integer<unsigned>(here[s / 8]) >> (s % 8) & 1) != 0;
    leaving_[s] = has && (homes_[s] == self_ || leaving_[s]);
  }
}

void Directory::OnPlanUsed(uint32_t node) {
  if (node >= kMostNodes) return;
  if (by_plan_.size() <= node) by_plan_.resize(node + 1);
  by_plan_[node] = true;
}

bool Directory::OnView(const View& view) {
  const uint32_t nodes = std::clamp(view.nodes, 1u, kMostNodes);
  std::vector<Room> rooms;
  for (const NodeTiers& room : Rooms(view)) rooms.push_back({room.memory, room.nvme});
  std::vector<bool> alive(nodes), came(nodes);
  for (const Member& member : view.members) {
    if (member.node >= nodes || came[member.node]) continue;
    came[member.node] = true;
    alive[member.node] = member.alive;
  }
  const bool replan = adopted_ || rooms != rooms_ || all_.empty();
  adopted_ = false;
  if (!replan && alive == alive_) return false;
  rooms_ = std::move(rooms);
  for (uint32_t n = 0; n < nodes && n < alive_.size(); ++n) {
    if (alive_[n] && !alive[n]) OnDead(n);
  }
  alive_ = std::move(alive);
  if (replan) PlanAll();

  std::vector<uint16_t> homes = all_;
  std::vector<Room> free = all_free_;
  PlanDead(&homes, &free);
  bool changed = false;
  home_bytes_.assign(nodes, 0);
  home_samples_.assign(nodes, 0);
  homeless_ = 0;
  for (SampleId s = 0; s < homes.size(); ++s) {
    const uint16_t home = homes[s];
    if (home == kNowhere) {
      ++homeless_;
    } else {
      home_bytes_[home] += lengths_[s];
      ++home_samples_[home];
    }
    if (home == homes_[s]) continue;
    changed = true;
    Move(s, home);
  }
  // A plan by use may be of other rooms than there are now.
  const uint64_t room = self_ < nodes ? rooms_[self_].memory + rooms_[self_].folder : 0;
  spare_ = room - std::min(room, self_ < nodes ? home_bytes_[self_] : 0);
  return changed;
}

// Homes for all nodes, as if everyone were alive.
void Directory::PlanAll() {
  const auto nodes = static_cast<uint32_t>(rooms_.size());
  if (plan_ != nullptr && plan_->free.size() == nodes) {
    all_ = plan_->homes;
    all_free_.clear();
    for (const NodeTiers& free : plan_->free) all_free_.push_back({free.memory, free.nvme});
    return;
  }
  all_.assign(lengths_.size(), kNowhere);
  all_free_ = rooms_;
  std::vector<uint8_t> claims(lengths_.size());
  std::vector<uint64_t> wanted(nodes);
  for (SampleId s = 0; s < lengths_.size(); ++s) {
    const Home home = HomeOf(s, nodes);
    all_[s] = static_cast<uint16_t>(home.node);
    claims[s] = Claim(home.until, nodes);
    wanted[home.node] += lengths_[s];
  }
  bool tight = false;
  for (uint32_t n = 0; n < nodes; ++n) {
    tight = tight || wanted[n] > rooms_[n].memory + rooms_[n].folder;
  }
  // Claims matter where not all can have their home.
  std::vector<bool> open(nodes, true);
  std::vector<SampleId> over;
  for (uint8_t claim = 0; claim < (tight ? kClaims : 1); ++claim) {
    for (SampleId s = 0; s < lengths_.size(); ++s) {
      if (tight && claims[s] != claim) continue;
      if (all_free_[all_[s]].Take(lengths_[s])) continue;
      over.push_back(s);
    }
  }
  for (const SampleId s : over) all_[s] = kNowhere;
  PlaceRest(std::move(over), open, &all_, &all_free_);
}

// New homes for what lives with the dead, in the room that is left with the others.
void Directory::PlanDead(std::vector<uint16_t>* homes, std::vector<Room>* free) const {
  if (std::find(alive_.begin(), alive_.end(), false) == alive_.end()) return;
  std::vector<SampleId> orphans;
  for (SampleId s = 0; s < homes->size(); ++s) {
    const uint16_t home = (*homes)[s];
    if (home == kNowhere || alive_[home]) continue;
    (*homes)[s] = kNowhere;
    orphans.push_back(s);
  }
  if (FOREBAY_PLANTED(kLostHome) && !orphans.empty()) orphans.pop_back();
  PlaceRest(std::move(orphans), alive_, homes, free);
}

// Each goes to the first of its choices that is open and has room; then the longest first to the
// emptiest node.
void Directory::PlaceRest(std::vector<SampleId> rest, const std::vector<bool>& open,
                          std::vector<uint16_t>* homes, std::vector<Room>* free) const {
  const auto nodes = static_cast<uint32_t>(free->size());
  uint64_t most = MostFree(*free, open);
  size_t misses = 0, left = 0;
  for (const SampleId s : rest) {
    const uint64_t length = lengths_[s];
    // Room only shrinks, so an old value is a bound; it is renewed now and then.
    if (length > most) continue;
    bool placed = false;
    for (uint32_t choice = 1; choice <= kMoreChoices && !placed; ++choice) {
      const uint32_t node = HomeOf(s, nodes, choice).node;
      if (!open[node] || !(*free)[node].Take(length)) continue;
      (*homes)[s] = static_cast<uint16_t>(node);
      placed = true;
    }
    if (placed) continue;
    if (misses++ % 1024 == 0) most = MostFree(*free, open);
    rest[left++] = s;
  }
  rest.resize(left);
  most = MostFree(*free, open);
  std::erase_if(rest, [&](SampleId s) { return lengths_[s] > most; });
  if (rest.empty() || std::find(open.begin(), open.end(), true) == open.end()) return;
  std::sort(rest.begin(), rest.end(), [&](SampleId a, SampleId b) {
    return lengths_[a] != lengths_[b] ? lengths_[a] > lengths_[b] : a < b;
  });
  // The node with most room in one tier on top, of equals the one with the lowest number.
  using Entry = std::pair<uint64_t, int64_t>;
  std::priority_queue<Entry> emptiest;
  for (uint32_t n = 0; n < nodes; ++n) {
    if (open[n]) emptiest.emplace((*free)[n].most(), -static_cast<int64_t>(n));
  }
  for (const SampleId s : rest) {
    const auto [room, node] = emptiest.top();
    if (room < lengths_[s]) continue;
    emptiest.pop();
    Room& taken = (*free)[static_cast<size_t>(-node)];
    taken.Take(lengths_[s]);
    emptiest.emplace(taken.most(), node);
    (*homes)[s] = static_cast<uint16_t>(-node);
  }
}

// Copies stay where they are when a home moves.
void Directory::Move(SampleId sample, uint16_t to) {
  uint16_t& known = known_[sample];
  const uint16_t from = homes_[sample], other = known & kOther;
  const bool had = (known & kHomeHas) != 0;
  homes_[sample] = to;
  if (other != kOther && other == to) {
    known = kHomeHas | (had ? from : kOther);
  } else if (had) {
    known = from;
  }
}

std::vector<uint8_t> Directory::Shares() const {
  std::vector<uint8_t> shares(lengths_.size());
  for (SampleId s = 0; s < shares.size(); ++s) shares[s] = static_cast<uint8_t>(ShareOf(s));
  return shares;
}

uint64_t Directory::home_bytes(uint32_t node) const {
  return node < home_bytes_.size() ? home_bytes_[node] : 0;
}

uint32_t Directory::home_samples(uint32_t node) const {
  return node < home_samples_.size() ? home_samples_[node] : 0;
}

void Directory::OnHave(uint32_t node, SampleId first, std::span<const std::byte> bits) {
  for (size_t i = 0; i < bits.size() * 8; ++i) {
    const uint64_t sample = uint64_t{first} + i;
    if (sample >= lengths_.size()) return;
    const bool has = (std::to_integer<unsigned>(bits[i / 8]) >> (i % 8) & 1) != 0;
    if (has) {
      OnGot(node, static_cast<SampleId>(sample));
    } else {
      OnLost(node, static_cast<SampleId>(sample));
    }
  }
}

void Directory::OnGot(uint32_t node, SampleId sample) {
  if (sample >= known_.size() || node >= kMostNodes || node == self_) return;
  uint16_t& known = known_[sample];
  if (homes_[sample] == node) {
    known |= kHomeHas;
    // By another plan it may be a copy, which it gives up as it takes this one into use.
    if (!leaving_.empty() && leaving_[sample] && node < by_plan_.size() && by_plan_[node]) {
      leaving_[sample] = false;
      left_.push_back(sample);
    }
  } else if ((known & kOther) == kOther) {
    known = static_cast<uint16_t>((known & kHomeHas) | node);
  }
}

void Directory::OnLost(uint32_t node, SampleId sample) {
  if (sample >= known_.size() || node >= kMostNodes) return;
  uint16_t& known = known_[sample];
  if (homes_[sample] == node) {
    known &= kOther;
  } else if ((known & kOther) == node) {
    known |= kOther;
  }
}

void Directory::OnDead(uint32_t node) {
  if (FOREBAY_PLANTED(kStaleDirectory)) return;
  if (node < by_plan_.size()) by_plan_[node] = false;
  for (SampleId s = 0; s < known_.size(); ++s) OnLost(node, s);
}

}  // namespace forebay::peer
