// What a node answers to one that was started anew, and to one whose samples cannot be read.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
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
  std::vector<std::pair<ConnectionId, Message>> got;
  std::vector<std::unique_ptr<std::byte[]>> kept;

  void OnOpen(ConnectionId id, bool accepted) override {
    if (accepted) return;
    const auto shake =
        shakes.emplace(id, Handshake::Initiate(std::string(32, 's'), {.node = 1, .incarnation = id},
                                               0, RandomDigest()));
    (void)transport->Send(id, Encode(shake.first->second.Hello()), {}, 0);
  }
  void OnClosed(ConnectionId, const Status&) override {}
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

}  // namespace
}  // namespace forebay::peer
