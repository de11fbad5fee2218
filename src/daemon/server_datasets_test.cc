// Data sets that clients of a server open, close, or leave behind.
#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "daemon/server.h"
#include "daemon/test_files.h"
#include "daemon/test_process.h"
#include "port/socket_port.h"
#include "wire/socket.h"

namespace forebay {
namespace {

using testing::BytesRight;
using testing::MakeEngine;
using testing::TestFiles;

size_t CountIn(const char* folder) {
  size_t count = 0;
  DIR* const dir = opendir(folder);
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

uint64_t ResidentBytes() {
  uint64_t size = 0;
  uint64_t resident = 0;
  FILE* const file = fopen("/proc/self/statm", "r");
  EXPECT_EQ(fscanf(file, "%lu %lu", &size, &resident), 2);
  fclose(file);
  return resident * 4096;
}

class ServerDatasets : public ::testing::Test {
 protected:
  void SetUp() override {
    engine_ = MakeEngine(uint64_t{32} << 20);
    ServerOptions options;
    options.socket_path = files_.root() + "/socket";
    options.open_datasets = true;
    auto server = Server::Start(*engine_, options);
    ASSERT_TRUE(server) << server.status().ToString();
    server_ = *std::move(server);
  }

  std::unique_ptr<SocketPort> Attach() {
    auto client = SocketPort::Attach(files_.root() + "/socket", 10 * kSecond);
    EXPECT_TRUE(client) << client.status().ToString();
    return client ? *std::move(client) : nullptr;
  }

  // Whether it comes to so many within ten seconds.
  bool AwaitOpen(size_t datasets) {
    const Nanos until = SteadyClock().Now() + 10 * kSecond;
    while (engine_->open_datasets() != datasets && SteadyClock().Now() < until) usleep(1000);
    return engine_->open_datasets() == datasets;
  }

  // `by_number`: samples are numbered as their files are named.
  static void ReadAll(SocketPort& client, DatasetId dataset, uint32_t samples,
                      bool by_number = true) {
    StreamOptions options;
    options.shape.dataset = dataset;
    options.shape.batch_size = 8;
    options.sampler.size = samples;
    const auto stream = client.OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    size_t seen = 0;
    while (true) {
      BatchLoan loan;
      const auto taken = client.Take(*stream, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      if (*taken != TakeKind::kBatch) break;
      EXPECT_TRUE(!by_number || BytesRight(loan));
      seen += loan.samples.size();
      ASSERT_TRUE(client.Release(loan.lease).ok());
    }
    EXPECT_EQ(seen, samples);
    ASSERT_TRUE(client.CloseStream(*stream).ok());
  }

  // The first `n` files of the same folder.
  std::shared_ptr<const Catalog> Some(uint32_t n) {
    if (all_ == nullptr) all_ = files_.Make(64, 100, 2000, true);
    std::vector<std::string> paths;
    for (uint32_t i = 0; i < n; ++i) paths.push_back(all_->ObjectPath(i));
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built);
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  TestFiles files_;
  std::shared_ptr<const Catalog> all_;
  EnginePtr engine_;
  ServerPtr server_;
};

TEST_F(ServerDatasets, AThousandOfManyClientsCostWhatTenDo) {
  size_t threads = 0;
  size_t descriptors = 0;
  uint64_t memory = 0;
  std::unique_ptr<SocketPort> client = Attach();
  for (uint32_t i = 0; i < 1000; ++i) {
    if (i == 200) memory = ResidentBytes();  // what is kept by age is kept by then
    const auto catalog = Some(1 + i % 64);
    const auto dataset = client->OpenDataset(catalog, i % 3 == 0 ? "read_ms=0" : "");
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    ReadAll(*client, *dataset, static_cast<uint32_t>(catalog->size()));
    if (i % 10 == 9) {
      client = Attach();  // who goes without a word closes what it had
    } else {
      client->CloseDataset(*dataset);
    }
    if (i == 9) {
      ASSERT_TRUE(AwaitOpen(0));
      threads = CountIn("/proc/self/task") + 20;
      descriptors = CountIn("/proc/self/fd") + 4;
    }
  }
  ASSERT_TRUE(AwaitOpen(0));
  // Who closes the last descriptors is not waited for.
  const Nanos until = SteadyClock().Now() + 20 * kSecond;
  while ((CountIn("/proc/self/task") > threads || CountIn("/proc/self/fd") > descriptors) &&
         SteadyClock().Now() < until) {
    usleep(10'000);
  }
  EXPECT_LE(CountIn("/proc/self/task"), threads);
  EXPECT_LE(CountIn("/proc/self/fd"), descriptors);
  EXPECT_LE(engine_->dataset_count(), 24u);
  // 5 KiB a data set; sanitizers keep what was given back for a while.
  if (!testing::kSanitized) {
    EXPECT_LE(ResidentBytes(), memory + (4 << 20));
  }
}

TEST_F(ServerDatasets, ItStaysWhileAnyClientHasIt) {
  const auto catalog = Some(40);
  auto one = Attach();
  auto two = Attach();
  const auto first = one->OpenDataset(catalog, "");
  const auto second = two->OpenDataset(catalog, "");
  ASSERT_TRUE(first && second);
  EXPECT_EQ(*first, *second);
  one.reset();
  ReadAll(*two, *second, 40);
  EXPECT_EQ(engine_->open_datasets(), 1u);
  // Nobody closes for another one.
  auto three = Attach();
  three->CloseDataset(*second);
  ReadAll(*two, *second, 40);
  two->CloseDataset(*second);
  EXPECT_TRUE(AwaitOpen(0));
  // What it kept is there for the next.
  const uint64_t reads = testing::MetricValue(*engine_, "forebay_source_reads_total");
  const auto third = three->OpenDataset(catalog, "");
  ASSERT_TRUE(third);
  ReadAll(*three, *third, 40);
  EXPECT_EQ(testing::MetricValue(*engine_, "forebay_source_reads_total"), reads);
}

// A catalog of 100 M samples takes seconds to be taken over.
TEST_F(ServerDatasets, OneThatIsBeingAddedStallsNobody) {
  std::mutex mutex;
  std::condition_variable changed;
  bool inside = false;
  bool go = false;
  const auto other = Some(20);
  auto client = Attach();
  const auto small = client->OpenDataset(other, "");
  ASSERT_TRUE(small);
  engine_->SetSourceWrap([&](DatasetId, const std::shared_ptr<const Catalog>&,
                             std::unique_ptr<Source> inner) -> Result<std::unique_ptr<Source>> {
    std::unique_lock lock(mutex);
    inside = true;
    changed.notify_all();
    changed.wait(lock, [&] { return go; });
    return inner;
  });
  const std::string folder = std::filesystem::path(all_->ObjectPath(0)).parent_path();
  auto large = BuildCatalog(folder, {});
  ASSERT_TRUE(large) << large.status().ToString();
  const std::shared_ptr<const Catalog> catalog = *std::move(large);
  std::jthread opener([&] {
    auto slow = Attach();
    const auto dataset = slow->OpenDataset(catalog, "");
    EXPECT_TRUE(dataset) << dataset.status().ToString();
    if (dataset) ReadAll(*slow, *dataset, 64, false);
  });
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return inside; }));
  }
  ReadAll(*client, *small, 20);
  const auto third = Attach();
  EXPECT_TRUE(third != nullptr && third->MetricsText());
  {
    std::unique_lock lock(mutex);
    go = true;
    changed.notify_all();
  }
  opener.join();
  engine_->SetSourceWrap(nullptr);
  client->CloseDataset(*small);
  EXPECT_TRUE(AwaitOpen(0));
}

TEST_F(ServerDatasets, ChangeTimesComeWithACatalog) {
  const std::vector<std::string> paths = {files_.root() + "/0", files_.root() + "/1"};
  const auto look = [&] {
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  };
  for (const std::string& path : paths) std::ofstream(path) << "some";
  const auto then = look();
  auto one = Attach();
  auto two = Attach();
  const auto first = one->OpenDataset(then, "");
  const auto second = two->OpenDataset(look(), "");
  ASSERT_TRUE(first && second) << first.status().ToString();
  EXPECT_EQ(*first, *second);
  EXPECT_EQ(engine_->shared_catalog(*first)->StampsHash(), then->StampsHash());
  auto now = look();
  while (now->StampsHash() == then->StampsHash()) {  // a tick of the kernel's clock
    ASSERT_EQ(chmod(paths[1].c_str(), 0600), 0);
    now = look();
  }
  const auto third = two->OpenDataset(now, "");
  ASSERT_TRUE(third) << third.status().ToString();
  EXPECT_NE(*third, *first);
  EXPECT_EQ(engine_->shared_catalog(*third)->ChangeStamp(0), then->ChangeStamp(0));
  EXPECT_NE(engine_->shared_catalog(*third)->ChangeStamp(1), then->ChangeStamp(1));
}

TEST_F(ServerDatasets, WrongChangeTimesAreRefused) {
  const auto catalog = Some(10);
  const std::span<const std::byte> image = catalog->image();
  struct Case {
    size_t behind;  // bytes after the image
    const char* said;
  };
  for (const Case& c :
       {Case{0, "change times of 0"}, Case{39, "came as"}, Case{44, "change times of 11"},
        Case{40, "not those that were announced"}}) {
    SCOPED_TRACE(c.behind);
    OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto address = wire::SocketAddress(files_.root() + "/socket");
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address), 0);
    std::vector<std::byte> bytes;
    ASSERT_TRUE(wire::Encode(wire::Hello(), 0, &bytes).ok());
    ASSERT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    std::vector<std::byte> reply(4096);
    OwnedFd arena;
    pollfd ready = {fd.get(), POLLIN, 0};
    ASSERT_EQ(poll(&ready, 1, 10000), 1);
    ASSERT_TRUE(wire::ReceiveDescriptor(fd.get(), reply, &arena));
    const OwnedFd memory(memfd_create("image", MFD_CLOEXEC));
    const std::vector<std::byte> behind(c.behind);
    ASSERT_EQ(write(memory.get(), image.data(), image.size()), static_cast<ssize_t>(image.size()));
    ASSERT_EQ(write(memory.get(), behind.data(), c.behind), static_cast<ssize_t>(c.behind));
    wire::OpenDataset open;
    open.fingerprint = catalog->fingerprint();
    open.image_bytes = image.size();
    open.image_crc = Crc32c(image);
    open.has_image = true;
    open.stamps_hash = 5;
    bytes.clear();
    ASSERT_TRUE(wire::Encode(open, 7, &bytes).ok());
    ASSERT_TRUE(wire::SendDescriptor(fd.get(), bytes, memory.get()).ok());
    ASSERT_EQ(poll(&ready, 1, 60000), 1);
    const Result<size_t> got = wire::ReceiveDescriptor(fd.get(), reply, &arena);
    ASSERT_TRUE(got);
    const std::string text(reinterpret_cast<const char*>(reply.data()), *got);
    EXPECT_NE(text.find(c.said), std::string::npos) << text;
  }
  EXPECT_EQ(engine_->open_datasets(), 0u);
}

// Whoever sends a file of holes as a catalog makes nobody claim memory for it.
TEST_F(ServerDatasets, AHugeImageOfNothingClaimsNoMemory) {
  constexpr uint64_t kBytes = uint64_t{64} << 30;
  OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = wire::SocketAddress(files_.root() + "/socket");
  ASSERT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address), 0);
  std::vector<std::byte> bytes;
  ASSERT_TRUE(wire::Encode(wire::Hello(), 0, &bytes).ok());
  ASSERT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  std::vector<std::byte> reply(4096);
  OwnedFd arena;
  pollfd ready = {fd.get(), POLLIN, 0};
  ASSERT_EQ(poll(&ready, 1, 10000), 1);
  ASSERT_TRUE(wire::ReceiveDescriptor(fd.get(), reply, &arena));

  const OwnedFd image(memfd_create("image", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(image.get(), static_cast<off_t>(kBytes)), 0);
  ASSERT_EQ(pwrite(image.get(), "FOREBAY", 7, 0), 7);
  wire::OpenDataset open;
  open.fingerprint = 1;
  open.image_bytes = kBytes;
  open.image_crc = 2;
  open.has_image = true;
  bytes.clear();
  ASSERT_TRUE(wire::Encode(open, 7, &bytes).ok());
  const uint64_t before = ResidentBytes();
  ASSERT_TRUE(wire::SendDescriptor(fd.get(), bytes, image.get()).ok());
  auto other = Attach();  // served meanwhile
  const auto catalog = Some(10);
  const auto dataset = other->OpenDataset(catalog, "");
  ASSERT_TRUE(dataset);
  ReadAll(*other, *dataset, 10);
  ASSERT_EQ(poll(&ready, 1, 60000), 1);
  const Result<size_t> got = wire::ReceiveDescriptor(fd.get(), reply, &arena);
  ASSERT_TRUE(got);
  const std::string said(reinterpret_cast<const char*>(reply.data()), *got);
  EXPECT_NE(said.find("bytes came with"), std::string::npos) << said;
  EXPECT_LT(ResidentBytes(), before + (uint64_t{64} << 20));
}

}  // namespace
}  // namespace forebay
