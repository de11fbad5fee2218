// The byte stream of a TCP connection: whatever comes, in whatever pieces, ends in an error, in a
// wait for more, or in the messages that one piece would give; nothing is written beyond a
// payload's place, and before the proof nobody is given memory.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "expect.h"
#include "transport/tcp_frames.h"
#include "transport/transport.h"

namespace {

using namespace forebay;
using namespace forebay::tcp;

// What a stream says, one entry a step. The pieces are as long as `piece` says, in turn.
std::vector<std::string> Steps(std::span<const uint8_t> data, std::span<const uint8_t> pieces,
                               uint8_t proven_after) {
  constexpr uint64_t kMostPlace = 1 << 16;  // larger payloads are not taken
  std::vector<std::string> steps;
  FrameReader reader(Role::kConnected);
  std::unique_ptr<std::byte[]> place;
  uint64_t place_bytes = 0;
  size_t messages = 0;
  size_t turn = 0;
  bool proven = false;
  while (true) {
    while (true) {
      const Result<FrameReader::Step> step = reader.Next();
      if (!step) {
        steps.push_back("error");
        return steps;
      }
      if (step->kind == FrameReader::Step::Kind::kNothing) break;
      if (step->kind == FrameReader::Step::Kind::kHello) {
        steps.push_back("hello");
      } else if (step->kind == FrameReader::Step::Kind::kPayload) {
        FUZZ_EXPECT(place != nullptr);
        const auto* const bytes = step->bytes.empty() ? place.get() : step->bytes.data();
        FUZZ_EXPECT(step->bytes.empty() || step->bytes.size() == place_bytes);
        steps.emplace_back(reinterpret_cast<const char*>(bytes), place_bytes);
        place.reset();
      } else {
        FUZZ_EXPECT(step->bytes.size() <= (proven ? Transport::kMaxHeader : kMostUnproven));
        FUZZ_EXPECT(step->payload_bytes <= (proven ? Transport::kMaxPayload : 0));
        steps.emplace_back(reinterpret_cast<const char*>(step->bytes.data()), step->bytes.size());
        if (step->payload_bytes > 0) {
          const bool wanted = step->payload_bytes <= kMostPlace;
          place_bytes = wanted ? step->payload_bytes : 0;
          // Of exactly that size: the sanitizer sees who writes beyond it.
          place.reset(wanted ? new std::byte[place_bytes] : nullptr);
          reader.SetPlace({place.get(), static_cast<size_t>(place_bytes)});
        }
        if (++messages > proven_after) {
          proven = true;
          reader.SetProven();
        }
      }
    }
    if (data.empty()) return steps;
    size_t most = pieces.empty() ? data.size() : 1 + pieces[turn++ % pieces.size()];
    most = std::min(most, data.size());
    size_t taken = 0;
    for (const iovec& space : reader.Where()) {
      FUZZ_EXPECT(space.iov_len <= Transport::kMaxPayload);
      const size_t bytes = std::min(space.iov_len, most - taken);
      if (bytes > 0) std::memcpy(space.iov_base, data.data() + taken, bytes);
      taken += bytes;
    }
    FUZZ_EXPECT(taken > 0);
    reader.Took(taken);
    data = data.subspan(taken);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // proven after so many messages, how many pieces, their lengths, the stream.
  if (size < 2) return 0;
  const uint8_t proven_after = data[0] % 4;
  const size_t pieces = std::min<size_t>(data[1] % 16, size - 2);
  const std::span<const uint8_t> stream(data + 2 + pieces, size - 2 - pieces);
  FUZZ_EXPECT(Steps(stream, {data + 2, pieces}, proven_after) == Steps(stream, {}, proven_after));
  return 0;
}
