// Messages between processes: any bytes end in an error, or in messages that encode to the same
// bytes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "expect.h"
#include "wire/frame.h"

namespace {

using namespace forebay::wire;

template <typename Message>
void Try(const Frame& frame) {
  if (frame.header.type != Message::kType) return;
  Message message;
  if (!Decode(frame, &message).ok()) return;
  std::vector<std::byte> bytes;
  FUZZ_EXPECT(Encode(message, frame.header.request, &bytes, frame.header.status).ok());
  FUZZ_EXPECT(bytes.size() == kHeaderBytes + frame.payload.size());
  FUZZ_EXPECT(std::equal(frame.payload.begin(), frame.payload.end(), bytes.begin() + kHeaderBytes));
}

template <typename... Messages>
void TryAll(const Frame& frame) {
  (Try<Messages>(frame), ...);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FrameReader reader;
  // The first byte says how finely the rest is cut.
  const size_t step = size == 0 ? 1 : 1 + data[0];
  for (size_t at = 1; at < size; at += step) {
    const auto piece = std::as_bytes(std::span(data + at, std::min(step, size - at)));
    std::copy(piece.begin(), piece.end(), reader.Room(piece.size()).begin());
    reader.Filled(piece.size());
    while (true) {
      Frame frame;
      const auto whole = reader.Next(&frame);
      if (!whole) return 0;
      if (!*whole) break;
      TryAll<Hello, HelloReply, StatusReply, OpenStream, OpenStreamReply, Declare, Seek,
             CloseStream, Take, Fetch, Loan, Release, Served, OpenDataset, OpenDatasetReply, Query,
             Text, Stats, StatsReply, SetKnobs, Nudge, SetPolicy, Lend, LendReply, GiveBack,
             Stalled, CloseDataset, AskLook, AskLookReply, LookProgress, HandInLook, DropLook>(
          frame);
    }
  }
  return 0;
}
