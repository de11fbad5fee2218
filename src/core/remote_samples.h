// RemoteSamples: which samples a read would ask another node for.
#pragma once

#include "core/actions.h"

namespace forebay {

// Called by the one thread that calls the Scheduler. The answer may differ from call to call.
class RemoteSamples {
 public:
  virtual ~RemoteSamples() = default;
  virtual bool IsRemote(DatasetId dataset, SampleId sample) const = 0;
  // Whether a read is held back until other nodes have joined.
  virtual bool AwaitsNodes(DatasetId dataset, SampleId sample) const = 0;
};

}  // namespace forebay
