#include "files/program_file.h"

#include <elf.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace forebay::files {
namespace {

class ProgramFileTest : public ::testing::Test {
 protected:
  ProgramFileTest() {
    char name[] = "/tmp/forebay_program_XXXXXX";
    root_ = mkdtemp(name);
  }
  ~ProgramFileTest() override { std::filesystem::remove_all(root_); }

  std::string Write(const std::string& name, const std::string& bytes) const {
    const std::string path = root_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  // As much of a program as the kernel and the loader look at first.
  static std::string Program(const std::string& loader, const std::vector<std::string>& libraries) {
    constexpr uint64_t kAddress = 0x400000;
    std::string texts(1, 0);
    std::vector<Elf64_Dyn> entries;
    for (const std::string& library : libraries) {
      entries.push_back({DT_NEEDED, {texts.size()}});
      texts += library + '\0';
    }
    const uint64_t loader_at = sizeof(Elf64_Ehdr) + 3 * sizeof(Elf64_Phdr);
    const uint64_t texts_at = loader_at + loader.size() + 1;
    const uint64_t entries_at = (texts_at + texts.size() + 7) / 8 * 8;
    entries.push_back({DT_STRTAB, {kAddress + texts_at}});
    entries.push_back({DT_NULL, {0}});
    const uint64_t entries_bytes = entries.size() * sizeof(Elf64_Dyn);

    Elf64_Ehdr elf{};
    std::memcpy(elf.e_ident, ELFMAG, SELFMAG);
    elf.e_ident[EI_CLASS] = ELFCLASS64;
#if defined(__aarch64__)
    elf.e_machine = EM_AARCH64;
#else
    elf.e_machine = EM_X86_64;
#endif
    elf.e_phoff = sizeof(elf);
    elf.e_phentsize = sizeof(Elf64_Phdr);
    elf.e_phnum = 3;
    Elf64_Phdr parts[3] = {};
    parts[0].p_type = loader.empty() ? PT_NULL : PT_INTERP;
    parts[0].p_offset = loader_at;
    parts[0].p_filesz = loader.size() + 1;
    parts[1].p_type = PT_LOAD;
    parts[1].p_vaddr = kAddress;
    parts[1].p_filesz = entries_at + entries_bytes;
    parts[2].p_type = PT_DYNAMIC;
    parts[2].p_offset = entries_at;
    parts[2].p_filesz = entries_bytes;

    std::string out(entries_at + entries_bytes, 0);
    std::memcpy(out.data(), &elf, sizeof(elf));
    std::memcpy(out.data() + sizeof(elf), parts, sizeof(parts));
    std::memcpy(out.data() + loader_at, loader.data(), loader.size());
    std::memcpy(out.data() + texts_at, texts.data(), texts.size());
    std::memcpy(out.data() + entries_at, entries.data(), entries_bytes);
    return out;
  }

  std::string root_;
};

constexpr const char* kGlibc = "/lib64/ld-linux-x86-64.so.2";

TEST_F(ProgramFileTest, MostProgramsFit) {
  const auto fits = [](const std::string& path) {
    return PreloadInto(path.c_str()) == Preload::kFits;
  };
  EXPECT_TRUE(fits("/proc/self/exe") || fits("/bin/sh"));
  EXPECT_TRUE(fits(Write("plain", Program(kGlibc, {"libm.so.6", "libc.so.6"}))));
  EXPECT_TRUE(fits(Write("static", Program("", {}))));
  // Whatever is wrong with these, exec says it.
  EXPECT_TRUE(fits(root_ + "/none"));
  EXPECT_TRUE(fits(root_));
  EXPECT_TRUE(fits(Write("empty", "")));
  EXPECT_TRUE(fits(Write("text", "echo a\n")));
  EXPECT_TRUE(fits(Write("script", "#!/bin/sh\n")));
  EXPECT_TRUE(fits(Write("open", "#!")));
  EXPECT_TRUE(fits(Write("itself", "#!" + root_ + "/itself\n")));
}

TEST_F(ProgramFileTest, OneWithAddressSanitizerDoesNot) {
  for (const char* library : {"libasan.so.8", "/opt/lib/libclang_rt.asan-x86_64.so"}) {
    const std::string path = Write("asan", Program(kGlibc, {"libc.so.6", library}));
    EXPECT_EQ(PreloadInto(path.c_str()), Preload::kSanitizer);
  }
  const std::string script = Write("script", "#! " + root_ + "/asan -x\n");
  EXPECT_EQ(PreloadInto(script.c_str()), Preload::kSanitizer);
  EXPECT_TRUE(IsSanitizer("libasan.so.6"));
  EXPECT_FALSE(IsSanitizer("libasanas.so"));
}

TEST_F(ProgramFileTest, OneOfAnotherLibcDoesNot) {
  const std::string musl = Program("/lib/ld-musl-x86_64.so.1", {"libc.musl-x86_64.so.1"});
  EXPECT_EQ(PreloadInto(Write("musl", musl).c_str()), Preload::kOtherLibc);
  std::string narrow = Program(kGlibc, {});
  narrow[EI_CLASS] = ELFCLASS32;
  EXPECT_EQ(PreloadInto(Write("narrow", narrow).c_str()), Preload::kOtherLibc);
  EXPECT_STRNE(WhyNot(Preload::kOtherLibc), "");
}

TEST_F(ProgramFileTest, DamagedFilesDoNoHarm) {
  const std::string whole = Program(kGlibc, {"libc.so.6", "libasan.so.8"});
  for (size_t size = 0; size < whole.size(); ++size) {
    (void)PreloadInto(Write("short", whole.substr(0, size)).c_str());
  }
  for (size_t at = 4; at < whole.size(); ++at) {
    std::string wrong = whole;
    wrong[at] = static_cast<char>(~wrong[at]);
    (void)PreloadInto(Write("wrong", wrong).c_str());
  }
}

}  // namespace
}  // namespace forebay::files
