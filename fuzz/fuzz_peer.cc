// Messages between peers: any bytes end in an error, or in a message that encodes to the same
// bytes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "expect.h"
#include "peer/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay;
  const auto bytes = std::as_bytes(std::span(data, size));
  const Result<peer::Message> message = peer::Decode(bytes);
  if (!message) return 0;
  FUZZ_EXPECT(size <= Transport::kMaxHeader);
  FUZZ_EXPECT(std::ranges::equal(peer::Encode(*message), bytes));
  return 0;
}
