// Members over real sockets and a real etcd. Leases are long where something must be seen at once,
// and short where silence is what counts.
#include "peer/membership.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "control/etcd_process.h"
#include "peer/membership_message.h"
#include "peer/membership_testing.h"
#include "peer/secret.h"
#include "transport/transport.h"

namespace forebay::peer {
namespace {

using Method = ClusterSpec::Method;
using control::testing::EtcdProcess;
using testing::Alive;
using testing::AllAlive;
using testing::Await;
using testing::FreePort;
using testing::Job;
using testing::kSecret;

// A connection made by hand.
class Raw {
 public:
  explicit Raw(uint16_t port, const char* from = "127.0.0.1")
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    ::inet_pton(AF_INET, from, &address.sin_addr);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    connected_ = Await([&] {
      return ::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    });
  }
  bool connected() const { return connected_; }
  void Send(std::string_view bytes) {
    (void)!::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void Send(const frame::Frame& message) {
    std::string bytes;
    frame::Append(message, &bytes);
    Send(bytes);
  }
  std::optional<frame::Frame> Next() {
    while (true) {
      std::string_view rest = in_;
      auto taken = frame::Take(&rest, frame::kLongest);
      if (!taken) return std::nullopt;
      if (*taken) {
        in_.erase(0, in_.size() - rest.size());
        return **taken;
      }
      if (!More()) return std::nullopt;
    }
  }
  // The other side has closed it.
  bool AwaitEnd() {
    while (More()) {
    }
    return ended_;
  }
  // Up to a registered member.
  bool Register(const MembershipOptions& options, const std::function<void()>& meanwhile = {}) {
    Challenge challenge;
    challenge.initiator = RandomDigest();
    challenge.initiator_node = options.self.node;
    Send(frame::Hello{frame::kProtocol, options.self.node, options.self.incarnation,
                      challenge.initiator});
    const auto answer = Next();
    if (!answer || !std::holds_alternative<frame::Answer>(*answer)) return false;
    challenge.acceptor = std::get<frame::Answer>(*answer).nonce;
    if (meanwhile) meanwhile();
    Send(frame::ProofOf{Proof(options.secret, challenge, true)});
    Send(frame::Register{options.cluster.nodes, options.self, 0, {}});
    const auto view = Next();
    return view && std::holds_alternative<frame::Changes>(*view);
  }

 private:
  bool More() {
    pollfd one{fd_.get(), POLLIN, 0};
    if (::poll(&one, 1, 20000) != 1) return false;
    char bytes[4096];
    const ssize_t got = ::recv(fd_.get(), bytes, sizeof bytes, 0);
    if (got <= 0) {
      ended_ = true;
      return false;
    }
    in_.append(bytes, static_cast<size_t>(got));
    return true;
  }

  OwnedFd fd_;
  bool connected_ = false;
  bool ended_ = false;
  std::string in_;
};

TEST(MembershipOptionsTest, AreChecked) {
  const Job job(2);
  EXPECT_TRUE(job.Options(1).Validate().ok());
  const auto wrong = [&](const std::function<void(MembershipOptions&)>& change) {
    MembershipOptions options = job.Options(1);
    change(options);
    return !options.Validate().ok() && !Join(options);
  };
  EXPECT_TRUE(wrong([](auto& options) { options.self.node = 0; }));
  EXPECT_TRUE(wrong([](auto& options) { options.self.incarnation = 0; }));
  EXPECT_TRUE(wrong([](auto& options) { options.self.address = ""; }));
  EXPECT_TRUE(wrong([](auto& options) { options.self.address = std::string(300, 'a'); }));
  EXPECT_TRUE(wrong([](auto& options) { options.secret = "short"; }));
  EXPECT_TRUE(wrong([](auto& options) { options.lease = 0; }));
  EXPECT_TRUE(wrong([](auto& options) { options.cluster.method = Method::kNone; }));
  EXPECT_TRUE(wrong([](auto& options) { options.cluster.node = options.self.node = 2; }));
  EXPECT_TRUE(wrong([](auto& options) { options.cluster.master = "nowhere"; }));
}

// Both ways without a store.
class MembershipTest : public ::testing::TestWithParam<const char*> {
 protected:
  void Prepare(Job& job) {
    if (std::string(GetParam()) == "static") job.MakeStatic();
  }
};

TEST_P(MembershipTest, AllComeLeaveAtOnceAndReturn) {
  Job job(4);
  Prepare(job);
  for (const uint32_t node : {3u, 1u, 0u, 2u}) job.Start(node);  // node 0 is not the first
  ASSERT_TRUE(job.Everywhere(AllAlive));
  const View view = job[3].Current();
  EXPECT_EQ(view.members, job[0].Current().members);
  EXPECT_EQ(view.members[2].address, "10.0.0.2:1");
  EXPECT_EQ(view.members[2].memory, 1002u);
  EXPECT_TRUE(job.Everywhere([](const Membership& member) { return member.health().ok(); }));
  EXPECT_NE(job[2].Describe().find("all 4 are there"), std::string::npos) << job[2].Describe();

  job.Stop(2);
  ASSERT_TRUE(job.AllSee(2, false));
  EXPECT_EQ(job[1].Current().members.size(), 4u);
  EXPECT_GT(job[1].Current().version, view.version);
  EXPECT_EQ(job[1].counts().deaths, 1u);
  EXPECT_NE(job[1].Describe().find("not node 2"), std::string::npos) << job[1].Describe();

  job.Start(2, 22);
  ASSERT_TRUE(job.AllSee(2, true, 22));
  ASSERT_TRUE(job.Everywhere(AllAlive));
}

TEST_P(MembershipTest, EventTellsOfChanges) {
  Job job(2);
  Prepare(job);
  job.StartAll();
  const auto readable = [&] {
    pollfd one{job[0].event_fd(), POLLIN, 0};
    return ::poll(&one, 1, 0) == 1;
  };
  ASSERT_TRUE(Await([&] { return AllAlive(job[0]) && !readable(); }));
  job.Stop(1);
  ASSERT_TRUE(Await(readable));
  EXPECT_FALSE(Alive(job[0], 1));
  EXPECT_FALSE(readable());
}

TEST_P(MembershipTest, WrongSecretIsRefused) {
  Job job(2);
  Prepare(job);
  job.Start(0);
  MembershipOptions options = job.Options(1);
  options.secret = std::string(32, 'x');
  auto stranger = Join(options);
  ASSERT_TRUE(stranger);
  ASSERT_TRUE(Await([&] { return job[0].counts().refused > 0; }));
  EXPECT_FALSE(Alive(job[0], 1));
  EXPECT_FALSE(Alive(**stranger, 0));
  for (const Membership* one : {&job[0], stranger->get()}) {
    EXPECT_TRUE(Await([&] {
      return one->health().message().find("FOREBAY_PEER_SECRET") != std::string::npos;
    })) << one->health().message();
  }
  stranger->reset();
  job.Start(1);
  EXPECT_TRUE(job.Everywhere([](const Membership& member) {
    return AllAlive(member) && member.health().ok();
  })) << job[0].health().message();
}

TEST_P(MembershipTest, StrangersDoNotTroubleANodeThatIsThere) {
  Job job(2);
  Prepare(job);
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  MembershipOptions options = job.Options(1);
  options.secret = std::string(32, 'x');
  const auto stranger = Join(options);
  ASSERT_TRUE(stranger);
  ASSERT_TRUE(Await([&] { return job[0].counts().refused > 0; }));
  EXPECT_TRUE(job[0].health().ok()) << job[0].health().message();
}

// A stranger that holds the address for a while, such as another job's node.
TEST_P(MembershipTest, WhoHasNotProvenTheSecretRefusesNobodyForGood) {
  Job job(2);
  Prepare(job);
  const std::string at =
      job.spec().method == Method::kStatic ? job.spec().nodes_at[0] : job.spec().master;
  {
    OwnedFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(ParseHostPort(at)->port);
    const int on = 1;
    ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::listen(listener.get(), 8), 0);
    job.Start(1);
    // Twice: it is asked again.
    for (int i = 0; i < 2; ++i) {
      pollfd one{listener.get(), POLLIN, 0};
      ASSERT_EQ(::poll(&one, 1, 20000), 1) << i;
      const OwnedFd link(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      ASSERT_TRUE(link.valid());
      std::string bytes;
      frame::Append(frame::Refused{true, "go away"}, &bytes);
      ASSERT_EQ(::send(link.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(bytes.size()));
      ASSERT_TRUE(Await([&] {
        const std::string why = job[1].health().message();
        return why.find("go away") != std::string::npos &&
               why.find("not proven") != std::string::npos;
      })) << job[1].health().message();
      char rest[4096];
      while (::recv(link.get(), rest, sizeof rest, 0) > 0) {
      }
    }
  }
  job.Start(0);
  EXPECT_TRUE(job.Everywhere([](const Membership& member) {
    return AllAlive(member) && member.health().ok();
  })) << job[1].health().message();
}

TEST_P(MembershipTest, PortThatIsTakenIsNamedAndTriedAgain) {
  Job job(2);
  Prepare(job);
  const std::string at =
      job.spec().method == Method::kStatic ? job.spec().nodes_at[0] : job.spec().master;
  const uint16_t port = ParseHostPort(at)->port;
  OwnedFd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  ASSERT_EQ(::bind(taken.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(taken.get(), 8), 0);
  job.StartAll();
  ASSERT_TRUE(Await([&] {
    const std::string error = job[0].health().message();
    return error.find(StrCat("port ", port)) != std::string::npos &&
           error.find("FOREBAY_PEER_PORT") != std::string::npos;
  })) << job[0].health().message();
  taken.Reset();
  EXPECT_TRUE(job.Everywhere(AllAlive));
  EXPECT_TRUE(job[0].health().ok());
}

INSTANTIATE_TEST_SUITE_P(Methods, MembershipTest, ::testing::Values("launcher", "static"),
                         [](const auto& one) { return std::string(one.param); });

TEST(Registrar, BrokenConnectionIsSeenAtOnce) {
  Job job(3);
  job.Start(0);
  job.Start(2);
  {
    Raw raw(job.port());
    ASSERT_TRUE(raw.Register(job.Options(1)));
    ASSERT_TRUE(job.AllSee(1, true));
  }
  EXPECT_TRUE(job.AllSee(1, false));
}

TEST(Registrar, SilentIsDeadAfterTheLease) {
  Job job(3, kSecond);
  job.Start(0);
  job.Start(2);
  Raw raw(job.port());
  const Nanos before = SteadyClock().Now();
  ASSERT_TRUE(raw.Register(job.Options(1)));
  ASSERT_TRUE(Await([&] { return Alive(job[2], 1); }));
  ASSERT_TRUE(Await([&] { return !Alive(job[2], 1); }));
  EXPECT_GE(SteadyClock().Now() - before, kSecond);
  EXPECT_TRUE(raw.AwaitEnd());
}

TEST(Registrar, SuspectIsLookedAtSooner) {
  Job job(4, 2 * kSecond);
  job.Start(0);
  job.Start(2);
  job.Start(3);
  ASSERT_TRUE(Await([&] { return Alive(job[2], 3) && Alive(job[3], 2); }));
  Raw raw(job.port());
  const Nanos before = SteadyClock().Now();
  ASSERT_TRUE(raw.Register(job.Options(1)));
  ASSERT_TRUE(job.AllSee(1, true));
  job[2].Suspect(1, 1, "no answer");
  job[2].Suspect(3, 1, "no answer");
  // The registrar asks it.
  while (true) {
    const auto next = raw.Next();
    ASSERT_TRUE(next);
    if (std::holds_alternative<frame::Beat>(*next)) break;
  }
  ASSERT_TRUE(job.AllSee(1, false));
  // A machine that is too busy shows nothing here.
  if (SteadyClock().Now() - before < 1500 * kMilli) {
    EXPECT_TRUE(Alive(job[0], 3)) << "it answers";
  }
}

TEST(Registrar, GoneAndBackTheViewGoesOn) {
  Job job(4);
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  uint64_t version = job[1].Current().version;
  job.Stop(0);
  ASSERT_TRUE(job.AllSee(0, false));
  EXPECT_GT(job[1].Current().version, version);
  ASSERT_TRUE(job.Everywhere([](const Membership& member) { return member.health().ok(); }));
  version = job[1].Current().version;

  // Nodes 1 to 3 never vanish from the view of node 2 while the new one learns of them.
  std::atomic<bool> stop = false;
  std::atomic<bool> vanished = false;
  std::thread watcher([&] {
    while (!stop) {
      for (const uint32_t node : {1u, 2u, 3u}) {
        if (!Alive(job[2], node)) vanished = true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  job.Start(0, 55);
  const bool back = job.Everywhere(
      [](const Membership& member) { return AllAlive(member) && Alive(member, 0, 55); });
  stop = true;
  watcher.join();
  EXPECT_TRUE(back);
  EXPECT_FALSE(vanished);
  EXPECT_GT(job[1].Current().version, version);
  EXPECT_TRUE(job.Everywhere([](const Membership& member) { return member.health().ok(); }));
}

// Nodes that do not know their own address take nobody's part.
TEST(Registrar, WithoutItTheDeadStayDeadUntilTheyAnswer) {
  constexpr Nanos kLease = 300 * kMilli;
  Job job(4, kLease);
  job.Adjust([](MembershipOptions& options) { options.host.clear(); });
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  job.Stop(0);
  ASSERT_TRUE(Await([&] { return !Alive(job[1], 0); }));
  EXPECT_FALSE(job[1].health().ok());
  EXPECT_NE(job[1].health().message().find("node 0 at"), std::string::npos);
  ASSERT_TRUE(Await([&] { return Alive(job[1], 2) && Alive(job[1], 3); }));
  job.Stop(3);
  job[1].Suspect(3, 1, "no answer");
  ASSERT_TRUE(Await([&] { return !Alive(job[1], 3); }));
  const uint64_t version = job[1].Current().version;
  const Nanos until = SteadyClock().Now() + 5 * kLease / 2;
  while (SteadyClock().Now() < until) {
    ASSERT_FALSE(Alive(job[1], 3)) << "nobody has last_received of it";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(job[1].Current().version, version);
  EXPECT_TRUE(job[1].Current().members[3].suspected);
  job[1].Trust(3, 2);  // another process
  job[1].Suspect(2, 1, "no answer");
  ASSERT_TRUE(Await([&] { return !Alive(job[1], 2); }));
  EXPECT_FALSE(Alive(job[1], 3));
  job[1].Trust(3, 1);
  EXPECT_TRUE(Await([&] { return Alive(job[1], 3); }));
  EXPECT_FALSE(job[1].Current().members[3].suspected);
  EXPECT_FALSE(Alive(job[1], 2));
}

TEST(Registrar, StartedAnewItIsToldWhoWasThere) {
  Job job(3, kSecond);
  job.Adjust([](MembershipOptions& options) { options.host.clear(); });
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  job.Stop(0);
  ASSERT_TRUE(job.AllSee(0, false));
  job.Stop(2);  // nobody notices
  job.Start(0, 55);
  ASSERT_TRUE(Await([&] { return Alive(job[0], 2); })) << "node 1 knows of it";
  EXPECT_TRUE(Await([&] { return !Alive(job[0], 2) && !Alive(job[1], 2); }));
  EXPECT_TRUE(Alive(job[0], 1));
}

TEST(Registrar, SecondProcessOfANodeTakesItsPlace) {
  Job job(2);
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  auto second = Join(job.Options(1, 2));
  ASSERT_TRUE(second);
  ASSERT_TRUE(Await([&] { return Alive(job[0], 1, 2) && (*second)->health().ok(); }));
  ASSERT_TRUE(Await([&] { return !job[1].health().ok(); }));
  EXPECT_NE(job[1].health().message().find("another process"), std::string::npos)
      << job[1].health().message();
  EXPECT_TRUE(Alive(job[0], 1, 2)) << "the first one does not come back";
}

TEST(Registrar, OtherNumberOfNodesIsRefused) {
  Job job(2);
  job.Start(0);
  MembershipOptions options = job.Options(1);
  options.cluster.nodes = 3;
  const auto other = Join(options);
  ASSERT_TRUE(Await([&] {
    return (*other)->health().message().find("has 2 nodes") != std::string::npos;
  })) << (*other)->health().message();
  EXPECT_FALSE(Alive(job[0], 1));
}

TEST(Registrar, GarbageCostsNothing) {
  Job job(2, kSecond);
  job.Start(0);
  std::vector<std::unique_ptr<Raw>> idle;
  for (int i = 0; i < 150; ++i) {
    idle.push_back(std::make_unique<Raw>(job.port()));
    ASSERT_TRUE(idle.back()->connected());
  }
  std::string hello;
  frame::Append(frame::Hello{frame::kProtocol, 1, 5, RandomDigest()}, &hello);
  std::string early;  // without a proof
  frame::Append(frame::Register{2, job.Options(1).self, 0, {}}, &early);
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), std::string(100000, '\xff'),
        std::string(100000, '\0'), hello + hello, hello + early, early}) {
    Raw raw(job.port());
    raw.Send(bytes);
    EXPECT_TRUE(raw.AwaitEnd());
  }
  Raw half(job.port());
  half.Send(hello.substr(0, 20));
  Raw wrong(job.port());
  MembershipOptions options = job.Options(1);
  options.secret = std::string(32, 'y');
  EXPECT_FALSE(wrong.Register(options));
  job.Start(1);
  EXPECT_TRUE(job.Everywhere(AllAlive));
  // All of them are closed soon.
  for (const auto& raw : idle) EXPECT_TRUE(raw->AwaitEnd());
  EXPECT_TRUE(half.AwaitEnd());
  EXPECT_GE(job[0].counts().refused, 150u + 6 + 2);
  EXPECT_TRUE(job.Everywhere(AllAlive));
}

// Strangers that connect without end cost a bounded number of sockets and no member its place,
// while the member is between its Hello and its proof.
TEST(Registrar, StrangersWithoutEndTakePlacesFromEachOther) {
  const bool kSays[] = {false, true};
  for (const bool hello : kSays) {
    Job job(2);
    job.Start(0);
    std::vector<std::unique_ptr<Raw>> strangers;
    Raw member(job.port());
    EXPECT_TRUE(member.Register(job.Options(1), [&] {
      for (int i = 0; i < 200; ++i) {
        // Those who say Hello, too, do it from another host.
        strangers.push_back(std::make_unique<Raw>(job.port(), hello ? "127.0.0.2" : "127.0.0.1"));
        if (!hello) continue;
        strangers.back()->Send(frame::Hello{frame::kProtocol, 1, 9, RandomDigest()});
        EXPECT_TRUE(strangers.back()->Next());  // it is at the member's stage now
      }
      EXPECT_TRUE(Await([&] { return job[0].counts().refused >= 200 - 64; }));
    })) << hello;
    EXPECT_TRUE(Await([&] { return Alive(job[0], 1); })) << hello;
  }
}

TEST(Registrar, ByName) {
  Job job(2);
  job.spec().master = StrCat("localhost:", job.port());
  job.StartAll();
  EXPECT_TRUE(job.Everywhere(AllAlive)) << job[1].health().message();
}

TEST(Registrar, NameOfNobodyIsSaid) {
  Job job(2);
  job.spec().master = StrCat("no-such-host.invalid:", job.port());
  job.Start(1);
  ASSERT_TRUE(Await([&] {
    return job[1].health().message().find("host no-such-host.invalid") != std::string::npos;
  })) << job[1].health().message();
  EXPECT_EQ(job[1].Current().version, 0u);
}

TEST(Registrar, ForkedChildTouchesNothing) {
  Job job(2);
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  const pid_t child = ::fork();
  if (child == 0) {
    const bool empty = job[1].Current().members.empty();
    job.Stop(1);
    ::_exit(empty ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Alive(job[0], 1));
}

class EtcdMembershipTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdProcess::Installed()) GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
    etcd_ = EtcdProcess::Start();
    ASSERT_NE(etcd_, nullptr);
  }
  std::unique_ptr<EtcdProcess> etcd_;
};

TEST_F(EtcdMembershipTest, AllComeLeaveAndReturn) {
  Job job(3, 30 * kSecond);
  job.MakeEtcd(*etcd_);
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive)) << job[0].health().message();
  EXPECT_EQ(job[0].Current().members, job[2].Current().members);
  EXPECT_NE(job[0].Describe().find("registered in etcd"), std::string::npos) << job[0].Describe();
  job.Stop(1);
  ASSERT_TRUE(job.AllSee(1, false));
  job.Start(1, 9);
  ASSERT_TRUE(job.AllSee(1, true, 9));

  // A second process in its place.
  auto second = Join(job.Options(1, 10));
  ASSERT_TRUE(second);
  ASSERT_TRUE(Await([&] { return Alive(job[0], 1, 10) && !job[1].health().ok(); }));
  EXPECT_NE(job[1].health().message().find("another process"), std::string::npos);
}

// By TLS, with certificates of both sides and a password, as the environment tells.
TEST(SecuredEtcdMembershipTest, AllComeAndReturnAndAWrongPasswordIsNamed) {
  if (!EtcdProcess::Installed()) GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
  if (!TlsVersion()) GTEST_SKIP() << TlsVersion().error().message();
  const control::testing::Certificates certificates;
  ASSERT_TRUE(certificates.ok()) << "openssl makes no certificates: apt install openssl";
  const auto etcd = EtcdProcess::StartTls(certificates, true);
  ASSERT_NE(etcd, nullptr);
  ASSERT_TRUE(etcd->SetUsers());
  const control::EtcdAccess access = etcd->options(kSecond).access;
  const std::vector<std::pair<const char*, std::string>> variables = {
      {"FOREBAY_ETCD_CACERT", access.ca_file},
      {"FOREBAY_ETCD_CERT", access.cert_file},
      {"FOREBAY_ETCD_KEY", access.key_file},
      {"FOREBAY_ETCD_USER", access.user},
      {"FOREBAY_ETCD_PASSWORD", access.password}};
  for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
  {
    Job job(3, 30 * kSecond);
    job.MakeEtcd(*etcd);
    const Result<std::string> secret = JobSecret(job.spec());
    EXPECT_TRUE(secret) << secret.status().ToString();
    job.StartAll();
    ASSERT_TRUE(job.Everywhere(AllAlive)) << job[0].Describe();
    etcd->Kill();
    ASSERT_TRUE(job.Everywhere([](const Membership& member) { return !member.health().ok(); }));
    etcd->Launch();
    ASSERT_TRUE(etcd->AwaitReady());
    EXPECT_TRUE(job.Everywhere([](const Membership& member) {
      return AllAlive(member) && member.health().ok();
    })) << job[0].health().message();
  }
  ::setenv("FOREBAY_ETCD_PASSWORD", "not the password", 1);
  {
    Job job(2, 30 * kSecond);
    job.MakeEtcd(*etcd);
    const Status secret = JobSecret(job.spec()).status();
    EXPECT_EQ(secret.code(), Code::kPermissionDenied) << secret.ToString();
    EXPECT_NE(secret.message().find("FOREBAY_ETCD_PASSWORD"), std::string::npos);
    EXPECT_EQ(secret.message().find("not the password"), std::string::npos);
    job.StartAll();
    EXPECT_TRUE(job.Everywhere([](const Membership& member) {
      return member.health().message().find("FOREBAY_ETCD_PASSWORD") != std::string::npos;
    })) << job[0].health().message();
  }
  for (const auto& [name, value] : variables) ::unsetenv(name);
}

TEST_F(EtcdMembershipTest, LeaseThatIsNotKeptEnds) {
  Job job(2, 2 * kSecond);
  job.MakeEtcd(*etcd_);
  job.Start(0);
  control::EtcdOptions options;
  options.endpoints = {etcd_->endpoint()};
  options.deadline = 20 * kSecond;
  const auto store = control::EtcdStore::Make(options);
  const auto lease = (*store)->GrantLease(kSecond);
  ASSERT_TRUE(lease);
  std::string value;
  frame::Append(frame::Register{2, job.Options(1).self, 0, {}}, &value);
  ASSERT_TRUE((*store)->Put(EtcdPrefix(job.spec()) + "nodes/1", value, *lease).ok());
  ASSERT_TRUE((*store)->Put(EtcdPrefix(job.spec()) + "nodes/x", "nonsense").ok());
  ASSERT_TRUE((*store)->Put(EtcdPrefix(job.spec()) + "nodes/0x", value).ok());
  ASSERT_TRUE(Await([&] { return Alive(job[0], 1); }));
  ASSERT_TRUE(Await([&] { return !Alive(job[0], 1); }));
  EXPECT_TRUE(Alive(job[0], 0));
  EXPECT_TRUE(job[0].health().ok());
}

TEST_F(EtcdMembershipTest, WithoutEtcdTheViewStays) {
  Job job(2, 2 * kSecond);
  job.MakeEtcd(*etcd_);
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive));
  etcd_->Kill();
  ASSERT_TRUE(Await([&] { return !job[0].health().ok(); }));
  EXPECT_NE(job[0].health().message().find("etcd at"), std::string::npos);
  EXPECT_TRUE(AllAlive(job[0]));
  job[0].Suspect(1, 1, "no answer");
  ASSERT_TRUE(Await([&] { return !Alive(job[0], 1); }));
  etcd_->Launch();
  ASSERT_TRUE(etcd_->AwaitReady());
  EXPECT_TRUE(job.Everywhere(
      [](const Membership& member) { return member.health().ok() && AllAlive(member); }));
}

// A cluster of three, whose leader is killed, and the one that the nodes talk to.
TEST_F(EtcdMembershipTest, NoMemberOfEtcdIsSpecial) {
  auto etcds = EtcdProcess::StartCluster(3);
  ASSERT_EQ(etcds.size(), 3u);
  Job job(3, 3 * kSecond);
  job.MakeEtcd(*etcds[0]);
  for (const size_t i : {1u, 2u}) job.spec().etcd += "," + etcds[i]->host_port();
  job.StartAll();
  ASSERT_TRUE(job.Everywhere(AllAlive)) << job[0].health().message();

  const auto led = [&] {
    for (auto& etcd : etcds) {
      if (etcd->Leads()) return etcd.get();
    }
    return static_cast<EtcdProcess*>(nullptr);
  };
  EtcdProcess* leader = nullptr;
  // Twice: with the first, too, that all nodes talk to at the start.
  std::vector<EtcdProcess*> victims = {etcds[0].get()};
  ASSERT_TRUE(Await([&] { return (leader = led()) != nullptr; }));
  victims.insert(victims.begin(), leader);
  uint64_t incarnation = 1, gone = 0;
  for (EtcdProcess* victim : victims) {
    victim->Kill();
    ASSERT_TRUE(Await([&] { return led() != nullptr; })) << "another one leads";
    ASSERT_TRUE(job.Everywhere([](const Membership& member) {
      return AllAlive(member) && member.health().ok();
    })) << job[0].health().message();
    EXPECT_EQ(job[0].counts().deaths, gone++) << "a loss of etcd's is no member's death";
    // Deaths and late ones are told as before.
    job.Stop(2);
    ASSERT_TRUE(job.AllSee(2, false)) << job[0].Describe();
    job.Start(2, ++incarnation);
    ASSERT_TRUE(job.AllSee(2, true, incarnation)) << job[0].Describe();
    victim->Launch();
    ASSERT_TRUE(victim->AwaitReady());
  }
  // One that is silent and keeps its connections; each in turn, so that the nodes talk to one.
  for (const size_t silent : {0u, 1u, 2u}) {
    etcds[silent]->Freeze();
    job.Stop(2);
    EXPECT_TRUE(job.AllSee(2, false)) << job[0].Describe();
    job.Start(2, ++incarnation);
    EXPECT_TRUE(job.AllSee(2, true, incarnation)) << job[0].Describe();
    etcds[silent]->Thaw();
    ASSERT_TRUE(Await([&] { return led() != nullptr; }));
  }
  EXPECT_TRUE(job.Everywhere([](const Membership& member) {
    return AllAlive(member) && member.health().ok();
  })) << job[0].health().message();
}

}  // namespace
}  // namespace forebay::peer
