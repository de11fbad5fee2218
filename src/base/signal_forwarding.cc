#include "base/signal_forwarding.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace forebay {
namespace {

constexpr pid_t kNobodyYet = 0;
constexpr pid_t kNobodyAnyMore = -1;

std::atomic<pid_t> receiver{kNobodyYet};
std::atomic<uint64_t> kept{0};
std::atomic<bool> leads{false};  // this process its session
static_assert(std::atomic<pid_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "they are used in signal handlers");

// Whoever sets the later of receiver and kept sees the other.
void Send() {
  const pid_t child = receiver.load();
  if (child == kNobodyYet) return;
  uint64_t numbers = kept.exchange(0);
  if (child == kNobodyAnyMore) return;
  for (int number = 1; numbers != 0; ++number, numbers >>= 1) {
    if ((numbers & 1) != 0) kill(child, number);
  }
}

void Handle(int number, siginfo_t* info, void*) {
  if (info->si_code == SI_KERNEL && !(number == SIGHUP && leads)) return;
  const int error = errno;
  kept.fetch_or(uint64_t{1} << (number - 1));
  Send();
  errno = error;
}

}  // namespace

SignalForwarding::SignalForwarding(std::span<const int> signals) {
  kept = 0;
  receiver = kNobodyYet;
  leads = getsid(0) == getpid();
  for (const int number : signals) {
    struct sigaction now = {};
    if (sigaction(number, nullptr, &now) != 0) continue;
    if (now.sa_handler == SIG_IGN) {
      ignored_.push_back(number);
    } else {
      Take(number);
    }
  }
}

SignalForwarding::~SignalForwarding() {
  Stop();
  for (const auto& [number, action] : before_) sigaction(number, &action, nullptr);
}

void SignalForwarding::SendTo(pid_t child) {
  for (const int number : ignored_) Take(number);
  ignored_.clear();
  receiver = child;
  Send();
}

void SignalForwarding::Stop() { receiver = kNobodyAnyMore; }

void SignalForwarding::Take(int number) {
  struct sigaction action = {};
  action.sa_sigaction = Handle;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigfillset(&action.sa_mask);
  struct sigaction before = {};
  if (sigaction(number, &action, &before) == 0) before_.emplace_back(number, before);
}

}  // namespace forebay
