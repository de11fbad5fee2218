#include "sim/peer_sim.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/directory.h"
#include "core/locality.h"
#include "core/route.h"

namespace forebay::sim {
namespace {

constexpr double kMb = 1 << 20;
constexpr uint64_t kMostBits = uint64_t{8} << 30;

class Cluster {
 public:
  Cluster(Simulation& simulation, const PeerRules& rules)
      : simulation_(simulation), scenario_(simulation.scenario()), rules_(rules) {
    const Scenario& s = scenario_;
    lengths_.resize(s.samples);
    for (SampleId i = 0; i < s.samples; ++i) {
      lengths_[i] = static_cast<uint32_t>(simulation.SizeMb(i) * kMb);
      dataset_bytes_ += lengths_[i];
    }
    if (!s.tiers.empty()) memory_ = static_cast<uint64_t>(s.tiers[0].mb * kMb);
    if (s.tiers.size() > 1) folder_ = static_cast<uint64_t>(s.tiers[1].mb * kMb);
  }

  void Begin(uint32_t nodes) {
    nodes_.resize(nodes);
    for (Node& node : nodes_) node.held.resize(lengths_.size());
    // Reports of every node count, so the directory is nobody's own.
    directory_.emplace(peer::kNoNode, lengths_);
    peer::View view;
    view.nodes = nodes;
    for (uint32_t n = 0; n < nodes; ++n) {
      peer::Member member;
      member.node = n;
      member.memory = memory_;
      member.folder = folder_;
      view.members.push_back(member);
    }
    directory_->OnView(view);
    reach_.assign(nodes, peer::Reach::kReady);
    for (uint32_t n = 0; n < nodes; ++n) {
      Node& node = nodes_[n];
      node.homes_missing = directory_->home_bytes(n);
      node.evict = 0;
      if (node.bytes == 0) continue;
      for (SampleId s = 0; s < lengths_.size(); ++s) {
        if (!node.held[s]) continue;
        directory_->OnGot(n, s);
        if (directory_->Locate(s).home == n) node.homes_missing -= lengths_[s];
      }
    }
  }

  PeerEpoch Run(uint32_t epoch) {
    epoch_ = PeerEpoch();
    epoch_.nodes = static_cast<uint32_t>(nodes_.size());
    epoch_.dataset_mb = static_cast<double>(dataset_bytes_) / kMb;
    for (Node& node : nodes_) node.in = node.out = node.step_in = node.step_out = 0;
    const uint32_t world = epoch_.nodes * scenario_.ranks_per_node;
    const size_t step = size_t{world} * scenario_.batch;
    const std::span<const SampleId> order = simulation_.Order(epoch);
    Exchange exchange(world, scenario_.ranks_per_node);
    std::vector<uint32_t> owner;
    double steps_hottest = 0;
    for (size_t begin = 0; begin < order.size(); begin += step) {
      const auto batch = order.subspan(begin, std::min(step, order.size() - begin));
      owner.resize(batch.size());
      // The epoch's last ranks may have one less; who exchanges wants equal shares.
      const size_t even = rules_.locality ? batch.size() / world * world : 0;
      exchange.Assign(batch.first(even), std::span(owner).first(even));
      for (size_t i = even; i < batch.size(); ++i) owner[i] = static_cast<uint32_t>(i % world);
      for (size_t i = 0; i < batch.size(); ++i) {
        Read(owner[i] / scenario_.ranks_per_node, batch[i]);
      }
      uint64_t hottest = 0;
      for (Node& node : nodes_) {
        hottest = std::max({hottest, node.step_in, node.step_out});
        node.in += std::exchange(node.step_in, 0);
        node.out += std::exchange(node.step_out, 0);
      }
      steps_hottest += static_cast<double>(hottest);
    }
    uint64_t hottest = 0, moved = 0, read_bytes = 0;
    for (const SampleId s : order) read_bytes += lengths_[s];
    for (const Node& node : nodes_) {
      hottest = std::max({hottest, node.in, node.out});
      moved += node.in;
    }
    epoch_.peer_mb = static_cast<double>(moved) / kMb;
    if (read_bytes > 0) {
      const double mean = static_cast<double>(read_bytes) / static_cast<double>(nodes_.size());
      epoch_.hottest_link = static_cast<double>(hottest) / mean;
      epoch_.hottest_link_step = steps_hottest / mean;
    }
    return epoch_;
  }

 private:
  struct Node {
    std::vector<bool> held;
    uint64_t bytes = 0;          // of what is held
    uint64_t homes_missing = 0;  // bytes that live here and are not held yet
    SampleId evict = 0;          // where the search for a replica to give up goes on
    uint64_t in = 0, out = 0, step_in = 0, step_out = 0;
  };

  void Read(uint32_t n, SampleId s) {
    ++epoch_.reads;
    if (nodes_[n].held[s]) {
      ++epoch_.local;
      return;
    }
    if (!rules_.coordinate) {
      FromSource(s);
      if (nodes_[n].bytes + lengths_[s] <= memory_ + folder_) Hold(n, s);
      return;
    }
    const bool read_here = Get(n, s);
    // The rank's own node is the home and reads from the source: no link is used.
    if (read_here) ++epoch_.local;
    Keep(n, s);
  }

  // Brings the sample to `n` as peer::Node does; true: nothing came from another node.
  bool Get(uint32_t n, SampleId s) {
    const peer::Choice choice = peer::Choose(directory_->Locate(s), n, reach_, false);
    if (choice.to != peer::Choice::To::kPeer) {
      FromSource(s);
      return true;
    }
    if (!nodes_[choice.node].held[s]) {  // its home, which gets it for itself first
      Get(choice.node, s);
      Keep(choice.node, s);
    }
    nodes_[choice.node].step_out += lengths_[s];
    nodes_[n].step_in += lengths_[s];
    return false;
  }

  void FromSource(SampleId s) { epoch_.source_mb += static_cast<double>(lengths_[s]) / kMb; }

  void Hold(uint32_t n, SampleId s) {
    nodes_[n].held[s] = true;
    nodes_[n].bytes += lengths_[s];
    directory_->OnGot(n, s);
  }

  // What lives here before all else; replicas in the room that this leaves.
  void Keep(uint32_t n, SampleId s) {
    Node& node = nodes_[n];
    const uint64_t room = memory_ + folder_;
    if (directory_->Locate(s).home == n) {
      while (node.bytes + lengths_[s] > room && GiveUpReplica(n)) {
      }
      if (node.bytes + lengths_[s] > room) return;
      node.homes_missing -= lengths_[s];
      Hold(n, s);
    } else if (node.bytes + node.homes_missing + lengths_[s] <= room) {
      Hold(n, s);
    }
  }

  bool GiveUpReplica(uint32_t n) {
    Node& node = nodes_[n];
    for (; node.evict < lengths_.size(); ++node.evict) {
      const SampleId s = node.evict;
      if (!node.held[s] || directory_->Locate(s).home == n) continue;
      node.held[s] = false;
      node.bytes -= lengths_[s];
      directory_->OnLost(n, s);
      return true;
    }
    return false;
  }

  Simulation& simulation_;
  const Scenario& scenario_;
  const PeerRules rules_;
  std::vector<uint32_t> lengths_;
  uint64_t dataset_bytes_ = 0;
  uint64_t memory_ = 0, folder_ = 0;
  std::vector<Node> nodes_;
  std::optional<peer::Directory> directory_;
  std::vector<peer::Reach> reach_;
  PeerEpoch epoch_;
};

}  // namespace

Result<std::vector<PeerEpoch>> SimulatePeers(Simulation& simulation,
                                             std::span<const PeerPhase> phases,
                                             const PeerRules& rules, const ProgressFn& progress) {
  uint64_t epochs = 0;
  for (const PeerPhase& phase : phases) {
    if (phase.nodes == 0 || phase.nodes > peer::kMostNodes) {
      return Status(Code::kInvalidArgument,
                    StrCat("peers are 1 to ", peer::kMostNodes, " nodes, not ", phase.nodes));
    }
    if (uint64_t{phase.nodes} * simulation.scenario().samples > kMostBits) {
      return Status(Code::kInvalidArgument,
                    StrCat(phase.nodes, " nodes and ", simulation.scenario().samples,
                           " samples are too many: who holds what takes over 1 GiB"));
    }
    epochs += phase.epochs;
  }
  Cluster cluster(simulation, rules);
  std::vector<PeerEpoch> out;
  for (const PeerPhase& phase : phases) {
    cluster.Begin(phase.nodes);
    for (uint32_t e = 0; e < phase.epochs; ++e) {
      if (progress && !progress(out.size(), epochs)) {
        return Status(Code::kCancelled, "the simulation was stopped");
      }
      out.push_back(cluster.Run(static_cast<uint32_t>(out.size())));
    }
  }
  return out;
}

}  // namespace forebay::sim
