// A real etcd for tests: on loopback, with ports and a data folder of its own, stopped by its pid.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/owned.h"
#include "control/etcd_store.h"

namespace forebay::control::testing {

class EtcdProcess {
 public:
  // Whether there is an etcd to run.
  static bool Installed() {
    const char* path = ::getenv("PATH");
    std::string rest = path == nullptr ? "" : path;
    while (!rest.empty()) {
      const size_t colon = std::min(rest.find(':'), rest.size());
      if (::access((rest.substr(0, colon) + "/etcd").c_str(), X_OK) == 0) return true;
      rest.erase(0, colon + 1);
    }
    return false;
  }

  // Null when it does not come up.
  static std::unique_ptr<EtcdProcess> Start(std::vector<std::string> options = {}) {
    // A free port may be taken by another before etcd has it.
    for (int attempt = 0; attempt < 5; ++attempt) {
      auto etcd = std::unique_ptr<EtcdProcess>(new EtcdProcess(options));
      if (etcd->Run()) return etcd;
    }
    return nullptr;
  }

  ~EtcdProcess() {
    Kill();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  std::string endpoint() const { return StrCat("http://127.0.0.1:", port_); }

  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  // Stopped, it keeps its connections and answers nothing.
  void Freeze() {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);  // its threads stop one after the other
  }
  void Thaw() { ::kill(pid_, SIGCONT); }

  // With the same ports and the same data; returns without waiting for it.
  void Launch() {
    const std::string client = endpoint();
    const std::string peer = StrCat("http://127.0.0.1:", peer_port_);
    std::vector<std::string> words = {"etcd",
                                      "--data-dir=" + folder_ + "/data",
                                      "--listen-client-urls=" + client,
                                      "--advertise-client-urls=" + client,
                                      "--listen-peer-urls=" + peer,
                                      "--initial-advertise-peer-urls=" + peer,
                                      "--initial-cluster=default=" + peer,
                                      "--heartbeat-interval=20",
                                      "--election-timeout=200"};
    words.insert(words.end(), options_.begin(), options_.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string log = folder_ + "/log";
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that crashes leaves none behind
    if (::getppid() != parent) ::_exit(1);
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(out, 1);
    ::dup2(out, 2);
    ::execvp("etcd", argv.data());
    ::_exit(127);
  }
  bool AwaitReady() {
    EtcdOptions options;
    options.endpoints = {endpoint()};
    options.deadline = kSecond;
    const auto store = EtcdStore::Make(options);
    for (int i = 0; i < 600; ++i) {
      if ((*store)->Range("ready").has_value()) return true;
      if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
    }
    return false;
  }

 private:
  explicit EtcdProcess(std::vector<std::string> options) : options_(std::move(options)) {
    std::string name = std::filesystem::temp_directory_path() / "forebay-etcd-XXXXXX";
    if (::mkdtemp(name.data()) != nullptr) folder_ = name;
    port_ = FreePort();
    peer_port_ = FreePort();
  }
  bool Run() {
    Launch();
    return AwaitReady();
  }
  static int FreePort() {
    const OwnedFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return 0;
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.sin_port);
  }

  const std::vector<std::string> options_;
  std::string folder_;
  int port_ = 0;
  int peer_port_ = 0;
  pid_t pid_ = -1;
};

}  // namespace forebay::control::testing
