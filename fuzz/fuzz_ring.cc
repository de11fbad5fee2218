// A ring's memory as the other process may leave it: any bytes end in an error, or in counts and
// lists within the ring's bounds, on both sides.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "expect.h"
#include "wire/ring.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay;
  using namespace forebay::wire;
  constexpr uint32_t kSamples = 3;
  auto writer = RingWriter::Create(RingShape::For(kSamples));
  if (!writer) return 0;
  const RingShape shape = writer->shape();
  auto reader = RingReader::Map(OwnedFd(dup(writer->fd())), shape);
  FUZZ_EXPECT(reader);
  void* base = mmap(nullptr, shape.Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, writer->fd(), 0);
  FUZZ_EXPECT(base != MAP_FAILED);
  const Mapping memory(base, shape.Bytes());
  const std::vector<uint32_t> numbers(kSamples, 1);
  const std::vector<uint64_t> offsets(kSamples, 2);
  // Pieces of the input overwrite the memory between the daemon's and the client's moves.
  constexpr size_t kPiece = 400;
  for (size_t at = 0; at < size; at += kPiece) {
    std::memcpy(memory.data(), data + at, std::min({kPiece, size - at, memory.size()}));
    std::vector<uint64_t> leases;
    if (!writer->ReadPosition().ok() || !writer->PopReleases(&leases).ok()) return 0;
    FUZZ_EXPECT(writer->outstanding() <= shape.slots);
    FUZZ_EXPECT(leases.size() <= wire::internal::kRingReleases);
    if (writer->free_slots() != 0) writer->Publish(RingEntry(), numbers, offsets, numbers);
    (void)writer->Sleep(true, false);
    RingEntry entry;
    std::vector<uint32_t> samples;
    std::vector<uint64_t> where;
    std::vector<uint32_t> lengths;
    std::string error;
    bool tell = false;
    const auto taken = reader->Take(&entry, &samples, &where, &lengths, &error);
    if (!taken) return 0;
    FUZZ_EXPECT(samples.size() <= kSamples && where.size() == samples.size() &&
                lengths.size() == samples.size());
    (void)reader->Release(1, &tell);
  }
  return 0;
}
