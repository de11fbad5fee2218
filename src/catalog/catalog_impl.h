// What a Catalog holds. Included by the files that implement its members only.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "catalog/growing.h"
#include "catalog/image.h"
#include "catalog/sizer.h"

namespace forebay {

// Of a catalog that is saved once its lengths are known.
struct LateSave {
  Mutex mutex;
  std::string file GUARDED_BY(mutex);  // empty: it is not
  std::string note GUARDED_BY(mutex);
};

// As Catalog::Save.
Status SaveImage(std::span<const std::byte> image, const std::string& file, Catalog::Access access);

struct Catalog::Impl {
  Mapping mapping;  // where it was loaded
  // Where it was built; shared with the threads that look up lengths, which may outlive the
  // catalog.
  std::shared_ptr<std::vector<std::byte>> memory;
  ImageView view;  // into one of the two
  std::string root;
  std::shared_ptr<LateSave> late_save;  // likewise shared
  std::unique_ptr<Sizer> sizer;         // null: all lengths were known from the start
  // By object, 0 until it was looked at; null: nobody looks. Shared with the threads that do.
  std::shared_ptr<std::vector<uint32_t>> stamps;
  bool looked_at = true;  // constant once it is shared
  std::string given_name;
  std::unique_ptr<GrowingFiles> growing;  // kGrowing: all there is; the view is empty

  // Absolute.
  std::string FolderBelow(uint32_t folder) const;
  std::string FolderPath(uint32_t folder) const;
};

}  // namespace forebay
