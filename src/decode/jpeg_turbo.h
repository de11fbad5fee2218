// JPEG through libjpeg-turbo: for what our own decoder leaves out, and what that one is tested and
// measured against. Built where its headers are found (FOREBAY_HAVE_JPEG).
#pragma once

#include <memory>

#include "decode/image.h"

namespace forebay::jpeg {

// Decodes all columns, and the rows down to the last one wanted. A warning of the library is
// kDataLoss.
std::unique_ptr<ImageReader> MakeTurboReader();

}  // namespace forebay::jpeg
