// A source without storage: its bytes are a function of the sample's number. It shows what the rest
// of the system costs, and feeds simulations.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/status.h"
#include "source/source.h"

namespace forebay {

// The bytes of `sample`, for as many as `dest` holds.
void FillNullSample(SampleId sample, std::span<std::byte> dest);

// Every read succeeds, and is filled by the Reap that returns it.
Result<std::unique_ptr<Source>> MakeNullSource(size_t max_in_flight);

}  // namespace forebay
