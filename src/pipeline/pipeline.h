// Pipeline: takes a stream's batches ahead of the consumer and has them decoded, sample by sample,
// straight into their places in a batch, on the engine's decode threads.
//
// One feeder thread takes batches from the engine and looks for a slab, the memory of one finished
// batch; the decode threads share the samples of the oldest unfinished batches; the consumer gets
// finished ones in order. Slabs are used again, batch after batch, at the same addresses, so that
// they can be registered with a GPU once. Their memory is lent by the budget of who reads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "decode/pool.h"
#include "decode/sample_decoder.h"
#include "metrics/epoch_log.h"
#include "metrics/registry.h"
#include "metrics/stall.h"
#include "port/port.h"
#include "stage/engine.h"

namespace forebay {

struct PipelineOptions {
  DecodeOptions decode;
  uint64_t seed = 0;  // of the augmentation
  bool skip_corrupt = false;
  // Finished batches kept ready; 0: chosen by size.
  size_t ahead = 0;
  // How long a consumer waits for memory that only its own unreleased batches hold.
  Nanos release_wait = 10 * kSecond;
  Status Validate() const;
};

// A finished batch on loan: its slab is untouched until it is released.
struct FinishedBatch {
  size_t slab = 0;
  std::byte* data = nullptr;
  std::vector<SampleId> samples;  // those that were not skipped, in order
  uint64_t epoch = 0;
  uint64_t index = 0;
  uint64_t batches = 1;  // batches of the sampler this stands for: more when some came out empty
};

class Pipeline;

// Deletes a pipeline in the process that made it; in a forked child its threads do not exist.
struct PipelineDelete {
  void operator()(Pipeline* pipeline) const;
};
using PipelinePtr = std::unique_ptr<Pipeline, PipelineDelete>;

// Safe for concurrent use by multiple threads; batches are handed out in order. In a forked child
// Take and Seek return kCancelled.
class Pipeline final : private DecodeWork {
 public:
  // Opens a stream of its own with `stream`'s shape and sampler, whose batches are neither
  // contiguous nor itemised. `source`: shared with other pipelines.
  static Result<PipelinePtr> Make(std::shared_ptr<Port> source, StreamOptions stream,
                                  const PipelineOptions& options);
  // `engine` must outlive it.
  static Result<PipelinePtr> Make(Engine& engine, StreamOptions stream,
                                  const PipelineOptions& options);
  ~Pipeline() override;
  // Ends the threads' work, closes the stream and gives the memory back; batches on loan stay valid
  // until they are released.
  void Stop();

  // As Engine::Take: after a read that failed the next call tries the same batch again. A sample
  // that cannot be decoded stays: the next call reports it again, until a Seek.
  Result<TakeKind> Take(Nanos wait, FinishedBatch* out);
  void Release(size_t slab);
  // The next batch is the one at `position` of `epoch`; what was decoded ahead is dropped.
  Status Seek(uint64_t epoch, uint64_t position);

  size_t sample_bytes() const { return sample_bytes_; }
  const std::vector<uint64_t>& sample_shape() const { return sample_shape_; }
  StreamId stream() const { return stream_; }
  const Catalog& catalog() const { return *catalog_; }
  std::shared_ptr<const Catalog> shared_catalog() const { return catalog_; }
  // All slabs there are now; more may come.
  std::vector<std::span<std::byte>> Slabs() const;
  std::vector<EpochStats> Stats() const;
  // Of its data set, see Port.
  Result<ChangedFilesOf> ChangedFiles() const { return source_->ChangedFiles(stream_); }
  // What a pending Take waits for, in words.
  std::string WaitingFor() const;
  // Charges a wait that the consumer saw after a batch was handed out (its copy to a GPU).
  void ChargeCopy(Nanos waited);
  // Samples left out of the batches handed out so far.
  uint64_t skipped() const;
  // Path and reason of the sample last skipped; empty when none was.
  std::string LastSkipped() const;

 private:
  struct Slab {
    Mapping memory;
    std::shared_ptr<void> share;  // of the budget
    bool free = true;
  };
  // A batch on its way, or a mark between batches: an end, or an error of the engine.
  struct Job {
    TakeKind kind = TakeKind::kBatch;
    Status error;    // of the engine (then there are no samples), or of the first bad sample
    BatchLoan loan;  // empty for a mark
    size_t slab = kNoSlab;
    size_t next = 0;       // first sample that no thread has taken
    size_t left = 0;       // samples not finished
    bool lent = false;     // the loan is not given back yet
    bool dropped = false;  // nobody waits for it any more
    bool fatal = false;    // `error` is not the sample's fault
    size_t failed_at = ~size_t{0};
    std::vector<uint8_t> bad;  // by sample
    uint64_t skipped = 0;
    std::string last_skipped;
    bool finished() const { return left == 0; }
  };
  static constexpr size_t kNoSlab = ~size_t{0};
  // What the decoders borrow for large images: from the budget, one loan a thread.
  class Scratch;
  class Lender;

  Pipeline(std::shared_ptr<Port> source, const PipelineOptions& options,
           std::unique_ptr<Scratch> large, std::vector<std::unique_ptr<Lender>> lenders,
           std::vector<std::unique_ptr<SampleDecoder>> decoders,
           std::shared_ptr<const Catalog> catalog, size_t batch_size, uint64_t stored_bytes);
  friend struct PipelineDelete;
  Status Alive() const;
  void RunFeeder(std::stop_token stop);
  bool Step(size_t thread) override;
  Status DecodeOne(size_t thread, const Job& job, size_t i, std::byte* out);
  // A free slab, made when there is none and may be one more; false when there is none. `*lost`:
  // who lends the memory cannot be reached.
  bool FindSlab(size_t* slab, Status* lost) REQUIRES(mutex_);
  void GiveBack(Slab& slab) REQUIRES(mutex_);
  void FinishJob(Job& job) REQUIRES(mutex_);
  void CountSkipped(Job& job) REQUIRES(mutex_);
  void DropJobs() REQUIRES(mutex_);
  size_t Ready() const REQUIRES(mutex_);
  StallCause Cause() const REQUIRES(mutex_);
  Status Held() const REQUIRES(mutex_);

  // Constant after construction.
  const std::shared_ptr<Port> source_;
  const uint64_t fork_generation_;
  const PipelineOptions options_;
  DecodePool& pool_;
  const std::unique_ptr<Scratch> large_;
  const std::vector<std::unique_ptr<Lender>> lenders_;  // one for each decoder
  // One a thread of the pool; none when it has stopped.
  std::vector<std::unique_ptr<SampleDecoder>> decoders_;
  const std::shared_ptr<const Catalog> catalog_;  // shared with the engine
  const size_t sample_bytes_;
  const std::vector<uint64_t> sample_shape_;
  const size_t slab_bytes_;
  const uint64_t stored_bytes_;  // room that reading on needs
  const size_t ahead_;
  std::shared_ptr<void> scratch_;  // what the decoders hold
  StreamId stream_ = 0;
  bool opened_ = false;  // there is a stream
  Metric& samples_total_;
  Metric& skipped_total_;
  Metric& busy_total_;
  Metric& ready_;

  Mutex control_;  // taken before mutex_: one Seek or Stop at a time
  mutable Mutex mutex_;
  std::condition_variable changed_;                           // for consumer and feeder
  std::deque<std::shared_ptr<Job>> jobs_ GUARDED_BY(mutex_);  // shared with threads decoding them
  std::vector<Slab> slabs_ GUARDED_BY(mutex_);
  EpochLog epochs_ GUARDED_BY(mutex_);
  bool seeking_ GUARDED_BY(mutex_) = false;
  bool taking_ GUARDED_BY(mutex_) = false;  // the feeder is in the engine
  bool halted_ GUARDED_BY(mutex_) = false;  // an error or the stream's end stands in jobs_
  bool stopped_ GUARDED_BY(mutex_) = false;
  bool no_room_ GUARDED_BY(mutex_) = false;  // the feeder found no slab
  uint64_t empty_ GUARDED_BY(mutex_) = 0;    // batches that came out empty, not yet reported
  uint64_t skipped_ GUARDED_BY(mutex_) = 0;
  std::string last_skipped_ GUARDED_BY(mutex_);
  Nanos blocked_since_ GUARDED_BY(mutex_) = -1;

  std::jthread feeder_ GUARDED_BY(control_);
};

}  // namespace forebay
