#include "wire/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "base/bytes_testing.h"
#include "base/rng.h"

namespace forebay::wire {
namespace {

// Collects a message's fields as text, so that any two can be compared.
class Describer {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Add(fields), ...);
  }
  template <typename... Ts>
  void Columns(const std::vector<Ts>&... columns) {
    (Add(columns), ...);
  }
  std::string text;

 private:
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Add(T value) { text += std::to_string(value) + ";"; }
  void Add(const std::string& value) { text += value + ";"; }
  template <typename T>
  void Add(const std::vector<T>& values) {
    text += "[";
    for (const T& value : values) Add(value);
    text += "]";
  }
};

// Fills fields with random values of any size.
class Filler {
 public:
  explicit Filler(uint64_t seed) : rng_(seed) {}
  template <typename... Fields>
  void operator()(Fields&... fields) {
    (Fill(fields), ...);
  }
  template <typename... Ts>
  void Columns(std::vector<Ts>&... columns) {
    const size_t n = rng_.Below(40);
    (FillList(columns, n), ...);
  }

 private:
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Fill(T& value) { value = static_cast<T>(rng_.Next() >> rng_.Below(64)); }
  void Fill(bool& value) { value = rng_.Below(2) == 1; }
  void Fill(std::string& value) {
    value.resize(rng_.Below(60));
    for (char& c : value) c = static_cast<char>(rng_.Next());
  }
  template <typename T>
  void FillList(std::vector<T>& values, size_t n) {
    values.resize(n);
    for (T& value : values) Fill(value);
  }
  template <typename T>
  void Fill(std::vector<T>& values) {
    FillList(values, rng_.Below(40));
  }
  SplitMix64 rng_;
};

template <typename Message>
std::string Describe(const Message& message) {
  Describer describer;
  Message::Fields(message, describer);
  return describer.text;
}

template <typename Message>
Message Random(uint64_t seed) {
  Message message;
  Filler filler(seed);
  Message::Fields(message, filler);
  if constexpr (requires { message.kind; }) message.kind %= Message::kKinds;
  if constexpr (requires { message.what; }) message.what %= Message::kKinds;
  if constexpr (requires { message.turn; }) message.turn %= Message::kTurns;
  if constexpr (requires { message.names; }) message.values.resize(message.names.size());
  return message;
}

// Fills fields with numbers that show their width and their order, the same each time.
class Counter {
 public:
  template <typename... Fields>
  void operator()(Fields&... fields) {
    (Fill(fields), ...);
  }
  template <typename... Ts>
  void Columns(std::vector<Ts>&... columns) {
    (Fill(columns), ...);
  }

 private:
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Fill(T& value) { value = static_cast<T>(0xf7f6f5f4f3f2f100 + next_++); }
  void Fill(bool& value) { value = next_++ % 2 == 1; }
  void Fill(std::string& value) { value = "s" + std::to_string(next_++); }
  template <typename T>
  void Fill(std::vector<T>& values) {
    values.resize(2);
    for (T& value : values) Fill(value);
  }
  uint64_t next_ = 1;
};

template <typename... Messages>
std::string OneOfEach(::testing::Types<Messages...> /*messages*/) {
  std::string out;
  const auto add = [&]<typename Message>(Message message) {
    Counter counter;
    Message::Fields(message, counter);
    std::vector<std::byte> bytes;
    EXPECT_TRUE(Encode(message, 0x0102030405060708, &bytes, Code::kNotFound).ok());
    out += HexOf(bytes) + "\n";
  };
  (add(Messages()), ...);
  return out;
}

uint64_t Seeds() {
  const char* text = std::getenv("FOREBAY_SEEDS");
  return text != nullptr ? std::max<uint64_t>(1, std::strtoull(text, nullptr, 10)) : 20;
}

Result<Frame> OnlyFrame(FrameReader& reader, std::span<const std::byte> bytes) {
  std::ranges::copy(bytes, reader.Room(bytes.size()).begin());
  reader.Filled(bytes.size());
  Frame frame;
  const Result<bool> whole = reader.Next(&frame);
  if (!whole) return whole.error();
  if (!*whole) return Status(Code::kUnavailable, "incomplete");
  return frame;
}

// Decodes as each type a frame may claim to be; true when it was accepted.
bool DecodeAny(const Frame& frame) {
  Status status;
  const auto as = [&]<typename Message>(Message message) {
    if (frame.header.type == Message::kType) status = Decode(frame, &message);
  };
  as(Hello());
  as(HelloReply());
  as(StatusReply());
  as(OpenStream());
  as(OpenStreamReply());
  as(Declare());
  as(Seek());
  as(CloseStream());
  as(Take());
  as(Fetch());
  as(Loan());
  as(Release());
  as(Served());
  as(OpenDataset());
  as(OpenDatasetReply());
  as(Query());
  as(Text());
  as(Stats());
  as(StatsReply());
  as(SetKnobs());
  as(SetPolicy());
  as(Nudge());
  as(Lend());
  as(LendReply());
  as(GiveBack());
  as(Stalled());
  as(CloseDataset());
  as(AskLook());
  as(AskLookReply());
  as(LookProgress());
  as(HandInLook());
  as(DropLook());
  return status.ok();
}

template <typename Message>
class MessageTest : public ::testing::Test {};

using Messages =
    ::testing::Types<Hello, HelloReply, StatusReply, OpenStream, OpenStreamReply, Declare, Seek,
                     CloseStream, Take, Fetch, Loan, Release, Served, OpenDataset, OpenDatasetReply,
                     Query, Text, Stats, StatsReply, SetKnobs, Nudge, SetPolicy, Lend, LendReply,
                     GiveBack, Stalled, CloseDataset, AskLook, AskLookReply, LookProgress,
                     HandInLook, DropLook>;
TYPED_TEST_SUITE(MessageTest, Messages);

TYPED_TEST(MessageTest, ComesBackAsItWent) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto message = Random<TypeParam>(seed);
    std::vector<std::byte> bytes;
    ASSERT_TRUE(Encode(message, seed * 7, &bytes).ok());
    FrameReader reader;
    const auto frame = OnlyFrame(reader, bytes);
    ASSERT_TRUE(frame) << frame.status().ToString();
    EXPECT_EQ(frame->header.request, seed * 7);
    TypeParam back;
    ASSERT_TRUE(Decode(*frame, &back).ok());
    EXPECT_EQ(Describe(back), Describe(message));
  }
}

TYPED_TEST(MessageTest, EveryShorterOrLongerPayloadIsRefused) {
  const auto message = Random<TypeParam>(3);
  std::vector<std::byte> bytes;
  ASSERT_TRUE(Encode(message, 1, &bytes).ok());
  FrameReader reader;
  auto frame = OnlyFrame(reader, bytes);
  ASSERT_TRUE(frame);
  for (size_t cut = 0; cut < frame->payload.size(); ++cut) {
    TypeParam back;
    EXPECT_EQ(Decode(Frame{frame->header, frame->payload.first(cut)}, &back).code(),
              Code::kDataLoss);
  }
  std::vector<std::byte> longer(frame->payload.begin(), frame->payload.end());
  longer.push_back(std::byte{0});
  TypeParam back;
  EXPECT_EQ(Decode(Frame{frame->header, longer}, &back).code(), Code::kDataLoss);
}

// Whatever is flipped, cut or inserted: an error, or a message that encodes again.
TYPED_TEST(MessageTest, MutationsEndInAnErrorOrAMessage) {
  for (uint64_t seed = 0; seed < 200 * Seeds(); ++seed) {
    SplitMix64 rng(seed);
    std::vector<std::byte> bytes;
    ASSERT_TRUE(Encode(Random<TypeParam>(seed), seed, &bytes).ok());
    const uint64_t changes = 1 + rng.Below(4);
    for (uint64_t i = 0; i < changes && !bytes.empty(); ++i) {
      const auto at = static_cast<int64_t>(rng.Below(bytes.size()));
      switch (rng.Below(4)) {
        case 0:
          bytes[static_cast<size_t>(at)] ^= std::byte{1} << rng.Below(8);
          break;
        case 1:
          bytes[static_cast<size_t>(at)] = static_cast<std::byte>(rng.Next());
          break;
        case 2:
          bytes.erase(bytes.begin() + at);
          break;
        default:
          bytes.insert(bytes.begin() + at, static_cast<std::byte>(rng.Next()));
          break;
      }
    }
    FrameReader reader;
    const auto frame = OnlyFrame(reader, bytes);
    if (frame) DecodeAny(*frame);
  }
}

// The layout is the protocol: a change of it wants another kVersion or kProtocol.
TEST(Frame, GoldenBytes) {
  EXPECT_EQ(OneOfEach(Messages()),
            R"(46420200010002000900000000000000080706050403020101f1f2f302f1f2f301
46420200020002002200000000000000080706050403020101f1f2f302f1f2f303f1f2f3f4f5f6f704f1f2f3f4f5f6f705f1f2f3020000007336
464202000300020006000000000000000807060504030201020000007331
46420200040002004b00000000000000080706050403020101f1f2f302f1f2f30100010007f1f2f3f4f5f6f708f1f2f3f4f5f6f709f1f2f3f4f5f6f70af1f2f301000df1f2f3f4f5f6f70ef1f2f30ff1f2f310f1f2f311f1f2f3000103000000733230
46420200050002000c00000000000000080706050403020101f1f2f302f1f2f303f1f2f3
46420200060002001a00000000000000080706050403020101f1f2f302f1f2f3f4f5f6f701000200000005f1f2f306f1f2f3
46420200070002001400000000000000080706050403020101f1f2f302f1f2f3f4f5f6f703f1f2f3f4f5f6f7
46420200080002000400000000000000080706050403020101f1f2f3
46420200090002000c00000000000000080706050403020101f1f2f302f1f2f3f4f5f6f7
464202000a0002001000000000000000080706050403020101f1f2f302f1f2f303f1f2f3f4f5f6f7
464202000b000200590000000000000008070605040302010102f1f2f3f4f5f6f703f1f2f304f1f2f305f1f2f3f4f5f6f706f1f2f3f4f5f6f70200000007f1f2f308f1f2f309f1f2f3f4f5f6f70af1f2f3f4f5f6f70bf1f2f30cf1f2f3020000000df1f2f3f4f5f6f70ef1f2f3f4f5f6f7
464202000c000200140000000000000008070605040302010200000001f1f2f3f4f5f6f702f1f2f3f4f5f6f7
464202000d0002001000000000000000080706050403020101f1f2f3f4f5f6f702f1f2f3f4f5f6f7
464202000e0002002300000000000000080706050403020101f1f2f3f4f5f6f702f1f2f3f4f5f6f703f1f2f30002000000733506f1f2f3f4f5f6f7
464202000f0002000400000000000000080706050403020101f1f2f3
4642020010000200050000000000000008070605040302010102f1f2f3
464202001100020006000000000000000807060504030201020000007331
46420200120002000400000000000000080706050403020101f1f2f3
4642020013000200540000000000000008070605040302010200000001f1f2f3f4f5f6f702f1f2f3f4f5f6f703f1f2f3f4f5f6f704f1f2f3f4f5f6f705f1f2f3f4f5f6f706f1f2f3f4f5f6f707f1f2f3f4f5f6f708f1f2f3f4f5f6f709f1f2f3f4f5f6f70af1f2f3f4f5f6f7
464202001400020024000000000000000807060504030201020000000200000073310200000073320200000003f1f2f3f4f5f6f704f1f2f3f4f5f6f7
464202001500020000000000000000000807060504030201
464202001600020006000000000000000807060504030201020000007331
46420200170002001000000000000000080706050403020101f1f2f3f4f5f6f702f1f2f3f4f5f6f7
46420200180002000800000000000000080706050403020101f1f2f3f4f5f6f7
46420200190002000800000000000000080706050403020101f1f2f3f4f5f6f7
464202001a0002000d00000000000000080706050403020101f1f2f30203f1f2f3f4f5f6f7
464202001b0002000400000000000000080706050403020101f1f2f3
464202001c0002002c00000000000000080706050403020102000000733102000000733203f1f2f304f1f2f305f1f2f3f4f5f6f706f1f2f3f4f5f6f707f1f2f3f4f5f6f7
464202001d000200190000000000000008070605040302010102f1f2f3f4f5f6f703f1f2f3f4f5f6f704f1f2f3f4f5f6f7
464202001e0002000800000000000000080706050403020101f1f2f3f4f5f6f7
464202001f0002001800000000000000080706050403020101f1f2f3f4f5f6f702f1f2f3f4f5f6f703f1f2f3f4f5f6f7
46420200200002000800000000000000080706050403020101f1f2f3f4f5f6f7
)");
}

TEST(Frame, AnAnnouncedLengthIsNotBelieved) {
  Declare declare;
  declare.order = {1, 2, 3};
  std::vector<std::byte> bytes;
  ASSERT_TRUE(Encode(declare, 1, &bytes).ok());
  // The count of `order` says 2^32 - 1.
  const size_t count_at = bytes.size() - 3 * sizeof(uint32_t) - sizeof(uint32_t);
  for (size_t i = 0; i < sizeof(uint32_t); ++i) bytes[count_at + i] = std::byte{0xff};
  FrameReader reader;
  auto frame = OnlyFrame(reader, bytes);
  ASSERT_TRUE(frame);
  Declare back;
  EXPECT_EQ(Decode(*frame, &back).code(), Code::kDataLoss);
  EXPECT_TRUE(back.order.empty());
}

TEST(Frame, TooLargeIsRefusedOnBothSides) {
  Declare declare;
  declare.order.resize(kMaxFrameBytes / sizeof(uint32_t));
  std::vector<std::byte> bytes = {std::byte{7}};
  EXPECT_EQ(Encode(declare, 1, &bytes).code(), Code::kResourceExhausted);
  EXPECT_EQ(bytes.size(), 1u);

  std::vector<std::byte> header;
  internal::StartFrame(Type::kDeclare, Code::kOk, 1, &header);
  FieldWriter(&header).PutAt(8, static_cast<uint32_t>(kMaxFrameBytes));
  FrameReader reader;
  EXPECT_EQ(OnlyFrame(reader, header).status().code(), Code::kDataLoss);
}

TEST(Frame, AnotherVersionIsNamed) {
  std::vector<std::byte> bytes;
  ASSERT_TRUE(Encode(Hello(), 1, &bytes).ok());
  bytes[2] = std::byte{9};
  FrameReader reader;
  const Status status = OnlyFrame(reader, bytes).status();
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_NE(status.message().find("version 9"), std::string::npos);
}

TEST(Frame, StatusKeepsCodeAndMessage) {
  std::vector<std::byte> bytes;
  EncodeStatus(Status(Code::kChanged, "/data/a.jpg: shrank"), 5, &bytes);
  FrameReader reader;
  auto frame = OnlyFrame(reader, bytes);
  ASSERT_TRUE(frame);
  Status back;
  ASSERT_TRUE(DecodeStatus(*frame, &back).ok());
  EXPECT_EQ(back.code(), Code::kChanged);
  EXPECT_EQ(back.message(), "/data/a.jpg: shrank");
}

TEST(Frame, AnyCutOfTheStreamGivesTheSameFrames) {
  for (uint64_t seed = 0; seed < Seeds(); ++seed) {
    SplitMix64 rng(seed);
    std::vector<std::byte> bytes;
    std::vector<std::string> sent;
    for (int i = 0; i < 30; ++i) {
      Loan loan = Random<Loan>(rng.Next());
      if (i == 10) {
        Declare declare;
        declare.order.resize(500000);
        ASSERT_TRUE(Encode(declare, 0, &bytes).ok());
      }
      ASSERT_TRUE(Encode(loan, static_cast<uint64_t>(i), &bytes).ok());
      sent.push_back(Describe(loan));
    }
    FrameReader reader;
    std::vector<std::string> got;
    for (size_t at = 0; at < bytes.size();) {
      const std::span<std::byte> room = reader.Room(1 + rng.Below(5000));
      const size_t n = std::min({room.size(), bytes.size() - at, 1 + rng.Below(20000)});
      std::copy_n(bytes.begin() + static_cast<int64_t>(at), n, room.begin());
      reader.Filled(n);
      at += n;
      while (true) {
        Frame frame;
        const auto whole = reader.Next(&frame);
        ASSERT_TRUE(whole) << whole.status().ToString();
        if (!*whole) break;
        if (frame.header.type == Type::kDeclare) continue;
        Loan back;
        ASSERT_TRUE(Decode(frame, &back).ok());
        got.push_back(Describe(back));
      }
    }
    EXPECT_EQ(got, sent);
  }
}

}  // namespace
}  // namespace forebay::wire
