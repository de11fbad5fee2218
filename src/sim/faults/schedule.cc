#include "sim/faults/schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include "base/rng.h"

namespace forebay::sim {
namespace {

constexpr std::array<std::string_view, kFaultKinds> kNames = {
    "crash",         "power-off",   "pause",      "cut",      "isolate",
    "slow-link",     "reset",       "corrupt",    "garble",   "source-stall",
    "source-errors", "source-slow", "clock-jump", "pressure", "reopen"};

// When the last fault begins, at most.
constexpr uint64_t kFaultMillis = 4500;

}  // namespace

std::string Schedule::ToString() const {
  std::string out;
  for (const Fault& f : faults) {
    out += StrCat(out.empty() ? "" : ",", kNames[static_cast<size_t>(f.kind)], ":", f.at / kMilli,
                  ":", f.node, ":", f.other, ":", f.lasts / kMilli, ":", f.much);
  }
  return out;
}

Result<Schedule> Schedule::Parse(const std::string& text) {
  Schedule out;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const size_t colon = std::min(one.find(':'), one.size());
    const auto kind = std::find(kNames.begin(), kNames.end(), one.substr(0, colon));
    std::array<uint64_t, 5> numbers{};
    std::string_view left = one.substr(colon);
    bool right = kind != kNames.end();
    for (uint64_t& number : numbers) {
      right = right && left.starts_with(':');
      if (!right) break;
      left.remove_prefix(1);
      const auto [end, error] = std::from_chars(left.data(), left.data() + left.size(), number);
      right = error == std::errc() && number < 1'000'000'000;
      left.remove_prefix(static_cast<size_t>(end - left.data()));
    }
    if (!right || !left.empty()) {
      return Status(Code::kInvalidArgument,
                    StrCat("'", one, "' is not kind:ms:node:other:ms:number"));
    }
    out.faults.push_back({.kind = static_cast<FaultKind>(kind - kNames.begin()),
                          .at = static_cast<Nanos>(numbers[0]) * kMilli,
                          .node = static_cast<uint32_t>(numbers[1]),
                          .other = static_cast<uint32_t>(numbers[2]),
                          .lasts = static_cast<Nanos>(numbers[3]) * kMilli,
                          .much = numbers[4]});
  }
  return out;
}

Schedule Schedule::Draw(uint64_t seed, uint32_t nodes) {
  SplitMix64 rng(seed * 77 + 5);
  Schedule out;
  const uint64_t count = rng.Below(9);
  const auto millis = [&](uint64_t low, uint64_t high) {
    return static_cast<Nanos>(low + rng.Below(high - low + 1)) * kMilli;
  };
  for (uint64_t i = 0; i < count; ++i) {
    Fault f;
    f.kind = static_cast<FaultKind>(rng.Below(kFaultKinds));
    f.at = millis(0, kFaultMillis);
    f.node = static_cast<uint32_t>(rng.Below(nodes));
    f.other = static_cast<uint32_t>((f.node + 1 + rng.Below(nodes - 1)) % nodes);
    f.lasts = millis(10, 2200);
    switch (f.kind) {
      case FaultKind::kCrash:
      case FaultKind::kPowerOff:
        if (rng.Below(3) == 0) f.lasts = 0;
        break;
      case FaultKind::kSlowLink:
        f.much = 1 + rng.Below(400);
        break;
      case FaultKind::kSourceErrors:
        f.much = 1 + rng.Below(20);
        break;
      case FaultKind::kSourceSlow:
        f.much = 2 + rng.Below(100);
        break;
      case FaultKind::kClockJump:
        f.much = 1 + rng.Below(4000);
        break;
      case FaultKind::kPressure:
        f.much = 2 + rng.Below(14);
        break;
      default:
        break;
    }
    out.faults.push_back(f);
  }
  std::stable_sort(out.faults.begin(), out.faults.end(),
                   [](const Fault& a, const Fault& b) { return a.at < b.at; });
  return out;
}

}  // namespace forebay::sim
