#include "base/json.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace forebay::control {
namespace {

std::string Again(std::string_view text) {
  const Result<JsonValue> value = JsonValue::Parse(text);
  return value ? value->Write() : "error: " + value.error().message();
}

TEST(Json, CanonicalForm) {
  EXPECT_EQ(Again(R"( { "b" : [ 1 , 2.50, true,false,null ] , "a" : "x" } )"),
            R"({"a":"x","b":[1,2.5,true,false,null]})");
  EXPECT_EQ(Again("[]"), "[]");
  EXPECT_EQ(Again("{}"), "{}");
  EXPECT_EQ(Again("-0"), "0");
  EXPECT_EQ(Again("-0.0"), "0");
  EXPECT_EQ(Again("1e3"), "1000");
  EXPECT_EQ(Again("1e-7"), "1e-07");
  EXPECT_EQ(Again("9223372036854775807"), "9223372036854775807");
  EXPECT_EQ(Again("0.1"), "0.1");
  EXPECT_EQ(Again(R"("a\u00e9\n\"\\\/\ud83d\ude00")"),
            "\"a\xc3\xa9\\u000a\\\"\\\\/\xf0\x9f\x98\x80\"");
}

TEST(Json, WhatIsNoJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "}",
                           "[1,]",
                           "[,1]",
                           "{\"a\":1,}",
                           "{a:1}",
                           "{\"a\"1}",
                           "{\"a\":}",
                           "01",
                           "+1",
                           ".5",
                           "1.",
                           "1e",
                           "--1",
                           "nul",
                           "truee",
                           "\"",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\u+123\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "\"\n\"",
                           "1 2",
                           "1e999",
                           "NaN",
                           "Infinity",
                           "{\"a\":1,\"a\":2}",
                           "[1",
                           "\"\xff\"",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xe2\x82\"",
                           "\"\xf5\x80\x80\x80\""}) {
    const Result<JsonValue> value = JsonValue::Parse(text);
    ASSERT_FALSE(value) << text;
    EXPECT_EQ(value.error().code(), Code::kInvalidArgument);
    EXPECT_NE(value.error().message().find("not JSON at byte"), std::string::npos);
  }
  EXPECT_FALSE(JsonValue::Parse(std::string_view("1\0", 2)));
  EXPECT_FALSE(JsonValue::Parse(std::string_view("\0", 1)));
}

TEST(Json, NestingHasABound) {
  const std::string deep(JsonValue::kMaxDepth, '[');
  EXPECT_TRUE(JsonValue::Parse(deep + std::string(deep.size(), ']')));
  EXPECT_FALSE(JsonValue::Parse("[" + deep + std::string(deep.size() + 1, ']')));
  EXPECT_FALSE(JsonValue::Parse(std::string(1'000'000, '[')));
}

TEST(Json, MakingAndFinding) {
  JsonValue value;
  value.Set("z", 1);
  value.Set("a", "text");
  value.Set("z", 2.5);
  value.Set("list", JsonArray{1, "two", nullptr});
  EXPECT_EQ(value.Write(), R"({"a":"text","list":[1,"two",null],"z":2.5})");
  ASSERT_NE(value.Find("z"), nullptr);
  EXPECT_EQ(*value.Find("z")->number(), 2.5);
  EXPECT_EQ(value.Find("none"), nullptr);
  EXPECT_EQ(JsonValue(3).Find("z"), nullptr);
  EXPECT_EQ(*JsonValue("12").IntegerOrText(), 12);
  EXPECT_FALSE(JsonValue("12x").IntegerOrText());
  EXPECT_FALSE(JsonValue("").IntegerOrText());
  EXPECT_EQ(JsonValue(std::numeric_limits<double>::infinity()).Write(), "null");
  EXPECT_EQ(*JsonValue::Parse(value.Write()), value);
}

}  // namespace
}  // namespace forebay::control
