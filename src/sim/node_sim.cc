#include "sim/node_sim.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <queue>
#include <tuple>
#include <utility>

#include "base/slots.h"
#include "core/sampler.h"
#include "core/scheduler.h"
#include "core/waits.h"

namespace forebay::sim {
namespace {

constexpr uint64_t kTickEvery = uint64_t{1} << 16;  // samples
constexpr Nanos kTuneEvery = 20 * kMilli;           // the engine's

double Seconds(Nanos span) { return static_cast<double>(span) / static_cast<double>(kSecond); }

Nanos SpanOf(double amount, double per_second) {
  return per_second > 0 ? std::llround(amount / per_second * static_cast<double>(kSecond)) : 0;
}

// The folder's content and its disk.
class Folder {
 public:
  Folder(const FolderSpec& spec, size_t samples)
      : spec_(spec), here_(spec.bytes > 0 ? samples : 0), disk_(Settings(spec), 0) {}

  bool Has(SampleId sample) const { return !here_.empty() && here_[sample] == State::kWhole; }
  Nanos Read(uint64_t bytes, Nanos now) { return disk_.Admit(OpKind::kRead, bytes, now).finish_at; }

  // Whether one more copy may be on its way.
  bool MayTake(uint64_t bytes) const {
    return spec_.buffer_bytes == 0 || buffered_ + bytes <= spec_.buffer_bytes;
  }
  // Writes a copy behind the reader, where there is room, and says when it is whole; -1: it is not
  // written.
  Nanos Write(SampleId sample, uint64_t bytes, Nanos now) {
    if (here_[sample] != State::kAbsent || used_ + bytes > spec_.bytes) return -1;
    here_[sample] = State::kOnItsWay;
    used_ += bytes;
    buffered_ += bytes;
    writer_free_at_ = std::max(now, writer_free_at_) +
                      SpanOf(static_cast<double>(bytes), spec_.write_bytes_per_s);
    writes_.push_back({writer_free_at_, sample, bytes});
    return writer_free_at_;
  }
  // Appends the samples that are whole by now, and were not before.
  void Advance(Nanos now, std::vector<SampleId>* stored) {
    for (; !writes_.empty() && writes_.front().at <= now; writes_.pop_front()) {
      here_[writes_.front().sample] = State::kWhole;
      buffered_ -= writes_.front().bytes;
      stored->push_back(writes_.front().sample);
    }
  }
  uint64_t used() const { return used_; }

 private:
  enum class State : uint8_t { kAbsent, kOnItsWay, kWhole };
  struct Copy {
    Nanos at;
    SampleId sample;
    uint64_t bytes;
  };
  static StorageSettings Settings(const FolderSpec& spec) {
    StorageSettings settings;
    settings.read = spec.read;
    settings.bytes_per_s = spec.read_bytes_per_s;
    return settings;
  }

  const FolderSpec spec_;
  std::vector<State> here_;  // by sample
  StorageModel disk_;
  std::deque<Copy> writes_;
  Nanos writer_free_at_ = 0;
  uint64_t used_ = 0;
  uint64_t buffered_ = 0;
};

class Node {
 public:
  Node(const NodeScenario& scenario, const NodeProgressFn& progress, const BatchFn& on_batch,
       const TuneFn& on_tune)
      : sc_(scenario),
        progress_(progress),
        on_batch_(on_batch),
        on_tune_(on_tune),
        scheduler_({.arena_bytes = scenario.arena_bytes, .keep = scenario.keep}),
        tuner_(MakeTuner({.policy = scenario.tuner,
                          .max_reads = scenario.max_in_flight,
                          .max_ahead_bytes = scenario.arena_bytes})),
        source_(scenario.source, 0),
        folder_(scenario.folder, scenario.lengths.size()) {}

  Result<NodeOutcome> Run();

 private:
  // Steps of one read; a read from the folder is one step.
  struct Read {
    ReadAction action;
    Nanos start = 0;
    uint32_t lookups = 0;
    uint32_t opens = 0;
    uint64_t left = 0;  // bytes not asked for yet
    bool asked = false;
    bool from_folder = false;
  };
  static constexpr uint32_t kStepDone = ~uint32_t{0};
  static constexpr uint32_t kTune = kStepDone - 1;
  static constexpr uint32_t kCopied = kTune - 1;
  // (time, number, read or one of these): events of one time happen in the order they were made.
  using Event = std::tuple<Nanos, uint64_t, uint32_t>;

  void At(Nanos when, uint32_t what) { events_.push({when, next_event_++, what}); }
  void Start(const ReadAction& action);
  // Asks for the read's next operation; false when it has none.
  bool NextOp(uint32_t index, Nanos now);
  void Finish(uint32_t index);
  void Pump();
  void Tune();
  size_t limit() const { return sc_.in_flight != 0 ? sc_.in_flight : tuner_->decision().reads; }
  Status Take();
  NodeEpoch& epoch() { return out_.epochs.back(); }

  const NodeScenario& sc_;
  const NodeProgressFn& progress_;
  const BatchFn& on_batch_;
  const TuneFn& on_tune_;
  Scheduler scheduler_;
  const std::unique_ptr<Tuner> tuner_;
  TuneMeter meter_;
  bool changed_ = false;
  StorageModel source_;
  Folder folder_;

  Nanos now_ = 0;
  uint64_t next_event_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Slots<Read> reads_;
  Nanos processor_free_at_ = 0;
  std::vector<ReadAction> actions_;
  std::vector<SampleId> stored_;

  StreamId stream_ = 0;
  Scheduler::Handout handout_;
  LeaseId held_ = kNoLease;
  bool waiting_ = true;  // the consumer wants a batch
  bool done_ = false;
  Nanos waiting_since_ = 0;
  Nanos epoch_start_ = 0;
  uint64_t delivered_ = 0;
  uint64_t next_tick_ = 0;
  NodeOutcome out_;
};

void Node::Start(const ReadAction& action) {
  const uint32_t index = reads_.Take();
  Read& read = reads_[index];
  read = {.action = action, .start = now_};
  Nanos begin = now_;
  if (sc_.reads_per_s > 0) {
    processor_free_at_ = std::max(now_, processor_free_at_) + SpanOf(1, sc_.reads_per_s);
    begin = processor_free_at_;
  }
  if (action.origin == Origin::kTier && folder_.Has(action.sample)) {
    read.from_folder = true;
    At(folder_.Read(action.length, begin), index);
    return;
  }
  read.lookups = sc_.lookups;
  read.opens = sc_.opens;
  read.left = action.length;
  // What the processors still have to do comes first; the model is asked when its turn has come.
  if (begin > now_) {
    At(begin, index);
  } else {
    NextOp(index, now_);
  }
}

bool Node::NextOp(uint32_t index, Nanos now) {
  Read& read = reads_[index];
  OpKind kind = OpKind::kRead;
  uint64_t bytes = 0;
  if (read.lookups > 0) {
    --read.lookups;
    kind = OpKind::kStat;
  } else if (read.opens > 0) {
    --read.opens;
    kind = OpKind::kOpen;
  } else if (read.left > 0 || !read.asked) {
    bytes = std::min(read.left, sc_.read_bytes);
    read.left -= bytes;
    read.asked = true;
  } else {
    return false;
  }
  At(source_.Admit(kind, bytes, now).finish_at + sc_.op_extra, index);
  return true;
}

void Node::Finish(uint32_t index) {
  const Read& read = reads_[index];
  const uint64_t bytes = read.action.length;
  if (read.from_folder) {
    ++epoch().folder_reads;
    epoch().folder_bytes += bytes;
  } else {
    ++epoch().source_reads;
    epoch().source_bytes += bytes;
  }
  const Origin from = read.from_folder ? Origin::kTier : Origin::kSource;
  meter_.OnBytes(bytes, from);
  meter_.OnRequest(now_ - read.start, from);
  scheduler_.OnReadDone(read.action, true, 0, from);
  reads_.Free(index);
}

// Hands the scheduler's wishes on, as the engine does after every event.
void Node::Pump() {
  for (std::vector<OrderAction> orders = scheduler_.lookahead().TakeOrders(); !orders.empty();
       orders = scheduler_.lookahead().TakeOrders()) {
    for (const OrderAction& order : orders) {
      SamplerSpec sampler;
      sampler.size = static_cast<uint32_t>(sc_.lengths.size());
      sampler.seed = sc_.seed;
      scheduler_.ExtendOrder(order.stream, order.generation, order.epoch,
                             EpochOrder(sampler, order.epoch, order.first_position), false);
    }
  }
  stored_.clear();
  folder_.Advance(now_, &stored_);
  for (const SampleId sample : stored_) scheduler_.OnStoreEnded(0, sample, true);
  StoreAction store;
  while (scheduler_.stores().First(&store) && folder_.MayTake(store.length)) {
    scheduler_.stores().Begin(store);
    scheduler_.stores().OnTaken(store);
    const Nanos whole = folder_.Write(store.sample, store.length, now_);
    if (whole < 0) {
      scheduler_.OnStoreEnded(0, store.sample, false);
    } else {
      At(whole, kCopied);
    }
  }
  actions_.clear();
  const uint64_t ahead = sc_.read_ahead != 0 ? sc_.read_ahead : tuner_->decision().ahead_bytes;
  scheduler_.lookahead().SetReadAheadBytes(ahead);
  scheduler_.residency().SetAheadBytes(ahead);
  scheduler_.reads().SetFlightBytes(sc_.in_flight != 0 ? 0 : tuner_->decision().flight_bytes);
  scheduler_.leases().NextReads(limit(), &actions_);
  for (const ReadAction& action : actions_) Start(action);
  meter_.OnWaiting(Waits(scheduler_).CountForReads(), now_);
}

void Node::Tune() {
  if (!changed_ && sc_.change_at != 0 && now_ >= sc_.change_at) {
    changed_ = true;
    source_.Apply(sc_.then, now_);
  }
  const TuneObservation seen = meter_.Observe({.consumers = 1,
                                               .in_flight = scheduler_.reads().requests(),
                                               .ready_bytes = scheduler_.residency().bytes().ready,
                                               .ahead_bytes = scheduler_.residency().bytes().ahead,
                                               .batch_bytes = scheduler_.lookahead().batch_bytes(),
                                               .fixed_reads = sc_.in_flight,
                                               .fixed_bytes = sc_.read_ahead},
                                              now_);
  const TuneDecision& decided = tuner_->Step(seen);
  if (on_tune_) on_tune_(seen, decided);
  At(now_ + kTuneEvery, kTune);
  Pump();
}

// The consumer asks for its next batch; it holds the one before until it has it.
Status Node::Take() {
  while (waiting_) {
    const Scheduler::Take take = scheduler_.leases().TakeBatch(stream_, &handout_);
    switch (take) {
      case Scheduler::Take::kReady: {
        waiting_ = false;
        epoch().stall_seconds += Seconds(now_ - waiting_since_);
        epoch().samples += handout_.samples.size();
        delivered_ += handout_.samples.size();
        uint64_t bytes = 0;
        for (const uint32_t length : handout_.lengths) bytes += length;
        meter_.OnTake(bytes, scheduler_.residency().bytes().ready);
        if (out_.first_batch_seconds == 0) out_.first_batch_seconds = Seconds(now_);
        if (on_batch_) on_batch_(static_cast<uint32_t>(handout_.epoch), handout_.samples);
        if (held_ != kNoLease) scheduler_.leases().Release(held_);
        held_ = handout_.lease;
        const auto samples = static_cast<Nanos>(handout_.samples.size());
        At(now_ + sc_.step + samples * sc_.sample_step, kStepDone);
        break;
      }
      case Scheduler::Take::kEndOfEpoch:
        epoch().stall_seconds += Seconds(now_ - waiting_since_);
        epoch().seconds = Seconds(now_ - epoch_start_);
        epoch_start_ = waiting_since_ = now_;
        if (out_.epochs.size() == sc_.epochs) {
          done_ = true;
          return Status();
        }
        out_.epochs.emplace_back();
        break;
      case Scheduler::Take::kPending:
        Pump();
        return Status();
      case Scheduler::Take::kTooLarge:
        return Status(Code::kResourceExhausted,
                      StrCat("a batch of ", handout_.bytes, " bytes does not fit the memory of ",
                             sc_.arena_bytes, " bytes; simulate a smaller batch or more memory"));
      default:
        return Status(Code::kInternal, "the scheduler refused a batch");
    }
  }
  Pump();
  return Status();
}

Result<NodeOutcome> Node::Run() {
  const size_t samples = sc_.lengths.size();
  if (scheduler_.AddDataset(sc_.lengths, samples * Residency::kBytesPerSample) ==
      Scheduler::kNoRoom) {
    return Status(Code::kResourceExhausted, StrCat("the tables of ", samples, " samples need ",
                                                   samples * Residency::kBytesPerSample,
                                                   " bytes; the memory has ", sc_.arena_bytes));
  }
  if (sc_.folder.bytes > 0) {
    uint64_t bytes = 0;
    for (const uint32_t length : sc_.lengths) bytes += length;
    scheduler_.residency().dataset(0).tier = {
        .present = true,
        .holds_all = bytes <= sc_.folder.bytes,
        .largest = sc_.folder.buffer_bytes == 0 ? ~uint64_t{0} : sc_.folder.buffer_bytes};
  }
  StreamShape shape;
  shape.batch_size = sc_.batch;
  stream_ = scheduler_.OpenStream(shape);
  out_.epochs.emplace_back();
  Pump();
  Tune();
  FOREBAY_RETURN_IF_ERROR(Take());
  const uint64_t total = uint64_t{samples} * sc_.epochs;
  while (!done_) {
    if (events_.size() == 1 && std::get<2>(events_.top()) == kTune) {
      // As in the engine: only the release of what the consumer holds would help.
      return Status(Code::kResourceExhausted,
                    StrCat("the next batch finds no room beside the one that is held, in ",
                           sc_.arena_bytes, " bytes; simulate a smaller batch or more memory"));
    }
    const auto [when, number, what] = events_.top();
    events_.pop();
    now_ = when;
    if (what == kTune) {
      Tune();
    } else if (what == kStepDone) {
      waiting_ = true;
      waiting_since_ = now_;
      FOREBAY_RETURN_IF_ERROR(Take());
    } else if (what == kCopied) {
      Pump();
      if (waiting_ && scheduler_.leases().consumer(stream_).due) FOREBAY_RETURN_IF_ERROR(Take());
    } else if (reads_[what].from_folder || !NextOp(what, now_)) {
      Finish(what);
      Pump();
      if (waiting_ && scheduler_.leases().consumer(stream_).due) FOREBAY_RETURN_IF_ERROR(Take());
    }
    if (delivered_ >= next_tick_) {
      next_tick_ = delivered_ + kTickEvery;
      if (progress_ && !progress_(delivered_, total)) {
        return Status(Code::kCancelled, "the simulation was stopped");
      }
    }
  }
  out_.seconds = Seconds(now_);
  out_.kept_bytes = scheduler_.residency().bytes().kept;
  out_.folder_bytes = folder_.used();
  out_.in_flight_limit = limit();
  out_.read_ahead_bytes = tuner_->decision().ahead_bytes;
  return std::move(out_);
}

Status Bad(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

}  // namespace

Status NodeScenario::Validate() const {
  if (lengths.empty() || lengths.size() > std::numeric_limits<SampleId>::max()) {
    return Bad(StrCat("there are ", lengths.size(), " samples; there must be 1 to ",
                      std::numeric_limits<SampleId>::max()));
  }
  if (batch == 0) return Bad("batch is 0; it must be at least 1");
  if (epochs == 0) return Bad("epochs is 0; it must be at least 1");
  if (step < 0 || sample_step < 0 || op_extra < 0) return Bad("a time is negative");
  if (read_bytes == 0) return Bad("read_bytes is 0; it must be at least 1");
  if (max_in_flight == 0) return Bad("max_in_flight is 0; it must be at least 1");
  if (!(reads_per_s >= 0) || !std::isfinite(reads_per_s)) return Bad("reads_per_s is negative");
  if (!(folder.read_bytes_per_s >= 0) || !(folder.write_bytes_per_s >= 0) || folder.read < 0) {
    return Bad("the folder's rates and its latency cannot be negative");
  }
  FOREBAY_RETURN_IF_ERROR(source.Validate());
  if (source.eio_rate != 0 || source.stall != 0) {
    return Bad("the source has eio_rate or stall_ms; here it neither fails nor stalls");
  }
  return Status();
}

Result<NodeOutcome> SimulateNode(const NodeScenario& scenario, const NodeProgressFn& progress,
                                 const BatchFn& on_batch, const TuneFn& on_tune) {
  FOREBAY_RETURN_IF_ERROR(scenario.Validate());
  return Node(scenario, progress, on_batch, on_tune).Run();
}

}  // namespace forebay::sim
