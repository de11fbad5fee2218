#include "files/program_file.h"

#include <elf.h>
#include <fcntl.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "files/raw_call.h"

namespace forebay::files {
namespace {

constexpr int kMostScripts = 5;  // one the interpreter of another: Linux's own bound
constexpr size_t kMostHeaders = 128;
constexpr size_t kMostEntries = 4096;

#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t kMachine = EM_AARCH64;
#else
constexpr uint16_t kMachine = EM_NONE;
#endif

// How many bytes there are at an offset, up to `bytes`.
size_t ReadSome(int fd, void* out, size_t bytes, uint64_t offset) {
  if (offset > INT64_MAX) return 0;
  long got = -EINTR;
  while (got == -EINTR) {
    got = RawCall(SYS_pread64, fd, RawArgument(out), static_cast<long>(bytes),
                  static_cast<long>(offset));
  }
  return got > 0 ? static_cast<size_t>(got) : 0;
}

template <typename Record>
bool ReadRecord(int fd, Record* out, uint64_t offset) {
  return ReadSome(fd, out, sizeof(*out), offset) == sizeof(*out);
}

// The text at an offset, without its 0; cut where the room ends.
template <size_t kSize>
std::string_view ReadText(int fd, char (&room)[kSize], uint64_t offset) {
  const size_t got = ReadSome(fd, room, kSize, offset);
  return {room, strnlen(room, got)};
}

std::string_view NameIn(std::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash != std::string_view::npos) path.remove_prefix(slash + 1);
  return path;
}

bool IsGlibcs(std::string_view loader) {
  for (const std::string_view known : {"ld-linux", "ld64.so", "ld.so"}) {
    if (loader.starts_with(known)) return true;
  }
  return false;
}

bool IsSanitizer(std::string_view library) {
  return library.starts_with("libasan.so") || library.starts_with("libclang_rt.asan");
}

// Where in the file lies what is loaded at an address; 0: nowhere.
uint64_t OffsetOf(int fd, const Elf64_Ehdr& elf, uint64_t address) {
  for (size_t i = 0; i < elf.e_phnum && i < kMostHeaders; ++i) {
    Elf64_Phdr part;
    if (!ReadRecord(fd, &part, elf.e_phoff + i * sizeof(part))) break;
    if (part.p_type == PT_LOAD && address >= part.p_vaddr &&
        address - part.p_vaddr < part.p_filesz) {
      return address - part.p_vaddr + part.p_offset;
    }
  }
  return 0;
}

bool NeedsSanitizer(int fd, const Elf64_Ehdr& elf, const Elf64_Phdr& dynamic) {
  uint64_t texts = 0;
  const size_t count = dynamic.p_filesz / sizeof(Elf64_Dyn);
  for (const bool find_texts : {true, false}) {
    for (size_t i = 0; i < count && i < kMostEntries; ++i) {
      Elf64_Dyn entry;
      if (!ReadRecord(fd, &entry, dynamic.p_offset + i * sizeof(entry))) break;
      if (entry.d_tag == DT_NULL) break;
      if (find_texts && entry.d_tag == DT_STRTAB) texts = OffsetOf(fd, elf, entry.d_un.d_ptr);
      if (find_texts || entry.d_tag != DT_NEEDED) continue;
      char room[64];
      if (IsSanitizer(NameIn(ReadText(fd, room, texts + entry.d_un.d_val)))) return true;
    }
    if (texts == 0) break;
  }
  return false;
}

Preload OfElf(int fd) {
  Elf64_Ehdr elf;
  if (!ReadRecord(fd, &elf, 0)) return Preload::kFits;
  // A static program is not reached at all; it has no loader.
  if (elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_machine != kMachine) {
    return kMachine == EM_NONE ? Preload::kFits : Preload::kOtherLibc;
  }
  if (elf.e_phentsize != sizeof(Elf64_Phdr)) return Preload::kFits;
  for (size_t i = 0; i < elf.e_phnum && i < kMostHeaders; ++i) {
    Elf64_Phdr part;
    if (!ReadRecord(fd, &part, elf.e_phoff + i * sizeof(part))) break;
    char room[256];
    if (part.p_type == PT_INTERP && !IsGlibcs(NameIn(ReadText(fd, room, part.p_offset)))) {
      return Preload::kOtherLibc;
    }
    if (part.p_type == PT_DYNAMIC && NeedsSanitizer(fd, elf, part)) return Preload::kSanitizer;
  }
  return Preload::kFits;
}

Preload OfPath(const char* path, int scripts);

Preload OfFile(int fd, int scripts) {
  char start[256];
  std::string_view text(start, ReadSome(fd, start, sizeof(start) - 1, 0));
  if (text.starts_with(std::string_view(ELFMAG, SELFMAG))) return OfElf(fd);
  if (!text.starts_with("#!") || scripts >= kMostScripts) return Preload::kFits;
  start[text.size()] = 0;
  char* program = start + 2;
  while (*program == ' ' || *program == '\t') ++program;
  program[std::strcspn(program, " \t\n")] = 0;
  return *program == 0 ? Preload::kFits : OfPath(program, scripts + 1);
}

Preload OfPath(const char* path, int scripts) {
  const long fd = RawCall(SYS_openat, AT_FDCWD, RawArgument(path),
                          O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
  if (fd < 0) return Preload::kFits;  // exec will say why
  const Preload found = OfFile(static_cast<int>(fd), scripts);
  RawCall(SYS_close, fd);
  return found;
}

}  // namespace

Preload PreloadInto(const char* path) { return OfPath(path, 0); }

Preload PreloadIntoOpen(int fd) { return OfFile(fd, 0); }

bool IsSanitizer(const char* library) { return IsSanitizer(std::string_view(library)); }

const char* WhyNot(Preload preload) {
  switch (preload) {
    case Preload::kFits:
      break;
    case Preload::kSanitizer:
      return "it is linked with AddressSanitizer, whose library must be loaded before all others";
    case Preload::kOtherLibc:
      return "its C library is not glibc, or has another word size";
  }
  return "";
}

}  // namespace forebay::files
