#include "port/failover_port.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <set>
#include <utility>

#include "base/fork.h"
#include "base/system_memory.h"
#include "base/thread.h"
#include "catalog/paths.h"
#include "port/job_name.h"
#include "port/local_port.h"
#include "wire/message.h"

namespace forebay {
namespace {

// Of a wait, before others that want the stream have their turn.
constexpr Nanos kSlice = 100 * kMilli;
// Of a wait for one sample, before it is asked for anew: a daemon that does not move any more shows
// when it does not answer in time.
constexpr Nanos kFetchSlice = 2 * kSecond;
constexpr Nanos kLongestWait = 3600 * kSecond;
constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
constexpr Nanos kLineWait = 5 * kSecond;               // for another connection to a daemon
constexpr uint64_t kLeastMemory = uint64_t{16} << 20;  // of one rank's own engine

// What there can be no daemon for, through no fault of the caller's.
bool NoDaemon(Code code) {
  return code == Code::kPermissionDenied || code == Code::kDeadlineExceeded ||
         code == Code::kNotFound || code == Code::kUnavailable || code == Code::kUnimplemented;
}

// What was meant for all ranks of the node is divided among them.
EngineOptions OfOneRank(EngineOptions options) {
  const uint64_t ranks = LocalRanks();
  for (uint64_t* bytes : {&options.memory, &options.memory_tier}) {
    if (*bytes != 0) *bytes = std::max(*bytes / ranks, std::min(*bytes, kLeastMemory));
  }
  return options;
}

Status NoStream(StreamId id) {
  return Status(Code::kInvalidArgument, StrCat("stream ", id, " does not exist"));
}

Status WasClosed() { return Status(Code::kCancelled, "the stream was closed"); }

}  // namespace

std::vector<EpochStats> MergeStats(std::vector<EpochStats> past, std::vector<EpochStats> now) {
  std::erase_if(now, [](const EpochStats& epoch) { return epoch.batches == 0; });
  auto next = now.begin();
  if (!past.empty() && !now.empty() && past.back().epoch == now.front().epoch) {
    EpochStats& both = past.back();
    both.batches += next->batches;
    both.samples += next->samples;
    both.bytes += next->bytes;
    both.source_reads += next->source_reads;
    both.source_bytes += next->source_bytes;
    both.peer_reads += next->peer_reads;
    both.peer_bytes += next->peer_bytes;
    both.wall_ns += next->wall_ns;
    for (size_t i = 0; i < kStallCauses; ++i) both.wait_ns[i] += next->wait_ns[i];
    both.batch_us.insert(both.batch_us.end(), next->batch_us.begin(), next->batch_us.end());
    ++next;
  }
  past.insert(past.end(), std::make_move_iterator(next), std::make_move_iterator(now.end()));
  return past;
}

void FailoverPortDelete::operator()(FailoverPort* port) const {
  if (port->fork_generation_ == ForkGeneration()) delete port;
}

// ---- whose turn it is ------------------------------------------------------------------------

void FailoverPort::Turn::Enter() NO_THREAD_SAFETY_ANALYSIS {
  MutexLock lock(mutex_);
  const uint64_t mine = next_++;
  while (now_ != mine) free_.wait_for(lock.native(), std::chrono::nanoseconds(kSlice));
}

bool FailoverPort::Turn::TryEnter() {
  MutexLock lock(mutex_);
  if (now_ != next_) return false;
  ++next_;
  return true;
}

void FailoverPort::Turn::Leave() NO_THREAD_SAFETY_ANALYSIS {
  MutexLock lock(mutex_);
  ++now_;
  free_.notify_all();
}

// ---- the daemon, or what stands in for it ----------------------------------------------------

FailoverPort::Backend::Backend(std::shared_ptr<SocketPort> client)
    : daemon(std::move(client)), port(daemon) {}

FailoverPort::Backend::Backend(EnginePtr own)
    : engine(std::move(own)), port(std::make_shared<LocalPort>(*engine)) {}

std::shared_ptr<SocketPort> FailoverPort::Backend::TakeLine() {
  {
    MutexLock lock(lines_mutex);
    if (!lines.empty()) {
      std::shared_ptr<SocketPort> line = std::move(lines.back());
      lines.pop_back();
      return line;
    }
  }
  // The daemon does not stay for it.
  Result<std::unique_ptr<SocketPort>> made =
      SocketPort::Attach(daemon->path(), kLineWait, false, true);
  // Without one the first connection has to do; it also tells whether the daemon is still there. By
  // now another one may be at its place, to which the stream's number means nothing, or another's.
  const bool same =
      made && (*made)->server_pid() == daemon->server_pid() && daemon->ServerLives().ok();
  return same ? std::shared_ptr<SocketPort>(*std::move(made)) : daemon;
}

void FailoverPort::Backend::PutLine(std::shared_ptr<SocketPort> line) {
  if (line == daemon) return;
  MutexLock lock(lines_mutex);
  lines.push_back(std::move(line));
}

void FailoverPort::Backend::SendReleases() {
  MutexLock lock(lines_mutex);
  for (const std::shared_ptr<SocketPort>& line : lines) line->SendReleases();
}

FailoverPort::FailoverPort(FailoverOptions options)
    : options_(std::move(options)),
      fork_generation_(ForkGeneration()),
      failovers_total_(own_metrics_.AddCounter(
          "forebay_port_failovers_total", "times that this process went on without the daemon")),
      return_tries_total_(own_metrics_.AddCounter("forebay_port_return_tries_total",
                                                  "tries to come back to a daemon")),
      returns_total_(
          own_metrics_.AddCounter("forebay_port_returns_total", "tries that ended with a daemon")),
      due_(kNever) {}

FailoverPort::~FailoverPort() {
  StopReturning();
  std::jthread thread;
  MutexLock lock(mutex_);
  thread = std::move(thread_);  // ends, and is waited for, without the lock
}

void FailoverPort::StopReturning() {
  if (!Alive().ok()) return;
  MutexLock lock(mutex_);
  stopped_ = true;
  due_ = kNever;
  thread_.request_stop();
  changed_.notify_all();
}

bool FailoverPort::returning() {
  if (!Alive().ok()) return false;
  MutexLock lock(mutex_);
  return due_ != kNever || trying_now_;
}

bool FailoverPort::ComeBack() {
  if (!Alive().ok()) return false;
  TryToReturn(std::stop_token());
  return daemon() != nullptr;
}

Result<FailoverPortPtr> FailoverPort::Open(FailoverOptions options) {
  FOREBAY_RETURN_IF_ERROR(options.engine.Validate());
  if (options.job.empty()) options.job = JobName();
  FailoverPortPtr port(new FailoverPort(std::move(options)));
  Result<std::unique_ptr<SocketPort>> made = AttachDaemon(port->options_.daemon);
  if (!made && !NoDaemon(made.error().code())) return made.error();
  {
    MutexLock lock(port->mutex_);
    if (made) {
      port->now_ = std::make_shared<Backend>(std::shared_ptr<SocketPort>(*std::move(made)));
      port->attached_at_ = SteadyClock().Now();
      return port;
    }
    port->GoAlone();
  }
  port->Tell(FailoverEvent::kAlone, made.error().message());
  const Result<std::shared_ptr<Backend>> alone = port->Now();  // its errors are the caller's
  if (!alone) return alone.error();
  return port;
}

Status FailoverPort::Alive() const {
  if (fork_generation_ == ForkGeneration()) return Status();
  return Status(Code::kCancelled,
                "this port belongs to the parent process; a forked child makes its own");
}

void FailoverPort::Tell(FailoverEvent event, const std::string& what) const {
  if (options_.tell) options_.tell(event, what);
}

Result<std::shared_ptr<FailoverPort::Backend>> FailoverPort::Now() {
  MutexLock lock(mutex_);
  if (now_ == nullptr) now_ = former_.lock();  // a stream has not left it yet
  if (now_ == nullptr) {
    Result<EnginePtr> own = Engine::Create(OfOneRank(options_.engine));
    if (!own) return own.error();
    now_ = std::make_shared<Backend>(*std::move(own));
  }
  return now_;
}

Nanos FailoverPort::NextTry() const {
  if (stopped_ || tries_ >= options_.retry.size()) return kNever;
  return SteadyClock().Now() + options_.retry[tries_];
}

void FailoverPort::GoAlone() {
  failovers_total_.Add(1);
  now_ = nullptr;
  due_ = NextTry();
  if (due_ == kNever || returning_) return;
  Result<std::jthread> started =
      StartThread("forebay-return", [this](std::stop_token stop) { Run(stop); });
  if (!started) return;  // the port stays alone
  returning_ = true;
  thread_ = *std::move(started);  // the one before has ended
}

void FailoverPort::Lost(const std::shared_ptr<Backend>& at, const Status& why) {
  {
    MutexLock lock(mutex_);
    if (now_ != at) return;  // another thread has seen to it
    if (SteadyClock().Now() - attached_at_ > options_.lived) tries_ = 0;
    GoAlone();
  }
  Tell(FailoverEvent::kAlone, why.message());
  ClearDeadDaemon(options_.daemon.folder);
  MoveIdle();
  MoveShares();
}

void FailoverPort::Refused(const std::shared_ptr<Backend>& at, const Status& why) {
  {
    MutexLock lock(mutex_);
    if (now_ != at) return;
    tries_ = options_.retry.size();
    GoAlone();
  }
  Tell(FailoverEvent::kAlone, why.message());
  MoveShares();
}

void FailoverPort::Run(std::stop_token stop) {
  while (true) {
    {
      MutexLock lock(mutex_);
      if (stop.stop_requested() || due_ == kNever) {
        returning_ = false;
        return;
      }
      const Nanos now = SteadyClock().Now();
      if (now < due_) {
        changed_.wait_for(lock.native(), std::chrono::nanoseconds(std::min(due_ - now, kSecond)));
        continue;
      }
      due_ = kNever;
      ++tries_;
      trying_now_ = true;
    }
    try {
      TryToReturn(stop);
    } catch (const std::exception&) {
      // No memory, or no thread, is no reason to end the program: it goes on as it is.
    }
    MutexLock lock(mutex_);
    trying_now_ = false;
  }
}

void FailoverPort::TryToReturn(std::stop_token stop) {
  const std::shared_ptr<Backend> back = Return(std::move(stop));
  if (back == nullptr) return;
  Tell(FailoverEvent::kReturned, StrCat("process ", back->daemon->server_pid()));
  MoveIdle();
  MoveShares();
}

std::shared_ptr<FailoverPort::Backend> FailoverPort::Return(std::stop_token stop) {
  MutexLock one_at_a_time(trying_);
  if (daemon() != nullptr) return nullptr;
  return_tries_total_.Add(1);
  DaemonOptions daemon = options_.daemon;
  daemon.stop = std::move(stop);
  Result<std::unique_ptr<SocketPort>> made = AttachDaemon(daemon);
  std::set<DatasetId> used;
  {
    MutexLock lock(mutex_);
    if (!made) {  // whatever it is, the next try may do
      due_ = NextTry();
      return nullptr;
    }
    for (const auto& [id, stream] : streams_) used.insert(stream->options.shape.dataset);
  }
  const auto back = std::make_shared<Backend>(std::shared_ptr<SocketPort>(*std::move(made)));
  // A large catalog takes its time, which no consumer shall wait for. Who needs it meets an error.
  for (const DatasetId dataset : used) (void)DatasetAt(*back, dataset);
  std::shared_ptr<Backend> left;  // goes when no lock is held
  {
    MutexLock lock(mutex_);
    left = std::exchange(now_, back);
    if (left != nullptr) former_ = left;
    attached_at_ = SteadyClock().Now();
    due_ = kNever;
    changed_.notify_all();
  }
  returns_total_.Add(1);
  return back;
}

void FailoverPort::MoveIdle() NO_THREAD_SAFETY_ANALYSIS {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, stream] : streams_) streams.push_back(stream);
  }
  for (const std::shared_ptr<Stream>& stream : streams) {
    if (!stream->turn.TryEnter()) continue;
    const InTurn turn(stream->turn, InTurn::Entered());
    std::shared_ptr<Backend> at;
    StreamId there = 0;
    Where(*stream, &at, &there);
    if (at == nullptr) {
      // Left before.
    } else if (at->lost() || stream->PastEnd()) {
      Leave(*stream);  // the next call opens it again
    } else if (!stream->shared) {
      (void)Settle(*stream, &at, &there);  // an error meets the next call, too
    }
  }
}

void FailoverPort::MoveShares() {
  std::vector<std::shared_ptr<BudgetClaim>> live;
  {
    MutexLock lock(mutex_);
    std::erase_if(shares_, [](const std::weak_ptr<BudgetClaim>& share) { return share.expired(); });
    for (const std::weak_ptr<BudgetClaim>& share : shares_) {
      if (std::shared_ptr<BudgetClaim> found = share.lock()) live.push_back(std::move(found));
    }
  }
  for (const std::shared_ptr<BudgetClaim>& share : live) {
    MutexLock lock(share->mutex);
    // Under the lock: of two threads that move it, the last one has the last word.
    const Result<std::shared_ptr<Backend>> now = Now();
    if (!now) return;
    if (share->at == *now) continue;
    // The memory is in use: where the new budget has no room for it, it is beyond that budget.
    Result<std::shared_ptr<void>> token = (*now)->port->Lend(share->bytes, 0, kMilli);
    share->token = token ? *std::move(token) : nullptr;
    share->at = *now;
  }
}

std::shared_ptr<SocketPort> FailoverPort::daemon() {
  if (!Alive().ok()) return nullptr;
  MutexLock lock(mutex_);
  return now_ == nullptr ? nullptr : now_->daemon;
}

std::shared_ptr<Engine> FailoverPort::engine() {
  if (!Alive().ok()) return nullptr;
  const Result<std::shared_ptr<Backend>> now = Now();
  return now ? (*now)->engine : nullptr;
}

// ---- data sets -------------------------------------------------------------------------------

Result<DatasetId> FailoverPort::DatasetAt(Backend& at, DatasetId dataset) {
  Dataset wanted;
  {
    MutexLock lock(mutex_);
    const auto found = datasets_.find(dataset);
    if (found == datasets_.end()) {
      return Status(Code::kInvalidArgument, StrCat("data set ", dataset, " does not exist"));
    }
    wanted = found->second;
  }
  MutexLock lock(at.mutex);
  const auto known = at.datasets.find(dataset);
  if (known != at.datasets.end()) return known->second;
  const Result<DatasetId> opened = at.port->OpenDataset(wanted.catalog, wanted.delay);
  if (opened) at.datasets[dataset] = *opened;
  return opened;
}

Result<DatasetId> FailoverPort::OpenDataset(std::shared_ptr<const Catalog> catalog,
                                            const std::string& delay) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const uint64_t version = catalog->version();  // a daemon needs all lengths anyway
  const std::string place = RealPath(catalog->root());
  const uint64_t stamps = catalog->StampsHash();
  DatasetId id = 0;
  {
    MutexLock lock(mutex_);
    const auto same = std::find_if(datasets_.begin(), datasets_.end(), [&](const auto& entry) {
      const Dataset& known = entry.second;
      return known.delay == delay && known.version == version && known.place == place &&
             known.stamps_hash == stamps;
    });
    id = same == datasets_.end() ? next_dataset_++ : same->first;
    Dataset& dataset = datasets_[id];
    if (same == datasets_.end()) dataset = {std::move(catalog), delay, version, place, stamps};
    ++dataset.users;
  }
  while (true) {
    const Result<std::shared_ptr<Backend>> now = Now();
    if (!now) {
      CloseDataset(id);
      return now.error();
    }
    const Result<DatasetId> there = DatasetAt(**now, id);
    if (there) return id;
    if (!(*now)->lost()) {
      CloseDataset(id);
      return there.error();
    }
    Lost(*now, there.error());
  }
}

void FailoverPort::CloseDataset(DatasetId dataset) {
  if (!Alive().ok()) return;
  {
    MutexLock lock(mutex_);
    const auto found = datasets_.find(dataset);
    if (found == datasets_.end() || found->second.users == 0) return;
    --found->second.users;
  }
  ForgetUnused(dataset, nullptr);
}

void FailoverPort::ForgetUnused(DatasetId dataset, std::shared_ptr<Backend> also) {
  std::set<std::shared_ptr<Backend>> with;
  {
    MutexLock lock(mutex_);
    const auto found = datasets_.find(dataset);
    if (found == datasets_.end() || found->second.users != 0) return;
    const bool used = std::any_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
      return entry.second->options.shape.dataset == dataset;
    });
    if (used) return;
    datasets_.erase(found);
    with = {now_, former_.lock(), std::move(also)};
  }
  for (const std::shared_ptr<Backend>& at : with) {
    if (at == nullptr) continue;
    MutexLock lock(at->mutex);
    const auto there = at->datasets.find(dataset);
    if (there == at->datasets.end()) continue;
    at->port->CloseDataset(there->second);
    at->datasets.erase(there);
  }
}

std::shared_ptr<const Catalog> FailoverPort::Find(DatasetId dataset) {
  if (!Alive().ok()) return nullptr;
  MutexLock lock(mutex_);
  const auto found = datasets_.find(dataset);
  return found == datasets_.end() ? nullptr : found->second.catalog;
}

// ---- streams ---------------------------------------------------------------------------------

bool FailoverPort::Stream::PastEnd() const {
  if (ended || last_over) return true;
  const StreamShape& shape = options.shape;
  return shape.epochs != 0 && epoch >= shape.first_epoch + shape.epochs;
}

std::shared_ptr<FailoverPort::Stream> FailoverPort::FindStream(StreamId id) {
  MutexLock lock(mutex_);
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second;
}

void FailoverPort::Where(Stream& stream, std::shared_ptr<Backend>* at, StreamId* there) {
  MutexLock lock(stream.mutex);
  *at = stream.at;
  *there = stream.there;
}

Result<StreamId> FailoverPort::OpenAt(Backend& at, Stream& stream) {
  const Result<DatasetId> dataset = DatasetAt(at, stream.options.shape.dataset);
  if (!dataset) return dataset.error();
  StreamOptions options = stream.options;
  StreamShape& shape = options.shape;
  if (shape.epochs != 0) {  // the end stays where it was
    const uint64_t end = shape.first_epoch + shape.epochs;
    shape.epochs = end > stream.epoch ? end - stream.epoch : 1;
  }
  shape.dataset = *dataset;
  shape.first_epoch = stream.epoch;
  shape.first_position = options.declared ? 0 : stream.position;
  if (at.daemon != nullptr && shape.job.empty()) shape.job = options_.job;
  const Result<StreamId> opened = at.port->OpenStream(options);
  if (!opened || !options.declared) return opened;
  // Of the order under way, what was not handed out.
  uint64_t done = shape.itemised ? stream.fetched : stream.position;
  stream.rest_epoch = stream.epoch;
  stream.rest_index = shape.itemised ? 0 : done / shape.batch_size;
  for (const Declared& declared : stream.orders) {
    const auto from = static_cast<ptrdiff_t>(std::min<uint64_t>(done, declared.order.size()));
    const Status told =
        at.port->Declare(*opened, declared.epoch,
                         {declared.order.begin() + from, declared.order.end()}, declared.last);
    if (!told.ok()) {
      (void)at.port->CloseStream(*opened);
      return told;
    }
    done = 0;
  }
  return opened;
}

void FailoverPort::Leave(Stream& stream) {
  if (Disown(stream)) return;
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(stream, &at, &there);
  if (at == nullptr) return;
  Result<std::vector<EpochStats>> stats = at->port->Stats(there);
  {
    // Before it is closed: a fetch that the closing cancels sees that the stream has left.
    MutexLock lock(stream.mutex);
    if (stats) stream.past = MergeStats(std::move(stream.past), *std::move(stats));
    stream.at = nullptr;
  }
  (void)at->port->CloseStream(there);  // its daemon has gone, or it was closed
}

Status FailoverPort::Settle(Stream& stream, std::shared_ptr<Backend>* at, StreamId* there) {
  while (true) {
    Where(stream, at, there);
    const Result<std::shared_ptr<Backend>> now = Now();
    if (!now) return now.error();
    // One with a daemon that lives stays there.
    if (*at == *now || (*at != nullptr && (*at)->daemon != nullptr && !(*at)->lost())) {
      return Status();
    }
    const Result<StreamId> opened = OpenAt(**now, stream);
    if (!opened) {
      bool served = false;  // before, so this process can
      {
        MutexLock lock(stream.mutex);
        served = stream.opened;
      }
      if ((*now)->lost()) {
        Lost(*now, opened.error());
      } else if (served && (*now)->daemon != nullptr) {
        Refused(*now, opened.error());
      } else {
        return opened.error();
      }
      continue;
    }
    Leave(stream);  // when the new one is open
    {
      MutexLock lock(stream.mutex);
      stream.at = *now;
      stream.there = *opened;
      stream.opened = true;
    }
    // Who closes looks at the place after it has said so.
    if (stream.closed.load()) {
      {
        MutexLock lock(stream.mutex);
        stream.at = nullptr;
      }
      (void)(*now)->port->CloseStream(*opened);
      return WasClosed();
    }
  }
}

bool FailoverPort::Disown(Stream& stream) {
  MutexLock lock(stream.mutex);
  if (!stream.adopted) return false;
  stream.adopted = false;
  stream.at = nullptr;
  return true;
}

Result<StreamId> FailoverPort::Enlist(std::shared_ptr<Stream> stream) {
  {
    InTurn turn(stream->turn);
    std::shared_ptr<Backend> at;
    StreamId there = 0;
    FOREBAY_RETURN_IF_ERROR(Settle(*stream, &at, &there));
  }
  MutexLock lock(mutex_);
  const StreamId id = next_stream_++;
  streams_[id] = std::move(stream);
  return id;
}

Result<StreamId> FailoverPort::OpenStream(const StreamOptions& options) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  return Enlist(std::make_shared<Stream>(options, false));
}

Result<StreamId> FailoverPort::OpenSharedStream(const StreamOptions& options) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  return Enlist(std::make_shared<Stream>(options, true));
}

Result<StreamId> FailoverPort::AdoptStream(const StreamOptions& options, StreamAddress address) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const Result<std::shared_ptr<Backend>> now = Now();
  if (!now) return now.error();
  auto stream = std::make_shared<Stream>(options, true);
  if ((*now)->daemon != nullptr && (*now)->daemon->server_pid() == address.daemon) {
    MutexLock lock(stream->mutex);
    stream->at = *now;
    stream->there = address.stream;
    stream->opened = stream->adopted = true;
  }
  return Enlist(std::move(stream));
}

Result<StreamAddress> FailoverPort::Address(StreamId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  while (true) {
    std::shared_ptr<Backend> at;
    StreamId there = 0;
    {
      InTurn turn(stream->turn);
      FOREBAY_RETURN_IF_ERROR(Settle(*stream, &at, &there));
    }
    if (at->daemon == nullptr) return StreamAddress{0, there};
    const Status lives = at->daemon->ServerLives();
    if (lives.ok()) return StreamAddress{at->daemon->server_pid(), there};
    Lost(at, lives);
  }
}

Status FailoverPort::Declare(StreamId id, uint64_t epoch, std::vector<SampleId> order, bool last) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  while (true) {
    std::shared_ptr<Backend> at;
    Status told;
    {
      InTurn turn(stream->turn);
      StreamId there = 0;
      FOREBAY_RETURN_IF_ERROR(Settle(*stream, &at, &there));
      told = at->port->Declare(there, epoch, order, last);
      if (told.ok()) {
        if (stream->shared) {
          stream->epoch = epoch;
        } else {
          stream->orders.push_back({epoch, std::move(order), last});
        }
        return told;
      }
    }
    if (!at->lost()) return told;
    Lost(at, told);
  }
}

Status FailoverPort::Seek(StreamId id, uint64_t epoch, uint64_t position) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  while (true) {
    std::shared_ptr<Backend> at;
    Status sought;
    {
      InTurn turn(stream->turn);
      StreamId there = 0;
      FOREBAY_RETURN_IF_ERROR(Settle(*stream, &at, &there));
      sought = at->port->Seek(there, epoch, position);
      if (sought.ok()) {
        stream->epoch = epoch;
        stream->position = stream->options.declared ? 0 : position;
        stream->ended = stream->last_over = false;
        stream->orders.clear();
        stream->fetched = stream->rest_index = 0;
        return sought;
      }
    }
    if (!at->lost()) return sought;
    Lost(at, sought);
  }
}

Status FailoverPort::CloseStream(StreamId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  // Not in turn: this ends a wait of another thread.
  stream->closed.store(true);
  {
    MutexLock lock(mutex_);
    streams_.erase(id);
  }
  const DatasetId dataset = stream->options.shape.dataset;
  if (Disown(*stream)) {
    ForgetUnused(dataset, nullptr);
    return Status();
  }
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  if (at == nullptr) {
    ForgetUnused(dataset, nullptr);
    return Status();
  }
  const Status closed = at->port->CloseStream(there);
  ForgetUnused(dataset, at);
  if (closed.ok() || at->lost()) return Status();
  std::shared_ptr<Backend> then;
  StreamId then_there = 0;
  Where(*stream, &then, &then_there);
  // One that moves at this moment is closed by who moves it.
  return then == at && then_there == there ? closed : Status();
}

// ---- batches ---------------------------------------------------------------------------------

void FailoverPort::Note(Stream& stream, TakeKind kind, BatchLoan* out) {
  const StreamOptions& options = stream.options;
  switch (kind) {
    case TakeKind::kBatch:
      if (out->epoch != stream.epoch) {  // declared epochs may have any numbers
        stream.epoch = out->epoch;
        stream.position = 0;
      }
      if (options.declared && out->epoch == stream.rest_epoch) out->index += stream.rest_index;
      stream.position += out->samples.size() * (options.declared ? 1 : options.sampler.world);
      return;
    case TakeKind::kEndOfEpoch:
      ++stream.epoch;
      stream.position = 0;
      stream.rest_index = 0;
      if (stream.orders.empty()) return;
      stream.epoch = stream.orders.front().epoch + 1;
      stream.last_over = stream.orders.front().last;
      stream.orders.pop_front();
      return;
    case TakeKind::kEndOfStream:
      stream.ended = true;
      return;
    case TakeKind::kPending:
      return;
  }
}

void FailoverPort::Hold(Held held, StreamId id, const Stream& stream, BatchLoan* out) {
  out->stream = id;
  out->dataset = stream.options.shape.dataset;
  held.lease = out->lease;
  MutexLock lock(leases_mutex_);
  const LeaseId lease = next_lease_++;
  leases_.emplace(lease, std::move(held));
  out->lease = lease;
}

Result<TakeKind> FailoverPort::TakeOnce(Stream& stream, Nanos wait, BatchLoan* out,
                                        std::shared_ptr<Backend>* at) {
  InTurn turn(stream.turn);
  if (stream.closed.load()) return WasClosed();
  if (stream.PastEnd()) return TakeKind::kEndOfStream;
  std::shared_ptr<Backend> asked;
  StreamId there = 0;
  FOREBAY_RETURN_IF_ERROR(Settle(stream, &asked, &there));
  *at = asked;
  const Result<TakeKind> kind = asked->port->Take(there, wait, out);
  if (kind) Note(stream, *kind, out);
  return kind;
}

Result<TakeKind> FailoverPort::Take(StreamId id, Nanos wait, BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  const Nanos deadline = SteadyClock().Now() + std::clamp<Nanos>(wait, 0, kLongestWait);
  while (true) {
    const Nanos left = std::max<Nanos>(0, deadline - SteadyClock().Now());
    std::shared_ptr<Backend> at;
    const Result<TakeKind> kind = TakeOnce(*stream, std::min(left, kSlice), out, &at);
    if (!kind) {
      if (at == nullptr || !at->lost()) return kind;
      Lost(at, kind.error());
      continue;
    }
    if (*kind == TakeKind::kPending) at->SendReleases();  // it may wait for that memory
    if (*kind == TakeKind::kBatch) Hold({at, at->port}, id, *stream, out);
    if (*kind != TakeKind::kPending || left <= kSlice) return kind;
  }
}

void FailoverPort::NoteFetched(Stream& stream) {
  InTurn turn(stream.turn);
  // As the engine counts: an order is over when as many samples were fetched as it has.
  if (stream.orders.empty()) return;
  ++stream.fetched;
  while (!stream.orders.empty() && stream.fetched >= stream.orders.front().order.size()) {
    stream.fetched -= stream.orders.front().order.size();
    stream.epoch = stream.orders.front().epoch + 1;
    stream.orders.pop_front();
  }
}

Result<TakeKind> FailoverPort::FetchOnce(Backend& at, StreamId there, SampleId sample, Nanos wait,
                                         BatchLoan* out, std::shared_ptr<Port>* port) {
  *port = at.port;
  if (at.daemon == nullptr) return at.port->Fetch(there, sample, wait, out);
  const std::shared_ptr<SocketPort> line = at.TakeLine();
  at.SendReleases();  // of the others: it may wait for that memory
  *port = line;
  Result<TakeKind> kind = line->Fetch(there, sample, wait, out);
  if (line->connected()) {
    at.PutLine(line);
  } else if (at.daemon->ServerLives().ok()) {
    *port = at.port;
    kind = at.port->Fetch(there, sample, wait, out);
  }
  return kind;
}

Result<TakeKind> FailoverPort::Fetch(StreamId id, SampleId sample, Nanos wait, BatchLoan* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  const Nanos deadline = SteadyClock().Now() + std::clamp<Nanos>(wait, 0, kLongestWait);
  while (true) {
    std::shared_ptr<Backend> at;
    StreamId there = 0;
    {
      InTurn turn(stream->turn);
      if (stream->closed.load()) return WasClosed();
      FOREBAY_RETURN_IF_ERROR(Settle(*stream, &at, &there));
    }
    // Many may fetch at once.
    const Nanos left = std::max<Nanos>(0, deadline - SteadyClock().Now());
    const Nanos slice = at->daemon == nullptr ? left : std::min(left, kFetchSlice);
    std::shared_ptr<Port> port;
    const Result<TakeKind> kind = FetchOnce(*at, there, sample, slice, out, &port);
    if (kind && *kind == TakeKind::kPending && slice < left) continue;
    if (kind && *kind == TakeKind::kBatch) {
      Hold({std::move(at), std::move(port)}, id, *stream, out);
      NoteFetched(*stream);
    }
    if (kind) return kind;
    if (at->lost()) {
      Lost(at, kind.error());
      continue;
    }
    if (Disown(*stream)) continue;  // who opened it may have closed it
    std::shared_ptr<Backend> then;
    StreamId then_there = 0;
    Where(*stream, &then, &then_there);
    // Unless the stream has left it meanwhile; it may be back there, under another number.
    if ((then == at && then_there == there) || stream->closed.load()) return kind;
  }
}

Status FailoverPort::Release(LeaseId lease) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  Held held;
  {
    MutexLock lock(leases_mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return Status();
    held = std::move(found->second);
    leases_.erase(found);
  }
  const Status released = held.port->Release(held.lease);
  return released.code() == Code::kUnavailable ? Status() : released;  // it ended with its daemon
}

// ---- memory and accounts ---------------------------------------------------------------------

Result<std::shared_ptr<void>> FailoverPort::Lend(uint64_t bytes, uint64_t leave, Nanos wait) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  while (true) {
    const Result<std::shared_ptr<Backend>> now = Now();
    if (!now) return now.error();
    Result<std::shared_ptr<void>> token = (*now)->port->Lend(bytes, leave, wait);
    if (!token) {
      if (!(*now)->lost()) return token.error();
      Lost(*now, token.error());
      continue;
    }
    auto share = std::make_shared<BudgetClaim>();
    share->bytes = bytes;
    {
      MutexLock lock(share->mutex);
      share->at = *now;
      share->token = *std::move(token);
    }
    bool moved = false;
    {
      MutexLock lock(mutex_);
      shares_.push_back(share);
      moved = now_ != *now;
    }
    if (moved) MoveShares();  // who moved the others did not know of it
    return std::shared_ptr<void>(std::move(share));
  }
}

uint64_t FailoverPort::budget() {
  if (!Alive().ok()) return 0;
  const Result<std::shared_ptr<Backend>> now = Now();
  return now ? (*now)->port->budget() : 0;
}

uint64_t FailoverPort::sharers() {
  if (!Alive().ok()) return 1;
  const Result<std::shared_ptr<Backend>> now = Now();
  return now ? (*now)->port->sharers() : 1;
}

StallCause FailoverPort::WaitCause(StreamId id) {
  if (!Alive().ok()) return StallCause::kSource;
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return StallCause::kSource;
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  return at == nullptr ? StallCause::kSource : at->port->WaitCause(there);
}

Status FailoverPort::Blocked(StreamId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  return at == nullptr ? Status() : at->port->Blocked(there);
}

void FailoverPort::CountStall(StreamId id, StallCause cause, Nanos waited) {
  if (!Alive().ok()) return;
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return;
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  if (at != nullptr) at->port->CountStall(there, cause, waited);
}

Result<std::vector<EpochStats>> FailoverPort::Stats(StreamId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  std::vector<EpochStats> past;
  {
    MutexLock lock(stream->mutex);
    at = stream->at;
    there = stream->there;
    past = stream->past;
  }
  if (at == nullptr) return past;
  Result<std::vector<EpochStats>> now = at->port->Stats(there);
  return now ? MergeStats(std::move(past), *std::move(now)) : past;
}

Result<ChangedFilesOf> FailoverPort::ChangedFiles(StreamId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id);
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  if (at == nullptr) return ChangedFilesOf();
  Result<ChangedFilesOf> changed = at->port->ChangedFiles(there);
  // The next Take finds that it is gone, and goes on without it.
  return changed || !at->lost() ? changed : ChangedFilesOf();
}

std::string FailoverPort::WaitingFor(StreamId id) {
  if (const Status alive = Alive(); !alive.ok()) return alive.message();
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return NoStream(id).message();
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  return at == nullptr ? "the node's daemon has gone" : at->port->WaitingFor(there);
}

Result<std::string> FailoverPort::MetricsText() {
  FOREBAY_RETURN_IF_ERROR(Alive());
  while (true) {
    const Result<std::shared_ptr<Backend>> now = Now();
    if (!now) return now.error();
    (*now)->SendReleases();
    Result<std::string> text = (*now)->port->MetricsText();
    if (text) return *std::move(text) + own_metrics_.PrometheusText();
    if (!(*now)->lost()) return text;
    Lost(*now, text.error());
  }
}

Result<std::string> FailoverPort::Describe() {
  FOREBAY_RETURN_IF_ERROR(Alive());
  while (true) {
    const Result<std::shared_ptr<Backend>> now = Now();
    if (!now) return now.error();
    if ((*now)->daemon == nullptr) return std::string();
    (*now)->SendReleases();
    Result<std::string> said = (*now)->daemon->Query(wire::Query::kDescribe);
    if (said || !(*now)->lost()) return said;
    Lost(*now, said.error());
  }
}

uint64_t FailoverPort::EmptyRings(StreamId id) {
  if (!Alive().ok()) return 0;
  const std::shared_ptr<Stream> stream = FindStream(id);
  if (stream == nullptr) return 0;
  std::shared_ptr<Backend> at;
  StreamId there = 0;
  Where(*stream, &at, &there);
  return at == nullptr || at->daemon == nullptr ? 0 : at->daemon->EmptyRings(there);
}

}  // namespace forebay
