// The file service's connections, and opening files by their copies.
#include <fcntl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "common.h"
#include "files/client.h"
#include "files/current.h"
#include "files/program_file.h"
#include "files/service.h"
#include "files/session.h"

namespace forebay::python {
namespace {

using files::Session;

std::vector<std::string_view> Views(const std::vector<nb::bytes>& paths) {
  std::vector<std::string_view> out;
  out.reserve(paths.size());
  for (const nb::bytes& path : paths) out.emplace_back(path.c_str(), path.size());
  return out;
}

std::vector<std::string> Strings(const std::vector<nb::bytes>& paths) {
  std::vector<std::string> out;
  for (const nb::bytes& path : paths) out.emplace_back(path.c_str(), path.size());
  return out;
}

std::string Text(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

// Holds what a files::Client needs; the client never goes, as a program's other threads may be in
// it.
struct FileClient {
  std::unique_ptr<files::Client> client = std::make_unique<files::Client>();
  bool on = false;
};

// A file of the source that is being copied: what is there of the copy is read from it.
struct PartialFile {
  const files::Client* client;
  std::string path;
  int fd;  // of the source; whoever made this closes it
  files::Client::Seen seen;
};

ssize_t ReadPartial(PartialFile& file, void* out, size_t bytes, uint64_t offset) {
  bytes = files::Client::Piece(offset, bytes);
  const int64_t got = file.client->ReadPart(file.path, out, bytes, offset, &file.seen);
  return got >= 0 ? got : pread(file.fd, out, bytes, static_cast<off_t>(offset));
}

}  // namespace

void BindFiles(nb::module_& m) {
  nb::class_<Session>(m, "FileSession", "A connection to the file service; see forebay.files.")
      .def_static(
          "start",
          [](const std::string& program, const std::string& folder, const nb::bytes& cache,
             const std::vector<nb::bytes>& sources, std::vector<std::string> settings,
             const std::string& job, double timeout_s) {
            files::SessionOptions options;
            options.program = program;
            options.folder = folder;
            options.cache = Text(cache);
            options.sources = Strings(sources);
            options.settings = std::move(settings);
            options.job = job;
            options.timeout = static_cast<Nanos>(timeout_s * kSecond);
            return Value(Unlocked([&] { return Session::Start(options); }));
          },
          nb::arg("program"), nb::arg("folder"), nb::arg("cache"), nb::arg("sources"),
          nb::arg("settings"), nb::arg("job") = "", nb::arg("timeout_s") = 20.0,
          "The service that runs, or one that is started with these settings ('name=value').")
      .def_static(
          "connect",
          [](const std::string& socket, double timeout_s, files::JobNumber job) {
            return Value(Unlocked([&] {
              return Session::Connect(socket, static_cast<Nanos>(timeout_s * kSecond), job);
            }));
          },
          nb::arg("socket"), nb::arg("timeout_s") = 10.0, nb::arg("job") = 0,
          "Raises when none is there.")
      .def_prop_ro("socket", &Session::socket)
      .def_prop_ro("job", &Session::job, "Its number, for programs; 0: the daemon's own.")
      .def_prop_ro("cache",
                   [](const Session& s) { return nb::bytes(s.cache().data(), s.cache().size()); })
      .def(
          "set_knobs",
          [](Session& s, const std::vector<std::string>& settings) {
            Raise(Unlocked([&] { return s.SetKnobs(settings); }));
          },
          nb::arg("settings"))
      .def("status", [](Session& s) { return Value(Unlocked([&] { return s.StatusJson(); })); })
      .def(
          "get",
          [](Session& s, const nb::bytes& path) {
            return static_cast<int>(
                Value(Unlocked([&, view = Text(path)] { return s.Get(view); })));
          },
          nb::arg("path"), "Waits until the file is there; 1: it is.")
      .def(
          "changed",
          [](Session& s, const nb::bytes& path) {
            Raise(Unlocked([&, view = Text(path)] { return s.Changed(view); }));
          },
          nb::arg("path"))
      .def(
          "names",
          [](Session& s, const std::vector<nb::bytes>& paths) {
            const std::vector<std::string_view> views = Views(paths);
            Raise(Unlocked([&] { return s.Names(views); }));
          },
          nb::arg("paths"))
      .def(
          "order",
          [](Session& s, uint64_t position,
             nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> numbers) {
            const std::span<const uint32_t> view(numbers.data(), numbers.size());
            Raise(Unlocked([&] { return s.Order(position, view); }));
          },
          nb::arg("position"), nb::arg("numbers"))
      .def(
          "at",
          [](Session& s, uint64_t position) { Raise(Unlocked([&] { return s.At(position); })); },
          nb::arg("position"));

  nb::class_<FileClient>(m, "FileClient", "Opens files of data folders by their copies.")
      .def(
          "__init__",
          [](FileClient* self, const nb::bytes& cache, const nb::bytes& socket,
             const nb::bytes& sources, const nb::bytes& job) {
            new (self) FileClient;
            self->on =
                self->client->Start(cache.c_str(), socket.c_str(), sources.c_str(), job.c_str());
          },
          nb::arg("cache"), nb::arg("socket"), nb::arg("sources"),
          nb::arg("job") = nb::bytes("", 0))
      .def_prop_ro("on", [](const FileClient& c) { return c.on && c.client->on(); })
      .def(
          "open",
          [](const FileClient& self, const nb::bytes& path) {
            const std::string text = Text(path);
            std::array<char, 4096> normal;
            const size_t length = files::NormalPath({}, text, normal.data(), normal.size());
            const std::string_view view(normal.data(), length);
            if (!self.on || length == 0 || !self.client->Covers(view)) return -1;
            return Unlocked([&] {
              auto found = files::Client::Found::kSource;
              return self.client->OpenCopy(view, O_CLOEXEC, &found);
            });
          },
          nb::arg("path"), "A descriptor of the copy of an absolute path; -1: open the source.")
      .def(
          "open_current",
          [](const FileClient& self, const nb::bytes& path) {
            const std::string text = Text(path);
            std::array<char, 4096> normal;
            const size_t length = files::NormalPath({}, text, normal.data(), normal.size());
            if (!self.on || length == 0 || !self.client->Covers({normal.data(), length})) return -1;
            return Unlocked([&] {
              auto found = files::Client::Found::kSource;
              const int fd = files::OpenCurrentCopy(*self.client, normal.data(), O_CLOEXEC, &found);
              return fd < 0 && found == files::Client::Found::kPartial ? -2 : fd;
            });
          },
          nb::arg("path"),
          "As open(), but not the copy of a file that has changed since. -2: open the source, and "
          "read it with a PartialFile.");
  nb::class_<PartialFile>(m, "PartialFile", "Reads a large file that is being copied.")
      .def_static(
          "of",
          [](const FileClient& self, const nb::bytes& path,
             int fd) -> std::unique_ptr<PartialFile> {
            const std::string text = Text(path);
            std::array<char, 4096> normal;
            const size_t length = files::NormalPath({}, text, normal.data(), normal.size());
            if (!self.on || length == 0) return nullptr;
            normal[length] = 0;
            if (!Unlocked([&] { return files::IsCurrentPart(*self.client, normal.data(), fd); })) {
              return nullptr;
            }
            return std::unique_ptr<PartialFile>(
                new PartialFile{self.client.get(), std::string(normal.data(), length), fd, {}});
          },
          nb::arg("client"), nb::arg("path"), nb::arg("fd"), nb::keep_alive<0, 1>(),
          "None: the file has changed since. `fd` is the source's, and stays open as long.")
      .def(
          "read_into",
          [](PartialFile& self, const nb::object& buffer, uint64_t offset) {
            Py_buffer view;
            if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_WRITABLE) != 0) {
              throw nb::python_error();
            }
            const ssize_t got = Unlocked(
                [&] { return ReadPartial(self, view.buf, static_cast<size_t>(view.len), offset); });
            const int error = errno;
            PyBuffer_Release(&view);
            if (got < 0) {
              errno = error;
              PyErr_SetFromErrno(PyExc_OSError);
              throw nb::python_error();
            }
            return got;
          },
          nb::arg("buffer"), nb::arg("offset"), "Bytes read, which may be fewer; 0: the end.");
  m.def(
      "why_not_preload",
      [](const nb::bytes& program) {
        return std::string(files::WhyNot(files::PreloadInto(program.c_str())));
      },
      nb::arg("program"), "Why no library of ours can be preloaded into it; empty: it can.");
  m.def(
      "is_sanitizer", [](const nb::bytes& library) { return files::IsSanitizer(library.c_str()); },
      nb::arg("library"), "Whether a library, by its name, insists on being loaded first.");
  m.def(
      "files_socket",
      [](const std::string& folder, const nb::bytes& cache) {
        return files::ServicePlace(folder, Text(cache)).socket;
      },
      nb::arg("folder"), nb::arg("cache"), "Where the service of a cache folder listens.");
}

}  // namespace forebay::python
