#include "control/etcd_access.h"

#include <cstdlib>
#include <utility>

#include "base/trusted_files.h"

namespace forebay::control {
namespace {

constexpr std::string_view kCa = "FOREBAY_ETCD_CACERT";
constexpr std::string_view kCert = "FOREBAY_ETCD_CERT";
constexpr std::string_view kKey = "FOREBAY_ETCD_KEY";
constexpr std::string_view kUser = "FOREBAY_ETCD_USER";
constexpr std::string_view kPassword = "FOREBAY_ETCD_PASSWORD";
constexpr std::string_view kPasswordFile = "FOREBAY_ETCD_PASSWORD_FILE";
constexpr size_t kLongestPassword = 4096;

Status Inconsistent(std::string why) { return Status(Code::kInvalidArgument, std::move(why)); }

}  // namespace

Result<EtcdAccess> EtcdAccess::FromEnvironment(const GetEnv& get) {
  const auto text = [&](std::string_view name) { return get(name).value_or(""); };
  EtcdAccess access{text(kCa), text(kCert), text(kKey), text(kUser), text(kPassword)};
  if (access.cert_file.empty() != access.key_file.empty()) {
    return Inconsistent(StrCat(kCert, " and ", kKey, " go together; set both"));
  }
  const std::string file = text(kPasswordFile);
  if (!file.empty()) {
    if (!access.password.empty()) {
      return Inconsistent(StrCat(kPassword, " and ", kPasswordFile, " are both set; unset one"));
    }
    Result<SecretText> read = ReadSecretFile(
        file, kPasswordFile, "; make it a file that only this user can read (chmod 600)",
        kLongestPassword);
    if (!read) return read.error();
    access.password = std::move(read->text);
    while (access.password.ends_with('\n') || access.password.ends_with('\r')) {
      access.password.pop_back();
    }
    if (access.password.empty()) return Inconsistent(StrCat(kPasswordFile, " ", file, " is empty"));
  }
  if (access.user.empty() != access.password.empty()) {
    return Inconsistent(
        access.user.empty()
            ? StrCat("there is a password for etcd and no user; set ", kUser)
            : StrCat(kUser, " has no password; set ", kPassword, " or ", kPasswordFile));
  }
  return access;
}

Result<EtcdAccess> EtcdAccess::FromEnvironment() {
  return FromEnvironment([](std::string_view name) -> std::optional<std::string> {
    const char* const value = std::getenv(std::string(name).c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

tcp::TlsClientOptions EtcdAccess::Tls() const {
  return {ca_file, cert_file, key_file, std::string(kCa), std::string(kCert), std::string(kKey)};
}

}  // namespace forebay::control
