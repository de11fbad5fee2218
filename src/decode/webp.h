// WebP through libwebp, where the build found it.
#pragma once

#include <memory>

#include "decode/image.h"

namespace forebay {

// Null where this build has no libwebp.
std::unique_ptr<ImageReader> MakeWebpReader();

}  // namespace forebay
