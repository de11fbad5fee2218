#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "forebay/forebay.h"
#include "peer/start.h"
#include "port/failover_port.h"
#include "port/local_port.h"
#include "stage/early_samples.h"
#include "stage/engine.h"

namespace forebay {
namespace {

// ---- errors ----------------------------------------------------------------------------------

int ErrnoOf(Code code) {
  switch (code) {
    case Code::kOk:
      return 0;
    case Code::kInvalidArgument:
      return EINVAL;
    case Code::kNotFound:
      return ENOENT;
    case Code::kPermissionDenied:
      return EACCES;
    case Code::kDataLoss:
      return EBADMSG;
    case Code::kChanged:
      return ESTALE;
    case Code::kResourceExhausted:
      return ENOMEM;
    case Code::kUnavailable:
      return EIO;
    case Code::kDeadlineExceeded:
      return ETIMEDOUT;
    case Code::kCancelled:
      return ECANCELED;
    case Code::kUnimplemented:
      return ENOTSUP;
    case Code::kAlreadyExists:
      return EEXIST;
    case Code::kInternal:
      return ENOTRECOVERABLE;
  }
  return ENOTRECOVERABLE;
}

// Room for the longest path and a sentence; an array, so that reporting needs no memory.
thread_local char last_error[4096 + 512];

// For the results that have no Code of their own, beside those that Call() makes of a Status.
int Fail(int error, const char* function, const char* message) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s: %s", function, message);
  return -error;
}

// Runs the body of a function of the C ABI: errors and exceptions become negative errno values.
template <typename Body>
int64_t Call(const char* function, Body&& body) noexcept {
  try {
    const Result<int64_t> result = body();
    if (result) return *result;
    return Fail(ErrnoOf(result.error().code()), function, result.error().message().c_str());
  } catch (const std::bad_alloc&) {
    return Fail(ENOMEM, function, "out of memory");
  } catch (const std::system_error& error) {
    // The standard library throws these when a thread or a lock cannot be had.
    return Fail(ENOMEM, function, error.what());
  } catch (const std::exception& error) {
    return Fail(ENOTRECOVERABLE, function, error.what());
  } catch (...) {
    return Fail(ENOTRECOVERABLE, function, "unknown exception");
  }
}

template <typename Body>
int CallInt(const char* function, Body&& body) noexcept {
  return static_cast<int>(Call(function, std::forward<Body>(body)));
}

Status Invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

Status NotNull(const void* pointer, const char* name) {
  return pointer != nullptr ? Status() : Invalid(StrCat(name, " is NULL"));
}

// Locks of the parent may be held by threads that a child does not have: checked before any lock.
Status Ours(uint64_t fork_generation) {
  if (fork_generation == ForkGeneration()) return Status();
  return Status(Code::kCancelled,
                "this handle belongs to the parent process; a forked child opens its own");
}

int64_t CopyText(const std::string& text, char* buffer, size_t n) {
  if (n > 0) {
    const size_t length = std::min(n - 1, text.size());
    std::memcpy(buffer, text.data(), length);
    buffer[length] = '\0';
  }
  return static_cast<int64_t>(text.size());
}

// ---- options ---------------------------------------------------------------------------------

// Padding would hold garbage where a later version may put a field.
static_assert(std::has_unique_object_representations_v<fb_engine_options>);
static_assert(std::has_unique_object_representations_v<fb_dataset_options>);
static_assert(std::has_unique_object_representations_v<fb_loader_options>);

constexpr uint32_t kLinger = 5;  // seconds, as forebayd's own

fb_engine_options DefaultsOf(const fb_engine_options*) {
  const EngineOptions defaults;
  fb_engine_options out = {};
  out.size = sizeof out;
  out.memory = defaults.memory;
  out.release_wait_ms = static_cast<uint64_t>(defaults.release_wait / kMilli);
  out.max_in_flight = static_cast<uint32_t>(defaults.max_in_flight);
  out.in_flight = static_cast<uint32_t>(defaults.in_flight);
  out.copy_threads = static_cast<uint32_t>(defaults.copy_threads);
  out.io = FB_IO_AUTO;
  out.keep = defaults.keep ? 1 : 0;
  out.verify = defaults.verify ? 1 : 0;
  out.linger_s = kLinger;
  return out;
}

fb_dataset_options DefaultsOf(const fb_dataset_options*) {
  fb_dataset_options out = {};
  out.size = sizeof out;
  out.threads = static_cast<uint32_t>(BuildOptions().threads);
  out.use_cache = 1;
  return out;
}

fb_loader_options DefaultsOf(const fb_loader_options*) {
  fb_loader_options out = {};
  out.size = sizeof out;
  out.epochs = 1;
  out.batch_size = 1;
  out.world = 1;
  out.shuffle = 1;
  return out;
}

template <typename Options>
int InitOptions(const char* function, Options* options, size_t size) noexcept {
  return CallInt(function, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(options, "options"));
    if (size < sizeof(size_t)) return Invalid("size is not that of the structure; pass sizeof");
    Options defaults = DefaultsOf(options);
    defaults.size = size;
    // A newer caller's structure is longer than ours, an older one's shorter.
    std::memset(static_cast<void*>(options), 0, size);
    std::memcpy(static_cast<void*>(options), &defaults, std::min(size, sizeof defaults));
    return 0;
  });
}

// Options as this version knows them, whatever version the caller was compiled against.
template <typename Options>
Result<Options> ReadOptions(const Options* given) {
  Options out = DefaultsOf(given);
  if (given == nullptr) return out;
  const size_t size = given->size;
  if (size < sizeof(size_t)) {
    return Invalid("options.size is not set; call the options' init function first");
  }
  const char* bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof out; i < size; ++i) {
    if (bytes[i] != 0) {
      return Status(Code::kUnimplemented,
                    StrCat("the options set a field that this version of Forebay (",
                           FOREBAY_VERSION, ") does not have"));
    }
  }
  std::memcpy(static_cast<void*>(&out), bytes, std::min(size, sizeof out));
  out.size = sizeof out;
  return out;
}

struct NamedFlag {
  uint32_t value;
  const char* name;
  bool* out;
};

Status ReadFlags(std::initializer_list<NamedFlag> flags) {
  for (const NamedFlag& flag : flags) {
    if (flag.value > 1) {
      return Invalid(StrCat(flag.name, " is ", flag.value, "; it takes 0 or 1"));
    }
    *flag.out = flag.value == 1;
  }
  return Status();
}

// Far above any real value, and sums of two stay in range.
constexpr uint64_t kMaxCount = uint64_t{1} << 62;

Status InRange(uint64_t value, const char* name) {
  return value <= kMaxCount ? Status() : Invalid(StrCat(name, " is ", value, "; out of range"));
}

Result<EngineOptions> ToEngine(const fb_engine_options& in) {
  EngineOptions out;
  out.memory = in.memory;
  out.max_in_flight = in.max_in_flight;
  out.in_flight = in.in_flight;
  out.copy_threads = in.copy_threads;
  switch (in.io) {
    case FB_IO_AUTO:
      out.io = PosixSourceOptions::Io::kAuto;
      break;
    case FB_IO_THREADS:
      out.io = PosixSourceOptions::Io::kThreads;
      break;
    case FB_IO_URING:
      out.io = PosixSourceOptions::Io::kUring;
      break;
    default:
      return Invalid(StrCat("io is ", in.io, "; use FB_IO_AUTO, FB_IO_THREADS or FB_IO_URING"));
  }
  FOREBAY_RETURN_IF_ERROR(
      ReadFlags({{in.keep, "keep", &out.keep}, {in.verify, "verify", &out.verify}}));
  constexpr uint64_t kDayMs = 24 * 3600 * uint64_t{1000};
  if (in.release_wait_ms > kDayMs) {
    return Invalid(StrCat("release_wait_ms is ", in.release_wait_ms, "; it takes at most one day"));
  }
  out.release_wait = static_cast<Nanos>(in.release_wait_ms) * kMilli;
  if (in.cache_dir != nullptr && *in.cache_dir != '\0') {
    out.cache_folder = std::filesystem::absolute(in.cache_dir).string();  // a daemon is elsewhere
  }
  out.cache_bytes = in.cache_bytes;
  if (in.cache_bytes != 0 && out.cache_folder.empty()) {
    return Invalid("cache_bytes needs a cache_dir");
  }
  if (in.cache_group != nullptr) out.cache_group = in.cache_group;
  if (!out.cache_group.empty() && out.cache_folder.empty()) {
    return Invalid("cache_group needs a cache_dir");
  }
  return out;
}

std::string TextOr(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

bool Executable(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

// The daemon's executable.
std::string DaemonProgram(const char* given) {
  if (given != nullptr) return given;
  if (const char* named = std::getenv("FOREBAYD"); named != nullptr && *named != '\0') return named;
  Dl_info library = {};
  if (dladdr(reinterpret_cast<const void*>(&fb_version), &library) != 0 &&
      library.dli_fname != nullptr) {
    // The Python package has it a folder above its libraries.
    const std::filesystem::path folder = std::filesystem::path(library.dli_fname).parent_path();
    for (const std::filesystem::path& place : {folder, folder.parent_path()}) {
      const std::string program = (place / "forebayd").string();
      if (place.is_absolute() && Executable(program)) return program;
    }
  }
  std::string folders = TextOr(std::getenv("PATH"), "");
  for (size_t at = 0; at < folders.size();) {
    const size_t end = std::min(folders.find(':', at), folders.size());
    std::string found = folders.substr(at, end - at) + "/forebayd";
    if (Executable(found)) return found;
    at = end + 1;
  }
  return "/usr/bin/forebayd";  // its absence is reported with this name
}

Result<std::shared_ptr<Port>> OpenShared(const fb_engine_options& in, const EngineOptions& engine) {
  FailoverOptions options;
  options.daemon.folder = TextOr(in.daemon_folder, "");
  options.daemon.program = DaemonProgram(in.daemon_program);
  options.daemon.settings = DaemonSettings(engine);
  if (in.linger_s != kLinger) {
    options.daemon.settings.push_back(StrCat("linger=", in.linger_s));
  }
  if (in.peers != nullptr) options.daemon.settings.push_back(StrCat("peers=", in.peers));
  options.engine = engine;
  options.job = TextOr(in.job, "");
  if (in.event != nullptr) {
    options.tell = [event = in.event, context = in.event_context](FailoverEvent what,
                                                                  const std::string& why) {
      event(context, what == FailoverEvent::kAlone ? FB_EVENT_ALONE : FB_EVENT_RETURNED,
            why.c_str());
    };
  }
  Result<FailoverPortPtr> port = FailoverPort::Open(std::move(options));
  if (!port) return port.error();
  return std::shared_ptr<Port>(*std::move(port));
}

Result<BuildOptions> ToBuild(const fb_dataset_options& in) {
  BuildOptions out;
  if (in.format != nullptr) out.format = in.format;
  if (in.extension_count > 0) FOREBAY_RETURN_IF_ERROR(NotNull(in.extensions, "extensions"));
  for (size_t i = 0; i < in.extension_count; ++i) {
    FOREBAY_RETURN_IF_ERROR(NotNull(in.extensions[i], StrCat("extensions[", i, "]").c_str()));
    out.extensions.emplace_back(in.extensions[i]);
  }
  out.threads = in.threads;
  if (in.progress != nullptr) {
    out.progress = [progress = in.progress, context = in.progress_context](
                       uint64_t done, uint64_t total, uint64_t samples) {
      return progress(context, done, total, samples) == 0;
    };
  }
  return out;
}

Result<StreamOptions> ToStream(const fb_loader_options& in, DatasetId dataset, size_t samples) {
  StreamOptions out;
  out.shape.dataset = dataset;
  out.shape.batch_size = in.batch_size;
  out.shape.epochs = in.epochs;
  out.shape.first_epoch = in.first_epoch;
  out.shape.first_position = in.first_position;
  out.sampler.size = static_cast<uint32_t>(samples);
  out.sampler.seed = in.seed;
  out.sampler.rank = in.rank;
  out.sampler.world = in.world;
  FOREBAY_RETURN_IF_ERROR(
      ReadFlags({{in.drop_last, "drop_last", &out.shape.drop_last},
                 {in.contiguous, "contiguous", &out.shape.contiguous},
                 {in.shuffle, "shuffle", &out.sampler.shuffle},
                 {in.sampler_drop_last, "sampler_drop_last", &out.sampler.drop_last}}));
  FOREBAY_RETURN_IF_ERROR(InRange(in.epochs, "epochs"));
  FOREBAY_RETURN_IF_ERROR(InRange(in.first_epoch, "first_epoch"));
  FOREBAY_RETURN_IF_ERROR(InRange(in.first_position, "first_position"));
  if (in.reserved != 0) return Invalid("reserved must be 0");
  FOREBAY_RETURN_IF_ERROR(out.sampler.Validate());
  if (in.first_position % in.world != 0) {
    return Invalid(StrCat("first_position ", in.first_position,
                          " is not a multiple of the world size ", in.world));
  }
  return out;
}

class Loader;

}  // namespace
}  // namespace forebay

// ---- handles ---------------------------------------------------------------------------------

// The port is shared: C callers close in any order, the last handle stops the engine behind it.
struct fb_engine {
  std::shared_ptr<forebay::Port> port;
  std::shared_ptr<forebay::Engine> engine;  // shared with the port; null: not of this process
  const uint64_t fork_generation = forebay::ForkGeneration();
};

struct fb_dataset {
  std::shared_ptr<forebay::Port> port;
  std::shared_ptr<const forebay::Catalog> catalog;  // shared with the engine's source
  forebay::DatasetId id = 0;
  const uint64_t fork_generation = forebay::ForkGeneration();
};

struct fb_batch {
  std::atomic<bool> on_loan{false};  // of two releases one wins; orders nothing else
  // While on loan the batch keeps its loader, which owns the batch: the cycle ends with the
  // release.
  std::shared_ptr<forebay::Loader> loader;
  forebay::BatchLoan loan;
  const uint64_t fork_generation = forebay::ForkGeneration();
};

namespace forebay {
namespace {

// One stream and the batches it has handed out. Lives until the handle is closed and the last batch
// is released.
class Loader : public std::enable_shared_from_this<Loader> {
 public:
  Loader(std::shared_ptr<Port> port, std::shared_ptr<const Catalog> catalog,
         const StreamOptions& options)
      : port_(std::move(port)),
        catalog_(std::move(catalog)),
        options_(options),
        start_epoch_(options.shape.first_epoch),
        start_position_(options.shape.first_position),
        epoch_(start_epoch_),
        position_(start_position_) {}

  const Catalog& catalog() const { return *catalog_; }
  bool contiguous() const { return options_.shape.contiguous; }
  bool forked() const { return fork_generation_ != ForkGeneration(); }

  Status Open();
  void Close() { (void)port_->CloseStream(stream_); }
  Result<int64_t> Next(Nanos wait, fb_batch** out);
  Result<int64_t> Seek(uint64_t epoch, uint64_t position);
  Status Release(fb_batch& batch);
  Status Position(uint64_t* epoch, uint64_t* position);

 private:
  // The right to take from the stream: one thread at a time, so that positions are noted in the
  // order of the batches.
  class Turn {
   public:
    Turn(Loader& loader, fb_batch* spare) : loader_(loader), spare_(spare) {}
    ~Turn() {
      MutexLock lock(loader_.mutex_);
      loader_.taking_ = false;
      if (spare_ != nullptr) loader_.spares_.push_back(spare_);  // room was reserved
      loader_.turn_free_.notify_one();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    fb_batch* Keep() { return std::exchange(spare_, nullptr); }

   private:
    Loader& loader_;
    fb_batch* spare_;
  };

  fb_batch* TakeSpare() REQUIRES(mutex_);

  // Constant after Open.
  const std::shared_ptr<Port> port_;
  const std::shared_ptr<const Catalog> catalog_;
  const StreamOptions options_;
  StreamId stream_ = 0;
  const uint64_t fork_generation_ = ForkGeneration();

  Mutex mutex_;
  std::condition_variable turn_free_;
  bool taking_ GUARDED_BY(mutex_) = false;
  std::deque<fb_batch> batches_ GUARDED_BY(mutex_);  // deque: callers hold pointers
  std::vector<fb_batch*> spares_ GUARDED_BY(mutex_);
  uint64_t start_epoch_ GUARDED_BY(mutex_);  // where the stream was opened or sought to
  uint64_t start_position_ GUARDED_BY(mutex_);
  uint64_t epoch_ GUARDED_BY(mutex_);  // of the next batch
  uint64_t position_ GUARDED_BY(mutex_);
};

Status Loader::Open() {
  const Result<StreamId> stream = port_->OpenStream(options_);
  if (stream) stream_ = *stream;
  return stream.status();
}

Status Loader::Position(uint64_t* epoch, uint64_t* position) {
  FOREBAY_RETURN_IF_ERROR(Ours(fork_generation_));
  MutexLock lock(mutex_);
  *epoch = epoch_;
  *position = position_;
  return Status();
}

fb_batch* Loader::TakeSpare() {
  if (spares_.empty()) {
    spares_.reserve(batches_.size() + 1);  // so that giving one back needs no memory
    spares_.push_back(&batches_.emplace_back());
  }
  fb_batch* spare = spares_.back();
  spares_.pop_back();
  return spare;
}

Result<int64_t> Loader::Next(Nanos wait, fb_batch** out) {
  constexpr const char* kName = "fb_loader_next";
  FOREBAY_RETURN_IF_ERROR(Ours(fork_generation_));
  const Nanos start = SteadyClock().Now();
  fb_batch* spare = nullptr;
  {
    MutexLock lock(mutex_);
    turn_free_.wait_for(lock.native(), std::chrono::nanoseconds(wait),
                        [&]() NO_THREAD_SAFETY_ANALYSIS { return !taking_; });
    if (taking_) return Fail(EAGAIN, kName, "another thread still waits for the batch before");
    spare = TakeSpare();
    taking_ = true;
  }
  Turn turn(*this, spare);
  const Nanos left = std::max<Nanos>(0, wait - (SteadyClock().Now() - start));
  const Result<TakeKind> taken = port_->Take(stream_, left, &spare->loan);
  if (!taken) return taken.error();
  switch (*taken) {
    case TakeKind::kPending:
      return Fail(EAGAIN, kName,
                  StrCat("no batch within ", wait / kMilli, " ms; it waits for ",
                         port_->WaitingFor(stream_))
                      .c_str());
    case TakeKind::kEndOfEpoch: {
      MutexLock lock(mutex_);
      ++epoch_;
      position_ = 0;
      return FB_END_OF_EPOCH;
    }
    case TakeKind::kEndOfStream:
      return FB_END_OF_STREAM;
    case TakeKind::kBatch:
      break;
  }
  const uint64_t world = options_.sampler.world;
  const uint64_t step = options_.shape.batch_size * world;
  {
    MutexLock lock(mutex_);
    // A stream that starts between two batches stays between them to the epoch's end.
    const uint64_t shift = spare->loan.epoch == start_epoch_ ? start_position_ % step : 0;
    epoch_ = spare->loan.epoch;
    position_ = shift + spare->loan.index * step + spare->loan.samples.size() * world;
  }
  spare->loader = shared_from_this();
  spare->on_loan.store(true, std::memory_order_relaxed);
  *out = turn.Keep();
  return FB_BATCH;
}

Result<int64_t> Loader::Seek(uint64_t epoch, uint64_t position) {
  FOREBAY_RETURN_IF_ERROR(Ours(fork_generation_));
  FOREBAY_RETURN_IF_ERROR(InRange(epoch, "epoch"));
  FOREBAY_RETURN_IF_ERROR(InRange(position, "position"));
  MutexLock lock(mutex_);
  if (taking_) return Fail(EBUSY, "fb_loader_seek", "another thread is in fb_loader_next");
  FOREBAY_RETURN_IF_ERROR(port_->Seek(stream_, epoch, position));
  start_epoch_ = epoch_ = epoch;
  start_position_ = position_ = position;
  return 0;
}

Status Loader::Release(fb_batch& batch) {
  FOREBAY_RETURN_IF_ERROR(Ours(fork_generation_));
  const LeaseId lease = batch.loan.lease;
  {
    MutexLock lock(mutex_);
    spares_.push_back(&batch);
  }
  return port_->Release(lease);
}

Status OnLoan(const fb_batch* batch) {
  FOREBAY_RETURN_IF_ERROR(NotNull(batch, "batch"));
  if (!batch->on_loan.load(std::memory_order_relaxed)) return Invalid("the batch was released");
  return Status();
}

Status SampleOfBatch(const fb_batch* batch, size_t i) {
  FOREBAY_RETURN_IF_ERROR(OnLoan(batch));
  if (i < batch->loan.samples.size()) return Status();
  return Invalid(StrCat("sample ", i, " of a batch of ", batch->loan.samples.size()));
}

Status SampleOfDataset(const fb_dataset* dataset, uint32_t sample) {
  FOREBAY_RETURN_IF_ERROR(NotNull(dataset, "dataset"));
  if (sample < dataset->catalog->size()) return Status();
  return Invalid(StrCat("sample ", sample, " of ", dataset->catalog->size(), " in ",
                        dataset->catalog->root()));
}

}  // namespace
}  // namespace forebay

struct fb_loader {
  std::shared_ptr<forebay::Loader> loader;  // shared with its batches on loan
};

// ---- functions -------------------------------------------------------------------------------

using namespace forebay;  // NOLINT: the functions below are the C ABI, outside any namespace

FOREBAY_API const char* fb_version(void) { return FOREBAY_VERSION; }

FOREBAY_API const char* fb_last_error(void) { return last_error; }

FOREBAY_API int fb_engine_options_init(fb_engine_options* options, size_t size) {
  return InitOptions(__func__, options, size);
}

FOREBAY_API int fb_dataset_options_init(fb_dataset_options* options, size_t size) {
  return InitOptions(__func__, options, size);
}

FOREBAY_API int fb_loader_options_init(fb_loader_options* options, size_t size) {
  return InitOptions(__func__, options, size);
}

FOREBAY_API int fb_engine_open(const fb_engine_options* options, fb_engine** out) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(out, "out"));
    *out = nullptr;
    const Result<fb_engine_options> given = ReadOptions(options);
    if (!given) return given.error();
    const Result<EngineOptions> chosen = ToEngine(*given);
    if (!chosen) return chosen.error();
    bool shared = false;
    FOREBAY_RETURN_IF_ERROR(ReadFlags({{given->shared, "shared", &shared}}));
    auto handle = std::make_unique<fb_engine>();
    if (shared) {
      Result<std::shared_ptr<Port>> port = OpenShared(*given, *chosen);
      if (!port) return port.error();
      handle->port = *std::move(port);
      *out = handle.release();
      return 0;
    }
    Result<EnginePtr> engine = Engine::Create(*chosen);
    if (!engine) return engine.error();
    Result<peer::Started> peers =
        peer::StartPeers(**engine, given->peers == nullptr ? "" : given->peers);
    if (!peers) return peers.error();
    handle->engine = peer::WithPeers(*std::move(engine), std::move(peers->peers));
    handle->port = MakeLocalPort(handle->engine);
    *out = handle.release();
    return 0;
  });
}

FOREBAY_API void fb_engine_close(fb_engine* engine) {
  if (engine == nullptr || engine->fork_generation != ForkGeneration()) return;
  delete engine;
}

FOREBAY_API int64_t fb_metrics_text(const fb_engine* engine, char* buffer, size_t n) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(engine, "engine"));
    if (n > 0) FOREBAY_RETURN_IF_ERROR(NotNull(buffer, "buffer"));
    FOREBAY_RETURN_IF_ERROR(Ours(engine->fork_generation));
    const Result<std::string> text = engine->port->MetricsText();
    if (!text) return text.error();
    return CopyText(*text, buffer, n);
  });
}

FOREBAY_API int fb_dataset_open(fb_engine* engine, const char* path,
                                const fb_dataset_options* options, fb_dataset** out) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(out, "out"));
    *out = nullptr;
    FOREBAY_RETURN_IF_ERROR(NotNull(engine, "engine"));
    FOREBAY_RETURN_IF_ERROR(NotNull(path, "path"));
    FOREBAY_RETURN_IF_ERROR(Ours(engine->fork_generation));
    const Result<fb_dataset_options> given = ReadOptions(options);
    if (!given) return given.error();
    Result<BuildOptions> build = ToBuild(*given);
    if (!build) return build.error();
    // What the listing reads on its way goes straight into an engine of this process.
    std::optional<EarlySamples> early;
    if (engine->engine != nullptr) build->early = &early.emplace(*engine->engine);
    bool use_cache = true;
    FOREBAY_RETURN_IF_ERROR(ReadFlags({{given->use_cache, "use_cache", &use_cache}}));
    auto handle = std::make_unique<fb_dataset>();
    if (use_cache) {
      Result<OpenedCatalog> opened = OpenOrBuild(path, *build);
      if (!opened) return opened.error();
      handle->catalog = std::move(opened->catalog);
    } else {
      Result<std::unique_ptr<Catalog>> built = BuildCatalog(path, *build);
      if (!built) return built.error();
      handle->catalog = *std::move(built);
    }
    const Result<DatasetId> id = early
                                     ? engine->engine->AddDataset(handle->catalog, nullptr, &*early)
                                     : engine->port->OpenDataset(handle->catalog, "");
    if (!id) return id.error();
    handle->id = *id;
    handle->port = engine->port;
    *out = handle.release();
    return 0;
  });
}

FOREBAY_API void fb_dataset_close(fb_dataset* dataset) {
  if (dataset == nullptr || dataset->fork_generation != ForkGeneration()) return;
  if (dataset->port != nullptr) dataset->port->CloseDataset(dataset->id);
  delete dataset;
}

FOREBAY_API int64_t fb_dataset_size(const fb_dataset* dataset) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(dataset, "dataset"));
    return static_cast<int64_t>(dataset->catalog->size());
  });
}

FOREBAY_API int64_t fb_dataset_bytes(const fb_dataset* dataset) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(dataset, "dataset"));
    return static_cast<int64_t>(dataset->catalog->total_bytes());
  });
}

FOREBAY_API int64_t fb_dataset_sample_name(const fb_dataset* dataset, uint32_t sample, char* buffer,
                                           size_t n) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(SampleOfDataset(dataset, sample));
    if (n > 0) FOREBAY_RETURN_IF_ERROR(NotNull(buffer, "buffer"));
    return CopyText(dataset->catalog->SampleName(sample), buffer, n);
  });
}

FOREBAY_API int64_t fb_dataset_sample_bytes(const fb_dataset* dataset, uint32_t sample) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(SampleOfDataset(dataset, sample));
    return dataset->catalog->length(sample);
  });
}

FOREBAY_API int fb_dataset_label(const fb_dataset* dataset, uint32_t sample, int64_t* label) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(label, "label"));
    FOREBAY_RETURN_IF_ERROR(SampleOfDataset(dataset, sample));
    *label = dataset->catalog->label(sample);
    return 0;
  });
}

FOREBAY_API int fb_loader_open(fb_dataset* dataset, const fb_loader_options* options,
                               fb_loader** out) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(out, "out"));
    *out = nullptr;
    FOREBAY_RETURN_IF_ERROR(NotNull(dataset, "dataset"));
    FOREBAY_RETURN_IF_ERROR(Ours(dataset->fork_generation));
    const Result<fb_loader_options> given = ReadOptions(options);
    if (!given) return given.error();
    const Result<StreamOptions> chosen = ToStream(*given, dataset->id, dataset->catalog->size());
    if (!chosen) return chosen.error();
    auto handle = std::make_unique<fb_loader>();
    handle->loader = std::make_shared<Loader>(dataset->port, dataset->catalog, *chosen);
    FOREBAY_RETURN_IF_ERROR(handle->loader->Open());
    *out = handle.release();
    return 0;
  });
}

FOREBAY_API void fb_loader_close(fb_loader* loader) {
  if (loader == nullptr || loader->loader->forked()) return;
  (void)Call(__func__, [&]() -> Result<int64_t> {
    loader->loader->Close();
    return 0;
  });
  delete loader;
}

FOREBAY_API int fb_loader_next(fb_loader* loader, int timeout_ms, fb_batch** out) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(out, "out"));
    *out = nullptr;
    FOREBAY_RETURN_IF_ERROR(NotNull(loader, "loader"));
    if (timeout_ms < 0) {
      return Invalid(StrCat("timeout_ms is ", timeout_ms, "; every wait needs a bound"));
    }
    return loader->loader->Next(timeout_ms * kMilli, out);
  });
}

FOREBAY_API int fb_loader_seek(fb_loader* loader, uint64_t epoch, uint64_t position) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(loader, "loader"));
    return loader->loader->Seek(epoch, position);
  });
}

FOREBAY_API int fb_loader_position(const fb_loader* loader, uint64_t* epoch, uint64_t* position) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(loader, "loader"));
    FOREBAY_RETURN_IF_ERROR(NotNull(epoch, "epoch"));
    FOREBAY_RETURN_IF_ERROR(NotNull(position, "position"));
    FOREBAY_RETURN_IF_ERROR(loader->loader->Position(epoch, position));
    return 0;
  });
}

FOREBAY_API int64_t fb_batch_size(const fb_batch* batch) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(OnLoan(batch));
    return static_cast<int64_t>(batch->loan.samples.size());
  });
}

FOREBAY_API int64_t fb_batch_epoch(const fb_batch* batch) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(OnLoan(batch));
    return static_cast<int64_t>(batch->loan.epoch);
  });
}

FOREBAY_API int64_t fb_batch_index(const fb_batch* batch) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(OnLoan(batch));
    return static_cast<int64_t>(batch->loan.index);
  });
}

FOREBAY_API int fb_batch_data(const fb_batch* batch, size_t i, const void** data, size_t* length) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(data, "data"));
    FOREBAY_RETURN_IF_ERROR(NotNull(length, "length"));
    FOREBAY_RETURN_IF_ERROR(SampleOfBatch(batch, i));
    *data = batch->loan.base + batch->loan.offsets[i];
    *length = batch->loan.lengths[i];
    return 0;
  });
}

FOREBAY_API int fb_batch_contiguous(const fb_batch* batch, const void** data, size_t* length) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(data, "data"));
    FOREBAY_RETURN_IF_ERROR(NotNull(length, "length"));
    FOREBAY_RETURN_IF_ERROR(SampleOfBatch(batch, 0));
    if (!batch->loader->contiguous()) {
      return Invalid("the loader was opened without contiguous");
    }
    size_t sum = 0;
    for (uint32_t n : batch->loan.lengths) sum += n;
    *data = batch->loan.base + batch->loan.offsets[0];
    *length = sum;
    return 0;
  });
}

FOREBAY_API int64_t fb_batch_sample(const fb_batch* batch, size_t i) {
  return Call(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(SampleOfBatch(batch, i));
    return batch->loan.samples[i];
  });
}

FOREBAY_API int fb_batch_label(const fb_batch* batch, size_t i, int64_t* label) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(NotNull(label, "label"));
    FOREBAY_RETURN_IF_ERROR(SampleOfBatch(batch, i));
    *label = batch->loader->catalog().label(batch->loan.samples[i]);
    return 0;
  });
}

FOREBAY_API int fb_batch_release(fb_batch* batch) {
  return CallInt(__func__, [&]() -> Result<int64_t> {
    FOREBAY_RETURN_IF_ERROR(OnLoan(batch));
    FOREBAY_RETURN_IF_ERROR(Ours(batch->fork_generation));
    if (!batch->on_loan.exchange(false, std::memory_order_relaxed)) {
      return Invalid("the batch was released");
    }
    // May be the last to hold the loader and the engine.
    const std::shared_ptr<Loader> loader = std::move(batch->loader);
    FOREBAY_RETURN_IF_ERROR(loader->Release(*batch));
    return 0;
  });
}
