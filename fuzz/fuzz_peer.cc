// Messages between peers: any bytes end in an error, or in a message that encodes to the same
// bytes. Paths in it lead below a folder.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "expect.h"
#include "peer/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay;
  const auto bytes = std::as_bytes(std::span(data, size));
  const Result<peer::Message> message = peer::Decode(bytes);
  if (!message) return 0;
  FUZZ_EXPECT(size <= Transport::kMaxHeader);
  FUZZ_EXPECT(std::ranges::equal(peer::Encode(*message), bytes));
  if (const auto* get = std::get_if<peer::GetNamedMessage>(&*message)) {
    for (const peer::NamedWanted& wanted : get->wanted) {
      const std::string path = "/" + wanted.sample.path + "/";
      FUZZ_EXPECT(path.find("//") == std::string::npos);
      FUZZ_EXPECT(path.find("/../") == std::string::npos);
      FUZZ_EXPECT(path.find('\0') == std::string::npos);
      FUZZ_EXPECT(wanted.sample.length() <= wanted.sample.bytes);
    }
  }
  return 0;
}
