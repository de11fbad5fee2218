// What a process knows of its cluster before it has talked to anyone: from the launcher's
// variables (torchrun, SLURM, MPI), or from the user (a static list, etcd).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/host_port.h"
#include "base/status.h"
#include "core/view.h"

namespace forebay::peer {

// Node 0 listens for the others on this port or one of the next kPortRange, by the job's name: two
// jobs of a user may have the same node 0.
inline constexpr uint16_t kDefaultPort = 7421;
inline constexpr uint16_t kPortRange = 512;

struct ClusterSpec {
  enum class Method : uint8_t {
    kNone,      // one node, or peers are off
    kLauncher,  // node 0 listens on `master`, the others register there
    kStatic,    // `nodes_at`: every node's own "host:port"
    kEtcd,
  };
  Method method = Method::kNone;
  uint32_t node = 0;   // this one
  uint32_t nodes = 1;  // of the job; at most kMostNodes
  std::string job;     // tells jobs of one user apart: TORCHELASTIC_RUN_ID, SLURM_JOB_ID, ...
  std::string master;  // "host:port", kLauncher
  std::vector<std::string> nodes_at;  // kStatic, by node
  std::string etcd;                   // "host:port,host:port", kEtcd
  bool etcd_tls = false;              // "etcds://"
  std::string listen;                 // own address for the transport; empty: the one that reaches
                                      // the others (OwnHost of membership_hosts.h finds it)
  std::string secret_file;            // empty: in the run folder below the home folder
  std::string source;                 // in words, for reports: "torchrun's variables"
  std::string open;                   // kNone, because a launcher left this open, in words

  Status Validate() const;
  std::vector<std::string> EtcdEndpoints() const;  // "https://host:port"
};

// `get(name)`: an environment variable. FOREBAY_PEERS says which: unset or "auto" (launcher's
// variables, where they tell of more than one node), "off", "etcd://host:port" or, by TLS,
// "etcds://host:port" (with node and count from the launcher or FOREBAY_NODE and FOREBAY_NODES), or
// "host:port,host:port,..." (static, with FOREBAY_NODE). FOREBAY_PEER_PORT, FOREBAY_PEER_LISTEN,
// FOREBAY_PEER_SECRET change single fields. A variable that makes no sense is an error that names
// it; launcher's variables that leave open which node this is, or where node 0 is, give kNone and
// say so in `open`. `suffix` is added to the job's name: engines of a job that differ in it are no
// peers of each other.
using GetEnv = std::function<std::optional<std::string>(std::string_view name)>;
Result<ClusterSpec> ClusterFromEnvironment(const GetEnv& get, std::string_view suffix = "");
// Of this process.
Result<ClusterSpec> ClusterFromEnvironment();

// The first host of SLURM's compact list: "n[01-04,7],m3" gives "n01". Empty: it is no list.
std::string FirstHost(std::string_view nodelist);

}  // namespace forebay::peer
