#include "files/engine_supply.h"

#include <array>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "catalog/catalog.h"
#include "catalog/paths.h"
#include "tier/copy_names.h"

namespace forebay::files {
namespace {

constexpr Nanos kSlice = 50 * kMilli;   // between looks at whether to stop
constexpr Nanos kJustOpened = kSecond;  // attributes that are younger are not asked for again

int64_t TimeOf(const SourceFile& file) {
  return file.stat.st_mtim.tv_sec * kSecond + file.stat.st_mtim.tv_nsec;
}

// The source reads by the descriptor that there is, as long as this lives.
class OpenedFile {
 public:
  OpenedFile(std::shared_ptr<const Catalog> catalog, SampleId sample,
             const std::shared_ptr<const SourceFile>& file, bool readable)
      : catalog_(std::move(catalog)), object_(catalog_->object(sample)) {
    const bool just_opened = SteadyClock().Now() - file->opened < kJustOpened;
    catalog_->OpenFile(object_, {{file, &file->fd}, readable, just_opened});
  }
  ~OpenedFile() { catalog_->CloseFile(object_); }
  OpenedFile(const OpenedFile&) = delete;
  OpenedFile& operator=(const OpenedFile&) = delete;

 private:
  const std::shared_ptr<const Catalog> catalog_;
  const ObjectId object_;
};

}  // namespace

// A job's stream over a data folder, which stays open for as long as it is read from.
class EngineSupply::JobStream {
 public:
  JobStream(EngineSupply& supply, JobNumber job, uint32_t root)
      : supply_(supply), job_(supply.BeginRead(job)), stream_(supply.StreamOf(job_, root)) {}
  ~JobStream() { supply_.EndRead(job_); }
  JobStream(const JobStream&) = delete;
  JobStream& operator=(const JobStream&) = delete;
  const Result<StreamId>& get() const { return stream_; }

 private:
  EngineSupply& supply_;
  Job& job_;
  const Result<StreamId> stream_;
};

EngineSupply::EngineSupply(Engine& engine, std::string job, bool alone)
    : engine_(engine), alone_(alone), store_(engine.cache_store()) {
  const MutexLock lock(mutex_);
  jobs_[0].name = std::move(job);
  if (store_ != nullptr) parts_.emplace(*store_);
}

EngineSupply::~EngineSupply() {
  const MutexLock lock(mutex_);
  for (auto& [number, job] : jobs_) CloseStreams(job);
}

void EngineSupply::CloseStreams(Job& job) {
  for (const auto& [root, stream] : job.streams) (void)engine_.CloseStream(stream);
  job.streams.clear();
}

EngineSupply::Job& EngineSupply::JobOf(JobNumber number) {
  const auto found = jobs_.find(number);
  return found == jobs_.end() ? jobs_[0] : found->second;
}

void EngineSupply::OpenJob(JobNumber number, const std::string& name) {
  const MutexLock lock(mutex_);
  Job& job = jobs_[number];
  if (number != 0) job.name = name;
  job.open = true;
}

void EngineSupply::CloseJob(JobNumber number) {
  const MutexLock lock(mutex_);
  Job& job = JobOf(number);
  job.open = false;
  if (job.reads == 0) CloseStreams(job);
}

EngineSupply::Job& EngineSupply::BeginRead(JobNumber number) {
  const MutexLock lock(mutex_);
  Job& job = JobOf(number);
  ++job.reads;
  return job;
}

Result<StreamId> EngineSupply::StreamOf(Job& job, uint32_t root) {
  const MutexLock lock(mutex_);
  if (const auto found = job.streams.find(root); found != job.streams.end()) return found->second;
  StreamOptions options;
  options.shape.dataset = roots_[root].dataset;
  options.shape.itemised = true;
  options.shape.job = job.name;
  options.declared = true;
  options.ahead_of_consumer = true;  // whose waits count is told here
  const Result<StreamId> stream = engine_.OpenStream(options);
  if (stream) job.streams.emplace(root, *stream);
  return stream;
}

void EngineSupply::EndRead(Job& job) {
  const MutexLock lock(mutex_);
  if (--job.reads == 0 && !job.open) CloseStreams(job);
}

Status EngineSupply::AddSource(const std::string& folder, const std::string& name) {
  const MutexLock lock(mutex_);
  for (const Root& root : roots_) {
    const std::string& has = root.catalog->given_name();
    if (root.folder == folder && (name.empty() || name == has)) return Status();
    if (root.folder != folder && (name.empty() || name != has)) continue;
    return Status(Code::kAlreadyExists,
                  StrCat("the data folder ", folder, " is not shared as ", name, ": ",
                         root.folder == folder ? StrCat("this daemon has it ",
                                                        has.empty() ? "without a name" : "as ", has)
                                               : StrCat("that is the name of ", root.folder)));
  }
  const std::shared_ptr<Catalog> catalog = Catalog::Growing(folder, name);
  Result<DatasetId> dataset = engine_.AddGrowing(catalog);
  if (!dataset) return dataset.error();
  FOREBAY_RETURN_IF_ERROR(engine_.SetPassing(*dataset));
  roots_.push_back({folder, static_cast<uint32_t>(roots_.size()), *dataset, catalog});
  return Status();
}

const EngineSupply::Root* EngineSupply::RootOf(std::string_view path) const {
  const Root* found = nullptr;
  for (const Root& root : roots_) {
    if (!IsBelow(path, root.folder)) continue;
    if (found == nullptr || root.folder.size() > found->folder.size()) found = &root;
  }
  return found;
}

void EngineSupply::ForgetLocked(const FileKey& key) {
  const auto found = known_.find(key);
  if (found == known_.end()) return;
  const Known& known = found->second;
  (void)engine_.Invalidate(roots_[known.root].dataset, known.samples.first, known.samples.count);
  if (store_ != nullptr) {
    store_->Drop(known.copy);
    // A name that it has in the cache is removed by who forgets it; it cannot be looked up later.
    store_->ReleaseCopy(known.copy);
  }
  known_.erase(found);
}

Result<EngineSupply::Found> EngineSupply::Find(const std::string& path, const SourceFile& file,
                                               const Extent& extent) {
  const FileKey key = KeyOf(path);
  const auto size = static_cast<uint64_t>(file.stat.st_size);
  const int64_t mtime_ns = TimeOf(file);
  const MutexLock lock(mutex_);
  auto found = known_.find(key);
  if (found != known_.end() &&
      (found->second.size != size || found->second.mtime_ns != mtime_ns ||
       (found->second.samples.count > 0 && found->second.block != extent.block))) {
    ForgetLocked(key);
    found = known_.end();
  }
  if (found == known_.end() || found->second.samples.count == 0) {
    const Root* const root = RootOf(path);
    if (root == nullptr) {
      return Status(Code::kNotFound, StrCat(path, " lies in no data folder of this run"));
    }
    const std::array<NewFile, 1> file_of = {
        NewFile{.path = path, .size = size, .mtime_ns = mtime_ns, .block = extent.block}};
    std::vector<Appended> samples;
    FOREBAY_RETURN_IF_ERROR(engine_.AppendSamples(root->dataset, file_of, &samples));
    Known& known = FindOrAdd(path, file, *root);
    known.block = extent.block;
    known.samples = samples[0];
    found = known_.find(key);
  }
  const Known& known = found->second;
  const auto number = static_cast<SampleId>(extent.block == 0 ? 0 : extent.offset / extent.block);
  if (number >= known.samples.count) {
    return Status(Code::kChanged, StrCat(path, " has no block ", number));
  }
  const Root& root = roots_[known.root];
  return Found{root.catalog, root.number, known.samples.first + number};
}

EngineSupply::Known& EngineSupply::FindOrAdd(const std::string& path, const SourceFile& file,
                                             const Root& root) {
  Known& known = known_[KeyOf(path)];
  known.size = static_cast<uint64_t>(file.stat.st_size);
  known.mtime_ns = TimeOf(file);
  known.root = root.number;
  known.copy = WholeFileName(root.folder, path, known.size, known.mtime_ns);
  return known;
}

Result<FileLoan> EngineSupply::Read(const std::string& path,
                                    const std::shared_ptr<const SourceFile>& file,
                                    const Extent& extent, const Purpose& purpose,
                                    const std::stop_token& stop) {
  if (std::optional<FileLoan> held = ReadParts(path, *file, extent, purpose.urgent))
    return *std::move(held);
  const Result<Found> found = Find(path, *file, extent);
  if (!found) return found.error();
  const JobStream of_job(*this, purpose.job, found->root);
  const Result<StreamId>& stream = of_job.get();
  if (!stream) return stream.error();
  const OpenedFile opened(found->catalog, found->sample, file, alone_);
  LeaseId lease = kNoLease;
  BatchLoan loan;
  Nanos since = SteadyClock().Now();
  StallCause cause = StallCause::kSource;
  for (Nanos slice = 0;; slice = kSlice) {
    if (lease != kNoLease) cause = engine_.WaitCause(*stream, lease);
    const Result<TakeKind> taken = engine_.Fetch(*stream, found->sample, slice, &lease, &loan);
    if (purpose.urgent) {
      const Nanos now = SteadyClock().Now();
      engine_.CountStall(cause, now - since);
      since = now;
    }
    if (taken && *taken == TakeKind::kBatch) break;
    if (taken && !stop.stop_requested()) continue;
    if (lease != kNoLease) (void)engine_.Release(lease);
    return taken ? Status(Code::kCancelled, "the file service ends") : taken.error();
  }
  FileLoan out(*this, loan.lease, {loan.base + loan.offsets[0], loan.lengths[0]}, cause);
  if (out.bytes().size() != extent.bytes) {
    return Status(Code::kChanged, StrCat(path, " has another size"));
  }
  return out;
}

std::optional<FileLoan> EngineSupply::ReadParts(const std::string& path, const SourceFile& file,
                                                const Extent& extent, bool urgent) {
  if (!parts_) return std::nullopt;
  const Nanos since = SteadyClock().Now();
  std::vector<std::byte> bytes;
  const ShardParts::File of = {path, static_cast<uint64_t>(file.stat.st_size), TimeOf(file)};
  if (!parts_->Read(of, file.fd.get(), extent.offset, extent.bytes, &bytes)) return std::nullopt;
  if (urgent) engine_.CountStall(StallCause::kTier, SteadyClock().Now() - since);
  return FileLoan(std::move(bytes), StallCause::kTier);
}

void EngineSupply::Release(uint64_t lease) { (void)engine_.Release(lease); }

Result<TierKey> EngineSupply::CopyOf(const std::string& path, const SourceFile& file) const {
  const MutexLock lock(mutex_);
  const Root* const root = store_ == nullptr ? nullptr : RootOf(path);
  if (root == nullptr) return Status(Code::kNotFound, "no copy is stored");
  return WholeFileName(root->folder, path, static_cast<uint64_t>(file.stat.st_size), TimeOf(file));
}

Status EngineSupply::LinkCopy(const std::string& path, const SourceFile& file, int folder,
                              const char* name) {
  const Result<TierKey> copy = CopyOf(path, file);
  if (!copy) return copy.error();
  const uint32_t then = store_->StampOfCopy(*copy);
  if (then != 0 && then != StampOf(CtimeNs(file.stat))) {
    // Of a loader's copies only this tells that the file was written since, with its time put back.
    store_->Drop(*copy);
    return Status(Code::kNotFound, "the file has changed since it was copied");
  }
  FOREBAY_RETURN_IF_ERROR(
      store_->LinkCopy(*copy, static_cast<uint64_t>(file.stat.st_size), folder, name));
  Remember(path, file);
  return Status();
}

void EngineSupply::Remember(const std::string& path, const SourceFile& file) {
  const MutexLock lock(mutex_);
  const Root* const root = RootOf(path);
  if (root != nullptr && !known_.contains(KeyOf(path))) (void)FindOrAdd(path, file, *root);
}

Status EngineSupply::KeepCopy(const std::string& path, const SourceFile& file, int folder,
                              const char* name, uint32_t crc) {
  const Result<TierKey> copy = CopyOf(path, file);
  if (!copy) return copy.error();
  Remember(path, file);  // an empty one was not read
  return store_->AdoptFile(*copy, folder, name, static_cast<uint64_t>(file.stat.st_size), crc,
                           false, StampOf(CtimeNs(file.stat)));
}

void EngineSupply::DropCopy(const std::string& path, const SourceFile& file) {
  const Result<TierKey> copy = CopyOf(path, file);
  if (!copy) return;
  store_->Drop(*copy);
  store_->ReleaseCopy(*copy);
}

void EngineSupply::Removed(const FileKey& key) {
  const MutexLock lock(mutex_);
  const auto found = known_.find(key);
  if (store_ != nullptr && found != known_.end()) store_->ReleaseCopy(found->second.copy);
}

bool EngineSupply::CopiesAnswer() {
  if (store_ == nullptr) return true;
  store_->Watch();
  return !store_->passed_by();
}

std::vector<FileKey> EngineSupply::TakeUnlinks() {
  std::vector<FileKey> out;
  if (store_ == nullptr) return out;
  const std::vector<TierKey> copies = store_->TakeUnlinks();
  if (copies.empty()) return out;
  const MutexLock lock(mutex_);
  for (const TierKey& copy : copies) {
    bool named = false;
    for (const auto& [key, known] : known_) {
      if (known.copy != copy) continue;
      out.push_back(key);
      named = true;
    }
    if (!named) store_->ReleaseCopy(copy);  // it has lost its name, or never got it
  }
  return out;
}

void EngineSupply::Forget(const std::string& path) {
  if (parts_) parts_->Forget(path);
  const MutexLock lock(mutex_);
  ForgetLocked(KeyOf(path));
}

}  // namespace forebay::files
