#include "image.h"

#include <cstring>
#include <utility>

#include "decode/transform.h"

namespace forebay::python {
namespace {

[[noreturn]] void Refuse(const std::string& message) {
  Raise({Code::kInvalidArgument, message});
  throw nb::python_error();
}

// The parameters of one op; each must be asked for.
class Parameters {
 public:
  Parameters(std::string op, nb::dict values) : op_(std::move(op)), values_(std::move(values)) {}

  template <typename T>
  void Read(const char* name, T& out) {
    if (!values_.contains(name)) return;
    ++read_;
    if (!nb::try_cast<T>(values_[name], out)) {
      Refuse(op_ + ": " + name +
             " has the wrong type: " + nb::cast<std::string>(nb::repr(values_[name])));
    }
  }
  void Read(const char* name, ops::Range& out) {
    std::pair<double, double> range(out.lo, out.hi);
    Read(name, range);
    out = {range.first, range.second};
  }
  void Read(const char* name, std::optional<ops::Range>& out) {
    std::optional<std::pair<double, double>> range;
    Read(name, range);
    if (range) out = ops::Range{range->first, range->second};
  }
  void Read(const char* name, Interpolation& out) {
    int number = static_cast<int>(out);
    Read(name, number);
    if (number < 0 || number > 5) Refuse(op_ + ": interpolation is not one of PIL's 0 to 5");
    out = static_cast<Interpolation>(number);
  }
  void Read(const char* name, PassOrder& out) {
    std::string order = out == PassOrder::kPillow13 ? "pillow13" : "rows_first";
    Read(name, order);
    if (order != "pillow13" && order != "rows_first") Refuse(op_ + ": no pass order " + order);
    out = order == "pillow13" ? PassOrder::kPillow13 : PassOrder::kRowsFirst;
  }
  template <typename T, size_t N>
  void Read(const char* name, std::array<T, N>& out) {
    std::vector<T> values(out.begin(), out.end());
    Read(name, values);
    if (values.size() != N) {
      Refuse(op_ + ": " + name + " must hold " + std::to_string(N) + " values");
    }
    std::copy(values.begin(), values.end(), out.begin());
  }
  void Done() const {
    if (read_ == values_.size()) return;
    Refuse(op_ + ": a parameter is not known among " + nb::cast<std::string>(nb::repr(values_)));
  }

 private:
  std::string op_;
  nb::dict values_;
  size_t read_ = 0;
};

template <typename T>
void ReadSize(Parameters& p, T& op) {
  p.Read("height", op.height);
  p.Read("width", op.width);
}

void ReadOp(Parameters& p, ops::RandomResizedCrop& op) {
  ReadSize(p, op);
  p.Read("scale", op.scale);
  p.Read("ratio", op.ratio);
  p.Read("interpolation", op.interpolation);
  p.Read("pass_order", op.pass_order);
}
void ReadOp(Parameters& p, ops::Resize& op) {
  ReadSize(p, op);
  p.Read("max_size", op.max_size);
  p.Read("interpolation", op.interpolation);
  p.Read("pass_order", op.pass_order);
}
void ReadOp(Parameters& p, ops::CenterCrop& op) { ReadSize(p, op); }
void ReadOp(Parameters& p, ops::RandomCrop& op) {
  ReadSize(p, op);
  p.Read("padding", op.padding);
  p.Read("pad_if_needed", op.pad_if_needed);
  p.Read("fill", op.fill);
}
void ReadOp(Parameters& p, ops::RandomHorizontalFlip& op) { p.Read("p", op.p); }
void ReadOp(Parameters& p, ops::RandomVerticalFlip& op) { p.Read("p", op.p); }
void ReadOp(Parameters& p, ops::ColorJitter& op) {
  p.Read("brightness", op.brightness);
  p.Read("contrast", op.contrast);
  p.Read("saturation", op.saturation);
  p.Read("hue", op.hue);
}
void ReadOp(Parameters&, ops::Grayscale&) {}
void ReadOp(Parameters& p, ops::RandomGrayscale& op) { p.Read("p", op.p); }
void ReadOp(Parameters& p, ops::RandAugment& op) {
  p.Read("num_ops", op.num_ops);
  p.Read("magnitude", op.magnitude);
  p.Read("num_magnitude_bins", op.num_magnitude_bins);
  p.Read("interpolation", op.interpolation);
  p.Read("fill", op.fill);
}
void ReadOp(Parameters& p, ops::ToTensor& op) { p.Read("multiply", op.multiply); }
void ReadOp(Parameters& p, ops::Normalize& op) {
  p.Read("mean", op.mean);
  p.Read("std", op.std);
}

// The op of that name, or false.
template <size_t I = 0>
bool OpNamed(std::string_view name, ops::Op& out) {
  if constexpr (I < std::variant_size_v<ops::Op>) {
    out.emplace<I>();
    return OpName(out) == name || OpNamed<I + 1>(name, out);
  }
  return false;
}

nb::dict StepDict(const Step& step) {
  nb::dict d;
  d["step"] = std::string(StepName(step.kind));
  d["op"] = step.op;
  using Kind = Step::Kind;
  switch (step.kind) {
    case Kind::kCrop:
      d["x"] = step.x;
      d["y"] = step.y;
      d["width"] = step.width;
      d["height"] = step.height;
      d["fill"] = nb::make_tuple(step.fill[0], step.fill[1], step.fill[2]);
      break;
    case Kind::kResize:
      d["width"] = step.width;
      d["height"] = step.height;
      d["interpolation"] = static_cast<int>(step.interpolation);
      break;
    case Kind::kShearX:
    case Kind::kShearY:
    case Kind::kTranslateX:
    case Kind::kTranslateY:
    case Kind::kRotate: {
      d["factor"] = step.factor;
      nb::list matrix;
      for (const double m : step.matrix) matrix.append(m);
      d["matrix"] = matrix;
      d["interpolation"] = static_cast<int>(step.interpolation);
      d["fill"] = nb::make_tuple(step.fill[0], step.fill[1], step.fill[2]);
      break;
    }
    default:
      d["factor"] = step.factor;
      break;
  }
  return d;
}

nb::list TransformParams(const nb::list& spec, uint32_t width, uint32_t height, uint64_t seed,
                         uint32_t epoch, uint64_t sample) {
  Plan plan;
  Raise(MakePlan(SpecFrom(spec), {width, height}, {seed, epoch, sample}, plan));
  nb::list out;
  for (const Step& step : plan.steps) out.append(StepDict(step));
  return out;
}

using RgbIn = nb::ndarray<const uint8_t, nb::shape<-1, -1, 3>, nb::c_contig, nb::device::cpu>;

// The finished sample; bfloat16, which NumPy lacks, as uint16. The image stands for one that a
// decoder shrank from full_width x full_height, when these are given.
nb::object ApplyTransforms(const RgbIn& rgb, const nb::list& spec, uint64_t seed, uint32_t epoch,
                           uint64_t sample, const std::string& dtype, const std::string& layout,
                           uint32_t full_width, uint32_t full_height) {
  const OutputSpec output = OutputFrom(dtype, layout);
  const std::unique_ptr<Transformer> t = Value(Transformer::Make(SpecFrom(spec), output));
  const auto height = static_cast<uint32_t>(rgb.shape(0));
  const auto width = static_cast<uint32_t>(rgb.shape(1));
  std::vector<uint8_t> out(t->OutputBytes());
  Status status;
  {
    WaitUnlocked unlocked;
    const ImageInfo shrunk{width, height};
    const ImageInfo full = full_width == 0 ? shrunk : ImageInfo{full_width, full_height};
    const Result<Rect> rect =
        t->Begin(full, shrunk, {seed, epoch, sample}, reinterpret_cast<std::byte*>(out.data()));
    status = rect.status();
    if (rect) {
      std::vector<uint8_t> row(static_cast<size_t>(rect->width) * 4 + 32);
      for (uint32_t y = 0; y < rect->height; ++y) {
        const uint8_t* from =
            rgb.data() + ((static_cast<size_t>(rect->y) + y) * width + rect->x) * 3;
        for (size_t x = 0; x < rect->width; ++x) std::memcpy(&row[x * 4], from + x * 3, 3);
        t->Row(row.data());
      }
      status = t->Finish();
    }
  }
  Raise(status);
  const OutputShape shape = t->shape();
  const nb::tuple dims = output.layout == Layout::kChw
                             ? nb::make_tuple(3, shape.height, shape.width)
                             : nb::make_tuple(shape.height, shape.width, 3);
  const char* view = output.dtype == DType::kBfloat16 ? "uint16" : dtype.c_str();
  return Array(std::move(out)).attr("view")(view).attr("reshape")(dims);
}

}  // namespace

TransformSpec SpecFrom(const nb::list& list) {
  TransformSpec spec;
  for (const nb::handle item : list) {
    std::pair<std::string, nb::dict> named;
    if (!nb::try_cast(item, named)) {
      Refuse("a transform must be (name, {parameter: value}), got " +
             nb::cast<std::string>(nb::repr(item)));
    }
    ops::Op op;
    if (!OpNamed(named.first, op)) Refuse("no transform is called " + named.first);
    Parameters parameters(named.first, named.second);
    std::visit([&](auto& o) { ReadOp(parameters, o); }, op);
    parameters.Done();
    spec.ops.push_back(op);
  }
  Raise(spec.Validate());
  return spec;
}

OutputSpec OutputFrom(const std::string& dtype, const std::string& layout) {
  OutputSpec output;
  bool known = false;
  for (const DType d : {DType::kUint8, DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
    if (DTypeName(d) != dtype) continue;
    output.dtype = d;
    known = true;
  }
  if (!known) Refuse("dtype must be uint8, float32, float16 or bfloat16, got " + dtype);
  if (layout != "chw" && layout != "hwc") Refuse("layout must be chw or hwc, got " + layout);
  output.layout = layout == "chw" ? Layout::kChw : Layout::kHwc;
  return output;
}

void BindImage(nb::module_& m) {
  m.def("apply_transforms", &ApplyTransforms, nb::arg("rgb"), nb::arg("spec"), nb::arg("seed") = 0,
        nb::arg("epoch") = 0, nb::arg("sample") = 0, nb::arg("dtype") = "float32",
        nb::arg("layout") = "chw", nb::arg("full_width") = 0, nb::arg("full_height") = 0,
        "Runs the transforms on an image.");
  m.def("transform_params", &TransformParams, nb::arg("spec"), nb::arg("width"), nb::arg("height"),
        nb::arg("seed") = 0, nb::arg("epoch") = 0, nb::arg("sample") = 0,
        "What is drawn for a sample of that size: a list of steps.");
  m.def(
      "best_shrink",
      [](const nb::list& spec, uint32_t width, uint32_t height, uint64_t seed, uint32_t epoch,
         uint64_t sample, const std::string& dtype) {
        return Value(Transformer::Make(SpecFrom(spec), OutputFrom(dtype, "chw")))
            ->BestShrink({width, height}, {seed, epoch, sample});
      },
      nb::arg("spec"), nb::arg("width"), nb::arg("height"), nb::arg("seed") = 0,
      nb::arg("epoch") = 0, nb::arg("sample") = 0, nb::arg("dtype") = "float32",
      "By how much a decoder may shrink the image for this sample: 1, 2, 4 or 8.");
}

}  // namespace forebay::python
