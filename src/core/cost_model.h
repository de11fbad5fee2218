// OriginModel: what a read from one origin (the source, a cache folder, a peer) costs, learned from
// the reads that were made there. Nothing about any storage is written by hand.
//
// Latency is a fixed part and a part for each byte, both learned for each power of two of reads
// under way. Reads stay in a short window before they count: when most of the window is slower or
// faster than it should be, the storage has changed, and all that is known is scaled at once
// instead of being blurred slowly.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/nanos.h"

namespace forebay {

// Pure: no clock, thread or I/O. Not safe for concurrent use. About 3 KiB.
class OriginModel {
 public:
  static constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
  // What MergeGap and MergeBytes lie between.
  static constexpr uint64_t kMinGap = 4096;  // a page: storage reads it as a whole anyway
  static constexpr uint64_t kMaxGap = 1 << 20;
  static constexpr uint64_t kMinMerge = 64 << 10;
  static constexpr uint64_t kMaxMerge = 4 << 20;
  static constexpr size_t kBuckets = 13;  // depths 1, 2-3, 4-7, ... 4096 and more

  // A read of `bytes` took `latency`. `depth`: reads under way there when it began, itself
  // included. A read that serves several samples is one read.
  void OnRead(uint64_t bytes, size_t depth, Nanos latency);

  // Whether reads were seen; the calls below need it, except Tail and the Merge ones.
  bool known() const { return reads_ > 0; }

  // The mean latency to expect.
  Nanos Expect(uint64_t bytes, size_t depth) const;
  // Bytes a second with so many such reads in flight (Little's law).
  double Rate(uint64_t bytes, size_t depth) const;
  // Far beyond what reads there take: one that has taken longer hangs. kNever while too little was
  // seen.
  Nanos Tail(uint64_t bytes, size_t depth) const;
  // Nine in ten reads take at most so many times what is expected.
  double Late() const { return late_; }
  // Unwanted bytes worth reading through to spare one more request.
  uint64_t MergeGap(size_t depth) const;
  // Size up to which one larger read beats several: where the transfer takes as long as the fixed
  // part. While the cost of a byte is unknown, twice the size that was read: that costs no more
  // than two reads, and shows the cost of a byte.
  uint64_t MergeBytes(size_t depth) const;

 private:
  static constexpr size_t kWindow = 32;

  // Decayed moments of the reads that began at depths of one power of two.
  struct Bucket {
    double weight = 0;  // 0: nothing known
    double depth = 0;
    double bytes = 0;
    double latency = 0;
    double var_bytes = 0;
    double var_latency = 0;
    double cov = 0;
    uint64_t last = 0;  // reads_ when it was last fed

    void Feed(double read_bytes, double read_depth, double read_latency);
    void Scale(double factor);
    bool SizesDiffer() const;
    double Slope() const;      // best guess of the latency of a byte; 0 while unknown
    double SlopeHigh() const;  // no less than it may well be
    double At(double read_bytes) const;
  };

  // Latencies relative to the expected one, in steps of an eighth of an octave; old ones fade.
  class Ratios {
   public:
    static constexpr double kBinsPerOctave = 8;

    explicit Ratios(double memory) : growth_(1 + 1 / memory) {}
    void Add(double log2_ratio);
    void Clear();
    uint64_t count() const { return count_; }  // since the last Clear
    double Quantile(double share) const;       // log2 of it

   private:
    static constexpr size_t kBins = 160;
    static constexpr double kLowest = -6;
    double growth_;
    double step_ = 1;  // what the next one weighs
    double sum_ = 0;
    uint64_t count_ = 0;
    std::array<float, kBins> bins_{};
  };

  struct Seen {
    double bytes = 0;
    double latency = 0;
    float depth = 0;
    float log2_ratio = 0;
    bool fed = false;  // its bucket knew too little to wait
  };

  const Bucket* Nearest(double depth) const;
  double Predict(double bytes, double depth) const;
  void Feed(const Seen& seen);
  void Settle(const Seen& seen);
  void FindTypical();
  void FollowChange();
  void Rescale(bool slower);
  std::optional<double> Balance(const Bucket& bucket) const;

  std::array<Bucket, kBuckets> buckets_;
  uint32_t known_ = 0;  // bit i: buckets_[i] knows something
  uint64_t reads_ = 0;

  std::array<Seen, kWindow> window_;  // a ring
  size_t window_size_ = 0;
  size_t window_head_ = 0;  // the oldest

  Ratios typical_{512};  // since the last change
  Ratios all_{4096};
  // Of typical_, all log2: the median, and beyond what most of the window tells of a change.
  double median_ = 0;
  double slow_ = 2;
  double fast_ = -2;
  double late_ = 4;
  double tail_ratio_ = 0;  // of all_; 0: not known yet
};

}  // namespace forebay
