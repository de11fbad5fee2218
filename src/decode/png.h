// PNG through libpng, where the build found it.
#pragma once

#include <memory>

#include "decode/image.h"

namespace forebay {

// Null where this build has no libpng.
std::unique_ptr<ImageReader> MakePngReader();

}  // namespace forebay
