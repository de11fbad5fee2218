// StreamOptions: what a stream hands out, and where it begins. The one form of it in C++, on the
// wire and in Python.
#pragma once

#include "core/sampler.h"
#include "core/scheduler.h"

namespace forebay {

struct StreamOptions {
  StreamShape shape;
  // The order is made by the engine from `sampler`; otherwise the client declares it.
  bool declared = false;
  SamplerSpec sampler;
  // Whoever takes the batches works ahead of the consumer: its waits are nobody's stall, and memory
  // that others hold is no error but a wait, see Engine::Blocked().
  bool ahead_of_consumer = false;
};

}  // namespace forebay
