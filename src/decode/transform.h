// Transformer: takes the rows of a decoded image and leaves the finished sample in its place of the
// batch, bit for bit what torchvision makes of the same image in PIL.
//
// Crops, resizes and flips are fused: rows are resampled as they arrive and the result goes
// straight to the output; no whole image is kept. An op that needs the whole image (ColorJitter's
// contrast, a second resize, padding) works on a scratch image that stays from sample to sample.
//
//   info = reader.Open(file);
//   shrink = fast ? t.BestShrink(info, key) : 1;
//   rect = t.Begin(info, shrink == 1 ? info : reader.Shrink(shrink), key, out);
//   reader.Read(rect, t);
//   t.Finish();
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "decode/color_ops.h"
#include "decode/image.h"
#include "decode/output.h"
#include "decode/random.h"
#include "decode/resize.h"
#include "decode/transform_plan.h"
#include "decode/transform_spec.h"

namespace forebay {

// Not safe for concurrent use: one a thread. Allocates nothing once it has seen images as large as
// those that follow.
class Transformer final : public RowSink {
 public:
  // kInvalidArgument: wrong parameters, no fixed output size, or an output type that does not fit
  // (uint8 after ToTensor).
  static Result<std::unique_ptr<Transformer>> Make(const TransformSpec& spec,
                                                   const OutputSpec& output);
  ~Transformer() override;

  OutputShape shape() const { return shape_; }
  // Of one sample.
  size_t OutputBytes() const;

  // The largest of 1, 2, 4 and 8 by which the decoder may shrink the image while this sample's crop
  // stays at least as large as what it is resized to. 1 where the first resize is not an
  // antialiased one.
  uint32_t BestShrink(const ImageInfo& full, const SampleKey& key);

  // Draws the sample's parameters from its key and returns the part of the image (as shrunk) that
  // is wanted; its rows come next. `full` is the size before shrinking: parameters depend on it
  // alone. `out` has OutputBytes() bytes and stays until Finish. A sample that was begun may be
  // dropped by beginning another.
  Result<Rect> Begin(const ImageInfo& full, const ImageInfo& shrunk, const SampleKey& key,
                     std::byte* out);
  Result<Rect> Begin(const ImageInfo& info, const SampleKey& key, std::byte* out) {
    return Begin(info, info, key, out);
  }
  // Begin in two steps, for callers who may refuse the memory: what Prepare returns is the most
  // that Start and what follows it allocate.
  Result<uint64_t> Prepare(const ImageInfo& full, const ImageInfo& shrunk, const SampleKey& key);
  Rect Start(std::byte* out);
  // Lets go of all scratch memory; before the next Begin or Prepare.
  void DropScratch();
  void Row(const uint8_t* rgbx) override;
  // The sample is complete in `out`. kDataLoss when rows are missing.
  Status Finish();

  // What was drawn for the sample last begun, in the order of application.
  const std::vector<Step>& steps() const { return plan_.steps; }

 private:
  // A run of steps that are fused: crop, resize, crop of the result, flips.
  struct Geometry {
    Rect source;  // of the image that comes in
    bool resize = false;
    uint32_t width = 0;  // what the source is resized to
    uint32_t height = 0;
    Interpolation interpolation = Interpolation::kBilinear;
    PassOrder pass_order = PassOrder::kPillow13;
    Rect window;  // of the resized image
    bool flip_x = false;
    bool flip_y = false;
  };

  Transformer(const TransformSpec& spec, const OutputSpec& output, OutputShape shape);

  size_t Collect(size_t from, uint32_t width, uint32_t height, Geometry& geometry) const;
  struct Axes {
    uint32_t left = 0;
    uint32_t top = 0;
    AxisSpec x;
    AxisSpec y;
  };
  static Axes AxesOf(const Geometry& geometry, const ImageInfo& full, const ImageInfo& shrunk);
  uint64_t ScratchBytes() const;
  Rect StartGeometry(const ImageInfo& full, const ImageInfo& shrunk);
  void Emit(uint32_t y, const uint8_t* rgbx);
  bool ApplyPixelStep(const Step& step);

  // Constant after construction.
  const TransformSpec spec_;
  const OutputShape shape_;

  OutputWriter writer_;
  Plan plan_;
  Resampler resampler_;
  Geometry geometry_;
  size_t next_step_ = 0;    // the first step that geometry_ does not cover
  bool to_output_ = false;  // geometry_ leads to the output, not to the scratch image
  uint32_t rows_left_ = 0;
  uint32_t out_row_ = 0;
  std::byte* out_ = nullptr;
  ImageInfo full_;  // of the sample that was prepared
  ImageInfo shrunk_;
  ScratchImage image_;  // where the current geometry writes, and pixel ops work
  ScratchImage spare_;  // what the current geometry reads, when not the decoder's rows
};

}  // namespace forebay
