// TFRecord files, as they come and with the checksums of their lengths made right.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "fuzz_shard.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay;
  std::string bytes(reinterpret_cast<const char*>(data), size);
  testing::TryShard(Format::kTfRecord, testing::Bytes(bytes), ScanTfRecord);
  for (size_t at = 0; at + 12 <= size;) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    bytes.replace(at, 12, testing::TfRecordHead(length));
    if (length > size - at - 12) break;
    at += 12 + length + 4;
  }
  testing::TryShard(Format::kTfRecord, testing::Bytes(bytes), ScanTfRecord);
  return 0;
}
