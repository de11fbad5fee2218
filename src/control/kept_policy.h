// The policy of one node, kept in this user's state folder: the next daemon in the same place takes
// it up. A cluster's policy lies in etcd instead.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace forebay::control {

// Where the policy of the daemon at `place` (its socket) is kept: $XDG_STATE_HOME/forebay, or
// $HOME/.local/state/forebay, which nodes may have in common. kUnimplemented: the environment names
// neither.
Result<std::string> KeptPolicyPath(std::string_view place);

// Empty: none is kept. kPermissionDenied: others may have written it.
Result<std::string> ReadKeptPolicy(const std::string& path);
// Whole or not at all, also when the machine fails; an empty text removes it.
Status KeepPolicy(const std::string& path, std::string_view json);

}  // namespace forebay::control
