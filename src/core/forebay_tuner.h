// ForebayTuner: the fewest reads in flight and the smallest buffer that keep consumers fed.
//
// Steps are gathered into windows that begin a round trip after the last change. What a window says
// depends on whether consumers waited in it:
//
//   fed      Demand is known. By Little's law the reads needed are demand x latency; the limit goes
//            there, and the buffer gives up what no take has needed. A stall soon after a step down
//            takes it back, and keeps it from being tried again for a while.
//   starved  Demand is not known, the storage's rate is what can be had. The limit doubles while
//            each doubling brings more bytes; then it comes down, first to what the least latency
//            seen would need, as long as the rate stays within a few percent of the best. The
//            buffer comes down as long as the reads stay in flight. Once in a while a step down is
//            tried again; a rate or latency that has changed opens the search at once.
//
// While reads wait for their job's part of a shared source, that part is the rate, and a window
// says nothing: neither number goes down. With few reads in flight the part would be lost as soon
// as others make the source's queue longer.
#pragma once

#include "core/tuner.h"

namespace forebay {

class ForebayTuner : public Tuner {
 public:
  static constexpr size_t kInitialReads = 64;
  // So many small reads are in flight at first, but of large ones no more than these bytes: all of
  // them would share the pipe, and the first batch would come when the last of them does.
  static constexpr uint64_t kInitialFlight = uint64_t{32} << 20;

  explicit ForebayTuner(const TuneOptions& options);
  const TuneDecision& Step(const TuneObservation& seen) override;
  const TuneDecision& decision() const override { return decision_; }

 private:
  enum class Phase : uint8_t { kGrow, kShrink, kHold, kLift };
  struct Window {
    double seconds = 0;
    double reads = 0;    // a second
    double rate = 0;     // reads of mean size a second, by number and by bytes
    double latency = 0;  // seconds, mean
    double stalled = 0;  // share of the consumers' time
    double demand = 0;   // reads a second that consumers take
    double busy = 0;     // reads in flight, mean
    uint64_t takes = 0;
    uint64_t ready_low = 0;
    uint64_t ahead_high = 0;
  };

  bool Paused(const TuneObservation& seen);
  void NoteLatency(const TuneObservation& seen);
  void OpenForShare();
  void StartWindow(const TuneObservation& seen);
  Window Close(const TuneObservation& seen) const;
  void OnFed(const Window& w);
  void OnStarved(const Window& w);
  void Grow(const Window& w);
  void Shrink(const Window& w);
  void Hold(const Window& w);
  void StartLift(const Window& w);
  void Lift(const Window& w);
  void StartGrowing(const char* reason);
  void Widen(const char* reason);
  void TrimBuffer();
  size_t AtOnce(const TuneObservation& seen) const;
  void EndFlightBound(const TuneObservation& seen);
  double Worth() const;
  bool GrowthIsClear(const TuneObservation& seen) const;
  bool OnTrial() const;
  bool Doubtful(const TuneObservation& seen) const;
  bool Failing(const TuneObservation& seen) const;
  // Sets a knob; what is under way then says nothing about it.
  void SetReads(double reads, const char* reason);
  void SetBuffer(double bytes, const char* reason);
  double ReadBytes() const;
  int64_t Blame() const;

  const TuneOptions options_;
  TuneDecision decision_;
  TuneObservation from_;  // where the window began
  TuneObservation last_;
  int64_t active_ns_ = 0;    // when a consumer last took or waited
  double take_seconds_ = 1;  // from take to take
  uint64_t ready_low_ = ~uint64_t{0};
  uint64_t ahead_high_ = 0;
  int64_t skip_until_ns_ = 0;
  double mean_bytes_ = 0;    // of a read
  double mean_latency_ = 0;  // seconds, of the last window

  Phase phase_ = Phase::kGrow;
  bool fed_ = false;
  double before_rate_ = 0;  // before the last doubling or lift; 0: none
  double before_reads_ = 0;
  double before_buffer_ = 0;
  double best_rate_ = 0;  // that the storage has given lately
  double good_reads_ = 0;
  double least_latency_ = 0;  // seconds, of any read since the search began; 0: not known
  bool may_leap_ = true;      // no leap to what that latency needs has failed since
  size_t odd_windows_ = 0;    // in a row that do not fit what the storage gave before
  size_t starved_windows_ = 0;
  int64_t probe_at_ns_ = 0;
  int64_t probe_every_ns_ = 0;
  bool probe_up_ = false;

  // Fed: what was too little, and until when it is not tried again.
  double read_floor_ = 0;
  int64_t read_floor_until_ns_ = 0;
  int64_t shrunk_reads_ns_ = 0;
  double before_shrink_reads_ = 0;
  int64_t read_hold_ns_ = 0;
  double buffer_floor_ = 0;
  int64_t buffer_floor_until_ns_ = 0;
  int64_t shrunk_buffer_ns_ = 0;
  double before_shrink_buffer_ = 0;
  int64_t buffer_hold_ns_ = 0;
};

}  // namespace forebay
