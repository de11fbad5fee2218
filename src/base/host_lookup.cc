#include "base/host_lookup.h"

#include <netdb.h>
#include <netinet/in.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "base/thread.h"
#include "base/thread_annotations.h"

namespace forebay {
namespace {

using Found = Result<std::vector<HostAddress>>;

Found LookUp(const HostPort& at, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &hints, &found);
  if (error != 0) {
    return Status(Code::kUnavailable, StrCat("host ", at.host, ": ", ::gai_strerror(error)));
  }
  std::vector<HostAddress> out;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    HostAddress& address = out.emplace_back();
    address.size = info->ai_addrlen;
    std::memcpy(&address.bytes, info->ai_addr, info->ai_addrlen);
  }
  ::freeaddrinfo(found);
  return out;
}

}  // namespace

bool HostAddress::loopback() const {
  if (family() == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(&bytes);
    return (ntohl(four->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* six = reinterpret_cast<const sockaddr_in6*>(&bytes);
  return IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
}

std::string HostAddress::host() const {
  std::array<char, 128> text{};
  if (::getnameinfo(get(), size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "?";
  }
  return text.data();
}

bool IsNumericHost(const std::string& host) {
  return LookUp({host, 1}, AI_NUMERICHOST).has_value();
}

struct HostLookup::State {
  Mutex mutex;
  std::condition_variable changed;
  std::optional<Found> found GUARDED_BY(mutex);

  void Set(Found what) {
    MutexLock lock(mutex);
    found = std::move(what);
    changed.notify_all();
  }
};

// The look-ups that have a thread.
class HostLookup::Running {
 public:
  // Never destroyed: threads may outlive main. A forked child has another one, as its parent's
  // threads are not there and its lock may be held.
  static Running& Get() {
    static std::atomic<Running*> current{nullptr};
    Running* now = current.load(std::memory_order_acquire);
    while (now == nullptr || now->generation_ != ForkGeneration()) {
      auto made = std::make_unique<Running>();
      // Pairs with the load; a loser takes the winner's.
      if (current.compare_exchange_strong(now, made.get(), std::memory_order_acq_rel)) {
        return *made.release();
      }
    }
    return *now;
  }

  std::shared_ptr<State> Find(const HostPort& at) {
    const std::string name = at.ToString();
    MutexLock lock(mutex_);
    std::shared_ptr<State>& state = states_[name];
    if (state != nullptr) return state;
    state = std::make_shared<State>();
    auto started = StartThread<std::thread>("forebay-lookup", [this, at, name, state] {
      Found found = LookUp(at, AI_ADDRCONFIG);
      // A host without any network but loopback has no configured address.
      if (!found) found = LookUp(at, 0);
      {
        // Who asks from here on looks anew.
        MutexLock done(mutex_);
        states_.erase(name);
      }
      state->Set(std::move(found));
    });
    if (started) {
      started->detach();
      return state;
    }
    const std::shared_ptr<State> failed = std::move(state);
    states_.erase(name);
    failed->Set(
        Status(started.error().code(), StrCat("host ", at.host, ": ", started.error().message())));
    return failed;
  }

 private:
  const uint64_t generation_ = ForkGeneration();
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<State>> states_ GUARDED_BY(mutex_);
};

HostLookup::HostLookup(const HostPort& at) : host_(at.host) {
  Found numeric = LookUp(at, AI_NUMERICHOST);
  if (!numeric) {
    state_ = Running::Get().Find(at);
    return;
  }
  state_ = std::make_shared<State>();
  state_->Set(std::move(numeric));
}

std::optional<Found> HostLookup::Poll() const {
  MutexLock lock(state_->mutex);
  return state_->found;
}

Found HostLookup::Wait(Nanos wait) const {
  const Nanos until = SteadyClock().Now() + wait;
  MutexLock lock(state_->mutex);
  while (!state_->found) {
    const Nanos left = until - SteadyClock().Now();
    if (left <= 0) {
      return Status(Code::kDeadlineExceeded,
                    StrCat("host ", host_, ": no answer from the name server"));
    }
    state_->changed.wait_for(lock.native(), std::chrono::nanoseconds(left));
  }
  return *state_->found;
}

}  // namespace forebay
