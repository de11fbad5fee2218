// Packets of the file service (files/message.h), put together and taken apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "files/message.h"

namespace forebay::files {

// A question, with views into the packet it came in.
struct Question {
  Header header;
  std::vector<std::string_view> paths;  // of all kinds but kOrder
  std::vector<uint32_t> numbers;        // of kOrder
};

// kDataLoss for anything that is not exactly one question: trusts nothing in it. Paths are not
// empty, have no 0 in them and are shorter than PATH_MAX; what else they say is not checked.
Result<Question> ParseQuestion(std::span<const std::byte> packet);

std::vector<std::byte> PathsPacket(Kind kind, std::span<const std::string_view> paths,
                                   uint64_t a = 0, uint64_t b = 0, JobNumber job = 0);
std::vector<std::byte> OrderPacket(uint64_t position, std::span<const uint32_t> numbers);
std::vector<std::byte> AnswerPacket(Kind kind, Answer answer, uint64_t a = 0,
                                    std::string_view text = {});
// The text of an answer; kDataLoss when it is none.
Result<std::string_view> ParseAnswer(std::span<const std::byte> packet, Header* header);

// How many of the paths, from the first on, fit into one packet; at least one of those that may be
// in a packet at all.
size_t PathsThatFit(std::span<const std::string_view> paths);
constexpr size_t kMostNumbers = (kMostPacket - sizeof(Header)) / sizeof(uint32_t);
// Header::count holds the shortest paths and the most numbers of a packet.
static_assert((kMostPacket - sizeof(Header)) / (sizeof(uint16_t) + 1) <= UINT16_MAX);

}  // namespace forebay::files
