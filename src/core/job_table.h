// JobTable: the jobs whose streams share an engine, what each may take, and what it took. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/rate_limit.h"

namespace forebay {

using JobId = uint16_t;
inline constexpr JobId kNoJob = 0;  // streams that name none

struct JobLimits {
  static constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  RateLimits source = {};
  uint64_t memory_bytes = kAll;  // of the memory tier that it may fill
  uint64_t folder_bytes = kAll;  // of the cache folder that it may fill, from now on
  bool operator==(const JobLimits&) const = default;
};

// Totals since the job's first stream was opened.
struct JobStats {
  std::string name;
  size_t streams = 0;  // open ones
  JobLimits limits;
  uint64_t requests = 0;  // that the source has answered
  uint64_t bytes = 0;
  uint64_t kept_bytes = 0;    // of the memory tier, read for this job
  uint64_t folder_bytes = 0;  // given to the cache folder
  Nanos waited = 0;           // with a batch asked for and reads of it missing
  Nanos held = 0;             // with reads that waited for its share
  // Since the last JobTable::TakeStats().
  RateLimiter::HeldBack held_back;
};

// One thread at a time.
class JobTable {
 public:
  JobTable() : jobs_(1) {}

  // The job of that name, which has one stream more. One that nothing is left of is forgotten. Past
  // 65,535 jobs at once the rest have no limits.
  JobId Open(std::string_view name);
  void Close(JobId job) { --jobs_[job].stats.streams; }
  JobId Find(std::string_view name) const;

  // A lower memory_bytes is for the caller to bring about.
  void SetLimits(JobId job, const JobLimits& limits, Nanos now);
  // For all jobs together, from the last BeginRound on.
  void SetNodeLimits(RateLimits limits) { node_.SetLimits(limits, at_); }

  // Whether reads of the job may have to wait.
  bool Limited(JobId job) const {
    static constexpr RateLimits kNone;
    return jobs_[job].stats.limits.source != kNone || node_.limits() != kNone;
  }
  // Whether a job that has streams has a rate of its own.
  bool AnyLimited() const;
  // Whether the job's next read may start; if not, it counts as held.
  bool Ready(JobId job, Nanos now);
  void Charge(JobId job, uint64_t bytes);
  void GiveBack(JobId job, uint64_t bytes);
  // Whether another job with a limit, which waited lately, has got less of it. Not for long: that
  // one may wait for something else than requests.
  bool ShouldYield(JobId job);
  // When the first of those held since BeginRound may start.
  Nanos wake_at() const { return wake_at_; }

  // Time passes; the marks of the round before are counted and forgotten.
  void BeginRound(Nanos now);
  void MarkWaiting(JobId job) { jobs_[job].waiting = true; }

  JobStats& stats(JobId job) { return jobs_[job].stats; }
  const JobStats& stats(JobId job) const { return jobs_[job].stats; }
  size_t size() const { return jobs_.size(); }
  Nanos held_total() const { return held_total_; }
  // Of jobs that have streams.
  std::vector<JobStats> TakeStats();

 private:
  struct Job {
    JobStats stats;
    RateLimiter limiter;
    bool waiting = false;
    Nanos waited_at = std::numeric_limits<Nanos>::min() / 2;
    double served = 0;  // seconds' worth of its limit
    bool held = false;
    bool held_since_taken = false;
    Nanos yields_since = -1;  // without a read since
  };
  std::vector<Job> jobs_;
  RateLimiter node_;
  Nanos at_ = 0;
  Nanos wake_at_ = kNeverReady;
  Nanos held_total_ = 0;
  double served_ = 0;  // the most of any job
};

}  // namespace forebay
