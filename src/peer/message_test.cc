#include "peer/message.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/bytes_testing.h"
#include "base/rng.h"

namespace forebay::peer {
namespace {

template <typename M>
M Largest() {
  M message;
  if constexpr (std::is_same_v<M, GetMessage>) {
    message.dataset = 3;
    message.urgent = 1;
    for (uint32_t i = 0; i < kMostWanted; ++i) message.wanted.push_back({i, 1000 + i});
  } else if constexpr (std::is_same_v<M, DataMessage>) {
    for (uint32_t i = 0; i < kMostWanted; ++i) message.given.push_back({i, 5 * i, 2 * i, 3 * i});
  } else if constexpr (std::is_same_v<M, HaveMessage>) {
    message.first = 77;
    message.bits.assign(kHaveBytes, std::byte{0x5a});
  } else if constexpr (std::is_same_v<M, ChangesMessage>) {
    message.got.assign(kMostChanges / 2, 5);
    message.lost.assign(kMostChanges / 2, UINT32_MAX);
  } else if constexpr (std::is_same_v<M, GetNamedMessage>) {
    message.dataset = 3;
    message.urgent = 1;
    for (uint32_t i = 0; i < kMostWanted; ++i) {
      message.wanted.push_back({i, {StrCat("class/", 1000 + i, ".jpg"), 110000 + i, -5, 0, 0}});
    }
  } else if constexpr (std::is_same_v<M, HelloMessage>) {
    message.node = 9;
    message.incarnation = UINT64_MAX - 1;
    message.nonce.fill(std::byte{0x7e});
  }
  return message;
}

template <size_t kNumber = 0>
std::vector<Message> OneOfEach() {
  std::vector<Message> messages;
  if constexpr (kNumber < std::variant_size_v<Message>) {
    messages = OneOfEach<kNumber + 1>();
    messages.insert(messages.begin(), Largest<std::variant_alternative_t<kNumber, Message>>());
  }
  return messages;
}

std::vector<Message> Valid() {
  std::vector<Message> valid = OneOfEach();
  std::erase_if(valid, [](const Message& m) { return !Decode(Encode(m)); });
  return valid;
}

TEST(PeerMessage, EveryKindComesBackAndFitsAHeader) {
  const std::vector<Message> messages = OneOfEach();
  ASSERT_EQ(messages.size(), std::variant_size_v<Message>);
  for (const Message& message : messages) {
    const std::vector<std::byte> bytes = Encode(message);
    ASSERT_LE(bytes.size(), Transport::kMaxHeader);
    const Result<Message> back = Decode(bytes);
    ASSERT_TRUE(back) << back.error().ToString();
    ASSERT_EQ(back->index(), message.index());
    EXPECT_EQ(Encode(*back), bytes);
  }
  const auto get = std::get<GetMessage>(*Decode(Encode(messages[4])));
  ASSERT_EQ(get.wanted.size(), kMostWanted);
  EXPECT_EQ(get.wanted[63].request, 63u);
  EXPECT_EQ(get.wanted[63].sample, 1063u);
  EXPECT_EQ(get.urgent, 1);
  const auto named = std::get<GetNamedMessage>(*Decode(Encode(messages[11])));
  ASSERT_EQ(named.wanted.size(), kMostWanted);
  EXPECT_EQ(named.wanted[63].request, 63u);
  EXPECT_EQ(named.wanted[63].sample, (FileSample{"class/1063.jpg", 110063, -5, 0, 0}));
}

Digest DigestFrom(uint8_t first) {
  Digest digest;
  for (std::byte& byte : digest) byte = std::byte{first++};
  return digest;
}

// The layout is the protocol: a change of it wants another kProtocol.
TEST(PeerMessage, GoldenBytes) {
  const std::string one_up = HexOf(DigestFrom(0x10));
  const std::string two_up = HexOf(DigestFrom(0x40));
  const auto hex = [](const Message& message) { return HexOf(Encode(message)); };
  EXPECT_EQ(one_up.substr(0, 8), "10111213");
  EXPECT_EQ(hex(HelloMessage{1, 2, 0x0102030405060708, DigestFrom(0x10)}),
            "00"
            "01000000"
            "02000000"
            "0807060504030201" +
                one_up);
  EXPECT_EQ(hex(AnswerMessage{3, 4, DigestFrom(0x10), DigestFrom(0x40)}),
            "01"
            "03000000"
            "0400000000000000" +
                one_up + two_up);
  EXPECT_EQ(hex(ProofMessage{DigestFrom(0x40)}), "02" + two_up);
  EXPECT_EQ(hex(DatasetMessage{5, 6, 7, 0}),
            "03"
            "05000000"
            "0600000000000000"
            "07000000"
            "00");
  EXPECT_EQ(hex(GetMessage{0x01020304, 1, 0, {{5, 6}, {7, 8}}, 9}),
            "04"
            "04030201"
            "01"
            "00"
            "02000000"
            "0500000006000000"
            "0700000008000000"
            "0900000000000000");
  EXPECT_EQ(hex(DataMessage{{{1, 2, 3, 4}}}),
            "05"
            "01000000"
            "01000000020000000300000004000000");
  EXPECT_EQ(hex(RefusedMessage{9, Refusal::kReadFailed, 7}),
            "06"
            "09000000"
            "03"
            "0700000000000000");
  EXPECT_EQ(hex(PlanMessage{5, 6, 1}),
            "0c"
            "05000000"
            "0600000000000000"
            "01");
  EXPECT_EQ(hex(CancelMessage{0xfffefdfc}),
            "07"
            "fcfdfeff");
  EXPECT_EQ(hex(HaveMessage{1, 2, {std::byte{0xa5}, std::byte{0x5a}}}),
            "08"
            "01000000"
            "02000000"
            "02000000"
            "a55a");
  EXPECT_EQ(hex(ChangesMessage{1, {2, 3}, {4}}),
            "09"
            "01000000"
            "02000000"
            "0200000003000000"
            "01000000"
            "04000000");
  EXPECT_EQ(hex(PingMessage{0x0a, 1}),
            "0a"
            "0a00000000000000"
            "01");
  EXPECT_EQ(hex(GetNamedMessage{0x01020304, 1, {{5, {"a/b", 0x2005, -2, 0x1000, 0x2000}}}}),
            "0b"
            "04030201"
            "01"
            "01000000"
            "05000000"
            "03000000"
            "612f62"
            "0520000000000000"
            "feffffffffffffff"
            "00100000"
            "0020000000000000");
}

TEST(PeerMessage, CutLongOrWrongIsRefused) {
  EXPECT_FALSE(Decode({}));
  for (const Message& message : Valid()) {
    std::vector<std::byte> bytes = Encode(message);
    for (size_t length = 0; length < bytes.size(); ++length) {
      ASSERT_FALSE(Decode(std::span(bytes).first(length))) << message.index();
    }
    bytes.push_back(std::byte{0});
    ASSERT_FALSE(Decode(bytes)) << message.index();
  }
  const std::vector<std::byte> unknown = {std::byte{std::variant_size_v<Message>}};
  EXPECT_FALSE(Decode(unknown));
  EXPECT_FALSE(Decode(std::vector<std::byte>(Transport::kMaxHeader + 1)));
}

TEST(PeerMessage, BoundsAreChecked) {
  GetMessage get;
  EXPECT_FALSE(Decode(Encode(get)));  // asks for nothing
  get.wanted.resize(kMostWanted + 1);
  EXPECT_FALSE(Decode(Encode(get)));
  get.wanted.resize(1);
  get.urgent = 2;
  EXPECT_FALSE(Decode(Encode(get)));
  DataMessage data;
  EXPECT_FALSE(Decode(Encode(data)));
  data.given.resize(kMostWanted + 1);
  EXPECT_FALSE(Decode(Encode(data)));
  HaveMessage have;
  have.bits.resize(kHaveBytes + 1);
  EXPECT_FALSE(Decode(Encode(have)));
  ChangesMessage changes;
  changes.got.resize(kMostChanges);
  EXPECT_TRUE(Decode(Encode(changes)));
  changes.lost.resize(1);
  EXPECT_FALSE(Decode(Encode(changes)));
  PingMessage ping;
  ping.reply = 2;
  EXPECT_FALSE(Decode(Encode(ping)));
  DatasetMessage dataset;
  dataset.growing = 2;
  EXPECT_FALSE(Decode(Encode(dataset)));
  dataset.growing = 1;
  EXPECT_TRUE(Decode(Encode(dataset)));
  dataset.samples = 1;  // which only a fixed one has
  EXPECT_FALSE(Decode(Encode(dataset)));
  RefusedMessage refused;
  refused.why = static_cast<Refusal>(5);
  EXPECT_FALSE(Decode(Encode(refused)));
  // A list that claims more than there is takes no memory for it.
  const std::vector<std::byte> huge = {std::byte{5}, std::byte{255}, std::byte{255}, std::byte{255},
                                       std::byte{255}};
  EXPECT_FALSE(Decode(huge));
}

TEST(PeerMessage, NamesThatLeadElsewhereAreRefused) {
  const auto taken = [](const FileSample& sample) {
    return Decode(Encode(GetNamedMessage{1, 0, {{7, sample}}})).has_value();
  };
  EXPECT_TRUE(taken({"a", 5, 0, 0, 0}));
  EXPECT_TRUE(taken({"a/..b/...", 5, 0, 0, 0}));
  for (const std::string path : {"", "/", "/etc/passwd", "..", "../a", "a/..", "a/../b", ".", "./a",
                                 "a/.", "a//b", "a/", "a/./b"}) {
    EXPECT_FALSE(taken({path, 5, 0, 0, 0})) << path;
  }
  EXPECT_FALSE(taken({std::string("a\0b", 3), 5, 0, 0, 0}));
  EXPECT_TRUE(taken({std::string(FileSample::kMostPath, 'x'), 5, 0, 0, 0}));
  EXPECT_FALSE(taken({std::string(FileSample::kMostPath + 1, 'x'), 5, 0, 0, 0}));
  EXPECT_FALSE(Decode(Encode(GetNamedMessage{1, 0, {}})));
  EXPECT_FALSE(Decode(Encode(GetNamedMessage{1, 2, {{7, {"a", 5, 0, 0, 0}}}})));
}

TEST(PeerMessage, ExtentsThatAFileDoesNotHaveAreRefused) {
  constexpr uint64_t kHuge = uint64_t{1} << 32;
  const auto valid = [](uint64_t bytes, uint32_t block, uint64_t offset) {
    return FileSample{"a", bytes, 0, block, offset}.Valid();
  };
  EXPECT_TRUE(valid(0, 0, 0));
  EXPECT_TRUE(valid(kHuge - 1, 0, 0));
  EXPECT_FALSE(valid(kHuge, 0, 0));
  EXPECT_FALSE(valid(100, 0, 1));
  EXPECT_TRUE(valid(0, 10, 0));
  EXPECT_TRUE(valid(100, 10, 90));
  EXPECT_FALSE(valid(100, 10, 95));
  EXPECT_FALSE(valid(100, 10, 100));
  EXPECT_TRUE(valid(kHuge * 16, 1 << 20, kHuge));
  EXPECT_FALSE(valid(kHuge * 256, 1 << 20, 0));  // tables for so many would be taken
  EXPECT_EQ((FileSample{"a", 105, 0, 10, 100}.length()), 5u);
  EXPECT_EQ((FileSample{"a", 105, 0, 10, 90}.length()), 10u);
  EXPECT_EQ((FileSample{"a", 105, 0, 0, 0}.length()), 105u);
}

TEST(PeerMessage, RandomChangesEndInAnErrorOrInTheSameBytes) {
  SplitMix64 rng(5);
  const std::vector<Message> messages = OneOfEach();
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::byte> bytes = Encode(messages[rng.Below(messages.size())]);
    bytes.resize(std::min<size_t>(bytes.size(), 200));
    for (int i = 0; i < 2; ++i)
      bytes[rng.Below(std::min<size_t>(bytes.size(), 16))] = static_cast<std::byte>(rng.Next());
    const Result<Message> message = Decode(bytes);
    if (message) {
      ASSERT_EQ(Encode(*message), bytes);
    }
  }
}

}  // namespace
}  // namespace forebay::peer
