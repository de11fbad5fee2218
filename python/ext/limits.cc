// The physical limits that benchmarks stand beside: plain threads reading files, plain loops
// copying memory. Nothing of the engine is used here.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/system_calls.h"
#include "common.h"

namespace forebay::python {
namespace {

struct CountedCalls {
  std::shared_ptr<const SystemCalls> calls;  // shared with the thread that counts
};

// Seconds and bytes of `threads` threads that open, read with one pread, and close each file.
std::pair<double, uint64_t> ReadFiles(const std::vector<std::string>& paths,
                                      const std::vector<uint64_t>& sizes, size_t threads) {
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> bytes{0};
  size_t largest = 0;
  for (uint64_t s : sizes) largest = std::max<size_t>(largest, s);
  const Nanos start = SteadyClock().Now();
  {
    std::vector<std::jthread> pool;
    for (size_t t = 0; t < threads; ++t) {
      pool.emplace_back([&] {
        std::vector<char> buffer(largest + 1);
        while (true) {
          const size_t i = next.fetch_add(1, std::memory_order_relaxed);
          if (i >= paths.size()) return;
          const int fd = ::open(paths[i].c_str(), O_RDONLY | O_CLOEXEC);
          if (fd < 0) continue;
          const ssize_t n = ::pread(fd, buffer.data(), sizes[i], 0);
          ::close(fd);
          if (n > 0) bytes.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
        }
      });
    }
  }
  return {static_cast<double>(SteadyClock().Now() - start) * 1e-9, bytes.load()};
}

// Seconds of `threads` threads that memcpy each sample of a memory-resident set into a batch
// buffer, in the given order, and checksum the copy.
double CopyAndChecksum(size_t samples, size_t sample_bytes, size_t batch, size_t threads,
                       const std::vector<uint32_t>& order) {
  std::vector<std::byte> all(samples * sample_bytes, std::byte{1});
  for (size_t i = 0; i < all.size(); i += 64)
    all[i] = static_cast<std::byte>(i * 2654435761u >> 24);
  std::atomic<uint32_t> sink{0};
  const Nanos start = SteadyClock().Now();
  {
    std::vector<std::jthread> pool;
    for (size_t t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        std::vector<std::byte> buffer(batch * sample_bytes);
        uint32_t crc = 0;
        for (size_t b = t * batch; b < order.size(); b += threads * batch) {
          const size_t n = std::min(batch, order.size() - b);
          for (size_t i = 0; i < n; ++i) {
            std::memcpy(buffer.data() + i * sample_bytes, all.data() + order[b + i] * sample_bytes,
                        sample_bytes);
          }
          crc ^= Crc32c({buffer.data(), n * sample_bytes});
        }
        sink.fetch_xor(crc);
      });
    }
  }
  return static_cast<double>(SteadyClock().Now() - start) * 1e-9;
}

uint64_t Burn(uint64_t rounds) {
  volatile uint64_t x = 1;
  for (uint64_t i = 0; i < rounds; ++i) x = x * 6364136223846793005ULL + 1;
  return x;
}

}  // namespace

void BindLimits(nb::module_& m) {
  m.def("limit_read_files", &ReadFiles, nb::arg("paths"), nb::arg("sizes"), nb::arg("threads"),
        nb::call_guard<WaitUnlocked>(),
        "(seconds, bytes) of plain threads doing open, one pread, close.");
  m.def("limit_copy_and_checksum", &CopyAndChecksum, nb::arg("samples"), nb::arg("sample_bytes"),
        nb::arg("batch"), nb::arg("threads"), nb::arg("order"), nb::call_guard<WaitUnlocked>(),
        "Seconds of plain threads that memcpy and checksum memory-resident samples.");
  nb::class_<CountedCalls>(m, "SystemCalls", "System calls of one thread.")
      .def_prop_ro("count", [](const CountedCalls& c) { return c.calls->count(); })
      .def_prop_ro(
          "last", [](const CountedCalls& c) { return c.calls->last(); },
          "The number of the last one.");
  m.def(
      "count_system_calls", [] { return CountedCalls{Value(SystemCalls::Count())}; },
      "Counts the system calls of this thread from now on, for good.");
  m.def("burn", &Burn, nb::arg("rounds"), nb::call_guard<WaitUnlocked>(),
        "A fixed amount of arithmetic on this thread: what a training step does to a core.");
}

}  // namespace forebay::python
