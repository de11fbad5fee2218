#include "base/bytes.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/bytes_testing.h"

namespace forebay {
namespace {

enum class Colour : uint8_t { kRed = 0, kBlue = 1 };

struct Point {
  uint16_t x = 0;
  bool y = false;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.x, m.y);
  }
  bool Valid() const { return x != 666; }
  bool operator==(const Point&) const = default;
};

struct Everything {
  uint32_t number = 0;
  int64_t negative = 0;
  std::array<std::byte, 3> fixed{};
  std::string text;
  std::string cut;
  std::vector<uint16_t> numbers;
  std::vector<std::string> texts;
  std::vector<Point> points;
  std::vector<uint8_t> left;
  std::vector<uint16_t> right;
  Colour colour = Colour::kRed;
  bool operator==(const Everything&) const = default;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io.Literal("<>");
    io(m.number, m.negative, m.fixed, m.text);
    io.ShortText(m.cut);
    io(m.numbers, m.texts, m.points);
    io.Columns(m.left, m.right);
    io.Enum(m.colour, Colour::kBlue);
  }
};

Everything Example() {
  Everything out;
  out.number = 0x01020304;
  out.negative = -2;
  out.fixed = {std::byte{9}, std::byte{8}, std::byte{7}};
  out.text = "ab";
  out.cut = "c";
  out.numbers = {1, 0x0203};
  out.texts = {"", "d"};
  out.points = {{5, true}, {6, false}};
  out.left = {1, 2};
  out.right = {3, 4};
  out.colour = Colour::kBlue;
  return out;
}

template <typename T>
std::string Written(const T& value) {
  std::string out;
  FieldWriter writer(&out);
  writer(value);
  return out;
}

template <typename T>
bool Reads(std::string_view bytes, T* out) {
  FieldReader reader(bytes);
  reader(*out);
  return reader.done();
}

TEST(Bytes, EveryFieldHasItsPlace) {
  EXPECT_EQ(HexOf(Written(Example())),
            "3c3e"                        // the literal
            "04030201"                    // a number
            "feffffffffffffff"            // a negative one
            "090807"                      // an array
            "020000006162"                // a text
            "0163"                        // a short one
            "0200000001000302"            // numbers
            "02000000000000000100000064"  // texts
            "02000000050001060000"        // structs
            "02000000"
            "0102"
            "03000400"  // columns
            "01");      // an enum
  std::vector<std::byte> bytes;
  FieldWriter writer(&bytes);
  writer(Example());
  EXPECT_EQ(HexOf(bytes), HexOf(Written(Example())));
}

TEST(Bytes, ComesBack) {
  Everything back;
  EXPECT_TRUE(Reads(Written(Example()), &back));
  EXPECT_EQ(back, Example());
}

TEST(Bytes, CutOrLongerIsWrong) {
  const std::string bytes = Written(Example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    Everything back;
    EXPECT_FALSE(Reads(std::string_view(bytes).substr(0, size), &back)) << size;
  }
  Everything back;
  EXPECT_FALSE(Reads(bytes + "x", &back));
}

TEST(Bytes, ALengthIsNotBelieved) {
  const std::string many("\xff\xff\xff\xff\1", 5);
  std::string text;
  std::vector<uint64_t> numbers;
  std::vector<std::string> texts;
  std::vector<Point> points;
  EXPECT_FALSE(Reads(many, &text));
  EXPECT_FALSE(Reads(many, &numbers));
  EXPECT_FALSE(Reads(many, &texts));
  EXPECT_FALSE(Reads(many, &points));
  EXPECT_LE(text.capacity(), 64u);
  EXPECT_EQ(numbers.capacity() + texts.capacity() + points.capacity(), 0u);
  // As many as there are bytes, of which each takes more than one.
  EXPECT_FALSE(Reads(std::string("\5\0\0\0\1\0\1\1\0", 9), &points));
  EXPECT_LE(points.capacity(), 4u);
  // A list that overflows when its bytes are counted.
  FieldReader reader(std::string_view("abcd"));
  reader.Elements(numbers, SIZE_MAX / sizeof(uint64_t) + 2);
  EXPECT_FALSE(reader.ok());
  EXPECT_TRUE(numbers.empty());
}

TEST(Bytes, WrongValuesAreRefused) {
  bool flag = true;
  EXPECT_FALSE(Reads(std::string_view("\2", 1), &flag));
  Point point;
  EXPECT_FALSE(Reads(Written(Point{666, true}), &point));  // its own rule
  std::string bytes = Written(Example());
  Everything back;
  bytes.back() = 2;  // no such colour
  EXPECT_FALSE(Reads(bytes, &back));
  bytes = Written(Example());
  bytes[0] = '!';  // another literal
  EXPECT_FALSE(Reads(bytes, &back));
}

TEST(Bytes, AVariantIsItsNumberAndItsFields) {
  using Either = std::variant<Point, Everything>;
  EXPECT_EQ(HexOf(Written(Either(Point{1, true}))), "00010001");
  Either back;
  EXPECT_TRUE(Reads(Written(Either(Example())), &back));
  EXPECT_EQ(std::get<Everything>(back), Example());
  EXPECT_FALSE(Reads(std::string_view("\2", 1), &back));
  EXPECT_FALSE(Reads(Written(Either(Point{666, true})), &back));
}

TEST(Bytes, NothingIsReadAfterAnError) {
  FieldReader reader(std::string_view("\1\0", 2));
  uint32_t number = 7;
  uint8_t byte = 7;
  reader(number, byte);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(number, 7u);
  EXPECT_EQ(byte, 7);
  EXPECT_TRUE(reader.View(0).empty());
}

TEST(Bytes, ShortTextsAreCut) {
  std::string out;
  FieldWriter(&out).ShortText(std::string(300, 'x'));
  EXPECT_EQ(out, "\xff" + std::string(255, 'x'));
}

TEST(Bytes, ALengthIsFilledInLater) {
  std::string out = "before";
  FieldWriter writer(&out);
  writer(uint16_t{0}, uint8_t{1});
  writer.PutAt(6, uint16_t{0x0203});
  EXPECT_EQ(HexOf(out), HexOf("before") + "030201");
}

}  // namespace
}  // namespace forebay
