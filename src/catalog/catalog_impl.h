// What a Catalog holds. Included by the files that implement its members only.
#pragma once

#include <string>
#include <vector>

#include "base/owned.h"
#include "catalog/catalog.h"
#include "catalog/image.h"

namespace forebay {

struct Catalog::Impl {
  Mapping mapping;                // where it was loaded
  std::vector<std::byte> memory;  // where it was built
  ImageView view;                 // into one of the two
  std::string root;

  // Absolute.
  std::string FolderPath(uint32_t folder) const;
};

}  // namespace forebay
