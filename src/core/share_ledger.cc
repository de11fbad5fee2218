#include "core/share_ledger.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace forebay::control {
namespace {

// A limit takes a part of a second to be decided, to arrive, and to show in what is read: what is
// paid back much faster would swing.
constexpr double kPaySeconds = 1.5;
constexpr double kFadeSeconds = 4;
constexpr double kMostSeconds = 0.06;  // of a job's part

}  // namespace

void ShareLedger::Observe(std::span<const Entry> jobs, Nanos passed) {
  std::map<std::string, double, std::less<>> owed;
  const double seconds = static_cast<double>(passed) / kSecond;
  if (!(seconds > 0)) return;
  double rate = 0;
  std::vector<Claim> claims;
  claims.reserve(jobs.size());
  for (const Entry& entry : jobs) {
    const double got = std::max(0.0, entry.bytes) / seconds;
    rate += got;
    Claim& claim = claims.emplace_back(entry.claim);
    if (!std::isinf(claim.demand)) claim.demand = got;
  }
  const std::vector<double> fair = DivideFairly(rate, claims);
  const double kept = std::exp(-seconds / kFadeSeconds);
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!std::isinf(claims[i].demand)) continue;  // it has what it wants
    const auto before = owed_.find(jobs[i].job);
    const double most = kMostSeconds * fair[i];
    const double sum =
        (before == owed_.end() ? 0 : before->second * kept) + fair[i] * seconds - jobs[i].bytes;
    owed.emplace(jobs[i].job, std::clamp(sum, -most, most));
  }
  owed_ = std::move(owed);
}

double ShareLedger::Correction(std::string_view job) const {
  const auto owed = owed_.find(job);
  return owed == owed_.end() ? 0 : owed->second / kPaySeconds;
}

}  // namespace forebay::control
