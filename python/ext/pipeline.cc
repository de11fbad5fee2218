#include "pipeline/pipeline.h"

#include "common.h"
#include "decode/npy.h"
#include "handles.h"
#include "image.h"

namespace forebay::python {
namespace {

struct PipelineHandle {
  std::shared_ptr<Port> source;        // outlives the pipeline
  std::shared_ptr<Pipeline> pipeline;  // shared with the batches on loan
  nb::dlpack::dtype dtype;
};

nb::dlpack::dtype NumberType(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  switch (dtype) {
    case DType::kUint8:
      return {static_cast<uint8_t>(Code::UInt), 8, 1};
    case DType::kFloat32:
      return {static_cast<uint8_t>(Code::Float), 32, 1};
    case DType::kFloat16:
      return {static_cast<uint8_t>(Code::Float), 16, 1};
    case DType::kBfloat16:
      return {static_cast<uint8_t>(Code::Bfloat), 16, 1};
  }
  return {};
}

// "<f4"
nb::dlpack::dtype NumberType(const std::string& numpy) {
  using Code = nb::dlpack::dtype_code;
  const auto bits = static_cast<uint8_t>(ItemBytes(numpy) * 8);
  switch (numpy.size() > 1 ? numpy[1] : '?') {
    case 'b':
      return {static_cast<uint8_t>(Code::Bool), bits, 1};
    case 'i':
      return {static_cast<uint8_t>(Code::Int), bits, 1};
    case 'u':
      return {static_cast<uint8_t>(Code::UInt), bits, 1};
    case 'c':
      return {static_cast<uint8_t>(Code::Complex), bits, 1};
    default:
      return {static_cast<uint8_t>(Code::Float), bits, 1};
  }
}

// A finished batch. Its slab is its own until the last array made of it is gone, or release().
class DecodedBatch {
 public:
  DecodedBatch(const PipelineHandle& from, FinishedBatch batch)
      : source_(from.source),
        pipeline_(from.pipeline),
        catalog_(from.pipeline->shared_catalog()),
        dtype_(from.dtype),
        batch_(std::move(batch)) {}
  DecodedBatch(DecodedBatch&&) = default;
  ~DecodedBatch() { Release(); }

  void Release() {
    if (pipeline_ == nullptr) return;
    pipeline_->Release(batch_.slab);
    pipeline_.reset();
    source_.reset();
  }

  size_t size() const { return batch_.samples.size(); }
  const FinishedBatch& batch() const { return batch_; }
  const Catalog& catalog() const { return *catalog_; }
  nb::dlpack::dtype dtype() const { return dtype_; }
  std::vector<size_t> shape() const {
    std::vector<size_t> shape{size()};
    for (const uint64_t n : pipeline().sample_shape()) shape.push_back(n);
    return shape;
  }
  const Pipeline& pipeline() const {
    if (pipeline_ == nullptr) throw nb::value_error("this batch was released");
    return *pipeline_;
  }

 private:
  std::shared_ptr<Port> source_;
  std::shared_ptr<Pipeline> pipeline_;
  std::shared_ptr<const Catalog> catalog_;
  nb::dlpack::dtype dtype_;
  FinishedBatch batch_;
};

template <typename Array>
nb::object Data(nb::handle_t<DecodedBatch> self) {
  const DecodedBatch& batch = nb::cast<const DecodedBatch&>(self);
  const std::vector<size_t> shape = batch.shape();
  return nb::cast(Array(batch.batch().data, shape.size(), shape.data(), self, nullptr,
                        batch.dtype(), nb::device::cpu::value));
}

nb::object Take(const PipelineHandle& self, double wait_s, nb::handle held) {
  FinishedBatch batch;
  return TakeInSlices(
      wait_s, held, [&](Nanos slice) { return self.pipeline->Take(slice, &batch); },
      [&] { return DecodedBatch(self, std::move(batch)); });
}

}  // namespace

void BindPipeline(nb::module_& m) {
  nb::class_<DecodedBatch>(m, "DecodedBatch",
                           "Finished samples in one array: nobody else touches this memory until "
                           "the batch and all arrays made of it are gone.")
      .def("__len__", &DecodedBatch::size)
      .def("numpy", &Data<nb::ndarray<nb::numpy>>,
           "All samples as one NumPy array: a view, no copy.")
      // PyTorch makes a tensor of it in Python code, which must not run inside C++: a daemon thread
      // that is there when the interpreter shuts down would end the process.
      .def("dlpack", &Data<nb::ndarray<>>,
           "All samples as a DLPack capsule; torch() makes a tensor of it.")
      .def_prop_ro(
          "indices",
          [](const DecodedBatch& b) { return Array(std::vector<uint32_t>(b.batch().samples)); },
          "Sample numbers, as the sampler yields them.")
      .def_prop_ro("labels",
                   [](const DecodedBatch& b) { return LabelsOf(b.catalog(), b.batch().samples); })
      .def_prop_ro(
          "paths", [](const DecodedBatch& b) { return PathsOf(b.catalog(), b.batch().samples); },
          "Paths relative to the data set's root, made when asked for.")
      .def_prop_ro("epoch", [](const DecodedBatch& b) { return b.batch().epoch; })
      .def_prop_ro("index", [](const DecodedBatch& b) { return b.batch().index; })
      .def_prop_ro(
          "batches", [](const DecodedBatch& b) { return b.batch().batches; },
          "Batches of the sampler this one stands for: more than one after batches in which every "
          "sample was skipped.")
      .def_prop_ro("address",
                   [](const DecodedBatch& b) {
                     (void)b.pipeline();
                     return reinterpret_cast<uintptr_t>(b.batch().data);
                   })
      .def("release", &DecodedBatch::Release,
           "Gives the memory back at once. Arrays made before must not be used any more.");

  nb::class_<PipelineHandle>(m, "Pipeline", "Decoded batches of a data set; see DataLoader.")
      .def(
          "__init__",
          [](PipelineHandle* self, nb::handle engine, const StreamOptions& stream,
             const std::string& kind, nb::list transform, const std::string& dtype,
             const std::string& layout, bool fast, bool skip, size_t ahead,
             const std::string& array_name, const std::vector<uint64_t>& shape,
             uint64_t max_pixels) {
            PipelineOptions options;
            options.seed = stream.sampler.seed;
            options.skip_corrupt = skip;
            options.ahead = ahead;
            nb::dlpack::dtype number;
            if (kind == "image") {
              options.decode.transform = SpecFrom(transform);
              options.decode.output = OutputFrom(dtype, layout);
              options.decode.fast = fast;
              options.decode.max_pixels = max_pixels;
              number = NumberType(options.decode.output.dtype);
            } else {
              options.decode.kind = DecodeOptions::Kind::kArray;
              options.decode.array_name = array_name;
              options.decode.dtype = dtype;
              options.decode.shape = shape;
              number = NumberType(dtype);
            }
            std::shared_ptr<Port> source = PortOf(engine);
            Result<PipelinePtr> result = [&] {
              WaitUnlocked unlocked;  // it may wait for memory
              return Pipeline::Make(source, stream, options);
            }();
            PipelinePtr made = Value(std::move(result));
            new (self)
                PipelineHandle{std::move(source),
                               std::shared_ptr<Pipeline>(made.release(), PipelineDelete()), number};
          },
          nb::arg("engine"), nb::arg("stream"), nb::arg("kind") = "image",
          nb::arg("transform") = nb::list(), nb::arg("dtype") = "float32",
          nb::arg("layout") = "chw", nb::arg("fast") = false, nb::arg("skip") = false,
          nb::arg("ahead") = 0, nb::arg("array_name") = "",
          nb::arg("shape") = std::vector<uint64_t>(),
          nb::arg("max_pixels") = DecodeOptions().max_pixels)
      .def("take", &Take, nb::arg("wait_s"), nb::arg("held") = nb::none(),
           "A DecodedBatch; None when `wait_s` seconds passed; or 'end of epoch' or 'end of "
           "stream'. It is also in `held.item`.")
      .def(
          "seek",
          [](const PipelineHandle& p, uint64_t epoch, uint64_t position) {
            Status status;
            {
              WaitUnlocked unlocked;
              status = p.pipeline->Seek(epoch, position);
            }
            Raise(status);
          },
          nb::arg("epoch"), nb::arg("position"))
      .def("stop",
           [](const PipelineHandle& p) {
             WaitUnlocked unlocked;
             p.pipeline->Stop();
           })
      .def("stats",
           [](const PipelineHandle& p) {
             std::vector<EpochStats> stats;
             {
               WaitUnlocked unlocked;  // a daemon that was stopped is waited for
               stats = p.pipeline->Stats();
             }
             nb::list out;
             for (const EpochStats& epoch : stats) out.append(StatsOf(epoch));
             return out;
           })
      .def("files_changed",
           [](const PipelineHandle& p) {
             const ChangedFilesOf changed =
                 Value(Unlocked([&] { return p.pipeline->ChangedFiles(); }));
             return std::pair(changed.count, FileText(changed.last));
           })
      .def("waiting_for",
           [](const PipelineHandle& p) {
             std::string what;
             {
               WaitUnlocked unlocked;
               what = p.pipeline->WaitingFor();
             }
             return FileText(what);
           })
      .def(
          "charge_copy",
          [](const PipelineHandle& p, double seconds) {
            p.pipeline->ChargeCopy(static_cast<Nanos>(seconds * kSecond));
          },
          nb::arg("seconds"))
      .def_prop_ro(
          "slabs",
          [](const PipelineHandle& p) {
            std::vector<std::pair<uintptr_t, size_t>> out;
            for (const std::span<std::byte> slab : p.pipeline->Slabs())
              out.emplace_back(reinterpret_cast<uintptr_t>(slab.data()), slab.size());
            return out;
          },
          "(address, bytes) of the memory that finished batches lie in.")
      .def_prop_ro("sample_shape",
                   [](const PipelineHandle& p) { return p.pipeline->sample_shape(); })
      .def_prop_ro("skipped", [](const PipelineHandle& p) { return p.pipeline->skipped(); })
      .def_prop_ro("last_skipped",
                   [](const PipelineHandle& p) { return FileText(p.pipeline->LastSkipped()); });

  m.def(
      "array_info",
      [](BytesIn file, const std::string& name) {
        const NpyArray array =
            Value(ReadArray({reinterpret_cast<const std::byte*>(file.data()), file.size()}, name));
        return std::pair<std::string, std::vector<uint64_t>>(array.dtype, array.shape);
      },
      nb::arg("file"), nb::arg("name") = "", "(dtype, shape) of an .npy file or .npz member.");
  m.def("image_formats", &ImageFormats, "Formats of images that this build reads.");
}

}  // namespace forebay::python
