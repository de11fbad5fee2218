// Shared owners behind the Python objects: a batch keeps its engine alive, an engine its catalogs.
#pragma once

#include <memory>

#include "catalog/catalog.h"
#include "common.h"
#include "stage/engine.h"

namespace forebay::python {

struct CatalogHandle {
  std::shared_ptr<const Catalog> catalog;  // shared by Python objects and engines
};

// One epoch as a dict.
nb::dict StatsOf(const EpochStats& epoch);

struct EngineHandle {
  std::shared_ptr<Engine> engine;  // shared by Python objects and batches on loan
};

}  // namespace forebay::python
