#include "core/fair_share.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace forebay::control {
namespace {

struct Need {
  double weight;
  double floor;  // the guarantee it makes use of
  double want;   // min(demand, cap, capacity): finite
};

double NotNegative(double x) { return x > 0 ? x : 0; }

// Sum of clamp(weight * level, floor, want) is `room`, or all get what they want. The sum grows
// with the level, straight between the points where a need leaves its floor or reaches its want.
double FindLevel(std::span<const Need> needs, double room) {
  struct Turn {
    double level;
    double slope;  // change of the sum's slope
  };
  std::vector<Turn> turns;
  turns.reserve(needs.size() * 2);
  double given = 0;
  double wanted = 0;
  for (const Need& need : needs) {
    given += need.floor;
    wanted += need.want;
    if (need.want <= need.floor) continue;
    turns.push_back({need.floor / need.weight, need.weight});
    turns.push_back({need.want / need.weight, -need.weight});
  }
  if (wanted <= room) return kUnlimited;
  std::sort(turns.begin(), turns.end(),
            [](const Turn& a, const Turn& b) { return a.level < b.level; });
  double level = 0;
  double slope = 0;
  for (const Turn& turn : turns) {
    const double step = (turn.level - level) * slope;
    if (slope > 0 && given + step >= room) return level + NotNegative(room - given) / slope;
    given += step;
    level = turn.level;
    slope += turn.slope;
  }
  return level;
}

}  // namespace

std::vector<double> DivideFairly(double capacity, std::span<const Claim> claims) {
  const size_t n = claims.size();
  std::vector<double> given(n);
  capacity = NotNegative(capacity);
  if (std::isinf(capacity)) {
    for (size_t i = 0; i < n; ++i) {
      given[i] = std::min(NotNegative(claims[i].demand), NotNegative(claims[i].cap));
    }
    return given;
  }

  std::vector<Need> needs(n);
  double guaranteed = 0;
  for (size_t i = 0; i < n; ++i) {
    const Claim& claim = claims[i];
    Need& need = needs[i];
    need.weight = claim.weight > 0 && std::isfinite(claim.weight) ? claim.weight : 1;
    const double want = std::min(NotNegative(claim.demand), NotNegative(claim.cap));
    need.floor = std::min(want, NotNegative(claim.guarantee));
    need.want = std::min(want, capacity);
    guaranteed += need.floor;
  }
  if (guaranteed >= capacity && guaranteed > 0) {
    for (size_t i = 0; i < n; ++i) given[i] = needs[i].floor * (capacity / guaranteed);
    return given;
  }

  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return claims[a].priority > claims[b].priority; });
  double left = capacity - guaranteed;
  std::vector<Need> members;
  for (size_t begin = 0; begin < n;) {
    size_t end = begin;
    double room = left;
    members.clear();
    while (end < n && claims[order[end]].priority == claims[order[begin]].priority) {
      room += needs[order[end]].floor;
      members.push_back(needs[order[end]]);
      ++end;
    }
    const double level = FindLevel(members, room);
    for (; begin < end; ++begin) {
      const Need& need = needs[order[begin]];
      const double share = std::isinf(level) ? need.want : need.weight * level;
      given[order[begin]] = std::clamp(share, need.floor, need.want);
      room -= given[order[begin]];
    }
    left = NotNegative(room);
  }
  return given;
}

}  // namespace forebay::control
