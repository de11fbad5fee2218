#include "peer/start.h"

#include <atomic>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "control/etcd_store.h"
#include "peer/options.h"

namespace forebay::peer {
namespace {

// Whether an engine of this process, or of one that it was forked from, is the node.
std::atomic<bool> taken{false};

class OnlyPeers final : public Peers {
 public:
  explicit OnlyPeers(std::unique_ptr<Peers> peers) : peers_(std::move(peers)) {}
  ~OnlyPeers() override {
    peers_.reset();
    taken.store(false);
  }
  std::vector<PeerStatus> Seen() const override { return peers_->Seen(); }
  std::string Describe() const override { return peers_->Describe(); }
  std::string Trust() const override { return peers_->Trust(); }

 private:
  std::unique_ptr<Peers> peers_;
};

constexpr std::string_view kPeers = "FOREBAY_PEERS";

std::optional<std::string> FromEnvironment(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

// `wanted` goes before kPeers.
Result<PeerOptions> OptionsFor(const std::string& wanted, std::string_view suffix) {
  const auto variable = [&](std::string_view name) {
    return name == kPeers && !wanted.empty() ? std::optional(wanted) : FromEnvironment(name);
  };
  return PeerOptionsFromEnvironment(variable, suffix);
}

// Who could read its password on the way.
std::string WarningOfEtcd(const ClusterSpec& cluster) {
  if (cluster.method != ClusterSpec::Method::kEtcd) return "";
  const auto store = control::EtcdStore::Open(cluster.EtcdEndpoints(), kSecond);
  return store ? (*store)->Warning() : "";
}

}  // namespace

Result<Started> StartPeers(Engine& engine, std::string_view wanted, std::string_view suffix) {
  const std::string word =
      wanted.empty() ? FromEnvironment(kPeers).value_or("") : std::string(wanted);
  const bool asked = !word.empty() && word != "auto";
  const auto alone = [&engine](std::string_view why) {
    Started started{nullptr, StrCat("no peers: ", why), true, ""};
    ClusterReport report;
    report.health = started.note;
    engine.SetClusterReport([report] { return report; });
    return started;
  };
  Result<PeerOptions> options = OptionsFor(word, suffix);
  if (!options) {
    if (asked) return options.error();
    return alone(options.error().ToString());
  }
  if (options->cluster.method == ClusterSpec::Method::kNone) {
    if (options->cluster.open.empty()) return Started();
    return alone(options->cluster.open);
  }
  if (taken.exchange(true)) return Started();
  const std::string warning = WarningOfEtcd(options->cluster);
  Result<std::unique_ptr<Peers>> peers = Peers::Attach(engine, *options);
  if (!peers) {
    taken.store(false);
    if (asked && peers.error().code() == Code::kInvalidArgument) return peers.error();
    Started started = alone(peers.error().ToString());
    started.warning = warning;
    return started;
  }
  Started started;
  started.warning = warning;
  const std::string trust = (*peers)->Trust();
  started.note =
      StrCat("peers: ", (*peers)->Describe(), options->coordinate ? "" : "; coordination is off",
             trust.empty() ? "" : "; ", trust);
  started.peers = std::make_unique<OnlyPeers>(*std::move(peers));
  return started;
}

std::string ClusterName(std::string_view wanted, std::string_view suffix) {
  const Result<PeerOptions> options = OptionsFor(std::string(wanted), suffix);
  if (!options || options->cluster.method == ClusterSpec::Method::kNone) return "";
  return StrCat(options->cluster.job, " of ", options->cluster.nodes, " nodes");
}

bool WantsPeers(std::string_view wanted) {
  const Result<PeerOptions> options = OptionsFor(std::string(wanted), "");
  return !options || options->cluster.method != ClusterSpec::Method::kNone ||
         !options->cluster.open.empty();
}

std::shared_ptr<Engine> WithPeers(EnginePtr engine, std::unique_ptr<Peers> peers) {
  Engine* const raw = engine.get();
  return std::shared_ptr<Engine>(
      raw, [e = engine.release(), p = peers.release(), made = ForkGeneration()](Engine*) {
        if (made != ForkGeneration()) return;
        delete p;
        EngineDelete()(e);
      });
}

}  // namespace forebay::peer
