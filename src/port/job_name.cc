#include "port/job_name.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/status.h"
#include "wire/message.h"

namespace forebay {
namespace {

std::string Variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? std::string() : std::string(text);
}

}  // namespace

std::string CleanJobName(std::string_view name) {
  std::string out(name.substr(0, wire::kLongestJob));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
  return out;
}

std::string JobName() {
  if (const std::string given = Variable("FOREBAY_JOB"); !given.empty()) return CleanJobName(given);
  if (const std::string id = Variable("SLURM_JOB_ID"); !id.empty()) {
    const std::string name = Variable("SLURM_JOB_NAME");
    return CleanJobName(StrCat(name.empty() ? "slurm" : name, "-", id));
  }
  const std::string run = Variable("TORCHELASTIC_RUN_ID");
  if (!run.empty() && run != "none") return CleanJobName(run);
  std::array<char, 256> host{};
  (void)gethostname(host.data(), host.size() - 1);
  const bool own_group = getpgrp() == getpid() && !Variable("LOCAL_RANK").empty();
  return CleanJobName(StrCat(host.data(), "-", own_group ? getppid() : getpgrp()));
}

}  // namespace forebay
