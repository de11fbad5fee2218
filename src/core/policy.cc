#include "core/policy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/json.h"

namespace forebay::control {
namespace {

constexpr double kLeastShare = 1e-3;
constexpr double kMostShare = 1e6;
constexpr int32_t kMostPriority = 100;
constexpr size_t kLongestMatch = 256;
constexpr size_t kMostJobs = 10'000;

Status Wrong(std::string_view key, std::string_view what) {
  return Status(Code::kInvalidArgument, StrCat(key, ": ", what));
}

// Takes the members of one object by name, and complains of what is left.
class Reader {
 public:
  Reader(const JsonValue& value, std::string where) : where_(std::move(where)) {
    if (value.object() == nullptr) {
      status_ = Wrong(where_.empty() ? "policy" : where_, "it must be an object");
    } else {
      members_ = value.object();
    }
  }

  std::string Key(std::string_view name) const {
    return where_.empty() ? std::string(name) : StrCat(where_, ".", name);
  }
  const JsonValue* Take(std::string_view name) {
    known_.emplace_back(name);
    if (members_ == nullptr) return nullptr;
    for (const JsonMember& member : *members_) {
      if (member.name == name) return &member.value;
    }
    return nullptr;
  }
  void Fail(std::string_view name, std::string_view what) {
    if (status_.ok()) status_ = Wrong(Key(name), what);
  }
  void Number(std::string_view name, double* out) {
    const JsonValue* value = Take(name);
    if (value == nullptr) return;
    if (const auto number = value->number()) {
      *out = *number;
    } else {
      Fail(name, "it must be a number");
    }
  }
  template <typename N>
  void Whole(std::string_view name, N* out) {
    const JsonValue* value = Take(name);
    if (value == nullptr) return;
    const int64_t* whole = value->integer();
    if (whole == nullptr || *whole != static_cast<int64_t>(static_cast<int32_t>(*whole))) {
      Fail(name, "it must be a whole number");
    } else {
      *out = static_cast<N>(*whole);
    }
  }
  void Bytes(std::string_view name, std::optional<int64_t>* out) {
    const JsonValue* value = Take(name);
    if (value == nullptr) return;
    if (const int64_t* whole = value->integer()) {
      *out = *whole;
    } else {
      Fail(name, "it must be a number of bytes");
    }
  }
  // The first complaint, or one about a key that nobody took.
  Status Done() {
    if (!status_.ok()) return status_;
    for (const JsonMember& member : *members_) {
      if (std::find(known_.begin(), known_.end(), member.name) != known_.end()) continue;
      std::string list;
      for (const std::string& name : known_) list += (list.empty() ? "" : ", ") + name;
      return Wrong(Key(member.name), StrCat("it is not a key; there are: ", list));
    }
    return Status();
  }

 private:
  const JsonObject* members_ = nullptr;
  const std::string where_;
  std::vector<std::string> known_;
  Status status_;
};

Status ReadJob(const JsonValue& value, std::string where, JobRule* job) {
  Reader reader(value, std::move(where));
  if (const JsonValue* match = reader.Take("match"); match == nullptr) {
    reader.Fail("match", "it is missing; name the jobs that the rule is for, such as \"*\"");
  } else if (match->text() == nullptr) {
    reader.Fail("match", "it must be text");
  } else {
    job->match = *match->text();
  }
  reader.Number("share", &job->share);
  reader.Whole("priority", &job->priority);
  reader.Number("min_bandwidth", &job->min_bandwidth);
  reader.Number("max_bandwidth", &job->max_bandwidth);
  reader.Number("min_operations", &job->min_operations);
  reader.Number("max_operations", &job->max_operations);
  reader.Bytes("memory", &job->memory);
  reader.Bytes("folder", &job->folder);
  return reader.Done();
}

// A range from `low` to `high` of rates, both in the key names.
Status CheckRange(const std::string& where, std::string_view what, double low, double high) {
  const std::string min = StrCat(where, ".min_", what);
  const std::string max = StrCat(where, ".max_", what);
  if (!(low >= 0) || std::isinf(low)) return Wrong(min, "it must be 0 or more, and finite");
  if (!(high > 0)) return Wrong(max, "it must be above 0; leave it out for no limit");
  if (low > high) return Wrong(min, StrCat("it is above max_", what, "; lower one of the two"));
  return Status();
}

Status CheckBytes(const std::string& key, std::optional<int64_t> bytes) {
  if (bytes && *bytes < 0) return Wrong(key, "it must be 0 or more bytes");
  return Status();
}

Status CheckJob(const JobRule& job, const std::string& where) {
  if (job.match.empty() || job.match.size() > kLongestMatch) {
    return Wrong(StrCat(where, ".match"), StrCat("it must have 1 to ", kLongestMatch, " bytes"));
  }
  if (!(job.share >= kLeastShare && job.share <= kMostShare)) {
    return Wrong(StrCat(where, ".share"), "it must be from 0.001 to 1000000");
  }
  if (job.priority < -kMostPriority || job.priority > kMostPriority) {
    return Wrong(StrCat(where, ".priority"),
                 StrCat("it must be from ", -kMostPriority, " to ", kMostPriority));
  }
  FOREBAY_RETURN_IF_ERROR(CheckRange(where, "bandwidth", job.min_bandwidth, job.max_bandwidth));
  FOREBAY_RETURN_IF_ERROR(CheckRange(where, "operations", job.min_operations, job.max_operations));
  FOREBAY_RETURN_IF_ERROR(CheckBytes(StrCat(where, ".memory"), job.memory));
  return CheckBytes(StrCat(where, ".folder"), job.folder);
}

void SetBytes(JsonValue* value, const char* name, std::optional<int64_t> bytes) {
  if (bytes) value->Set(name, *bytes);
}

}  // namespace

const JobRule& Policy::RuleFor(std::string_view job) const {
  static const JobRule kDefault;
  for (const JobRule& rule : jobs) {
    if (GlobMatches(rule.match, job)) return rule;
  }
  return kDefault;
}

Status Validate(const Policy& policy, std::span<const KnownKnob> knobs) {
  if (policy.jobs.size() > kMostJobs) {
    return Wrong("job", StrCat("there are more than ", kMostJobs, " rules"));
  }
  for (size_t i = 0; i < policy.jobs.size(); ++i) {
    const std::string where = StrCat("job[", i, "]");
    FOREBAY_RETURN_IF_ERROR(CheckJob(policy.jobs[i], where));
    // The cheap cases of a rule that an earlier one hides.
    for (size_t j = 0; j < i; ++j) {
      const std::string& earlier = policy.jobs[j].match;
      if (earlier != "*" && earlier != policy.jobs[i].match) continue;
      return Wrong(StrCat(where, ".match"),
                   StrCat("it is never reached: job[", j, "] with match \"", earlier,
                          "\" comes first; put this rule before "
                          "it"));
    }
  }
  FOREBAY_RETURN_IF_ERROR(CheckBytes("tiers.memory", policy.memory));
  FOREBAY_RETURN_IF_ERROR(CheckBytes("tiers.folder", policy.folder));
  for (const auto& fixed : policy.knobs) {
    const std::string& name = fixed.first;
    const int64_t value = fixed.second;
    const std::string key = StrCat("tuner.knobs.", name);
    if (knobs.empty()) continue;
    const auto known = std::find_if(knobs.begin(), knobs.end(),
                                    [&](const KnownKnob& knob) { return knob.name == name; });
    if (known == knobs.end()) {
      std::string list;
      for (const KnownKnob& knob : knobs) list += (list.empty() ? "" : ", ") + knob.name;
      return Wrong(key, StrCat("there is no such knob; there are: ", list));
    }
    if (value < known->minimum || value > known->maximum) {
      return Wrong(key, StrCat("it is ", value, "; it must be from ", known->minimum, " to ",
                               known->maximum));
    }
  }
  return Status();
}

Result<Policy> ParsePolicy(std::string_view json, std::span<const KnownKnob> knobs) {
  const Result<JsonValue> value = JsonValue::Parse(json);
  if (!value) return Wrong("policy", value.error().message());
  Policy policy;
  Reader root(*value, "");
  if (const JsonValue* version = root.Take("version");
      version == nullptr || version->integer() == nullptr) {
    root.Fail("version", StrCat("it is missing; it must be ", Policy::kVersion));
  } else if (*version->integer() != Policy::kVersion) {
    root.Fail("version", StrCat("it is ", *version->integer(), "; this build reads version ",
                                Policy::kVersion, ": use the forebay command of the same build"));
  }
  if (const JsonValue* jobs = root.Take("job")) {
    if (jobs->array() == nullptr) return Wrong("job", "it must be a list of rules");
    for (size_t i = 0; i < jobs->array()->size(); ++i) {
      FOREBAY_RETURN_IF_ERROR(
          ReadJob((*jobs->array())[i], StrCat("job[", i, "]"), &policy.jobs.emplace_back()));
    }
  }
  if (const JsonValue* tiers = root.Take("tiers")) {
    Reader reader(*tiers, "tiers");
    reader.Bytes("memory", &policy.memory);
    reader.Bytes("folder", &policy.folder);
    FOREBAY_RETURN_IF_ERROR(reader.Done());
  }
  if (const JsonValue* tuner = root.Take("tuner")) {
    Reader reader(*tuner, "tuner");
    if (const JsonValue* on = reader.Take("on")) {
      if (on->boolean() == nullptr) return Wrong("tuner.on", "it must be true or false");
      policy.tuner = *on->boolean();
    }
    if (const JsonValue* fixed = reader.Take("knobs")) {
      if (fixed->object() == nullptr) return Wrong("tuner.knobs", "it must be an object");
      for (const JsonMember& knob : *fixed->object()) {
        if (knob.value.integer() == nullptr) {
          return Wrong(StrCat("tuner.knobs.", knob.name), "it must be a whole number");
        }
        policy.knobs[knob.name] = *knob.value.integer();
      }
    }
    FOREBAY_RETURN_IF_ERROR(reader.Done());
  }
  FOREBAY_RETURN_IF_ERROR(root.Done());
  FOREBAY_RETURN_IF_ERROR(Validate(policy, knobs));
  return policy;
}

std::string WritePolicy(const Policy& policy) {
  JsonValue root;
  root.Set("version", Policy::kVersion);
  const JobRule plain;
  JsonArray jobs;
  for (const JobRule& job : policy.jobs) {
    JsonValue& out = jobs.emplace_back();
    out.Set("match", job.match);
    if (job.share != plain.share) out.Set("share", job.share);
    if (job.priority != plain.priority) out.Set("priority", job.priority);
    if (job.min_bandwidth > 0) out.Set("min_bandwidth", job.min_bandwidth);
    if (job.max_bandwidth < kUnlimited) out.Set("max_bandwidth", job.max_bandwidth);
    if (job.min_operations > 0) out.Set("min_operations", job.min_operations);
    if (job.max_operations < kUnlimited) out.Set("max_operations", job.max_operations);
    SetBytes(&out, "memory", job.memory);
    SetBytes(&out, "folder", job.folder);
  }
  if (!jobs.empty()) root.Set("job", std::move(jobs));
  if (policy.memory || policy.folder) {
    JsonValue tiers;
    SetBytes(&tiers, "memory", policy.memory);
    SetBytes(&tiers, "folder", policy.folder);
    root.Set("tiers", std::move(tiers));
  }
  if (!policy.tuner || !policy.knobs.empty()) {
    JsonValue tuner;
    tuner.Set("on", policy.tuner);
    JsonValue knobs;
    for (const auto& [name, value] : policy.knobs) knobs.Set(name, value);
    if (!policy.knobs.empty()) tuner.Set("knobs", std::move(knobs));
    root.Set("tuner", std::move(tuner));
  }
  return root.Write();
}

bool GlobMatches(std::string_view pattern, std::string_view name) {
  size_t p = 0;
  size_t n = 0;
  size_t star = std::string_view::npos;  // the last * seen, and where its text ends for now
  size_t from = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      from = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++from;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace forebay::control
