// How an etcd is reached: by TLS, and as whom.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "transport/tls_client.h"

namespace forebay::control {

struct EtcdAccess {
  std::string ca_file;    // PEM, for https endpoints; empty: the authorities that the system trusts
  std::string cert_file;  // PEM, of this client; empty: none
  std::string key_file;
  std::string user;      // empty: etcd asks for none
  std::string password;  // stands in no message, whatever happens

  // `get(name)`: an environment variable. FOREBAY_ETCD_CACERT, _CERT, _KEY, _USER, and _PASSWORD or
  // _PASSWORD_FILE, a file that only this user can read. What makes no sense is an error that names
  // the variable.
  using GetEnv = std::function<std::optional<std::string>(std::string_view name)>;
  static Result<EtcdAccess> FromEnvironment(const GetEnv& get);
  // Of this process.
  static Result<EtcdAccess> FromEnvironment();

  tcp::TlsClientOptions Tls() const;
};

}  // namespace forebay::control
