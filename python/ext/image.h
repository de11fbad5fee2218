// Image transforms as the Python package names them, for every binding that takes some.
#pragma once

#include <string>

#include "common.h"
#include "decode/transform_spec.h"

namespace forebay::python {

// From what forebay.transforms.export() gives: a list of (name, {parameter: value}). Raises
// ArgumentError for names and parameters that are not known, and for those that do not fit.
TransformSpec SpecFrom(const nb::list& ops);
// dtype: uint8, float32, float16 or bfloat16; layout: chw or hwc.
OutputSpec OutputFrom(const std::string& dtype, const std::string& layout);

void BindImage(nb::module_& m);

}  // namespace forebay::python
