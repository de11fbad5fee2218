// The store in etcd, through the JSON gateway that every etcd (3.4 and later) has on its client
// port.
//
// A call goes to one endpoint over a connection that is kept; when that fails, to the next one,
// until its deadline. All calls may be repeated without harm, so an answer that was lost costs
// nothing but a lease that nobody uses and that ends by itself.
//
// By TLS where the endpoint is https. With a user, a token that etcd gives for the password goes
// with each call; one that etcd has forgotten (after a restart, or five minutes without a call) is
// asked for again.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "control/etcd_access.h"
#include "control/http.h"
#include "control/store.h"

namespace forebay::control {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // https://host:port, http://host:port
  EtcdAccess access;
  Nanos deadline = 2 * kSecond;    // of each call, retries included
  size_t max_txn_ops = 128;        // etcd's --max-txn-ops
  size_t max_txn_bytes = 1 << 20;  // below etcd's --max-request-bytes, 1.5 MiB

  Status Validate() const;
};

class EtcdStore final : public ControlStore {
 public:
  // Connects at the first call: an etcd that is not there yet is no error here.
  // Files of certificates that cannot be used are.
  static Result<std::unique_ptr<EtcdStore>> Make(EtcdOptions options);
  // With the access that this process' environment tells.
  static Result<std::unique_ptr<EtcdStore>> Open(std::vector<std::string> endpoints,
                                                 Nanos deadline);

  Status PutMany(std::span<const StoreWrite> writes, const Fence* fence = nullptr) override;
  Result<StoreSnapshot> Range(std::string_view prefix) override;
  Status Delete(std::string_view key) override;
  Result<LeaseId> GrantLease(Nanos ttl) override;
  Status KeepAlive(LeaseId lease) override;
  Status Revoke(LeaseId lease) override;
  // Has a connection of its own, and the store's deadline for making it; first to the endpoint that
  // has answered last.
  Result<std::unique_ptr<StoreWatch>> Watch(std::string_view prefix, int64_t revision) override;
  Result<Leadership> Campaign(std::string_view election, std::string_view name,
                              LeaseId lease) override;
  Result<std::optional<Leadership>> Leader(std::string_view election) override;
  Status Compact(int64_t revision) override;
  bool shared() const override { return true; }
  std::string Describe() const override;
  // What its user should know, once: who could read the password on its way. Empty: nothing.
  std::string Warning() const;

 private:
  EtcdStore(EtcdOptions options, std::vector<HttpEndpoint> endpoints)
      : options_(std::move(options)), endpoints_(std::move(endpoints)) {}

  Result<JsonValue> Call(std::string_view path, std::string_view body);
  // One attempt at the current endpoint.
  Result<JsonValue> Try(std::string_view path, std::string_view body, Nanos until);

  const EtcdOptions options_;
  const std::vector<HttpEndpoint> endpoints_;
  size_t current_ = 0;
  std::unique_ptr<HttpConnection> connection_;
  std::string token_;  // empty: none yet, or etcd has forgotten it
};

}  // namespace forebay::control
