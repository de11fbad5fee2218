#include "files/packet.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes_testing.h"

namespace forebay::files {
namespace {

// Clients inside of programs write the header as it lies in memory: the layout is the protocol.
TEST(Packet, GoldenBytes) {
  const std::vector<std::string_view> paths = {"/a", "/bc"};
  EXPECT_EQ(HexOf(PathsPacket(Kind::kRange, paths, 0x0102030405060708, 9)),
            "46425931"
            "0800"
            "0000"
            "02000000"
            "09000000"
            "0807060504030201"
            "0900000000000000"
            "0200"
            "2f61"
            "0300"
            "2f6263");
  const std::vector<uint32_t> numbers = {1, 0x01020304};
  EXPECT_EQ(HexOf(OrderPacket(5, numbers)),
            "46425931"
            "0500"
            "0000"
            "02000000"
            "08000000"
            "0500000000000000"
            "0000000000000000"
            "01000000"
            "04030201");
  EXPECT_EQ(HexOf(AnswerPacket(Kind::kGet, Answer::kPartial, 7, "no")),
            "46425931"
            "0200"
            "0300"
            "00000000"
            "02000000"
            "0700000000000000"
            "0000000000000000"
            "6e6f");
  // Programs that know of no jobs have a count of four bytes.
  EXPECT_EQ(HexOf(PathsPacket(Kind::kGet, {}, 0, 0, 0x0102)).substr(16, 8), "00000201");
  Header header;
  header.kind = Kind::kAt;
  header.a = 3;
  std::string raw(sizeof header, 0);
  std::memcpy(raw.data(), &header, sizeof header);
  EXPECT_EQ(HexOf(PathsPacket(Kind::kAt, {}, 3)), HexOf(raw));
}

TEST(Packet, ComesBack) {
  const std::vector<std::string_view> paths = {"/a", "/bc"};
  const auto packet = PathsPacket(Kind::kRange, paths, 8, 9, 7);
  const Result<Question> question = ParseQuestion(packet);
  ASSERT_TRUE(question) << question.error().ToString();
  EXPECT_EQ(question->header.kind, Kind::kRange);
  EXPECT_EQ(question->header.a, 8u);
  EXPECT_EQ(question->header.b, 9u);
  EXPECT_EQ(question->header.job, 7);
  EXPECT_EQ(question->paths, paths);
  const std::vector<uint32_t> numbers = {1, 0x01020304};
  const auto order = OrderPacket(5, numbers);
  EXPECT_EQ(ParseQuestion(order)->numbers, numbers);
  const auto answer = AnswerPacket(Kind::kGet, Answer::kPartial, 7, "no");
  Header header;
  EXPECT_EQ(*ParseAnswer(answer, &header), "no");
  EXPECT_EQ(header.answer, Answer::kPartial);
  EXPECT_EQ(header.a, 7u);
}

TEST(Packet, AnythingElseIsRefused) {
  const std::vector<std::string_view> paths = {"/a", "/bc"};
  const std::vector<uint32_t> numbers = {1, 2};
  for (const auto& packet : {PathsPacket(Kind::kGet, paths), OrderPacket(5, numbers)}) {
    for (size_t size = 0; size < packet.size(); ++size) {
      EXPECT_FALSE(ParseQuestion(std::span(packet).first(size)));
      // Cut, with a header that says so.
      std::vector<std::byte> cut(packet.begin(), packet.begin() + static_cast<ptrdiff_t>(size));
      if (size < sizeof(Header)) continue;
      cut[12] = static_cast<std::byte>(size - sizeof(Header));
      EXPECT_FALSE(ParseQuestion(cut)) << size;
    }
    std::vector<std::byte> longer = packet;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(ParseQuestion(longer));
    longer[12] = static_cast<std::byte>(longer.size() - sizeof(Header));
    EXPECT_FALSE(ParseQuestion(longer));
    std::vector<std::byte> many = packet;
    for (size_t i = 8; i < 12; ++i) many[i] = std::byte{0xff};
    EXPECT_FALSE(ParseQuestion(many));
    std::vector<std::byte> magic = packet;
    magic[0] = std::byte{0};
    EXPECT_FALSE(ParseQuestion(magic));
  }
  const std::string_view zero("/a\0b", 4);
  const std::string_view empty;
  const std::string long_one(4096, 'x');
  const std::string_view too_long = long_one;
  for (const std::string_view path : {zero, empty, too_long}) {
    EXPECT_FALSE(ParseQuestion(PathsPacket(Kind::kGet, {&path, 1})));
  }
}

}  // namespace
}  // namespace forebay::files
