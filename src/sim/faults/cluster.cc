#include "sim/faults/cluster.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "catalog/image.h"
#include "peer/membership_view.h"
#include "peer/node.h"
#include "sim/faults/network.h"
#include "sim/faults/sim_source.h"
#include "sim/faults/world.h"
#include "source/null_source.h"
#include "stage/engine.h"

namespace forebay::sim {
namespace {

constexpr uint64_t kMemory = uint64_t{8} << 20;
constexpr Nanos kLease = kSecond;
constexpr Nanos kRequestWait = 500 * kMilli;
constexpr Nanos kJoinWait = 2 * kSecond;
// What a consumer may wait while its own source answers as ever: for the first whole view, for a
// peer that is given up, for the source then.
constexpr Nanos kWaitBound = kJoinWait + 2 * kRequestWait + kSecond;
// From the last fault on until every node knows who is there.
constexpr Nanos kSettle = 5 * kSecond;
// Of these one reads no sample from the source twice, and none at all where there is room.
constexpr uint64_t kFinalEpochs = 8;
constexpr Nanos kSlice = 100 * kMilli;  // a consumer looks again so often, as Engine::Take does
constexpr int kMostRounds = 20'000;
constexpr uint64_t kMostEvents = 5'000'000;

struct Data {
  std::shared_ptr<const Catalog> catalog;
  std::vector<std::vector<std::byte>> bytes;
  uint64_t total = 0;
};

Result<Data> MakeData(SplitMix64& rng) {
  Data data;
  const uint64_t samples = 24 + rng.Below(140);
  const uint64_t longest = 200 + rng.Below(rng.Below(4) == 0 ? 70'000 : 16'000);
  CatalogWriter writer(Format::kFolder, "/simulated", 1);
  for (uint64_t i = 0; i < samples; ++i) {
    const auto length = static_cast<uint32_t>(rng.Below(40) == 0 ? 0 : 1 + rng.Below(longest));
    writer.AddFile(CatalogWriter::kRootFolder, StrCat(100'000 + i, ".bin"), length, 1, -1);
    std::vector<std::byte>& bytes = data.bytes.emplace_back(length);
    FillNullSample(static_cast<SampleId>(i), bytes);
    data.total += ArenaAllocator::Rounded(length);
  }
  Result<std::unique_ptr<Catalog>> catalog = std::move(writer).Finish();
  if (!catalog) return catalog.error();
  data.catalog = *std::move(catalog);
  return data;
}

class Cluster {
 public:
  explicit Cluster(const FaultRun& run)
      : run_(run),
        draw_(run.seed * 3 + 11),
        nodes_(static_cast<uint32_t>(2 + draw_.Below(4))),
        world_(run.seed, nodes_),
        network_(world_, nodes_),
        ones_(nodes_) {
    out_.schedule = run.schedule ? *run.schedule : Schedule::Draw(run.seed, nodes_);
    out_.nodes = nodes_;
  }
  ~Cluster() {
    for (uint32_t node = 0; node < nodes_; ++node) {
      if (ones_[node].up) End(node);
    }
  }

  FaultOutcome Run();

 private:
  // A batch that the consumer has, and for how long.
  struct Held {
    BatchLoan loan;
    Nanos until = 0;
  };
  struct Consumer {
    StreamId stream = 0;
    SamplerSpec sampler;
    std::vector<SampleId> order;
    uint64_t epoch = 0;
    size_t taken = 0;  // samples of the epoch
    bool resting = false;
    bool pending = false;
    Nanos pending_since = 0;
    Nanos look_at = 0;
    Nanos next_take = 0;
    std::vector<Held> held;
  };
  struct One {
    bool up = false;
    Nanos paused_until = 0;
    // Until then it waits for faults of its own: source, process, memory.
    Nanos excused_until = 0;
    Nanos failing_until = 0;
    StorageState storage;
    EnginePtr engine;
    std::unique_ptr<peer::Node> node;
    MemoryShare share;
    bool lent = false;
    DatasetId dataset = 0;
    Metric* peer_reads = nullptr;
    Metric* source_reads = nullptr;
    bool engine_busy = true;
    // By the node's own clock.
    Nanos engine_due = 0;
    Nanos node_due = 0;
    Nanos member_due = 0;
    Consumer consumer;
  };

  void Fail(const std::string& violation, const std::string& what) {
    if (!out_.violation.empty()) return;
    out_.violation = violation;
    out_.what = StrCat(what, " (", (world_.now() - start_) / kMilli, " ms)");
    done_ = true;
  }
  void Trace(const std::string& what) const {
    if (run_.trace) std::printf("%8.3f %s\n", Seconds(), what.c_str());
  }
  double Seconds() const { return static_cast<double>(world_.now() - start_) / 1e9; }
  void Mix(uint64_t value) { out_.hash = (out_.hash ^ value) * 0x100000001b3ULL; }

  void Start(uint32_t node);
  void Open(uint32_t node);
  void Reopen(uint32_t node);
  void End(uint32_t node);
  void Kill(uint32_t node, bool silent);
  void Inject(const Fault& fault);
  Nanos Due(uint32_t node) const;
  void RunNode(uint32_t node);
  bool StepEngine(uint32_t node);
  bool Consume(uint32_t node);
  void Check(uint32_t node, const Held& held, size_t at);
  void GiveBack(uint32_t node, Nanos now);
  void OnEpochEnd(uint32_t node);
  // The end: epochs in which all go together, then a look at what is left.
  void NextFinalEpoch();
  bool Converged() const;
  // What each node has and believes of a sample, for the trace.
  std::string Whereabouts(SampleId sample) const;
  // All who have ever known the list of members are gone, node 0 for good: nobody can be found.
  bool NobodyKnows() const;
  void CloseAll();
  void CheckEnd();
  void CheckHomes();

  const FaultRun run_;
  SplitMix64 draw_;
  const uint32_t nodes_;
  World world_;
  FaultNetwork network_;
  std::vector<One> ones_;
  FaultOutcome out_;
  Data data_;
  std::vector<uint32_t> reads_;           // of the source, by sample
  std::vector<uint32_t> reads_at_start_;  // of the final epoch
  Nanos start_ = 0;
  bool static_members_ = false;
  uint64_t memory_tier_ = 0;
  uint32_t batch_ = 8;
  Nanos think_ = 0;
  bool final_ = false;
  uint64_t final_epochs_ = 0;
  bool closing_ = false;
  bool done_ = false;
};

// ---- nodes -----------------------------------------------------------------------------------

void Cluster::Start(uint32_t node) {
  One& one = ones_[node];
  if (one.up || done_) return;
  Trace(StrCat("node ", node, " starts"));
  world_.SetCurrent(node);
  network_.Revive(node);
  EngineOptions options;
  options.memory = kMemory;
  options.memory_tier = memory_tier_;
  options.io = PosixSourceOptions::Io::kUring;  // the posix source is not used, nor its threads
  options.own_threads = false;
  Result<EnginePtr> engine = Engine::Create(options);
  if (!engine) return Fail("start", engine.status().ToString());
  one.engine = *std::move(engine);
  one.peer_reads = &one.engine->registry().AddCounter("forebay_peer_reads_total", "");
  one.source_reads = &one.engine->registry().AddCounter("forebay_source_reads_total", "");
  peer::PeerOptions peers;
  peers.lease = kLease;
  peers.request_wait = kRequestWait;
  peers.join_wait = kJoinWait;
  peers.cluster.node = node;
  peers.cluster.nodes = nodes_;
  peers.cluster.method =
      static_members_ ? peer::ClusterSpec::Method::kStatic : peer::ClusterSpec::Method::kLauncher;
  peers.cluster.master = "10.0.0.1:7000";
  for (uint32_t i = 0; static_members_ && i < nodes_; ++i) {
    peers.cluster.nodes_at.push_back(StrCat("10.0.0.", i + 1, ":7000"));
  }
  peers.cluster.source = "the simulator";
  peer::NodeParts parts;
  parts.secret = std::string(32, 's');
  parts.own_thread = false;
  parts.transport = [this, node](TransportHandler& handler) {
    return network_.Make(node, handler);
  };
  parts.membership = [peers](const peer::Member& self) {
    return peer::Join({.cluster = peers.cluster,
                       .self = self,
                       .lease = kLease,
                       .secret = std::string(32, 's'),
                       .own_thread = false,
                       .host = StrCat("10.0.0.", peers.cluster.node + 1),
                       .holder_file = "shared"});
  };
  one.node = std::make_unique<peer::Node>(*one.engine, peers, std::move(parts));
  if (const Status started = one.node->Start(); !started.ok()) {
    return Fail("start", started.ToString());
  }
  one.up = true;
  Open(node);
  const Nanos now = world_.Local(node);
  one.engine_due = one.node_due = one.member_due = now;
  one.engine_busy = true;
  one.excused_until = std::max(one.excused_until, world_.now());
}

// The data set, and a stream of it where the consumer stands.
void Cluster::Open(uint32_t node) {
  One& one = ones_[node];
  const Result<DatasetId> dataset =
      one.engine->AddDataset(data_.catalog, std::make_unique<SimSource>(world_, node, one.storage));
  if (!dataset) return Fail("start", dataset.status().ToString());
  one.dataset = *dataset;
  Consumer& c = one.consumer;
  StreamOptions stream;
  stream.shape.dataset = one.dataset;
  stream.shape.batch_size = batch_;
  if (c.taken == c.order.size() && !c.order.empty()) {
    ++c.epoch;
    c.taken = 0;
  }
  stream.shape.first_epoch = c.epoch;
  stream.shape.first_position = c.taken * nodes_;
  c.sampler.size = static_cast<uint32_t>(data_.catalog->size());
  c.sampler.seed = run_.seed & 0xffff;
  c.sampler.world = nodes_;
  c.sampler.rank = node;
  stream.sampler = c.sampler;
  c.order = EpochOrder(c.sampler, c.epoch);
  const Result<StreamId> opened = one.engine->OpenStream(stream);
  if (!opened) return Fail("start", opened.status().ToString());
  c.stream = *opened;
  c.pending = false;
  c.next_take = world_.now();
}

void Cluster::Reopen(uint32_t node) {
  One& one = ones_[node];
  // Who closes while memory is lent may have to wait for it, which no clock ends here.
  if (!one.up || one.lent || closing_ || one.consumer.resting) return;
  world_.SetCurrent(node);
  GiveBack(node, INT64_MAX);
  (void)one.engine->CloseStream(one.consumer.stream);
  (void)one.engine->CloseDataset(one.dataset);
  Open(node);
}

void Cluster::End(uint32_t node) {
  One& one = ones_[node];
  world_.SetCurrent(node);
  one.up = false;
  one.consumer.held.clear();
  one.share = MemoryShare();
  one.lent = false;
  for (SimSource* source : one.storage.sources) source->Die();
  one.node.reset();
  one.engine.reset();
}

void Cluster::Kill(uint32_t node, bool silent) {
  if (!ones_[node].up) return;
  Trace(StrCat("node ", node, silent ? " loses power" : " is killed"));
  network_.Kill(node, silent);
  out_.peer_reads += ones_[node].peer_reads->value();
  End(node);
}

void Cluster::Inject(const Fault& f) {
  if (f.node >= nodes_ || f.other >= nodes_) return;
  One& one = ones_[f.node];
  const Nanos until = world_.now() + f.lasts;
  Trace(StrCat("fault ", Schedule{{f}}.ToString()));
  const auto excuse = [&] { one.excused_until = std::max(one.excused_until, until); };
  switch (f.kind) {
    case FaultKind::kCrash:
    case FaultKind::kPowerOff:
      Kill(f.node, f.kind == FaultKind::kPowerOff);
      if (f.lasts > 0) world_.At(until, World::kNobody, [this, node = f.node] { Start(node); });
      break;
    case FaultKind::kPause:
      one.paused_until = std::max(one.paused_until, until);
      excuse();
      world_.At(until, f.node, [] {});
      break;
    case FaultKind::kCut:
      network_.Cut(f.node, f.other, until);
      break;
    case FaultKind::kIsolate:
      for (uint32_t other = 0; other < nodes_; ++other) {
        if (other != f.node) network_.Cut(f.node, other, until);
      }
      break;
    case FaultKind::kSlowLink:
      network_.Slow(f.node, until, static_cast<Nanos>(f.much) * kMilli);
      break;
    case FaultKind::kReset:
      network_.Reset(f.node, f.other);
      break;
    case FaultKind::kCorrupt:
      network_.Corrupt(f.node, until);
      break;
    case FaultKind::kGarble:
      network_.GarbleNext(f.node);
      break;
    case FaultKind::kSourceStall:
      one.storage.stalled_until = std::max(one.storage.stalled_until, until);
      excuse();
      break;
    case FaultKind::kSourceErrors:
      one.storage.failing_until = until;
      one.storage.fails_one_in = std::max<uint64_t>(1, f.much);
      // Who waits between two attempts, or has just asked, is told of it later.
      one.failing_until = std::max(one.failing_until, until + 200 * kMilli);
      excuse();
      break;
    case FaultKind::kSourceSlow:
      one.storage.slow_until = until;
      one.storage.slower = std::max<uint64_t>(1, f.much);
      // What began before the end takes as long as it takes.
      one.excused_until =
          std::max(one.excused_until, until + 5 * kMilli * static_cast<Nanos>(f.much));
      break;
    case FaultKind::kClockJump:
      world_.Jump(f.node, static_cast<Nanos>(f.much) * kMilli);
      break;
    case FaultKind::kPressure:
      if (one.up) {
        world_.SetCurrent(f.node);
        Result<MemoryShare> lent =
            one.engine->Lend(one.engine->arena_bytes() / std::max<uint64_t>(2, f.much));
        if (!lent) break;
        one.share = *std::move(lent);
        one.lent = true;
        world_.At(until, f.node, [this, node = f.node] {
          ones_[node].share = MemoryShare();
          ones_[node].lent = false;
        });
      }
      break;
    case FaultKind::kReopen:
      Reopen(f.node);
      break;
  }
}

Nanos Cluster::Due(uint32_t node) const {
  const One& one = ones_[node];
  if (!one.up) return INT64_MAX;
  const Nanos ahead = world_.Local(node) - world_.now();
  Nanos due = std::min({one.engine_due, one.node_due, one.member_due}) - ahead;
  const Consumer& c = one.consumer;
  if (!c.resting) due = std::min(due, c.pending ? c.look_at : c.next_take);
  for (const Held& held : c.held) due = std::min(due, held.until);
  return std::max({due, one.paused_until, world_.now()});
}

void Cluster::RunNode(uint32_t node) {
  One& one = ones_[node];
  if (!one.up || world_.now() < one.paused_until) return;
  world_.SetCurrent(node);
  for (int round = 0; !done_; ++round) {
    if (round > kMostRounds) return Fail("livelock", StrCat("node ", node, " never rests"));
    bool acted = false;
    const Nanos now = world_.Local(node);
    if (network_.TakeMembersPoked(node) || now >= one.member_due) {
      one.member_due = now + std::max(kMilli, one.node->membership().Step());
      network_.PumpMembers(node);
    }
    const bool woken = network_.TakeWoken(node);
    if (woken || now >= one.node_due || one.node->Woken()) {
      one.node_due = now + one.node->Step();
      acted = true;
    }
    acted |= StepEngine(node);
    acted |= Consume(node);
    if (!network_.violation().empty()) return Fail("double-serve", network_.violation());
    if (!acted) break;
  }
}

// What has arrived wakes the loop: a round that began by time alone must not find any of it.
bool Cluster::StepEngine(uint32_t node) {
  One& one = ones_[node];
  const Nanos now = world_.Local(node);
  std::optional<Nanos> slept = one.engine->Step(false);
  if (!slept && now >= one.engine_due) {
    const uint64_t before = one.peer_reads->value() + one.source_reads->value();
    slept = one.engine->Step(true);
    const uint64_t found = one.peer_reads->value() + one.source_reads->value() - before;
    if (found > 0 && !one.engine_busy) {
      Fail("missed-wake-up", StrCat("the loop of node ", node, " found ", found,
                                    " reads that had ended without a word"));
    }
  }
  if (!slept) return false;
  one.engine_due = now + *slept;
  one.engine_busy = *slept == 0;
  return true;
}

// ---- consumers -------------------------------------------------------------------------------

void Cluster::Check(uint32_t node, const Held& held, size_t at) {
  const Consumer& c = ones_[node].consumer;
  const BatchLoan& loan = held.loan;
  for (size_t i = 0; i < loan.samples.size(); ++i) {
    const SampleId sample = loan.samples[i];
    if (at != SIZE_MAX && (at + i >= c.order.size() || c.order[at + i] != sample)) {
      return Fail("order", StrCat("node ", node, ", epoch ", c.epoch, ", position ", at + i,
                                  ": sample ", sample));
    }
    const std::vector<std::byte>& right = data_.bytes[sample];
    const bool same = loan.lengths[i] == right.size() &&
                      (right.empty() ||
                       std::memcmp(loan.base + loan.offsets[i], right.data(), right.size()) == 0);
    if (!same) {
      return Fail("bytes", StrCat("node ", node, ": sample ", sample,
                                  at == SIZE_MAX ? " changed while it was lent" : ""));
    }
  }
}

void Cluster::GiveBack(uint32_t node, Nanos now) {
  One& one = ones_[node];
  for (size_t i = 0; i < one.consumer.held.size();) {
    Held& held = one.consumer.held[i];
    if (held.until > now) {
      ++i;
      continue;
    }
    Check(node, held, SIZE_MAX);
    (void)one.engine->Release(held.loan.lease);
    one.consumer.held.erase(one.consumer.held.begin() + static_cast<ptrdiff_t>(i));
  }
}

bool Cluster::Consume(uint32_t node) {
  One& one = ones_[node];
  Consumer& c = one.consumer;
  const Nanos now = world_.now();
  const size_t held = c.held.size();
  GiveBack(node, now);
  const bool released = held != c.held.size();
  if (c.resting || (!c.pending && now < c.next_take)) return released;
  uint64_t count = 0;
  const bool told = read(one.engine->progress_fd(), &count, sizeof count) > 0;
  if (c.pending && !told && now < c.look_at) return released;
  one.engine->ArmProgress();
  Held next;
  const Result<TakeKind> taken = one.engine->Take(c.stream, 0, &next.loan);
  const Nanos since = std::max(c.pending_since, one.excused_until);
  if (c.pending) {
    const Nanos waited = now - since;
    out_.longest_wait = std::max(out_.longest_wait, waited);
    if (waited > kWaitBound) {
      Fail("wait", StrCat("node ", node, " has waited ", waited / kMilli,
                          " ms for a batch: ", one.engine->WaitingFor(c.stream)));
    }
  }
  if (!taken) {
    if (now > one.failing_until) {
      Fail("error", StrCat("node ", node, ": ", taken.status().ToString()));
    }
    c.pending = false;
    c.next_take = now + 20 * kMilli;
    return true;
  }
  if (*taken == TakeKind::kPending) {
    if (!c.pending) c.pending_since = now;
    c.pending = true;
    c.look_at = now + kSlice;
    return true;
  }
  if (c.pending && !told) {
    Fail("missed-wake-up", StrCat("the consumer of node ", node, " was not told of its batch"));
  }
  c.pending = false;
  if (*taken == TakeKind::kEndOfEpoch) {
    OnEpochEnd(node);
    return true;
  }
  if (*taken != TakeKind::kBatch) {
    Fail("order", StrCat("node ", node, ": the stream ended"));
    return true;
  }
  Check(node, next, c.taken);
  c.taken += next.loan.samples.size();
  ++out_.batches;
  Mix(static_cast<uint64_t>(now) ^ (uint64_t{node} << 56) ^ next.loan.samples.front());
  next.until = now + world_.Between(think_ / 4, think_);
  // Some are ahead of their own step.
  c.next_take = world_.OneIn(3) ? now : next.until;
  if (c.held.size() >= 2) c.next_take = next.until;
  c.held.push_back(std::move(next));
  return true;
}

void Cluster::OnEpochEnd(uint32_t node) {
  Consumer& c = ones_[node].consumer;
  if (c.taken != c.order.size()) {
    Fail("order", StrCat("node ", node, ", epoch ", c.epoch, ": ", c.taken, " of ", c.order.size(),
                         " samples"));
  }
  ++c.epoch;
  c.taken = 0;
  c.order = EpochOrder(c.sampler, c.epoch);
  c.next_take = world_.now();
  Registry& registry = ones_[node].engine->registry();
  const uint64_t kept = registry.AddGauge("forebay_stage_kept_bytes", "").value();
  if (memory_tier_ != 0 && kept > memory_tier_) {
    Fail("budget", StrCat("node ", node, " keeps ", kept, " bytes and may keep ", memory_tier_));
  }
  if (!final_) return;
  c.resting = true;
  const bool all = std::all_of(ones_.begin(), ones_.end(),
                               [](const One& one) { return !one.up || one.consumer.resting; });
  if (all) world_.At(world_.now(), World::kNobody, [this] { NextFinalEpoch(); });
}

// ---- the end ---------------------------------------------------------------------------------

// What has a home is not read any more, unless its home says that it has no room for it. The rest
// each node reads for itself, once for its epoch and once ahead for the next.
bool Cluster::Converged() const {
  std::unique_ptr<const peer::Directory> plan;
  std::vector<bool> full(nodes_);
  for (uint32_t node = 0; node < nodes_; ++node) {
    const One& one = ones_[node];
    if (!one.up) continue;
    std::optional<peer::Directory> own = one.node->PlanOf(one.dataset);
    if (!own) return false;
    plan = std::make_unique<const peer::Directory>(*std::move(own));
    full[node] = one.engine->registry().AddGauge("forebay_peer_unkept_bytes", "").value() > 0;
  }
  for (SampleId s = 0; s < reads_.size(); ++s) {
    const uint32_t home = plan->Locate(s).home;
    const bool kept = home != peer::kNoNode && !full[home];
    if (reads_[s] - reads_at_start_[s] > (kept ? 0U : 2 * nodes_)) return false;
  }
  return true;
}

bool Cluster::NobodyKnows() const {
  if (ones_[0].up || static_members_) return false;
  return std::none_of(ones_.begin(), ones_.end(), [](const One& one) {
    return one.up && !one.node->membership().Current().members.empty();
  });
}

std::string Cluster::Whereabouts(SampleId sample) const {
  std::string out;
  for (uint32_t node = 0; node < nodes_; ++node) {
    const One& one = ones_[node];
    if (!one.up) continue;
    const std::optional<peer::Directory> plan = one.node->PlanOf(one.dataset);
    const std::vector<std::byte> bits = one.engine->HeldBits(one.dataset);
    const bool has = sample / 8 < bits.size() &&
                     (std::to_integer<unsigned>(bits[sample / 8]) >> sample % 8 & 1) != 0;
    out += StrCat(" node ", node, has ? " has it" : " has it not");
    if (!plan) continue;
    const peer::Found found = plan->Locate(sample);
    out += StrCat(", home ", static_cast<int64_t>(static_cast<int32_t>(found.home)), ", holder ",
                  static_cast<int64_t>(static_cast<int32_t>(found.holder)), ";");
  }
  return out;
}

void Cluster::NextFinalEpoch() {
  if (done_ || closing_) return;
  if (final_epochs_ > 0 && (NobodyKnows() || Converged())) return CloseAll();
  if (++final_epochs_ > kFinalEpochs) {
    uint32_t most = 0;
    uint64_t sum = 0;
    for (SampleId s = 0; s < reads_.size(); ++s) {
      const uint32_t times = reads_[s] - reads_at_start_[s];
      most = std::max(most, times);
      sum += times;
      if (times > 0) Trace(StrCat("sample ", s, " was read ", times, " times; ", Whereabouts(s)));
    }
    for (uint32_t node = 0; node < nodes_; ++node) {
      const One& one = ones_[node];
      if (!one.up) continue;
      const std::optional<peer::Directory> plan = one.node->PlanOf(one.dataset);
      Trace(StrCat("node ", node, " keeps ",
                   one.engine->registry().AddGauge("forebay_stage_kept_bytes", "").value(), " of ",
                   one.engine->TierQuota(), "; ", plan ? plan->home_bytes(node) : 0,
                   " live there"));
    }
    return Fail("convergence",
                StrCat("after ", kFinalEpochs, " epochs without a fault ", sum,
                       " reads of the source in one epoch, up to ", most, " of a sample"));
  }
  reads_at_start_ = reads_;
  for (uint32_t node = 0; node < nodes_; ++node) {
    Consumer& c = ones_[node].consumer;
    c.resting = false;
    c.next_take = world_.now();
  }
}

void Cluster::CloseAll() {
  closing_ = true;
  for (uint32_t node = 0; node < nodes_; ++node) {
    One& one = ones_[node];
    if (!one.up) continue;
    world_.SetCurrent(node);
    GiveBack(node, INT64_MAX);
    one.consumer.resting = true;
    (void)one.engine->CloseStream(one.consumer.stream);
  }
  world_.In(3 * kSecond, World::kNobody, [this] {
    CheckEnd();
    done_ = true;
  });
}

void Cluster::CheckEnd() {
  for (uint32_t node = 0; node < nodes_; ++node) {
    One& one = ones_[node];
    if (!one.up) continue;
    const auto gauge = [&](const char* name) {
      return one.engine->registry().AddGauge(name, "").value();
    };
    if (const uint64_t leases = gauge("forebay_stage_leases"); leases != 0) {
      Fail("lease-leak", StrCat("node ", node, " has ", leases, " leases that nobody holds"));
    }
    if (gauge("forebay_stage_arena_peak_bytes") > one.engine->arena_bytes()) {
      Fail("budget", StrCat("node ", node, " has used more than its memory"));
    }
    if (NobodyKnows()) continue;
    const peer::View view = one.node->membership().Current();
    for (uint32_t other = 0; other < nodes_; ++other) {
      const bool alive = std::any_of(
          view.members.begin(), view.members.end(),
          [&](const peer::Member& member) { return member.node == other && member.alive; });
      if (alive != ones_[other].up) {
        Fail("members", StrCat("node ", node, " takes node ", other, " for ",
                               alive ? "alive" : "dead", ": ", one.node->membership().Describe()));
      }
    }
  }
  if (!NobodyKnows()) CheckHomes();
}

void Cluster::CheckHomes() {
  std::vector<std::unique_ptr<const peer::Directory>> plans(nodes_);
  std::vector<std::vector<std::byte>> held(nodes_);
  uint64_t room = 0;
  for (uint32_t node = 0; node < nodes_; ++node) {
    One& one = ones_[node];
    if (!one.up) continue;
    if (std::optional<peer::Directory> plan = one.node->PlanOf(one.dataset)) {
      plans[node] = std::make_unique<const peer::Directory>(*std::move(plan));
    }
    held[node] = one.engine->HeldBits(one.dataset);
    if (!plans[node]) return Fail("lost-home", StrCat("node ", node, " has no plan"));
  }
  for (uint32_t node = 0; node < nodes_; ++node) {
    if (!plans[node]) continue;
    const peer::View view = ones_[node].node->membership().Current();
    room = 0;
    for (const peer::Member& member : view.members) room += member.alive ? member.memory : 0;
    for (SampleId s = 0; s < reads_.size(); ++s) {
      const peer::Found found = plans[node]->Locate(s);
      const bool lives = found.home != peer::kNoNode;
      // Packing leaves a part of each node free.
      if (!lives && room > data_.total + data_.total / 2 + (uint64_t{80'000} * nodes_)) {
        return Fail("lost-home",
                    StrCat("sample ", s, " has no home for node ", node, ", and there is room"));
      }
      if (lives && !ones_[found.home].up) {
        return Fail("lost-home", StrCat("sample ", s, " lives with node ", found.home,
                                        ", which is dead, for node ", node));
      }
      for (uint32_t other = 0; other < nodes_; ++other) {
        if (plans[other] && plans[other]->Locate(s).home != found.home) {
          return Fail("lost-home", StrCat("nodes ", node, " and ", other,
                                          " have different homes for sample ", s));
        }
      }
      if (found.holder == peer::kNoNode) continue;
      const std::vector<std::byte>& bits = held[found.holder];
      const bool has = s / 8 < bits.size() && (std::to_integer<unsigned>(bits[s / 8]) >> s % 8 & 1);
      if (!has) {
        return Fail("stale-directory",
                    StrCat("node ", node, " believes that node ", found.holder, " has sample ", s));
      }
    }
  }
}

FaultOutcome Cluster::Run() {
  start_ = world_.now();
  Result<Data> data = MakeData(draw_);
  if (!data) {
    Fail("start", data.status().ToString());
    return out_;
  }
  data_ = *std::move(data);
  reads_.resize(data_.catalog->size());
  for (One& one : ones_) one.storage.reads = &reads_;
  static_members_ = draw_.Below(2) == 0;
  batch_ = static_cast<uint32_t>(1 + draw_.Below(12));
  think_ = static_cast<Nanos>(15 + draw_.Below(75)) * kMilli;
  // All that fits, a little more than all together need, or less.
  const uint64_t tightness = draw_.Below(3);
  if (tightness > 0) {
    memory_tier_ = std::max<uint64_t>(data_.total * (tightness == 1 ? 14 : 6) / 10 / nodes_, 4096);
  }
  for (uint32_t node = 0; node < nodes_; ++node) {
    const Nanos late = draw_.Below(10) == 0 ? static_cast<Nanos>(draw_.Below(4000)) * kMilli
                                            : static_cast<Nanos>(draw_.Below(200)) * kMilli;
    world_.In(late, World::kNobody, [this, node] { Start(node); });
  }
  Nanos over = 3 * kSecond;
  for (const Fault& fault : out_.schedule.faults) {
    world_.In(fault.at, World::kNobody, [this, fault] { Inject(fault); });
    over = std::max(over, fault.at + fault.lasts);
  }
  world_.In(over + kSettle, World::kNobody, [this] {
    Trace("the final epochs");
    for (const One& one : ones_) {
      if (one.up) Trace(one.node->membership().Describe());
    }
    final_ = true;
    if (std::none_of(ones_.begin(), ones_.end(), [](const One& one) { return one.up; })) {
      done_ = true;
    }
  });
  while (!done_) {
    if (++out_.events > kMostEvents) {
      Fail("livelock", "it does not end");
      break;
    }
    Nanos due = INT64_MAX;
    uint32_t next = World::kNobody;
    for (uint32_t node = 0; node < nodes_; ++node) {
      if (const Nanos at = Due(node); at < due) {
        due = at;
        next = node;
      }
    }
    if (world_.NextEvent() <= due) {
      next = world_.RunEvent();
    } else {
      world_.GoTo(due);
    }
    if (next != World::kNobody) RunNode(next);
  }
  for (const One& one : ones_) {
    if (one.up) out_.peer_reads += one.peer_reads->value();
  }
  for (const uint32_t times : reads_) out_.source_reads += times;
  out_.virtual_time = world_.now() - start_;
  Mix(out_.source_reads);
  Mix(out_.events);
  return out_;
}

}  // namespace

FaultOutcome RunFaults(const FaultRun& run) {
  FaultOutcome outcome;
  Cluster cluster(run);
  return cluster.Run();
}

Schedule Shrink(const FaultRun& run, const FaultOutcome& failed, int runs) {
  Schedule best = failed.schedule;
  const auto fails = [&](const Schedule& schedule) {
    if (runs-- <= 0) return false;
    return RunFaults({.seed = run.seed, .schedule = schedule}).violation == failed.violation;
  };
  // Halves first, then single faults, as long as any of them is not needed.
  for (size_t piece = std::max<size_t>(1, best.faults.size() / 2); piece > 0 && runs > 0;) {
    bool smaller = false;
    for (size_t at = 0; at < best.faults.size();) {
      Schedule less = best;
      const auto from = less.faults.begin() + static_cast<ptrdiff_t>(at);
      const size_t many = std::min(piece, less.faults.size() - at);
      less.faults.erase(from, from + static_cast<ptrdiff_t>(many));
      if (fails(less)) {
        best = std::move(less);
        smaller = true;
      } else {
        at += many;
      }
    }
    if (!smaller) piece /= 2;
  }
  for (size_t i = 0; i < best.faults.size(); ++i) {
    while (best.faults[i].lasts > 20 * kMilli && runs > 0) {
      Schedule less = best;
      less.faults[i].lasts /= 2;
      less.faults[i].lasts -= less.faults[i].lasts % kMilli;
      if (!fails(less)) break;
      best = std::move(less);
    }
  }
  return best;
}

std::string ReplayCommand(uint64_t seed, const Schedule& schedule, const std::string& bug) {
  return StrCat("forebay-faultsim --seed ", seed, " --schedule '", schedule.ToString(), "'",
                bug.empty() ? "" : " --bug ", bug);
}

}  // namespace forebay::sim
