#include "core/named_homes.h"

#include <algorithm>
#include <utility>

#include "core/home.h"

namespace forebay::peer {
namespace {

// Then any of the living: of 64 independent choices none is alive where nearly all nodes are dead.
constexpr uint64_t kChoices = 64;

}  // namespace

bool NamedHomes::OnView(const View& view) {
  const uint32_t nodes = std::clamp(view.nodes, 1u, kMostNodes);
  std::vector<bool> alive(nodes, false);
  if (self_ < nodes) alive[self_] = true;
  for (const Member& member : view.members) {
    if (member.node < nodes && member.alive) alive[member.node] = true;
  }
  if (alive == alive_) return false;
  alive_ = std::move(alive);
  living_.clear();
  for (uint32_t node = 0; node < nodes; ++node) {
    if (alive_[node]) living_.push_back(node);
  }
  return true;
}

uint32_t NamedHomes::HomeOf(uint64_t name) const {
  if (living_.empty()) return kNoNode;
  const auto nodes = static_cast<uint32_t>(alive_.size());
  for (uint64_t choice = 0; choice < kChoices; ++choice) {
    const uint32_t node = JumpHash(name ^ choice, nodes).node;
    if (alive_[node]) return node;
  }
  return living_[name % living_.size()];
}

}  // namespace forebay::peer
