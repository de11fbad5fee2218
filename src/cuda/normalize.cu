// Bytes of pixels to normalised numbers, in one pass over the memory of the GPU.
//
// A table of 3 x 256 numbers holds what each byte of each channel becomes, so that the results are
// bit for bit those of the processor's arithmetic.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ T Rounded(float value);
template <>
__device__ float Rounded<float>(float value) {
  return value;
}
template <>
__device__ __half Rounded<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 Rounded<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Four pixels (12 bytes) a thread: whole words in, consecutive numbers out. `pixels` is a multiple
// of four in all; `plane` is the number of pixels of one image.
template <typename T, bool kChannelsLast>
__global__ void Normalize(const uint32_t* __restrict__ in, T* __restrict__ out,
                          const float* __restrict__ table, uint64_t pixels, uint64_t plane) {
  __shared__ T values[3 * 256];
  for (int i = threadIdx.x; i < 3 * 256; i += kThreads) values[i] = Rounded<T>(table[i]);
  __syncthreads();
  const uint64_t step = uint64_t{gridDim.x} * kThreads;
  for (uint64_t at = blockIdx.x * uint64_t{kThreads} + threadIdx.x; at < pixels / 4; at += step) {
    uint32_t words[3];
    for (int i = 0; i < 3; ++i) words[i] = in[at * 3 + i];
    const auto* bytes = reinterpret_cast<const uint8_t*>(words);
    T numbers[12];
#pragma unroll
    for (int i = 0; i < 12; ++i) numbers[i] = values[i % 3 * 256 + bytes[i]];
    if (kChannelsLast) {
#pragma unroll
      for (int i = 0; i < 12; ++i) out[at * 12 + i] = numbers[i];
    } else {
      const uint64_t image = at * 4 / plane;
      const uint64_t pixel = at * 4 - image * plane;
#pragma unroll
      for (int c = 0; c < 3; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[(image * 3 + c) * plane + pixel + i] = numbers[i * 3 + c];
        }
      }
    }
  }
}

// Any number of pixels, one a thread.
template <typename T, bool kChannelsLast>
__global__ void NormalizeOdd(const uint8_t* __restrict__ in, T* __restrict__ out,
                             const float* __restrict__ table, uint64_t pixels, uint64_t plane) {
  const uint64_t at = blockIdx.x * uint64_t{kThreads} + threadIdx.x;
  if (at >= pixels) return;
  const uint64_t image = at / plane;
  for (int c = 0; c < 3; ++c) {
    const uint64_t to =
        kChannelsLast ? at * 3 + c : (image * 3 + c) * plane + (at - image * plane);
    out[to] = Rounded<T>(table[c * 256 + in[at * 3 + c]]);
  }
}

template <typename T, bool kChannelsLast>
void Launch(const void* in, void* out, const float* table, uint64_t images, uint64_t plane,
            cudaStream_t stream) {
  const uint64_t pixels = images * plane;
  if (pixels == 0) return;
  if (plane % 4 == 0) {
    const uint64_t blocks = (pixels / 4 + kThreads - 1) / kThreads;
    Normalize<T, kChannelsLast><<<blocks < 2048 ? blocks : 2048, kThreads, 0, stream>>>(
        static_cast<const uint32_t*>(in), static_cast<T*>(out), table, pixels, plane);
  } else {
    NormalizeOdd<T, kChannelsLast>
        <<<(pixels + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
            static_cast<const uint8_t*>(in), static_cast<T*>(out), table, pixels, plane);
  }
}

template <typename T>
void LaunchAs(bool channels_last, const void* in, void* out, const float* table, uint64_t images,
              uint64_t plane, cudaStream_t stream) {
  if (channels_last) {
    Launch<T, true>(in, out, table, images, plane, stream);
  } else {
    Launch<T, false>(in, out, table, images, plane, stream);
  }
}

}  // namespace

// `in`: images of `plane` pixels, three bytes each. `type`: 0 float, 1 half, 2 bfloat16. Returns a
// cudaError_t.
extern "C" __attribute__((visibility("default"))) int forebay_cuda_normalize(
    const void* in, void* out, const float* table, uint64_t images, uint64_t plane, int type,
    int channels_last, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (type) {
    case 0:
      LaunchAs<float>(channels_last != 0, in, out, table, images, plane, on);
      break;
    case 1:
      LaunchAs<__half>(channels_last != 0, in, out, table, images, plane, on);
      break;
    case 2:
      LaunchAs<__nv_bfloat16>(channels_last != 0, in, out, table, images, plane, on);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
