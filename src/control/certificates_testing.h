// Certificates for tests, by the openssl program: an authority, another one, and what they sign.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/status.h"

namespace forebay::control::testing {

class Certificates {
 public:
  // ok() tells whether they could be made.
  Certificates() {
    std::string name = std::filesystem::temp_directory_path() / "forebay-certs-XXXXXX";
    if (::mkdtemp(name.data()) != nullptr) folder_ = name;
    ok_ = Authority("ca") && Authority("other") &&
          // etcd reaches its own gateway by it, as a client without a name.
          Sign("server", "ca", "subjectAltName=IP:127.0.0.1") &&
          Sign("elsewhere", "ca", "subjectAltName=DNS:elsewhere.example") &&
          Sign("client", "ca", "subjectAltName=DNS:client") &&
          Sign("stranger", "other", "subjectAltName=DNS:client");
  }
  ~Certificates() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  bool ok() const { return ok_; }
  const std::string& folder() const { return folder_; }
  std::string Cert(const std::string& name) const { return StrCat(folder_, "/", name, ".pem"); }
  std::string Key(const std::string& name) const { return StrCat(folder_, "/", name, ".key"); }

 private:
  bool Authority(const std::string& name) const {
    return Request(
        name, {"-subj", "/O=forebay test " + name, "-addext", "basicConstraints=critical,CA:TRUE",
               "-addext", "keyUsage=critical,keyCertSign,cRLSign"});
  }
  bool Sign(const std::string& name, const std::string& by, const std::string& names) const {
    return Request(name, {"-subj", "/O=forebay test", "-CA", Cert(by), "-CAkey", Key(by), "-addext",
                          "basicConstraints=critical,CA:FALSE", "-addext",
                          "extendedKeyUsage=serverAuth,clientAuth", "-addext", names});
  }
  bool Request(const std::string& name, const std::vector<std::string>& more) const {
    std::vector<std::string> words = {
        "openssl", "req",     "-x509",     "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes",  "-config", "/dev/null", "-days",   "2",  "-keyout",  Key(name),
        "-out",    Cert(name)};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
      const int out = ::open("/dev/null", O_WRONLY);
      ::dup2(out, 1);
      ::dup2(out, 2);
      ::execvp("openssl", argv.data());
      ::_exit(127);
    }
    int status = 0;
    return pid > 0 && ::waitpid(pid, &status, 0) == pid && status == 0 &&
           ::chmod(Key(name).c_str(), 0600) == 0;
  }

  std::string folder_;
  bool ok_ = false;
};

}  // namespace forebay::control::testing
