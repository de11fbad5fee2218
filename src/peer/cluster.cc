#include "peer/cluster.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <set>
#include <utility>

#include "control/http.h"
#include "peer/secret.h"

namespace forebay::peer {
namespace {

constexpr size_t kLongestText = 1024;

Status Wrong(std::string_view name, std::string_view value, std::string_view why) {
  return Status(Code::kInvalidArgument, StrCat(name, "=", value.substr(0, 200), ": ", why));
}

// Digits only, up to `most`.
std::optional<uint32_t> Number(std::string_view text, uint32_t most) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value > most) {
    return std::nullopt;
  }
  return value;
}

// The environment, with the first variable that made no sense.
class Variables {
 public:
  explicit Variables(const GetEnv& get) : get_(get) {}

  std::string Text(std::string_view name) {
    std::optional<std::string> value = get_(name);
    if (!value) return "";
    if (value->size() > kLongestText * 64) {
      Fail(Wrong(name, *value, "is too long"));
      return "";
    }
    return *std::move(value);
  }
  // None: it is not set, or it is wrong.
  std::optional<uint32_t> Count(std::string_view name, uint32_t most) {
    const std::string text = Text(name);
    if (text.empty()) return std::nullopt;
    const std::optional<uint32_t> value = Number(text, most);
    if (!value) Fail(Wrong(name, text, StrCat("is no number from 0 to ", most)));
    return value;
  }
  void Fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  const Status& status() const { return status_; }

 private:
  const GetEnv& get_;
  Status status_;
};

// What a launcher says.
struct LauncherInfo {
  bool known = false;  // which node this is, of how many
  uint32_t node = 0;
  uint32_t nodes = 1;
  std::string job;
  std::string host;  // of node 0
  std::string source;
  std::string question;  // what is open, in words
};

constexpr uint32_t kMostRanks = 1 << 20;

// Node and count from ranks, where all nodes have as many.
void FromRanks(uint32_t rank, uint32_t size, std::optional<uint32_t> local_size,
               std::optional<uint32_t> local_rank, LauncherInfo* info) {
  constexpr std::string_view kRemedy = "; set FOREBAY_NODE and FOREBAY_NODES for peers";
  if (size <= 1) {
    info->known = true;
    return;
  }
  if (!local_size || *local_size == 0) {
    info->question = StrCat("they do not tell how many ranks a node has", kRemedy);
    return;
  }
  if (rank >= size || *local_size > size) {
    info->question =
        StrCat("rank ", rank, " of ", size, " with ", *local_size, " on a node cannot be", kRemedy);
    return;
  }
  const uint32_t nodes = size / *local_size;
  if (size % *local_size != 0) {
    info->question = StrCat("the nodes have different numbers of ranks", kRemedy);
    return;
  }
  if (!local_rank || rank % *local_size == *local_rank) {
    info->node = rank / *local_size;
  } else if (rank / nodes == *local_rank) {  // dealt out node by node
    info->node = rank % nodes;
  } else {
    info->question = StrCat("ranks are neither in blocks nor in turn on the nodes", kRemedy);
    return;
  }
  info->nodes = nodes;
  info->known = true;
}

// What an MPI launcher tells; nothing: it has not started this process. `mpirun` in a SLURM job
// starts its own daemons by srun, on all nodes but the first: what SLURM's variables tell of a step
// is then of these, and only the job is of use.
std::optional<LauncherInfo> FromMpi(Variables& get) {
  LauncherInfo info;
  const auto local_size = get.Count("MPI_LOCALNRANKS", kMostRanks);
  if (const auto rank = get.Count("OMPI_COMM_WORLD_RANK", kMostRanks)) {
    info.source = "Open MPI's variables";
    FromRanks(*rank, get.Count("OMPI_COMM_WORLD_SIZE", kMostRanks).value_or(1),
              get.Count("OMPI_COMM_WORLD_LOCAL_SIZE", kMostRanks),
              get.Count("OMPI_COMM_WORLD_LOCAL_RANK", kMostRanks), &info);
  } else if (const auto pmi = get.Count("PMI_RANK", kMostRanks);
             // srun sets the rank, too, and tells the rest by variables of its own.
             pmi && (local_size || get.Text("SLURM_NODEID").empty())) {
    info.source = "MPI's variables";
    FromRanks(*pmi, get.Count("PMI_SIZE", kMostRanks).value_or(1), local_size,
              get.Count("MPI_LOCALRANKID", kMostRanks), &info);
  } else {
    return std::nullopt;
  }
  const std::string slurm = get.Text("SLURM_JOB_ID");
  const std::string name = get.Text("PMIX_NAMESPACE");
  if (!slurm.empty()) info.job = StrCat("slurm-", slurm);
  if (!name.empty()) info.job += StrCat(info.job.empty() ? "mpi-" : "-mpi-", name);
  info.host = FirstHost(get.Text("SLURM_JOB_NODELIST"));
  return info;
}

LauncherInfo FromSlurm(Variables& get) {
  LauncherInfo info;
  info.source = "SLURM's variables";
  const auto node = get.Count("SLURM_NODEID", kMostNodes - 1);
  auto nodes = get.Count("SLURM_STEP_NUM_NODES", kMostNodes);
  if (!nodes) nodes = get.Count("SLURM_NNODES", kMostNodes);
  if (!nodes) nodes = get.Count("SLURM_JOB_NUM_NODES", kMostNodes);
  const std::string step = get.Text("SLURM_STEP_ID");
  info.job = get.Text("SLURM_JOB_ID");
  if (!info.job.empty() && !step.empty()) info.job += StrCat(".", step);
  if (!info.job.empty()) info.job = StrCat("slurm-", info.job);
  std::string list = get.Text("SLURM_STEP_NODELIST");
  if (list.empty()) list = get.Text("SLURM_JOB_NODELIST");
  if (list.empty()) list = get.Text("SLURM_NODELIST");
  info.host = FirstHost(list);
  if (!list.empty() && info.host.empty()) {
    get.Fail(Wrong("SLURM_JOB_NODELIST", list, "is no list of hosts"));
  }
  // The script of sbatch is one process on the first of the job's nodes; srun starts the others.
  if (get.Text("ENVIRONMENT") == "BATCH" && step.empty()) {
    info.known = true;
    return info;
  }
  if (node && nodes) {
    info.known = true;
    info.node = *node;
    info.nodes = *nodes;
    if (*node >= std::max(1u, *nodes)) {
      get.Fail(Wrong("SLURM_NODEID", StrCat(*node), StrCat("there are ", *nodes, " nodes")));
    }
  }
  return info;
}

LauncherInfo FromLauncher(Variables& get) {
  const std::optional<LauncherInfo> mpi = FromMpi(get);
  LauncherInfo batch = mpi ? *mpi : FromSlurm(get);
  const std::string master = get.Text("MASTER_ADDR");
  LauncherInfo info;
  if (const auto group = get.Count("GROUP_RANK", kMostNodes - 1)) {
    info.source = "torchrun's variables";
    const auto groups = get.Count("GROUP_WORLD_SIZE", kMostNodes);
    if (groups) {
      info.known = true;
      info.node = *group;
      info.nodes = *groups;
      if (*group >= std::max(1u, *groups)) {
        get.Fail(Wrong("GROUP_RANK", StrCat(*group), StrCat("GROUP_WORLD_SIZE is ", *groups)));
      }
    } else {
      info.question = "GROUP_WORLD_SIZE is not set";
    }
  } else if (mpi || batch.known) {
    info = batch;
  } else if (const auto plain = get.Count("RANK", kMostRanks); plain && !master.empty()) {
    info.source = "RANK and WORLD_SIZE";
    FromRanks(*plain, get.Count("WORLD_SIZE", kMostRanks).value_or(1),
              get.Count("LOCAL_WORLD_SIZE", kMostRanks), get.Count("LOCAL_RANK", kMostRanks),
              &info);
    // Most often processes that started each other on one host: nothing to tell of.
    if (!info.known) info.question.clear();
  } else {
    info.source = "no launcher's variables";
  }
  // The user's word counts more.
  const auto node = get.Count("FOREBAY_NODE", kMostNodes - 1);
  const auto nodes = get.Count("FOREBAY_NODES", kMostNodes);
  if (node && nodes) {
    info.known = true;
    info.question.clear();
    info.node = *node;
    info.nodes = *nodes;
    info.source = "FOREBAY_NODE and FOREBAY_NODES";
    if (*node >= std::max(1u, *nodes)) {
      get.Fail(Wrong("FOREBAY_NODE", StrCat(*node), StrCat("FOREBAY_NODES is ", *nodes)));
    }
  }
  // Jobs, from the most telling name to the least.
  const std::string run = get.Text("TORCHELASTIC_RUN_ID");
  if (!run.empty() && run != "none") {
    info.job = StrCat("torchrun-", run);
  } else {
    info.job = batch.job;
  }
  if (info.job.empty()) info.job = get.Text("FOREBAY_JOB");
  if (info.job.empty() && !master.empty()) {
    info.job = StrCat(master, ":", get.Text("MASTER_PORT"));
  }
  info.host = !master.empty() ? master : batch.host;
  return info;
}

// The same on all nodes: they have the same job and the same MASTER_PORT.
uint16_t DefaultPort(const std::string& job, std::optional<uint32_t> master_port) {
  const Digest digest = Sha256(std::as_bytes(std::span(job.data(), job.size())));
  const uint32_t hash =
      std::to_integer<uint32_t>(digest[0]) << 8 | std::to_integer<uint32_t>(digest[1]);
  uint32_t place = hash % kPortRange;
  if (master_port && kDefaultPort + place == *master_port) place = (place + 1) % kPortRange;
  return static_cast<uint16_t>(kDefaultPort + place);
}

Status ParseStatic(const std::string& text, std::optional<uint32_t> port, ClusterSpec* spec) {
  std::set<std::string> seen;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view one = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    Result<HostPort> at = ParseHostPort(one);
    if (!at && port) at = ParseHostPort(StrCat(one, ":", *port));
    if (!at) {
      return Wrong("FOREBAY_PEERS", text,
                   StrCat("'", one,
                          "' is not host:port; write off, auto, etcds://host:port, or "
                          "host:port,host:port,... by node"));
    }
    if (!seen.insert(at->ToString()).second) {
      return Wrong("FOREBAY_PEERS", text, StrCat("'", one, "' stands there twice"));
    }
    spec->nodes_at.push_back(at->ToString());
    if (spec->nodes_at.size() > kMostNodes) return Wrong("FOREBAY_PEERS", text, "too many nodes");
  }
  return Status();
}

}  // namespace

std::string FirstHost(std::string_view nodelist) {
  const size_t stop = nodelist.find_first_of("[,");
  std::string host(nodelist.substr(0, stop));
  if (stop != std::string_view::npos && nodelist[stop] == '[') {
    std::string_view rest = nodelist.substr(stop);
    // Several brackets: "rack[1-2]n[01-04]". The first number of each.
    while (rest.starts_with('[')) {
      const size_t close = rest.find(']');
      if (close == std::string_view::npos) return "";
      const std::string_view inside = rest.substr(1, close - 1);
      const std::string_view first = inside.substr(0, inside.find_first_of("-,"));
      if (!Number(first, UINT32_MAX)) return "";
      host += first;  // with its zeros
      rest.remove_prefix(close + 1);
      const size_t next = std::min(rest.find_first_of("[,"), rest.size());
      host += rest.substr(0, next);
      rest.remove_prefix(next);
    }
  }
  return PlainHost(host) && host.find(':') == std::string::npos ? host : "";
}

Status ClusterSpec::Validate() const {
  const auto wrong = [](std::string why) { return Status(Code::kInvalidArgument, std::move(why)); };
  if (nodes < 1 || nodes > kMostNodes) {
    return wrong(StrCat("a cluster has 1 to ", kMostNodes, " nodes, not ", nodes));
  }
  if (node >= nodes) return wrong(StrCat("there is no node ", node, " of ", nodes));
  if (job.size() > kLongestText) return wrong("the job's name is too long");
  switch (method) {
    case Method::kNone:
      return Status();
    case Method::kLauncher:
      if (!ParseHostPort(master)) return wrong(StrCat("'", master, "' is not host:port of node 0"));
      return Status();
    case Method::kStatic:
      if (nodes_at.size() != nodes) {
        return wrong(StrCat("there are ", nodes_at.size(), " addresses for ", nodes, " nodes"));
      }
      for (const std::string& at : nodes_at) {
        if (!ParseHostPort(at)) return wrong(StrCat("'", at, "' is not host:port"));
      }
      return Status();
    case Method::kEtcd:
      for (const std::string& endpoint : EtcdEndpoints()) {
        const auto parsed = control::HttpEndpoint::Parse(endpoint);
        if (!parsed) return parsed.error();
      }
      return Status();
  }
  return wrong("no such method");
}

std::vector<std::string> ClusterSpec::EtcdEndpoints() const {
  std::vector<std::string> endpoints;
  size_t begin = 0;
  while (begin <= etcd.size()) {
    const size_t end = std::min(etcd.find(',', begin), etcd.size());
    endpoints.push_back(StrCat(etcd_tls ? "https://" : "http://",
                               std::string_view(etcd).substr(begin, end - begin)));
    begin = end + 1;
  }
  return endpoints;
}

Result<ClusterSpec> ClusterFromEnvironment(const GetEnv& get, std::string_view suffix) {
  Variables variables(get);
  ClusterSpec spec;
  const std::string peers = variables.Text("FOREBAY_PEERS");
  if (peers == "off" || peers == "0" || peers == "none") {
    spec.source = "FOREBAY_PEERS=off";
    return spec;
  }
  constexpr std::string_view kEtcd = "etcd://";
  constexpr std::string_view kEtcdTls = "etcds://";
  const bool automatic = peers.empty() || peers == "auto";
  const bool etcd_tls = peers.starts_with(kEtcdTls);
  const bool etcd = peers.starts_with(kEtcd) || etcd_tls;
  const auto port = variables.Count("FOREBAY_PEER_PORT", UINT16_MAX);
  if (port == 0u) variables.Fail(Wrong("FOREBAY_PEER_PORT", "0", "is no port from 1 to 65535"));
  spec.listen = variables.Text("FOREBAY_PEER_LISTEN");
  spec.secret_file = variables.Text("FOREBAY_PEER_SECRET");
  const LauncherInfo info = FromLauncher(variables);
  if (!variables.status().ok()) return variables.status();
  if (!info.job.empty()) spec.job = StrCat(info.job, suffix);
  spec.source = info.source;

  if (!automatic && !etcd) {
    FOREBAY_RETURN_IF_ERROR(ParseStatic(peers, port, &spec));
    spec.nodes = static_cast<uint32_t>(spec.nodes_at.size());
    const auto node = variables.Count("FOREBAY_NODE", kMostNodes - 1);
    if (node) {
      spec.node = *node;
    } else if (info.known && info.nodes == spec.nodes) {
      spec.node = info.node;
    } else if (spec.nodes > 1) {
      return Status(Code::kInvalidArgument,
                    StrCat("FOREBAY_PEERS lists ", spec.nodes,
                           " nodes; set FOREBAY_NODE to the place of this one in it, from 0"));
    }
    if (!variables.status().ok()) return variables.status();
    if (spec.node >= spec.nodes) {
      return Wrong("FOREBAY_NODE", StrCat(spec.node),
                   StrCat("FOREBAY_PEERS lists ", spec.nodes, " nodes"));
    }
    spec.source = "FOREBAY_PEERS' list";
    if (spec.job.empty()) spec.job = StrCat(peers, suffix);
    if (spec.nodes > 1) spec.method = ClusterSpec::Method::kStatic;
  } else {
    if (!info.known) {
      if (etcd) {
        return Status(
            Code::kInvalidArgument,
            StrCat(
                "FOREBAY_PEERS=", peers, " needs FOREBAY_NODE and FOREBAY_NODES",
                info.question.empty() ? "" : StrCat(" (", info.source, ": ", info.question, ")")));
      }
      if (!info.question.empty()) spec.open = StrCat(info.source, ": ", info.question);
      return spec;
    }
    if (info.nodes <= 1) return spec;
    spec.node = info.node;
    spec.nodes = info.nodes;
    if (etcd) {
      spec.method = ClusterSpec::Method::kEtcd;
      spec.etcd = peers.substr((etcd_tls ? kEtcdTls : kEtcd).size());
      spec.etcd_tls = etcd_tls;
      spec.source = StrCat("etcd, and ", info.source);
      if (spec.job.empty()) spec.job = StrCat("default", suffix);
    } else if (info.host.empty()) {
      spec.node = 0;
      spec.nodes = 1;
      spec.open = StrCat(info.source, " do not tell where node 0 is; set MASTER_ADDR for peers");
      return spec;
    } else {
      const auto master_port = variables.Count("MASTER_PORT", UINT16_MAX);
      if (!variables.status().ok()) return variables.status();
      if (port && port == master_port) {
        return Wrong("FOREBAY_PEER_PORT", StrCat(*port), "is MASTER_PORT, which is PyTorch's own");
      }
      std::string host = info.host;
      if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        host = host.substr(1, host.size() - 2);
      }
      if (!PlainHost(host)) return Wrong("MASTER_ADDR", info.host, "is no host");
      spec.method = ClusterSpec::Method::kLauncher;
      const uint16_t chosen =
          port ? static_cast<uint16_t>(*port) : DefaultPort(spec.job, master_port);
      spec.master = HostPort{host, chosen}.ToString();
    }
  }
  spec.job = spec.job.substr(0, kLongestText);
  FOREBAY_RETURN_IF_ERROR(spec.Validate());
  return spec;
}

Result<ClusterSpec> ClusterFromEnvironment() {
  return ClusterFromEnvironment([](std::string_view name) -> std::optional<std::string> {
    const char* value = std::getenv(std::string(name).c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

}  // namespace forebay::peer
