// What every Client must do, run over an engine in the process and over one behind a socket.
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

#include "client/local_client.h"
#include "client/socket_client.h"
#include "daemon/server.h"
#include "daemon/test_files.h"

namespace forebay {
namespace {

using testing::AwaitMetric;
using testing::BytesRight;
using testing::MakeEngine;
using testing::Seeds;
using testing::SlowSource;
using testing::TestFiles;

enum class Kind { kLocal, kSocket, kRing };

class ClientConformance : public ::testing::TestWithParam<Kind> {
 protected:
  // An engine with one data set of `n` samples, and a client of it.
  void Make(uint64_t memory, uint32_t n, uint32_t low, uint32_t high,
            std::unique_ptr<Source> source = nullptr) {
    catalog_ = files_.Make(n, low, high);
    engine_ = MakeEngine(memory);
    if (source == nullptr) source = *MakeNullSource(16);
    auto dataset = engine_->AddDataset(catalog_, std::move(source));
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    Connect();
  }

  void Connect() {
    client_ = NewClient();
    ASSERT_NE(client_, nullptr);
  }

  std::unique_ptr<Client> NewClient() {
    if (GetParam() == Kind::kLocal) return std::make_unique<LocalClient>(*engine_);
    if (server_ == nullptr) {
      ServerOptions options;
      options.socket_path = files_.root() + "/socket";
      options.release_wait = 300 * kMilli;
      auto server = Server::Start(*engine_, options);
      EXPECT_TRUE(server) << server.status().ToString();
      if (!server) return nullptr;
      server_ = *std::move(server);
    }
    auto client =
        SocketClient::Attach(server_->socket_path(), 10 * kSecond, GetParam() == Kind::kRing);
    EXPECT_TRUE(client) << client.status().ToString();
    return client ? *std::move(client) : nullptr;
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
  std::unique_ptr<Client> client_;
};

TEST_P(ClientConformance, OrderAndBytesAreRightOverSeveralEpochs) {
  for (bool contiguous : {false, true}) {
    client_.reset();
    server_.reset();
    ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 150, 0, 200000));  // twice what the budget holds
    StreamOptions options = Sampled(7, 3);
    options.shape.contiguous = contiguous;
    auto stream = client_->OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      const auto order = EpochOrder(options.sampler, epoch);
      size_t at = 0;
      uint64_t index = 0;
      BatchLoan loan;
      while (true) {
        auto taken = client_->Take(*stream, 20 * kSecond, &loan);
        ASSERT_TRUE(taken) << taken.status().ToString();
        if (*taken == TakeKind::kEndOfEpoch) break;
        ASSERT_EQ(*taken, TakeKind::kBatch);
        EXPECT_EQ(loan.epoch, epoch);
        EXPECT_EQ(loan.index, index++);
        for (SampleId s : loan.samples) ASSERT_EQ(s, order[at++]);
        ASSERT_TRUE(BytesRight(client_->base(), loan));
        ASSERT_TRUE(client_->Release(loan.lease).ok());
      }
      EXPECT_EQ(at, order.size());
    }
  }
}

TEST_P(ClientConformance, DeclaredOrdersAreFollowedToTheirEnd) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 10, 10, 100));
  auto stream = client_->OpenStream(Declared(4));
  ASSERT_TRUE(stream);
  EXPECT_EQ(client_->Declare(*stream, 0, {0, 10}, true).code(), Code::kInvalidArgument);
  ASSERT_TRUE(client_->Declare(*stream, 0, {9, 9, 0, 3, 3}, false).ok());
  ASSERT_TRUE(client_->Declare(*stream, 1, {}, false).ok());
  ASSERT_TRUE(client_->Declare(*stream, 2, {1}, true).ok());
  BatchLoan loan;
  std::vector<LeaseId> leases;
  const auto take = [&] {
    auto taken = client_->Take(*stream, 10 * kSecond, &loan);
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
  for (LeaseId lease : leases) EXPECT_TRUE(client_->Release(lease).ok());
}

TEST_P(ClientConformance, ALongOrderArrivesWhole) {
  ASSERT_NO_FATAL_FAILURE(Make(128 << 20, 10, 10, 100));
  auto stream = client_->OpenStream(Declared(500000));
  ASSERT_TRUE(stream);
  std::vector<SampleId> order(2500000);
  SplitMix64 rng(1);
  for (SampleId& s : order) s = static_cast<SampleId>(rng.Below(10));
  ASSERT_TRUE(client_->Declare(*stream, 0, order, true).ok());
  std::vector<SampleId> got;
  for (int i = 0; i < 5; ++i) {
    BatchLoan loan;
    auto taken = client_->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken && *taken == TakeKind::kBatch) << taken.status().ToString();
    got.insert(got.end(), loan.samples.begin(), loan.samples.end());
    ASSERT_TRUE(client_->Release(loan.lease).ok());
  }
  EXPECT_TRUE(got == order);
}

TEST_P(ClientConformance, SeekGoesToAPositionOfAnEpoch) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 100, 10, 100));
  StreamOptions options = Sampled(5, 8);
  options.sampler.world = 2;
  options.sampler.rank = 1;
  auto stream = client_->OpenStream(options);
  ASSERT_TRUE(stream);
  ASSERT_TRUE(client_->Seek(*stream, 4, 40).ok());
  EXPECT_EQ(client_->Seek(*stream, 4, 41).code(), Code::kInvalidArgument);
  BatchLoan loan;
  auto taken = client_->Take(*stream, 10 * kSecond, &loan);
  ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
  EXPECT_EQ(loan.samples[0], EpochOrder(options.sampler, 4)[20]);
  EXPECT_EQ(loan.epoch, 4u);
  EXPECT_TRUE(client_->Release(loan.lease).ok());
}

TEST_P(ClientConformance, ALoanHoldsUntilItIsReleased) {
  ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 300, 100000, 100000));
  auto stream = client_->OpenStream(Sampled(4, 1));
  ASSERT_TRUE(stream);
  std::deque<BatchLoan> held;
  for (int i = 0; i < 300; ++i) {
    BatchLoan loan;
    auto taken = client_->Take(*stream, 10 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    if (*taken != TakeKind::kBatch) continue;
    held.push_back(std::move(loan));
    if (held.size() < 8) continue;
    ASSERT_TRUE(BytesRight(client_->base(), held.front()));
    ASSERT_TRUE(client_->Release(held.front().lease).ok());
    held.pop_front();
  }
  for (const BatchLoan& loan : held) {
    EXPECT_TRUE(BytesRight(client_->base(), loan));
    EXPECT_TRUE(client_->Release(loan.lease).ok());
  }
}

TEST_P(ClientConformance, UnreleasedLoansEndInAnErrorNotAHang) {
  ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 100, 400000, 400000));
  auto stream = client_->OpenStream(Sampled(4, 0));
  ASSERT_TRUE(stream);
  std::vector<LeaseId> leases;
  Status error;
  for (int i = 0; i < 20 && error.ok(); ++i) {
    BatchLoan loan;
    auto taken = client_->Take(*stream, 5 * kSecond, &loan);
    if (taken) {
      leases.push_back(loan.lease);
    } else {
      error = taken.error();
    }
  }
  EXPECT_EQ(error.code(), Code::kResourceExhausted);
  EXPECT_NE(error.message().find("not released"), std::string::npos) << error.message();
  for (LeaseId lease : leases) EXPECT_TRUE(client_->Release(lease).ok());
  BatchLoan loan;
  auto taken = client_->Take(*stream, 10 * kSecond, &loan);
  ASSERT_TRUE(taken) << taken.status().ToString();
  EXPECT_EQ(*taken, TakeKind::kBatch);
}

TEST_P(ClientConformance, FetchInRoughOrder) {
  ASSERT_NO_FATAL_FAILURE(Make(12 << 20, 200, 50000, 150000, SlowSource(kMilli / 2)));
  auto stream = client_->OpenStream(Declared(1, true));
  ASSERT_TRUE(stream);
  SplitMix64 rng(5);
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    Mt19937 generator(static_cast<uint32_t>(epoch));
    std::vector<SampleId> order = RandPerm(200, generator);
    ASSERT_TRUE(client_->Declare(*stream, epoch, order, epoch == 2).ok());
    for (size_t i = 0; i + 8 < order.size(); ++i) std::swap(order[i], order[i + rng.Below(8)]);
    for (SampleId sample : order) {
      BatchLoan loan;
      auto fetched = client_->Fetch(*stream, sample, 20 * kSecond, &loan);
      ASSERT_TRUE(fetched) << fetched.status().ToString();
      ASSERT_EQ(*fetched, TakeKind::kBatch);
      ASSERT_EQ(loan.samples, std::vector<SampleId>{sample});
      ASSERT_EQ(loan.lengths[0], catalog_->length(sample));
      ASSERT_TRUE(BytesRight(client_->base(), loan));
      ASSERT_TRUE(client_->Release(loan.lease).ok());
    }
  }
}

TEST_P(ClientConformance, ErrorsKeepCodeAndPath) {
  catalog_ = files_.Make(20, 100, 200);
  const std::string victim = catalog_->ObjectPath(catalog_->extent(5).object);
  std::filesystem::rename(victim, victim + ".away");
  engine_ = MakeEngine(16 << 20);
  ASSERT_TRUE(engine_->AddDataset(catalog_));
  ASSERT_NO_FATAL_FAILURE(Connect());
  auto batches = client_->OpenStream(Sampled(20, 0));
  auto items = client_->OpenStream(Declared(1, true));
  ASSERT_TRUE(batches && items);
  BatchLoan loan;
  const auto taken = client_->Take(*batches, 10 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kNotFound) << taken.error().ToString();
  EXPECT_NE(taken.error().message().find(victim), std::string::npos) << taken.error().message();
  const auto fetched = client_->Fetch(*items, 5, 10 * kSecond, &loan);
  ASSERT_FALSE(fetched);
  EXPECT_NE(fetched.error().message().find(victim), std::string::npos);
  std::filesystem::rename(victim + ".away", victim);
  for (StreamId stream : {*items, *batches}) {
    const auto again = stream == *items ? client_->Fetch(stream, 5, 10 * kSecond, &loan)
                                        : client_->Take(stream, 10 * kSecond, &loan);
    ASSERT_TRUE(again) << again.status().ToString();
    EXPECT_EQ(*again, TakeKind::kBatch);
    EXPECT_TRUE(client_->Release(loan.lease).ok());
  }
}

TEST_P(ClientConformance, WrongArgumentsAreNamed) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 10, 10, 100));
  BatchLoan loan;
  EXPECT_EQ(client_->Take(77, kSecond, &loan).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(client_->Seek(77, 0, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(client_->CloseStream(77).code(), Code::kInvalidArgument);
  EXPECT_EQ(client_->Declare(77, 0, {}, true).code(), Code::kInvalidArgument);
  StreamOptions options = Sampled(4, 0);
  options.shape.dataset = 3;
  const auto opened = client_->OpenStream(options);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message().find("data set 3"), std::string::npos);
  auto stream = client_->OpenStream(Declared(1, true));
  ASSERT_TRUE(stream);
  EXPECT_EQ(client_->Fetch(*stream, 10, kSecond, &loan).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(client_->Release(123456).ok());
}

TEST_P(ClientConformance, AWaitThatEndsGivesPendingAndLeavesNothingBehind) {
  constexpr Nanos kRead = 300 * kMilli;
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000, SlowSource(kRead)));
  const Nanos start = SteadyClock().Now();
  auto batches = client_->OpenStream(Sampled(4, 1));
  auto items = client_->OpenStream(Declared(1, true));
  ASSERT_TRUE(batches && items);
  BatchLoan loan;
  // On a machine that stands still meanwhile, a read may end before it is asked for.
  const auto check = [&](const Result<TakeKind>& kind) {
    ASSERT_TRUE(kind) << kind.status().ToString();
    if (*kind == TakeKind::kBatch && SteadyClock().Now() - start >= kRead) {
      ASSERT_TRUE(client_->Release(loan.lease).ok());
      return;
    }
    EXPECT_EQ(*kind, TakeKind::kPending);
  };
  for (Nanos wait : {Nanos{-5}, Nanos{0}, 20 * kMilli}) {
    ASSERT_NO_FATAL_FAILURE(check(client_->Take(*batches, wait, &loan)));
    ASSERT_NO_FATAL_FAILURE(check(client_->Fetch(*items, 40, wait, &loan)));
  }
  ASSERT_TRUE(client_->CloseStream(*batches).ok());
  EXPECT_EQ(AwaitMetric(*engine_, "forebay_stage_leases", 0), 0u);
}

TEST_P(ClientConformance, AClosedStreamEndsAWait) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000));
  auto stream = client_->OpenStream(Declared(4));
  ASSERT_TRUE(stream);
  std::atomic<bool> waiting = false;
  std::jthread closer([&] {
    while (!waiting) std::this_thread::yield();
    usleep(20000);
    EXPECT_TRUE(engine_->CloseStream(*stream).ok());
  });
  BatchLoan loan;
  waiting = true;
  const auto taken = client_->Take(*stream, 20 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kCancelled);
}

// Nothing is read after the order is known: only the Declare itself can end the wait.
TEST_P(ClientConformance, AnOrderDeclaredElsewhereEndsAWait) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000));
  auto stream = client_->OpenStream(Declared(2));
  ASSERT_TRUE(stream);
  BatchLoan loan;
  ASSERT_TRUE(client_->Declare(*stream, 0, {3, 4}, false).ok());
  ASSERT_EQ(*client_->Take(*stream, 10 * kSecond, &loan), TakeKind::kBatch);
  ASSERT_TRUE(client_->Release(loan.lease).ok());
  ASSERT_EQ(*client_->Take(*stream, 10 * kSecond, &loan), TakeKind::kEndOfEpoch);
  std::jthread declarer([&] {
    usleep(30000);
    EXPECT_TRUE(engine_->Declare(*stream, 1, {4, 3}, true).ok());
  });
  const auto taken = client_->Take(*stream, 20 * kSecond, &loan);
  ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{4, 3}));
  ASSERT_TRUE(client_->Release(loan.lease).ok());
}

// Three threads of one client and one of another; every loan is checked when it comes and when it
// goes.
TEST_P(ClientConformance, ThousandsOfRandomFetches) {
  ASSERT_NO_FATAL_FAILURE(Make(10 << 20, 400, 0, 80000));
  auto stream = client_->OpenStream(Declared(1, true));
  ASSERT_TRUE(stream);
  std::unique_ptr<Client> other = NewClient();
  ASSERT_NE(other, nullptr);
  std::atomic<int> wrong = 0;
  std::atomic<int> fetched = 0;
  {
    std::vector<std::jthread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Client& client = t == 0 ? *other : *client_;
        SplitMix64 rng(t);
        std::vector<BatchLoan> held;
        const auto let_go = [&](size_t i) {
          wrong += BytesRight(client.base(), held[i]) ? 0 : 1;
          wrong += client.Release(held[i].lease).ok() ? 0 : 1;
          std::swap(held[i], held.back());
          held.pop_back();
        };
        for (uint64_t i = 0; i < 50 * Seeds(); ++i) {
          BatchLoan loan;
          const auto sample = static_cast<SampleId>(rng.Below(400));
          const Nanos wait = rng.Below(4) == 0 ? 0 : 20 * kSecond;
          const auto kind = client.Fetch(*stream, sample, wait, &loan);
          if (!kind || (*kind != TakeKind::kBatch && wait != 0)) {
            ++wrong;
            continue;
          }
          if (*kind != TakeKind::kBatch) continue;
          wrong += loan.samples[0] == sample && BytesRight(client.base(), loan) ? 0 : 1;
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
  // A request carries the last releases along.
  BatchLoan loan;
  for (Client* client : {client_.get(), other.get()}) {
    EXPECT_EQ(client->Take(9999, 0, &loan).status().code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(AwaitMetric(*engine_, "forebay_stage_leases", 0), 0u);
}

TEST_P(ClientConformance, AForkedChildLeavesTheParentsClientAlone) {
  ASSERT_NO_FATAL_FAILURE(Make(16 << 20, 50, 1000, 2000));
  // Nothing to do for the engine yet: its threads hold no lock of the allocator.
  auto stream = client_->OpenStream(Declared(4));
  ASSERT_TRUE(stream);
  const pid_t child = fork();
  if (child == 0) {
    BatchLoan loan;
    bool refused = client_->Take(*stream, kSecond, &loan).status().code() == Code::kCancelled;
    refused = refused && client_->Release(1).code() == Code::kCancelled;
    refused = refused && client_->CloseStream(*stream).code() == Code::kCancelled;
    client_.reset();
    server_.reset();
    engine_.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_TRUE(client_->Declare(*stream, 0, {1, 2, 3, 4}, true).ok());
  BatchLoan loan;
  const auto taken = client_->Take(*stream, 10 * kSecond, &loan);
  ASSERT_TRUE(taken) << taken.status().ToString();
  EXPECT_EQ(*taken, TakeKind::kBatch);
}

std::string NameOf(const ::testing::TestParamInfo<Kind>& info) {
  if (info.param == Kind::kLocal) return "Local";
  return info.param == Kind::kSocket ? "Socket" : "Ring";
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientConformance,
                         ::testing::Values(Kind::kLocal, Kind::kSocket, Kind::kRing), NameOf);

}  // namespace
}  // namespace forebay
