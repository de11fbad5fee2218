// Members over real sockets, for tests.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "control/etcd_process.h"
#include "peer/membership.h"

namespace forebay::peer::testing {

inline const std::string kSecret(32, 's');

inline uint16_t FreePort() {
  const OwnedFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return 0;
  ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

// True as soon as it holds; false after a time that no busy machine needs.
inline bool Await(const std::function<bool()>& holds, Nanos wait = 20 * kSecond) {
  const Nanos until = SteadyClock().Now() + wait;
  while (!holds()) {
    if (SteadyClock().Now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline bool Alive(const Membership& member, uint32_t node, uint64_t incarnation = 0) {
  for (const Member& one : member.Current().members) {
    if (one.node == node) {
      return one.alive && (incarnation == 0 || one.incarnation == incarnation);
    }
  }
  return false;
}

inline bool AllAlive(const Membership& member) {
  const View view = member.Current();
  for (const Member& one : view.members) {
    if (!one.alive) return false;
  }
  return view.complete();
}

class Job {
 public:
  explicit Job(uint32_t nodes, Nanos lease = 60 * kSecond) : lease_(lease) {
    spec_.method = ClusterSpec::Method::kLauncher;
    spec_.nodes = nodes;
    spec_.master = StrCat("127.0.0.1:", FreePort());
    members_.resize(nodes);
  }
  void MakeStatic() {
    spec_.method = ClusterSpec::Method::kStatic;
    for (uint32_t node = 0; node < spec_.nodes; ++node) {
      spec_.nodes_at.push_back(StrCat("127.0.0.1:", FreePort()));
    }
  }
  void MakeEtcd(const control::testing::EtcdProcess& etcd) {
    spec_.method = ClusterSpec::Method::kEtcd;
    spec_.etcd = etcd.host_port();
    spec_.etcd_tls = etcd.tls();
    spec_.job = "j";
  }

  MembershipOptions Options(uint32_t node, uint64_t incarnation = 1) const {
    MembershipOptions options;
    options.cluster = spec_;
    options.cluster.node = node;
    options.self.node = node;
    options.self.incarnation = incarnation;
    options.self.address = StrCat("10.0.0.", node, ":1");
    options.self.memory = 1000 + node;
    options.lease = lease_;
    options.secret = kSecret;
    options.host = "127.0.0.1";
    if (adjust_) adjust_(options);
    return options;
  }
  void Start(uint32_t node, uint64_t incarnation = 1) {
    members_[node].reset();
    auto joined = Join(Options(node, incarnation));
    ASSERT_TRUE(joined) << joined.status().message();
    members_[node] = *std::move(joined);
  }
  void StartAll() {
    for (uint32_t node = 0; node < spec_.nodes; ++node) Start(node);
  }
  void Stop(uint32_t node) { members_[node].reset(); }
  Membership& operator[](uint32_t node) { return *members_[node]; }
  bool Everywhere(const std::function<bool(const Membership&)>& holds) {
    return Await([&] {
      for (const auto& member : members_) {
        if (member != nullptr && !holds(*member)) return false;
      }
      return true;
    });
  }
  bool AllSee(uint32_t node, bool alive, uint64_t incarnation = 0) {
    return Everywhere(
        [&](const Membership& member) { return Alive(member, node, incarnation) == alive; });
  }
  uint16_t port() const { return ParseHostPort(spec_.master)->port; }
  ClusterSpec& spec() { return spec_; }
  bool running(uint32_t node) const { return members_[node] != nullptr; }
  // What every node is started with.
  void Adjust(std::function<void(MembershipOptions&)> adjust) { adjust_ = std::move(adjust); }

 private:
  ClusterSpec spec_;
  const Nanos lease_;
  std::function<void(MembershipOptions&)> adjust_;
  std::vector<std::unique_ptr<Membership>> members_;
};

}  // namespace forebay::peer::testing
