// How the shared source is divided between jobs and, within a job, between its nodes. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/capacity.h"
#include "core/policy.h"
#include "core/share_ledger.h"

namespace forebay::control {

// What one job does on one node, as that node last said. Rates are a second's.
struct StageSummary {
  std::string node;
  std::string job;
  RateLimits demand{0, 0};     // kUnlimited: more than it got
  RateLimits delivered{0, 0};  // from the source
  // From the source, since the job began there: rates are of the moment that they were told at, and
  // leave gaps and overlaps between them. None: not told.
  std::optional<uint64_t> read_bytes = std::nullopt;
  double stall_share = 0;  // part of the time that training waited
  double capacity = 0;     // bytes a second that this node found the source to give; 0: unknown
};

// Limits of each stage, in their order. `capacity` is what the source gives to all of them
// together, kUnlimited where that is unknown: then only the policy's maxima bind.
//
// Jobs divide the capacity by their rules; each job's part is divided between its nodes by demand.
// What no demand asks for is handed out, too, so that a job that begins to read need not wait for
// the next decision; and every stage has at least a hundredth of an even part, so that it can show
// its demand.
//
// `more`: handed out beyond the capacity, to see whether it has grown. Mostly it has not, and then
// the source decides who gets less. Jobs that share a node keep their proportion there, so all get
// some of it. Where none do, the one with the largest part gets it: the limits of the others add up
// to less than there is, so they get what is theirs, and it gets the rest.
//
// `ledger`: by how much jobs' parts in bytes are moved to make good what they got before.
std::vector<RateLimits> DivideSource(const Policy& policy, std::span<const StageSummary> stages,
                                     RateLimits capacity, RateLimits more = {0, 0},
                                     const ShareLedger* ledger = nullptr);

// What a job claims of the source's bytes, by its rule and all of its stages together.
Claim ClaimOfBytes(const JobRule& rule, double demand);

}  // namespace forebay::control
