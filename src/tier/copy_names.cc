#include "tier/copy_names.h"

#include <bit>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "catalog/paths.h"

namespace forebay {
namespace {

constexpr uint64_t kStirA = 0x87c37b91114253d5;
constexpr uint64_t kStirB = 0x4cf5ad432745937f;

uint64_t Scatter(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccd;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53;
  return x ^ (x >> 33);
}

// The root itself when it cannot be resolved, as where it has just vanished.
std::string RealPath(const std::string& root) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(root.c_str(), nullptr),
                                                         &std::free);
  return real == nullptr ? root : std::string(real.get());
}

}  // namespace

// The steps and constants are those of MurmurHash3 for 128 bits (A. Appleby, public domain), with
// every word in both halves.
void NameHash::Add(uint64_t word) {
  a_ ^= std::rotl(word * kStirA, 31) * kStirB;
  a_ = (std::rotl(a_, 27) + b_) * 5 + 0x52dce729;
  b_ ^= std::rotl(word * kStirB, 33) * kStirA;
  b_ = (std::rotl(b_, 31) + a_) * 5 + 0x38495ab5;
  ++words_;
}

void NameHash::Add(std::string_view text) {
  Add(uint64_t{text.size()});
  while (!text.empty()) {
    uint64_t word = 0;
    const size_t bytes = text.size() < sizeof word ? text.size() : sizeof word;
    std::memcpy(&word, text.data(), bytes);
    Add(word);
    text.remove_prefix(bytes);
  }
}

std::array<uint64_t, 2> NameHash::Finish() const {
  uint64_t a = a_ ^ words_;
  uint64_t b = b_ ^ words_;
  a += b;
  b += a;
  a = Scatter(a);
  b = Scatter(b);
  a += b;
  b += a;
  return {a, b};
}

CopyNames::CopyNames(std::shared_ptr<const Catalog> catalog) : catalog_(std::move(catalog)) {
  const std::string root = RealPath(catalog_->root());
  NameHash hash;
  hash.Add(root);
  group_ = hash.Finish()[0];
  folders_.reserve(catalog_->folder_count());
  for (uint32_t folder = 0; folder < catalog_->folder_count(); ++folder) {
    const std::string below = catalog_->FolderBelow(folder);
    NameHash path;
    path.Add(below.empty() ? root : JoinPath(root, below));
    folders_.push_back(path);
  }
}

TierKey CopyNames::Of(SampleId sample) const {
  const Extent extent = catalog_->extent(sample);
  NameHash hash = folders_[catalog_->folder(extent.object)];
  hash.Add(catalog_->ObjectName(extent.object));
  hash.Add(catalog_->ObjectSize(extent.object));
  hash.Add(static_cast<uint64_t>(catalog_->ObjectTime(extent.object)));
  hash.Add(extent.offset);
  hash.Add(uint64_t{extent.length});
  const std::array<uint64_t, 2> name = hash.Finish();
  return {.group = group_, .name = name[0], .check = static_cast<uint32_t>(name[1])};
}

}  // namespace forebay
