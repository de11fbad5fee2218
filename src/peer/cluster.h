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
#include "base/status.h"

namespace forebay::peer {

inline constexpr uint16_t kDefaultPort = 7421;  // rank 0's node listens here for the others

struct ClusterSpec {
  enum class Method : uint8_t {
    kNone,      // one node, or peers are off
    kLauncher,  // node 0 listens on `master`, the others register there
    kStatic,    // `nodes_at`: every node's own "host:port"
    kEtcd,
  };
  Method method = Method::kNone;
  uint32_t node = 0;   // this one
  uint32_t nodes = 1;  // of the job; at most 4096
  std::string job;     // tells jobs of one user apart: TORCHELASTIC_RUN_ID, SLURM_JOB_ID, ...
  std::string master;  // "host:port", kLauncher
  std::vector<std::string> nodes_at;  // kStatic, by node
  std::string etcd;                   // endpoint, kEtcd
  std::string listen;                 // own address for the transport; empty: the one that reaches
                                      // the others
  std::string secret_file;            // empty: in the run folder below the home folder
  std::string source;                 // in words, for reports: "torchrun's variables"

  Status Validate() const;
};

// `get(name)`: an environment variable. FOREBAY_PEERS says which: unset or "auto" (launcher's
// variables, where they tell of more than one node), "off", "etcd://host:port" (with node and count
// from the launcher or FOREBAY_NODE and FOREBAY_NODES), or "host:port,host:port,..." (static, with
// FOREBAY_NODE). FOREBAY_PEER_PORT, FOREBAY_PEER_LISTEN, FOREBAY_PEER_SECRET change single fields.
// A variable that makes no sense is an error that names it.
using GetEnv = std::function<std::optional<std::string>(std::string_view name)>;
Result<ClusterSpec> ClusterFromEnvironment(const GetEnv& get);

}  // namespace forebay::peer
