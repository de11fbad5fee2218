// Names of a growing data set and of its samples, which all nodes compute alike.
#pragma once

#include <cstdint>
#include <memory>

#include "catalog/catalog.h"
#include "peer/file_sample.h"

namespace forebay::peer {

// Of a growing catalog. `sample` must exist.
FileSample FileSampleOf(const Catalog& catalog, SampleId sample);

// The name by which all nodes find its home. Part of the protocol, and of what cache folders that
// outlive a job are good for.
uint64_t HomeName(const FileSample& sample);

// The name of a growing data set: the data folder's real path, or what the user calls it.
uint64_t GrowingName(const std::shared_ptr<const Catalog>& catalog);

}  // namespace forebay::peer
