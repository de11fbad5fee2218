// FailoverPort over real daemons that are killed, and over servers that come and go.
#include "port/failover_port.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/sampler.h"
#include "daemon/server.h"
#include "daemon/test_files.h"
#include "daemon/test_process.h"
#include "pipeline/pipeline.h"
#include "port/local_port.h"

namespace forebay {
namespace {

using testing::BytesRight;
using testing::Ended;
using testing::MakeEngine;
using testing::Seeds;
using testing::SmallEngine;
using testing::Stopped;
using testing::TestFiles;

constexpr uint32_t kSamples = 61;  // no world but 1 divides it

class FailoverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    catalog_ = files_.Make(kSamples, 0, 20000, true);
    options_.daemon.folder = files_.root() + "/run";
    options_.daemon.program = FOREBAYD;
    options_.daemon.settings = {"memory=33554432", "linger=0"};
    options_.engine = SmallEngine(32 << 20);
    options_.retry.assign(100, 10 * kMilli);
    options_.tell = [this](FailoverEvent event, const std::string& what) {
      MutexLock lock(mutex_);
      events_.push_back(event);
      whys_.push_back(what);
    };
  }
  void TearDown() override {
    const pid_t last = Daemon();
    port_.reset();
    EXPECT_TRUE(last == 0 || Await([last] { return Ended(last); }));
  }

  template <typename Condition>
  static bool Await(Condition condition) {
    const Nanos until = SteadyClock().Now() + 20 * kSecond;
    while (!condition()) {
      if (SteadyClock().Now() > until) return false;
      usleep(1000);
    }
    return true;
  }
  void Open() {
    auto port = FailoverPort::Open(options_);
    ASSERT_TRUE(port) << port.status().ToString();
    port_ = *std::move(port);
    auto dataset = port_->OpenDataset(catalog_, "");
    ASSERT_TRUE(dataset && *dataset == 0) << dataset.status().ToString();
  }

  // 0: there is none.
  pid_t Daemon() {
    const std::shared_ptr<SocketPort> daemon = port_ == nullptr ? nullptr : port_->daemon();
    return daemon == nullptr ? 0 : static_cast<pid_t>(daemon->server_pid());
  }
  // If it lives: that a daemon has gone shows at the next call.
  void Kill(int signal = SIGKILL) {
    const pid_t pid = Daemon();
    if (pid == 0 || Ended(pid)) return;
    ASSERT_EQ(kill(pid, signal), 0);
    ASSERT_TRUE(Await([pid] { return Ended(pid); }));
  }
  bool AwaitDaemon() {
    return Await([this] {
      (void)port_->MetricsText();
      const pid_t pid = Daemon();
      return pid != 0 && !Ended(pid);
    });
  }

  StreamOptions Sampled(uint32_t batch, uint64_t seed) const {
    StreamOptions options;
    options.shape.batch_size = batch;
    options.sampler.size = kSamples;
    options.sampler.seed = seed;
    return options;
  }

  static StreamOptions Itemised() {
    StreamOptions options;
    options.shape.itemised = true;
    options.declared = true;
    return options;
  }
  static bool FetchRight(Port& port, StreamId stream, SampleId sample) {
    BatchLoan loan;
    const auto fetched = port.Fetch(stream, sample, 20 * kSecond, &loan);
    EXPECT_TRUE(fetched) << fetched.status().ToString();
    if (!fetched || *fetched != TakeKind::kBatch) return false;
    return loan.samples == std::vector<SampleId>{sample} && BytesRight(loan) &&
           port.Release(loan.lease).ok();
  }

  std::vector<FailoverEvent> events() {
    MutexLock lock(mutex_);
    return events_;
  }
  std::string WhyAlone() {
    MutexLock lock(mutex_);
    return whys_.empty() ? "" : whys_.back();
  }

  // A server in this process, where the daemon's would be.
  ServerPtr Serve(Engine& engine, bool open_datasets) {
    ServerOptions options;
    options.socket_path = DaemonPlace(options_.daemon.folder).socket;
    options.open_datasets = open_datasets;
    auto server = Server::Start(engine, options);
    EXPECT_TRUE(server) << server.status().ToString();
    return server ? *std::move(server) : nullptr;
  }

  TestFiles files_;
  std::shared_ptr<const Catalog> catalog_;
  FailoverOptions options_;
  Mutex mutex_;
  std::vector<FailoverEvent> events_ GUARDED_BY(mutex_);
  std::vector<std::string> whys_ GUARDED_BY(mutex_);
  FailoverPortPtr port_;
};

// What a stream hands out, in order.
struct Step {
  TakeKind kind = TakeKind::kBatch;
  uint64_t epoch = 0;
  uint64_t index = 0;
  std::vector<SampleId> samples = {};
};

std::vector<Step> Expected(const StreamOptions& options) {
  std::vector<Step> out;
  const StreamShape& shape = options.shape;
  const uint64_t step = uint64_t{shape.batch_size} * options.sampler.world;
  for (uint64_t e = shape.first_epoch; e < shape.first_epoch + shape.epochs; ++e) {
    const std::vector<SampleId> order = EpochOrder(options.sampler, e);
    const uint64_t first = e == shape.first_epoch ? shape.first_position : 0;
    uint64_t index = first / step;
    for (size_t at = first / options.sampler.world; at < order.size(); at += shape.batch_size) {
      const size_t n = std::min<size_t>(shape.batch_size, order.size() - at);
      if (n < shape.batch_size && shape.drop_last) break;
      const auto from = order.begin() + static_cast<ptrdiff_t>(at);
      out.push_back({TakeKind::kBatch, e, index++, {from, from + static_cast<ptrdiff_t>(n)}});
    }
    out.push_back({TakeKind::kEndOfEpoch});
  }
  out.push_back({TakeKind::kEndOfStream});
  return out;
}

// Every stream is another one; daemons are killed, or asked to end, before random batches.
TEST_F(FailoverTest, RandomKillsLoseNothingAndDoubleNothing) {
  for (uint64_t seed = 0; seed < Seeds(); ++seed) {
    SCOPED_TRACE(StrCat("seed ", seed));
    SplitMix64 rng(seed);
    StreamOptions options = Sampled(1 + static_cast<uint32_t>(rng.Below(9)), seed);
    options.sampler.world = 1 + static_cast<uint32_t>(rng.Below(3));
    options.sampler.rank = static_cast<uint32_t>(rng.Below(options.sampler.world));
    options.sampler.drop_last = rng.Below(2) == 0;
    options.shape.drop_last = rng.Below(2) == 0;
    options.shape.contiguous = rng.Below(3) == 0;
    options.shape.first_epoch = rng.Below(3);
    options.shape.first_position = rng.Below(15) * options.sampler.world;
    options.shape.epochs = 2;
    const std::vector<Step> expected = Expected(options);
    ASSERT_NO_FATAL_FAILURE(Open());
    auto stream = port_->OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    std::deque<BatchLoan> held;
    uint64_t samples = 0;
    for (const Step& step : expected) {
      if (rng.Below(5) == 0 && Daemon() != 0) {
        ASSERT_NO_FATAL_FAILURE(Kill(rng.Below(2) == 0 ? SIGKILL : SIGTERM));
      } else if (rng.Below(6) == 0) {
        ASSERT_TRUE(AwaitDaemon()) << WhyAlone();
      }
      BatchLoan loan;
      const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      ASSERT_EQ(*taken, step.kind);
      if (step.kind != TakeKind::kBatch) continue;
      ASSERT_EQ(loan.samples, step.samples);
      ASSERT_EQ(loan.epoch, step.epoch);
      ASSERT_EQ(loan.index, step.index);
      ASSERT_EQ(loan.stream, *stream);
      ASSERT_TRUE(BytesRight(loan));
      samples += loan.samples.size();
      held.push_back(std::move(loan));
      while (held.size() > rng.Below(4)) {
        ASSERT_TRUE(BytesRight(held.front()));  // its engine may have gone since
        ASSERT_TRUE(port_->Release(held.front().lease).ok());
        held.pop_front();
      }
    }
    const auto stats = port_->Stats(*stream);
    ASSERT_TRUE(stats);
    uint64_t counted = 0;
    for (const EpochStats& epoch : *stats) counted += epoch.samples;
    EXPECT_EQ(counted, samples);
    EXPECT_LE(stats->size(), 2u);
    for (const BatchLoan& loan : held) ASSERT_TRUE(BytesRight(loan));
  }
}

TEST_F(FailoverTest, EachChangeIsSaidOnce) {
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_TRUE(events().empty());
  std::vector<StreamId> streams;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    auto stream = port_->OpenStream(Sampled(4, seed));
    ASSERT_TRUE(stream);
    streams.push_back(*stream);
  }
  ASSERT_NO_FATAL_FAILURE(Kill());
  {
    // As many notice at once as there are streams.
    std::vector<std::jthread> threads;
    for (const StreamId stream : streams) {
      threads.emplace_back([this, stream] {
        // What was announced before is right, and comes first.
        for (int i = 0; i < 40 || events().empty(); ++i) {
          BatchLoan loan;
          const auto taken = port_->Take(stream, 20 * kSecond, &loan);
          ASSERT_TRUE(taken) << taken.status().ToString();
          if (*taken == TakeKind::kBatch) {
            EXPECT_TRUE(BytesRight(loan));
            EXPECT_TRUE(port_->Release(loan.lease).ok());
          }
        }
      });
    }
  }
  ASSERT_TRUE(AwaitDaemon());
  ASSERT_TRUE(Await([this] { return events().size() == 2; }));
  EXPECT_EQ(events()[0], FailoverEvent::kAlone);
  EXPECT_EQ(events()[1], FailoverEvent::kReturned);
}

TEST_F(FailoverTest, AWaitGoesOnWhenTheDaemonDies) {
  options_.retry.clear();
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto slow = port_->OpenDataset(catalog_, "read_ms=1000");
  ASSERT_TRUE(slow);
  StreamOptions options = Sampled(4, 1);
  options.shape.dataset = *slow;
  auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  std::jthread killer([this] {
    usleep(30000);
    Kill();
  });
  BatchLoan loan;
  const auto taken = port_->Take(*stream, 30 * kSecond, &loan);
  ASSERT_TRUE(taken && *taken == TakeKind::kBatch) << taken.status().ToString();
  EXPECT_TRUE(BytesRight(loan));
  EXPECT_EQ(loan.dataset, *slow);
  killer.join();
  // On a machine that is busy the batch may have come before the kill.
  EXPECT_TRUE(Await([this] {
    (void)port_->MetricsText();
    return port_->engine() != nullptr;
  }));
}

TEST_F(FailoverTest, ADeclaredOrderGoesOn) {
  ASSERT_NO_FATAL_FAILURE(Open());
  StreamOptions options;
  options.shape.batch_size = 2;
  options.declared = true;
  auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  ASSERT_TRUE(port_->Declare(*stream, 3, {5, 4, 3, 2, 1}, false).ok());
  ASSERT_TRUE(port_->Declare(*stream, 7, {9, 8}, true).ok());
  const std::vector<Step> expected = {
      {TakeKind::kBatch, 3, 0, {5, 4}}, {TakeKind::kBatch, 3, 1, {3, 2}},
      {TakeKind::kBatch, 3, 2, {1}},    {TakeKind::kEndOfEpoch},
      {TakeKind::kBatch, 7, 0, {9, 8}}, {TakeKind::kEndOfEpoch},
      {TakeKind::kEndOfStream}};
  for (const Step& step : expected) {
    BatchLoan loan;
    const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    ASSERT_EQ(*taken, step.kind);
    if (step.kind == TakeKind::kBatch) {
      EXPECT_EQ(loan.samples, step.samples);
      EXPECT_EQ(loan.epoch, step.epoch);
      EXPECT_EQ(loan.index, step.index);
      EXPECT_TRUE(BytesRight(loan));
      EXPECT_TRUE(port_->Release(loan.lease).ok());
    }
    ASSERT_TRUE(AwaitDaemon());
    ASSERT_NO_FATAL_FAILURE(Kill());
  }
}

TEST_F(FailoverTest, FetchesOfManyThreadsGoOn) {
  ASSERT_NO_FATAL_FAILURE(Open());
  StreamOptions options;
  options.shape.itemised = true;
  options.declared = true;
  auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  std::vector<SampleId> order(kSamples);
  for (uint32_t i = 0; i < kSamples; ++i) order[i] = i;
  ASSERT_TRUE(port_->Declare(*stream, 0, order, false).ok());
  std::atomic<bool> over = false;
  std::vector<std::jthread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      SplitMix64 rng(t);
      while (!over) {
        const auto sample = static_cast<SampleId>(rng.Below(kSamples));
        BatchLoan loan;
        const auto fetched = port_->Fetch(*stream, sample, 20 * kSecond, &loan);
        ASSERT_TRUE(fetched && *fetched == TakeKind::kBatch) << fetched.status().ToString();
        ASSERT_EQ(loan.samples, std::vector<SampleId>{sample});
        ASSERT_TRUE(BytesRight(loan));
        ASSERT_TRUE(port_->Release(loan.lease).ok());
      }
    });
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(AwaitDaemon());
    usleep(20000);
    Kill();
  }
  over = true;
}

TEST_F(FailoverTest, AFetchLeavesADaemonThatDoesNotMove) {
  options_.retry.clear();
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto stream = port_->OpenStream(Itemised());
  ASSERT_TRUE(stream);
  ASSERT_TRUE(FetchRight(*port_, *stream, 1));
  const pid_t pid = Daemon();
  ASSERT_EQ(kill(pid, SIGSTOP), 0);
  ASSERT_TRUE(Await([pid] { return Stopped(pid); }));
  BatchLoan loan;
  const auto fetched = port_->Fetch(*stream, 2, 3600 * kSecond, &loan);
  EXPECT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_TRUE(fetched && *fetched == TakeKind::kBatch) << fetched.status().ToString();
  EXPECT_TRUE(BytesRight(loan));
  EXPECT_NE(port_->engine(), nullptr);
  EXPECT_TRUE(Await([pid] { return Ended(pid); }));
}

TEST_F(FailoverTest, AFetchThatWaitsHoldsUpNobody) {
  options_.retry.clear();
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto slow = port_->OpenDataset(catalog_, "open_ms=600000");
  ASSERT_TRUE(slow);
  StreamOptions options = Itemised();
  auto quick_stream = port_->OpenStream(options);
  options.shape.dataset = *slow;
  auto slow_stream = port_->OpenStream(options);
  ASSERT_TRUE(quick_stream && slow_stream);
  std::atomic<int> waiting = 0;
  std::vector<std::jthread> threads;
  for (SampleId sample = 0; sample < 3; ++sample) {
    threads.emplace_back([&, sample] {
      BatchLoan loan;
      ++waiting;
      EXPECT_FALSE(port_->Fetch(*slow_stream, sample, 3600 * kSecond, &loan));
      --waiting;
    });
  }
  ASSERT_TRUE(Await([&] { return waiting == 3; }));
  for (SampleId sample = 0; sample < kSamples; ++sample) {
    ASSERT_TRUE(FetchRight(*port_, *quick_stream, sample));
    ASSERT_TRUE(port_->MetricsText());
  }
  EXPECT_EQ(waiting, 3);
  EXPECT_TRUE(port_->CloseStream(*slow_stream).ok());
}

// A release is sent with the next request on its connection, and that one may not come: others wait
// for the memory.
TEST_F(FailoverTest, WhatWasReleasedOnAnIdleConnectionIsGivenBack) {
  options_.retry.clear();
  const EnginePtr engine = MakeEngine(32 << 20);
  const ServerPtr server = Serve(*engine, true);
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto slow = port_->OpenDataset(catalog_, "read_ms=200");
  ASSERT_TRUE(slow);
  StreamOptions options = Itemised();
  options.shape.dataset = *slow;
  const auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  const auto leases = [&] {
    for (const Registry::Sample& sample : engine->registry().Snapshot()) {
      if (sample.name == "forebay_stage_leases") return sample.value;
    }
    return ~uint64_t{0};
  };
  std::vector<BatchLoan> loans(3);
  {
    std::vector<std::jthread> threads;
    for (SampleId sample = 0; sample < 3; ++sample) {
      threads.emplace_back([&, sample] {
        const auto fetched = port_->Fetch(*stream, sample, 20 * kSecond, &loans[sample]);
        EXPECT_TRUE(fetched && *fetched == TakeKind::kBatch);
      });
    }
  }
  ASSERT_EQ(leases(), 3u);
  for (const BatchLoan& loan : loans) ASSERT_TRUE(port_->Release(loan.lease).ok());
  BatchLoan loan;
  const auto fetched = port_->Fetch(*stream, 0, 20 * kSecond, &loan);
  ASSERT_TRUE(fetched && *fetched == TakeKind::kBatch);
  EXPECT_TRUE(Await([&] { return leases() == 1; })) << leases();
  port_.reset();
}

TEST_F(FailoverTest, AStreamThatOthersFetchFromMovesWhenItIsNamed) {
  options_.retry.assign(3, 3600 * kSecond);
  ASSERT_NO_FATAL_FAILURE(Open());
  auto stream = port_->OpenSharedStream(Itemised());
  ASSERT_TRUE(stream);
  const auto first = port_->Address(*stream);
  ASSERT_TRUE(first);
  ASSERT_EQ(static_cast<pid_t>(first->daemon), Daemon());
  ASSERT_TRUE(port_->Declare(*stream, 0, {1, 2, 3}, false).ok());
  {
    auto other = SocketPort::Attach(DaemonPlace(options_.daemon.folder).socket, 5 * kSecond);
    ASSERT_TRUE(other) << other.status().ToString();
    EXPECT_TRUE(FetchRight(**other, first->stream, 1));
  }
  ASSERT_NO_FATAL_FAILURE(Kill());
  // Its threads may end, and its socket close, a moment after its first one.
  ASSERT_TRUE(Await([&] {
    const auto at = port_->Address(*stream);
    return at && at->daemon == 0;
  }));
  const auto alone = port_->Address(*stream);
  ASSERT_TRUE(alone && alone->daemon == 0) << alone.status().ToString();
  const std::shared_ptr<Engine> own = port_->engine();
  ASSERT_NE(own, nullptr);
  LocalPort worker(*own);
  EXPECT_TRUE(FetchRight(worker, alone->stream, 2));
  ASSERT_TRUE(port_->ComeBack());
  EXPECT_TRUE(FetchRight(worker, alone->stream, 3));  // who does not know of it is not left alone
  const auto back = port_->Address(*stream);
  ASSERT_TRUE(back);
  EXPECT_EQ(static_cast<pid_t>(back->daemon), Daemon());
  BatchLoan loan;
  EXPECT_FALSE(worker.Fetch(alone->stream, 4, 20 * kSecond, &loan));
  EXPECT_TRUE(port_->Declare(*stream, 9, {4, 5}, false).ok());
  EXPECT_TRUE(FetchRight(*port_, *stream, 4));
}

TEST_F(FailoverTest, AnAdoptedStreamIsReplacedWhenItHasGone) {
  options_.retry.clear();
  ASSERT_NO_FATAL_FAILURE(Open());
  auto stream = port_->OpenSharedStream(Itemised());
  ASSERT_TRUE(stream);
  const auto address = port_->Address(*stream);
  ASSERT_TRUE(address);
  auto child = FailoverPort::Open(options_);
  ASSERT_TRUE(child && (*child)->OpenDataset(catalog_, ""));
  auto adopted = (*child)->AdoptStream(Itemised(), *address);
  auto stranger = (*child)->AdoptStream(Itemised(), {address->daemon + 1, address->stream});
  ASSERT_TRUE(adopted && stranger);
  EXPECT_TRUE(FetchRight(**child, *adopted, 1));
  EXPECT_TRUE(FetchRight(**child, *stranger, 1));
  EXPECT_EQ((*child)->Address(*adopted)->stream, address->stream);
  EXPECT_NE((*child)->Address(*stranger)->stream, address->stream);
  EXPECT_TRUE((*child)->CloseStream(*stranger).ok());
  // It is not the child's to close.
  auto twice = (*child)->AdoptStream(Itemised(), *address);
  ASSERT_TRUE(twice && (*child)->CloseStream(*twice).ok());
  EXPECT_TRUE(FetchRight(*port_, *stream, 2));
  ASSERT_TRUE(port_->CloseStream(*stream).ok());
  EXPECT_TRUE(FetchRight(**child, *adopted, 3));
  EXPECT_NE((*child)->Address(*adopted)->stream, address->stream);
  ASSERT_NO_FATAL_FAILURE(Kill());
  EXPECT_TRUE(FetchRight(**child, *adopted, 4));
  EXPECT_NE((*child)->engine(), nullptr);
}

// The port has no connection left for fetches, and has not noticed that its daemon has gone.
TEST_F(FailoverTest, AnotherDaemonInItsPlaceIsNotAskedForItsStreams) {
  options_.daemon.program = "/nonexistent/forebayd";
  options_.retry.clear();
  const EnginePtr first = MakeEngine(32 << 20);
  const EnginePtr second = MakeEngine(32 << 20);
  ServerPtr server = Serve(*first, true);
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto stream = port_->OpenStream(Itemised());
  ASSERT_TRUE(stream) << stream.status().ToString();
  server.reset();
  server = Serve(*second, true);
  EXPECT_TRUE(FetchRight(*port_, *stream, 7));
  EXPECT_NE(port_->engine(), nullptr);
  port_.reset();
}

TEST_F(FailoverTest, WhoWasToldNotToComeBackDoesNot) {
  options_.retry.assign(3, 3600 * kSecond);
  options_.lived = 0;  // every daemon was worth it
  ASSERT_NO_FATAL_FAILURE(Open());
  port_->StopReturning();
  ASSERT_NO_FATAL_FAILURE(Kill());
  EXPECT_EQ(*port_->Describe(), "");
  EXPECT_FALSE(port_->returning());
}

// A lock that is held would make it wait for itself.
TEST_F(FailoverTest, WhoIsToldMayAskForMore) {
  options_.retry.assign(3, 3600 * kSecond);
  std::atomic<int> asked = 0;
  options_.tell = [&](FailoverEvent event, const std::string&) {
    if (event == FailoverEvent::kReturned) asked += port_->ComeBack() ? 1 : 0;
  };
  ASSERT_NO_FATAL_FAILURE(Open());
  ASSERT_NO_FATAL_FAILURE(Kill());
  EXPECT_EQ(*port_->Describe(), "");
  EXPECT_TRUE(port_->ComeBack());
  EXPECT_EQ(asked, 1);
}

TEST_F(FailoverTest, ItComesBackAtOnceWhenAskedTo) {
  options_.retry.assign(3, 3600 * kSecond);
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_TRUE(port_->ComeBack());
  EXPECT_FALSE(port_->returning());
  ASSERT_NO_FATAL_FAILURE(Kill());
  EXPECT_EQ(*port_->Describe(), "");
  EXPECT_TRUE(port_->returning());
  EXPECT_NE(port_->engine(), nullptr);
  EXPECT_TRUE(port_->ComeBack());
  EXPECT_EQ(port_->engine(), nullptr);
  EXPECT_NE(port_->Describe()->find("\"clients\""), std::string::npos);
  EXPECT_TRUE(Await([this] { return !port_->returning(); }));
  EXPECT_EQ(events(), (std::vector{FailoverEvent::kAlone, FailoverEvent::kReturned}));
  const auto text = port_->MetricsText();
  ASSERT_TRUE(text);
  for (const char* line : {"\nforebay_port_failovers_total 1\n", "\nforebay_port_returns_total 1\n",
                           "\nforebay_port_return_tries_total 1\n"}) {
    EXPECT_NE(text->find(line), std::string::npos) << line;
  }
}

TEST_F(FailoverTest, WithoutADaemonItBeginsAloneAndComesToOneThatStarts) {
  options_.daemon.program = "/nonexistent/forebayd";
  options_.retry.assign(40, 500 * kMilli);  // a try that fails clears the folder
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_EQ(events(), std::vector<FailoverEvent>{FailoverEvent::kAlone});
  StreamOptions options = Sampled(7, 5);
  options.shape.epochs = 1;
  auto stream = port_->OpenStream(options);
  auto idle = port_->OpenStream(Sampled(3, 1));
  ASSERT_TRUE(stream && idle);
  const EnginePtr engine = MakeEngine(32 << 20);
  ServerPtr server;
  for (const Step& step : Expected(options)) {
    BatchLoan loan;
    const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    ASSERT_EQ(*taken, step.kind);
    if (step.kind != TakeKind::kBatch) continue;
    EXPECT_EQ(loan.samples, step.samples);
    EXPECT_EQ(loan.index, step.index);
    EXPECT_TRUE(BytesRight(loan));
    EXPECT_TRUE(port_->Release(loan.lease).ok());
    if (step.index != 3) continue;
    server = Serve(*engine, true);
    ASSERT_TRUE(AwaitDaemon());
    // The memory of the engine in between is not kept by who does not use it.
    EXPECT_TRUE(Await([&] { return engine->dataset_count() == 1; }));
  }
  EXPECT_EQ(port_->engine(), nullptr);
  port_.reset();
}

TEST_F(FailoverTest, ADaemonThatDoesNotTakeTheStreamIsLeftForGood) {
  options_.daemon.program = "/nonexistent/forebayd";
  options_.retry.assign(40, 500 * kMilli);  // a try that fails clears the folder
  ASSERT_NO_FATAL_FAILURE(Open());
  StreamOptions options = Sampled(7, 5);
  options.shape.epochs = 1;
  auto stream = port_->OpenStream(options);
  ASSERT_TRUE(stream);
  const EnginePtr engine = MakeEngine(32 << 20);
  const ServerPtr server = Serve(*engine, false);
  ASSERT_TRUE(Await([this] { return events().size() >= 3; }));  // alone, returned, alone
  for (const Step& step : Expected(options)) {
    BatchLoan loan;
    const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    ASSERT_EQ(*taken, step.kind);
    if (step.kind != TakeKind::kBatch) continue;
    EXPECT_EQ(loan.samples, step.samples);
    EXPECT_TRUE(BytesRight(loan));
    EXPECT_TRUE(port_->Release(loan.lease).ok());
  }
  EXPECT_EQ(events().size(), 3u);
  EXPECT_NE(WhyAlone().find("takes no data sets"), std::string::npos) << WhyAlone();
  port_.reset();
}

TEST_F(FailoverTest, WhatWasLentIsAskedForAnew) {
  options_.retry.clear();
  ASSERT_NO_FATAL_FAILURE(Open());
  auto share = port_->Lend(16 << 20, 0, 0);
  ASSERT_TRUE(share) << share.status().ToString();
  auto stream = port_->OpenStream(Sampled(4, 1));
  ASSERT_TRUE(stream);
  ASSERT_NO_FATAL_FAILURE(Kill());
  // What was announced comes first.
  BatchLoan loan;
  ASSERT_TRUE(Await([&] {
    const auto taken = port_->Take(*stream, 20 * kSecond, &loan);
    EXPECT_TRUE(taken);
    if (taken && *taken == TakeKind::kBatch) {
      EXPECT_TRUE(port_->Release(loan.lease).ok());
    }
    return port_->engine() != nullptr;
  }));
  const std::shared_ptr<Engine> own = port_->engine();
  EXPECT_FALSE(own->Lend(20 << 20));
  share->reset();
  EXPECT_TRUE(Await([&] { return own->Lend(20 << 20).has_value(); }));
}

// The pipeline knows nothing of it: its slabs stay where they are, and so do its threads.
TEST_F(FailoverTest, APipelineGoesOn) {
  constexpr uint32_t kArrays = 40;
  constexpr uint32_t kBatch = 3;
  std::vector<std::string> paths;
  for (uint32_t i = 0; i < kArrays; ++i) {
    std::string header = "{'descr': '<u4', 'fortran_order': False, 'shape': (2,), }";
    header.resize(118, ' ');  // 10 bytes before it: a multiple of 64 in all
    header.back() = '\n';
    paths.push_back(StrCat(files_.root(), "/", i, ".npy"));
    std::ofstream file(paths.back(), std::ios::binary);
    file << std::string("\x93NUMPY\x01\x00\x76\x00", 10) << header;
    const uint32_t values[2] = {i, i * 1000};
    file.write(reinterpret_cast<const char*>(values), sizeof values);
  }
  auto built = BuildFileList(paths, {});
  ASSERT_TRUE(built) << built.status().ToString();
  const std::shared_ptr<const Catalog> arrays = *std::move(built);
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::shared_ptr<FailoverPort> port = std::move(port_);
  const auto dataset = port->OpenDataset(arrays, "");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  StreamOptions stream = Sampled(kBatch, 4);
  stream.sampler.size = kArrays;
  stream.shape.dataset = *dataset;
  stream.shape.epochs = 4;
  PipelineOptions options;
  options.decode.kind = DecodeOptions::Kind::kArray;
  options.decode.dtype = "<u4";
  options.decode.shape = {2};
  const auto daemon = [&]() -> pid_t {
    (void)port->MetricsText();
    const std::shared_ptr<SocketPort> now = port->daemon();
    const pid_t pid = now == nullptr ? 0 : static_cast<pid_t>(now->server_pid());
    return pid == 0 || Ended(pid) ? 0 : pid;
  };
  {
    auto pipeline = Pipeline::Make(port, stream, options);
    ASSERT_TRUE(pipeline) << pipeline.status().ToString();
    SplitMix64 rng(3);
    for (const Step& step : Expected(stream)) {
      if (const pid_t pid = daemon(); rng.Below(6) == 0 && pid != 0) {
        kill(pid, SIGKILL);
      } else if (rng.Below(6) == 0) {
        ASSERT_TRUE(Await([&] { return daemon() != 0; })) << WhyAlone();
      }
      FinishedBatch batch;
      const auto taken = (*pipeline)->Take(20 * kSecond, &batch);
      ASSERT_TRUE(taken) << taken.status().ToString();
      ASSERT_EQ(*taken, step.kind);
      if (step.kind != TakeKind::kBatch) continue;
      ASSERT_EQ(batch.samples, step.samples);
      ASSERT_EQ(batch.index, step.index);
      for (size_t i = 0; i < step.samples.size(); ++i) {
        uint32_t values[2] = {};
        std::memcpy(values, batch.data + i * sizeof values, sizeof values);
        ASSERT_EQ(values[0], step.samples[i]);
        ASSERT_EQ(values[1], step.samples[i] * 1000);
      }
      (*pipeline)->Release(batch.slab);
    }
    EXPECT_FALSE(events().empty());
  }
}

TEST_F(FailoverTest, SettingsThatADaemonRefusesAreTheCallersError) {
  options_.daemon.settings[0] = "memory=1";
  EXPECT_EQ(FailoverPort::Open(options_).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(events().empty());
}

}  // namespace
}  // namespace forebay
