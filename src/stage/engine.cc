#include "stage/engine.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "base/fork.h"
#include "base/system_memory.h"
#include "base/thread.h"
#include "catalog/paths.h"
#include "core/waits.h"
#include "decode/numa.h"
#include "io/loop.h"
#include "stage/early_samples.h"

namespace forebay {
namespace {

constexpr uint64_t kMinimumBudget = uint64_t{8} << 20;
// What an engine takes beside arena and tables: code pages made private, queues, allocator slack.
constexpr uint64_t kFixedBytes = uint64_t{2} << 20;
// Stack and thread-local pages a reader thread touches (measured: 12 to 20 KiB), and what it reads
// groups of samples with.
constexpr uint64_t kThreadBytes = 28 << 10;
// What a sample that is being read takes in the queues and lists of the engine, and what room for
// one takes in those of a data set's tier and source.
constexpr uint64_t kReadBytes = 128;
constexpr uint64_t kReadBytesOfSource = 512;
constexpr Nanos kSlice = 100 * kMilli;  // longest single sleep of any wait
constexpr size_t kReapAtOnce = 64;
constexpr Nanos kTablesWait = 500 * kMilli;
// What the plan for a cluster takes: homes, holders, shares and what was told of them.
constexpr uint64_t kClusterBytesASample = 24;
// What a growing catalog takes: record, name and a part of a folder's.
constexpr uint64_t kGrowingBytesASample = 96;
// The part of memory that samples which come before their data set leave free.
constexpr uint64_t kEarlyLeavesOneIn = 16;
constexpr Nanos kOpenPatience = 5 * kSecond;  // with the disk of the cache folder
// What a file counts as while no size is known.
constexpr uint32_t kGuessedBytes = 128 << 10;

// A small budget cannot fill many reads anyway; do not spend it on stacks.
size_t ThreadsFor(const EngineOptions& options, uint64_t budget) {
  return std::min<size_t>(options.max_in_flight,
                          std::max<size_t>(8, budget / (uint64_t{512} << 10)));
}

uint64_t ReaderBytes(size_t in_flight) {
  return in_flight * (kThreadBytes + PosixSourceOptions::kReadsPerOp * kReadBytes);
}

uint64_t SourceBytes(size_t in_flight) {
  return in_flight * PosixSourceOptions::kReadsPerOp * kReadBytesOfSource;
}

// Each has scratch memory of its own, which a small budget cannot spare.
size_t DecodeThreads(const EngineOptions& options, uint64_t budget) {
  const size_t share = std::max<size_t>(1, UsableProcessors() / LocalRanks());
  const size_t most = options.decode_threads != 0 ? options.decode_threads : share;
  return std::min<size_t>(most, std::max<uint64_t>(1, budget / (uint64_t{16} << 20)));
}

// Closed, and no lease of it is left.
bool Unused(const Scheduler& scheduler, StreamId id) {
  return !scheduler.lookahead().streams()[id].open && scheduler.leases().consumer(id).leases == 0;
}

Status BadPosition(uint64_t position, uint32_t world) {
  return Status(Code::kInvalidArgument,
                StrCat("position ", position, " is not a multiple of the world size ", world,
                       "; resume with the same global batch (batch_size times world size)"));
}

// Copies on their way into the cache folder.
uint64_t WriteBufferBytes(uint64_t budget) {
  const uint64_t share = budget < (uint64_t{32} << 20) ? budget / 16 : budget / 8;
  return std::clamp<uint64_t>(share, uint64_t{512} << 10, uint64_t{64} << 20);
}

// The write buffer, what each copy takes beside its bytes, the folder's threads, and the queues and
// lists of a tier.
uint64_t CacheBytes(const EngineOptions& options, uint64_t budget) {
  constexpr uint64_t kCopyBytes = 224;
  if (options.cache_folder.empty()) return 0;
  const uint64_t buffer = WriteBufferBytes(budget);
  const uint64_t copies =
      std::min<uint64_t>(WriteBuffer::kMostCopies, buffer / WriteBuffer::kLeastCharge);
  return buffer + kCopyBytes * copies + kThreadBytes * (FolderTierOptions().threads + 1) +
         (256 << 10);
}

TuneOptions TunerOptions(const EngineOptions& options, uint64_t arena_bytes) {
  return {.policy = options.tuner,
          .max_reads = options.max_in_flight,
          .max_ahead_bytes = arena_bytes,
          .cores = UsableProcessors()};
}

// What reads that hang in the kernel may still touch: kept until the process ends.
struct LeftBehind {
  std::shared_ptr<const Catalog> catalog;  // the source refers to it
  std::unique_ptr<Source> source;
  Mapping arena;
};

std::vector<LeftBehind>& AllLeftBehind() {
  static auto* all = new std::vector<LeftBehind>;  // never destroyed: that would wait for the reads
  return *all;
}

std::string MiB(uint64_t bytes) {
  const uint64_t tenths = (bytes * 10) >> 20;
  return StrCat(tenths / 10, ".", tenths % 10, " MiB");
}

}  // namespace

Status EngineOptions::Validate() const {
  if (memory != 0 && memory < kMinimumBudget) {
    return Status(
        Code::kInvalidArgument,
        StrCat("memory is ", memory, " bytes; an engine needs at least ", MiB(kMinimumBudget)));
  }
  if (max_in_flight < 1 || max_in_flight > 4096) {
    return Status(Code::kInvalidArgument,
                  StrCat("max_in_flight is ", max_in_flight, "; it takes 1 to 4096"));
  }
  if (in_flight > max_in_flight) {
    return Status(Code::kInvalidArgument,
                  StrCat("in_flight is ", in_flight, ", above max_in_flight ", max_in_flight));
  }
  if (copy_threads < 1 || copy_threads > 256) {
    return Status(Code::kInvalidArgument,
                  StrCat("copy_threads is ", copy_threads, "; it takes 1 to 256"));
  }
  if (!own_threads && !cache_folder.empty()) {
    return Status(Code::kInvalidArgument, "a cache folder has threads: own_threads is needed");
  }
  if (decode_threads > 1024) {
    return Status(Code::kInvalidArgument,
                  StrCat("decode_threads is ", decode_threads, "; it takes 0 to 1024"));
  }
  return Status();
}

Result<EnginePtr> Engine::Create(const EngineOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  const uint64_t budget = options.memory != 0 ? options.memory : DefaultBudget();
  if (budget < kMinimumBudget) {
    return Status(Code::kResourceExhausted,
                  StrCat("only ", MiB(budget), " of memory can be used here and an engine needs ",
                         MiB(kMinimumBudget), "; free some, or pass memory="));
  }
  EngineOptions chosen = options;
  chosen.max_in_flight = ThreadsFor(options, budget);
  chosen.in_flight = std::min(chosen.in_flight, chosen.max_in_flight);
  const uint64_t overhead =
      kFixedBytes + ReaderBytes(chosen.max_in_flight) + CacheBytes(options, budget);
  EnginePtr engine(new Engine(chosen, budget, (budget - overhead) / 4096 * 4096));
  FOREBAY_RETURN_IF_ERROR(engine->OpenCache());
  if (options.io != PosixSourceOptions::Io::kUring) {
    Result<std::shared_ptr<ReaderPool>> pool = MakeReaderPool({.threads = chosen.max_in_flight});
    if (!pool) return pool.error();
    engine->pool_ = *std::move(pool);
  }
  FOREBAY_RETURN_IF_ERROR(engine->Start());
  return engine;
}

Engine::Engine(const EngineOptions& options, uint64_t budget, uint64_t arena_bytes)
    : options_(options),
      budget_(budget),
      fork_generation_(ForkGeneration()),
      reads_total_(
          registry_.AddCounter("forebay_source_reads_total", "Reads finished by the source")),
      read_bytes_total_(
          registry_.AddCounter("forebay_source_read_bytes_total", "Bytes read from the source")),
      read_errors_total_(registry_.AddCounter("forebay_source_errors_total",
                                              "Reads that failed after all retries")),
      read_retries_total_(registry_.AddCounter("forebay_source_retries_total",
                                               "Read attempts repeated after a passing error")),
      corrupt_total_(registry_.AddCounter("forebay_source_corrupt_samples_total",
                                          "Samples that arrived with other bytes than were read")),
      samples_total_(
          registry_.AddCounter("forebay_stage_samples_total", "Samples handed to consumers")),
      sample_bytes_total_(
          registry_.AddCounter("forebay_stage_sample_bytes_total", "Bytes handed to consumers")),
      changed_total_(registry_.AddCounter("forebay_source_changed_samples_total",
                                          "Samples whose bytes differ from an earlier read")),
      changed_files_gauge_(registry_.AddGauge("forebay_source_changed_files",
                                              "Files that changed after this job looked at them")),
      peer_reads_total_(
          registry_.AddCounter("forebay_peer_reads_total", "Samples read from other nodes")),
      peer_read_bytes_total_(
          registry_.AddCounter("forebay_peer_read_bytes_total", "Bytes read from other nodes")),
      arena_used_(
          registry_.AddGauge("forebay_stage_arena_used_bytes", "Bytes of the arena in use")),
      arena_peak_(
          registry_.AddGauge("forebay_stage_arena_peak_bytes", "Most bytes of the arena in use")),
      leases_(registry_.AddGauge("forebay_stage_leases", "Batches on loan or being filled")),
      prefetch_(registry_, options.max_in_flight, options.in_flight),
      read_ahead_(registry_, arena_bytes, std::min(options.read_ahead, arena_bytes)),
      tuning_(registry_),
      memory_tier_(registry_, arena_bytes, std::min(options.memory_tier, arena_bytes)),
      cache_folder_(registry_),
      admission_(registry_),
      hedging_(registry_, Reads::kHedgeOneIn),
      source_limit_(registry_),
      scheduler_({.arena_bytes = arena_bytes,
                  .keep = options.keep,
                  .keep_bytes = std::min(options.memory_tier, arena_bytes),
                  .max_samples = options.max_in_flight * PosixSourceOptions::kReadsPerOp},
                 &remote_),
      tuner_(MakeTuner(TunerOptions(options, arena_bytes))),
      decode_pool_(registry_, DecodeThreads(options, budget)) {
  for (size_t i = 0; i < kStallCauses; ++i) {
    stall_[i] =
        &registry_.AddCounter(StrCat("forebay_stall_", kStallCauseNames[i], "_nanoseconds_total"),
                              StrCat("Time consumers waited, charged to: ", kStallCauseNames[i]));
  }
}

Status Engine::Start() {
  uint64_t arena_bytes = 0;
  {
    MutexLock lock(mutex_);
    arena_bytes = scheduler_.arena().capacity();
    // For measurements only: reads of what the folder has, split without regard to costs.
    if (const char* split = std::getenv("FOREBAY_PLACE_SPLIT"); split != nullptr) {
      scheduler_.reads().SetFixedSplit(std::strtod(split, nullptr));
    }
  }
  memfd_ = OwnedFd(memfd_create("forebay", MFD_CLOEXEC));
  if (!memfd_.valid()) return ErrnoStatus(errno, "memfd_create for the sample arena");
  if (ftruncate(memfd_.get(), static_cast<off_t>(arena_bytes)) != 0) {
    return ErrnoStatus(errno, StrCat("reserving an arena of ", MiB(arena_bytes)));
  }
  void* base = mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                    memfd_.get(), 0);
  if (base == MAP_FAILED)
    return ErrnoStatus(errno, StrCat("mapping an arena of ", MiB(arena_bytes)));
  arena_ = Mapping(base, arena_bytes);
  // Huge pages spare page faults where the kernel allows them for shared memory; a refusal is fine.
  (void)madvise(base, arena_bytes, MADV_HUGEPAGE);
  wake_fd_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  progress_fd_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  serving_fd_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd_.valid() || !progress_fd_.valid() || !serving_fd_.valid())
    return ErrnoStatus(errno, "eventfd");
  if (!options_.tuner_log.empty()) {
    tuner_log_ =
        OwnedFd(open(options_.tuner_log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!tuner_log_.valid()) return ErrnoStatus(errno, options_.tuner_log);
    MutexLock lock(mutex_);
    tuner_lines_ = TuneLogHeader(TunerOptions(options_, arena_bytes));
  }
  if (!options_.own_threads) {
    stepped_ = std::make_unique<LoopState>();
    return Status();
  }
  auto loop = StartThread("forebay-loop", [this](std::stop_token stop) { RunLoop(stop); });
  if (!loop) return loop.error();
  loop_ = *std::move(loop);
  auto planner = StartThread("forebay-plan", [this](std::stop_token stop) { RunPlanner(stop); });
  if (!planner) return planner.error();
  planner_ = *std::move(planner);
  return Status();
}

void EngineDelete::operator()(Engine* engine) const {
  if (engine == nullptr || engine->fork_generation_ != ForkGeneration()) return;
  delete engine;
}

Engine::~Engine() {
  if (!loop_.joinable() && stepped_ == nullptr) return;
  if (cache_ != nullptr) FinishCopies();
  loop_.request_stop();
  planner_.request_stop();
  for (std::jthread& copier : copiers_) copier.request_stop();
  WakeLoop();
  order_ready_.notify_all();
  copy_ready_.notify_all();
  if (loop_.joinable()) loop_.join();
  if (planner_.joinable()) planner_.join();
  if (tuner_log_.valid()) WriteTunerLog();
  copiers_.clear();
  std::deque<DatasetState> datasets;
  size_t flying = 0;
  {
    MutexLock lock(mutex_);
    datasets.swap(datasets_);
    for (DatasetState& dataset : datasets) {
      if (dataset.sizer != nullptr) dataset.sizer->Detach();
    }
    flying = scheduler_.reads().in_flight() - outbox_.size();
  }
  std::erase_if(datasets, [](const DatasetState& dataset) { return dataset.source == nullptr; });
  for (DatasetState& dataset : datasets) flying -= dataset.backlog.size();
  // Drain what the sources still have; a read stuck in the kernel must not hang the exit.
  const Nanos until = SteadyClock().Now() + 2 * kSecond;
  std::array<SourceDone, kReapAtOnce> done;
  while (flying > 0 && SteadyClock().Now() < until) {
    std::vector<pollfd> fds;
    for (DatasetState& dataset : datasets) fds.push_back({dataset.source->event_fd(), POLLIN, 0});
    poll(fds.data(), fds.size(), 50);
    for (DatasetState& dataset : datasets) flying -= dataset.source->Reap(done);
  }
  if (flying > 0) {
    std::vector<LeftBehind>& left = AllLeftBehind();
    for (DatasetState& dataset : datasets) {
      left.push_back({std::move(dataset.catalog), std::move(dataset.source), Mapping()});
    }
    left.push_back({nullptr, nullptr, std::move(arena_)});
  }
}

// Copies of what was read last are made, too: for a moment, while the folder takes them.
void Engine::FinishCopies() {
  const Nanos until = SteadyClock().Now() + 2 * kSecond;
  MutexLock lock(mutex_);
  closing_ = true;
  while (scheduler_.stores().under_way() > 0 && !scheduler_.stores().hangs() &&
         SteadyClock().Now() < until) {
    room_.wait_for(lock.native(), std::chrono::milliseconds(5));
  }
}

Status Engine::Alive() const {
  if (fork_generation_ == ForkGeneration()) return Status();
  return Status(Code::kCancelled,
                "this engine belongs to the parent process; a forked child makes its own");
}

std::shared_ptr<const Catalog> Engine::shared_catalog(DatasetId dataset) const {
  MutexLock lock(mutex_);
  return IsOpen(dataset) ? datasets_[dataset].catalog : nullptr;
}

Status Engine::OpenCache() {
  if (options_.cache_folder.empty()) return Status();
  FolderTierOptions folder;
  folder.folder = options_.cache_folder;
  folder.capacity_bytes = options_.cache_bytes;
  folder.group = options_.cache_group;
  folder.batch_bytes =
      std::clamp<uint64_t>(WriteBufferBytes(budget_) / 4, 256 << 10, uint64_t{1} << 20);
  Result<std::shared_ptr<FolderStore>> store = FolderStore::OpenUnlessHung(folder, kOpenPatience);
  if (!store) return store.error();
  if (*store == nullptr) {
    MutexLock lock(mutex_);
    cache_warning_ =
        StrCat("the cache folder ", options_.cache_folder, " has not answered for ",
               kOpenPatience / kSecond,
               " s: nothing is copied, and all is read from the source; repair its disk, or name "
               "another folder");
    return Status();
  }
  cache_ = std::make_unique<Cache>(*std::move(store), WriteBufferBytes(budget_), registry_);
  return Status();
}

Result<std::unique_ptr<TieredSource>> Engine::ThroughCache(
    const std::shared_ptr<const Catalog>& catalog, std::unique_ptr<Source> inner) {
  CopyNames names(catalog);
  cache_->store->Use(names.group(), catalog->root());
  // Small folders are known at once; what is not found in time is read from the source.
  (void)cache_->store->WaitScanned(kSecond);
  Result<std::unique_ptr<Tier>> tier =
      FolderStore::MakeTier(cache_->store, inner->capacity() + TieredSource::kMostWrites);
  if (!tier) return tier.error();
  return TieredSource::Make(std::move(inner), *std::move(tier), std::move(names), cache_->buffer,
                            cache_->metrics);
}

Status Engine::CacheStatus() const {
  const Status health = cache_ == nullptr ? Status() : cache_->store->health();
  MutexLock lock(mutex_);
  if (cache_ == nullptr) {
    return cache_warning_.empty() ? Status() : Status(Code::kUnavailable, cache_warning_);
  }
  if (!health.ok() || !scheduler_.stores().hangs()) return health;
  return Status(Code::kUnavailable, cache_warning_);
}

void Engine::SetWarn(std::function<void(const std::string&)> warn) {
  MutexLock lock(mutex_);
  warn_ = std::move(warn);
}

std::string Engine::CacheWarning() const {
  MutexLock lock(mutex_);
  const bool both = !cache_warning_.empty() && !cache_stopped_.empty();
  return StrCat(cache_warning_, both ? "\n" : "", cache_stopped_);
}

std::string Engine::ChangedFiles() const {
  MutexLock lock(mutex_);
  return changed_lines_;
}

ChangedFilesOf Engine::ChangedFiles(StreamId stream) const {
  MutexLock lock(mutex_);
  if (stream >= streams_.size()) return {};
  const DatasetState& dataset = datasets_[streams_[stream].options.shape.dataset];
  return {.count = dataset.changed.size(), .last = dataset.last_changed};
}

void Engine::NoteChanged(DatasetState& dataset, const ReadAction& read) {
  constexpr size_t kMostLines = 8;
  if (!dataset.changed.insert(read.sample).second) return;
  dataset.last_changed =
      StrCat(dataset.catalog->ObjectPath(dataset.catalog->object(read.sample)),
             " changed after it was looked at: from now on it is served as it is");
  const size_t count = ++changed_count_;
  if (count > kMostLines) return;
  const std::string line =
      count == kMostLines
          ? "more files changed while they were in use; forebay_source_changed_files counts them"
          : dataset.last_changed;
  if (warn_) warn_(line);
  changed_lines_ += (changed_lines_.empty() ? "" : "\n") + line;
}

Result<uint64_t> Engine::CacheLimit() const {
  if (cache_ == nullptr) return Status(Code::kNotFound, "there is no cache folder");
  return cache_->store->capacity_bytes();
}

std::string Engine::CacheNote() const {
  return cache_ == nullptr ? std::string() : cache_->store->note();
}

Result<DatasetId> Engine::AddDataset(std::shared_ptr<const Catalog> catalog,
                                     std::unique_ptr<Source> source, EarlySamples* early,
                                     const std::string& key) {
  if (catalog->format() == Format::kGrowing) {
    return Status(Code::kInvalidArgument,
                  StrCat("the data set of ", catalog->root(), " grows: AddGrowing takes it"));
  }
  return Add(std::move(catalog), nullptr, std::move(source), early, key);
}

Result<DatasetId> Engine::Add(std::shared_ptr<const Catalog> catalog,
                              std::shared_ptr<Catalog> growing, std::unique_ptr<Source> source,
                              EarlySamples* early, const std::string& key) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  Adding adding{.catalog = std::move(catalog),
                .growing = std::move(growing),
                .source = std::move(source),
                .early = early};
  // Under no lock: it waits for the storage. What shares samples must know all of them.
  Sizer* sizer = has_peers_.load() ? nullptr : adding.catalog->sizer();
  if (sizer == nullptr || sizer->all_known() || !sizer->Attach()) {
    sizer = nullptr;
    FOREBAY_RETURN_IF_ERROR(adding.catalog->WaitComplete());
  }
  const auto detach = [](Sizer* s) { s->Detach(); };
  std::unique_ptr<Sizer, decltype(detach)> attached(sizer, detach);
  adding.sizer = sizer;
  if (sizer == nullptr && !key.empty()) adding.stamps_hash = adding.catalog->StampsHash();
  if (const std::optional<DatasetId> known = UseOrReserve(key, *adding.catalog, &adding)) {
    return *known;
  }
  const DatasetId number = adding.number;
  const Status added = AddReserved(adding);
  if (!added.ok()) {
    Unreserve(adding);
    return added;
  }
  (void)attached.release();
  return number;
}

Status Engine::AddReserved(Adding& adding) {
  const std::shared_ptr<const Catalog>& catalog = adding.catalog;
  const bool grows = adding.growing != nullptr;
  const DatasetId id = adding.number;
  TieredSource* tiered = nullptr;
  const bool own = adding.source == nullptr;
  if (own) {
    PosixSourceOptions posix;
    posix.max_in_flight = options_.max_in_flight;
    posix.io = options_.io;
    posix.pool = pool_;
    Result<std::unique_ptr<Source>> made = MakePosixSource(*catalog, posix);
    if (!made) return made.error();
    adding.source = *std::move(made);
  }
  bool shared = false;
  {
    MutexLock lock(add_mutex_);
    // Nodes whose files of the same names and sizes differ must not take each other's for their
    // own. One whose sizes come later was begun before there were peers.
    shared = wrap_ && adding.sizer == nullptr && MayOutliveTheJob(*catalog);
    if (shared) {
      Result<std::unique_ptr<Source>> wrapped = wrap_(id, catalog, std::move(adding.source));
      if (!wrapped) return wrapped.error();
      adding.source = *std::move(wrapped);
    }
  }
  if (own && cache_ != nullptr && MayOutliveTheJob(*catalog)) {
    Result<std::unique_ptr<TieredSource>> through = ThroughCache(catalog, std::move(adding.source));
    if (!through) return through.error();
    tiered = through->get();
    adding.source = *std::move(through);
  }
  std::vector<SampleId> copied;  // that the folder has
  if (tiered != nullptr && adding.sizer == nullptr) {
    for (SampleId s = 0; s < catalog->size(); ++s) {
      if (tiered->Holds(s)) copied.push_back(s);
    }
    if (!grows) cache_->store->AskedForAll(tiered->group());
  }
  std::vector<uint32_t> lengths(catalog->size());
  uint64_t bytes = 0;
  for (SampleId s = 0; s < lengths.size() && adding.sizer == nullptr; ++s) {
    lengths[s] = catalog->length(s);
    bytes += lengths[s];
  }
  const uint32_t guess =
      adding.sizer != nullptr && adding.sizer->guess() != 0 ? adding.sizer->guess() : kGuessedBytes;
  if (adding.sizer != nullptr) bytes = lengths.size() * guess;
  const uint64_t paid = grows ? GrowthStep(lengths.size()) : lengths.size();
  {
    MutexLock lock(mutex_);
    const uint64_t source_bytes = SourceBytes(options_.max_in_flight);
    std::vector<ArenaAllocator::Block> blocks;
    if (!adding.revived) {
      const uint64_t tables_bytes = paid * TableBytes(grows, tiered != nullptr, shared);
      FOREBAY_RETURN_IF_ERROR(SetTablesAside(paid, tables_bytes, adding.early, &blocks, lock));
      datasets_[id].tables = std::exchange(blocks, {});
    }
    FOREBAY_RETURN_IF_ERROR(SetTablesAside(paid, source_bytes, adding.early, &blocks, lock));
    datasets_[id].source_tables = std::move(blocks);
  }
  // Without the lock, for which somebody's open() may wait: 0.2 s for 10 M samples.
  Residency::Dataset tables;
  if (!adding.revived) {
    tables = adding.sizer == nullptr ? Residency::Dataset::Sized(lengths)
                                     : Residency::Dataset::Unsized(lengths.size(), guess);
    for (const SampleId s : copied) tables.AddInTier(s);
  }
  const uint32_t largest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  MutexLock lock(mutex_);
  Residency& residency = scheduler_.residency();
  if (adding.revived) {
    ForgetOthers(id, datasets_[id], *catalog);
    residency.Unpark(id);
    // The folder may have given up copies, and got others, since.
    for (SampleId s = 0; s < lengths.size() && tiered != nullptr; ++s) {
      residency.SetInTier(id, s, tiered->Holds(s));
    }
  } else {
    if (adding.sizer == nullptr) scheduler_.arena().Expect(largest);
    residency.AddAs(id, std::move(tables));
  }
  residency.dataset(id).layout = catalog;
  remote_.Set(id, shared ? adding.source.get() : nullptr);
  if (tiered != nullptr) {
    residency.dataset(id).tier = ShapeOf(*tiered, bytes, lengths.size(), grows);
    UpdateFolderRoom();
  }
  if (const auto share = early_shares_.find(id); share != early_shares_.end()) {
    residency.SetShare(id, std::move(share->second));
    early_shares_.erase(share);
  }
  if (adding.early != nullptr && !adding.revived) AdoptEarly(id, *catalog, *adding.early);
  DatasetState& state = datasets_[id];
  if (catalog->LacksStamps()) {
    // What memory has is of the files that it was read from.
    state.stamps = state.stamps == nullptr
                       ? std::make_shared<std::vector<uint32_t>>(catalog->object_count())
                       : std::make_shared<std::vector<uint32_t>>(*state.stamps);
  } else {
    state.stamps = catalog->stamps();
  }
  state.stamps_hash = catalog->LacksStamps() ? 0 : adding.stamps_hash;
  state.catalog = catalog;
  state.source = std::move(adding.source);
  state.tiered = tiered;
  state.sizer = adding.sizer;
  state.growing = std::move(adding.growing);
  state.shared = shared;
  state.paid_samples = paid;
  state.mean_bytes = lengths.empty() ? 0 : bytes / lengths.size();
  state.users = 1;
  state.use = DatasetState::Use::kOpen;
  added_.notify_all();
  WakeLoop();  // it polls the new source's descriptor from now on
  return Status();
}

TierShape Engine::ShapeOf(const TieredSource& tiered, uint64_t bytes, uint64_t samples,
                          bool growing) const {
  // Each copy takes a little more than its bytes.
  const uint64_t copies = cache_->store->BytesFor(samples, bytes);
  return {.present = true,
          .holds_all = copies <= tiered.tier().capacity_bytes(),
          .largest = cache_->buffer.bytes(),
          .left_by_copies = growing ? tiered.tier().capacity_bytes() / 2 : 0};
}

uint64_t Engine::GrowthStep(uint64_t samples) {
  constexpr uint64_t kStep = 4096;
  return (samples + kStep - 1) / kStep * kStep;
}

uint64_t Engine::TableBytes(bool growing, bool tiered, bool shared) {
  return Residency::kBytesPerSample + (growing ? kGrowingBytesASample : 0) +
         (tiered ? FolderStore::kBytesASample : 0) + (shared ? kClusterBytesASample : 0);
}

// In pieces, as samples of other data sets leave them; reads under way hold theirs to their end,
// and closed data sets their tables until nothing of them is left.
Status Engine::SetTablesAside(uint64_t samples, uint64_t bytes, EarlySamples* early,
                              std::vector<ArenaAllocator::Block>* blocks, MutexLock& lock) {
  constexpr auto kPause = std::chrono::milliseconds(5);
  const uint64_t leave = LeastForStreams();
  const Nanos until = SteadyClock().Now() + kTablesWait;
  std::vector<Retired> gone;  // at most what is parked: not much, see RetireUnused
  while (true) {
    bool fits = scheduler_.SetAside(bytes, blocks, leave);
    // What was read early gives way to the tables of all samples, of which it may be a few.
    while (!fits && early != nullptr) {
      const std::vector<ArenaAllocator::Block> given = early->GiveUp(bytes + leave);
      if (given.empty()) break;
      scheduler_.ReturnAside(given);
      fits = scheduler_.SetAside(bytes, blocks, leave);
    }
    if (fits || (scheduler_.arena().MaySetAside(bytes, leave) &&
                 SetAsideSlowly(bytes, until, blocks, lock))) {
      return Status();
    }
    if (GiveBackParked(&gone)) continue;
    const bool closing =
        std::any_of(datasets_.begin(), datasets_.end(), [](const DatasetState& dataset) {
          return dataset.use == DatasetState::Use::kClosing ||
                 dataset.use == DatasetState::Use::kGivingBack;
        });
    if (!closing || SteadyClock().Now() >= until) break;
    room_.wait_for(lock.native(), kPause);
  }
  return Status(Code::kResourceExhausted,
                StrCat("the tables of ", samples, " samples need ", MiB(bytes),
                       ", more than the budget of ", MiB(budget_), " has left; raise memory="));
}

uint64_t Engine::EarlyRoom(uint64_t samples) const {
  if (!Alive().ok()) return 0;
  MutexLock lock(mutex_);
  return EarlyRoomLocked(samples);
}

uint64_t Engine::EarlyRoomLocked(uint64_t samples) const {
  // Copies in a folder are made of what the engine reads, and nodes divide what they read.
  if (!options_.keep || cache_ != nullptr || has_peers_.load()) return 0;
  const Arena& arena = scheduler_.arena();
  const uint64_t taken = arena.used() + arena.capacity() / kEarlyLeavesOneIn +
                         samples * Residency::kBytesPerSample + LeastForStreams();
  return arena.capacity() - std::min(arena.capacity(), taken);
}

std::span<std::byte> Engine::AllotEarly(uint32_t length, uint64_t samples,
                                        ArenaAllocator::Block* block) {
  if (!Alive().ok()) return {};
  MutexLock lock(mutex_);
  if (length > EarlyRoomLocked(samples)) return {};
  *block = scheduler_.arena().SetAside(length);
  if (*block == ArenaAllocator::kNone) return {};
  return {arena_.data() + scheduler_.arena().offset(*block), length};
}

void Engine::ReturnEarly(std::span<const ArenaAllocator::Block> blocks) {
  if (blocks.empty() || !Alive().ok()) return;
  TakeBack(blocks);
}

void Engine::AdoptEarly(DatasetId dataset, const Catalog& catalog, EarlySamples& early) {
  std::vector<SampleId> first;
  uint64_t bytes = 0;
  uint64_t count = 0;
  std::vector<ArenaAllocator::Block> strange;
  for (const EarlySamples::Sample& sample : early.Take(&first)) {
    const uint64_t id = uint64_t{first.at(sample.shard)} + sample.index;
    if (id >= catalog.size() || catalog.length(static_cast<SampleId>(id)) != sample.length) {
      strange.push_back(sample.block);
      continue;
    }
    scheduler_.residency().Adopt(dataset, static_cast<SampleId>(id), sample.block, sample.crc);
    bytes += sample.length;
    ++count;
  }
  scheduler_.ReturnAside(strange);
  reads_total_.Add(static_cast<int64_t>(count));
  read_bytes_total_.Add(static_cast<int64_t>(bytes));
}

void Engine::TakeLengths(DatasetId id, DatasetState& dataset) {
  std::vector<Sizer::Found> found;
  dataset.sizer->Reap(&found);
  if (found.empty()) return;
  std::vector<SampleLength> lengths;
  lengths.reserve(found.size());
  for (Sizer::Found& f : found) {
    lengths.push_back({.sample = f.sample, .length = f.length, .ok = f.status.ok()});
    // A copy is named by the file's time, which is known only now.
    if (f.status.ok() && dataset.tiered != nullptr && dataset.tiered->Holds(f.sample)) {
      scheduler_.residency().SetInTier(id, f.sample, true);
    }
    if (!f.status.ok()) failures_.insert_or_assign({id, f.sample}, std::move(f.status));
  }
  scheduler_.OnLengths(id, lengths);
  const Residency::Dataset& tables = scheduler_.residency().dataset(id);
  if (tables.unsized == 0 && dataset.tiered != nullptr) {
    uint64_t bytes = 0;
    for (const Residency::Entry& e : tables.entries) bytes += e.length;
    scheduler_.residency().dataset(id).tier =
        ShapeOf(*dataset.tiered, bytes, tables.entries.size(), false);
    cache_->store->AskedForAll(dataset.tiered->group());
  }
  Collect();
  SignalProgress();
  NotifyDue();
}

Status Engine::WaitSized(DatasetId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  std::shared_ptr<const Catalog> catalog;
  {
    MutexLock lock(mutex_);
    if (!IsOpen(id) || datasets_[id].sizer == nullptr) return Status();
    catalog = datasets_[id].catalog;
    ++datasets_[id].calls;
  }
  const Status complete = catalog->WaitComplete();
  MutexLock lock(mutex_);
  --datasets_[id].calls;
  if (complete.ok()) TakeLengths(id, datasets_[id]);
  return complete;
}

// Piece by piece: what is had is not given back to look-ahead, which would read into it again.
bool Engine::SetAsideSlowly(uint64_t bytes, Nanos until, std::vector<ArenaAllocator::Block>* blocks,
                            MutexLock& lock) {
  constexpr uint64_t kPiece = uint64_t{1} << 20;
  constexpr auto kPause = std::chrono::milliseconds(5);
  std::vector<ArenaAllocator::Block> piece;
  for (uint64_t left = bytes; left > 0;) {
    piece.clear();
    if (scheduler_.SetAside(std::min(left, kPiece), &piece)) {
      blocks->insert(blocks->end(), piece.begin(), piece.end());
      left -= std::min(left, kPiece);
    } else if (scheduler_.reads().in_flight() != 0 && SteadyClock().Now() < until) {
      room_.wait_for(lock.native(), kPause);
    } else {
      scheduler_.ReturnAside(*blocks);
      blocks->clear();
      return false;
    }
  }
  return true;
}

// Who comes later must not leave those who train without room for their next batch.
uint64_t Engine::LeastForStreams() const { return scheduler_.lookahead().batch_bytes() / 4 * 5; }

Result<MemoryShare> Engine::Lend(uint64_t bytes, uint64_t leave, Nanos wait) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  leave = std::max(leave, LeastForStreams());
  std::vector<ArenaAllocator::Block> blocks;
  bool lent = scheduler_.SetAside(bytes, &blocks, leave);
  if (!lent && wait > 0 && scheduler_.arena().MaySetAside(bytes, leave)) {
    lent = SetAsideSlowly(bytes, SteadyClock().Now() + wait, &blocks, lock);
  }
  if (!lent) {
    return Status(Code::kResourceExhausted,
                  StrCat(MiB(bytes), " are more than the budget of ", MiB(budget_),
                         " has left; lower batch_size or raise memory="));
  }
  // Pages that samples had lain on count no longer.
  constexpr uint64_t kPage = 4096;
  for (const ArenaAllocator::Block block : blocks) {
    const uint64_t begin = scheduler_.arena().offset(block);
    const uint64_t first = (begin + kPage - 1) / kPage * kPage;
    const uint64_t last = (begin + scheduler_.arena().size(block)) / kPage * kPage;
    if (first >= last) continue;
    (void)fallocate(memfd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(first), static_cast<off_t>(last - first));
  }
  Collect();
  return MemoryShare(*this, std::move(blocks));
}

void Engine::TakeBack(std::span<const ArenaAllocator::Block> blocks) {
  MutexLock lock(mutex_);
  scheduler_.ReturnAside(blocks);
  Collect();
  SignalProgress();
}

MemoryShare::~MemoryShare() {
  if (engine_ != nullptr && engine_->Alive().ok()) engine_->TakeBack(blocks_);
}

std::optional<StreamId> Engine::TakeClosed() {
  // A number that somebody may still ask about is left alone for a while.
  constexpr size_t kLeftAlone = 64;
  for (size_t i = 0; i + kLeftAlone < closed_.size(); ++i) {
    const StreamId id = closed_[i];
    if (!Unused(scheduler_, id) || streams_[id].waiters != 0) continue;
    closed_.erase(closed_.begin() + static_cast<int64_t>(i));
    return id;
  }
  return std::nullopt;
}

Status Engine::SetPassing(DatasetId dataset) {
  const MutexLock lock(mutex_);
  if (!IsOpen(dataset)) {
    return Status(Code::kInvalidArgument, StrCat("there is no data set ", dataset));
  }
  scheduler_.residency().dataset(dataset).passing = true;
  return Status();
}

Result<StreamId> Engine::OpenStream(const StreamOptions& options) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  if (options.shape.batch_size == 0) {
    return Status(Code::kInvalidArgument, "batch_size is 0; it must be at least 1");
  }
  // Its region is made for batches of known size.
  if (options.shape.contiguous) FOREBAY_RETURN_IF_ERROR(WaitSized(options.shape.dataset));
  MutexLock lock(mutex_);
  return Open(options);
}

void Engine::StreamState::StartAt(uint64_t epoch, uint64_t position) {
  start_epoch = epoch;
  const uint64_t step = uint64_t{options.shape.batch_size} * options.sampler.world;
  start_index = options.declared ? 0 : position / step;
}

Result<StreamId> Engine::Open(const StreamOptions& options) {
  if (!IsOpen(options.shape.dataset)) {
    return Status(Code::kInvalidArgument,
                  StrCat("data set ", options.shape.dataset, " does not exist, or was closed"));
  }
  if (datasets_[options.shape.dataset].growing != nullptr &&
      !(options.declared && (options.shape.itemised || options.shape.serving))) {
    return Status(
        Code::kInvalidArgument,
        "a data set that grows has no order of its own: open a declared, itemised stream");
  }
  if (!options.declared) {
    FOREBAY_RETURN_IF_ERROR(options.sampler.Validate());
    if (options.shape.first_position % options.sampler.world != 0)
      return BadPosition(options.shape.first_position, options.sampler.world);
    const size_t size = datasets_[options.shape.dataset].catalog->size();
    if (options.sampler.size != size) {
      return Status(Code::kInvalidArgument, StrCat("the sampler is for ", options.sampler.size,
                                                   " samples, the data set has ", size));
    }
  }
  if (options.shape.contiguous && !copiers_started_) {
    for (size_t i = 0; i < options_.copy_threads; ++i) {
      auto started = StartThread("forebay-copy", [this](std::stop_token stop) { RunCopier(stop); });
      if (!started && copiers_.empty()) return started.error();
      if (!started) break;  // fewer do the same work
      copiers_.push_back(*std::move(started));
    }
    copiers_started_ = true;
  }
  const std::optional<StreamId> closed = TakeClosed();
  // Both tables grow together, also when memory runs out in between.
  if (closed) {
    std::destroy_at(&streams_[*closed]);
    std::construct_at(&streams_[*closed]);
  } else {
    streams_.emplace_back();
  }
  const StreamId id = closed.value_or(static_cast<StreamId>(streams_.size() - 1));
  streams_[id].options = options;
  streams_[id].StartAt(options.shape.first_epoch, options.shape.first_position);
  StreamShape shape = options.shape;
  shape.declared = options.declared;
  shape.whole = !options.declared && options.sampler.world == 1;
  try {
    scheduler_.OpenStream(shape, closed);
  } catch (...) {
    if (scheduler_.lookahead().streams().size() < streams_.size()) {
      streams_.pop_back();
    } else {
      if (!Unused(scheduler_, id)) scheduler_.CloseStream(id);
      streams_[id].open = false;
    }
    throw;
  }
  CountReads(datasets_[options.shape.dataset], &streams_[id].at_start);
  if (shape.serving) serving_.push_back(id);
  Collect();
  return id;
}

// ---- the cluster -----------------------------------------------------------------------------

void Engine::SetSourceWrap(SourceWrap wrap) {
  MutexLock adding(add_mutex_);
  has_peers_.store(static_cast<bool>(wrap));
  wrap_ = std::move(wrap);
}

void Engine::SetShare(DatasetId dataset, std::vector<uint8_t> share) {
  MutexLock lock(mutex_);
  if (!IsOpen(dataset)) {
    const bool adding =
        dataset < datasets_.size() && datasets_[dataset].use == DatasetState::Use::kAdding;
    if (adding) early_shares_[dataset] = std::move(share);
    return;
  }
  // Some may have been appended since the caller looked.
  const DatasetState& state = datasets_[dataset];
  while (state.growing != nullptr && share.size() < state.growing->size()) {
    share.push_back(ShareOfNew(state, static_cast<SampleId>(share.size())));
  }
  scheduler_.residency().SetShare(dataset, std::move(share));
  Collect();
}

void Engine::ChangeShares(DatasetId dataset,
                          std::span<const std::pair<SampleId, KeepShare>> changes) {
  MutexLock lock(mutex_);
  if (!IsOpen(dataset)) return;
  scheduler_.residency().ChangeShares(dataset, changes);
  Collect();
}

Result<StreamId> Engine::OpenServing(DatasetId dataset) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  StreamOptions options;
  options.shape.dataset = dataset;
  options.shape.serving = true;
  options.declared = true;
  options.ahead_of_consumer = true;
  MutexLock lock(mutex_);
  return Open(options);
}

std::vector<std::byte> Engine::HeldBits(DatasetId dataset) const {
  MutexLock lock(mutex_);
  if (!IsOpen(dataset)) return {};
  return scheduler_.residency().dataset(dataset).HeldBits();
}

HeldChanges Engine::TakeHeldChanges(DatasetId dataset) {
  MutexLock lock(mutex_);
  if (!IsOpen(dataset)) return {};
  return scheduler_.residency().dataset(dataset).TakeHeldChanges();
}

NodeRoom Engine::TierRoom() const {
  // Blocks are a little larger than samples where they lie badly, and tables and streams to come
  // take their part.
  constexpr uint64_t kMarginOneIn = 64;
  constexpr uint64_t kStaging = uint64_t{64} << 20;
  const auto less_margin = [](uint64_t bytes) { return bytes - bytes / kMarginOneIn; };
  NodeRoom room;
  MutexLock lock(mutex_);
  if (options_.keep) {
    const uint64_t usable = less_margin(scheduler_.arena().capacity());
    const uint64_t asked = static_cast<uint64_t>(memory_tier_.bytes.value());
    const uint64_t staging = std::min(usable / 2, std::max(kStaging, usable / 8));
    room.memory = asked == 0 ? usable - staging : std::min(asked, usable - usable / 8);
    const bool any = std::any_of(datasets_.begin(), datasets_.end(), [](const DatasetState& d) {
      return d.use == DatasetState::Use::kOpen;
    });
    if (any) room.memory = std::min(room.memory, scheduler_.residency().keep_quota());
    room.memory = less_margin(room.memory);
  }
  if (cache_ != nullptr) room.folder = less_margin(cache_->store->capacity_bytes());
  return room;
}

uint64_t Engine::TierQuota() const {
  MutexLock lock(mutex_);
  return scheduler_.residency().keep_quota() +
         (cache_ == nullptr ? 0 : cache_->store->capacity_bytes());
}

std::vector<uint32_t> Engine::TierLengths(const Catalog& catalog) {
  std::vector<uint32_t> lengths(catalog.size());
  for (SampleId s = 0; s < lengths.size(); ++s) {
    const uint64_t rounded = ArenaAllocator::Rounded(catalog.length(s));
    lengths[s] = static_cast<uint32_t>(std::min<uint64_t>(rounded, ~uint32_t{0}));
  }
  return lengths;
}

std::vector<uint32_t> Engine::TierLengths(DatasetId dataset) const {
  const std::shared_ptr<const Catalog> catalog = shared_catalog(dataset);
  if (catalog == nullptr) return {};
  return TierLengths(*catalog);
}

std::optional<DatasetUse> Engine::UseOf(DatasetId dataset) const {
  MutexLock lock(mutex_);
  if (!IsOpen(dataset)) return std::nullopt;
  const auto same = [](const SamplerSpec& a, const SamplerSpec& b) {
    return a.shuffle == b.shuffle && a.seed == b.seed && a.world == b.world &&
           a.drop_last == b.drop_last && a.exchange == b.exchange &&
           a.ranks_per_node == b.ranks_per_node;
  };
  std::optional<DatasetUse> use;
  for (StreamId id = 0; id < streams_.size(); ++id) {
    const StreamState& state = streams_[id];
    const StreamShape& shape = state.options.shape;
    if (!state.open || shape.dataset != dataset || shape.serving) continue;
    if (state.options.declared || shape.epochs == 0) return std::nullopt;
    const Lookahead::Stream& stream = scheduler_.lookahead().streams()[id];
    DatasetUse one{
        .sampler = state.options.sampler,
        .epochs = shape.first_epoch + shape.epochs,
        .epoch = stream.epochs.empty() ? stream.next_epoch : stream.epochs.front().epoch};
    if (use && (!same(use->sampler, one.sampler) || use->epochs != one.epochs)) {
      return std::nullopt;
    }
    if (!use || one.epoch > use->epoch) use = one;
  }
  return use;
}

std::vector<SampleId> Engine::Upcoming(DatasetId dataset, size_t most) const {
  MutexLock lock(mutex_);
  if (!IsOpen(dataset)) return {};
  return scheduler_.lookahead().Upcoming(dataset, most);
}

void Engine::SetClusterReport(std::function<ClusterReport()> report) {
  MutexLock lock(report_mutex_);
  report_ = std::move(report);
}

ClusterReport Engine::Cluster() const {
  MutexLock lock(report_mutex_);
  return report_ ? report_() : ClusterReport();
}

void Engine::UpdateFolderRoom() {
  const uint64_t capacity = cache_->store->capacity_bytes();
  const uint64_t used = cache_->store->used_bytes() + cache_->buffer.used_bytes();
  scheduler_.stores().SetFolderRoom(capacity - std::min(capacity, used));
  if (capacity <= used) NoteStopped();
}

void Engine::NoteStopped() {
  if (!cache_stopped_.empty() || cache_->store->follows()) return;
  const Status health = cache_->store->health();
  if (health.ok()) return;  // it is full
  cache_stopped_ =
      StrCat(health.message(),
             "; what it does not have is read from the source. Free or repair its disk, "
             "or name another folder");
  if (warn_) warn_(cache_stopped_);
}

void Engine::SignalServing() {
  bool changed = false;
  for (const StreamId id : serving_) {
    const uint64_t changes = scheduler_.leases().consumer(id).changes;
    changed |= streams_[id].announced_changes != changes;
    streams_[id].announced_changes = changes;
  }
  if (!changed) return;
  const uint64_t one = 1;
  (void)!write(serving_fd_.get(), &one, sizeof one);
}

Result<Engine::StreamState*> Engine::FindStream(StreamId stream) {
  if (stream >= streams_.size()) {
    return Status(Code::kInvalidArgument, StrCat("stream ", stream, " does not exist"));
  }
  return &streams_[stream];
}

Status Engine::CloseStream(StreamId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  const Result<StreamState*> state = FindStream(id);
  if (!state) return state.error();
  if (!(*state)->open) return Status();
  CountReads(datasets_[(*state)->options.shape.dataset], &(*state)->at_close);
  (*state)->open = false;
  closed_.push_back(id);
  std::erase(serving_, id);
  scheduler_.CloseStream(id);
  if (datasets_[(*state)->options.shape.dataset].use == DatasetState::Use::kClosing) WakeLoop();
  Collect();
  SignalProgress();
  NotifyAll(**state);
  return Status();
}

Status Engine::Seek(StreamId id, uint64_t epoch, uint64_t position) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  const Result<StreamState*> found = FindStream(id);
  if (!found) return found.error();
  StreamState& state = **found;
  if (!state.open) return Status(Code::kCancelled, "the stream was closed");
  if (!state.options.declared && position % state.options.sampler.world != 0) {
    return BadPosition(position, state.options.sampler.world);
  }
  if (state.epochs.under_way()) CloseEpoch(state, SteadyClock().Now());
  scheduler_.Seek(id, epoch, position);
  state.StartAt(epoch, position);
  Collect();
  SignalProgress();
  return Status();
}

Status Engine::Declare(StreamId id, uint64_t epoch, std::vector<SampleId> order, bool last) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  const Result<StreamState*> state = FindStream(id);
  if (!state) return state.error();
  if (!(*state)->open) return Status(Code::kCancelled, "the stream was closed");
  if (!(*state)->options.declared) {
    return Status(Code::kInvalidArgument, "this stream makes its own order from its sampler");
  }
  const size_t size = datasets_[(*state)->options.shape.dataset].catalog->size();
  for (SampleId s : order) {
    if (s >= size) {
      return Status(Code::kInvalidArgument,
                    StrCat("sample ", s, " is not in the data set of ", size, " samples"));
    }
  }
  if (Sizer* sizer = datasets_[(*state)->options.shape.dataset].sizer; sizer != nullptr) {
    sizer->Follow(id, scheduler_.lookahead().streams().at(id).generation, order);
  }
  scheduler_.ExtendOrder(id, scheduler_.lookahead().streams().at(id).generation, epoch,
                         std::move(order), last);
  Collect();
  SignalProgress();
  NotifyAll(**state);
  return Status();
}

// ---- consumers -------------------------------------------------------------------------------

Status Engine::TooLarge(uint64_t bytes) const {
  return Status(Code::kResourceExhausted,
                StrCat("a batch of ", bytes, " bytes does not fit the memory budget of ", budget_,
                       " bytes; lower batch_size or raise memory="));
}

Status Engine::HeldByLeases(StreamId id) const {
  const Leases::Held held = scheduler_.leases().HeldBeside(id);
  const bool between = held.piece > 0 && held.bytes + held.wanted <= scheduler_.arena().usable();
  return Status(
      Code::kResourceExhausted,
      StrCat("the next batch, of ", held.wanted, " bytes, finds no room: ", held.count,
             " batches that were not released hold ", held.bytes, " of the memory budget of ",
             budget_, " bytes",
             between ? StrCat(" and lie where its sample of ", held.piece, " bytes should") : "",
             "; let go of each batch before the next is asked for (del batch as the last line of "
             "the loop), lower batch_size or raise memory="));
}

Status Engine::Failure(StreamState& state, SampleId sample) {
  const DatasetId dataset = state.options.shape.dataset;
  if (scheduler_.residency().dataset(dataset).Dead(sample)) {
    const Catalog& catalog = *datasets_[dataset].catalog;
    return Status(Code::kChanged, StrCat(catalog.ObjectPath(catalog.object(sample)),
                                         " has changed since it was opened; open it again"));
  }
  const auto it = failures_.find({dataset, sample});
  if (it == failures_.end()) return Status(Code::kInternal, "a read failed without a reason");
  Status status = std::move(it->second);
  failures_.erase(it);
  return status;
}

void Engine::CloseEpoch(StreamState& state, Nanos now) {
  EpochStats* const stats = state.epochs.End(now);
  if (stats == nullptr) return;
  FillReads(state, stats);
  // What is read ahead before the next epoch begins is the next epoch's.
  CountReads(datasets_[state.options.shape.dataset], &state.at_start);
}

void Engine::CountReads(const DatasetState& dataset, EpochStats* stats) {
  stats->source_reads = dataset.reads;
  stats->source_bytes = dataset.read_bytes;
  stats->peer_reads = dataset.peer_reads;
  stats->peer_bytes = dataset.peer_bytes;
}

void Engine::FillReads(const StreamState& state, EpochStats* stats) const {
  if (state.open) {
    CountReads(datasets_[state.options.shape.dataset], stats);
  } else {
    stats->source_reads = state.at_close.source_reads;
    stats->source_bytes = state.at_close.source_bytes;
    stats->peer_reads = state.at_close.peer_reads;
    stats->peer_bytes = state.at_close.peer_bytes;
  }
  stats->source_reads -= state.at_start.source_reads;
  stats->source_bytes -= state.at_start.source_bytes;
  stats->peer_reads -= state.at_start.peer_reads;
  stats->peer_bytes -= state.at_start.peer_bytes;
}

void Engine::Account(StreamState& state, const BatchLoan& loan, Nanos now) {
  uint64_t bytes = 0;
  for (uint32_t length : loan.lengths) bytes += length;
  // The times of single samples nobody wants to know, and an itemised stream's epoch ends with a
  // Seek only.
  state.epochs.Count(loan.epoch, loan.samples.size(), bytes, now, !state.options.shape.itemised);
  meter_.OnTake(bytes, scheduler_.residency().bytes().ready);
  samples_total_.Add(loan.samples.size());
  sample_bytes_total_.Add(bytes);
}

Result<TakeKind> Engine::Ask(StreamId id, Nanos wait, LeaseId* fetch, SampleId sample,
                             BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const Nanos start = SteadyClock().Now();
  Nanos now = start;
  MutexLock lock(mutex_);
  const Result<StreamState*> found = FindStream(id);
  if (!found) return found.error();
  StreamState& state = **found;
  if (!state.open) return Status(Code::kCancelled, "the stream was closed");
  if (fetch != nullptr && sample >= datasets_[state.options.shape.dataset].catalog->size()) {
    return Status(Code::kInvalidArgument, StrCat("sample ", sample, " is not in the data set"));
  }
  if (fetch == nullptr && state.options.shape.itemised) {
    return Status(Code::kInvalidArgument, "this stream hands out single samples: fetch them");
  }
  const bool serving = state.options.shape.serving;
  if (serving && fetch == nullptr) {
    return Status(Code::kInvalidArgument, "this stream serves other nodes: fetch single samples");
  }
  if (!serving) {
    state.last_ask = start;
    state.epochs.Begin(start);
  }

  Scheduler::Handout handout;
  handout.samples.swap(out->samples);
  handout.offsets.swap(out->offsets);
  handout.lengths.swap(out->lengths);
  handout.crcs.swap(out->crcs);
  while (true) {
    if (!state.open) return Status(Code::kCancelled, "the stream was closed");
    const uint64_t seen = fetch != nullptr ? scheduler_.leases().Changes(id, *fetch)
                                           : scheduler_.leases().consumer(id).changes;
    const Scheduler::Take take = fetch != nullptr
                                     ? scheduler_.leases().FetchSample(id, sample, fetch, &handout)
                                     : scheduler_.leases().TakeBatch(id, &handout);
    Collect();
    switch (take) {
      case Scheduler::Take::kReady: {
        out->lease = handout.lease;
        out->stream = id;
        out->dataset = state.options.shape.dataset;
        out->base = arena_.data();
        out->epoch = handout.epoch;
        out->index = handout.index + (handout.epoch == state.start_epoch ? state.start_index : 0);
        out->samples.swap(handout.samples);
        out->offsets.swap(handout.offsets);
        out->lengths.swap(handout.lengths);
        out->crcs.swap(handout.crcs);
        if (!serving) Account(state, *out, SteadyClock().Now());
        return TakeKind::kBatch;
      }
      case Scheduler::Take::kEndOfEpoch:
        CloseEpoch(state, SteadyClock().Now());
        return TakeKind::kEndOfEpoch;
      case Scheduler::Take::kEndOfStream:
        state.epochs.EndOfStream();
        return TakeKind::kEndOfStream;
      case Scheduler::Take::kFailed:
        return Failure(state, handout.failed);
      case Scheduler::Take::kTooLarge:
        return TooLarge(handout.bytes);
      case Scheduler::Take::kPending:
        break;
    }
    if (Waits(scheduler_).OnlyReleaseHelps(id) && !state.options.ahead_of_consumer) {
      if (state.blocked_since < 0) state.blocked_since = now;
      if (now - state.blocked_since > options_.release_wait) {
        state.blocked_since = -1;
        return HeldByLeases(id);
      }
    } else {
      state.blocked_since = -1;
    }
    const Nanos left = wait - (now - start);
    if (left <= 0) return TakeKind::kPending;
    // The wait is charged to what the batch lacks as the wait begins.
    const StallCause cause = fetch != nullptr ? Waits(scheduler_).CauseOfLease(*fetch)
                                              : Waits(scheduler_).CauseOfStream(id);
    const std::chrono::nanoseconds slice(std::min(left, kSlice));
    ++state.waiters;
    if (fetch == nullptr) {
      state.ready.wait_for(lock.native(), slice, [&]() NO_THREAD_SAFETY_ANALYSIS {
        return scheduler_.leases().consumer(id).changes != seen || !state.open;
      });
    } else {
      FetchWaiter waiter;
      waiter.lease = *fetch;
      waiter.seen = seen;
      state.fetches.push_back(&waiter);
      waiter.ready.wait_for(lock.native(), slice, [&]() NO_THREAD_SAFETY_ANALYSIS {
        return scheduler_.leases().Changes(id, waiter.lease) != waiter.seen || !state.open;
      });
      std::erase(state.fetches, &waiter);
    }
    --state.waiters;
    const Nanos after = SteadyClock().Now();
    if (!state.options.ahead_of_consumer) {
      if (!serving) state.epochs.Waited(cause, after - now);
      CountStall(cause, after - now);
    }
    now = after;
  }
}

Result<TakeKind> Engine::Take(StreamId stream, Nanos wait, BatchLoan* out) {
  return Ask(stream, wait, nullptr, 0, out);
}

Result<TakeKind> Engine::Fetch(StreamId stream, SampleId sample, Nanos wait, LeaseId* lease,
                               BatchLoan* out) {
  return Ask(stream, wait, lease, sample, out);
}

Status Engine::Release(LeaseId lease) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  scheduler_.leases().Release(lease);
  const bool closing = std::any_of(
      datasets_.begin(), datasets_.end(),
      [](const DatasetState& dataset) { return dataset.use == DatasetState::Use::kClosing; });
  if (closing) WakeLoop();
  Collect();
  SignalProgress();
  return Status();
}

StallCause Engine::WaitCause(StreamId stream, LeaseId fetch) const {
  MutexLock lock(mutex_);
  if (fetch != kNoLease) return Waits(scheduler_).CauseOfLease(fetch);
  return stream < streams_.size() ? Waits(scheduler_).CauseOfStream(stream) : StallCause::kPlan;
}

void Engine::CountStall(StallCause cause, Nanos waited) {
  stall_[static_cast<size_t>(cause)]->Add(static_cast<uint64_t>(waited));
}

size_t Engine::dataset_count() const {
  MutexLock lock(mutex_);
  return datasets_.size();
}

Status Engine::Blocked(StreamId id) const {
  MutexLock lock(mutex_);
  if (id >= streams_.size() || !Waits(scheduler_).OnlyReleaseHelps(id)) return Status();
  return HeldByLeases(id);
}

std::vector<EpochStats> Engine::Stats(StreamId id) const {
  MutexLock lock(mutex_);
  if (id >= streams_.size()) return {};
  const StreamState& state = streams_[id];
  std::vector<EpochStats> out = state.epochs.Stats(SteadyClock().Now());
  if (state.epochs.has_current()) FillReads(state, &out.back());
  return out;
}

void Engine::SetJobLimits(std::string_view job, const JobLimits& limits) {
  MutexLock lock(mutex_);
  scheduler_.SetJobLimits(job, limits);
  Collect();
}

std::vector<JobStats> Engine::TakeJobStats() {
  MutexLock lock(mutex_);
  scheduler_.Advance(SteadyClock().Now());
  std::vector<JobStats> stats = scheduler_.jobs().TakeStats();
  Collect();
  return stats;
}

std::string Engine::WaitingFor(StreamId id) const {
  MutexLock lock(mutex_);
  if (id >= streams_.size()) return "nothing";
  DatasetId dataset = 0;
  SampleId sample = 0;
  const StallCause cause = Waits(scheduler_).CauseOfStream(id);
  std::string what(kStallCauseNames[static_cast<size_t>(cause)]);
  if (Waits(scheduler_).FirstMissing(id, &dataset, &sample)) {
    const Catalog& catalog = *datasets_[dataset].catalog;
    if (cause == StallCause::kTier && cache_ != nullptr) {
      what = StrCat("cache folder ", options_.cache_folder);
    } else if (cause == StallCause::kPeer && datasets_[dataset].source != nullptr) {
      const int32_t node = datasets_[dataset].source->Elsewhere(sample);
      what += node < 0 ? std::string(" (not joined yet)") : StrCat(" (node ", node, ")");
    }
    what += StrCat(": ", JoinPath(catalog.root(), catalog.SampleName(sample)));
  }
  return what;
}

size_t Engine::in_flight() const {
  MutexLock lock(mutex_);
  return scheduler_.reads().in_flight();
}

size_t Engine::in_flight_limit() const {
  MutexLock lock(mutex_);
  return InFlightLimit();
}

size_t Engine::InFlightLimit() const {
  return fixed_reads_ != 0 ? fixed_reads_ : tuner_->decision().reads;
}

// ---- threads ---------------------------------------------------------------------------------

void Engine::WakeLoop() {
  const uint64_t one = 1;
  (void)!write(wake_fd_.get(), &one, sizeof one);
}

void Engine::SignalProgress() {
  if (!progress_wanted_.load(std::memory_order_relaxed)) return;
  progress_wanted_.store(false, std::memory_order_relaxed);
  const uint64_t one = 1;
  (void)!write(progress_fd_.get(), &one, sizeof one);
}

void Engine::NotifyDue() {
  for (StreamId id = 0; id < streams_.size(); ++id) {
    if (scheduler_.leases().consumer(id).due) streams_[id].ready.notify_all();
    for (FetchWaiter* waiter : streams_[id].fetches) {
      if (scheduler_.leases().Changes(id, waiter->lease) != waiter->seen)
        waiter->ready.notify_one();
    }
  }
}

void Engine::NotifyAll(StreamState& stream) {
  stream.ready.notify_all();
  for (FetchWaiter* waiter : stream.fetches) waiter->ready.notify_one();
}

void Engine::ApplyKnobs() {
  registry_.ReadKnobs(&knobs_seen_, [this]() NO_THREAD_SAFETY_ANALYSIS {
    fixed_reads_ = static_cast<size_t>(prefetch_.reads.value());
    fixed_ahead_ = static_cast<uint64_t>(read_ahead_.bytes.value());
    scheduler_.residency().SetKeepBytes(static_cast<uint64_t>(memory_tier_.bytes.value()));
    scheduler_.SetAdmission(admission_.memory.value() != 0, admission_.folder.value() != 0);
    scheduler_.reads().SetHedging(static_cast<uint64_t>(hedging_.one_in.value()));
    scheduler_.jobs().SetNodeLimits(source_limit_.limits());
    scheduler_.reads().SetSourceExtra(static_cast<SourceExtra>(source_limit_.extra.value()));
    if (cache_ != nullptr)
      cache_->store->SetQuota(static_cast<uint64_t>(cache_folder_.bytes.value()));
  });
}

void Engine::Collect() {
  scheduler_.Advance(SteadyClock().Now());
  ApplyKnobs();
  const size_t limit = InFlightLimit();
  const uint64_t ahead = fixed_ahead_ != 0 ? fixed_ahead_ : tuner_->decision().ahead_bytes;
  scheduler_.lookahead().SetReadAheadBytes(ahead);
  scheduler_.residency().SetAheadBytes(ahead);
  const bool tuned = fixed_reads_ == 0 && tuning_.on.value() != 0;
  scheduler_.reads().SetFlightBytes(tuned ? tuner_->decision().flight_bytes : 0);
  scheduler_.leases().NextReads(limit, &outbox_, !closing_);
  const size_t waiting = Waits(scheduler_).CountForReads();
  if (waiting != meter_.waiting()) meter_.OnWaiting(waiting, SteadyClock().Now());
  for (OrderAction& order : scheduler_.lookahead().TakeOrders()) {
    if (streams_[order.stream].options.declared) continue;
    order_work_.push_back(order);
    order_ready_.notify_one();
  }
  const std::vector<SizeAction> sizes = scheduler_.leases().TakeSizes();
  for (size_t i = 0; i < sizes.size();) {
    std::vector<SampleId> samples;
    const DatasetId id = sizes[i].dataset;
    for (; i < sizes.size() && sizes[i].dataset == id; ++i) samples.push_back(sizes[i].sample);
    datasets_[id].sizer->Want(samples);
  }
  for (CopyAction& copy : scheduler_.leases().TakeCopies()) {
    copy_work_.push_back(std::move(copy));
    copy_ready_.notify_one();
  }
  if (!serving_.empty()) SignalServing();
  if ((!outbox_.empty() || scheduler_.jobs().wake_at() < loop_until_) && !loop_awake_) {
    loop_awake_ = true;
    WakeLoop();
  }
  arena_used_.Set(scheduler_.arena().used());
  arena_peak_.Raise(scheduler_.arena().used());
  memory_tier_.kept_bytes.Set(scheduler_.residency().bytes().kept);
  prefetch_.in_flight.Set(scheduler_.reads().requests());
  prefetch_.requests_total.Set(scheduler_.counters().requests);
  hedging_.hedged_total.Set(scheduler_.counters().hedged);
  source_limit_.extra_total.Set(scheduler_.counters().extra);
  source_limit_.extra_bytes_total.Set(scheduler_.counters().extra_bytes);
  prefetch_.limit.Set(limit);
  read_ahead_.limit_bytes.Set(ahead);
  read_ahead_.ahead_bytes.Set(scheduler_.residency().bytes().ahead);
  read_ahead_.ready_bytes.Set(scheduler_.residency().bytes().ready);
  leases_.Set(scheduler_.leases().leases().size());
  source_limit_.held.Set(static_cast<uint64_t>(scheduler_.jobs().held_total()));
  changed_total_.Set(scheduler_.counters().changed);
  changed_files_gauge_.Set(changed_count_);
  if (cache_ != nullptr) NoteCopies();
  memory_tier_.evicted_total.Set(scheduler_.counters().evicted);
}

std::string Engine::TenthsOfSeconds(Nanos time) {
  return StrCat(time / kSecond, ".", time % kSecond / (100 * kMilli));
}

void Engine::NoteCopies() {
  const uint64_t given_up = scheduler_.counters().copies_given_up;
  cache_->metrics.skipped.Add(given_up - std::exchange(copies_given_up_, given_up));
  cache_->metrics.under_way.Set(scheduler_.stores().under_way());
  cache_->metrics.held.Set(scheduler_.residency().bytes().storing);
  if (!scheduler_.stores().hangs() || !cache_warning_.empty()) return;
  cache_warning_ = StrCat("the cache folder ", options_.cache_folder, " has written nothing for ",
                          TenthsOfSeconds(scheduler_.stores().patience()),
                          " s: training goes on without it, and what is not copied now is copied "
                          "in a later epoch");
  if (warn_) warn_(cache_warning_);
}

void Engine::WriteTunerLog() {
  std::string lines;
  {
    MutexLock lock(mutex_);
    lines.swap(tuner_lines_);
  }
  for (std::string_view left = lines; !left.empty();) {
    const ssize_t n = write(tuner_log_.get(), left.data(), left.size());
    if (n <= 0) return;  // a full disk costs the log, nothing else
    left.remove_prefix(static_cast<size_t>(n));
  }
}

void Engine::RunPlanner(std::stop_token stop) {
  RankOrders orders;  // ranks that share the engine ask at about the same time
  while (!stop.stop_requested()) {
    if (tuner_log_.valid()) WriteTunerLog();
    {
      MutexLock lock(mutex_);
      order_ready_.wait_for(lock.native(), std::chrono::nanoseconds(kSlice),
                            [&]() NO_THREAD_SAFETY_ANALYSIS {
                              return stop.stop_requested() || !order_work_.empty();
                            });
    }
    if (!PlanNext(orders)) orders.Forget();
  }
}

bool Engine::PlanNext(RankOrders& orders) {
  OrderAction work;
  SamplerSpec sampler;
  Sizer* sizer = nullptr;
  std::shared_ptr<const Catalog> catalog;  // the sizer's: its data set may be closed meanwhile
  {
    MutexLock lock(mutex_);
    if (order_work_.empty()) return false;
    work = order_work_.front();
    order_work_.pop_front();
    if (!streams_[work.stream].open) return true;
    const StreamOptions& options = streams_[work.stream].options;
    sampler = options.sampler;
    sizer = datasets_[options.shape.dataset].sizer;
    catalog = datasets_[options.shape.dataset].catalog;
  }
  std::vector<SampleId> order = orders.Order(sampler, work.epoch, work.first_position);
  if (sizer != nullptr) sizer->Follow(work.stream, work.generation, order);
  MutexLock lock(mutex_);
  scheduler_.ExtendOrder(work.stream, work.generation, work.epoch, std::move(order), false);
  Collect();
  SignalProgress();
  NotifyAll(streams_[work.stream]);
  return true;
}

void Engine::RunCopier(std::stop_token stop) {
  while (!stop.stop_requested()) {
    CopyAction work;
    {
      MutexLock lock(mutex_);
      copy_ready_.wait_for(
          lock.native(), std::chrono::nanoseconds(kSlice),
          [&]() NO_THREAD_SAFETY_ANALYSIS { return stop.stop_requested() || !copy_work_.empty(); });
      if (copy_work_.empty()) continue;
      work = std::move(copy_work_.front());
      copy_work_.pop_front();
    }
    uint64_t at = work.dest;
    for (size_t i = 0; i < work.from.size(); ++i) {
      const uint32_t size = work.lengths[i];
      if (size != 0) std::memcpy(arena_.data() + at, arena_.data() + work.from[i], size);
      at += size;
    }
    MutexLock lock(mutex_);
    scheduler_.leases().OnCopyDone(work.lease);
    Collect();
    SignalProgress();
    NotifyDue();
  }
}

}  // namespace forebay
