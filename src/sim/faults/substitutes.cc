// What the simulated cluster has instead of the kernel's clock, timers, names, addresses and random
// numbers. These functions are defined here once more: the linker takes them before those of the
// libraries, so that the product itself has no switch for it.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/host_lookup.h"
#include "base/planted_bug.h"
#include "peer/holder_file.h"
#include "peer/membership_hosts.h"
#include "peer/secret.h"
#include "sim/faults/world.h"
#include "source/wake_fd.h"

namespace forebay {

PlantedBug planted_bug = PlantedBug::kNone;

namespace {

class VirtualClock final : public Clock {
 public:
  Nanos Now() override {
    const sim::World* const world = sim::World::Current();
    if (world != nullptr) return world->Local();
    timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * kSecond + ts.tv_nsec;
  }
};

HostAddress Abstract(const std::string& name) {
  HostAddress address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.bytes);
  un->sun_family = AF_UNIX;
  std::memcpy(un->sun_path + 1, name.data(), name.size());  // NOLINT
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

}  // namespace

Clock& SteadyClock() {
  static VirtualClock clock;
  return clock;
}

bool SeemsYoung(int64_t, bool, Nanos) { return false; }

// ---- names -----------------------------------------------------------------------------------

struct HostLookup::State {};

bool HostAddress::loopback() const { return false; }
std::string HostAddress::host() const { return "?"; }
bool IsNumericHost(const std::string&) { return true; }

HostLookup::HostLookup(const HostPort& at) : host_(at.host) {}

std::optional<Result<std::vector<HostAddress>>> HostLookup::Poll() const {
  const sim::World& world = *sim::World::Current();
  std::vector<HostAddress> found{Abstract(world.sockets.dialed(world.current(), host_))};
  return Result<std::vector<HostAddress>>(std::move(found));
}

Result<std::vector<HostAddress>> HostLookup::Wait(Nanos) const { return *Poll(); }

// ---- timers ----------------------------------------------------------------------------------

// Only what is due already counts: who waits for a later time looks again within 20 ms.
WakeFd::WakeFd(OwnedFd epoll, OwnedFd timer) : epoll_(std::move(epoll)), timer_(std::move(timer)) {}

Result<WakeFd> WakeFd::Make() {
  OwnedFd epoll(epoll_create1(EPOLL_CLOEXEC));
  OwnedFd timer(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !timer.valid()) return ErrnoStatus(errno, "epoll_create1, eventfd");
  WakeFd wake(std::move(epoll), std::move(timer));
  FOREBAY_RETURN_IF_ERROR(wake.Watch(wake.timer_.get()));
  return wake;
}

Status WakeFd::Watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  return Status();
}

void WakeFd::SetTime(Nanos due) {
  const bool before = due_ == 0;
  due_ = due != kNever && due <= SteadyClock().Now() ? 0 : kNever;
  if (before == (due_ == 0)) return;
  uint64_t count = 1;
  if (due_ == 0) {
    (void)!write(timer_.get(), &count, sizeof count);
  } else {
    (void)!read(timer_.get(), &count, sizeof count);
  }
}

// ---- sockets ---------------------------------------------------------------------------------

namespace peer {

Result<OwnedFd> ListenAt(const HostPort&, const std::vector<HostAddress>&, uint32_t node) {
  const HostAddress address = Abstract(sim::World::Current()->sockets.listening(node));
  OwnedFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() || ::bind(fd.get(), address.get(), address.size) != 0 ||
      ::listen(fd.get(), 64) != 0) {
    return ErrnoStatus(errno, "a simulated port");
  }
  return fd;
}

Digest RandomDigest() {
  Digest digest{};
  for (std::byte& byte : digest) {
    byte = std::byte{static_cast<unsigned char>(sim::World::Current()->entropy().Next())};
  }
  return digest;
}

Result<std::string> OwnHost(const ClusterSpec&, Nanos) { return std::string("10.0.0.1"); }

// The folder of the secret is shared by all nodes and never hangs. Who asks has it at once.
struct HolderNote::State {
  bool asked = false;
};

HolderNote::HolderNote(std::string path, std::string)
    : state_(path.empty() ? nullptr : std::make_shared<State>()) {}

void HolderNote::Write(const HolderHint& hint) {
  if (state_ != nullptr) sim::World::Current()->holder_note = {hint.node, hint.at};
}

void HolderNote::Ask() {
  if (state_ != nullptr) state_->asked = true;
}

std::optional<HolderHint> HolderNote::Take() {
  if (state_ == nullptr || !std::exchange(state_->asked, false)) return std::nullopt;
  const auto& [node, at] = sim::World::Current()->holder_note;
  if (at.empty()) return std::nullopt;
  return HolderHint{node, at};
}

Status HolderNote::error() const { return Status(); }

}  // namespace peer
}  // namespace forebay
