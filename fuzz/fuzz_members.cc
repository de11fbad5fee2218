// Frames between members and the registrar: any bytes end in an error, in a wait for more, or in a
// frame that is written as the same bytes; and whatever a frame says, the table of members holds.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "expect.h"
#include "peer/membership_message.h"
#include "peer/membership_table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay;
  using namespace forebay::peer;
  constexpr uint32_t kNodes = 8;
  constexpr Nanos kLease = 100;
  std::string_view in(reinterpret_cast<const char*>(data), size);
  MemberTable table(kNodes, kLease);
  table.RegisterSelf({0, 1, "self", 0, 0, true});
  Nanos now = 0;
  size_t longest = frame::kLongestUnproven;
  while (true) {
    const std::string_view before = in;
    const auto taken = frame::Take(&in, longest);
    if (!taken || !*taken) {
      FUZZ_EXPECT(in == before);
      break;
    }
    std::string again;
    frame::Append(**taken, &again);
    FUZZ_EXPECT(again == before.substr(0, before.size() - in.size()));
    longest = frame::kLongest;

    const uint64_t version = table.version();
    now += 1 + static_cast<Nanos>(again.size() % 64);
    if (const auto* theirs = std::get_if<frame::Register>(&**taken)) {
      table.Adopt(theirs->known, theirs->version, now);
      if (table.Register(theirs->member, now).ok()) {
        FUZZ_EXPECT(theirs->member.node < kNodes && theirs->member.node != 0);
        FUZZ_EXPECT(table.Find(theirs->member.node)->alive);
      }
    } else if (const auto* suspicion = std::get_if<frame::Suspicion>(&**taken)) {
      table.Suspect(suspicion->node, suspicion->incarnation, now);
    } else if (const auto* hello = std::get_if<frame::Hello>(&**taken)) {
      table.Renew(hello->node, hello->incarnation, now);
    } else if (const auto* answer = std::get_if<frame::Answer>(&**taken)) {
      table.Gone(answer->node, answer->incarnation);
    }
    table.Expire(now);
    FUZZ_EXPECT(table.version() >= version);
    const View view = table.Current();
    FUZZ_EXPECT(view.members.size() <= kNodes && view.version == table.version());
    FUZZ_EXPECT(view.members[0].alive && view.members[0].incarnation == 1);
    FUZZ_EXPECT(table.Since(table.version()).empty());
  }
  return 0;
}
