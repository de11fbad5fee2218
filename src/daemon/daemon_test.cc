// The real forebayd, as clients start it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "base/system_calls.h"
#include "core/sampler.h"
#include "daemon/test_process.h"
#include "port/attach.h"
#include "wire/socket.h"

namespace forebay {
namespace {

using testing::Ended;
using testing::kSanitized;
using testing::Stopped;

// Real bytes: sample i is `length` times the same byte pattern.
std::string Content(uint32_t sample, size_t length) {
  SplitMix64 rng(sample + 1);
  std::string out(length, '\0');
  for (char& c : out) c = static_cast<char>(rng.Next());
  return out;
}

class DaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_daemon_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    options_.folder = root_ + "/run";
    options_.program = FOREBAYD;
    options_.settings = {"memory=33554432", "linger=0"};
  }
  void TearDown() override {
    std::error_code ignored;
    // Daemons have ended, and have left nothing.
    EXPECT_TRUE(Await([this] { return !std::filesystem::exists(options_.folder); }))
        << "left behind: " << Left();
    std::filesystem::remove_all(root_, ignored);
  }

  std::string Left() const {
    std::string out;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(options_.folder, ignored)) {
      out += entry.path().filename().string() + " ";
      if (entry.path().extension() == ".log") {
        std::ifstream log(entry.path());
        out += std::string(std::istreambuf_iterator<char>(log), {});
      }
    }
    return out;
  }

  template <typename Condition>
  static bool Await(Condition condition) {
    const Nanos until = SteadyClock().Now() + 20 * kSecond;
    while (!condition()) {
      if (SteadyClock().Now() > until) return false;
      usleep(2000);
    }
    return true;
  }
  // A program that is no forebayd, or becomes one later.
  std::string Script(const std::string& text) const {
    const std::string path = root_ + "/script";
    std::ofstream(path) << "#!/bin/sh\n" << text << "\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }

  std::unique_ptr<SocketPort> Attach() {
    auto client = AttachDaemon(options_);
    EXPECT_TRUE(client) << client.status().ToString();
    return client ? *std::move(client) : nullptr;
  }

  std::unique_ptr<Catalog> MakeFiles(uint32_t n, uint64_t longest = 3000) {
    std::vector<std::string> paths;
    SplitMix64 rng(n);
    for (uint32_t i = 0; i < n; ++i) {
      paths.push_back(StrCat(root_, "/", i));
      lengths_.push_back(rng.Below(longest));
      std::ofstream(paths.back(), std::ios::binary) << Content(i, lengths_.back());
    }
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return *std::move(built);
  }

  StreamOptions Sampled(DatasetId dataset, uint32_t n, uint64_t seed) const {
    StreamOptions options;
    options.shape.dataset = dataset;
    options.shape.batch_size = 7;
    options.sampler.size = n;
    options.sampler.seed = seed;
    return options;
  }

  bool BytesRight(const BatchLoan& loan) const {
    for (size_t i = 0; i < loan.samples.size(); ++i) {
      const std::string_view got(reinterpret_cast<const char*>(loan.base + loan.offsets[i]),
                                 loan.lengths[i]);
      if (got != Content(loan.samples[i], lengths_[loan.samples[i]])) return false;
    }
    return true;
  }

  // One epoch in the right order and bytes.
  void CheckEpoch(SocketPort& client, StreamId stream, const SamplerSpec& sampler, uint64_t epoch) {
    const auto order = EpochOrder(sampler, epoch);
    size_t at = 0;
    BatchLoan loan;
    while (true) {
      auto taken = client.Take(stream, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      if (*taken == TakeKind::kEndOfEpoch) break;
      ASSERT_EQ(*taken, TakeKind::kBatch);
      ASSERT_LE(at + loan.samples.size(), order.size());
      for (SampleId s : loan.samples) ASSERT_EQ(s, order[at++]);
      ASSERT_TRUE(BytesRight(loan));
      ASSERT_TRUE(client.Release(loan.lease).ok());
    }
    ASSERT_EQ(at, order.size());
  }

  uint64_t Metric(SocketPort& client, const std::string& name) {
    const auto text = client.Query(wire::Query::kPrometheus);
    EXPECT_TRUE(text) << text.status().ToString();
    const size_t at = text->find("\n" + name + " ");
    EXPECT_NE(at, std::string::npos) << *text;
    return std::strtoull(text->c_str() + at + name.size() + 2, nullptr, 10);
  }

  std::string root_;
  DaemonOptions options_;
  std::vector<size_t> lengths_;
};

TEST_F(DaemonTest, StartsServesAndEndsWithItsLastClient) {
  const auto catalog = MakeFiles(100);
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  const auto pid = static_cast<pid_t>(client->server_pid());
  EXPECT_NE(pid, getpid());
  EXPECT_NE(getsid(pid), getsid(0));
  EXPECT_TRUE(client->SetKnobs({"hedge_one_in"}, {0}).ok());  // reads are counted
  auto dataset = client->AddDataset(*catalog, "");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  const StreamOptions options = Sampled(*dataset, 100, 4);
  auto stream = client->OpenStream(options);
  ASSERT_TRUE(stream) << stream.status().ToString();
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    ASSERT_NO_FATAL_FAILURE(CheckEpoch(*client, *stream, options.sampler, epoch));
  }
  EXPECT_EQ(Metric(*client, "forebay_source_reads_total"), 100u);
  const auto stats = client->Stats(*stream);
  ASSERT_TRUE(stats);
  ASSERT_GE(stats->size(), 3u);
  EXPECT_EQ((*stats)[0].samples, 100u);
  EXPECT_EQ((*stats)[0].batches, 15u);
  EXPECT_EQ((*stats)[0].source_reads, 100u);
  client.reset();
  EXPECT_TRUE(Await([&] { return Ended(pid); }));
}

TEST_F(DaemonTest, AReadyBatchCostsNoSystemCall) {
  constexpr uint32_t kSamples = 400;
  const auto catalog = MakeFiles(kSamples);
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  auto dataset = client->AddDataset(*catalog, "");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  auto stream = client->OpenStream(Sampled(*dataset, kSamples, 4));
  ASSERT_TRUE(stream) << stream.status().ToString();
  std::string refused;
  uint64_t ready = 0;
  uint64_t calls_of_ready = 0;
  uint64_t calls_in_all = 0;
  std::jthread([&] {
    BatchLoan loan;
    std::shared_ptr<const SystemCalls> calls;
    // The first epochs make what memory they need.
    for (int epoch = 0; epoch < 20;) {
      if (epoch == 10 && calls == nullptr) {
        auto counting = SystemCalls::Count();
        if (!counting) {
          refused = counting.status().ToString();
          return;
        }
        calls = *std::move(counting);
        getppid();  // is counted
      }
      const uint64_t before = calls == nullptr ? 0 : calls->count();
      const uint64_t empty = client->EmptyRings(*stream);
      auto taken = client->Take(*stream, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      const bool batch = *taken == TakeKind::kBatch;
      ASSERT_TRUE(!batch || client->Release(loan.lease).ok());
      if (*taken == TakeKind::kEndOfEpoch) ++epoch;
      if (calls == nullptr || client->EmptyRings(*stream) != empty) continue;
      ++ready;
      calls_of_ready += calls->count() - before;
    }
    calls_in_all = calls->count();
  }).join();
  if (!refused.empty()) GTEST_SKIP() << refused;
  EXPECT_GT(calls_in_all, 0u);
  if (kSanitized) return;  // what checks the memory makes calls of its own
  EXPECT_GT(ready, 100u);  // of 580
  EXPECT_EQ(calls_of_ready, 0u);
}

TEST_F(DaemonTest, ManyThatStartAtOnceGetOne) {
  options_.settings[1] = "linger=1";
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<SocketPort>> clients(8);
    {
      std::vector<std::jthread> threads;
      for (auto& client : clients) threads.emplace_back([&] { client = Attach(); });
    }
    for (const auto& client : clients) {
      ASSERT_NE(client, nullptr);
      EXPECT_EQ(client->server_pid(), clients[0]->server_pid());
    }
  }
}

TEST_F(DaemonTest, ComingsAndGoingsNeverMeetADyingDaemon) {
  for (int i = 0; i < 10; ++i) {
    std::vector<std::jthread> threads;
    for (uint64_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        const auto client = Attach();
        ASSERT_NE(client, nullptr);
        // It stays with who has come.
        const auto said = client->Query(wire::Query::kPrometheus);
        EXPECT_TRUE(said) << said.status().ToString();
        usleep(static_cast<useconds_t>(SplitMix64(t + 10 * static_cast<uint64_t>(i)).Below(5000)));
      });
    }
  }
}

TEST_F(DaemonTest, ClientsOfOneDataSetReadItOnce) {
  const auto catalog = MakeFiles(200);
  std::vector<std::unique_ptr<SocketPort>> clients;
  std::vector<std::jthread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    clients.push_back(Attach());
    ASSERT_NE(clients.back(), nullptr);
    EXPECT_TRUE(clients.back()->SetKnobs({"hedge_one_in"}, {0}).ok());  // reads are counted
    threads.emplace_back([&, seed, &client = *clients.back()] {
      auto dataset = client.AddDataset(*catalog, "");
      ASSERT_TRUE(dataset) << dataset.status().ToString();
      EXPECT_EQ(*dataset, 0u);
      const StreamOptions options = Sampled(*dataset, 200, seed);
      auto stream = client.OpenStream(options);
      ASSERT_TRUE(stream);
      for (uint64_t epoch = 0; epoch < 3; ++epoch) {
        ASSERT_NO_FATAL_FAILURE(CheckEpoch(client, *stream, options.sampler, epoch));
      }
    });
  }
  threads.clear();
  EXPECT_EQ(Metric(*clients[0], "forebay_source_reads_total"), 200u);
  const auto text = clients[0]->Query(wire::Query::kDescribe);
  ASSERT_TRUE(text);
  EXPECT_NE(text->find("\"samples\":200"), std::string::npos) << *text;
}

TEST_F(DaemonTest, AKilledDaemonIsNoticedAndReplaced) {
  const auto catalog = MakeFiles(50);
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  auto dataset = client->AddDataset(*catalog, "open_ms=60000");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  auto stream = client->OpenStream(Sampled(*dataset, 50, 0));
  ASSERT_TRUE(stream);
  const auto pid = static_cast<pid_t>(client->server_pid());
  std::jthread killer([pid] {
    usleep(50000);
    kill(pid, SIGKILL);
  });
  BatchLoan loan;
  const auto taken = client->Take(*stream, 30 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kUnavailable) << taken.error().ToString();
  EXPECT_FALSE(client->connected());
  // The socket and the lock of the dead one are there still.
  EXPECT_TRUE(std::filesystem::exists(DaemonPlace(options_.folder).socket));
  const auto next = Attach();
  ASSERT_NE(next, nullptr);
  EXPECT_NE(next->server_pid(), client->server_pid());
}

TEST_F(DaemonTest, WhatAKilledDaemonLeftIsCleared) {
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  const auto pid = static_cast<pid_t>(client->server_pid());
  ClearDeadDaemon(options_.folder);  // it lives: nothing happens
  EXPECT_TRUE(std::filesystem::exists(DaemonPlace(options_.folder).socket));
  kill(pid, SIGKILL);
  ASSERT_TRUE(Await([&] { return Ended(pid); }));
  ClearDeadDaemon(options_.folder);
  EXPECT_FALSE(std::filesystem::exists(options_.folder));
}

// A daemon that is asked to end leaves what its clients hold as it is.
TEST_F(DaemonTest, LoansOutliveATerminatedDaemon) {
  // Twice what the daemon's memory holds: what is given back is soon used again.
  const auto catalog = MakeFiles(400, 100000);
  options_.settings[0] = "memory=12582912";
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  auto dataset = client->AddDataset(*catalog, "");
  ASSERT_TRUE(dataset);
  auto stream = client->OpenStream(Sampled(*dataset, 400, 1));
  ASSERT_TRUE(stream);
  std::vector<BatchLoan> held(5);
  for (BatchLoan& loan : held) {
    const auto taken = client->Take(*stream, 20 * kSecond, &loan);
    ASSERT_TRUE(taken && *taken == TakeKind::kBatch);
  }
  const auto pid = static_cast<pid_t>(client->server_pid());
  kill(pid, SIGTERM);
  ASSERT_TRUE(Await([&] { return Ended(pid); }));
  for (const BatchLoan& loan : held) EXPECT_TRUE(BytesRight(loan));
  // What was announced before is right, too; then comes the truth.
  BatchLoan loan;
  while (true) {
    const auto taken = client->Take(*stream, kSecond, &loan);
    if (!taken) {
      EXPECT_EQ(taken.error().code(), Code::kUnavailable);
      break;
    }
    ASSERT_TRUE(BytesRight(loan));
  }
}

TEST_F(DaemonTest, AKilledClientsLoansAreFreed) {
  const auto catalog = MakeFiles(100);
  const auto watcher = Attach();
  ASSERT_NE(watcher, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    auto client = AttachDaemon(options_);
    if (!client) _exit(1);
    const auto dataset = (*client)->AddDataset(*catalog, "");
    if (!dataset) _exit(2);
    const auto stream = (*client)->OpenStream(Sampled(*dataset, 100, 1));
    BatchLoan loan;
    for (int i = 0; i < 3; ++i) {
      const auto taken = (*client)->Take(*stream, 20 * kSecond, &loan);
      if (!taken || *taken != TakeKind::kBatch) _exit(3);
    }
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
  EXPECT_TRUE(Await([&] { return Metric(*watcher, "forebay_stage_leases") == 0; }));
  EXPECT_EQ(Metric(*watcher, "forebay_daemon_clients"), 1u);
  EXPECT_EQ(Metric(*watcher, "forebay_daemon_rings"), 0u);
}

// As `train.py | tee`: the reader's end comes with the program's, not with the daemon's.
TEST_F(DaemonTest, HoldsNothingOfTheProgramThatStartedIt) {
  options_.settings[1] = "linger=1";
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);  // not close-on-exec
  const auto client = Attach();
  ASSERT_NE(client, nullptr);
  close(ends[1]);
  char byte = 0;
  EXPECT_EQ(read(ends[0], &byte, 1), 0);
  close(ends[0]);
}

TEST_F(DaemonTest, TheFirstClientsSettingsHoldAndTheSecondSeesThem) {
  const auto first = Attach();
  options_.settings[0] = "memory=67108864";
  const auto second = Attach();
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->server_pid(), first->server_pid());
  EXPECT_EQ(second->settings(), "memory=33554432\nlinger=0\n");
  EXPECT_EQ(second->budget(), 33554432u);
}

TEST_F(DaemonTest, WrongSettingsAreTheStartersError) {
  options_.settings[0] = "memory=1";
  const auto client = AttachDaemon(options_);
  ASSERT_FALSE(client);
  EXPECT_EQ(client.error().code(), Code::kInvalidArgument) << client.error().ToString();
  options_.settings[0] = "nonsense=1";
  EXPECT_EQ(AttachDaemon(options_).status().code(), Code::kInvalidArgument);
  options_.program = "/nonexistent/forebayd";
  EXPECT_EQ(AttachDaemon(options_).status().code(), Code::kUnavailable);
}

TEST_F(DaemonTest, WhatHangsInsteadOfStartingIsEnded) {
  options_.program = Script("exec sleep 600");
  options_.timeout = kSecond / 2;
  const Nanos start = SteadyClock().Now();
  EXPECT_EQ(AttachDaemon(options_).status().code(), Code::kUnavailable);
  EXPECT_LT(SteadyClock().Now() - start, 60 * kSecond);
  int status = 0;
  EXPECT_EQ(waitpid(-1, &status, WNOHANG), -1) << "a child that was not reaped";
}

// A worker that another thread forks while the daemon starts must not keep its lock.
TEST_F(DaemonTest, ForkedChildrenHoldNothingOfItsStart) {
  options_.program = Script(StrCat("sleep 0.3; exec ", FOREBAYD, " \"$@\""));
  std::unique_ptr<SocketPort> client;
  std::jthread starter([&] { client = Attach(); });
  EXPECT_TRUE(Await([this] { return std::filesystem::exists(DaemonPlace(options_.folder).log); }));
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  starter.join();
  if (client != nullptr) {
    const auto pid = static_cast<pid_t>(client->server_pid());
    kill(pid, SIGKILL);
    EXPECT_TRUE(Await([&] { return Ended(pid); }));
    options_.timeout = 5 * kSecond;
    options_.program = FOREBAYD;
    EXPECT_NE(Attach(), nullptr);
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_F(DaemonTest, AStoppedDaemonIsGivenUp) {
  const auto catalog = MakeFiles(50);
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  auto dataset = client->AddDataset(*catalog, "open_ms=60000");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  auto stream = client->OpenStream(Sampled(*dataset, 50, 0));
  ASSERT_TRUE(stream);
  BatchLoan loan;
  // A slow storage is no reason.
  for (int i = 0; i < 10; ++i) {
    const auto taken = client->Take(*stream, 50 * kMilli, &loan);
    ASSERT_TRUE(taken && *taken == TakeKind::kPending) << taken.status().ToString();
  }
  const auto pid = static_cast<pid_t>(client->server_pid());
  kill(pid, SIGSTOP);
  Result<TakeKind> taken = TakeKind::kPending;
  const Nanos until = SteadyClock().Now() + 30 * kSecond;
  while (taken && SteadyClock().Now() < until) taken = client->Take(*stream, 50 * kMilli, &loan);
  kill(pid, SIGCONT);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kUnavailable) << taken.error().ToString();
  EXPECT_FALSE(client->connected());
  EXPECT_TRUE(Await([&] { return Ended(pid); }));
}

// By who fetches single samples, however long it would wait for the storage.
TEST_F(DaemonTest, AStoppedDaemonIsGivenUpByWhoFetches) {
  const auto catalog = MakeFiles(50);
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  auto dataset = client->AddDataset(*catalog, "open_ms=1500");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  StreamOptions options = Sampled(*dataset, 50, 0);
  options.shape.itemised = true;
  auto stream = client->OpenStream(options);
  ASSERT_TRUE(stream) << stream.status().ToString();
  BatchLoan loan;
  // A slow storage is no reason, and is not asked twice.
  auto fetched = client->Fetch(*stream, 1, 60 * kSecond, &loan);
  ASSERT_TRUE(fetched && *fetched == TakeKind::kBatch) << fetched.status().ToString();
  EXPECT_LT(Metric(*client, "forebay_source_reads_total"), 60u);
  ASSERT_TRUE(client->Release(loan.lease).ok());
  const auto pid = static_cast<pid_t>(client->server_pid());
  kill(pid, SIGSTOP);
  ASSERT_TRUE(Await([pid] { return Stopped(pid); }));
  fetched = client->Fetch(*stream, 2, 3600 * kSecond, &loan);
  kill(pid, SIGCONT);
  ASSERT_FALSE(fetched);
  EXPECT_EQ(fetched.error().code(), Code::kUnavailable) << fetched.error().ToString();
  EXPECT_FALSE(client->connected());
  EXPECT_TRUE(Await([&] { return Ended(pid); }));
}

TEST_F(DaemonTest, WithoutDescriptorsForRingsBatchesAreAskedFor) {
  const auto catalog = MakeFiles(100);
  options_.program = Script(StrCat("ulimit -n 48; exec ", FOREBAYD, " \"$@\""));
  auto client = Attach();
  ASSERT_NE(client, nullptr);
  auto dataset = client->AddDataset(*catalog, "");
  ASSERT_TRUE(dataset) << dataset.status().ToString();
  const StreamOptions options = Sampled(*dataset, 100, 4);
  auto stream = client->OpenStream(options);
  ASSERT_TRUE(stream);
  ASSERT_NO_FATAL_FAILURE(CheckEpoch(*client, *stream, options.sampler, 0));
  for (int i = 0; i < 60; ++i) {
    stream = client->OpenStream(options);
    ASSERT_TRUE(stream) << i << ": " << stream.status().ToString();
  }
  ASSERT_NO_FATAL_FAILURE(CheckEpoch(*client, *stream, options.sampler, 0));
  EXPECT_LT(Metric(*client, "forebay_daemon_rings"), 60u);
}

TEST_F(DaemonTest, KnobsChangeAllOrNone) {
  const auto client = Attach();
  ASSERT_NE(client, nullptr);
  const auto has = [&](const std::string& what) {
    const auto text = client->Query(wire::Query::kDescribe);
    return text && text->find(what) != std::string::npos;
  };
  EXPECT_TRUE(client->SetKnobs({"source_reads_in_flight", "daemon_linger_seconds"}, {9, 1}).ok());
  EXPECT_TRUE(has("\"name\":\"source_reads_in_flight\",\"value\":9,"));
  EXPECT_TRUE(has("\"name\":\"daemon_linger_seconds\",\"value\":1,"));
  const Status wrong =
      client->SetKnobs({"source_reads_in_flight", "daemon_linger_seconds"}, {5, -1});
  EXPECT_EQ(wrong.code(), Code::kInvalidArgument);
  EXPECT_EQ(client->SetKnobs({"source_reads_in_flight", "nothing"}, {5, 1}).code(),
            Code::kInvalidArgument);
  EXPECT_TRUE(has("\"name\":\"source_reads_in_flight\",\"value\":9,"));
}

TEST_F(DaemonTest, NobodyElsesFolderIsUsed) {
  ASSERT_EQ(mkdir(options_.folder.c_str(), 0755), 0);
  EXPECT_EQ(AttachDaemon(options_).status().code(), Code::kPermissionDenied);
  std::filesystem::remove_all(options_.folder);
}

std::string Get(uint16_t port, const std::string& request) {
  const OwnedFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return "";
  (void)!send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL);
  std::string out;
  char room[4096];
  for (ssize_t n = 0; (n = read(fd.get(), room, sizeof room)) > 0;) {
    out.append(room, static_cast<size_t>(n));
  }
  return out;
}

TEST_F(DaemonTest, MetricsComeOverHttp) {
  // A free port, as far as one can know.
  uint16_t port = 0;
  {
    const OwnedFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    ASSERT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port = ntohs(address.sin_port);
  }
  options_.settings.push_back(StrCat("metrics_port=", port));
  const auto client = Attach();
  ASSERT_NE(client, nullptr);
  const std::string got = Get(port, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(got.starts_with("HTTP/1.1 200 OK\r\n")) << got;
  EXPECT_NE(got.find("\nforebay_daemon_clients 1\n"), std::string::npos) << got;
  const std::string status = Get(port, "GET /status.json HTTP/1.0\r\n\r\n");
  EXPECT_NE(status.find(StrCat("\"url\":\"http://127.0.0.1:", port, "/\"")), std::string::npos);
  const std::string page = Get(port, "GET / HTTP/1.0\r\n\r\n");
  EXPECT_NE(page.find("<!doctype html>"), std::string::npos) << page;
}

}  // namespace
}  // namespace forebay
