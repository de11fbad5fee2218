// What a node answers to one that was started anew, and to one whose samples cannot be read.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "peer/handshake.h"
#include "peer/message.h"
#include "peer/peer_testing.h"
#include "source/delay_source.h"
#include "source/fault_source.h"

namespace forebay::peer {
namespace {

// Speaks as node 1, by as many connections as it likes.
struct Stranger final : TransportHandler {
  Transport* transport = nullptr;
  std::map<ConnectionId, Handshake> shakes;
  std::set<ConnectionId> proven;
  std::set<ConnectionId> closed;
  std::vector<std::pair<ConnectionId, Message>> got;
  std::vector<std::unique_ptr<std::byte[]>> kept;

  void OnOpen(ConnectionId id, bool accepted) override {
    if (accepted) return;
    const auto shake =
        shakes.emplace(id, Handshake::Initiate(std::string(32, 's'), {.node = 1, .incarnation = id},
                                               0, RandomDigest()));
    (void)transport->Send(id, Encode(shake.first->second.Hello()), {}, 0);
  }
  void OnClosed(ConnectionId id, const Status&) override { closed.insert(id); }
  std::span<std::byte> OnMessage(ConnectionId id, std::span<const std::byte> header, uint64_t bytes,
                                 uint64_t* tag) override {
    const Result<Message> message = Decode(header);
    const auto it = shakes.find(id);
    if (!message || it == shakes.end()) return {};
    if (!it->second.proven()) {
      const Result<Handshake::Step> step = it->second.OnMessage(*message);
      if (step && step->reply) (void)transport->Send(id, Encode(*step->reply), {}, 0);
      if (step && step->proven) proven.insert(id);
      return {};
    }
    got.emplace_back(id, *message);
    if (bytes == 0) return {};
    kept.push_back(std::make_unique<std::byte[]>(bytes));
    *tag = 0;
    return {kept.back().get(), static_cast<size_t>(bytes)};
  }
  void OnPayload(ConnectionId, uint64_t, const Status&) override {}
  void OnSent(ConnectionId, uint64_t, const Status&) override {}

  template <typename Condition>
  bool Run(Nanos wait, Condition done) {
    const Nanos until = SteadyClock().Now() + wait;
    while (!done()) {
      if (SteadyClock().Now() > until) return false;
      if (!transport->Progress()) transport->Wait({}, 5 * kMilli);
    }
    return true;
  }
};

class PeerServingTest : public testing::PeerCluster {
 protected:
  // Node 0 has `source`, node 1 is the stranger; returns its first connection.
  ConnectionId Meet(const std::shared_ptr<const Catalog>& catalog, std::unique_ptr<Source> source) {
    options_.join_wait = 200 * kMilli;  // it says of no data set that it has it
    Prepare(2);
    transport_ = *network_.Make("stranger", stranger_);
    stranger_.transport = transport_.get();
    registrar_->Add({.node = 1,
                     .incarnation = 9,
                     .address = "stranger",
                     .memory = 1 << 20,
                     .folder = 0,
                     .alive = true});
    Begin(0, 24 << 20);
    EXPECT_TRUE(nodes_[0].engine->AddDataset(catalog, std::move(source)));
    const ConnectionId id = Dial();
    EXPECT_TRUE(stranger_.Run(5 * kSecond, [&] { return Count<DatasetMessage>(id) > 0; }));
    return id;
  }
  ConnectionId Dial() {
    const ConnectionId id = *transport_->Connect("n0");
    EXPECT_TRUE(stranger_.Run(5 * kSecond, [&] { return stranger_.proven.contains(id); }));
    return id;
  }
  void Ask(ConnectionId id, uint32_t samples) {
    GetMessage get;
    for (uint32_t s = 0; s < samples; ++s) get.wanted.push_back({.request = s, .sample = s});
    ASSERT_TRUE(transport_->Send(id, Encode(get), {}, 0).ok());
  }
  template <typename M>
  size_t Count(ConnectionId id) const {
    return static_cast<size_t>(std::count_if(
        stranger_.got.begin(), stranger_.got.end(),
        [&](const auto& one) { return one.first == id && std::holds_alternative<M>(one.second); }));
  }
  void TearDown() override {
    PeerCluster::TearDown();
    transport_.reset();
  }

  Stranger stranger_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(PeerServingTest, WhoIsStartedAnewGetsNoAnswersOfItsPast) {
  const auto catalog = MakeFiles(64, 5000, 5000);
  DelayOptions delay;
  delay.storage.read = 300 * kMilli;
  auto slow = DelaySource::Make(*MakePosixSource(*catalog, {}), delay);
  ASSERT_TRUE(slow) << slow.status().ToString();
  const ConnectionId first = Meet(catalog, *std::move(slow));
  Ask(first, 40);
  stranger_.Run(250 * kMilli, [] { return false; });
  // Nobody has told of the old connection's end.
  const ConnectionId second = Dial();
  EXPECT_FALSE(stranger_.Run(600 * kMilli, [&] { return Count<DataMessage>(second) > 0; }));
  // It is served all the same.
  Ask(second, 40);
  EXPECT_TRUE(stranger_.Run(5 * kSecond, [&] { return Count<DataMessage>(second) > 0; }));
}

TEST_F(PeerServingTest, ReadsThatFailLeaveNothingBehind) {
  const auto catalog = MakeFiles(64, 5000, 5000);
  auto bad = FaultSource::Make(*MakePosixSource(*catalog, {}), {.error = 1.0});
  ASSERT_TRUE(bad) << bad.status().ToString();
  const ConnectionId id = Meet(catalog, *std::move(bad));
  Ask(id, 40);
  EXPECT_TRUE(stranger_.Run(10 * kSecond, [&] { return Count<RefusedMessage>(id) >= 40; }));
  const size_t failed = static_cast<size_t>(
      std::count_if(stranger_.got.begin(), stranger_.got.end(), [](const auto& one) {
        const auto* refused = std::get_if<RefusedMessage>(&one.second);
        return refused != nullptr && refused->why == Refusal::kReadFailed;
      }));
  EXPECT_GT(failed, 0u);
  EXPECT_EQ(Value(*nodes_[0].engine, "forebay_stage_leases"), 0u);
}

class NamedServingTest : public PeerServingTest {
 protected:
  // Node 0 with a folder that it has opened, of which it has met no file.
  ConnectionId MeetGrowing() {
    options_.join_wait = 200 * kMilli;
    Prepare(2);
    transport_ = *network_.Make("stranger", stranger_);
    stranger_.transport = transport_.get();
    registrar_->Add({.node = 1,
                     .incarnation = 9,
                     .address = "stranger",
                     .memory = 1 << 20,
                     .folder = 0,
                     .alive = true});
    Begin(0, 24 << 20);
    EXPECT_TRUE(nodes_[0].engine->AddGrowing(Catalog::Growing(root_ + "/data")));
    const ConnectionId id = Dial();
    EXPECT_TRUE(stranger_.Run(5 * kSecond, [&] { return Count<DatasetMessage>(id) > 0; }));
    return id;
  }
  // A file whose home is `node` of two.
  FileSample FileOf(uint32_t node, uint32_t bytes) {
    NamedHomes homes(0);
    View view;
    view.nodes = 2;
    view.members.resize(2);
    view.members[1].node = 1;
    homes.OnView(view);
    for (uint32_t i = 0;; ++i) {
      FileSample sample{StrCat("file", i), bytes, 7, 0, 0};
      if (homes.HomeOf(HomeName(sample)) != node) continue;
      const std::string path = root_ + "/data/" + sample.path;
      std::filesystem::create_directories(root_ + "/data");
      std::ofstream(path, std::ios::binary) << std::string(bytes, 'x');
      const timespec times[2] = {{.tv_sec = 0, .tv_nsec = 7}, {.tv_sec = 0, .tv_nsec = 7}};
      EXPECT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
      return sample;
    }
  }
  // The refusal, or nothing where bytes came.
  std::optional<Refusal> Get(ConnectionId id, const FileSample& sample, uint32_t dataset = 0) {
    const uint32_t request = ++requests_;
    const GetNamedMessage get{dataset, 1, {{request, sample}}};
    EXPECT_TRUE(transport_->Send(id, Encode(get), {}, 0).ok());
    std::optional<Refusal> refusal;
    EXPECT_TRUE(stranger_.Run(10 * kSecond, [&] {
      for (const auto& [from, message] : stranger_.got) {
        const auto* refused = std::get_if<RefusedMessage>(&message);
        const auto* data = std::get_if<DataMessage>(&message);
        if (refused != nullptr && refused->request == request) {
          refusal = refused->why;
          return true;
        }
        if (data != nullptr && data->given[0].request == request) {
          EXPECT_EQ(data->given[0].length, sample.length());
          return true;
        }
      }
      return false;
    }));
    return refusal;
  }
  size_t samples() { return nodes_[0].engine->shared_catalog(0)->size(); }

  uint32_t requests_ = 0;
};

TEST_F(NamedServingTest, AFileIsServedToWhoKnowsItsVersion) {
  const FileSample own = FileOf(0, 5000);
  const FileSample others = FileOf(1, 5000);
  const ConnectionId id = MeetGrowing();
  EXPECT_EQ(Get(id, own), std::nullopt);
  EXPECT_EQ(Get(id, own), std::nullopt);
  EXPECT_EQ(samples(), 1u);
  EXPECT_EQ(Value(*nodes_[0].engine, "forebay_source_reads_total"), 1u);
  EXPECT_EQ(Get(id, others), Refusal::kNotHeld);
  EXPECT_EQ(samples(), 1u);
  EXPECT_EQ(Get(id, own, 1), Refusal::kNoSuchSample);
  // Another size or time; its home may be the other node.
  for (FileSample other : {FileSample{own.path, 5001, 7, 0, 0}, FileSample{own.path, 4999, 7, 0, 0},
                           FileSample{own.path, 5000, 8, 0, 0}}) {
    EXPECT_TRUE(Get(id, other).has_value());
  }
  EXPECT_EQ(Get(id, own), std::nullopt) << "its version is still there";
  EXPECT_EQ(Value(*nodes_[0].engine, "forebay_stage_leases"), 0u);
}

TEST_F(NamedServingTest, AMessageWithoutPlaceEndsTheConnection) {
  const FileSample own = FileOf(0, 100);
  const ConnectionId id = MeetGrowing();
  EXPECT_EQ(Get(id, own), std::nullopt);
  const FileSample outside{"../secret", 100, 7, 0, 0};
  EXPECT_TRUE(transport_->Send(id, Encode(GetNamedMessage{0, 0, {{9, outside}}}), {}, 0).ok());
  EXPECT_TRUE(stranger_.Run(5 * kSecond, [&] { return stranger_.closed.contains(id); }));
  EXPECT_EQ(samples(), 1u);
}

}  // namespace
}  // namespace forebay::peer
