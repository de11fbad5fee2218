// Which job this process belongs to, for policies: docs/policies.md.
#pragma once

#include <string>
#include <string_view>

namespace forebay {

// FOREBAY_JOB; else SLURM's job; else torchrun's run id; else the host and the process group, or
// the launcher of a rank that is a group of its own. The same for all ranks of a node.
std::string JobName();
// As it may stand in messages: printable, and no longer than a policy's names.
std::string CleanJobName(std::string_view name);

}  // namespace forebay
