// Whether our library can be preloaded into a program, by what the program's file says.
//
// Called by the preloaded library before exec: it allocates nothing, calls the system directly and
// leaves errno alone.
#pragma once

#include <cstdint>

namespace forebay::files {

enum class Preload : uint8_t {
  kFits,       // or nothing is known that speaks against it
  kSanitizer,  // AddressSanitizer's library ends the program unless it is loaded first
  kOtherLibc,  // another loader than glibc's of this word size: ours would not load there
};

// Of what execve() would start: a script's interpreter, not the script.
Preload PreloadInto(const char* path);
Preload PreloadIntoOpen(int fd);
// Whether a library of that name, without its folder, is AddressSanitizer's.
bool IsSanitizer(const char* library);

const char* WhyNot(Preload preload);  // for messages

}  // namespace forebay::files
