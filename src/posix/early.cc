// A library whose constructor opens files, before that of ours has run.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

namespace {

[[gnu::constructor]] void Start() {
  struct stat out {};
  char byte = 0;
  const int fd = open("/dev/zero", O_RDONLY);
  const bool good = fd >= 0 && fstat(fd, &out) == 0 && read(fd, &byte, 1) == 1 &&
                    stat("/dev/zero", &out) == 0 && access("/dev/zero", R_OK) == 0 &&
                    close(fd) == 0;
  FILE* stream = std::fopen("/dev/null", "r");
  std::printf("%s\n", good && stream != nullptr && std::fclose(stream) == 0 ? "early" : "broken");
}

}  // namespace
