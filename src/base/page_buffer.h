// Memory that begins on a page. FUSE counts the pages that a read without the page cache goes into,
// and takes 256 in a request: 1 MiB that begins elsewhere costs a second request for its last
// bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace forebay {

constexpr std::align_val_t kPageAlignment{4096};

struct DeletePageBuffer {
  void operator()(std::byte* buffer) const { ::operator delete[](buffer, kPageAlignment); }
};
using PageBuffer = std::unique_ptr<std::byte[], DeletePageBuffer>;

// Not initialised.
inline PageBuffer MakePageBuffer(size_t bytes) {
  return PageBuffer(static_cast<std::byte*>(::operator new[](bytes, kPageAlignment)));
}

}  // namespace forebay
