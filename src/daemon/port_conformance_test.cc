// What every Port must do, run over an engine in the process, over one behind a socket, and over a
// port that goes on from one to the other: with a daemon, and without.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "daemon/server.h"
#include "daemon/test_files.h"
#include "port/failover_port.h"
#include "port/local_port.h"
#include "port/socket_port.h"

namespace forebay {
namespace {

using testing::AwaitMetric;
using testing::BytesRight;
using testing::MakeEngine;
using testing::Seeds;
using testing::SlowSource;
using testing::SmallEngine;
using testing::TestFiles;

enum class Kind { kLocal, kSocket, kRing, kFailover, kAlone };

class PortConformance : public ::testing::TestWithParam<Kind> {
 protected:
  void TearDown() override {
    if (GetParam() == Kind::kFailover && failover_ != nullptr) {
      EXPECT_NE(failover_->daemon(), nullptr) << "the engine behind the socket was left";
    }
  }

  bool fails_over() const { return GetParam() == Kind::kFailover || GetParam() == Kind::kAlone; }

  // An engine with one data set of `n` samples, whose reads take `latency`, and a port to it.
  void Make(uint64_t memory, uint32_t n, uint32_t low, uint32_t high, Nanos latency = 0) {
    catalog_ = files_.Make(n, low, high, fails_over());
    ASSERT_NO_FATAL_FAILURE(Connect(memory));
    if (fails_over()) {
      const std::string delay =
          latency == 0 ? "" : StrCat("read_ms=", static_cast<double>(latency) / kMilli);
      auto dataset = port_->OpenDataset(catalog_, delay);
      ASSERT_TRUE(dataset && *dataset == 0) << dataset.status().ToString();
      return;
    }
    auto dataset =
        engine_->AddDataset(catalog_, latency == 0 ? *MakeNullSource(16) : SlowSource(latency));
    ASSERT_TRUE(dataset) << dataset.status().ToString();
  }

  void Connect(uint64_t memory) {
    if (GetParam() != Kind::kAlone) engine_ = MakeEngine(memory);
    port_ = NewPort(memory);
    ASSERT_NE(port_, nullptr);
  }

  // The one that the port leads to.
  Engine& engine() { return GetParam() == Kind::kAlone ? *failover_->engine() : *engine_; }

  void Serve() {
    if (server_ != nullptr) return;
    ServerOptions options;
    options.socket_path = DaemonPlace(files_.root() + "/run").socket;
    options.release_wait = 300 * kMilli;
    options.open_datasets = true;
    auto server = Server::Start(*engine_, options);
    ASSERT_TRUE(server) << server.status().ToString();
    server_ = *std::move(server);
  }

  std::shared_ptr<Port> NewPort(uint64_t memory) {
    if (GetParam() == Kind::kLocal) return std::make_shared<LocalPort>(*engine_);
    if (GetParam() != Kind::kAlone) Serve();
    if (!fails_over()) return NewSocketPort(GetParam() == Kind::kRing);
    FailoverOptions options;
    options.daemon.folder = files_.root() + "/run";
    options.daemon.program = "/nonexistent/forebayd";
    options.engine = SmallEngine(memory);
    options.retry.clear();
    auto port = FailoverPort::Open(options);
    EXPECT_TRUE(port) << port.status().ToString();
    if (!port) return nullptr;
    failover_ = port->get();
    return std::shared_ptr<Port>(*std::move(port));
  }

  std::shared_ptr<Port> NewSocketPort(bool rings) {
    auto port = SocketPort::Attach(server_->socket_path(), 10 * kSecond, rings);
    EXPECT_TRUE(port) << port.status().ToString();
    return port ? std::shared_ptr<Port>(*std::move(port)) : nullptr;
  }

  // Another way to the same engine and its streams.
  std::shared_ptr<Port> AnotherPort() {
    if (server_ == nullptr) return std::make_shared<LocalPort>(engine());
    return NewSocketPort(GetParam() != Kind::kSocket);
  }

  StreamOptions Sampled(uint32_t batch, uint64_t seed) const {
    StreamOptions options;
    options.shape.batch_size = batch;
    options.sampler.size = static_cast<uint32_t>(catalog_->size());
    options.sampler.seed = seed;
    return options;
  }

  StreamOptions Declared(uint32_t batch, bool itemised = false) const {
    StreamOptions options;
    options.shape.batch_size = batch;
    options.shape.itemised = itemised;
    options.declared = true;
    return options;
  }

  TestFiles files_;
  std::shared_ptr<const Catalog> catalog_;
  EnginePtr engine_;
  ServerPtr server_;
  std::shared_ptr<Port> port_;
  FailoverPort* failover_ = nullptr;  // port_, where it is one
};

TEST_P(PortConformance, OrderAndBytesAreRightOverSeveralEpochs) {
  for (bool contiguous : {false, true}) {
    port_.reset();
    server_.reset();
    ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 150, 0, 200000));  // twice what the budget holds
    StreamOptions options = Sampled(7, 3);
    options.shape.contiguous = contiguous;
    auto stream = port_->OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      const auto order = EpochOrder(options.sampler, epoch);
      size_t at = 0;
      uint64_t index = 0;
      BatchLoan loan;
      while (true) {
        auto taken = port_->Take(*stream, 20 * kSecond, &loan);
        ASSERT_TRUE(taken) << taken.status().ToString();
        if (*taken == TakeKind::kEndOfEpoch) break;
        ASSERT_EQ(*taken, TakeKind::kBatch);
        EXPECT_EQ(loan.epoch, epoch);
        EXPECT_EQ(loan.index, index++);
        for (SampleId s : loan.samples) ASSERT_EQ(s, order[at++]);
        ASSERT_TRUE(BytesRight(loan));
        ASSERT_TRUE(port_->Release(loan.lease).ok());
      }
      EXPECT_EQ(at, order.size());
    }
  }
}

TEST_P(PortConformance, DeclaredOrdersAreFollowedToTheirEnd) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 10, 10, 100));
  auto stream = port_->OpenStream(Declared(4));
  ASSERT_TRUE(stream);
  EXPECT_EQ(port_->Declare(*stream, 0, {0, 10}, true).code(), Code::kInvalidArgument);
  ASSERT_TRUE(port_->Declare(*stream, 0, {9, 9, 0, 3, 3}, false).ok());
  ASSERT_TRUE(port_->Declare(*stream, 1, {}, false).ok());
  ASSERT_TRUE(port_->Declare(*stream, 2, {1}, true).ok());
  BatchLoan loan;
  std::vector<LeaseId> leases;
  const auto take = [&] {
    auto taken = port_->Take(*stream, 10 * kSecond, &loan);
    EXPECT_TRUE(taken) << taken.status().ToString();
    if (taken && *taken == TakeKind::kBatch) leases.push_back(loan.lease);
    return taken ? *taken : TakeKind::kPending;
  };
  EXPECT_EQ(take(), TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{9, 9, 0, 3}));
  EXPECT_EQ(take(), TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{3}));
  EXPECT_EQ(take(), TakeKind::kEndOfEpoch);
  EXPECT_EQ(take(), TakeKind::kEndOfEpoch);
  EXPECT_EQ(take(), TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{1}));
  EXPECT_EQ(loan.epoch, 2u);
  EXPECT_EQ(take(), TakeKind::kEndOfEpoch);
  EXPECT_EQ(take(), TakeKind::kEndOfStream);
  for (LeaseId lease : leases) EXPECT_TRUE(port_->Release(lease).ok());
}

TEST_P(PortConformance, ALongOrderArrivesWhole) {
  ASSERT_NO_FATAL_FAILURE(Make(128 << 20, 10, 10, 100));
  auto stream = port_->OpenStream(Declared(500000));
  ASSERT_TRUE(stream);
  std::vector<SampleId> order(2500000);
  SplitMix64 rng(1);
  for (SampleId& s : order) s = static_cast<SampleId>(rng.Below(10));
  ASSERT_TRUE(port_->Declare(*stream, 0, order, true).ok());
  std::vector<SampleId> got;
  for (int i = 0; i < 5; ++i) {
    BatchLoan loan;
    auto taken = port_->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken && *taken == TakeKind::kBatch) << taken.status().ToString();
    got.insert(got.end(), loan.samples.begin(), loan.samples.end());
    ASSERT_TRUE(port_->Release(loan.lease).ok());
  }
  EXPECT_TRUE(got == order);
}

TEST_P(PortConformance, SeekGoesToAPositionOfAnEpoch) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 100, 10, 100));
  StreamOptions options = Sampled(5, 8);
  options.sampler.world = 2;
  options.sampler.rank = 1;
  auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  ASSERT_TRUE(port_->Seek(*stream, 4, 40).ok());
  EXPECT_EQ(port_->Seek(*stream, 4, 41).code(), Code::kInvalidArgument);
  BatchLoan loan;
  auto taken = port_->Take(*stream, 10 * kSecond, &loan);
  ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
  EXPECT_EQ(loan.samples[0], EpochOrder(options.sampler, 4)[20]);
  EXPECT_EQ(loan.epoch, 4u);
  EXPECT_EQ(loan.index, 4u);  // 40 samples of all ranks are before it
  EXPECT_TRUE(port_->Release(loan.lease).ok());
}

TEST_P(PortConformance, AStreamThatStartsInsideAnEpochCountsItsBatchesFromTheBeginning) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 100, 10, 100));
  StreamOptions options = Sampled(8, 8);
  options.shape.first_epoch = 2;
  options.shape.first_position = 83;  // three samples into the eleventh batch
  auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  BatchLoan loan;
  for (const uint64_t index : {10u, 11u, 12u, 0u}) {
    auto taken = port_->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken);
    if (*taken == TakeKind::kEndOfEpoch) taken = port_->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
    EXPECT_EQ(loan.index, index);
    EXPECT_EQ(loan.epoch, index == 0 ? 3u : 2u);
    EXPECT_TRUE(port_->Release(loan.lease).ok());
  }
}

TEST_P(PortConformance, ALoanHoldsUntilItIsReleased) {
  ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 300, 100000, 100000));
  auto stream = port_->OpenStream(Sampled(4, 1));
  ASSERT_TRUE(stream);
  std::deque<BatchLoan> held;
  for (int i = 0; i < 300; ++i) {
    BatchLoan loan;
    auto taken = port_->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    if (*taken != TakeKind::kBatch) continue;
    held.push_back(std::move(loan));
    if (held.size() < 8) continue;
    ASSERT_TRUE(BytesRight(held.front()));
    ASSERT_TRUE(port_->Release(held.front().lease).ok());
    held.pop_front();
  }
  for (const BatchLoan& loan : held) {
    EXPECT_TRUE(BytesRight(loan));
    EXPECT_TRUE(port_->Release(loan.lease).ok());
  }
}

TEST_P(PortConformance, UnreleasedLoansEndInAnErrorNotAHang) {
  ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 100, 400000, 400000));
  auto stream = port_->OpenStream(Sampled(4, 0));
  ASSERT_TRUE(stream);
  std::vector<LeaseId> leases;
  Status error;
  for (int i = 0; i < 20 && error.ok(); ++i) {
    BatchLoan loan;
    auto taken = port_->Take(*stream, 5 * kSecond, &loan);
    if (taken) {
      leases.push_back(loan.lease);
    } else {
      error = taken.error();
    }
  }
  EXPECT_EQ(error.code(), Code::kResourceExhausted);
  EXPECT_NE(error.message().find("not released"), std::string::npos) << error.message();
  for (LeaseId lease : leases) EXPECT_TRUE(port_->Release(lease).ok());
  BatchLoan loan;
  auto taken = port_->Take(*stream, 10 * kSecond, &loan);
  ASSERT_TRUE(taken) << taken.status().ToString();
  EXPECT_EQ(*taken, TakeKind::kBatch);
}

TEST_P(PortConformance, FetchInRoughOrder) {
  ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 200, 50000, 150000, kMilli / 2));
  auto stream = port_->OpenStream(Declared(1, true));
  ASSERT_TRUE(stream);
  SplitMix64 rng(5);
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    Mt19937 generator(static_cast<uint32_t>(epoch));
    std::vector<SampleId> order = RandPerm(200, generator);
    ASSERT_TRUE(port_->Declare(*stream, epoch, order, epoch == 2).ok());
    for (size_t i = 0; i + 8 < order.size(); ++i) std::swap(order[i], order[i + rng.Below(8)]);
    for (SampleId sample : order) {
      BatchLoan loan;
      auto fetched = port_->Fetch(*stream, sample, 20 * kSecond, &loan);
      ASSERT_TRUE(fetched) << fetched.status().ToString();
      ASSERT_EQ(*fetched, TakeKind::kBatch);
      ASSERT_EQ(loan.samples, std::vector<SampleId>{sample});
      ASSERT_EQ(loan.lengths[0], catalog_->length(sample));
      ASSERT_TRUE(BytesRight(loan));
      ASSERT_TRUE(port_->Release(loan.lease).ok());
    }
  }
}

TEST_P(PortConformance, ErrorsKeepCodeAndPath) {
  catalog_ = files_.Make(20, 100, 200);
  const std::string victim = catalog_->ObjectPath(catalog_->extent(5).object);
  std::filesystem::rename(victim, victim + ".away");
  ASSERT_NO_FATAL_FAILURE(Connect(16 << 20));
  ASSERT_TRUE(fails_over() ? port_->OpenDataset(catalog_, "") : engine_->AddDataset(catalog_));
  auto batches = port_->OpenStream(Sampled(20, 0));
  auto items = port_->OpenStream(Declared(1, true));
  ASSERT_TRUE(batches && items);
  BatchLoan loan;
  const auto taken = port_->Take(*batches, 10 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kNotFound) << taken.error().ToString();
  EXPECT_NE(taken.error().message().find(victim), std::string::npos) << taken.error().message();
  const auto fetched = port_->Fetch(*items, 5, 10 * kSecond, &loan);
  ASSERT_FALSE(fetched);
  EXPECT_NE(fetched.error().message().find(victim), std::string::npos);
  std::filesystem::rename(victim + ".away", victim);
  for (StreamId stream : {*items, *batches}) {
    const auto again = stream == *items ? port_->Fetch(stream, 5, 10 * kSecond, &loan)
                                        : port_->Take(stream, 10 * kSecond, &loan);
    ASSERT_TRUE(again) << again.status().ToString();
    EXPECT_EQ(*again, TakeKind::kBatch);
    EXPECT_TRUE(port_->Release(loan.lease).ok());
  }
}

TEST_P(PortConformance, WrongArgumentsAreNamed) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 10, 10, 100));
  BatchLoan loan;
  EXPECT_EQ(port_->Take(77, kSecond, &loan).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(port_->Seek(77, 0, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(port_->CloseStream(77).code(), Code::kInvalidArgument);
  EXPECT_EQ(port_->Declare(77, 0, {}, true).code(), Code::kInvalidArgument);
  StreamOptions options = Sampled(4, 0);
  options.shape.dataset = 3;
  const auto opened = port_->OpenStream(options);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message().find("data set 3"), std::string::npos);
  auto stream = port_->OpenStream(Declared(1, true));
  ASSERT_TRUE(stream);
  EXPECT_EQ(port_->Fetch(*stream, 10, kSecond, &loan).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(port_->Release(123456).ok());
}

TEST_P(PortConformance, AWaitThatEndsGivesPendingAndLeavesNothingBehind) {
  constexpr Nanos kRead = 300 * kMilli;
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000, kRead));
  const Nanos start = SteadyClock().Now();
  auto batches = port_->OpenStream(Sampled(4, 1));
  auto items = port_->OpenStream(Declared(1, true));
  ASSERT_TRUE(batches && items);
  BatchLoan loan;
  // On a machine that stands still meanwhile, a read may end before it is asked for.
  const auto check = [&](const Result<TakeKind>& kind) {
    ASSERT_TRUE(kind) << kind.status().ToString();
    if (*kind == TakeKind::kBatch && SteadyClock().Now() - start >= kRead) {
      ASSERT_TRUE(port_->Release(loan.lease).ok());
      return;
    }
    EXPECT_EQ(*kind, TakeKind::kPending);
  };
  for (Nanos wait : {Nanos{-5}, Nanos{0}, 20 * kMilli}) {
    ASSERT_NO_FATAL_FAILURE(check(port_->Take(*batches, wait, &loan)));
    ASSERT_NO_FATAL_FAILURE(check(port_->Fetch(*items, 40, wait, &loan)));
  }
  ASSERT_TRUE(port_->CloseStream(*batches).ok());
  EXPECT_EQ(AwaitMetric(engine(), "forebay_stage_leases", 0), 0u);
}

TEST_P(PortConformance, AClosedStreamEndsAWait) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000));
  auto stream = port_->OpenStream(Declared(4));
  ASSERT_TRUE(stream);
  std::atomic<bool> waiting = false;
  std::jthread closer([&] {
    while (!waiting) std::this_thread::yield();
    usleep(20000);
    EXPECT_TRUE(engine().CloseStream(*stream).ok());
  });
  BatchLoan loan;
  waiting = true;
  const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kCancelled);
}

// Nothing is read after the order is known: only the Declare itself can end the wait.
TEST_P(PortConformance, AnOrderDeclaredElsewhereEndsAWait) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000));
  auto stream = port_->OpenStream(Declared(2));
  ASSERT_TRUE(stream);
  BatchLoan loan;
  ASSERT_TRUE(port_->Declare(*stream, 0, {3, 4}, false).ok());
  ASSERT_EQ(*port_->Take(*stream, 10 * kSecond, &loan), TakeKind::kBatch);
  ASSERT_TRUE(port_->Release(loan.lease).ok());
  ASSERT_EQ(*port_->Take(*stream, 10 * kSecond, &loan), TakeKind::kEndOfEpoch);
  std::jthread declarer([&] {
    usleep(30000);
    EXPECT_TRUE(engine().Declare(*stream, 1, {4, 3}, true).ok());
  });
  const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
  ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{4, 3}));
  ASSERT_TRUE(port_->Release(loan.lease).ok());
}

// Three threads of one client and one of another; every loan is checked when it comes and when it
// goes.
TEST_P(PortConformance, ThousandsOfRandomFetches) {
  ASSERT_NO_FATAL_FAILURE(Make(10 << 20, 400, 0, 80000));
  auto stream = port_->OpenStream(Declared(1, true));
  ASSERT_TRUE(stream);
  const std::shared_ptr<Port> other = AnotherPort();
  ASSERT_NE(other, nullptr);
  std::atomic<int> wrong = 0;
  std::atomic<int> fetched = 0;
  {
    std::vector<std::jthread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Port& port = t == 0 ? *other : *port_;
        SplitMix64 rng(t);
        std::vector<BatchLoan> held;
        const auto let_go = [&](size_t i) {
          wrong += BytesRight(held[i]) ? 0 : 1;
          wrong += port.Release(held[i].lease).ok() ? 0 : 1;
          std::swap(held[i], held.back());
          held.pop_back();
        };
        for (uint64_t i = 0; i < 50 * Seeds(); ++i) {
          BatchLoan loan;
          const auto sample = static_cast<SampleId>(rng.Below(400));
          const Nanos wait = rng.Below(4) == 0 ? 0 : 20 * kSecond;
          const auto kind = port.Fetch(*stream, sample, wait, &loan);
          if (!kind || (*kind != TakeKind::kBatch && wait != 0)) {
            ++wrong;
            continue;
          }
          if (*kind != TakeKind::kBatch) continue;
          wrong += loan.samples[0] == sample && BytesRight(loan) ? 0 : 1;
          ++fetched;
          held.push_back(std::move(loan));
          while (held.size() > rng.Below(6)) let_go(rng.Below(held.size()));
        }
        while (!held.empty()) let_go(0);
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(fetched, 0);
  BatchLoan loan;
  for (Port* port : {port_.get(), other.get()}) {
    EXPECT_EQ(port->Take(9999, 0, &loan).status().code(), Code::kInvalidArgument);
    // A request carries the last releases along.
    EXPECT_TRUE(port->MetricsText());
  }
  EXPECT_EQ(AwaitMetric(engine(), "forebay_stage_leases", 0), 0u);
}

TEST_P(PortConformance, AForkedChildLeavesTheParentsClientAlone) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000));
  // Nothing to do for the engine yet: its threads hold no lock of the allocator.
  auto stream = port_->OpenStream(Declared(4));
  ASSERT_TRUE(stream);
  const pid_t child = fork();
  if (child == 0) {
    BatchLoan loan;
    bool refused = port_->Take(*stream, kSecond, &loan).status().code() == Code::kCancelled;
    refused = refused && port_->Release(1).code() == Code::kCancelled;
    refused = refused && port_->CloseStream(*stream).code() == Code::kCancelled;
    port_.reset();
    server_.reset();
    engine_.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_TRUE(port_->Declare(*stream, 0, {1, 2, 3, 4}, true).ok());
  BatchLoan loan;
  const auto taken = port_->Take(*stream, 10 * kSecond, &loan);
  ASSERT_TRUE(taken) << taken.status().ToString();
  EXPECT_EQ(*taken, TakeKind::kBatch);
}

std::string NameOf(const ::testing::TestParamInfo<Kind>& info) {
  switch (info.param) {
    case Kind::kLocal:
      return "Local";
    case Kind::kSocket:
      return "Socket";
    case Kind::kRing:
      return "Ring";
    case Kind::kFailover:
      return "Failover";
    case Kind::kAlone:
      return "Alone";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(Ports, PortConformance,
                         ::testing::Values(Kind::kLocal, Kind::kSocket, Kind::kRing,
                                           Kind::kFailover, Kind::kAlone),
                         NameOf);

}  // namespace
}  // namespace forebay
