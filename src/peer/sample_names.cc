#include "peer/sample_names.h"

#include <string>
#include <string_view>

#include "catalog/paths.h"
#include "tier/copy_names.h"

namespace forebay::peer {

FileSample FileSampleOf(const Catalog& catalog, SampleId sample) {
  const Extent extent = catalog.extent(sample);
  const ObjectId object = extent.object;
  return {.path = JoinPath(catalog.FolderBelow(catalog.folder(object)), catalog.ObjectName(object)),
          .bytes = catalog.ObjectSize(object),
          .modified_ns = catalog.ObjectTime(object),
          .block = catalog.ObjectBlock(object),
          .offset = extent.offset};
}

uint64_t HomeName(const FileSample& sample) {
  NameHash hash;
  hash.Add(sample.path);
  hash.Add(sample.bytes);
  hash.Add(static_cast<uint64_t>(sample.modified_ns));
  hash.Add(sample.offset);
  hash.Add(uint64_t{sample.length()});
  return hash.Finish()[0];
}

uint64_t GrowingName(const std::shared_ptr<const Catalog>& catalog) {
  NameHash hash;
  // A name that a user gives is no path.
  const std::string& given = catalog->given_name();
  hash.Add(std::string_view(given.empty() ? "growing" : "growing, named"));
  if (given.empty()) {
    hash.Add(CopyNames(catalog).group());
  } else {
    hash.Add(given);
  }
  return hash.Finish()[0];
}

}  // namespace forebay::peer
