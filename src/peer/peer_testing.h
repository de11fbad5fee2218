// A cluster in one process, for tests: members by hand, engines that reach each other in memory.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/files_testing.h"
#include "base/owned.h"
#include "base/rng.h"
#include "base/thread_annotations.h"
#include "peer/node.h"
#include "source/null_source.h"
#include "transport/loopback.h"

namespace forebay::peer::testing {

// Who is there, as the test says.
class FakeRegistrar {
 public:
  explicit FakeRegistrar(uint32_t nodes) { view_.nodes = nodes; }

  void Add(const Member& member) {
    MutexLock lock(mutex_);
    std::erase_if(view_.members, [&](const Member& m) { return m.node == member.node; });
    view_.members.push_back(member);
    std::sort(view_.members.begin(), view_.members.end(),
              [](const Member& a, const Member& b) { return a.node < b.node; });
    Changed();
  }
  void SetAlive(uint32_t node, bool alive, bool suspected = false) {
    MutexLock lock(mutex_);
    for (Member& member : view_.members) {
      if (member.node != node) continue;
      member.alive = alive;
      member.suspected = suspected;
    }
    Changed();
  }
  bool alive(uint32_t node) {
    MutexLock lock(mutex_);
    return std::any_of(view_.members.begin(), view_.members.end(),
                       [&](const Member& m) { return m.node == node && m.alive; });
  }
  View Current(int fd) {
    MutexLock lock(mutex_);
    uint64_t count;
    (void)!read(fd, &count, sizeof count);
    return view_;
  }
  void Watch(int fd) {
    MutexLock lock(mutex_);
    fds_.push_back(fd);
    Signal(fd);
  }
  void Unwatch(int fd) {
    MutexLock lock(mutex_);
    std::erase(fds_, fd);
  }
  void Suspected(uint32_t node) {
    MutexLock lock(mutex_);
    ++suspected_[node];
  }
  // As a membership without its registrar.
  void Trusted(uint32_t node, uint64_t incarnation) {
    MutexLock lock(mutex_);
    for (Member& member : view_.members) {
      if (member.node != node || member.incarnation != incarnation || !member.suspected) continue;
      member.alive = true;
      member.suspected = false;
      Changed();
    }
  }
  int suspected(uint32_t node) {
    MutexLock lock(mutex_);
    return suspected_[node];
  }

 private:
  void Changed() REQUIRES(mutex_) {
    ++view_.version;
    for (const int fd : fds_) Signal(fd);
  }
  static void Signal(int fd) {
    const uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
  }

  Mutex mutex_;
  View view_ GUARDED_BY(mutex_);
  std::vector<int> fds_ GUARDED_BY(mutex_);
  std::map<uint32_t, int> suspected_ GUARDED_BY(mutex_);
};

class FakeMembership final : public Membership {
 public:
  FakeMembership(FakeRegistrar& registrar, const Member& self)
      : registrar_(registrar), fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    registrar_.Watch(fd_.get());
    registrar_.Add(self);
  }
  ~FakeMembership() override { registrar_.Unwatch(fd_.get()); }
  View Current() const override { return registrar_.Current(fd_.get()); }
  int event_fd() const override { return fd_.get(); }
  void Suspect(uint32_t node, uint64_t, const std::string&) override { registrar_.Suspected(node); }
  void Trust(uint32_t node, uint64_t incarnation) override {
    registrar_.Trusted(node, incarnation);
  }
  Status health() const override { return Status(); }
  std::string Describe() const override { return "a test"; }

 private:
  FakeRegistrar& registrar_;
  const OwnedFd fd_;
};

class PeerCluster : public ::testing::Test {
 protected:
  struct One {
    EnginePtr engine;
    std::unique_ptr<Peers> peers;
    DatasetId dataset = 0;
    StreamId stream = 0;
    SamplerSpec sampler;
  };

  void SetUp() override {
    char name[] = "/tmp/forebay_peers_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override {
    for (One& one : nodes_) {
      one.peers.reset();
      one.engine.reset();
    }
    std::filesystem::remove_all(root_);
  }

  // Samples whose bytes are FillNullSample's, in one folder.
  std::shared_ptr<const Catalog> MakeFiles(uint32_t n, uint32_t low, uint32_t high,
                                           const std::string& name = "data") {
    SplitMix64 rng(n + high);
    const std::string dir = root_ + "/" + name;
    std::filesystem::create_directories(dir);
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<std::byte> bytes(low + rng.Below(high - low + 1));
      FillNullSample(i, bytes);
      std::ofstream(StrCat(dir, "/", 100000 + i, ".bin"), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
      WrittenLongAgo(StrCat(dir, "/", 100000 + i, ".bin"));
    }
    return Open(name);
  }
  std::shared_ptr<const Catalog> Open(const std::string& name = "data") {
    auto built = BuildCatalog(root_ + "/" + name, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  PeerOptions Options(uint32_t node, uint32_t nodes) {
    PeerOptions options = options_;
    options.cluster.node = node;
    options.cluster.nodes = nodes;
    return options;
  }

  // One engine, without data sets.
  void Begin(uint32_t node, uint64_t memory) {
    One& one = nodes_[node];
    EngineOptions options = engine_options_;
    options.memory = memory;
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.status().ToString();
    one.engine = *std::move(engine);
    // Where nothing is to go wrong, a read that a busy machine holds up is not raced.
    if (options_.request_wait >= 20 * kSecond) {
      ASSERT_TRUE(one.engine->registry().SetKnob("hedge_one_in", 0).ok());
    }
    NodeParts parts = parts_;
    if (parts.secret.empty()) parts.secret = std::string(32, 's');
    if (!parts.transport) {
      parts.transport = [this, node](TransportHandler& handler) {
        return network_.Make(Name(node), handler);
      };
    }
    parts.membership = [this](const Member& self) -> Result<std::unique_ptr<Membership>> {
      return std::unique_ptr<Membership>(std::make_unique<FakeMembership>(*registrar_, self));
    };
    auto peers = AttachWith(*one.engine, Options(node, static_cast<uint32_t>(nodes_.size())),
                            std::move(parts));
    ASSERT_TRUE(peers) << peers.status().ToString();
    one.peers = *std::move(peers);
  }

  // A stream of the node's rank of all ranks.
  void Use(uint32_t node, const std::shared_ptr<const Catalog>& catalog, uint32_t batch = 8) {
    One& one = nodes_[node];
    auto dataset = one.engine->AddDataset(catalog);
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    one.dataset = *dataset;
    StreamOptions options;
    options.shape.dataset = *dataset;
    options.shape.batch_size = batch;
    options.shape.epochs = epochs_;
    options.sampler.size = static_cast<uint32_t>(catalog->size());
    options.sampler.seed = 7;
    options.sampler.world = static_cast<uint32_t>(nodes_.size());
    options.sampler.rank = node;
    one.sampler = options.sampler;
    auto stream = one.engine->OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    one.stream = *stream;
  }

  void Start(uint32_t nodes, uint64_t memory, const std::shared_ptr<const Catalog>& catalog) {
    Prepare(nodes);
    for (uint32_t node = 0; node < nodes; ++node) Begin(node, memory);
    for (uint32_t node = 0; node < nodes; ++node) Use(node, catalog);
  }
  void Prepare(uint32_t nodes) {
    nodes_.resize(nodes);
    registrar_.emplace(nodes);
  }

  static std::string Name(uint32_t node) { return StrCat("n", node); }

  // Consumes one epoch and checks order and bytes; `longest` gets the longest wait for a batch.
  // `at_half` is called once, in the middle.
  static void CheckEpoch(One& one, uint64_t epoch, Nanos* longest = nullptr,
                         const std::function<void()>& at_half = nullptr) {
    const auto order = EpochOrder(one.sampler, epoch);
    size_t at = 0;
    bool called = false;
    while (true) {
      if (at_half && !called && at >= order.size() / 2) {
        called = true;
        at_half();
      }
      BatchLoan loan;
      const Nanos start = SteadyClock().Now();
      auto taken = one.engine->Take(one.stream, 20 * kSecond, &loan);
      if (longest != nullptr) *longest = std::max(*longest, SteadyClock().Now() - start);
      ASSERT_TRUE(taken) << taken.status().ToString();
      ASSERT_NE(*taken, TakeKind::kPending) << one.engine->WaitingFor(one.stream);
      if (*taken != TakeKind::kBatch) break;
      for (size_t i = 0; i < loan.samples.size(); ++i) {
        ASSERT_EQ(loan.samples[i], order[at + i]);
        std::vector<std::byte> expected(loan.lengths[i]);
        FillNullSample(loan.samples[i], expected);
        ASSERT_EQ(
            std::memcmp(one.engine->base() + loan.offsets[i], expected.data(), expected.size()), 0)
            << "sample " << loan.samples[i];
      }
      at += loan.samples.size();
      ASSERT_TRUE(one.engine->Release(loan.lease).ok());
    }
    ASSERT_EQ(at, order.size());
  }

  // All nodes at once. `at_half` is called when node 0 is in the middle; node `out` takes no part.
  // Returns the longest wait for a batch.
  Nanos Epoch(uint64_t epoch, const std::function<void()>& at_half = nullptr,
              uint32_t out = kNoNode) {
    std::vector<std::jthread> ranks;
    std::vector<Nanos> waits(nodes_.size(), 0);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (i == out || nodes_[i].engine == nullptr) continue;
      ranks.emplace_back(
          [&, i] { CheckEpoch(nodes_[i], epoch, &waits[i], i == 0 ? at_half : nullptr); });
    }
    ranks.clear();
    return *std::max_element(waits.begin(), waits.end());
  }
  // As a process that was killed: nobody is told.
  void Kill(uint32_t node) {
    nodes_[node].peers.reset();
    nodes_[node].engine.reset();
  }

  static uint64_t Value(Engine& engine, std::string_view metric) {
    for (const Registry::Sample& sample : engine.registry().Snapshot()) {
      if (sample.name == metric) return sample.value;
    }
    ADD_FAILURE() << "no metric " << metric;
    return 0;
  }
  uint64_t Sum(std::string_view metric) {
    uint64_t sum = 0;
    for (One& one : nodes_) {
      if (one.engine != nullptr) sum += Value(*one.engine, metric);
    }
    return sum;
  }
  // Why reads did not come from peers, for a test's message.
  std::string Fates() {
    std::string out;
    for (const char* name : {"timeouts", "refused", "corrupt", "lost", "avoided"}) {
      out += StrCat(name, " ", Sum(StrCat("forebay_peer_", name, "_total")), ", ");
    }
    return out + StrCat("hedged ", Sum("forebay_source_hedged_reads_total"));
  }
  uint64_t SourceReads() { return Sum("forebay_source_reads_total"); }
  PeerStatus Seen(uint32_t by, uint32_t of) {
    for (const PeerStatus& status : nodes_[by].peers->Seen()) {
      if (status.node == of) return status;
    }
    return {};
  }
  // Waits, with a bound, until it holds.
  template <typename Condition>
  static bool Within(Nanos wait, Condition condition) {
    const Nanos until = SteadyClock().Now() + wait;
    while (!condition()) {
      if (SteadyClock().Now() > until) return false;
      poll(nullptr, 0, 5);
    }
    return true;
  }

  std::string root_;
  LoopbackNetwork network_;
  std::optional<FakeRegistrar> registrar_;
  std::vector<One> nodes_;
  PeerOptions options_;
  EngineOptions engine_options_;
  uint64_t epochs_ = 0;  // of the streams that Use opens; 0: without an end
  NodeParts parts_;
};

}  // namespace forebay::peer::testing
