// RankLooks: a rank's looks at files, shared with the other ranks of its job by the node's daemon.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "catalog/look_sharing.h"
#include "port/socket_port.h"

namespace forebay {

struct RankOfJob {
  std::string job;     // as JobName() gives it
  uint32_t rank = 0;   // on this node
  uint32_t ranks = 0;  // on this node
  // When this process last wrote to a file of a data set, by SteadyClock(); below 0: it has not.
  Nanos wrote_at = -1;
};

// For one opening. Whatever goes wrong between this process and the daemon means that it looks by
// itself. Destruction tells the daemon that nothing will be handed in, if nothing was.
class RankLooks final : public LookSharing {
 public:
  RankLooks(std::shared_ptr<SocketPort> daemon, RankOfJob rank)
      : daemon_(std::move(daemon)), rank_(std::move(rank)) {}
  ~RankLooks() override;
  RankLooks(const RankLooks&) = delete;
  RankLooks& operator=(const RankLooks&) = delete;

  Result<std::optional<SeenFiles>> Ask(const std::string& name,
                                       const std::function<bool()>& tick) override;
  void Progress(uint64_t done) override;
  void HandIn(const SeenFiles& seen) override;

 private:
  const std::shared_ptr<SocketPort> daemon_;  // shared with the process's port
  const RankOfJob rank_;
  uint64_t ticket_ = 0;  // of the look that is this rank's to make; 0: there is none
  uint64_t done_ = 0;
};

}  // namespace forebay
