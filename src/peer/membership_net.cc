// Membership without anything else to run: node 0 is the registrar and the others connect to it, or
// (static) every two nodes have a connection and each keeps the table for itself.
//
// One thread has it all. Of two nodes the higher one connects, to the lower one's host and port;
// both prove the job's secret before anything is believed. Then the one who connected beats, five
// times a lease, and the other answers.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/owned.h"
#include "base/thread.h"
#include "base/thread_annotations.h"
#include "peer/membership.h"
#include "peer/membership_hosts.h"
#include "peer/membership_message.h"
#include "peer/membership_table.h"
#include "peer/membership_view.h"
#include "peer/secret.h"

namespace forebay::peer {
namespace {

constexpr size_t kMostUnproven = 64;  // connections at a time; the oldest goes for a new one
constexpr uint64_t kWakeKey = 0;
constexpr uint64_t kListenKey = 1;

constexpr std::string_view kSecretRemedy =
    " has another secret: it is another job's, or the home folder is not shared (set "
    "FOREBAY_PEER_SECRET to a file that all nodes share)";

struct Link {
  enum class Phase : uint8_t {
    kConnecting,  // connect() is under way
    kAnswer,      // said Hello, waits for the answer
    kHello,       // accepted, waits for Hello
    kProof,       // answered, waits for the proof
    kRegister,    // proven, waits for the other's registration
    kReady,
  };
  uint64_t id = 0;
  OwnedFd fd;
  bool accepted = false;
  Phase phase = Phase::kHello;
  uint32_t node = 0;  // the other
  uint64_t incarnation = 0;
  Challenge challenge;
  uint64_t remote_version = 0;
  Nanos deadline = 0;  // of the phase; kReady: when the other is silent for too long
  Nanos next_beat = 0;
  uint64_t sent = 0;       // version of the table that the other has
  bool first_view = true;  // none of this connection has come
  bool writing = false;    // epoll watches for room
  std::string in;
  std::string out;
};

// A node that this one connects to.
struct Dial {
  uint32_t node = 0;
  HostPort at;
  std::optional<HostLookup> lookup;
  std::vector<HostAddress> addresses;
  size_t next_address = 0;
  uint64_t link = 0;  // 0: none
  Nanos retry = 0;
  Nanos pause = 0;
  bool stopped = false;  // refused for good
  Nanos heard = 0;
  Status last{Code::kUnavailable, "not asked yet"};
};

class NetMembership final : public Membership {
 public:
  explicit NetMembership(const MembershipOptions& options)
      : options_(options),
        mesh_(options.cluster.method == ClusterSpec::Method::kStatic),
        registrar_(!mesh_ && options.cluster.node == 0),
        own_at_(*ParseHostPort(mesh_ ? options.cluster.nodes_at[options.cluster.node]
                                     : options.cluster.master)),
        fork_generation_(ForkGeneration()),
        published_(options.cluster.nodes),
        table_(options.cluster.nodes, options.lease) {}

  ~NetMembership() override {
    if (fork_generation_ != ForkGeneration()) {  // a child: the thread is its parent's
      (void)thread_.release();
      return;
    }
    {
      MutexLock lock(mutex_);
      stop_ = true;
    }
    Wake();
    if (thread_ != nullptr) thread_->join();
  }

  Status Start() {
    epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
    wake_ = OwnedFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.valid() || !wake_.valid() || published_.event_fd() < 0) {
      return ErrnoStatus(errno, "making descriptors for the cluster's members");
    }
    Watch(wake_.get(), kWakeKey, EPOLLIN);
    if (mesh_ || registrar_) {
      table_.RegisterSelf(options_.self);
      published_.Publish(table_.Since(0), table_.version());
      published_.SetHealth(Status(Code::kUnavailable, "not listening yet"));
    } else {
      published_.SetHealth(
          Status(Code::kUnavailable, StrCat("node 0 at ", own_at_.ToString(), ": not asked yet")));
    }
    if (mesh_) {
      for (uint32_t node = 0; node < options_.cluster.node; ++node) {
        Dial& dial = dials_.emplace_back();
        dial.node = node;
        dial.at = *ParseHostPort(options_.cluster.nodes_at[node]);
      }
    } else if (!registrar_) {
      dials_.emplace_back().at = own_at_;
    }
    auto started = StartThread<std::thread>("forebay-members", [this] { Run(); });
    if (!started) return started.error();
    thread_ = std::make_unique<std::thread>(*std::move(started));
    return Status();
  }

  View Current() const override {
    if (fork_generation_ != ForkGeneration()) return {};
    return published_.Current();
  }
  int event_fd() const override { return published_.event_fd(); }
  void Suspect(uint32_t node, uint64_t incarnation, const std::string& why) override {
    Hear({node, incarnation, false, why});
  }
  void Trust(uint32_t node, uint64_t incarnation) override { Hear({node, incarnation, true, ""}); }
  Status health() const override { return published_.health(); }
  std::string Describe() const override {
    std::string how;
    if (mesh_) {
      how = StrCat("listens on ", own_at_.ToString());
    } else if (registrar_) {
      how = StrCat("registrar at ", own_at_.ToString());
    } else {
      how = StrCat("registered with node 0 at ", own_at_.ToString());
    }
    const Status now = health();
    if (!now.ok()) how = now.message();
    return StrCat("node ", options_.cluster.node, " of ", options_.cluster.nodes, " by ",
                  options_.cluster.source.empty() ? "options" : options_.cluster.source, ", ", how,
                  "; ", published_.Describe());
  }
  MembershipCounts counts() const override { return published_.counts(); }

 private:
  // --- The thread.

  void Run() {
    while (true) {
      now_ = SteadyClock().Now();
      std::vector<Word> words;
      {
        MutexLock lock(mutex_);
        if (stop_) break;
        words.swap(words_);
      }
      for (const Word& word : words) OnWord(word);
      Listen();
      for (Dial& dial : dials_) Advance(dial);
      Tick();
      Spread();
      PublishIfChanged();

      std::array<epoll_event, 64> events;
      const int count =
          ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), WaitMillis());
      now_ = SteadyClock().Now();
      for (int i = 0; i < count; ++i) {
        const uint64_t key = events[static_cast<size_t>(i)].data.u64;
        if (key == kWakeKey) {
          uint64_t ignored = 0;
          (void)!::read(wake_.get(), &ignored, sizeof ignored);
        } else if (key == kListenKey) {
          Accept();
        } else {
          OnReady(key, events[static_cast<size_t>(i)].events);
        }
      }
    }
    SayGoodbye();
  }

  int WaitMillis() const {
    // Deadlines are kept to a twentieth of the lease.
    Nanos until = now_ + std::clamp<Nanos>(options_.lease / 20, 2 * kMilli, 250 * kMilli);
    for (const Dial& dial : dials_) {
      if (dial.stopped || dial.link != 0) continue;
      until = std::min(until, dial.lookup ? now_ + 10 * kMilli : dial.retry);
    }
    if (listen_retry_ > 0) until = std::min(until, listen_retry_);
    return static_cast<int>(std::max<Nanos>(0, until - now_ + kMilli - 1) / kMilli);
  }

  void Hear(Word word) {
    {
      MutexLock lock(mutex_);
      AddWord(std::move(word), &words_);
    }
    Wake();
  }

  void Wake() {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }

  void Watch(int fd, uint64_t key, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0 && errno == EEXIST) {
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
    }
  }

  // --- Listening.

  // Opens the listener; what is wrong is tried again: a predecessor's children may still hold the
  // port.
  void Listen() {
    if (!(mesh_ || registrar_) || listener_.valid() || now_ < listen_retry_) return;
    if (!listen_lookup_) listen_lookup_.emplace(own_at_);
    const auto found = listen_lookup_->Poll();
    if (!found) {
      listen_retry_ = now_ + 10 * kMilli;
      return;
    }
    listen_lookup_.reset();
    Status status = *found ? Bind(**found) : found->error();
    if (status.ok()) {
      listen_retry_ = 0;
      ::fcntl(listener_.get(), F_SETFL, O_NONBLOCK);
      Watch(listener_.get(), kListenKey, EPOLLIN);
      published_.CountContact();
      published_.SetHealth(Status());
      return;
    }
    published_.SetHealth(std::move(status));
    listen_retry_ = now_ + 200 * kMilli;
  }

  // On the named address where it is this host's; a name that leads to loopback, or to an address
  // that is only forwarded here, means all of them.
  Status Bind(const std::vector<HostAddress>& addresses) {
    int error = EADDRNOTAVAIL;
    const bool here =
        own_at_.host == "localhost" || own_at_.host.starts_with("127.") || own_at_.host == "::1";
    for (const HostAddress& address : addresses) {
      if (address.loopback() && !here) continue;
      if (TryBind(address, &error)) return Status();
      if (error == EADDRINUSE) return Taken();
    }
    if (error == EADDRNOTAVAIL && !here) {
      HostAddress any;
      auto* six = reinterpret_cast<sockaddr_in6*>(&any.bytes);
      six->sin6_family = AF_INET6;
      six->sin6_port = htons(own_at_.port);
      six->sin6_addr = in6addr_any;
      any.size = sizeof *six;
      if (TryBind(any, &error)) return Status();
      if (error == EADDRINUSE) return Taken();
      any = HostAddress();
      auto* four = reinterpret_cast<sockaddr_in*>(&any.bytes);
      four->sin_family = AF_INET;
      four->sin_port = htons(own_at_.port);
      any.size = sizeof *four;
      if (TryBind(any, &error)) return Status();
      if (error == EADDRINUSE) return Taken();
    }
    return Status(Code::kUnavailable, StrCat("node ", options_.cluster.node, " cannot listen on ",
                                             own_at_.ToString(), ": ", std::strerror(error)));
  }

  Status Taken() const {
    return Status(Code::kUnavailable,
                  StrCat("port ", own_at_.port, " of ", own_at_.host,
                         " is taken, perhaps by another job; set FOREBAY_PEER_PORT to a free one, "
                         "the same on all nodes"));
  }

  bool TryBind(const HostAddress& address, int* error) {
    OwnedFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) {
      *error = errno == EAFNOSUPPORT ? EADDRNOTAVAIL : errno;
      return false;
    }
    const int on = 1;
    const int off = 0;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address.family() == AF_INET6) {
      ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (::bind(fd.get(), address.get(), address.size) != 0 || ::listen(fd.get(), 1024) != 0) {
      *error = errno;
      return false;
    }
    listener_ = std::move(fd);
    return true;
  }

  void Accept() {
    while (true) {
      OwnedFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd.valid()) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
          // No descriptors: waiting connections would wake the thread without end.
          ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
          listen_pause_ = now_ + 100 * kMilli;
        }
        return;
      }
      size_t unproven = 0;
      uint64_t oldest = 0;
      for (const auto& [id, link] : links_) {
        if (!link.accepted || link.phase > Link::Phase::kProof) continue;
        if (unproven++ == 0) oldest = id;
      }
      if (unproven >= kMostUnproven) Refuse(oldest);
      Link& link = Add(std::move(fd));
      link.accepted = true;
      link.phase = Link::Phase::kHello;
      link.deadline = now_ + std::min<Nanos>(options_.lease, 2 * kSecond);
      Watch(link.fd.get(), link.id, EPOLLIN);
    }
  }

  Link& Add(OwnedFd fd) {
    const uint64_t id = ++last_id_;
    Link& link = links_[id];
    link.id = id;
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    link.fd = std::move(fd);
    return link;
  }

  // --- Connecting.

  void Advance(Dial& dial) {
    if (dial.link != 0 || dial.stopped || now_ < dial.retry) return;
    if (dial.next_address >= dial.addresses.size()) {
      // Names are looked up anew each time: a restarted node 0 may be elsewhere.
      if (!dial.lookup) dial.lookup.emplace(dial.at);
      auto found = dial.lookup->Poll();
      if (!found) return;
      dial.lookup.reset();
      if (!*found) {
        Later(dial, found->error());
        return;
      }
      dial.addresses = **std::move(found);
      dial.next_address = 0;
    }
    const HostAddress address = dial.addresses[dial.next_address++];
    OwnedFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) {
      Later(dial, ErrnoStatus(errno, "socket"));
      return;
    }
    if (::connect(fd.get(), address.get(), address.size) != 0 && errno != EINPROGRESS) {
      ConnectFailed(dial, errno);
      return;
    }
    Link& link = Add(std::move(fd));
    link.phase = Link::Phase::kConnecting;
    link.node = dial.node;
    link.deadline = now_ + std::min<Nanos>(options_.lease, 2 * kSecond);
    dial.link = link.id;
    Watch(link.fd.get(), link.id, EPOLLOUT);
  }

  void ConnectFailed(Dial& dial, int error) {
    const Status status(Code::kUnavailable, StrCat("connect: ", std::strerror(error)));
    if (dial.next_address < dial.addresses.size()) {
      dial.last = status;  // its next address
      return;
    }
    if (error == ECONNREFUSED) Lost();  // the host is there, the process is not
    Later(dial, status);
  }

  void Later(Dial& dial, Status why) {
    dial.last = std::move(why);
    dial.pause = std::clamp(2 * dial.pause, std::min(options_.lease / 5, 20 * kMilli),
                            std::min<Nanos>(options_.lease / 5, 2 * kSecond));
    dial.retry = now_ + dial.pause;
    dial.addresses.clear();
    dial.next_address = 0;
    ReportDial(dial);
  }

  void ReportDial(const Dial& dial) {
    if (mesh_) return;  // others may be there; Describe tells who is not
    const bool answers = dial.last.code() == Code::kPermissionDenied;
    published_.SetHealth(Status(
        dial.last.code(), StrCat("node 0 at ", dial.at.ToString(),
                                 answers ? ": " : " does not answer: ", dial.last.message())));
  }

  Dial* DialOf(const Link& link) {
    for (Dial& dial : dials_) {
      if (dial.link == link.id) return &dial;
    }
    return nullptr;
  }

  // Node 0 is gone: the others keep what they know, and decide for themselves.
  void Lost() {
    if (!mesh_ && !registrar_lost_ && !base_.empty()) {
      registrar_lost_ = true;
      changed_ = true;
    }
  }

  // --- Links.

  void OnReady(uint64_t id, uint32_t events) {
    const auto at = links_.find(id);
    if (at == links_.end()) return;
    Link& link = at->second;
    if (link.phase == Link::Phase::kConnecting) {
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(link.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      Dial* dial = DialOf(link);
      if (error != 0) {
        End(link);
        links_.erase(at);
        if (dial != nullptr) {
          dial->link = 0;
          ConnectFailed(*dial, error);
        }
        return;
      }
      link.phase = Link::Phase::kAnswer;
      link.challenge.initiator = RandomDigest();
      link.challenge.initiator_node = options_.cluster.node;
      link.challenge.acceptor_node = link.node;
      frame::Hello hello;
      hello.node = options_.cluster.node;
      hello.incarnation = options_.self.incarnation;
      hello.nonce = link.challenge.initiator;
      link.writing = true;  // as it is watched
      Send(link, hello);
      return;
    }
    if ((events & EPOLLOUT) != 0 && !Flush(link)) return;
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) Receive(id);
  }

  void Receive(uint64_t id) {
    // A bound, so that one does not keep the thread from the others.
    for (int round = 0; round < 8; ++round) {
      const auto at = links_.find(id);
      if (at == links_.end()) return;
      Link& link = at->second;
      std::array<char, 16 << 10> bytes;
      const ssize_t got = ::recv(link.fd.get(), bytes.data(), bytes.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (got <= 0) {
        const std::string why = got == 0 ? "closed its connection" : std::strerror(errno);
        if (link.accepted && link.phase <= Link::Phase::kProof) {
          Refuse(id);
        } else {
          Close(id, Status(Code::kUnavailable, why));
        }
        return;
      }
      link.in.append(bytes.data(), static_cast<size_t>(got));
      if (!TakeFrames(id)) return;
    }
  }

  // False: the link is gone.
  bool TakeFrames(uint64_t id) {
    Link& link = links_.at(id);
    std::string in = std::exchange(link.in, {});
    std::string_view rest = in;
    while (true) {
      const size_t longest =
          link.phase >= Link::Phase::kRegister ? frame::kLongest : frame::kLongestUnproven;
      Result<std::optional<frame::Frame>> taken = frame::Take(&rest, longest);
      if (!taken) {
        Refuse(id);
        return false;
      }
      if (!*taken) break;
      if (!OnFrame(link, **taken)) return false;
    }
    in.erase(0, in.size() - rest.size());
    link.in = std::move(in);
    return true;
  }

  // False: the link is gone.
  bool OnFrame(Link& link, frame::Frame& message) {
    using Phase = Link::Phase;
    if (auto* refused = std::get_if<frame::Refused>(&message);
        refused != nullptr && !link.accepted) {
      Dial* dial = DialOf(link);
      if (dial != nullptr && refused->final) dial->stopped = true;
      Close(link.id, Status(Code::kPermissionDenied, StrCat("refused: ", refused->why)));
      return false;
    }
    switch (link.phase) {
      case Phase::kHello:
        if (auto* hello = std::get_if<frame::Hello>(&message)) return OnHello(link, *hello);
        break;
      case Phase::kAnswer:
        if (auto* answer = std::get_if<frame::Answer>(&message)) return OnAnswer(link, *answer);
        break;
      case Phase::kProof:
        if (auto* proof = std::get_if<frame::ProofOf>(&message)) {
          if (!SameDigest(proof->proof, Proof(options_.secret, link.challenge, true))) break;
          link.phase = Phase::kRegister;
          return true;
        }
        break;
      case Phase::kRegister:
        if (auto* mine = std::get_if<frame::Register>(&message)) return OnRegister(link, *mine);
        // The registrar has no need to register; its view stands for that.
        if (!link.accepted && !mesh_) return OnProven(link, message);
        break;
      case Phase::kReady:
        return OnProven(link, message);
      case Phase::kConnecting:
        break;
    }
    Refuse(link.id);
    return false;
  }

  bool OnHello(Link& link, const frame::Hello& hello) {
    const uint32_t own = options_.cluster.node;
    // Of two nodes the higher one connects.
    if (hello.protocol != frame::kProtocol || hello.node <= own ||
        hello.node >= options_.cluster.nodes || hello.incarnation == 0) {
      SendLast(link,
               frame::Refused{false, StrCat("protocol ", hello.protocol, ", node ", hello.node,
                                            "; node ", own, " has protocol ", frame::kProtocol,
                                            " and ", options_.cluster.nodes, " nodes in its job")});
      return false;
    }
    link.node = hello.node;
    link.incarnation = hello.incarnation;
    link.challenge = {hello.nonce, RandomDigest(), hello.node, own};
    link.phase = Link::Phase::kProof;
    frame::Answer answer;
    answer.node = own;
    answer.incarnation = options_.self.incarnation;
    answer.version = table_.version();
    answer.nonce = link.challenge.acceptor;
    answer.proof = Proof(options_.secret, link.challenge, false);
    return Send(link, answer);
  }

  bool OnAnswer(Link& link, const frame::Answer& answer) {
    link.challenge.acceptor = answer.nonce;
    if (answer.node != link.node ||
        !SameDigest(answer.proof, Proof(options_.secret, link.challenge, false))) {
      Close(link.id, Status(Code::kPermissionDenied, StrCat("who answers there", kSecretRemedy)));
      return false;
    }
    link.incarnation = answer.incarnation;
    link.phase = Link::Phase::kRegister;
    link.next_beat = now_ + options_.lease / 5;
    frame::Register mine = Own();
    // A registrar that was started anew; once somebody has told it, its versions are far above.
    if (!base_.empty() && base_.front().node == 0 &&
        base_.front().incarnation != answer.incarnation &&
        answer.version < published_.version() + options_.cluster.nodes) {
      mine.known = base_;
    }
    return Send(link, frame::ProofOf{Proof(options_.secret, link.challenge, true)}) &&
           Send(link, mine);
  }

  frame::Register Own() const {
    frame::Register mine;
    mine.nodes = options_.cluster.nodes;
    mine.member = options_.self;
    mine.member.alive = true;
    mine.version = mesh_ ? 0 : published_.version();
    return mine;
  }

  bool OnRegister(Link& link, const frame::Register& theirs) {
    if ((!mesh_ && !link.accepted) || theirs.member.node != link.node ||
        theirs.member.incarnation != link.incarnation) {
      Refuse(link.id);
      return false;
    }
    if (theirs.nodes != options_.cluster.nodes) {
      SendLast(link, frame::Refused{false, StrCat("the job has ", options_.cluster.nodes,
                                                  " nodes here, not ", theirs.nodes)});
      return false;
    }
    if (!mesh_) {
      table_.Above(theirs.version);
      table_.Adopt(theirs.known, theirs.version, now_);
    }
    const Status status = table_.Register(theirs.member, now_);
    if (!status.ok()) {
      SendLast(link, frame::Refused{status.code() == Code::kChanged, status.message()});
      return false;
    }
    changed_ = true;
    // One connection a node: an older one is a process that was replaced, or has lost its way.
    for (auto& [id, other] : links_) {
      if (id == link.id || other.node != link.node || other.phase < Link::Phase::kRegister)
        continue;
      const bool same = other.incarnation == link.incarnation;
      other.incarnation = 0;  // its end is nobody's death
      if (!same) {
        SendLast(other, frame::Refused{true, StrCat("another process has taken the place of node ",
                                                    link.node)});
      } else {
        Close(other.id, Status(Code::kCancelled, "it has connected anew"));
      }
      break;
    }
    const bool accepted = link.accepted;
    if (accepted && mesh_ && !Send(link, Own())) return false;
    Connected(link);
    return true;
  }

  void Connected(Link& link) {
    link.phase = Link::Phase::kReady;
    link.deadline = now_ + options_.lease;
    published_.CountContact();
    if (Dial* dial = DialOf(link)) {
      dial->pause = 0;
      dial->heard = now_;
      dial->last = Status();
    }
  }

  // Whatever comes over a link that both sides have proven.
  bool OnProven(Link& link, frame::Frame& message) {
    link.deadline = now_ + options_.lease;
    if (Dial* dial = DialOf(link)) dial->heard = now_;
    if (mesh_ || registrar_) table_.Heard(link.node, link.incarnation, now_);
    if (const auto* beat = std::get_if<frame::Beat>(&message)) {
      return beat->reply || !link.out.empty() || Send(link, frame::Beat{true});
    }
    if (const auto* changes = std::get_if<frame::Changes>(&message);
        changes != nullptr && !mesh_ && !registrar_) {
      return OnChanges(link, *changes);
    }
    if (const auto* suspicion = std::get_if<frame::Suspicion>(&message);
        suspicion != nullptr && registrar_) {
      const uint64_t id = link.id;
      OnWord({suspicion->node, suspicion->incarnation, false, suspicion->why});
      return links_.contains(id);
    }
    if (std::holds_alternative<frame::Leave>(message)) {
      if (DialOf(link) != nullptr) Lost();
      Close(link.id, Status(Code::kUnavailable, "it has left"));
      return false;
    }
    Refuse(link.id);
    return false;
  }

  bool OnChanges(Link& link, const frame::Changes& changes) {
    for (const Member& member : changes.members) {
      if (member.node >= options_.cluster.nodes) {
        Refuse(link.id);
        return false;
      }
    }
    if (link.first_view) base_.clear();
    link.first_view = false;
    for (const Member& member : changes.members) {
      const auto at =
          std::lower_bound(base_.begin(), base_.end(), member,
                           [](const Member& a, const Member& b) { return a.node < b.node; });
      if (at != base_.end() && at->node == member.node) {
        *at = member;
      } else {
        base_.insert(at, member);
      }
    }
    base_version_ = changes.version;
    registrar_lost_ = false;
    suspicions_.Clear();
    changed_ = true;
    if (link.phase == Link::Phase::kRegister) {
      Connected(link);
      published_.SetHealth(Status());
    }
    return true;
  }

  void OnWord(const Word& word) {
    const auto& [node, incarnation, trusted, why] = word;
    if (node == options_.cluster.node) return;
    if (trusted) {
      suspicions_.Hear(word);
      changed_ = true;
      return;
    }
    if (mesh_ || registrar_) {
      if (!table_.Suspect(node, incarnation, now_)) return;
      for (auto& [id, link] : links_) {
        if (link.phase != Link::Phase::kReady || link.node != node) continue;
        if (link.out.empty()) (void)Send(link, frame::Beat{});
        return;
      }
      return;
    }
    for (auto& [id, link] : links_) {
      if (link.phase != Link::Phase::kReady) continue;
      // The registrar itself: the connection to it is what counts, and is tried now.
      if (node == link.node) {
        link.deadline = std::min(link.deadline, now_ + options_.lease / 4);
        if (link.out.empty()) (void)Send(link, frame::Beat{});
      } else if (link.out.size() < (64 << 10)) {
        (void)Send(link, frame::Suspicion{node, incarnation, why});
      }
      return;
    }
    suspicions_.Hear(word);
    changed_ = true;
  }

  // --- Time.

  void Tick() {
    if (listen_pause_ > 0 && now_ >= listen_pause_) {
      listen_pause_ = 0;
      Watch(listener_.get(), kListenKey, EPOLLIN);
    }
    std::vector<uint64_t> late;
    for (auto& [id, link] : links_) {
      if (now_ >= link.deadline) {
        late.push_back(id);
      } else if (!link.accepted && link.phase >= Link::Phase::kRegister && now_ >= link.next_beat) {
        link.next_beat = now_ + options_.lease / 5;
        if (link.out.empty()) beats_.push_back(id);
      }
    }
    for (const uint64_t id : late) {
      const auto at = links_.find(id);
      if (at == links_.end()) continue;
      Link& link = at->second;
      if (link.accepted && link.phase <= Link::Phase::kProof) {
        Refuse(id);
      } else {
        Close(id, Status(Code::kDeadlineExceeded, "it is silent"));
      }
    }
    for (const uint64_t id : std::exchange(beats_, {})) {
      const auto at = links_.find(id);
      if (at != links_.end()) (void)Send(at->second, frame::Beat{});
    }
    if (mesh_ || registrar_) {
      table_.Expire(now_);
    } else {
      const Dial& dial = dials_.front();
      if (dial.heard > 0 && now_ - dial.heard >= options_.lease) Lost();
    }
  }

  // The registrar's news to everyone whose link has room.
  void Spread() {
    if (!registrar_) return;
    std::vector<uint64_t> behind;
    for (const auto& [id, link] : links_) {
      if (link.phase == Link::Phase::kReady && link.sent < table_.version() && link.out.empty()) {
        behind.push_back(id);
      }
    }
    for (const uint64_t id : behind) {
      const auto at = links_.find(id);
      if (at == links_.end()) continue;
      frame::Changes changes{table_.version(), table_.Since(at->second.sent)};
      at->second.sent = changes.version;
      (void)Send(at->second, changes);
    }
  }

  void PublishIfChanged() {
    if (mesh_ || registrar_) {
      if (published_.version() < table_.version()) {
        published_.Publish(table_.Since(0), table_.version());
      }
      return;
    }
    if (!std::exchange(changed_, false) || base_.empty()) return;
    std::vector<Member> members = base_;
    if (registrar_lost_) {
      for (Member& member : members) {
        if (member.node == 0) member.alive = false;
      }
      suspicions_.Apply(&members);
    }
    published_.Publish(std::move(members), base_version_);
  }

  // --- Sending and ending.

  // False: the link is gone.
  bool Send(Link& link, const frame::Frame& message) {
    frame::Append(message, &link.out);
    return Flush(link);
  }

  void SendLast(Link& link, const frame::Refused& refused) {
    if (link.accepted && link.phase <= Link::Phase::kProof) {
      published_.CountRefused(++refused_);
    }
    const uint64_t id = link.id;
    if (Send(link, refused)) Close(id, Status(Code::kPermissionDenied, refused.why));
  }

  bool Flush(Link& link) {
    size_t sent = 0;
    while (sent < link.out.size()) {
      const ssize_t wrote = ::send(link.fd.get(), link.out.data() + sent, link.out.size() - sent,
                                   MSG_NOSIGNAL | MSG_DONTWAIT);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (wrote < 0) {
        Close(link.id, Status(Code::kUnavailable, StrCat("send: ", std::strerror(errno))));
        return false;
      }
      sent += static_cast<size_t>(wrote);
    }
    link.out.erase(0, sent);
    const bool writing = !link.out.empty();
    if (writing != link.writing) {
      link.writing = writing;
      Watch(link.fd.get(), link.id, writing ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
    return true;
  }

  // Who has not proven itself, or sends what nobody sends.
  void Refuse(uint64_t id) {
    published_.CountRefused(++refused_);
    Close(id, Status(Code::kPermissionDenied, "sent what is not of this protocol"));
  }

  // A forked child may have a copy of the descriptor: closing ours ends nothing then.
  void End(Link& link) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.fd.get(), nullptr);
    ::shutdown(link.fd.get(), SHUT_RDWR);
    link.fd.Reset();
  }

  void Close(uint64_t id, const Status& why) {
    const auto at = links_.find(id);
    if (at == links_.end()) return;
    Link link = std::move(at->second);
    links_.erase(at);
    End(link);
    if ((mesh_ || registrar_) && link.phase == Link::Phase::kReady) {
      table_.Gone(link.node, link.incarnation);
    }
    for (Dial& dial : dials_) {
      if (dial.link != id) continue;
      dial.link = 0;
      // A connection that was good is tried again at once.
      if (link.phase == Link::Phase::kReady) dial.pause = 0;
      Later(dial, why);
      if (link.phase == Link::Phase::kReady && !dial.stopped) dial.retry = now_;
    }
  }

  void SayGoodbye() {
    const Nanos until = SteadyClock().Now() + 100 * kMilli;
    std::vector<uint64_t> ids;
    for (const auto& [id, link] : links_) {
      if (link.phase >= Link::Phase::kRegister) ids.push_back(id);
    }
    for (const uint64_t id : ids) {
      const auto at = links_.find(id);
      if (at == links_.end() || SteadyClock().Now() > until) continue;
      (void)Send(at->second, frame::Leave{});
    }
    for (auto& [id, link] : links_) End(link);
    links_.clear();
    if (listener_.valid()) ::shutdown(listener_.get(), SHUT_RDWR);
    listener_.Reset();
  }

  const MembershipOptions options_;
  const bool mesh_;
  const bool registrar_;
  const HostPort own_at_;  // where this node listens; a client's: where node 0 does
  const uint64_t fork_generation_;
  mutable PublishedView published_;
  OwnedFd epoll_;
  OwnedFd wake_;

  Mutex mutex_;
  bool stop_ GUARDED_BY(mutex_) = false;
  std::vector<Word> words_ GUARDED_BY(mutex_);

  // The thread's own.
  Nanos now_ = 0;
  OwnedFd listener_;
  std::optional<HostLookup> listen_lookup_;
  Nanos listen_retry_ = 0;
  Nanos listen_pause_ = 0;          // no descriptors: not watched until then
  std::map<uint64_t, Link> links_;  // by id: the oldest first
  uint64_t last_id_ = kListenKey;
  std::vector<Dial> dials_;
  std::vector<uint64_t> beats_;
  MemberTable table_;         // the registrar's, or a mesh's
  std::vector<Member> base_;  // a client's: what the registrar said
  uint64_t base_version_ = 0;
  bool registrar_lost_ = false;
  OwnSuspicions suspicions_;
  bool changed_ = false;
  uint64_t refused_ = 0;

  std::unique_ptr<std::thread> thread_;  // a forked child leaves it alone
};

}  // namespace

Result<std::unique_ptr<Membership>> JoinByNetwork(const MembershipOptions& options) {
  auto membership = std::make_unique<NetMembership>(options);
  FOREBAY_RETURN_IF_ERROR(membership->Start());
  return std::unique_ptr<Membership>(std::move(membership));
}

}  // namespace forebay::peer
