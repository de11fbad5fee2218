// What our functions do in the place of libc's. entries.cc gives them libc's names; it includes
// none of libc's headers, whose declarations differ in small ways from version to version.
#pragma once

#include <cstddef>

struct _IO_FILE;
struct iovec;
struct stat;
struct statfs;
struct statvfs;
struct statx;
struct timespec;
struct timeval;
struct utimbuf;

namespace forebay::posix {

constexpr int kHere = -100;  // AT_FDCWD
constexpr int kNoFollow = 0x100;

// open_calls.cc
bool NeedsMode(int flags);
int CreateFlags();
int Open(int folder, const char* path, int flags, unsigned mode);
_IO_FILE* OpenStream(const char* path, const char* mode);
_IO_FILE* ReopenStream(const char* path, const char* mode, _IO_FILE* stream);
int MakeTemporary(char* pattern, int suffix, int flags, bool with_suffix, bool with_flags);
int SpawnOpen(void* actions, int fd, const char* path, int flags, unsigned mode);
long SystemCall(long number, const long (&arguments)[6]);

// start_calls.cc
int Execute(const char* path, char* const* arguments, char* const* variables);
int ExecuteFound(const char* file, char* const* arguments, char* const* variables);
int ExecuteOpen(int fd, char* const* arguments, char* const* variables);
int ExecuteHere(const char* path, char* const* arguments);
int ExecuteFoundHere(const char* file, char* const* arguments);
long ExecuteCall(const long (&arguments)[6]);  // syscall(SYS_execve, ...)
int Spawn(int* process, const char* path, const void* actions, const void* attributes,
          char* const* arguments, char* const* variables, bool find);

// read_calls.cc
long Read(int fd, void* out, size_t bytes);
long ReadAt(int fd, void* out, size_t bytes, long offset);
long ReadVector(int fd, const iovec* parts, int count);
long ReadVectorAt(int fd, const iovec* parts, int count, long offset);
long ReadVectorAt2(int fd, const iovec* parts, int count, long offset, int flags);
size_t ReadStream(void* out, size_t size, size_t count, _IO_FILE* stream, bool unlocked);
long CopyRange(int in, long* in_at, int out, long* out_at, size_t bytes, unsigned flags);
int Close(int fd);
int CloseRange(unsigned first, unsigned last, int flags);
void CloseFrom(int first);
int CloseStream(_IO_FILE* stream);
int Duplicate(int fd);
int DuplicateTo(int from, int to);
int DuplicateWith(int from, int to, int flags);
int Control(int fd, int command, void* argument);

// map_calls.cc
void* Map(void* at, size_t bytes, int protection, int flags, int fd, long offset);
int Unmap(void* at, size_t bytes);
int Protect(void* at, size_t bytes, int protection);
int ProtectByKey(void* at, size_t bytes, int protection, int key);
void* Remap(void* at, size_t bytes, size_t new_bytes, int flags, void* new_at);
int Advise(void* at, size_t bytes, int advice, bool posix);
int LockMemory(const void* at, size_t bytes, unsigned flags, bool with_flags);
// Of syscall(), before one of these is made directly.
void MapsDirectly(long number, const long (&arguments)[6]);

// stat_calls.cc
bool KnownVersion(int version);  // of struct stat; else EINVAL
int Stat(int folder, const char* path, struct stat* out, int flags);
int StatOf(int fd, struct stat* out);
int Statx(int folder, const char* path, int flags, unsigned mask, struct statx* out);
int Access(int folder, const char* path, int mode, int flags, bool effective);
int StatFs(int fd, struct statfs* out);
int StatVfs(int fd, struct statvfs* out);
long GetAttribute(int fd, const char* name, void* out, size_t bytes);
long ListAttributes(int fd, char* out, size_t bytes);

// change_calls.cc
int ChangeFolder(const char* path);
int ChangeFolderTo(int fd);
int ChangeRoot(const char* path);
int Rename(const char* from, const char* to);
int RenameAt(int folder, const char* from, int to_folder, const char* to, unsigned flags,
             bool with_flags);
int Unlink(const char* path);
int UnlinkAt(int folder, const char* path, int flags);
int RemoveFolder(const char* path);
int Remove(const char* path);
int Link(const char* from, const char* to);
int LinkAt(int folder, const char* from, int to_folder, const char* to, int flags);
int SymLink(const char* target, const char* path);
int SymLinkAt(const char* target, int folder, const char* path);
int Truncate(const char* path, long size);
int ChangeMode(const char* path, unsigned mode);
int ChangeModeOf(int fd, unsigned mode);
int ChangeModeAt(int folder, const char* path, unsigned mode, int flags);
int ChangeModeOfLink(const char* path, unsigned mode);
int ChangeOwner(const char* path, unsigned user, unsigned group);
int ChangeOwnerOf(int fd, unsigned user, unsigned group);
int ChangeOwnerOfLink(const char* path, unsigned user, unsigned group);
int ChangeOwnerAt(int folder, const char* path, unsigned user, unsigned group, int flags);
int SetTime(const char* path, const utimbuf* times);
int SetTimes(const char* path, const timeval* times);
int SetTimesOfLink(const char* path, const timeval* times);
int SetTimesOf(int fd, const timeval* times);
int SetTimesAt(int folder, const char* path, const timeval* times);
int SetExactTimesOf(int fd, const timespec* times);
int SetExactTimesAt(int folder, const char* path, const timespec* times, int flags);
int SetAttribute(const char* path, const char* name, const void* value, size_t bytes, int flags);
int SetAttributeOfLink(const char* path, const char* name, const void* value, size_t bytes,
                       int flags);
int SetAttributeOf(int fd, const char* name, const void* value, size_t bytes, int flags);
int RemoveAttribute(const char* path, const char* name);
int RemoveAttributeOfLink(const char* path, const char* name);
int RemoveAttributeOf(int fd, const char* name);

}  // namespace forebay::posix
