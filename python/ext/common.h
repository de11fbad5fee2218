// What every part of the Python extension shares: errors become exceptions here, in one place.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"

namespace nb = nanobind;

namespace forebay::python {

// Raises the exception that fits the status; a no-op when it is ok. The GIL must be held.
void Raise(const Status& status);

template <typename T>
T Value(Result<T> result) {
  if (!result) Raise(result.error());
  return *std::move(result);
}

// Text that may hold a file name: bytes that are not UTF-8 come through as os.fsdecode() shows
// them.
nb::object FileText(const std::string& text);

// The GIL is free while one of these lives; for calls that may wait. A daemon thread that comes
// back while the interpreter shuts down stays here for good: before Python 3.14 asking for the GIL
// then unwinds the stack, which ends the process in a destructor, or in nanobind, which catches
// everything. The thread that shuts down comes back: it is the only one that has the GIL by then.
// Used instead of nanobind's gil_scoped_release everywhere.
class WaitUnlocked {
 public:
  WaitUnlocked();
  ~WaitUnlocked();
  WaitUnlocked(const WaitUnlocked&) = delete;
  WaitUnlocked& operator=(const WaitUnlocked&) = delete;

 private:
  bool shuts_down_;
  PyThreadState* state_;
};

template <typename Call>
auto Unlocked(Call call) {
  WaitUnlocked unlocked;
  return call();
}

// Signals are handled while C++ waits: true when Python has raised (KeyboardInterrupt).
bool SignalRaised();

// A NumPy array that owns its memory.
template <typename T>
nb::object Array(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

using ByteView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using BytesIn = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void BindCache(nb::module_& m);
void BindCatalog(nb::module_& m);
void BindControl(nb::module_& m);
void BindDecode(nb::module_& m);
void BindEngine(nb::module_& m);
void BindEntryGuard(nb::module_& m);
void BindFiles(nb::module_& m);
void BindPeerLookup(nb::module_& m);
void BindPipeline(nb::module_& m);
void BindPlacement(nb::module_& m);
void BindPlan(nb::module_& m);
void BindLimits(nb::module_& m);
void BindShared(nb::module_& m);
void BindSignals(nb::module_& m);
void BindSim(nb::module_& m);
void BindStreamOptions(nb::module_& m);
void BindTune(nb::module_& m);
void BindWorker(nb::module_& m);

}  // namespace forebay::python
