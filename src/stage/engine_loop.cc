// The engine's loop thread: the only one that talks to sources and tiers.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "core/waits.h"
#include "stage/engine.h"

namespace forebay {
namespace {

constexpr Nanos kSlice = 100 * kMilli;  // longest single sleep
constexpr size_t kReapAtOnce = 64;
// How often reads that may hang are looked for. One that has taken less than the longer time does
// not hang: on fast storage it waits for a processor, or to be reaped.
constexpr Nanos kLookSoonest = 5 * kMilli;
constexpr Nanos kLookLatest = 20 * kMilli;
// How often the tuner is asked.
constexpr Nanos kTuneEvery = 20 * kMilli;
// A stream that has not asked for so long is not a consumer that could wait.
constexpr Nanos kLately = kSecond;
// More than a request to a peer may take before the source is read instead.
constexpr Nanos kPeerPatience = 5 * kSecond;

// How long no copy may end while a consumer waits; it may be for memory that copies fill.
constexpr Nanos kWaitedForCopies = 1500 * kMilli;
// Reads that a cache folder has under way.
constexpr size_t kFolderReads = 4;

uint64_t RequestBytes(const ReadAction& read) {
  return read.request_bytes != 0 ? read.request_bytes : read.length;
}

}  // namespace

void Engine::Finished(DatasetState& dataset, const ReadAction& read, SourceDone& done,
                      uint32_t arrived_crc, Origin from) {
  read_retries_total_.Add(done.retries);
  if (options_.verify && done.status.ok()) {
    if (arrived_crc != done.crc) {
      corrupt_total_.Add(1);
      constexpr int kRereads = 3;
      if (++rereads_[read.serial] <= kRereads) {
        outbox_.push_back(read);
        return;
      }
      done.status =
          Status(Code::kDataLoss,
                 StrCat(dataset.catalog->root(), "/", dataset.catalog->SampleName(read.sample),
                        ": the bytes that arrived do not match their checksum, ", kRereads + 1,
                        " times in a row"));
    }
    rereads_.erase(read.serial);
  }
  if (done.status.ok() && done.stamp != 0 && IsOlder(dataset, read.sample, done.stamp)) {
    outbox_.push_back(read);
    return;
  }
  if (!done.status.ok()) {
    read_errors_total_.Add(1);
    if (!scheduler_.residency().dataset(read.dataset).Dead(read.sample)) {
      failures_.insert_or_assign({read.dataset, read.sample}, done.status);
    }
  } else if (from == Origin::kPeer) {
    ++dataset.peer_reads;
    dataset.peer_bytes += read.length;
    peer_reads_total_.Add(1);
    peer_read_bytes_total_.Add(read.length);
  } else if (from == Origin::kSource) {
    ++dataset.reads;
    const uint64_t bytes = read.length + done.gap_bytes;
    dataset.read_bytes += bytes;
    reads_total_.Add(1);
    read_bytes_total_.Add(bytes);
  }
  if (done.status.ok() && done.changed) NoteChanged(dataset, read);
  const size_t requests = scheduler_.reads().requests();
  scheduler_.OnReadDone(read, done.status.ok(), done.crc, from);
  meter_.OnBytes(read.length, from);
  if (scheduler_.reads().requests() < requests) meter_.OnRequest(done.latency_ns, from);
}

void Engine::StepTuner(Nanos now) {
  uint64_t consumers = 0;
  for (const StreamState& stream : streams_) {
    consumers += stream.open && now - stream.last_ask < kLately ? 1 : 0;
  }
  uint64_t shared = 0;
  const Nanos held = scheduler_.jobs().held_total();
  if (scheduler_.jobs().AnyLimited()) {
    shared = 2 * (held - held_seen_) > now - tuner_stepped_ ? 2 : 1;
  }
  held_seen_ = held;
  tuner_stepped_ = now;
  const TuneObservation seen = meter_.Observe({.consumers = consumers,
                                               .in_flight = scheduler_.reads().requests(),
                                               .ready_bytes = scheduler_.residency().bytes().ready,
                                               .ahead_bytes = scheduler_.residency().bytes().ahead,
                                               .batch_bytes = scheduler_.lookahead().batch_bytes(),
                                               .fixed_reads = fixed_reads_,
                                               .fixed_bytes = fixed_ahead_,
                                               .shared = shared},
                                              now);
  if (tuning_.on.value() == 0) return;
  const TuneDecision before = tuner_->decision();
  const TuneDecision& after = tuner_->Step(seen);
  if (after.reads != before.reads || after.ahead_bytes != before.ahead_bytes) {
    tuning_.decisions_total.Add(1);
    tuning_.reads.Set(after.reads);
    tuning_.bytes.Set(after.ahead_bytes);
  }
  if (!options_.tuner_log.empty()) {
    tuner_lines_ += TuneLogLine(seen, after);
  }
}

void Engine::Learn(DatasetState& dataset, const ReadsUnderWay::Read& read, const SourceDone& done,
                   Origin from) {
  // Where a warm folder was not known to have the sample, the depth is of another origin. Peers
  // have models of their own.
  if (!done.status.ok() || from != read.action.likely || !read.first) return;
  if (from == Origin::kPeer) return;
  OriginModel& model = from == Origin::kTier ? dataset.tier_model : dataset.source_model;
  // A group that failed was read one by one.
  const uint64_t bytes = done.group_size > 1 ? RequestBytes(read.action) : read.action.length;
  model.OnRead(bytes, read.depth, done.latency_ns);
  if (from == Origin::kTier) dataset.tier_answer = done.latency_ns;
}

void Engine::UpdateCosts(DatasetId id, DatasetState& dataset, const ReadsUnderWay& under_way) {
  ReadCosts costs;
  const size_t depth = std::max<size_t>(1, under_way.depth(Origin::kSource));
  if (dataset.source_model.known()) {
    costs.merge_bytes = dataset.source_model.MergeBytes(depth);
    costs.merge_gap = dataset.source_model.MergeGap(depth);
  }
  if (dataset.tiered != nullptr) {
    costs.tier = PlaceCost::Of(dataset.tier_model, dataset.mean_bytes);
    costs.source = PlaceCost::Of(dataset.source_model, dataset.mean_bytes);
    costs.tier.last = static_cast<double>(dataset.tier_answer);
    // Of a disk that stalls the age of its oldest read tells as it happens, and when it is over.
    const size_t tier_depth = std::max<size_t>(1, under_way.depth(Origin::kTier));
    const Nanos oldest = under_way.oldest_tier_age();
    if (oldest > dataset.tier_model.Tail(dataset.mean_bytes, tier_depth)) {
      costs.tier.stuck = static_cast<double>(oldest);
    }
    costs.late = Waits(scheduler_).AnyForSamples();
    // Neighbours are staged for the folder's sake: not when it cannot take them.
    if (dataset.tiered->write_room() < 0.5) costs.merge_bytes = 0;
  }
  scheduler_.residency().dataset(id).costs = costs;
}

bool Engine::ReapInto(std::span<DatasetState* const> datasets, ReadsUnderWay& under_way,
                      bool* arrived) {
  std::array<SourceDone, kReapAtOnce> done;
  std::array<uint32_t, kReapAtOnce> crcs{};
  std::array<ReadsUnderWay::Read, kReapAtOnce> reads;
  bool busy = false;
  for (size_t d = 0; d < datasets.size(); ++d) {
    if (datasets[d] == nullptr) continue;
    DatasetState& dataset = *datasets[d];
    const size_t n = dataset.source->Reap(done);
    dataset.flying -= n;
    std::vector<TieredSource::Ended> copies;
    std::vector<SampleId> dropped;
    if (dataset.tiered != nullptr) {
      copies = dataset.tiered->TakeEnded();
      dropped = dataset.tiered->TakeDropped();
    }
    if (n == 0 && copies.empty() && dropped.empty()) continue;
    busy |= n == done.size();
    *arrived = true;
    auto from = [&](size_t i) {
      if (dataset.tiered != nullptr && dataset.tiered->FromTier(i)) return Origin::kTier;
      return done[i].peer >= 0 ? Origin::kPeer : Origin::kSource;
    };
    for (size_t i = 0; i < n; ++i) {
      reads[i] = under_way.Remove(done[i].tag);
      // What the folder has was not looked for: it is not known to lack the sample.
      const bool passed = dataset.tiered != nullptr && dataset.tiered->PassedBy(i);
      if (passed) reads[i].action.origin = Origin::kSource;
      const ReadAction& read = reads[i].action;
      if (options_.verify) crcs[i] = Crc32c({arena_.data() + read.offset, read.length});
      Learn(dataset, reads[i], done[i], from(i));
    }
    MutexLock lock(mutex_);
    for (const TieredSource::Ended& copy : copies) {
      scheduler_.OnStoreEnded(static_cast<DatasetId>(d), copy.sample, copy.stored);
    }
    for (const SampleId s : dropped) dataset.dropping.erase(s);
    if (!dropped.empty()) dropped_.notify_all();
    for (size_t i = 0; i < n; ++i) Finished(dataset, reads[i].action, done[i], crcs[i], from(i));
    UpdateCosts(static_cast<DatasetId>(d), dataset, under_way);
    if (dataset.tiered != nullptr) UpdateFolderRoom();
    Collect();
    NotifyDue();
  }
  return busy;
}

// Copies what has been read for the cache folder out of the arena, as far as the write buffer has
// room; the rest waits where it is. True: there may be more.
bool Engine::StoreDue(std::span<DatasetState* const> datasets, bool* arrived) {
  constexpr size_t kStoreAtOnce = 32;
  struct Copy {
    StoreAction action;
    uint32_t reserved = 0;
    bool refused = false;
    bool held = false;
    bool changed = false;
  };
  std::vector<Copy> copies;
  {
    MutexLock lock(mutex_);
    StoreAction next;
    while (copies.size() < kStoreAtOnce && scheduler_.stores().First(&next)) {
      if (next.dataset >= datasets.size() || datasets[next.dataset] == nullptr) break;
      const std::optional<uint32_t> reserved =
          datasets[next.dataset]->tiered->ReserveCopy(next.length);
      if (!reserved) break;
      scheduler_.stores().Begin(next);
      copies.push_back({next, *reserved});
      // Its name says another time than the bytes are of.
      copies.back().changed = datasets[next.dataset]->changed.contains(next.sample);
    }
  }
  if (copies.empty()) return false;
  for (Copy& copy : copies) {
    const StoreAction& store = copy.action;
    TieredSource& tiered = *datasets[store.dataset]->tiered;
    if (copy.changed) {
      tiered.Abandon(copy.reserved);
      copy.refused = true;
      continue;
    }
    copy.refused = !tiered.Store(copy.reserved, store.sample,
                                 {arena_.data() + store.offset, store.length}, store.crc);
    // Another data set, or the same file under another number, has put it there.
    copy.held = copy.refused && tiered.Holds(store.sample);
  }
  MutexLock lock(mutex_);
  for (const Copy& copy : copies) {
    scheduler_.stores().OnTaken(copy.action);
    if (!copy.refused) continue;
    scheduler_.OnStoreEnded(copy.action.dataset, copy.action.sample, copy.held);
    *arrived = true;  // for whoever waited for it
  }
  if (*arrived) NotifyDue();
  return copies.size() == kStoreAtOnce;
}

void Engine::SubmitBacklog(DatasetState& dataset, ReadsUnderWay& under_way) {
  if (dataset.backlog.empty()) return;
  std::vector<SourceRead> batch;
  const Nanos now = SteadyClock().Now();
  uint32_t group = 0;
  for (const ReadAction& read : dataset.backlog) {
    const bool first = read.group == 0 || read.group != group;
    group = read.group;
    SourceRead out;
    out.tag = under_way.Add(read, now, first);
    out.sample = read.sample;
    out.dest = {arena_.data() + read.offset, read.length};
    out.group = read.group;
    out.skip_tier = read.origin == Origin::kSource;
    out.urgent = read.urgent;
    batch.push_back(out);
  }
  const size_t taken = dataset.source->Submit(batch);
  for (size_t i = batch.size(); i > taken; --i) under_way.Remove(batch[i - 1].tag);
  dataset.backlog.erase(dataset.backlog.begin(),
                        dataset.backlog.begin() + static_cast<int64_t>(taken));
}

Nanos Engine::HedgeHanging(std::span<DatasetState* const> datasets, ReadsUnderWay& under_way,
                           Nanos now) {
  under_way.FindOldest(now);
  {
    MutexLock lock(mutex_);
    scheduler_.reads().SetHanging(under_way.hanging());
  }
  if (under_way.size() == 0) return now + kSlice;
  Nanos next = now + kLookLatest;
  for (ReadsUnderWay::Read& read : under_way.all()) {
    if (!read.live || read.looked_at) continue;
    const DatasetState& dataset = *datasets[read.action.dataset];
    const OriginModel& model =
        read.action.likely == Origin::kTier ? dataset.tier_model : dataset.source_model;
    Nanos tail = model.Tail(RequestBytes(read.action), read.depth);
    if (tail == OriginModel::kNever) continue;
    tail = std::max(tail, kLookLatest);
    // A peer that does not answer is left to those who asked it, for a while.
    if (read.action.likely == Origin::kPeer) tail += kPeerPatience;
    if (now - read.start < tail) {
      next = std::min(next, read.start + tail);
      continue;
    }
    MutexLock lock(mutex_);
    ReadAction second;
    if (!scheduler_.Hedge(read.action, &second)) continue;
    read.looked_at = true;
    outbox_.push_back(second);
  }
  return std::max(next, now + kLookSoonest);
}

Nanos Engine::FolderPatience(std::span<DatasetState* const> datasets,
                             const ReadsUnderWay& under_way) const {
  Nanos tail = 0;
  Nanos source = 0;
  const size_t depth = std::max<size_t>(1, under_way.depth(Origin::kSource));
  MutexLock lock(mutex_);  // a data set that grows changes its mean
  for (const DatasetState* dataset : datasets) {
    if (dataset == nullptr || dataset->tiered == nullptr) continue;
    tail = std::max(tail, dataset->tier_model.Tail(dataset->mean_bytes, kFolderReads));
    if (!dataset->source_model.known()) continue;
    source = std::max(source, dataset->source_model.Expect(dataset->mean_bytes, depth));
  }
  return PlaceWatch::Patience(tail, source);
}

void Engine::WatchFolder(std::span<DatasetState* const> datasets, ReadsUnderWay& under_way,
                         Nanos now) {
  PlaceWatch& watch = cache_->watch;
  const Nanos patience = FolderPatience(datasets, under_way);
  const Nanos since = cache_->store->SilentSince();
  const Nanos silent = since == 0 ? 0 : now - std::max(since, under_way.resumed());
  if (hedging_.one_in.value() != 0 && watch.Suspects(now, silent, patience)) LeaveFolder(silent);
  if (watch.ProbeDue(now)) {
    watch.OnProbeSent();
    cache_->store->StartProbe();
  }
  if (watch.left()) {
    const std::optional<Nanos> took = cache_->store->TakeProbe();
    if (took && watch.OnProbeAnswered(now, *took, patience)) ReturnToFolder();
  }
  {
    MutexLock lock(mutex_);
    const bool waits = scheduler_.stores().under_way() > 0 && Waits(scheduler_).AnyForSamples();
    scheduler_.stores().SetPatience(waits ? kWaitedForCopies : SchedulerOptions().copy_patience);
  }
  if (!watch.left()) return;
  for (const DatasetState* dataset : datasets) {
    if (dataset == nullptr || dataset->tiered == nullptr) continue;
    for (const uint64_t tag : dataset->tiered->AtTier()) {
      ReadsUnderWay::Read& read = under_way.all()[tag];
      if (read.lost) continue;
      MutexLock lock(mutex_);
      ReadAction second;
      read.lost = scheduler_.reads().Raced(read.action);
      if (read.lost || !scheduler_.Hedge(read.action, &second, true)) continue;
      read.lost = true;
      read.looked_at = true;
      outbox_.push_back(second);
    }
  }
}

void Engine::LeaveFolder(Nanos silent) {
  cache_->metrics.passed_by.Set(1);
  cache_->store->PassBy(true);
  MutexLock lock(mutex_);
  if (cache_warning_.empty()) {
    cache_warning_ = StrCat("the cache folder ", options_.cache_folder, " has not answered for ",
                            TenthsOfSeconds(silent),
                            " s: what it has is read from the source until its disk answers again; "
                            "repair the disk, or name another folder");
    if (warn_) warn_(cache_warning_);
  }
  scheduler_.SetTierLeft(true);
  Collect();
  NotifyDue();
}

void Engine::ReturnToFolder() {
  cache_->metrics.passed_by.Set(0);
  cache_->store->PassBy(false);
  MutexLock lock(mutex_);
  scheduler_.SetTierLeft(false);
  Collect();
}

void Engine::ListDatasets(std::vector<DatasetState*>* out) {
  out->clear();
  for (DatasetState& dataset : datasets_) {
    out->push_back(dataset.source == nullptr ? nullptr : &dataset);
  }
}

void Engine::RunLoop(std::stop_token stop) {
  LoopState state;
  while (!stop.stop_requested()) {
    const Nanos sleep = LoopRound(state);
    if (sleep > 0) (void)LoopSleep(state, sleep);
  }
}

std::optional<Nanos> Engine::Step(bool due) {
  RankOrders orders;
  while (PlanNext(orders)) due = true;
  if (!LoopSleep(*stepped_, 0) && !due) return std::nullopt;
  return LoopRound(*stepped_);
}

Nanos Engine::LoopRound(LoopState& at) {
  auto& [datasets, fds, reads, under_way, unsized, look_at, tune_at, held_until] = at;
  bool arrived = false;
  RetireUnused(SteadyClock().Now());
  {
    MutexLock lock(mutex_);
    ListDatasets(&datasets);
  }
  under_way.Tick(SteadyClock().Now());
  bool busy = ReapInto(datasets, under_way, &arrived);
  if (cache_ != nullptr) busy |= StoreDue(datasets, &arrived);
  Nanos now = SteadyClock().Now();
  if (cache_ != nullptr && now >= cache_->look_at) {
    cache_->look_at = now + kLookLatest;
    WatchFolder(datasets, under_way, now);
  }
  // Not while more has arrived: a read that waits to be reaped does not hang.
  if (!busy && now >= look_at) look_at = HedgeHanging(datasets, under_way, now);
  {
    MutexLock lock(mutex_);
    if (now >= tune_at) {
      tune_at = now + kTuneEvery;
      StepTuner(now);
    }
    if (cache_ != nullptr) DropCopies();
    unsized.clear();
    for (DatasetId id = 0; id < datasets_.size(); ++id) {
      Sizer* const sizer = IsOpen(id) ? datasets_[id].sizer : nullptr;
      if (sizer == nullptr || scheduler_.residency().dataset(id).unsized == 0) continue;
      TakeLengths(id, datasets_[id]);
      unsized.emplace_back(sizer, scheduler_.residency().dataset(id).SizedAhead());
    }
    Collect();
    // Under the same lock: a read may name a data set added since the top of the loop.
    ListDatasets(&datasets);
    reads.swap(outbox_);
    // From here on a consumer with new reads must wake us.
    loop_awake_ = !reads.empty() || busy;
    held_until = scheduler_.jobs().wake_at();
    loop_until_ = std::min(held_until, now + kSlice);
  }
  for (const ReadAction& read : reads) {
    datasets[read.dataset]->backlog.push_back(read);
    ++datasets[read.dataset]->flying;
  }
  reads.clear();
  for (DatasetState* dataset : datasets) {
    if (dataset != nullptr) SubmitBacklog(*dataset, under_way);
  }
  for (const auto& [sizer, ahead] : unsized) sizer->SetAhead(ahead);
  if (arrived) SignalProgress();
  if (busy) return 0;
  fds.clear();
  fds.push_back({wake_fd_.get(), POLLIN, 0});
  for (DatasetState* dataset : datasets) {
    if (dataset != nullptr) fds.push_back({dataset->source->event_fd(), POLLIN, 0});
  }
  for (const auto& [sizer, ahead] : unsized) fds.push_back({sizer->event_fd(), POLLIN, 0});
  Nanos sleep = under_way.size() == 0
                    ? kSlice
                    : std::clamp<Nanos>(std::min(look_at, tune_at) - now, kMilli, kSlice);
  // Tokens that came in the meantime are not lost: no need for less than a millisecond.
  if (held_until - now < sleep) sleep = std::max<Nanos>(held_until - now + kMilli, kMilli);
  return sleep;
}

bool Engine::LoopSleep(LoopState& at, Nanos sleep) {
  const int readable = poll(at.fds.data(), at.fds.size(), static_cast<int>(sleep / kMilli));
  if (readable <= 0) return false;
  if (at.fds[0].revents & POLLIN) {
    uint64_t count;
    (void)!read(wake_fd_.get(), &count, sizeof count);
  }
  return true;
}

}  // namespace forebay
