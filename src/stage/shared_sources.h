// SharedSources: the sources whose reads may be answered by other nodes, for the scheduler.
#pragma once

#include <vector>

#include "core/remote_samples.h"
#include "source/source.h"

namespace forebay {

class SharedSources final : public RemoteSamples {
 public:
  // `source` outlives every call until another is set; null: nothing of the data set is remote.
  void Set(DatasetId d, const Source* source) {
    if (d >= sources_.size()) sources_.resize(size_t{d} + 1);
    sources_[d] = source;
  }
  bool IsRemote(DatasetId d, SampleId s) const override {
    return d < sources_.size() && sources_[d] != nullptr && sources_[d]->Elsewhere(s) >= 0;
  }
  bool AwaitsNodes(DatasetId d, SampleId s) const override {
    return d < sources_.size() && sources_[d] != nullptr && sources_[d]->AwaitsNodes(s);
  }

 private:
  std::vector<const Source*> sources_;
};

}  // namespace forebay
