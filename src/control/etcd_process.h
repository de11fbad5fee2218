// A real etcd for tests: on loopback, with ports and a data folder of its own, stopped by its pid.
// With Certificates by TLS, with users after SetUsers.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/owned.h"
#include "control/certificates_testing.h"
#include "control/etcd_store.h"
#include "control/http.h"

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
    return StartWith(std::move(options), {});
  }
  // By TLS, with the certificate `server`; `mutual`: clients must have one, too. `more`: options.
  static std::unique_ptr<EtcdProcess> StartTls(const Certificates& certificates, bool mutual,
                                               const std::string& server = "server",
                                               std::vector<std::string> more = {}) {
    std::vector<std::string> options = std::move(more);
    options.push_back("--cert-file=" + certificates.Cert(server));
    options.push_back("--key-file=" + certificates.Key(server));
    options.push_back("--bcrypt-cost=4");
    EtcdAccess access;
    access.ca_file = certificates.Cert("ca");
    if (mutual) {
      options.push_back("--client-cert-auth");
      options.push_back("--trusted-ca-file=" + certificates.Cert("ca"));
      access.cert_file = certificates.Cert("client");
      access.key_file = certificates.Key("client");
    }
    return StartWith(std::move(options), std::move(access), server != "server");
  }

  // Members of one etcd; empty when they do not come up.
  static std::vector<std::unique_ptr<EtcdProcess>> StartCluster(int members) {
    std::vector<std::unique_ptr<EtcdProcess>> all;
    for (int attempt = 0; attempt < 5; ++attempt) {
      all.clear();
      std::string names;
      for (int i = 0; i < members; ++i) {
        all.emplace_back(new EtcdProcess({}, {}, false));
        names += StrCat(i == 0 ? "" : ",", "m", i, "=http://127.0.0.1:", all[i]->peer_port_);
      }
      for (int i = 0; i < members; ++i) {
        all[i]->options_ = {StrCat("--name=m", i), "--initial-cluster=" + names};
        all[i]->Launch();
      }
      if (std::ranges::all_of(all, [](const auto& one) { return one->AwaitReady(); })) return all;
    }
    all.clear();
    return all;
  }

  ~EtcdProcess() {
    Kill();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  bool tls() const { return !access_.ca_file.empty(); }
  std::string endpoint() const {
    return StrCat(tls() ? "https://127.0.0.1:" : "http://127.0.0.1:", port_);
  }
  std::string host_port() const { return StrCat("127.0.0.1:", port_); }
  // How to reach it.
  EtcdOptions options(Nanos deadline) const {
    EtcdOptions options;
    options.endpoints = {endpoint()};
    options.access = access_;
    options.deadline = deadline;
    return options;
  }

  // From now on it asks for a user: root, with the password "root's", or the one of options().
  bool SetUsers() {
    const bool set = Post("user/add", R"({"name":"root","password":"root's"})") &&
                     Post("role/add", R"({"name":"root"})") &&
                     Post("user/grant", R"({"user":"root","role":"root"})") &&
                     Post("user/add", R"({"name":"forebay","password":"pass \"word\" 1"})") &&
                     Post("role/add", R"({"name":"keys"})") && Grant() &&
                     Post("user/grant", R"({"user":"forebay","role":"keys"})") &&
                     Post("enable", "{}");
    access_.user = "forebay";
    access_.password = "pass \"word\" 1";
    return set;
  }
  // Whether it leads its cluster.
  bool Leads() const {
    const Nanos until = SteadyClock().Now() + 5 * kSecond;
    const auto connection =
        HttpConnection::Connect(*HttpEndpoint::Parse(endpoint()), access_.Tls(), until);
    if (!connection || !(*connection)->Post("/v3/maintenance/status", "{}", until)) return false;
    const auto answer = (*connection)->WholeBody(until);
    const auto json = answer ? JsonValue::Parse(*answer) : Result<JsonValue>(answer.error());
    if (!json || json->Find("leader") == nullptr || json->Find("header") == nullptr) return false;
    const JsonValue* own = json->Find("header")->Find("member_id");
    const JsonValue* leader = json->Find("leader");
    return own != nullptr && own->text() != nullptr && leader->text() != nullptr &&
           *own->text() == *leader->text();
  }

  // Changes the users' rights, which makes signed tokens that were given before out of date.
  bool ChangeRights() { return Post("role/add", R"({"name":"more"})"); }

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
    const auto store = EtcdStore::Make(options(kSecond));
    if (!store) return false;
    for (int i = 0; i < 600; ++i) {
      const auto answer = (*store)->Range("ready");
      // One whose certificate is for another name never does better.
      if (answer || (misnamed_ && answer.error().message().find("TLS") != std::string::npos)) {
        return true;
      }
      if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
    }
    return false;
  }

 private:
  static std::unique_ptr<EtcdProcess> StartWith(std::vector<std::string> options, EtcdAccess access,
                                                bool misnamed = false) {
    // A free port may be taken by another before etcd has it.
    for (int attempt = 0; attempt < 5; ++attempt) {
      auto etcd = std::unique_ptr<EtcdProcess>(new EtcdProcess(options, access, misnamed));
      if (etcd->Run()) return etcd;
    }
    return nullptr;
  }
  EtcdProcess(std::vector<std::string> options, EtcdAccess access, bool misnamed)
      : options_(std::move(options)), access_(std::move(access)), misnamed_(misnamed) {
    std::string name = std::filesystem::temp_directory_path() / "forebay-etcd-XXXXXX";
    if (::mkdtemp(name.data()) != nullptr) folder_ = name;
    port_ = FreePort();
    peer_port_ = FreePort();
  }
  bool Grant() {
    // All keys.
    return Post("role/grant", R"({"name":"keys","perm":{"permType":"READWRITE","key":"AA==",)"
                              R"("range_end":"AA=="}})");
  }
  // As root, once there is one.
  bool Post(const std::string& what, const std::string& body) {
    const Nanos until = SteadyClock().Now() + 30 * kSecond;
    const HttpEndpoint at = *HttpEndpoint::Parse(endpoint());
    const auto connection = HttpConnection::Connect(at, access_.Tls(), until);
    if (!connection) return false;
    if (!access_.user.empty()) {
      const auto code =
          (*connection)
              ->Post("/v3/auth/authenticate", R"({"name":"root","password":"root's"})", until);
      const auto answer = (*connection)->WholeBody(until);
      if (!code || !answer) return false;
      const auto json = JsonValue::Parse(*answer);
      if (!json || json->Find("token") == nullptr) return false;
      (*connection)->SetAuthorization(*json->Find("token")->text());
    }
    const auto code = (*connection)->Post("/v3/auth/" + what, body, until);
    return code && *code == 200;
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

  std::vector<std::string> options_;
  EtcdAccess access_;
  const bool misnamed_;
  std::string folder_;
  int port_ = 0;
  int peer_port_ = 0;
  pid_t pid_ = -1;
};

}  // namespace forebay::control::testing
