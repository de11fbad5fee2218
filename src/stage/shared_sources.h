// SharedSources: the sources whose reads may be answered by other nodes, for the scheduler.
#pragma once

#include <vector>

#include "core/remote_samples.h"
#include "source/source.h"

namespace forebay {

class SharedSources final : public RemoteSamples {
 public:
  // In the order of the data sets. `source` outlives every call; null: nothing of it is remote.
  void Add(const Source* source) { sources_.push_back(source); }
  bool IsRemote(DatasetId d, SampleId s) const override {
    return d < sources_.size() && sources_[d] != nullptr && sources_[d]->Elsewhere(s) >= 0;
  }

 private:
  std::vector<const Source*> sources_;
};

}  // namespace forebay
