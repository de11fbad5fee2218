// JSON and policies: any bytes end in an error, or in a value whose text gives the same value.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/json.h"
#include "core/policy.h"
#include "expect.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay::control;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto value = JsonValue::Parse(text);
  if (!value) return 0;
  const std::string written = value->Write();
  const auto again = JsonValue::Parse(written);
  FUZZ_EXPECT(again.has_value());
  FUZZ_EXPECT(again->Write() == written);

  const auto policy = ParsePolicy(text, {});
  if (!policy) return 0;
  const auto same = ParsePolicy(WritePolicy(*policy), {});
  FUZZ_EXPECT(same.has_value());
  FUZZ_EXPECT(*same == *policy);
  FUZZ_EXPECT(policy->RuleFor("job").share > 0);
  return 0;
}
