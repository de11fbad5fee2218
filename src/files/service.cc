#include "files/service.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <optional>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/thread.h"
#include "base/thread_annotations.h"
#include "files/book.h"
#include "files/copier.h"
#include "files/disk_calls.h"
#include "files/packet.h"
#include "files/read_progress.h"
#include "files/run_folder.h"
#include "files/table_memory.h"
#include "wire/program.h"
#include "wire/quoted.h"
#include "wire/socket.h"

namespace forebay::files {
namespace {

constexpr uint64_t kListening = 0;  // what epoll tells of
constexpr uint64_t kWake = 1;
constexpr uint64_t kFirstConnection = 2;
constexpr size_t kMostReads = 256;
constexpr Nanos kLongestSleep = kSecond;
constexpr Nanos kFirstLinger = 5 * kSecond;
constexpr Nanos kUnlinkEvery = 100 * kMilli;
constexpr Nanos kLongestLeave = 5 * kSecond;           // all copies are removed
constexpr size_t kMostCallsLeft = 64;                  // on the disk; then it is waited for
constexpr std::chrono::milliseconds kWatchEvery(200);  // the disk of the copies

using wire::Quoted;

// Of NAME=DIR or DIR: the name, which may be empty, and the folder, whose path is absolute.
std::pair<std::string_view, std::string_view> NamedFolder(std::string_view source) {
  const size_t equals = source.find('=');
  if (source.starts_with('/') || equals == std::string_view::npos) return {"", source};
  return {source.substr(0, equals), source.substr(equals + 1)};
}

// Half of what may be open, for files of the source that are read again.
size_t FilesToKeepOpen() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const auto most = static_cast<size_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 15));
  return most > 512 ? most / 2 : 0;
}

class ServiceImpl final : public Service, private BookActions {
 public:
  ServiceImpl(const ServiceOptions& options, RunFolder folder, TableMemory memory);
  ~ServiceImpl() override;
  Status Listen();

  bool End(Nanos wait) override;
  bool busy() const override { return !idle_.load(std::memory_order_relaxed); }
  bool folder_gone() const override { return folder_gone_.load(std::memory_order_relaxed); }
  int ended_fd() const override { return ended_.get(); }
  Registry& registry() override { return registry_; }

 private:
  struct Connection {
    OwnedFd fd;
    pid_t pid = 0;  // 0: it cannot be seen from here
    Nanos since = 0;
    Kind asked = Kind::kHello;
    bool busy = false;     // its question has no answer yet
    bool watched = false;  // epoll knows it
    bool session = false;
    JobNumber job = 0;  // of a session
  };
  // By its number; stays, for programs that outlive their session.
  struct Job {
    std::string name;
    size_t sessions = 0;
  };
  using Connections = std::unordered_map<uint64_t, Connection>;

  void Loop(const std::stop_token& stop);
  // In a thread of its own, which never touches the disk: the loop's may wait for it.
  void WatchDisk(const std::stop_token& stop);
  void StopThreads();
  // False: the disk hangs, and the folder stays.
  bool LeaveFolder();
  Nanos Round();
  void TakeDone();
  void Accept();
  void Receive(uint64_t id);
  void Handle(uint64_t id, std::span<const std::byte> packet);
  void HandleHello(Connection& connection, const Question& question);
  JobNumber JobOf(const Header& header) const { return header.job < jobs_.size() ? header.job : 0; }
  JobNumber JobNamed(std::string_view name);
  void Enter(Connection& connection, JobNumber job);
  void Leave(const Connection& connection);
  bool HandleOrder(uint64_t id, const Question& question);
  void Send(uint64_t id, enum Answer answer, uint64_t a, std::string_view text = {});
  void SendTable(uint64_t id);
  void Watch(uint64_t id, Connection& connection);
  void Observe(const Connection& connection) const;
  void Close(uint64_t id);
  void FolderGone(uint64_t id);
  void TellEnded() const;
  void Wake() const;
  std::string StatusJson();
  Status SetKnobs(std::span<const std::string_view> settings);
  void ApplyKnobs();
  void ShareThreads();

  // BookActions.
  void Start(CopyJob job) override;
  void Answer(uint64_t waiter, enum Answer answer, uint64_t a) override { Send(waiter, answer, a); }
  void Remove(const FileKey& key) override {
    RemoveLater(Copier::NameIn(key));
    options_.supply->Removed(key);
  }
  void RemovePart(const FileKey& key) override { RemoveLater(Copier::NameIn(key, ".part")); }
  bool Exists(const FileKey& key) override;
  bool Link(const FileKey& alias, const FileKey& copy) override;
  void Forget(std::string_view path) override { options_.supply->Forget(std::string(path)); }
  ReadProgress Progress(int64_t process, int64_t fd) override {
    const auto id = static_cast<pid_t>(process);
    return fd < 0 ? MappingProgress(id) : DescriptorProgress(id, fd);
  }
  bool GrowTable() override { return memory_.Grow(); }
  void Say(const std::string& what) override { Warn(what); }
  void Warn(const std::string& what);
  void AddSource(std::string_view source);
  // Nobody who finds the table opens what is still there.
  void RemoveLater(const std::string& name);
  // What a call on the disk says; `unknown` when the disk hangs.
  template <typename Call>
  bool Ask(Call call, bool unknown);

  const ServiceOptions options_;
  const std::shared_ptr<RunFolder> folder_;  // shared with calls on the disk
  TableMemory memory_;
  Room room_;
  Registry& registry_;
  Mechanism& mechanism_;
  Knob& reads_in_flight_;
  Knob& cache_bytes_;
  Knob& ahead_bytes_;
  BookMetrics metrics_;
  Book book_;
  OwnedFd listener_;
  OwnedFd epoll_;
  OwnedFd wake_;
  OwnedFd ended_;
  // Of the loop's thread.
  Connections connections_;
  uint64_t next_connection_ = kFirstConnection;
  size_t sessions_ = 0;
  std::vector<Job> jobs_ = std::vector<Job>(1);
  size_t open_jobs_ = 0;
  bool had_session_ = false;
  bool left_ = false;
  uint64_t knobs_seen_ = 0;
  Nanos last_asked_ = 0;
  Nanos started_ = 0;
  Nanos unlinked_ = 0;
  StallCause cause_ = StallCause::kSource;  // of the waits that end now
  std::vector<std::byte> room_for_packet_;
  std::atomic<bool> said_not_kept_{false};
  // For other threads, who look after TellEnded().
  std::atomic<bool> idle_{false};
  std::atomic<bool> folder_gone_{false};

  Mutex mutex_;
  std::vector<CopyResult> done_ GUARDED_BY(mutex_);
  std::shared_ptr<Copier> copier_;  // shared with calls that submit what waited for the disk
  std::unique_ptr<DiskCalls> disk_;
  std::condition_variable_any watch_;  // notified by a stop only
  std::jthread watcher_;
  std::jthread thread_;
};

BookOptions BookOptionsOf(const ServiceOptions& options) {
  BookOptions out;
  out.in_flight = options.reads_in_flight;
  out.partial = options.partial_bytes;
  out.open_files = FilesToKeepOpen();
  return out;
}

ServiceImpl::ServiceImpl(const ServiceOptions& options, RunFolder folder, TableMemory memory)
    : options_(options),
      folder_(std::make_shared<RunFolder>(std::move(folder))),
      memory_(std::move(memory)),
      room_(options.cache_bytes, options.ahead_bytes),
      registry_(*options.registry),
      mechanism_(registry_.AddMechanism("files", "copies of whole files for unmodified programs")),
      reads_in_flight_(mechanism_.AddKnob("files_reads_in_flight", KnobType::kCount, 1, kMostReads,
                                          static_cast<int64_t>(options.reads_in_flight),
                                          "reads of the source at once")),
      cache_bytes_(mechanism_.AddKnob("files_cache_bytes", KnobType::kBytes, 0, INT64_MAX,
                                      static_cast<int64_t>(options.cache_bytes),
                                      "the most that copies which are kept may take")),
      ahead_bytes_(mechanism_.AddKnob("files_ahead_bytes", KnobType::kBytes, 0, INT64_MAX,
                                      static_cast<int64_t>(options.ahead_bytes),
                                      "the most that copies made ahead of their reader may take")),
      metrics_(mechanism_),
      book_(memory_.table(), BookOptionsOf(options), room_, metrics_, *this),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ended_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      room_for_packet_(kMostPacket + 1) {
  book_.SetCache(options.store);
  for (const std::string& source : options.sources) AddSource(source);
  CopierOptions copying;
  copying.copies = folder_->copies();
  copying.threads = options.reads_in_flight;
  copying.young = options.young;
  copying.partial = options.partial_bytes;
  copying.supply = options.supply;
  copying.opens =
      &mechanism_.AddCounter("forebay_files_source_opens_total", "Files of the source opened");
  copying.not_kept = [this](const Status& why) {
    if (said_not_kept_.exchange(true)) return;
    Warn(StrCat(why.message(),
                "; what it does not keep is read from the source again by the next run. Make room "
                "there (--cache-size, forebay cache clear ",
                options_.store, "), or name another folder with --cache"));
  };
  copying.done = [this](CopyResult result) {
    bool first = false;
    {
      const MutexLock lock(mutex_);
      first = done_.empty();
      done_.push_back(std::move(result));
    }
    if (first) Wake();
  };
  copier_ = std::make_shared<Copier>(copying, room_);
}

ServiceImpl::~ServiceImpl() {
  StopThreads();
  if (listener_.valid()) unlink(options_.socket.c_str());
  copier_.reset();
  LeaveFolder();
}

bool ServiceImpl::End(Nanos wait) {
  StopThreads();
  if (listener_.valid()) unlink(options_.socket.c_str());
  listener_.Reset();     // the next one's has the same path
  connections_.clear();  // who waits reads the source by itself
  const bool ended = copier_->Stop(wait);
  // Threads that come back from a source that hung find a folder that is gone.
  return LeaveFolder() && ended;
}

bool ServiceImpl::LeaveFolder() {
  if (left_) return true;
  const bool hangs = memory_.table().passed_by();
  memory_.table().Close();
  const auto leave = [folder = folder_] { folder->Leave(); };
  if (disk_ == nullptr) {
    leave();
    left_ = true;
  } else {
    left_ = !hangs && disk_->Make(leave, 0, kLongestLeave);
    left_ = disk_->Close() && left_;
  }
  return left_;
}

void ServiceImpl::Warn(const std::string& what) {
  if (options_.warnings == nullptr || options_.warnings->Add(what)) {
    options_.say(StrCat("WARNING: ", what));
  }
}

void ServiceImpl::AddSource(std::string_view source) {
  const auto [name, folder] = NamedFolder(source);
  // Files in a folder that it does not take are left to the source, one by one.
  if (const Status added = options_.supply->AddSource(std::string(folder), std::string(name));
      !added.ok()) {
    Warn(added.message());
  }
  book_.AddSource(folder);
}

Status ServiceImpl::Listen() {
  if (!epoll_.valid() || !wake_.valid() || !ended_.valid()) {
    return ErrnoStatus(errno, "making the file service's descriptors");
  }
  const Result<sockaddr_un> address = wire::SocketAddress(options_.socket);
  if (!address) return address.error();
  OwnedFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  unlink(options_.socket.c_str());
  if (!listener.valid() ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0 ||
      chmod(options_.socket.c_str(), 0600) != 0 || listen(listener.get(), 4096) != 0) {
    return ErrnoStatus(errno, StrCat("listening at ", options_.socket));
  }
  listener_ = std::move(listener);
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kListening;
  int failed = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  event.data.u64 = kWake;
  failed += epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  if (failed != 0) return ErrnoStatus(errno, "watching the file service's socket");
  started_ = last_asked_ = SteadyClock().Now();
  Result<std::unique_ptr<DiskCalls>> calls = DiskCalls::Start();
  if (!calls) return calls.error();
  disk_ = *std::move(calls);
  auto loop = StartThread("forebay-files", [this](const std::stop_token& stop) { Loop(stop); });
  if (!loop) return loop.error();
  thread_ = *std::move(loop);
  auto watcher =
      StartThread("forebay-disk", [this](const std::stop_token& stop) { WatchDisk(stop); });
  if (!watcher) return watcher.error();
  watcher_ = *std::move(watcher);
  return Status();
}

void ServiceImpl::WatchDisk(const std::stop_token& stop) {
  Mutex mutex;
  FileTable table = memory_.table();
  while (!stop.stop_requested()) {
    if (busy()) table.SetPassedBy(!options_.supply->CopiesAnswer());
    MutexLock lock(mutex);
    watch_.wait_for(lock.native(), stop, kWatchEvery, [] { return false; });
  }
}

void ServiceImpl::StopThreads() {
  for (std::jthread* each : {&thread_, &watcher_}) each->request_stop();
  Wake();
  for (std::jthread* each : {&thread_, &watcher_}) {
    if (each->joinable()) each->join();
  }
  // What they have asked of the disk is done by leaving the folder.
  if (disk_ != nullptr) (void)disk_->Drop();
}

void ServiceImpl::Wake() const {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void ServiceImpl::Loop(const std::stop_token& stop) {
  const TableHold hold(memory_.table());
  std::array<epoll_event, 64> events;
  while (!stop.stop_requested()) {
    const Nanos sleep = Round();
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(),
                                 static_cast<int>((sleep + kMilli - 1) / kMilli));
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kListening) {
        Accept();
      } else if (id == kWake) {
        uint64_t seen = 0;
        (void)!read(wake_.get(), &seen, sizeof seen);
      } else {
        Receive(id);
      }
    }
    TakeDone();
  }
}

// Starts what can be, and says for how long there is nothing else to do.
Nanos ServiceImpl::Round() {
  ApplyKnobs();
  const Nanos now = SteadyClock().Now();
  if (now - unlinked_ >= kUnlinkEvery && !memory_.table().passed_by()) {
    unlinked_ = now;
    // Who finds no copy asks for one.
    for (const FileKey& key : options_.supply->TakeUnlinks()) Remove(key);
  }
  // What runs ahead of readers is of no use without any.
  const bool rests = had_session_ && sessions_ == 0 && book_.streams() == 0;
  const Nanos again = rests ? 0 : book_.Pump(now);
  // Whoever has started it is about to come.
  const Nanos linger = had_session_ ? options_.linger : std::max(options_.linger, kFirstLinger);
  const bool idle = sessions_ == 0 && now - last_asked_ >= linger;
  idle_.store(idle, std::memory_order_relaxed);
  if (idle) TellEnded();
  const Nanos longest = sessions_ == 0 ? std::clamp(linger, kMilli, kLongestSleep) : kLongestSleep;
  return again == 0 ? longest : std::min(again, longest);
}

void ServiceImpl::TellEnded() const {
  const uint64_t one = 1;
  (void)!write(ended_.get(), &one, sizeof one);
}

// Nobody finds the copies any more. Who has come gets no answer and comes to the next service, once
// this one has ended.
void ServiceImpl::FolderGone(uint64_t id) {
  if (!memory_.table().closed()) {
    options_.say(StrCat("the cache folder ", folder_->path(), " was removed: this service ends"));
  }
  memory_.table().Close();
  Close(id);
  folder_gone_.store(true, std::memory_order_relaxed);
  TellEnded();
}

void ServiceImpl::ApplyKnobs() {
  registry_.ReadKnobs(&knobs_seen_, [this] {
    ShareThreads();
    room_.SetMost(static_cast<uint64_t>(cache_bytes_.value()),
                  static_cast<uint64_t>(ahead_bytes_.value()));
    book_.RoomChanged();
  });
}

void ServiceImpl::ShareThreads() {
  book_.SetInFlight(static_cast<size_t>(reads_in_flight_.value()), open_jobs_);
  copier_->SetThreads(static_cast<size_t>(reads_in_flight_.value()), open_jobs_);
}

void ServiceImpl::TakeDone() {
  std::vector<CopyResult> done;
  {
    const MutexLock lock(mutex_);
    done.swap(done_);
  }
  const Nanos now = SteadyClock().Now();
  for (CopyResult& result : done) {
    cause_ = result.cause;
    book_.Done(std::move(result), now);
  }
  cause_ = StallCause::kSource;
}

void ServiceImpl::Accept() {
  while (true) {
    OwnedFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EMFILE || errno == ENFILE) {
        book_.CloseIdle();
        (void)poll(nullptr, 0, 5);  // not at once again
      }
      return;
    }
    const Result<pid_t> pid = wire::CheckPeer(fd.get());
    if (!pid) continue;
    const uint64_t id = next_connection_++;
    connections_[id].fd = std::move(fd);
    connections_[id].pid = *pid;
    Receive(id);  // most have asked by now
  }
}

void ServiceImpl::Watch(uint64_t id, Connection& connection) {
  epoll_event event = {};
  event.events = connection.busy ? 0u : EPOLLIN;
  event.data.u64 = id;
  const int how = connection.watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (epoll_ctl(epoll_.get(), how, connection.fd.get(), &event) != 0) return Close(id);
  connection.watched = true;
}

// One question at a time of each, so that answers come in order.
void ServiceImpl::Receive(uint64_t id) {
  while (true) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    if (connection.busy) {
      // It is told of only when the other end has gone.
      if (connection.watched) return Close(id);
      return Watch(id, connection);
    }
    const ssize_t n =
        recv(connection.fd.get(), room_for_packet_.data(), room_for_packet_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!connection.watched) Watch(id, connection);
      return;
    }
    if (n <= 0) return Close(id);
    connection.busy = true;
    Handle(id, {room_for_packet_.data(), static_cast<size_t>(n)});
    const auto still = connections_.find(id);
    if (still != connections_.end() && still->second.busy) return Watch(id, still->second);
  }
}

void ServiceImpl::Handle(uint64_t id, std::span<const std::byte> packet) {
  const Result<Question> parsed = ParseQuestion(packet);
  Connection& connection = connections_[id];
  if (!parsed) {
    connection.asked = Kind::kHello;
    Send(id, Answer::kBad, 0);
    return Close(id);
  }
  const Question& question = *parsed;
  const Header& header = question.header;
  connection.asked = header.kind;
  const Nanos now = SteadyClock().Now();
  connection.since = now;
  if (header.kind != Kind::kStatus) last_asked_ = now;
  switch (header.kind) {
    case Kind::kHello:
      // On a disk that hangs it is, for all that is known.
      if (!Ask([](const RunFolder& folder) { return folder.InPlace(); }, true)) {
        return FolderGone(id);
      }
      HandleHello(connection, question);
      return Send(id, Answer::kReady, 0, folder_->path());
    case Kind::kJob:
      if (question.paths.size() != 1 || !connection.session) return Send(id, Answer::kBad, 0);
      Leave(connection);
      Enter(connection, JobNamed(question.paths[0]));
      return Send(id, Answer::kReady, connection.job);
    case Kind::kGet:
      if (question.paths.size() != 1) return Send(id, Answer::kBad, 0);
      return book_.Get(question.paths[0], id, now, JobOf(header));
    case Kind::kRange:
      if (question.paths.size() != 1) return Send(id, Answer::kBad, 0);
      return book_.Range(question.paths[0], header.a, header.b, id, now, JobOf(header));
    case Kind::kDirect:
      if (question.paths.size() != 1) return Send(id, Answer::kBad, 0);
      return book_.Direct(question.paths[0], connection.pid, static_cast<int64_t>(header.a) - 1, id,
                          now);
    case Kind::kChanged:
      return book_.Changed(question.paths, id, header.a != kOnlyTheName);
    case Kind::kNames:
    case Kind::kOrder:
    case Kind::kAt:
      return Send(id, HandleOrder(id, question) ? Answer::kReady : Answer::kBad, 0);
    case Kind::kKnobs: {
      const Status set = SetKnobs(question.paths);
      return Send(id, set.ok() ? Answer::kReady : Answer::kBad, 0, set.message());
    }
    case Kind::kStatus:
      return Send(id, Answer::kReady, 0, StatusJson());
    case Kind::kTable:
      return SendTable(id);
  }
  Send(id, Answer::kBad, 0);
}

void ServiceImpl::HandleHello(Connection& connection, const Question& question) {
  if (!connection.session) {
    ++sessions_;
    if (had_session_) book_.LookAgain();
    connection.session = had_session_ = true;
    Enter(connection, JobOf(question.header));
  }
  for (const std::string_view source : question.paths) AddSource(source);
}

JobNumber ServiceImpl::JobNamed(std::string_view name) {
  const auto found = std::find_if(jobs_.begin() + 1, jobs_.end(),
                                  [&](const Job& job) { return job.name == name; });
  if (found != jobs_.end()) return static_cast<JobNumber>(found - jobs_.begin());
  if (jobs_.size() > UINT16_MAX) return 0;
  jobs_.push_back({std::string(name), 0});
  return static_cast<JobNumber>(jobs_.size() - 1);
}

void ServiceImpl::Enter(Connection& connection, JobNumber job) {
  connection.job = job;
  if (jobs_[job].sessions++ > 0) return;
  options_.supply->OpenJob(job, jobs_[job].name);
  ++open_jobs_;
  ShareThreads();
}

void ServiceImpl::Leave(const Connection& connection) {
  if (--jobs_[connection.job].sessions > 0) return;
  options_.supply->CloseJob(connection.job);
  --open_jobs_;
  ShareThreads();
}

Status ServiceImpl::SetKnobs(std::span<const std::string_view> settings) {
  std::vector<KnobSetting> parsed;
  for (const std::string_view setting : settings) {
    const size_t equals = setting.find('=');
    const std::string_view value = setting.substr(std::min(equals, setting.size() - 1) + 1);
    uint64_t number = 0;
    if (equals == std::string_view::npos) {
      return Status(Code::kInvalidArgument, StrCat("'", setting, "' is no name=value"));
    }
    FOREBAY_RETURN_IF_ERROR(
        wire::ParseNumber(setting.substr(0, equals), value, INT64_MAX, &number));
    parsed.push_back({std::string(setting.substr(0, equals)), static_cast<int64_t>(number)});
  }
  return registry_.Apply(parsed);
}

bool ServiceImpl::HandleOrder(uint64_t id, const Question& question) {
  const Header& header = question.header;
  if (header.kind == Kind::kNames) {
    return book_.Names(id, header.a, question.paths, JobOf(header));
  }
  if (header.kind == Kind::kOrder) return book_.Order(id, header.a, question.numbers);
  return book_.At(id, header.a);
}

void ServiceImpl::Send(uint64_t id, enum Answer answer, uint64_t a, std::string_view text) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || !found->second.busy) return;
  Connection& connection = found->second;
  connection.busy = false;
  Observe(connection);
  const std::vector<std::byte> packet = AnswerPacket(connection.asked, answer, a, text);
  // Who does not take its answers is not waited for.
  if (send(connection.fd.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    return Close(id);
  }
  if (connection.watched) Watch(id, connection);
}

void ServiceImpl::SendTable(uint64_t id) {
  Connection& connection = connections_[id];
  connection.busy = false;
  const std::vector<std::byte> packet =
      AnswerPacket(connection.asked, Answer::kReady, memory_.bytes());
  if (wire::SendDescriptor(connection.fd.get(), packet, memory_.fd()).ok()) {
    if (connection.watched) Watch(id, connection);
    return;
  }
  // The program starts without it, and tells of no changes.
  memory_.table().SetUnwatched();
  Close(id);
}

void ServiceImpl::Observe(const Connection& connection) const {
  const bool reads = connection.asked == Kind::kGet || connection.asked == Kind::kRange;
  if (options_.observer == nullptr || !reads || connection.pid == 0) return;
  options_.observer->Asked(connection.pid, cause_, connection.since, SteadyClock().Now());
}

void ServiceImpl::Close(uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const bool last = found->second.session && --sessions_ == 0;
  if (found->second.session) Leave(found->second);
  connections_.erase(found);
  book_.EndStream(id);
  if (last) book_.OnAllLeft();
  last_asked_ = SteadyClock().Now();
}

// Not before what has its name is removed.
void ServiceImpl::Start(CopyJob job) {
  using Kind = CopyJob::Kind;
  if ((job.kind != Kind::kCopy && job.kind != Kind::kFinish) || !disk_->busy()) {
    return copier_->Submit(std::move(job));
  }
  // A std::function must be copyable.
  const auto shared = std::make_shared<CopyJob>(std::move(job));
  disk_->Make([copier = copier_, shared] { copier->Submit(std::move(*shared)); }, kMostCallsLeft);
}

void ServiceImpl::RemoveLater(const std::string& name) {
  disk_->Make([folder = folder_, name] { unlinkat(folder->copies(), name.c_str(), 0); },
              kMostCallsLeft);
}

template <typename Call>
bool ServiceImpl::Ask(Call call, bool unknown) {
  const auto said = std::make_shared<std::atomic<bool>>(unknown);
  const bool made = disk_->Make([folder = folder_, said, call] { *said = call(*folder); });
  return made ? said->load() : unknown;
}

bool ServiceImpl::Exists(const FileKey& key) {
  return Ask(
      [name = Copier::NameIn(key)](const RunFolder& folder) {
        return faccessat(folder.copies(), name.c_str(), F_OK, 0) == 0;
      },
      false);
}

// Also of what is there of a large file.
bool ServiceImpl::Link(const FileKey& alias, const FileKey& copy) {
  const auto link = [alias, copy](const RunFolder& folder) {
    bool made = true;
    for (const char* suffix : {"", ".part"}) {
      const std::string name = Copier::NameIn(alias, suffix);
      const std::string to = Copier::NameIn(copy, suffix);
      unlinkat(folder.copies(), name.c_str(), 0);
      made = made && symlinkat(to.c_str(), folder.copies(), name.c_str()) == 0;
    }
    return made;
  };
  return Ask(link, false);
}

std::string ServiceImpl::StatusJson() {
  std::string sources;
  for (const std::string& source : book_.sources()) {
    sources += StrCat(sources.empty() ? "" : ",", Quoted(source));
  }
  std::string warnings;
  if (options_.warnings != nullptr) {
    for (const std::string& text : options_.warnings->All()) {
      warnings += StrCat(warnings.empty() ? "" : ",", Quoted(text));
    }
  }
  std::string metrics;
  for (const Registry::Sample& sample : registry_.Snapshot()) {
    metrics += StrCat(metrics.empty() ? "" : ",", Quoted(sample.name), ":", sample.value);
  }
  std::string knobs;
  for (const Knob* knob : registry_.Knobs()) {
    knobs += StrCat(knobs.empty() ? "{" : ",{", "\"name\":", Quoted(knob->name()),
                    ",\"type\":", Quoted(KnobTypeName(knob->type())), ",\"value\":", knob->value(),
                    ",\"minimum\":", knob->minimum(), ",\"maximum\":", knob->maximum(),
                    ",\"meaning\":", Quoted(knob->meaning()), "}");
  }
  return StrCat("{\"pid\":", getpid(), ",\"cache\":", Quoted(options_.store),
                ",\"temporary\":", options_.temporary ? "true" : "false",
                ",\"uptime_ms\":", (SteadyClock().Now() - started_) / kMilli,
                ",\"sessions\":", sessions_, ",\"streams\":", book_.streams(),
                ",\"files\":", book_.files(), ",\"full\":", book_.full() ? "true" : "false",
                ",\"jobs\":", book_.in_flight(), ",\"plain\":", memory_.table().plain(),
                ",\"settings\":", Quoted(options_.settings), ",\"warnings\":[", warnings,
                "],\"sources\":[", sources, "],\"knobs\":[", knobs, "],\"metrics\":{", metrics,
                "}}");
}

}  // namespace

Status ServiceOptions::Validate() const {
  if (cache.empty() || cache[0] != '/') {
    return Status(Code::kInvalidArgument,
                  StrCat("the cache folder must be an absolute path: '", cache, "'"));
  }
  if (slots < 2 || (slots & (slots - 1)) != 0) {
    return Status(Code::kInvalidArgument, StrCat("slots must be a power of two: ", slots));
  }
  if (reads_in_flight < 1 || reads_in_flight > kMostReads) {
    return Status(Code::kInvalidArgument,
                  StrCat("reads_in_flight is 1 to ", kMostReads, ": ", reads_in_flight));
  }
  for (const std::string& source : sources) {
    std::array<char, 4096> normal;
    const std::string_view folder = NamedFolder(source).second;
    const size_t length = NormalPath("/", folder, normal.data(), normal.size());
    if (std::string_view(normal.data(), length) != folder) {
      return Status(
          Code::kInvalidArgument,
          StrCat("a data folder must be an absolute path without . and ..: '", folder, "'"));
    }
  }
  return Status();
}

Result<std::unique_ptr<Service>> Service::Start(const ServiceOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  if (options.supply == nullptr || options.registry == nullptr) {
    return Status(Code::kInvalidArgument, "a file service needs an engine");
  }
  (void)std::signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error like any other
  FOREBAY_RETURN_IF_ERROR(TableHold::Check());
  Result<TableMemory> memory = TableMemory::Make(options.slots);
  if (!memory) return memory.error();
  Result<RunFolder> folder = RunFolder::Open(options.cache);
  if (!folder) return folder.error();
  ServiceOptions set = options;
  if (set.ahead_bytes == 0) {
    set.ahead_bytes = std::clamp(set.cache_bytes / 8, uint64_t{16} << 20, uint64_t{256} << 20);
  }
  auto service = std::make_unique<ServiceImpl>(set, *std::move(folder), *std::move(memory));
  FOREBAY_RETURN_IF_ERROR(service->Listen());
  return std::unique_ptr<Service>(std::move(service));
}

wire::ProgramPlace ServicePlace(const std::string& folder, const std::string& cache) {
  char name[kNameLength + 1];
  NameOf(KeyOf(cache), name);
  return wire::ProgramPlace(folder, StrCat("files-", std::string_view(name, 16)));
}

}  // namespace forebay::files
