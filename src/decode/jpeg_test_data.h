// JPEG files for tests and fuzzers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ostream>
#include <random>
#include <vector>

#ifdef FOREBAY_HAVE_JPEG
// After <cstdio>, which it needs.
#include <jpeglib.h>
#endif

namespace forebay::testing {

// 8x8 gray pixels: quantisation by 16, one DC code of each length, the block's DC is 4 * 16.
inline std::vector<uint8_t> SmallFile() {
  std::vector<uint8_t> file(7 + 64, 16);
  std::ranges::copy(std::array<uint8_t, 7>{0xFF, 0xD8, 0xFF, 0xDB, 0, 67, 0}, file.begin());
  const std::vector<uint8_t> rest = {
      0xFF, 0xC0, 0,   11, 8,    0, 8, 0, 8,  1, 1, 0x11, 0,  // frame
      0xFF, 0xC4, 0,   20, 0x00, 0, 1, 0, 0,  0, 0, 0,    0,
      0,    0,    0,   0,  0,    0, 0, 0, 3,  // DC: 00 is 3 bits
      0xFF, 0xC4, 0,   20, 0x10, 1, 0, 0, 0,  0, 0, 0,    0,
      0,    0,    0,   0,  0,    0, 0, 0, 0,      // AC: 0 ends
      0xFF, 0xDA, 0,   8,  1,    1, 0, 0, 63, 0,  // scan
      0x23, 0xFF, 0xD9};                          // 00 100 0 11
  file.insert(file.end(), rest.begin(), rest.end());
  return file;
}

#ifdef FOREBAY_HAVE_JPEG

enum class Picture { kNoise, kSmooth, kExtreme };

struct JpegOptions {
  uint32_t width = 16;
  uint32_t height = 16;
  J_COLOR_SPACE space = JCS_YCbCr;  // as stored
  std::array<int, 8> factors = {1, 1, 1, 1, 1, 1, 1, 1};
  int quality = 75;
  bool progressive = false;
  bool optimize = false;
  bool separate = false;  // a scan for each component
  int restart = 0;
  bool arithmetic = false;  // not Huffman
  Picture picture = Picture::kNoise;
};

inline std::ostream& operator<<(std::ostream& out, const JpegOptions& o) {
  out << o.width << "x" << o.height << " space " << o.space << " factors";
  for (const int factor : o.factors) out << " " << factor;
  return out << " quality " << o.quality << " progressive " << o.progressive << " optimize "
             << o.optimize << " separate " << o.separate << " restart " << o.restart << " picture "
             << static_cast<int>(o.picture);
}

inline std::vector<uint8_t> Encode(const JpegOptions& o, std::mt19937& random) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  errors.output_message = [](j_common_ptr) {};
  jpeg_create_compress(&info);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &memory, &size);
  info.image_width = o.width;
  info.image_height = o.height;
  const bool four = o.space == JCS_CMYK || o.space == JCS_YCCK;
  info.input_components = o.space == JCS_GRAYSCALE ? 1 : four ? 4 : 3;
  info.in_color_space = o.space == JCS_GRAYSCALE ? JCS_GRAYSCALE : four ? JCS_CMYK : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_colorspace(&info, o.space);
  jpeg_set_quality(&info, o.quality, FALSE);
  for (int c = 0; c < info.num_components; ++c) {
    info.comp_info[c].h_samp_factor = o.factors[2 * static_cast<size_t>(c)];
    info.comp_info[c].v_samp_factor = o.factors[2 * static_cast<size_t>(c) + 1];
  }
  info.optimize_coding = o.optimize ? TRUE : FALSE;
  info.arith_code = o.arithmetic ? TRUE : FALSE;
  info.restart_interval = static_cast<unsigned>(o.restart);
  if (o.progressive) jpeg_simple_progression(&info);
  jpeg_scan_info scans[4] = {};
  if (o.separate) {
    for (int c = 0; c < info.num_components; ++c) scans[c] = {1, {c}, 0, 63, 0, 0};
    info.scan_info = scans;
    info.num_scans = info.num_components;
  }
  jpeg_start_compress(&info, TRUE);
  const uint32_t channels = static_cast<uint32_t>(info.input_components);
  std::vector<uint8_t> row(size_t{o.width} * channels);
  for (uint32_t y = 0; y < o.height; ++y) {
    for (uint32_t i = 0; i < row.size(); ++i) {
      const uint32_t x = i / channels;
      const uint32_t smooth = (x * 3 + y * 2 + i % channels * 90) / 2;
      row[i] = static_cast<uint8_t>(o.picture == Picture::kNoise     ? random()
                                    : o.picture == Picture::kExtreme ? (random() % 2) * 255
                                    : smooth % 512 < 256             ? smooth
                                                                     : 255 - smooth);
    }
    JSAMPROW line = row.data();
    jpeg_write_scanlines(&info, &line, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::vector<uint8_t> file(memory, memory + size);
  std::free(memory);
  return file;
}

#endif

}  // namespace forebay::testing
