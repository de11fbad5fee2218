#include "control/layout.h"

#include <cmath>

namespace forebay::control {
namespace {

constexpr std::string_view kHex = "0123456789abcdef";

// A part of a key: without the separator, and printable.
std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte > 0x20 && byte < 0x7f && c != '/' && c != '%') {
      out.push_back(c);
    } else {
      out.push_back('%');
      out.push_back(kHex[byte >> 4]);
      out.push_back(kHex[byte & 15]);
    }
  }
  return out;
}

std::optional<std::string> Unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out.push_back(text[i]);
      continue;
    }
    if (i + 2 >= text.size()) return std::nullopt;
    const size_t high = kHex.find(text[i + 1]);
    const size_t low = kHex.find(text[i + 2]);
    if (high == std::string_view::npos || low == std::string_view::npos) return std::nullopt;
    out.push_back(static_cast<char>(high << 4 | low));
    i += 2;
  }
  return out;
}

Status Wrong(std::string_view what) {
  return Status(Code::kDataLoss, StrCat("control state: ", what));
}

// [bytes, operations] of an object's member.
bool ReadRates(const JsonValue& value, std::string_view name, RateLimits* out) {
  const JsonValue* pair = value.Find(name);
  if (pair == nullptr || pair->array() == nullptr || pair->array()->size() != 2) return false;
  const auto bytes = ParseRate((*pair->array())[0]);
  const auto operations = ParseRate((*pair->array())[1]);
  if (!bytes || !operations) return false;
  *out = {*bytes, *operations};
  return true;
}

// Five digits: shorter texts, of which a controller reads thousands.
double Short(double x) {
  if (!(x > 0) || std::isinf(x)) return x;
  const double unit = std::pow(10.0, std::floor(std::log10(x)) - 4);
  // Division by a power of ten keeps small numbers short, too: 0.3 and not 0.30000000000000004.
  return unit >= 1 ? std::round(x / unit) * unit : std::round(x / unit) / std::round(1 / unit);
}

JsonValue WriteRates(const RateLimits& rates) {
  return JsonArray{WriteRate(rates.bytes_per_s), WriteRate(rates.operations_per_s)};
}

bool ReadShare(const JsonValue& value, std::string_view name, double* out) {
  const JsonValue* member = value.Find(name);
  const auto number = member == nullptr ? std::nullopt : member->number();
  if (!number || *number < 0) return false;
  *out = *number;
  return true;
}

}  // namespace

std::string ControlLayout::Stage(std::string_view node, std::string_view job) const {
  return StrCat(prefix_, "live/stages/", Escaped(node), "/", Escaped(job));
}

std::string ControlLayout::Page(uint32_t number) const {
  return StrCat(prefix_, "decisions/", kHex[number >> 4 & 15], kHex[number & 15]);
}

uint32_t ControlLayout::PageOf(std::string_view node) {
  uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : node) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return static_cast<uint32_t>((hash >> 32 ^ hash) % kPages);
}

std::optional<std::pair<std::string, std::string>> ControlLayout::StageOf(
    std::string_view key) const {
  const std::string stages = Stages();
  if (!key.starts_with(stages)) return std::nullopt;
  key.remove_prefix(stages.size());
  const size_t slash = key.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  auto node = Unescaped(key.substr(0, slash));
  auto job = Unescaped(key.substr(slash + 1));
  if (!node || !job || key.find('/', slash + 1) != std::string_view::npos) return std::nullopt;
  return std::pair(*std::move(node), *std::move(job));
}

JsonValue WriteRate(double rate) { return std::isinf(rate) ? JsonValue() : JsonValue(rate); }

std::optional<double> ParseRate(const JsonValue& value) {
  if (value.is_null()) return kUnlimited;
  const auto number = value.number();
  if (!number || *number < 0) return std::nullopt;
  return *number;
}

std::string WriteSummary(const StageSummary& summary) {
  JsonValue value;
  const auto rates = [](const RateLimits& each) {
    return WriteRates({Short(each.bytes_per_s), Short(each.operations_per_s)});
  };
  value.Set("demand", rates(summary.demand));
  value.Set("got", rates(summary.delivered));
  if (summary.read_bytes) value.Set("read", static_cast<int64_t>(*summary.read_bytes));
  value.Set("stall", Short(summary.stall_share));
  value.Set("capacity", Short(summary.capacity));
  return value.Write();
}

Result<StageSummary> ParseSummary(std::string node, std::string job, std::string_view json) {
  const Result<JsonValue> value = JsonValue::Parse(json);
  if (!value) return Wrong(value.error().message());
  StageSummary summary;
  summary.node = std::move(node);
  summary.job = std::move(job);
  if (!ReadRates(*value, "demand", &summary.demand) ||
      !ReadRates(*value, "got", &summary.delivered) ||
      !ReadShare(*value, "stall", &summary.stall_share) ||
      !ReadShare(*value, "capacity", &summary.capacity)) {
    return Wrong(StrCat("not a summary: ", json));
  }
  const JsonValue* read = value->Find("read");  // which older builds do not tell
  if (read != nullptr && read->integer() != nullptr && *read->integer() >= 0) {
    summary.read_bytes = static_cast<uint64_t>(*read->integer());
  }
  return summary;
}

std::string WritePage(const DecisionPage& page) {
  // Escaped as in keys: a name of odd bytes must not spoil the page for the others on it.
  JsonValue nodes{JsonObject()};
  for (const auto& [node, jobs] : page.limits) {
    JsonValue list;
    for (const auto& [job, limits] : jobs) list.Set(Escaped(job), WriteRates(limits));
    nodes.Set(Escaped(node), std::move(list));
  }
  JsonValue value;
  value.Set("policy", page.policy);
  value.Set("limits", std::move(nodes));
  return value.Write();
}

Result<DecisionPage> ParsePage(std::string_view json) {
  const Result<JsonValue> value = JsonValue::Parse(json);
  if (!value) return Wrong(value.error().message());
  const JsonValue* policy = value->Find("policy");
  const JsonValue* nodes = value->Find("limits");
  if (policy == nullptr || policy->integer() == nullptr || nodes == nullptr ||
      nodes->object() == nullptr) {
    return Wrong("not a page of decisions");
  }
  DecisionPage page;
  page.policy = *policy->integer();
  for (const JsonMember& node : *nodes->object()) {
    const auto node_name = Unescaped(node.name);
    if (node.value.object() == nullptr || !node_name) return Wrong("not a page of decisions");
    for (const JsonMember& job : *node.value.object()) {
      const auto job_name = Unescaped(job.name);
      if (!job_name || !ReadRates(node.value, job.name, &page.limits[*node_name][*job_name])) {
        return Wrong(StrCat("not a limit of ", node.name, "'s ", job.name));
      }
    }
  }
  return page;
}

}  // namespace forebay::control
