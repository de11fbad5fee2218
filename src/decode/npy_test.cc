#include "decode/npy.h"

#include <gtest/gtest.h>

#include <cstring>

namespace forebay {
namespace {

std::span<const std::byte> Bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string Npy(const std::string& dictionary, const std::string& data) {
  std::string header = dictionary;
  header.resize((10 + header.size() + 64) / 64 * 64 - 11, ' ');
  header += '\n';
  std::string file("\x93NUMPY\x01\x00", 8);
  file += static_cast<char>(header.size() & 255);
  file += static_cast<char>(header.size() >> 8);
  return file + header + data;
}

std::string Number(uint64_t value, size_t bytes) {
  std::string out;
  for (size_t i = 0; i < bytes; ++i, value >>= 8) out += static_cast<char>(value & 255);
  return out;
}

// An archive of stored members.
std::string Zip(const std::vector<std::pair<std::string, std::string>>& members, int method = 0) {
  std::string file;
  std::string directory;
  for (const auto& [name, data] : members) {
    const std::string sizes = Number(data.size(), 4) + Number(data.size(), 4);
    directory += Number(0x02014b50, 4) + Number(20, 2) + Number(20, 2) + Number(0, 2) +
                 Number(static_cast<uint64_t>(method), 2) + Number(0, 8) + sizes +
                 Number(name.size(), 2) + Number(0, 12) + Number(file.size(), 4) + name;
    file += Number(0x04034b50, 4) + Number(20, 2) + Number(0, 2) +
            Number(static_cast<uint64_t>(method), 2) + Number(0, 8) + sizes +
            Number(name.size(), 2) + Number(0, 2) + name + data;
  }
  const uint64_t at = file.size();
  return file + directory + Number(0x06054b50, 4) + Number(0, 4) + Number(members.size(), 2) +
         Number(members.size(), 2) + Number(directory.size(), 4) + Number(at, 4) + Number(0, 2);
}

const char kPlain[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";

TEST(Npy, ReadsTypeShapeAndBytes) {
  const std::string file = Npy(kPlain, std::string(24, 'x') + "more");
  const auto array = ReadNpy(Bytes(file));
  ASSERT_TRUE(array) << array.status().ToString();
  EXPECT_EQ(array->dtype, "<f4");
  EXPECT_EQ(array->shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(array->bytes.size(), 24U);
  EXPECT_EQ(std::memcmp(array->bytes.data(), "xxxx", 4), 0);
  const std::string scalar = Npy("{'descr': '|u1', 'fortran_order': False, 'shape': (), }", "\x07");
  ASSERT_TRUE(ReadNpy(Bytes(scalar)));
  EXPECT_EQ(ReadNpy(Bytes(scalar))->bytes.size(), 1U);
}

TEST(Npy, RefusesWhatItCannotRead) {
  const std::string data(24, 'x');
  auto code = [&](const char* dictionary) {
    return ReadNpy(Bytes(Npy(dictionary, data))).status().code();
  };
  EXPECT_EQ(code("{'descr': '>f4', 'fortran_order': False, 'shape': (2,), }"),
            Code::kUnimplemented);
  EXPECT_EQ(code("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }"), Code::kUnimplemented);
  EXPECT_EQ(code("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }"),
            Code::kUnimplemented);
  EXPECT_EQ(code("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }"), Code::kUnimplemented);
  EXPECT_EQ(code("{'descr': '<f4', 'fortran_order': False, }"), Code::kDataLoss);
  EXPECT_EQ(code("{'descr': '<f4', 'fortran_order': False, 'shape': (2, }"), Code::kDataLoss);
  EXPECT_EQ(code("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999, 99999999), }"),
            Code::kDataLoss);
  EXPECT_EQ(code("{'descr': '<f4', 'fortran_order': False, 'shape': (7,), }"), Code::kDataLoss);
}

TEST(Npy, EveryTruncationIsAnErrorOrWhole) {
  const std::string file = Npy(kPlain, std::string(24, 'x'));
  for (size_t n = 0; n < file.size(); ++n) {
    EXPECT_FALSE(ReadNpy(Bytes(file.substr(0, n)))) << n;
  }
  const std::string archive = Zip({{"a.npy", file}, {"b.npy", file}});
  for (size_t n = 0; n < archive.size(); ++n) {
    EXPECT_FALSE(ReadArray(Bytes(archive.substr(0, n)), "a")) << n;
  }
}

TEST(Npz, FindsMembersByName) {
  const std::string a = Npy(kPlain, std::string(24, 'a'));
  const std::string b = Npy(kPlain, std::string(24, 'b'));
  const std::string archive = Zip({{"a.npy", a}, {"b.npy", b}});
  const auto array = ReadArray(Bytes(archive), "b");
  ASSERT_TRUE(array) << array.status().ToString();
  EXPECT_EQ(std::to_integer<char>(array->bytes[0]), 'b');
  EXPECT_TRUE(ReadArray(Bytes(Zip({{"a.npy", a}})), ""));
  const auto several = ReadArray(Bytes(archive), "");
  ASSERT_FALSE(several);
  EXPECT_NE(several.error().message().find("a, b"), std::string::npos);
  const auto missing = ReadArray(Bytes(archive), "c");
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message().find("a, b"), std::string::npos);
  EXPECT_EQ(ReadArray(Bytes(Zip({{"a.npy", a}}, 8)), "").status().code(), Code::kUnimplemented);
}

}  // namespace
}  // namespace forebay
