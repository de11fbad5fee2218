// What one open + read + close costs, for bench transparent: run with and without the preloaded
// library, in turn, by the caller.
//
//   open_loop SECONDS FILE...     prints nanoseconds per file: the median of many short rounds
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "open_loop SECONDS FILE...\n");
    return 2;
  }
  const double seconds = std::atof(argv[1]);
  std::vector<char> buffer(1 << 20);
  // Each file is read to its last byte by one read(), and its end is not asked for.
  const auto read_all = [&] {
    for (int i = 2; i < argc; ++i) {
      const int fd = open(argv[i], O_RDONLY | O_CLOEXEC);
      if (fd < 0 || read(fd, buffer.data(), buffer.size()) < 0 || close(fd) != 0) {
        std::perror(argv[i]);
        return false;
      }
    }
    return true;
  };
  if (!read_all()) return 1;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<double> rounds;
  do {
    const auto start = Clock::now();
    if (!read_all()) return 1;
    const std::chrono::duration<double, std::nano> took = Clock::now() - start;
    rounds.push_back(took.count() / (argc - 2));
  } while (Clock::now() < end);
  auto middle = rounds.begin() + static_cast<long>(rounds.size() / 2);
  std::nth_element(rounds.begin(), middle, rounds.end());
  std::printf("%.1f\n", *middle);
  return 0;
}
