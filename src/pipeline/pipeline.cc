#include "pipeline/pipeline.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/fork.h"
#include "base/thread.h"
#include "decode/image.h"
#include "port/local_port.h"

namespace forebay {
namespace {

constexpr Nanos kSlice = 100 * kMilli;  // longest single sleep of any wait
// An order is worked out in a moment, which nobody tells the consumer of; a whole slice would be
// charged to it.
constexpr Nanos kPlanSlice = 2 * kMilli;
constexpr uint64_t kPage = 4096;
// Samples a thread takes at once: large batches of small arrays would spend their time in locks.
constexpr size_t kMostAtOnce = 16;

size_t SlabBytes(size_t batch_size, size_t sample_bytes) {
  return (std::max<size_t>(batch_size * sample_bytes, 1) + kPage - 1) / kPage * kPage;
}

// Enough finished batches to ride out a slow one; large batches get by with fewer.
size_t ChooseAhead(size_t slab_bytes, uint64_t budget) {
  const uint64_t share = budget / 4 / slab_bytes;
  return static_cast<size_t>(std::clamp<uint64_t>(share, 2, 6));
}

// What one batch being decoded and one being read take, with some slack for batches above the mean.
uint64_t StoredBytes(const Catalog& catalog, size_t batch_size) {
  if (catalog.size() == 0) return 0;
  uint64_t sum = 0;
  uint64_t longest = 0;
  for (SampleId s = 0; s < catalog.size(); ++s) {
    const uint64_t bytes = ArenaAllocator::Rounded(catalog.length(s));
    sum += bytes;
    longest = std::max(longest, bytes);
  }
  return 2 * batch_size * (sum / catalog.size()) + longest;
}

// The member of a WebDataset sample that holds what is to be decoded.
Status PickField(const Catalog& catalog, SampleId sample, DecodeOptions::Kind kind,
                 std::span<const std::byte>* stored) {
  std::string known;
  for (const FieldView& field : catalog.Fields(sample)) {
    const std::span<const std::byte> bytes = stored->subspan(field.offset, field.length);
    const bool wanted = kind == DecodeOptions::Kind::kImage
                            ? FormatOf(bytes) != ImageFormat::kUnknown
                            : field.name.ends_with("npy") || field.name.ends_with("npz");
    if (wanted) {
      *stored = bytes;
      return Status();
    }
    known += StrCat(known.empty() ? "" : ", ", field.name);
  }
  return Status(
      Code::kDataLoss,
      StrCat("no member is ", kind == DecodeOptions::Kind::kImage ? "an image" : "an array",
             "; there are: ", known));
}

}  // namespace

class Pipeline::Scratch {
 public:
  Scratch(std::shared_ptr<Port> source, Nanos wait) : source_(std::move(source)), wait_(wait) {}

  // Another image may have the memory, here or in another process: it is waited for, as long as
  // the budget as such is large enough.
  Result<std::shared_ptr<void>> Take(uint64_t bytes) {
    const Nanos start = SteadyClock().Now();
    while (true) {
      uint64_t returned = 0;
      {
        MutexLock lock(mutex_);
        returned = returned_;
      }
      Result<std::shared_ptr<void>> share = source_->Lend(bytes, 0, 0);
      if (share || share.error().code() != Code::kResourceExhausted) return share;
      const uint64_t budget = source_->budget();
      MutexLock lock(mutex_);
      if (stopped_) return Status(Code::kCancelled, "the pipeline was stopped");
      if (bytes > budget || SteadyClock().Now() - start > wait_) {
        return Status(
            Code::kResourceExhausted,
            StrCat("decoding it takes ", bytes + kScratchBytes, " bytes, more than the memory ",
                   "budget of ", budget, " bytes has left; raise memory=, or leave such images ",
                   "out by max_pixels= and on_error=\"skip\""));
      }
      if (returned == returned_) {
        changed_.wait_for(lock.native(), std::chrono::nanoseconds(kSlice));
      }
    }
  }
  void OnReturn() {
    MutexLock lock(mutex_);
    ++returned_;
    changed_.notify_all();
  }
  void Stop() {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

 private:
  const std::shared_ptr<Port> source_;
  const Nanos wait_;
  Mutex mutex_;
  std::condition_variable changed_;
  uint64_t returned_ GUARDED_BY(mutex_) = 0;  // loans
  bool stopped_ GUARDED_BY(mutex_) = false;
};

class Pipeline::Lender final : public ScratchLender {
 public:
  explicit Lender(Scratch& scratch) : scratch_(scratch) {}
  Status Take(uint64_t bytes) override {
    Result<std::shared_ptr<void>> share = scratch_.Take(bytes);
    if (!share) return share.error();
    share_ = *std::move(share);
    return Status();
  }
  void GiveBack() override {
    share_ = nullptr;
    scratch_.OnReturn();
  }

 private:
  Scratch& scratch_;
  std::shared_ptr<void> share_;
};

Status PipelineOptions::Validate() const {
  if (ahead > 1024) {
    return Status(Code::kInvalidArgument, StrCat("ahead is ", ahead, "; it takes 0 to 1024"));
  }
  return Status();
}

Result<PipelinePtr> Pipeline::Make(Engine& engine, StreamOptions stream,
                                   const PipelineOptions& options) {
  FOREBAY_RETURN_IF_ERROR(engine.WaitSized(stream.shape.dataset));  // memory is lent by lengths
  return Make(std::make_shared<LocalPort>(engine), stream, options);
}

Result<PipelinePtr> Pipeline::Make(std::shared_ptr<Port> source, StreamOptions stream,
                                   const PipelineOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  std::shared_ptr<const Catalog> catalog = source->Find(stream.shape.dataset);
  if (catalog == nullptr) {
    return Status(Code::kInvalidArgument,
                  StrCat("data set ", stream.shape.dataset, " does not exist"));
  }
  // An epoch's order repeats no sample within a rank, so no batch is larger than the data set.
  const size_t batch_size = stream.declared
                                ? stream.shape.batch_size
                                : std::min<size_t>(stream.shape.batch_size, catalog->size());
  const uint64_t stored_bytes = StoredBytes(*catalog, batch_size) * source->sharers();
  auto large = std::make_unique<Scratch>(source, options.release_wait);
  std::vector<std::unique_ptr<Lender>> lenders;
  std::vector<std::unique_ptr<SampleDecoder>> decoders;
  for (size_t i = 0; i < source->decode_pool().threads(); ++i) {
    lenders.push_back(std::make_unique<Lender>(*large));
    Result<std::unique_ptr<SampleDecoder>> decoder =
        MakeSampleDecoder(options.decode, lenders.back().get());
    if (!decoder) return decoder.error();
    decoders.push_back(*std::move(decoder));
  }
  Result<std::shared_ptr<void>> scratch =
      source->Lend(kScratchBytes * decoders.size(), 0, options.release_wait);
  if (!scratch) return scratch.error();
  PipelinePtr pipeline(new Pipeline(source, options, std::move(large), std::move(lenders),
                                    std::move(decoders), std::move(catalog), batch_size,
                                    stored_bytes));
  pipeline->scratch_ = *std::move(scratch);
  {
    // The least that can work, before anything is read: one with the consumer, one being filled.
    MutexLock lock(pipeline->mutex_);
    for (size_t i = 0; i < 2; ++i) {
      size_t slab = 0;
      Status lost;
      if (!pipeline->FindSlab(&slab, &lost)) return lost.ok() ? pipeline->Held() : lost;
      pipeline->slabs_[slab].free = false;
    }
    for (Slab& slab : pipeline->slabs_) slab.free = true;
  }
  stream.shape.contiguous = false;
  stream.shape.itemised = false;
  stream.ahead_of_consumer = true;
  Result<StreamId> opened = source->OpenStream(stream);
  if (!opened) return opened.error();
  pipeline->stream_ = *opened;
  pipeline->opened_ = true;
  Pipeline* const raw = pipeline.get();
  FOREBAY_RETURN_IF_ERROR(pipeline->pool_.Add(*pipeline));
  auto feeder = StartThread("forebay-feed", [raw](std::stop_token stop) { raw->RunFeeder(stop); });
  if (!feeder) return feeder.error();
  MutexLock lock(pipeline->control_);
  pipeline->feeder_ = *std::move(feeder);
  return pipeline;
}

Pipeline::Pipeline(std::shared_ptr<Port> source, const PipelineOptions& options,
                   std::unique_ptr<Scratch> large, std::vector<std::unique_ptr<Lender>> lenders,
                   std::vector<std::unique_ptr<SampleDecoder>> decoders,
                   std::shared_ptr<const Catalog> catalog, size_t batch_size, uint64_t stored_bytes)
    : source_(std::move(source)),
      fork_generation_(ForkGeneration()),
      options_(options),
      pool_(source_->decode_pool()),
      large_(std::move(large)),
      lenders_(std::move(lenders)),
      decoders_(std::move(decoders)),
      catalog_(std::move(catalog)),
      sample_bytes_(decoders_.front()->sample_bytes()),
      sample_shape_(decoders_.front()->shape()),
      slab_bytes_(SlabBytes(batch_size, sample_bytes_)),
      stored_bytes_(stored_bytes),
      ahead_(options.ahead != 0 ? options.ahead
                                : ChooseAhead(slab_bytes_, source_->budget() / source_->sharers())),
      samples_total_(source_->registry().AddCounter("forebay_decode_samples_total",
                                                    "Samples decoded, whole or skipped")),
      skipped_total_(source_->registry().AddCounter("forebay_decode_skipped_samples_total",
                                                    "Samples left out because they are corrupt")),
      busy_total_(source_->registry().AddCounter("forebay_decode_busy_nanoseconds_total",
                                                 "Time decode threads spent decoding")),
      ready_(source_->registry().AddGauge("forebay_decode_ready_batches",
                                          "Finished batches that wait for their consumer")) {}

void PipelineDelete::operator()(Pipeline* pipeline) const {
  if (pipeline == nullptr || pipeline->fork_generation_ != ForkGeneration()) return;
  delete pipeline;
}

Status Pipeline::Alive() const {
  if (fork_generation_ == ForkGeneration()) return Status();
  return Status(Code::kCancelled,
                "this pipeline belongs to the parent process; a forked child makes its own");
}

Pipeline::~Pipeline() { Stop(); }

void Pipeline::Stop() {
  if (!Alive().ok()) return;
  MutexLock control(control_);
  feeder_.request_stop();
  {
    MutexLock lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    changed_.notify_all();
  }
  if (opened_) (void)source_->CloseStream(stream_);  // ends a wait of the feeder
  if (feeder_.joinable()) feeder_.join();
  large_->Stop();
  pool_.Remove(*this);
  decoders_.clear();
  scratch_ = nullptr;
  MutexLock lock(mutex_);
  DropJobs();
  for (Slab& slab : slabs_) {
    if (slab.free) GiveBack(slab);
  }
}

void Pipeline::GiveBack(Slab& slab) {
  slab.memory = Mapping();
  slab.share = nullptr;
}

// ---- consumer --------------------------------------------------------------------------------

size_t Pipeline::Ready() const {
  size_t ready = 0;
  for (const std::shared_ptr<Job>& job : jobs_) {
    if (job->kind == TakeKind::kBatch && job->finished()) ++ready;
  }
  return ready;
}

// What the consumer's wait is charged to.
StallCause Pipeline::Cause() const {
  if (!jobs_.empty()) return StallCause::kDecode;
  if (no_room_) return StallCause::kMemory;
  return source_->WaitCause(stream_);
}

Status Pipeline::Held() const {
  size_t held = 0;
  for (const Slab& slab : slabs_) held += slab.free ? 0 : 1;
  return Status(Code::kResourceExhausted,
                StrCat("a finished batch of ", slab_bytes_, " bytes finds no room in the memory ",
                       "budget of ", source_->budget(), " bytes, ", held,
                       " batches are held; let go of earlier batches, lower batch_size or raise "
                       "memory="));
}

Result<TakeKind> Pipeline::Take(Nanos wait, FinishedBatch* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const Nanos start = SteadyClock().Now();
  Nanos now = start;
  MutexLock lock(mutex_);
  epochs_.Begin(start);
  while (true) {
    if (stopped_) return Status(Code::kCancelled, "the pipeline was stopped");
    if (!jobs_.empty() && jobs_.front()->finished()) {
      Job& job = *jobs_.front();
      blocked_since_ = -1;
      if (!job.error.ok()) {
        Status error = job.error;
        if (job.slab == kNoSlab) {  // of the engine, which tries the same batch again
          halted_ = false;
          jobs_.pop_front();
          changed_.notify_all();
        }
        return error;
      }
      if (job.kind == TakeKind::kEndOfStream) {
        epochs_.EndOfStream();
        return job.kind;
      }
      if (job.kind == TakeKind::kEndOfEpoch) {
        (void)epochs_.End(SteadyClock().Now());
        empty_ = 0;
        jobs_.pop_front();
        changed_.notify_all();
        return TakeKind::kEndOfEpoch;
      }
      CountSkipped(job);
      if (job.loan.samples.empty()) {
        ++empty_;
        slabs_[job.slab].free = true;
        jobs_.pop_front();
        changed_.notify_all();
        continue;
      }
      pool_.OnTake(Ready(), ahead_);
      now = SteadyClock().Now();
      epochs_.Count(job.loan.epoch, job.loan.samples.size(),
                    job.loan.samples.size() * sample_bytes_, now);
      out->slab = job.slab;
      out->data = slabs_[job.slab].memory.data();
      out->samples = std::move(job.loan.samples);
      out->epoch = job.loan.epoch;
      out->index = job.loan.index;
      out->batches = 1 + std::exchange(empty_, 0);
      jobs_.pop_front();
      ready_.Set(Ready());
      changed_.notify_all();  // the feeder may go one further
      return TakeKind::kBatch;
    }
    const StallCause cause = Cause();
    Status held;
    if (cause == StallCause::kMemory) held = no_room_ ? Held() : source_->Blocked(stream_);
    if (held.ok()) {
      blocked_since_ = -1;
    } else if (blocked_since_ < 0) {
      blocked_since_ = now;
    } else if (now - blocked_since_ > options_.release_wait) {
      blocked_since_ = -1;
      return held;
    }
    const Nanos left = wait - (now - start);
    if (left <= 0) return TakeKind::kPending;
    const Nanos slice = cause == StallCause::kPlan ? kPlanSlice : kSlice;
    changed_.wait_for(lock.native(), std::chrono::nanoseconds(std::min(left, slice)));
    const Nanos after = SteadyClock().Now();
    epochs_.Waited(cause, after - now);
    source_->CountStall(stream_, cause, after - now);
    now = after;
  }
}

// What was skipped in batches that are dropped, or are still ahead, is nobody's loss.
void Pipeline::CountSkipped(Job& job) {
  if (job.skipped == 0) return;
  skipped_ += job.skipped;
  skipped_total_.Add(job.skipped);
  last_skipped_ = std::move(job.last_skipped);
}

void Pipeline::Release(size_t slab) {
  if (!Alive().ok()) return;  // the lock may be held by a thread that this child does not have
  MutexLock lock(mutex_);
  slabs_[slab].free = true;
  if (stopped_) GiveBack(slabs_[slab]);
  changed_.notify_all();
}

Status Pipeline::Seek(uint64_t epoch, uint64_t position) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock control(control_);
  {
    MutexLock lock(mutex_);
    if (stopped_) return Status(Code::kCancelled, "the pipeline was stopped");
    seeking_ = true;
    while (taking_) {
      changed_.notify_all();
      changed_.wait_for(lock.native(), std::chrono::nanoseconds(kSlice));
    }
    DropJobs();
    (void)epochs_.End(SteadyClock().Now());
    empty_ = 0;
  }
  const Status status = source_->Seek(stream_, epoch, position);
  MutexLock lock(mutex_);
  seeking_ = false;
  halted_ = false;
  changed_.notify_all();
  return status;
}

std::vector<std::span<std::byte>> Pipeline::Slabs() const {
  MutexLock lock(mutex_);
  std::vector<std::span<std::byte>> out;
  for (const Slab& slab : slabs_) {
    if (slab.memory.data() != nullptr) out.emplace_back(slab.memory.data(), slab_bytes_);
  }
  return out;
}

std::vector<EpochStats> Pipeline::Stats() const {
  // Without who has read, the rest is known here.
  const Result<std::vector<EpochStats>> told = source_->Stats(stream_);
  const std::vector<EpochStats> reads = told ? *told : std::vector<EpochStats>();
  MutexLock lock(mutex_);
  std::vector<EpochStats> out = epochs_.Stats(SteadyClock().Now());
  // An epoch that was begun anew stands in both lists again: match from the end.
  size_t at = reads.size();
  for (size_t i = out.size(); i-- > 0;) {
    while (at > 0 && reads[at - 1].epoch != out[i].epoch) --at;
    if (at == 0) break;
    out[i].source_reads = reads[at - 1].source_reads;
    out[i].source_bytes = reads[at - 1].source_bytes;
    out[i].peer_reads = reads[at - 1].peer_reads;
    out[i].peer_bytes = reads[at - 1].peer_bytes;
    --at;
  }
  return out;
}

std::string Pipeline::WaitingFor() const {
  {
    MutexLock lock(mutex_);
    if (!jobs_.empty()) {
      const Job& job = *jobs_.front();
      if (job.kind == TakeKind::kBatch && !job.finished()) {
        return StrCat("decode: ", job.left, " samples of batch ", job.loan.index, " are not done");
      }
    }
    if (no_room_) return "memory: all finished batches are held";
  }
  return source_->WaitingFor(stream_);
}

void Pipeline::ChargeCopy(Nanos waited) {
  MutexLock lock(mutex_);
  epochs_.WaitedAfter(StallCause::kCopy, waited);
  source_->CountStall(stream_, StallCause::kCopy, waited);
}

uint64_t Pipeline::skipped() const {
  MutexLock lock(mutex_);
  return skipped_;
}

std::string Pipeline::LastSkipped() const {
  MutexLock lock(mutex_);
  return last_skipped_;
}

// ---- feeder ----------------------------------------------------------------------------------

bool Pipeline::FindSlab(size_t* slab, Status* lost) {
  for (size_t i = 0; i < slabs_.size(); ++i) {
    if (!slabs_[i].free) continue;
    *slab = i;
    return true;
  }
  // One is with the consumer and one on its way to a GPU. Consumers that hold more get more, as far
  // as the budget goes.
  const bool held = jobs_.empty();
  if (slabs_.size() >= ahead_ + 2 && !held) return false;
  // Without the first two nothing works; further ones leave room for what they are filled from.
  const bool needed = slabs_.size() < 2;
  Result<std::shared_ptr<void>> share =
      source_->Lend(slab_bytes_, needed ? 0 : stored_bytes_, needed ? options_.release_wait : 0);
  if (!share) {
    if (share.error().code() != Code::kResourceExhausted) *lost = share.error();
    return false;
  }
  void* memory =
      mmap(nullptr, slab_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  (void)madvise(memory, slab_bytes_, MADV_HUGEPAGE);  // a refusal is fine
  Slab made;
  made.memory = Mapping(memory, slab_bytes_);
  made.share = *std::move(share);
  slabs_.push_back(std::move(made));
  *slab = slabs_.size() - 1;
  return true;
}

void Pipeline::RunFeeder(std::stop_token stop) {
  auto work = std::make_shared<Job>();
  MutexLock lock(mutex_);
  while (!stop.stop_requested()) {
    size_t batches = 0;
    for (const std::shared_ptr<Job>& job : jobs_) batches += job->kind == TakeKind::kBatch ? 1 : 0;
    size_t slab = 0;
    Status lost;
    // Marks count too: there may be epochs without any batch.
    bool go = !seeking_ && !halted_ && batches < ahead_ && jobs_.size() < 2 * ahead_;
    if (go) {
      go = FindSlab(&slab, &lost);
      no_room_ = !go && lost.ok();
    }
    if (!lost.ok()) {
      work->error = std::move(lost);
      halted_ = true;
      jobs_.push_back(std::exchange(work, std::make_shared<Job>()));
      changed_.notify_all();
      continue;
    }
    if (!go) {
      changed_.wait_for(lock.native(), std::chrono::nanoseconds(kSlice));
      continue;
    }
    slabs_[slab].free = false;
    taking_ = true;
    mutex_.Unlock();
    Result<TakeKind> taken = TakeKind::kPending;
    try {
      taken = source_->Take(stream_, kSlice, &work->loan);
    } catch (const std::bad_alloc&) {
      taken = Status(Code::kResourceExhausted, "out of memory while taking a batch");
    }
    mutex_.Lock();
    taking_ = false;
    const bool batch = taken && *taken == TakeKind::kBatch;
    if (!batch || seeking_) slabs_[slab].free = true;
    if (taken && *taken == TakeKind::kPending) {
      if (seeking_) changed_.notify_all();
      continue;
    }
    if (seeking_ || stop.stop_requested()) {
      // What was taken belongs to where the stream stood before.
      if (batch) (void)source_->Release(work->loan.lease);
      slabs_[slab].free = true;
      changed_.notify_all();
      continue;
    }
    if (batch) {
      work->slab = slab;
      work->lent = true;
      work->left = work->loan.samples.size();
      work->bad.assign(work->left, 0);
    } else {
      work->loan = BatchLoan();
      if (taken) work->kind = *taken;
      if (!taken) work->error = taken.error();
      halted_ = !taken || *taken == TakeKind::kEndOfStream;
    }
    jobs_.push_back(std::exchange(work, std::make_shared<Job>()));
    changed_.notify_all();
    if (batch) {
      mutex_.Unlock();
      pool_.Wake();
      mutex_.Lock();
    }
  }
}

// ---- decode threads --------------------------------------------------------------------------

Status Pipeline::DecodeOne(size_t thread, const Job& job, size_t i, std::byte* out) {
  const SampleId sample = job.loan.samples[i];
  std::span<const std::byte> stored(job.loan.base + job.loan.offsets[i], job.loan.lengths[i]);
  const SampleKey key{options_.seed, static_cast<uint32_t>(job.loan.epoch), sample};
  try {
    if (catalog_->format() == Format::kWebDataset) {
      FOREBAY_RETURN_IF_ERROR(PickField(*catalog_, sample, options_.decode.kind, &stored));
    }
    return decoders_[thread]->Decode(stored, key, out);
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "out of memory while decoding");
  }
}

bool Pipeline::Step(size_t thread) {
  std::shared_ptr<Job> job;
  size_t begin = 0;
  size_t end = 0;
  std::byte* slab = nullptr;
  {
    MutexLock lock(mutex_);
    for (const std::shared_ptr<Job>& candidate : jobs_) {
      if (candidate->kind != TakeKind::kBatch ||
          candidate->next >= candidate->loan.samples.size()) {
        continue;
      }
      job = candidate;
      break;
    }
    if (job == nullptr) return false;
    begin = job->next;
    const size_t undone = job->loan.samples.size() - begin;
    const size_t share = std::clamp<size_t>(undone / (8 * decoders_.size()), 1, kMostAtOnce);
    end = begin + share;
    job->next = end;
    slab = slabs_[job->slab].memory.data();
  }
  const Nanos start = SteadyClock().Now();
  std::vector<std::pair<size_t, Status>> bad;
  for (size_t i = begin; i < end; ++i) {
    Status status = DecodeOne(thread, *job, i, slab + i * sample_bytes_);
    if (status.ok()) continue;
    bad.emplace_back(i, Status(status.code(), StrCat(catalog_->root(), "/",
                                                     catalog_->SampleName(job->loan.samples[i]),
                                                     ": ", status.message())));
  }
  samples_total_.Add(end - begin);
  busy_total_.Add(static_cast<uint64_t>(SteadyClock().Now() - start));
  bool give_back = false;
  {
    MutexLock lock(mutex_);
    for (auto& [i, status] : bad) {
      job->bad[i] = 1;
      // The first of the batch is reported, whichever thread came first; but what is not a sample's
      // fault before all others.
      const bool fatal = status.code() == Code::kResourceExhausted;
      if (fatal != job->fatal ? fatal : i < job->failed_at) {
        job->fatal = fatal;
        job->failed_at = i;
        job->error = std::move(status);
      }
    }
    job->left -= end - begin;
    if (job->left == 0) {
      give_back = std::exchange(job->lent, false);
      FinishJob(*job);
      changed_.notify_all();
    }
  }
  if (give_back) (void)source_->Release(job->loan.lease);
  return true;
}

// All samples are decoded, or found to be bad.
void Pipeline::FinishJob(Job& job) {
  ready_.Set(Ready());
  if (job.dropped) {
    slabs_[job.slab].free = true;
    return;
  }
  if (job.error.ok() || !options_.skip_corrupt || job.fatal) return;
  job.last_skipped = job.error.message();
  std::byte* const slab = slabs_[job.slab].memory.data();
  size_t kept = 0;
  for (size_t i = 0; i < job.loan.samples.size(); ++i) {
    if (job.bad[i]) continue;
    if (kept != i) {
      std::memmove(slab + kept * sample_bytes_, slab + i * sample_bytes_, sample_bytes_);
      job.loan.samples[kept] = job.loan.samples[i];
    }
    ++kept;
  }
  job.skipped = job.loan.samples.size() - kept;
  job.loan.samples.resize(kept);
  job.error = Status();
}

// Forgets what was taken ahead. A batch that threads are still in is given back by the last.
void Pipeline::DropJobs() {
  for (const std::shared_ptr<Job>& job : jobs_) {
    if (job->slab == kNoSlab) continue;
    if (job->finished()) {
      slabs_[job->slab].free = true;  // its loan went back when it was finished
      continue;
    }
    job->left -= job->loan.samples.size() - job->next;
    job->next = job->loan.samples.size();
    job->dropped = true;
    if (job->left != 0) continue;
    job->lent = false;
    (void)source_->Release(job->loan.lease);
    slabs_[job->slab].free = true;
  }
  jobs_.clear();
}

}  // namespace forebay
