#include "core/division.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace forebay::control {
namespace {

constexpr double kWakeShare = 0.01;

// Demand first, then what is left over by weight, to the caps.
std::vector<double> DivideAll(double capacity, std::span<const Claim> claims) {
  std::vector<double> given = DivideFairly(capacity, claims);
  if (std::isinf(capacity)) {
    for (size_t i = 0; i < claims.size(); ++i) given[i] = claims[i].cap;
    return given;
  }
  double left = capacity;
  std::vector<Claim> rest(claims.begin(), claims.end());
  for (size_t i = 0; i < claims.size(); ++i) {
    left -= given[i];
    rest[i].demand = kUnlimited;
    rest[i].guarantee = 0;
    rest[i].priority = 0;
    rest[i].cap = std::max(0.0, claims[i].cap - given[i]);
  }
  if (left <= capacity * 1e-9) return given;
  const std::vector<double> more = DivideFairly(left, rest);
  for (size_t i = 0; i < claims.size(); ++i) given[i] += more[i];
  return given;
}

struct Job {
  std::string_view name;
  std::vector<size_t> stages;
  const JobRule* rule = nullptr;
};

bool ShareNodes(std::span<const StageSummary> stages) {
  std::unordered_map<std::string_view, std::string_view> jobs;
  return std::any_of(stages.begin(), stages.end(), [&](const StageSummary& stage) {
    return jobs.try_emplace(stage.node, stage.job).first->second != stage.job;
  });
}

// To the largest of those who want more.
void GiveMore(double more, std::span<const Claim> claims, std::vector<double>* parts) {
  while (more > 0) {
    size_t largest = claims.size();
    for (size_t i = 0; i < claims.size(); ++i) {
      const double part = (*parts)[i];
      if (part >= claims[i].demand || part >= claims[i].cap) continue;
      if (largest == claims.size() || part > (*parts)[largest]) largest = i;
    }
    if (largest == claims.size()) return;
    const Claim& claim = claims[largest];
    double& part = (*parts)[largest];
    const double given = std::min({more, claim.cap - part, claim.demand - part});
    part = given < more ? std::min(claim.cap, claim.demand) : part + given;
    more -= given;
  }
}

// One unit: bytes or operations.
struct Unit {
  double RateLimits::*rate;
  double JobRule::*min;
  double JobRule::*max;
};

Claim ClaimOf(const Unit& unit, const JobRule& rule, double demand) {
  Claim claim;
  claim.demand = demand;
  claim.weight = rule.share;
  claim.guarantee = rule.*unit.min;
  claim.cap = rule.*unit.max;
  claim.priority = rule.priority;
  return claim;
}

constexpr Unit kBytes{&RateLimits::bytes_per_s, &JobRule::min_bandwidth, &JobRule::max_bandwidth};
constexpr Unit kOperations{&RateLimits::operations_per_s, &JobRule::min_operations,
                           &JobRule::max_operations};

void Divide(const Unit& unit, std::span<const StageSummary> stages, std::span<const Job> jobs,
            double capacity, double more, const ShareLedger* ledger,
            std::vector<RateLimits>* limits) {
  double weights = 0;
  for (const Job& job : jobs) weights += job.rule->share;
  std::vector<Claim> claims;
  claims.reserve(jobs.size());
  const bool known = !std::isinf(capacity);
  for (const Job& job : jobs) {
    Claim& claim = claims.emplace_back(ClaimOf(unit, *job.rule, 0));
    for (const size_t i : job.stages) claim.demand += stages[i].demand.*unit.rate;
    if (known) {
      // Small enough not to matter, and before every class: a job that is not let in cannot show
      // what it wants.
      const double wake = std::min(claim.cap, capacity * kWakeShare * claim.weight / weights);
      claim.demand = std::max(claim.demand, wake);
      claim.guarantee = std::max(claim.guarantee, wake);
    }
  }
  std::vector<double> parts = DivideAll(capacity, claims);
  if (known && ledger != nullptr) {
    for (size_t j = 0; j < jobs.size(); ++j) {
      const double wake = capacity * kWakeShare * claims[j].weight / weights;
      const double moved = parts[j] + ledger->Correction(jobs[j].name);
      parts[j] = std::min(claims[j].cap, std::max({moved, wake, claims[j].guarantee}));
    }
  }
  if (known) GiveMore(more, claims, &parts);
  std::vector<Claim> nodes;
  for (size_t j = 0; j < jobs.size(); ++j) {
    nodes.clear();
    const double wake = parts[j] * kWakeShare / static_cast<double>(jobs[j].stages.size());
    for (const size_t i : jobs[j].stages) {
      Claim& claim = nodes.emplace_back();
      claim.demand = std::max(stages[i].demand.*unit.rate, std::isinf(wake) ? 0 : wake);
      claim.guarantee = std::isinf(wake) ? 0 : wake;
    }
    const std::vector<double> given = DivideAll(parts[j], nodes);
    for (size_t i = 0; i < given.size(); ++i) (*limits)[jobs[j].stages[i]].*unit.rate = given[i];
  }
}

}  // namespace

Claim ClaimOfBytes(const JobRule& rule, double demand) { return ClaimOf(kBytes, rule, demand); }

std::vector<RateLimits> DivideSource(const Policy& policy, std::span<const StageSummary> stages,
                                     RateLimits capacity, RateLimits more,
                                     const ShareLedger* ledger) {
  if (ShareNodes(stages)) {
    capacity.bytes_per_s += std::exchange(more.bytes_per_s, 0);
    capacity.operations_per_s += std::exchange(more.operations_per_s, 0);
  }
  std::vector<RateLimits> limits(stages.size());
  std::vector<Job> jobs;
  std::unordered_map<std::string_view, size_t> numbers;
  for (size_t i = 0; i < stages.size(); ++i) {
    const auto [at, is_new] = numbers.try_emplace(stages[i].job, jobs.size());
    if (is_new) jobs.push_back({stages[i].job, {}, &policy.RuleFor(stages[i].job)});
    jobs[at->second].stages.push_back(i);
  }
  Divide(kBytes, stages, jobs, capacity.bytes_per_s, more.bytes_per_s, ledger, &limits);
  Divide(kOperations, stages, jobs, capacity.operations_per_s, more.operations_per_s, nullptr,
         &limits);
  return limits;
}

}  // namespace forebay::control
