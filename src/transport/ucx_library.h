// What libforebay_ucx.so shows to the code that loads it. Both come from one build.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace forebay {

struct UcxLibrary {
  const char* build;  // of the same sources by the same compiler, or it is not used
  // UCX was loaded with us: nobody else in the process wants to read what it prints.
  // `told`: libforebay_ucx_first.so was there before.
  void (*quiet)(bool told);
  std::string (*version)();
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions& options,
                                             TransportHandler& handler);
};
inline constexpr char kUcxBuild[] = "forebay transport 1, " __VERSION__;
inline constexpr char kUcxEntry[] = "ForebayUcxLibrary";
using UcxEntry = const UcxLibrary* (*)();
// Of libforebay_ucx_first.so, which lies beside it and is loaded before (ucx/ucx_first.cc).
inline constexpr char kUcxFirst[] = "ForebayUcxFirst";
using UcxFirst = void (*)();

}  // namespace forebay
