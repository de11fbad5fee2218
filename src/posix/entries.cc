// The functions that stand in libc's place, by libc's names. forebay_posix.map exports them.
//
// On 64-bit Linux the 64-bit variants are the plain ones, and what is passed to a variadic function
// comes where it would come to a plain one. What was not passed is read all the same, and not used:
// that is a register, or a word of the caller's stack.
#include "posix/calls.h"

using namespace forebay::posix;

static_assert(sizeof(long) == 8, "off_t, ino_t and their 64-bit variants are the same");

#pragma GCC visibility push(default)
extern "C" {

using FILE = _IO_FILE;
[[noreturn]] void __chk_fail();

// Opens.

int open(const char* path, int flags, unsigned mode) { return Open(kHere, path, flags, mode); }
int openat(int folder, const char* path, int flags, unsigned mode) {
  return Open(folder, path, flags, mode);
}
int open64(const char*, int, unsigned) __attribute__((alias("open")));
int __open(const char*, int, unsigned) __attribute__((alias("open")));
int __open64(const char*, int, unsigned) __attribute__((alias("open")));
int openat64(int, const char*, int, unsigned) __attribute__((alias("openat")));

int __open_2(const char* path, int flags) {
  if (NeedsMode(flags)) __chk_fail();
  return Open(kHere, path, flags, 0);
}
int __openat_2(int folder, const char* path, int flags) {
  if (NeedsMode(flags)) __chk_fail();
  return Open(folder, path, flags, 0);
}
int __open64_2(const char*, int) __attribute__((alias("__open_2")));
int __openat64_2(int, const char*, int) __attribute__((alias("__openat_2")));

int creat(const char* path, unsigned mode) { return Open(kHere, path, CreateFlags(), mode); }
int creat64(const char*, unsigned) __attribute__((alias("creat")));

FILE* fopen(const char* path, const char* mode) { return OpenStream(path, mode); }
FILE* fopen64(const char*, const char*) __attribute__((alias("fopen")));
FILE* freopen(const char* path, const char* mode, FILE* stream) {
  return ReopenStream(path, mode, stream);
}
FILE* freopen64(const char*, const char*, FILE*) __attribute__((alias("freopen")));

int mkstemp(char* pattern) { return MakeTemporary(pattern, 0, 0, false, false); }
int mkostemp(char* pattern, int flags) { return MakeTemporary(pattern, 0, flags, false, true); }
int mkstemps(char* pattern, int suffix) { return MakeTemporary(pattern, suffix, 0, true, false); }
int mkostemps(char* pattern, int suffix, int flags) {
  return MakeTemporary(pattern, suffix, flags, true, true);
}
int mkstemp64(char*) __attribute__((alias("mkstemp")));
int mkostemp64(char*, int) __attribute__((alias("mkostemp")));
int mkstemps64(char*, int) __attribute__((alias("mkstemps")));
int mkostemps64(char*, int, int) __attribute__((alias("mkostemps")));

int posix_spawn_file_actions_addopen(void* actions, int fd, const char* path, int flags,
                                     unsigned mode) {
  return SpawnOpen(actions, fd, path, flags, mode);
}

int execve(const char* path, char* const* arguments, char* const* variables) {
  return Execute(path, arguments, variables);
}
int execvpe(const char* file, char* const* arguments, char* const* variables) {
  return ExecuteFound(file, arguments, variables);
}
int fexecve(int fd, char* const* arguments, char* const* variables) {
  return ExecuteOpen(fd, arguments, variables);
}
int execv(const char* path, char* const* arguments) { return ExecuteHere(path, arguments); }
int execvp(const char* file, char* const* arguments) { return ExecuteFoundHere(file, arguments); }
int posix_spawn(int* process, const char* path, const void* actions, const void* attributes,
                char* const* arguments, char* const* variables) {
  return Spawn(process, path, actions, attributes, arguments, variables, false);
}
int posix_spawnp(int* process, const char* file, const void* actions, const void* attributes,
                 char* const* arguments, char* const* variables) {
  return Spawn(process, file, actions, attributes, arguments, variables, true);
}

long syscall(long number, long a, long b, long c, long d, long e, long f) {
  return SystemCall(number, {a, b, c, d, e, f});
}

// Reads, and what happens to descriptors.

long read(int fd, void* out, size_t bytes) { return Read(fd, out, bytes); }
long pread(int fd, void* out, size_t bytes, long offset) { return ReadAt(fd, out, bytes, offset); }
long readv(int fd, const iovec* parts, int count) { return ReadVector(fd, parts, count); }
long preadv(int fd, const iovec* parts, int count, long offset) {
  return ReadVectorAt(fd, parts, count, offset);
}
long preadv2(int fd, const iovec* parts, int count, long offset, int flags) {
  return ReadVectorAt2(fd, parts, count, offset, flags);
}
long __read(int, void*, size_t) __attribute__((alias("read")));
long pread64(int, void*, size_t, long) __attribute__((alias("pread")));
long __pread64(int, void*, size_t, long) __attribute__((alias("pread")));
long preadv64(int, const iovec*, int, long) __attribute__((alias("preadv")));
long preadv64v2(int, const iovec*, int, long, int) __attribute__((alias("preadv2")));

long __read_chk(int fd, void* out, size_t bytes, size_t room) {
  if (bytes > room) __chk_fail();
  return Read(fd, out, bytes);
}
long __pread_chk(int fd, void* out, size_t bytes, long offset, size_t room) {
  if (bytes > room) __chk_fail();
  return ReadAt(fd, out, bytes, offset);
}
long __pread64_chk(int, void*, size_t, long, size_t) __attribute__((alias("__pread_chk")));

size_t fread(void* out, size_t size, size_t count, FILE* stream) {
  return ReadStream(out, size, count, stream, false);
}
size_t fread_unlocked(void* out, size_t size, size_t count, FILE* stream) {
  return ReadStream(out, size, count, stream, true);
}
size_t __fread_chk(void* out, size_t room, size_t size, size_t count, FILE* stream) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(size, count, &bytes) || bytes > room) __chk_fail();
  return ReadStream(out, size, count, stream, false);
}
size_t __fread_unlocked_chk(void* out, size_t room, size_t size, size_t count, FILE* stream) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(size, count, &bytes) || bytes > room) __chk_fail();
  return ReadStream(out, size, count, stream, true);
}

// Mappings.

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, long offset) {
  return Map(at, bytes, protection, flags, fd, offset);
}
void* mmap64(void*, size_t, int, int, int, long) __attribute__((alias("mmap")));
int munmap(void* at, size_t bytes) { return Unmap(at, bytes); }
int mprotect(void* at, size_t bytes, int protection) { return Protect(at, bytes, protection); }
int pkey_mprotect(void* at, size_t bytes, int protection, int key) {
  return ProtectByKey(at, bytes, protection, key);
}
void* mremap(void* at, size_t bytes, size_t new_bytes, int flags, void* new_at) {
  return Remap(at, bytes, new_bytes, flags, new_at);
}
int madvise(void* at, size_t bytes, int advice) { return Advise(at, bytes, advice, false); }
int posix_madvise(void* at, size_t bytes, int advice) { return Advise(at, bytes, advice, true); }
int mlock(const void* at, size_t bytes) { return LockMemory(at, bytes, 0, false); }
int mlock2(const void* at, size_t bytes, unsigned flags) {
  return LockMemory(at, bytes, flags, true);
}

long copy_file_range(int in, long* in_at, int out, long* out_at, size_t bytes, unsigned flags) {
  return CopyRange(in, in_at, out, out_at, bytes, flags);
}

int close(int fd) { return Close(fd); }
int __close(int) __attribute__((alias("close")));
int close_range(unsigned first, unsigned last, int flags) { return CloseRange(first, last, flags); }
void closefrom(int first) { CloseFrom(first); }
int fclose(FILE* stream) { return CloseStream(stream); }
int dup(int fd) { return Duplicate(fd); }
int dup2(int from, int to) { return DuplicateTo(from, to); }
int __dup2(int, int) __attribute__((alias("dup2")));
int dup3(int from, int to, int flags) { return DuplicateWith(from, to, flags); }
int fcntl(int fd, int command, void* argument) { return Control(fd, command, argument); }
int fcntl64(int, int, void*) __attribute__((alias("fcntl")));
int __fcntl(int, int, void*) __attribute__((alias("fcntl")));

// Who a file is.

int stat(const char* path, struct stat* out) { return Stat(kHere, path, out, 0); }
int lstat(const char* path, struct stat* out) { return Stat(kHere, path, out, kNoFollow); }
int fstat(int fd, struct stat* out) { return StatOf(fd, out); }
int fstatat(int folder, const char* path, struct stat* out, int flags) {
  return Stat(folder, path, out, flags);
}
int stat64(const char*, struct stat*) __attribute__((alias("stat")));
int lstat64(const char*, struct stat*) __attribute__((alias("lstat")));
int fstat64(int, struct stat*) __attribute__((alias("fstat")));
int fstatat64(int, const char*, struct stat*, int) __attribute__((alias("fstatat")));

// Of programs linked before libc 2.33.
int __xstat(int version, const char* path, struct stat* out) {
  return KnownVersion(version) ? Stat(kHere, path, out, 0) : -1;
}
int __lxstat(int version, const char* path, struct stat* out) {
  return KnownVersion(version) ? Stat(kHere, path, out, kNoFollow) : -1;
}
int __fxstat(int version, int fd, struct stat* out) {
  return KnownVersion(version) ? StatOf(fd, out) : -1;
}
int __fxstatat(int version, int folder, const char* path, struct stat* out, int flags) {
  return KnownVersion(version) ? Stat(folder, path, out, flags) : -1;
}
int __xstat64(int, const char*, struct stat*) __attribute__((alias("__xstat")));
int __lxstat64(int, const char*, struct stat*) __attribute__((alias("__lxstat")));
int __fxstat64(int, int, struct stat*) __attribute__((alias("__fxstat")));
int __fxstatat64(int, int, const char*, struct stat*, int) __attribute__((alias("__fxstatat")));

int statx(int folder, const char* path, int flags, unsigned mask, struct statx* out) {
  return Statx(folder, path, flags, mask, out);
}
int access(const char* path, int mode) { return Access(kHere, path, mode, 0, false); }
int eaccess(const char* path, int mode) { return Access(kHere, path, mode, 0, true); }
int euidaccess(const char*, int) __attribute__((alias("eaccess")));
int faccessat(int folder, const char* path, int mode, int flags) {
  return Access(folder, path, mode, flags, false);
}
int fstatfs(int fd, struct statfs* out) { return StatFs(fd, out); }
int fstatfs64(int, struct statfs*) __attribute__((alias("fstatfs")));
int fstatvfs(int fd, struct statvfs* out) { return StatVfs(fd, out); }
int fstatvfs64(int, struct statvfs*) __attribute__((alias("fstatvfs")));
long fgetxattr(int fd, const char* name, void* out, size_t bytes) {
  return GetAttribute(fd, name, out, bytes);
}
long flistxattr(int fd, char* out, size_t bytes) { return ListAttributes(fd, out, bytes); }

// Changes.

int chdir(const char* path) { return ChangeFolder(path); }
int fchdir(int fd) { return ChangeFolderTo(fd); }
int chroot(const char* path) { return ChangeRoot(path); }
int rename(const char* from, const char* to) { return Rename(from, to); }
int renameat(int folder, const char* from, int to_folder, const char* to) {
  return RenameAt(folder, from, to_folder, to, 0, false);
}
int renameat2(int folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return RenameAt(folder, from, to_folder, to, flags, true);
}
int unlink(const char* path) { return Unlink(path); }
int unlinkat(int folder, const char* path, int flags) { return UnlinkAt(folder, path, flags); }
int rmdir(const char* path) { return RemoveFolder(path); }
int remove(const char* path) { return Remove(path); }
int link(const char* from, const char* to) { return Link(from, to); }
int linkat(int folder, const char* from, int to_folder, const char* to, int flags) {
  return LinkAt(folder, from, to_folder, to, flags);
}
int symlink(const char* target, const char* path) { return SymLink(target, path); }
int symlinkat(const char* target, int folder, const char* path) {
  return SymLinkAt(target, folder, path);
}
int truncate(const char* path, long size) { return Truncate(path, size); }
int truncate64(const char*, long) __attribute__((alias("truncate")));
int chmod(const char* path, unsigned mode) { return ChangeMode(path, mode); }
int fchmod(int fd, unsigned mode) { return ChangeModeOf(fd, mode); }
int lchmod(const char* path, unsigned mode) { return ChangeModeOfLink(path, mode); }
int fchmodat(int folder, const char* path, unsigned mode, int flags) {
  return ChangeModeAt(folder, path, mode, flags);
}
int chown(const char* path, unsigned user, unsigned group) {
  return ChangeOwner(path, user, group);
}
int fchown(int fd, unsigned user, unsigned group) { return ChangeOwnerOf(fd, user, group); }
int lchown(const char* path, unsigned user, unsigned group) {
  return ChangeOwnerOfLink(path, user, group);
}
int fchownat(int folder, const char* path, unsigned user, unsigned group, int flags) {
  return ChangeOwnerAt(folder, path, user, group, flags);
}
int utime(const char* path, const utimbuf* times) { return SetTime(path, times); }
int utimes(const char* path, const timeval* times) { return SetTimes(path, times); }
int lutimes(const char* path, const timeval* times) { return SetTimesOfLink(path, times); }
int futimes(int fd, const timeval* times) { return SetTimesOf(fd, times); }
int futimesat(int folder, const char* path, const timeval* times) {
  return SetTimesAt(folder, path, times);
}
int futimens(int fd, const timespec* times) { return SetExactTimesOf(fd, times); }
int utimensat(int folder, const char* path, const timespec* times, int flags) {
  return SetExactTimesAt(folder, path, times, flags);
}
int setxattr(const char* path, const char* name, const void* value, size_t bytes, int flags) {
  return SetAttribute(path, name, value, bytes, flags);
}
int lsetxattr(const char* path, const char* name, const void* value, size_t bytes, int flags) {
  return SetAttributeOfLink(path, name, value, bytes, flags);
}
int fsetxattr(int fd, const char* name, const void* value, size_t bytes, int flags) {
  return SetAttributeOf(fd, name, value, bytes, flags);
}
int removexattr(const char* path, const char* name) { return RemoveAttribute(path, name); }
int lremovexattr(const char* path, const char* name) { return RemoveAttributeOfLink(path, name); }
int fremovexattr(int fd, const char* name) { return RemoveAttributeOf(fd, name); }

}  // extern "C"
#pragma GCC visibility pop
