#include "core/storage_model.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <limits>
#include <variant>

namespace forebay {
namespace {

constexpr Nanos kLongest = 24 * 3600 * kSecond;

struct Key {
  std::string_view name;
  // A Nanos member is written in milliseconds, a double member in units of `scale`.
  std::variant<Nanos StorageSettings::*, double StorageSettings::*, uint64_t StorageSettings::*>
      field;
  double scale = 1;
};

const std::array<Key, 12> kKeys = {{
    {"open_ms", &StorageSettings::open},
    {"stat_ms", &StorageSettings::stat},
    {"readdir_ms", &StorageSettings::readdir},
    {"read_ms", &StorageSettings::read},
    {"jitter", &StorageSettings::jitter},
    {"tail_prob", &StorageSettings::tail_prob},
    {"tail_mult", &StorageSettings::tail_mult},
    {"bandwidth_mb", &StorageSettings::bytes_per_s, 1e6},
    {"ops", &StorageSettings::ops_per_s},
    {"eio_rate", &StorageSettings::eio_rate},
    {"stall_ms", &StorageSettings::stall},
    {"seed", &StorageSettings::seed},
}};

std::string_view Trim(std::string_view s) {
  const size_t first = s.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return s.substr(first, s.find_last_not_of(" \t\r") - first + 1);
}

template <typename N>
bool ParseNumber(std::string_view text, N& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

Status Assign(StorageSettings& settings, std::string_view name, std::string_view value) {
  const auto key = std::find_if(kKeys.begin(), kKeys.end(),
                                [&](const Key& candidate) { return candidate.name == name; });
  if (key == kKeys.end()) {
    std::string known;
    for (const Key& k : kKeys) known += StrCat(known.empty() ? "" : ", ", k.name);
    return {Code::kInvalidArgument, StrCat("unknown setting '", name, "'; known are: ", known)};
  }
  bool parsed = false;
  if (const auto* nanos = std::get_if<Nanos StorageSettings::*>(&key->field)) {
    double ms = 0;
    if (*nanos == &StorageSettings::stall && value == "forever") {
      settings.stall = StorageSettings::kForever;
      return {};
    }
    parsed = ParseNumber(value, ms) && std::abs(ms) <= static_cast<double>(kLongest) / kMilli;
    if (parsed) settings.*(*nanos) = std::llround(ms * kMilli);
  } else if (const auto* real = std::get_if<double StorageSettings::*>(&key->field)) {
    double number = 0;
    parsed = ParseNumber(value, number);
    if (parsed) settings.*(*real) = number * key->scale;
  } else {
    parsed = ParseNumber(value, settings.*std::get<uint64_t StorageSettings::*>(key->field));
  }
  if (!parsed) {
    return {Code::kInvalidArgument, StrCat("'", value, "' is no value for ", name)};
  }
  return {};
}

std::string Number(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return {buffer, end};
}

Nanos SpanOf(double amount, double per_second) {
  return std::llround(std::min(amount / per_second * kSecond, static_cast<double>(kLongest)));
}

}  // namespace

Status StorageSettings::Validate() const {
  const auto invalid = [](std::string_view what) {
    return Status(Code::kInvalidArgument, std::string(what));
  };
  for (const Nanos latency : {open, stat, readdir, read}) {
    if (latency < 0 || latency > kLongest) {
      return invalid("open_ms, stat_ms, readdir_ms and read_ms must lie between 0 and one day");
    }
  }
  // Written so that NaN fails.
  if (!(jitter >= 0 && jitter <= 1)) return invalid("jitter must lie in [0, 1]");
  if (!(tail_prob >= 0 && tail_prob <= 1)) return invalid("tail_prob must lie in [0, 1]");
  if (!(tail_mult >= 1 && tail_mult <= 1e6)) return invalid("tail_mult must lie in [1, 1000000]");
  if (!(bytes_per_s == 0 || (bytes_per_s >= 1 && bytes_per_s <= 1e15))) {
    return invalid("bandwidth_mb must be 0 (no limit) or lie in [0.000001, 1000000000]");
  }
  if (!(ops_per_s == 0 || (ops_per_s >= 0.001 && ops_per_s <= 1e9))) {
    return invalid("ops must be 0 (no limit) or lie in [0.001, 1000000000]");
  }
  if (!(eio_rate >= 0 && eio_rate <= 1)) return invalid("eio_rate must lie in [0, 1]");
  if (stall < 0 || (stall > kLongest && stall != kForever)) {
    return invalid("stall_ms must lie between 0 and one day, or be 'forever'");
  }
  return {};
}

Result<StorageSettings> StorageSettings::Parse(std::string_view text) {
  return StorageSettings().With(text);
}

Result<StorageSettings> StorageSettings::With(std::string_view text) const {
  StorageSettings settings = *this;
  while (!text.empty()) {
    const size_t line_end = text.find('\n');
    std::string_view line = text.substr(0, line_end);
    text.remove_prefix(line_end == std::string_view::npos ? text.size() : line_end + 1);
    line = line.substr(0, line.find('#'));
    while (!line.empty()) {
      const size_t pair_end = line.find(',');
      const std::string_view pair = Trim(line.substr(0, pair_end));
      line.remove_prefix(pair_end == std::string_view::npos ? line.size() : pair_end + 1);
      if (pair.empty()) continue;
      const size_t equals = pair.find('=');
      if (equals == std::string_view::npos) {
        return Status(Code::kInvalidArgument, StrCat("'", pair, "' is not of the form key=value"));
      }
      FOREBAY_RETURN_IF_ERROR(
          Assign(settings, Trim(pair.substr(0, equals)), Trim(pair.substr(equals + 1))));
    }
  }
  FOREBAY_RETURN_IF_ERROR(settings.Validate());
  return settings;
}

std::string StorageSettings::ToText() const {
  std::string text;
  for (const Key& key : kKeys) {
    text += StrCat(key.name, "=");
    if (const auto* nanos = std::get_if<Nanos StorageSettings::*>(&key.field)) {
      const Nanos value = this->*(*nanos);
      text += value == kForever ? "forever" : Number(static_cast<double>(value) / kMilli);
    } else if (const auto* real = std::get_if<double StorageSettings::*>(&key.field)) {
      text += Number(this->*(*real) / key.scale);
    } else {
      text += std::to_string(this->*std::get<uint64_t StorageSettings::*>(key.field));
    }
    text += '\n';
  }
  return text;
}

StorageModel::StorageModel(const StorageSettings& settings, Nanos now)
    : rng_(settings.seed), stalled_until_(now), ops_free_at_(now), pipe_free_at_(now) {
  settings_.seed = settings.seed;
  Apply(settings, now);
}

void StorageModel::Apply(const StorageSettings& settings, Nanos now) {
  const StorageSettings old = this->settings(now);
  if (settings.stall == StorageSettings::kForever) {
    stalled_until_ = kNever;
  } else if (settings.stall != old.stall) {
    stalled_until_ = now + settings.stall;
  }
  if (settings.bytes_per_s != old.bytes_per_s) pipe_free_at_ = now;
  if (settings.ops_per_s != old.ops_per_s) ops_free_at_ = now;
  if (settings.seed != old.seed) rng_ = SplitMix64(settings.seed);
  settings_ = settings;
}

StorageSettings StorageModel::settings(Nanos now) const {
  StorageSettings current = settings_;
  if (now >= stalled_until_) current.stall = 0;
  return current;
}

Nanos StorageModel::Latency(OpKind kind) {
  Nanos base = 0;
  switch (kind) {
    case OpKind::kOpen:
      base = settings_.open;
      break;
    case OpKind::kStat:
      base = settings_.stat;
      break;
    case OpKind::kReaddir:
      base = settings_.readdir;
      break;
    case OpKind::kRead:
      base = settings_.read;
      break;
  }
  // Both are drawn every time, so that one setting does not shift what another one draws.
  const double spread = 2 * rng_.Uniform() - 1;
  const bool slow = rng_.Uniform() < settings_.tail_prob;
  const double latency = static_cast<double>(base) * (1 + settings_.jitter * spread) *
                         (slow ? settings_.tail_mult : 1);
  return std::llround(std::min(latency, static_cast<double>(kLongest)));
}

StorageModel::Decision StorageModel::Admit(OpKind kind, uint64_t bytes, Nanos now) {
  if (stalled_until_ == kNever) return {kNever, 0};

  const Nanos latency = Latency(kind);
  const bool fails = rng_.Uniform() < settings_.eio_rate;

  Nanos begin = std::max(now, stalled_until_);
  if (settings_.ops_per_s > 0) {
    begin = std::max(begin, ops_free_at_);
    ops_free_at_ = begin + SpanOf(1, settings_.ops_per_s);
  }
  Decision decision{begin + latency, 0};
  if (fails && (kind == OpKind::kOpen || kind == OpKind::kRead)) {
    decision.error = EIO;
  } else if (settings_.bytes_per_s > 0 && bytes > 0) {
    pipe_free_at_ =
        std::max(pipe_free_at_, begin) + SpanOf(static_cast<double>(bytes), settings_.bytes_per_s);
    decision.finish_at = std::max(decision.finish_at, pipe_free_at_);
  }
  return decision;
}

}  // namespace forebay
