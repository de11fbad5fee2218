// What a copy is called: by what it is a copy of, not by where a data set has it.
//
// A name is a hash of the file's real path, its size and modification time, and of the extent. So
// data sets that share files share copies, whatever their order; a file that is added to a data set
// is one new copy; and a file that changed has another name. The hash is part of the cache folder's
// format.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/catalog.h"
#include "tier/tier.h"

namespace forebay {

// 128 bits of what was added, in its order.
class NameHash {
 public:
  void Add(uint64_t word);
  // Its length counts: "ab" and "c" are not "a" and "bc".
  void Add(std::string_view text);
  std::array<uint64_t, 2> Finish() const;

 private:
  uint64_t a_ = 0;
  uint64_t b_ = 0;
  uint64_t words_ = 0;
};

// The name of the copy of a whole file; `root` is the data folder. Neither path has links in it.
TierKey WholeFileName(std::string_view root, std::string_view path, uint64_t size,
                      int64_t mtime_ns);

// Immutable; safe for concurrent use by multiple threads.
class CopyNames {
 public:
  // Resolves links on the way to the catalog's root, once. The catalog is complete(); one that
  // grows may do so.
  explicit CopyNames(std::shared_ptr<const Catalog> catalog);

  // Of the data folder: what is listed, used and given up together.
  uint64_t group() const { return group_; }
  TierKey Of(SampleId sample) const;
  // What a look of this process found beyond the name; 0: nothing. See Catalog::ChangeStamp. Of a
  // file that was just written, nobody else has the same: see WasYoung.
  uint32_t StampOfFile(SampleId sample) const;
  bool LackStamps() const { return catalog_->LacksStamps(); }

 private:
  NameHash HashFolder(uint32_t folder) const;

  std::shared_ptr<const Catalog> catalog_;
  const std::string root_;
  uint64_t group_ = 0;
  uint64_t opening_ = 0;
  // By number: their paths, and nothing else. Empty where the catalog grows: then each name hashes
  // its folder.
  std::vector<NameHash> folders_;
};

}  // namespace forebay
