#include "sim/scenario.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/sampler.h"

namespace forebay::sim {
namespace {

struct Names {
  std::string_view name;
  std::string_view title;
};
constexpr std::array<Names, kPolicies> kNames{{
    {"lower_bound", "no-I/O lower bound"},
    {"naive", "no prefetch"},
    {"staging_buffer", "staging buffer"},
    {"double_buffer", "double buffering (PyTorch)"},
    {"lru", "LRU page cache"},
    {"sharding", "sharding"},
    {"deepio_ordered", "DeepIO ordered"},
    {"deepio_opportunistic", "DeepIO opportunistic"},
    {"parallel_staging", "parallel staging"},
    {"lbann_dynamic", "LBANN dynamic"},
    {"lbann_preload", "LBANN preloading"},
    {"locality", "locality-aware"},
    {"monarch", "MONARCH"},
    {"nopfs", "NoPFS"},
    {"forebay", "Forebay"},
}};

Status Bad(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

Status Positive(double value, std::string_view name) {
  if (std::isfinite(value) && value > 0) return Status();
  return Bad(StrCat(name, " is ", value, "; it must be a number above 0"));
}

}  // namespace

std::string_view PolicyName(Policy policy) { return kNames[static_cast<size_t>(policy)].name; }
std::string_view PolicyTitle(Policy policy) { return kNames[static_cast<size_t>(policy)].title; }

Result<Policy> ParsePolicy(std::string_view name) {
  std::string all;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i].name == name) return static_cast<Policy>(i);
    all += StrCat(i == 0 ? "" : ", ", kNames[i].name);
  }
  return Bad(StrCat("'", name, "' is no policy; there are: ", all));
}

double Scenario::NodeMb() const {
  double sum = 0;
  for (const TierSpec& tier : tiers) sum += tier.mb;
  return sum;
}

Status Scenario::Validate() const {
  if (nodes == 0 || ranks_per_node == 0 || uint64_t{nodes} * ranks_per_node > 65535) {
    return Bad(StrCat("nodes is ", nodes, " and ranks_per_node ", ranks_per_node,
                      "; there must be 1 to 65535 ranks in all"));
  }
  if (tiers.size() > 2) {
    return Bad(
        StrCat("there are ", tiers.size(), " tiers; a node has memory and one more at most"));
  }
  for (const TierSpec& tier : tiers) {
    if (!std::isfinite(tier.mb) || tier.mb < 0) {
      return Bad(StrCat("tier ", tier.name, ": its size is ", tier.mb, "; it cannot be negative"));
    }
    FOREBAY_RETURN_IF_ERROR(Positive(tier.mb_per_s, StrCat("tier ", tier.name, ": mb_per_s")));
    FOREBAY_RETURN_IF_ERROR(Positive(tier.threads, StrCat("tier ", tier.name, ": threads")));
  }
  if (tiers.size() == 2 && tiers[1].mb_per_s > tiers[0].mb_per_s) {
    return Bad(StrCat("tier ", tiers[1].name, " is faster than tier ", tiers[0].name,
                      "; the faster one must come first"));
  }
  FOREBAY_RETURN_IF_ERROR(Positive(staging_mb, "staging.bytes"));
  FOREBAY_RETURN_IF_ERROR(Positive(staging_mb_per_s, "staging.mb_per_s"));
  if (staging_threads == 0) return Bad("staging.threads is 0; it must be at least 1");
  FOREBAY_RETURN_IF_ERROR(Positive(network_mb_per_s, "network.mb_per_s"));
  if (source.empty()) return Bad("source.readers is empty; name at least one point");
  double last = 0;
  for (const auto& [readers, rate] : source) {
    FOREBAY_RETURN_IF_ERROR(Positive(rate, "source.mb_per_s"));
    if (!std::isfinite(readers) || readers <= last) {
      return Bad(StrCat("source.readers: ", readers, " after ", last, "; they must rise from 1"));
    }
    last = readers;
  }
  if (samples == 0 || samples > std::numeric_limits<SampleId>::max()) {
    return Bad(StrCat("dataset.samples is ", samples, "; it must be 1 to ",
                      std::numeric_limits<SampleId>::max()));
  }
  FOREBAY_RETURN_IF_ERROR(Positive(sample_mb, "dataset.sample_bytes"));
  if (sample_mb >= 4096) {
    return Bad(StrCat("dataset.sample_bytes is ", sample_mb, " MB; it must be below 4 GB"));
  }
  if (!std::isfinite(sample_sigma_mb) || sample_sigma_mb < 0) {
    return Bad("dataset.sigma_bytes cannot be negative");
  }
  FOREBAY_RETURN_IF_ERROR(Positive(compute_mb_per_s, "job.compute_mb_per_s"));
  FOREBAY_RETURN_IF_ERROR(Positive(preprocess_mb_per_s, "job.preprocess_mb_per_s"));
  if (batch == 0) return Bad("job.batch is 0; it must be at least 1");
  if (epochs == 0) return Bad("job.epochs is 0; it must be at least 1");
  if (max_accesses == 0) return Bad("job.max_accesses is 0; it must be at least 1");
  return Status();
}

double Scenario::SourceRate(double readers) const {
  const auto& [first_readers, first_rate] = source.front();
  if (readers <= first_readers) return first_rate * readers / first_readers;
  for (size_t i = 1; i < source.size(); ++i) {
    if (readers > source[i].first) continue;
    const double span = source[i].first - source[i - 1].first;
    const double along = (readers - source[i - 1].first) / span;
    return source[i - 1].second + along * (source[i].second - source[i - 1].second);
  }
  return source.back().second;
}

}  // namespace forebay::sim
