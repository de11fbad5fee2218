#include "peer/membership_message.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/bytes_testing.h"
#include "base/rng.h"

namespace forebay::peer::frame {
namespace {

Member Someone(uint32_t node) {
  Member member{node, 7 + node, "10.0.0.1:7711", 1 << 30, uint64_t{5} << 40, node % 2 == 0};
  if (node > 0) member.registrar = "10.0.0.1:7712";
  return member;
}

std::vector<Frame> OneOfEach() {
  Hello hello{kProtocol, 3, 99, RandomDigest()};
  Answer answer{0, 98, 12, RandomDigest(), RandomDigest()};
  Register mine{4, Someone(3), 17, {Someone(0), Someone(2)}};
  Changes changes{18, {Someone(1), Someone(2), Someone(4095)}};
  return {hello,
          answer,
          ProofOf{RandomDigest()},
          mine,
          changes,
          Beat{},
          Suspicion{2, 9, "closed"},
          Leave{},
          Refused{true, "no"},
          Redirect{3, "10.0.0.3:7712"},
          Beat{true}};
}

TEST(MembershipMessage, ComesBack) {
  std::string bytes;
  for (const Frame& frame : OneOfEach()) Append(frame, &bytes);
  std::string_view rest = bytes;
  for (const Frame& frame : OneOfEach()) {
    const auto taken = Take(&rest, kLongest);
    ASSERT_TRUE(taken && *taken) << taken.status().message();
    EXPECT_EQ((*taken)->index(), frame.index());
  }
  EXPECT_TRUE(rest.empty());
  const Frame whole = Register{4, Someone(3), 17, {Someone(0), Someone(2)}};
  bytes.clear();
  Append(whole, &bytes);
  rest = bytes;
  EXPECT_EQ(**Take(&rest, kLongest), whole);
}

// The layout is the protocol: a change of it wants another kProtocol.
TEST(MembershipMessage, GoldenBytes) {
  const auto hex = [](const Frame& frame) {
    std::string out;
    Append(frame, &out);
    return HexOf(out);
  };
  Digest nonce;
  Digest proof;
  nonce.fill(std::byte{0xab});
  proof.fill(std::byte{0xcd});
  Member member{1, 2, "h:7", 3, 4, true};
  member.registrar = "h:8";
  const std::string its =
      "01000000"
      "0200000000000000"
      "0300000000000000"
      "0400000000000000"
      "01"
      "03683a37"
      "03683a38";
  EXPECT_EQ(hex(Hello{1, 3, 99, nonce}),
            "38000000"
            "00"
            "666f7265626179"
            "01000000"
            "03000000"
            "6300000000000000" +
                HexOf(nonce));
  EXPECT_EQ(hex(Answer{0, 98, 12, nonce, proof}),
            "55000000"
            "01"
            "00000000"
            "6200000000000000"
            "0c00000000000000" +
                HexOf(nonce) + HexOf(proof));
  EXPECT_EQ(hex(ProofOf{proof}),
            "21000000"
            "02" +
                HexOf(proof));
  EXPECT_EQ(hex(Register{4, member, 17, {member}, true}),
            "5c000000"
            "03"
            "04000000" +
                its +
                "1100000000000000"
                "01000000" +
                its + "01");
  EXPECT_EQ(hex(Changes{18, {member}}),
            "32000000"
            "04"
            "1200000000000000"
            "01000000" +
                its);
  EXPECT_EQ(hex(Beat{true}),
            "02000000"
            "05"
            "01");
  EXPECT_EQ(hex(Suspicion{2, 9, "no"}),
            "10000000"
            "06"
            "02000000"
            "0900000000000000"
            "026e6f");
  EXPECT_EQ(hex(Leave{}),
            "01000000"
            "07");
  EXPECT_EQ(hex(Refused{true, ""}),
            "03000000"
            "08"
            "01"
            "00");
  EXPECT_EQ(hex(Redirect{5, "h:8"}),
            "09000000"
            "09"
            "05000000"
            "03683a38");
}

TEST(MembershipMessage, EveryPrefixNeedsMore) {
  for (const Frame& frame : OneOfEach()) {
    std::string bytes;
    Append(frame, &bytes);
    for (size_t size = 0; size < bytes.size(); ++size) {
      std::string_view in = std::string_view(bytes).substr(0, size);
      const auto taken = Take(&in, kLongest);
      ASSERT_TRUE(taken);
      EXPECT_FALSE(*taken);
      EXPECT_EQ(in.size(), size);
    }
    // The handshake fits what is taken before a proof.
    if (frame.index() <= 2) {
      EXPECT_LE(bytes.size(), kLongestUnproven);
    }
  }
}

TEST(MembershipMessage, WrongOnesAreRefused) {
  const auto refused = [](std::string bytes, size_t longest = kLongest) {
    std::string_view in = bytes;
    return !Take(&in, longest).has_value();
  };
  EXPECT_TRUE(refused(std::string(4, '\0')));                    // empty
  EXPECT_TRUE(refused(std::string("\xff\xff\xff\x7f", 4)));      // too long
  EXPECT_TRUE(refused("GET / HTTP/1.1\r\n", kLongestUnproven));  // another protocol
  EXPECT_TRUE(refused(std::string("\1\0\0\0\x0a", 5)));          // no such kind
  EXPECT_TRUE(refused(std::string("\2\0\0\0\x05\x02", 6)));      // no such flag
  EXPECT_TRUE(refused(std::string("\2\0\0\0\x07\0", 6)));        // more than it should have
  for (const Frame& frame : OneOfEach()) {
    std::string bytes;
    Append(frame, &bytes);
    EXPECT_TRUE(refused(bytes, bytes.size() - 5));
    bytes.push_back('x');
    ++bytes[0];
    EXPECT_TRUE(refused(bytes));
  }
  std::string bytes;
  Append(Changes{1, {Someone(2), Someone(1)}}, &bytes);  // not in order
  EXPECT_TRUE(refused(bytes));
  bytes.clear();
  Append(Changes{1, {Someone(kMostNodes)}}, &bytes);
  EXPECT_TRUE(refused(bytes));
  bytes.clear();
  Member far = Someone(1);
  far.registrar = std::string(kLongestRegistrar + 1, 'r');
  Append(Changes{1, {far}}, &bytes);
  EXPECT_TRUE(refused(bytes));
  // A count that no bytes follow takes no memory.
  EXPECT_TRUE(refused(std::string("\x0d\0\0\0\4\1\0\0\0\0\0\0\0\xff\x0f\0\0", 17)));
}

TEST(MembershipMessage, AllMembersFit) {
  Changes changes;
  for (uint32_t node = 0; node < kMostNodes; ++node) {
    Member member = Someone(node);
    member.address = std::string(kLongestAddress, 'a');
    member.registrar = std::string(kLongestRegistrar, 'r');
    changes.members.push_back(member);
  }
  std::string bytes;
  Append(changes, &bytes);
  EXPECT_LE(bytes.size(), kLongest);
  std::string_view in = bytes;
  EXPECT_EQ(std::get<Changes>(**Take(&in, kLongest)), changes);
}

TEST(MembershipMessage, FlippedBitsAreSurvived) {
  SplitMix64 random(1);
  for (int round = 0; round < 20000; ++round) {
    const std::vector<Frame> frames = OneOfEach();
    std::string bytes;
    Append(frames[random.Below(frames.size())], &bytes);
    for (uint64_t flips = 1 + random.Below(3); flips > 0; --flips) {
      bytes[random.Below(bytes.size())] ^= static_cast<char>(1 << random.Below(8));
    }
    std::string_view in = bytes;
    const auto taken = Take(&in, kLongest);
    if (!taken || !*taken) continue;
    std::string again;
    Append(**taken, &again);
    EXPECT_EQ(again, std::string_view(bytes).substr(0, bytes.size() - in.size()));
  }
}

}  // namespace
}  // namespace forebay::peer::frame
