#include "base/system_calls.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "base/thread.h"

namespace forebay {

Result<std::shared_ptr<const SystemCalls>> SystemCalls::Count() {
  // Shared with the thread that serves it, which may outlive the caller.
  auto calls = std::make_shared<SystemCalls>();
  auto started = StartThread<std::thread>("forebay-calls", [calls] { calls->Watch(); });
  if (!started) return started.error();
  started->detach();
  sock_filter notify = {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_USER_NOTIF};
  const sock_fprog program = {1, &notify};
  long listener = -1;
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0) {
    listener =
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
  }
  const int error = errno;
  // The next call of this thread waits until the other one has seen this.
  calls->listener_.store(listener < 0 ? -1 : static_cast<int>(listener), std::memory_order_release);
  if (listener < 0) {
    return Status(Code::kUnimplemented, StrCat("a seccomp filter: ", std::strerror(error)));
  }
  return std::shared_ptr<const SystemCalls>(std::move(calls));
}

void SystemCalls::Watch() {
  int listener = 0;
  while ((listener = listener_.load(std::memory_order_acquire)) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (listener < 0) return;
  // The kernel's structs may be longer than those we know.
  seccomp_notif_sizes sizes = {};
  if (syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, &sizes) != 0) sizes = {};
  std::vector<std::byte> asked(std::max<size_t>(sizes.seccomp_notif, sizeof(seccomp_notif)));
  std::vector<std::byte> answer(
      std::max<size_t>(sizes.seccomp_notif_resp, sizeof(seccomp_notif_resp)));
  pollfd events = {listener, POLLIN, 0};
  while (poll(&events, 1, -1) >= 0 || errno == EINTR) {
    if ((events.revents & POLLIN) == 0) {
      if ((events.revents & POLLHUP) != 0) break;  // nobody has the filter any more
      continue;
    }
    std::fill(asked.begin(), asked.end(), std::byte{0});
    std::fill(answer.begin(), answer.end(), std::byte{0});
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, asked.data()) != 0) continue;
    seccomp_notif call;
    std::memcpy(&call, asked.data(), sizeof call);
    last_.store(call.data.nr, std::memory_order_relaxed);
    count_.fetch_add(1, std::memory_order_relaxed);
    seccomp_notif_resp go_on = {};
    go_on.id = call.id;
    go_on.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    std::memcpy(answer.data(), &go_on, sizeof go_on);
    (void)ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, answer.data());
  }
  close(listener);
}

}  // namespace forebay
