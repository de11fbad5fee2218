// Starts threads inside somebody's program, whose signals are for its own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"

namespace forebay {

// While it lives the calling thread takes no signals, and a thread that it starts never will. Left
// open are those by which a thread reports its own fault, such as SIGSEGV: blocked, they would end
// the process without the program's handler, which may say where.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A std::jthread or std::thread that runs `run` under `name` (at most 15 bytes) and takes no
// signals; the caller's own mask is as before. kResourceExhausted when there is no thread to be
// had.
template <typename Thread = std::jthread, typename Run>
Result<Thread> StartThread(const char* name, Run run) {
  const SignalsBlocked blocked;
  try {
    Thread thread(std::move(run));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted,
                  StrCat("the thread ", name, " did not start: ", error.what()));
  }
}

}  // namespace forebay
