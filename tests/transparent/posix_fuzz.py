"""Random file calls by several processes that take turns, and what each call returned.

    posix_fuzz.py FOLDER SEED CALLS      prints one line of JSON a call
    posix_fuzz.py FOLDER SEED 0          makes the tree and prints nothing

The processes share the folder, and one at a time makes a call, so the same seed makes the same
calls and gets the same answers: run without Forebay it says what must be seen under it. What is
left out of the answers is what no two runs have alike: times of now, numbers of inodes and devices.

A descriptor opened for reading shows the file as it was when it was opened, also after somebody
changed the bytes in place. That is the one thing that differs by design (docs/transparent_list.md),
so such descriptors are not asked any more once their file was changed; `_Model` knows which.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import sys
from typing import Any

OLD = 1_000_000_000  # modification time of the tree's files
FILES = 120
WORKERS = 3
# After which a descriptor of the file shows what was there before.
CHANGES = {
    "write", "truncate", "unlink", "link", "chmod", "utime", "setxattr", "rename", "at_rename",
    "at_unlink", "write_again",
}  # fmt: skip


def make_tree(root: str, seed: int) -> None:
    rng = random.Random(seed)
    for folder in ("", "a", "b", "a/deep"):
        os.makedirs(os.path.join(root, folder), exist_ok=True)
    for i in range(FILES):
        folder = rng.choice(["", "a", "b", "a/deep"])
        path = os.path.join(root, folder, f"f{i}")
        size = rng.choice([0, 1, 100, 4096, 5000, 70_000])
        with open(path, "wb") as out:
            out.write(rng.randbytes(size))
        os.chmod(path, rng.choice([0o644, 0o444, 0o755, 0o600]))
    os.symlink("f0", os.path.join(root, "link_maybe_dangling"))
    os.symlink("a", os.path.join(root, "link_folder"))
    with open(root + "_outside", "wb") as out:
        out.write(rng.randbytes(3000))
    os.symlink(root + "_outside", os.path.join(root, "link_outside"))
    for base, folders, files in os.walk(root, topdown=False):
        for name in files + folders:
            os.utime(os.path.join(base, name), (OLD, OLD), follow_symlinks=False)


class Worker:
    """Makes the calls. Its descriptors live here; the driver names them by number."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.fds: dict[int, int] = {}
        os.chdir(root)

    def path(self, name: str, how: int) -> str:
        """The same file, said in different ways."""
        if how == 0:
            return os.path.join(self.root, name)
        if how == 1:
            return os.path.relpath(os.path.join(self.root, name))
        if how == 2:
            return self.root + "/./" + name.replace("/", "//")
        return os.path.join(self.root, "a", "..", name)

    def call(self, op: str, args: list[Any]) -> Any:
        try:
            return getattr(self, "do_" + op)(*args)
        except OSError as error:
            return {"errno": errno.errorcode.get(error.errno or 0, error.errno)}

    def shown(self, st: os.stat_result) -> dict[str, Any]:
        shown: dict[str, Any] = {"mode": oct(st.st_mode), "uid": st.st_uid}
        if not os.path.stat.S_ISDIR(st.st_mode):  # type: ignore[attr-defined]
            shown |= {"size": st.st_size, "nlink": st.st_nlink, "blocks": st.st_blocks > 0}
        if st.st_mtime_ns < (OLD + 10_000) * 10**9:
            shown["mtime"] = st.st_mtime_ns
        return shown

    # Reading
    def do_read(self, name: str, how: int) -> Any:
        with open(self.path(name, how), "rb") as file:
            data = file.read()
            st = os.fstat(file.fileno())
        return {"sum": _sum(data), "size": st.st_size, "length": len(data)}

    def do_text(self, name: str, how: int) -> Any:
        with open(self.path(name, how), encoding="latin-1", newline="") as file:
            return {"sum": _sum("".join(file).encode("latin-1"))}

    def do_map(self, name: str, how: int) -> Any:
        fd = os.open(self.path(name, how), os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size == 0:
                return {"empty": True}
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as view:
                return {"sum": _sum(view[:])}
        finally:
            os.close(fd)

    def do_sendfile(self, name: str, how: int, to: str) -> Any:
        source = os.open(self.path(name, how), os.O_RDONLY)
        try:
            out = os.open(self.path(to, 0), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                if os.fstat(source).st_ino == os.fstat(out).st_ino:
                    return {"same": True}
                return {"sent": os.sendfile(out, source, 0, 1 << 20)}
            finally:
                os.close(out)
        finally:
            os.close(source)

    def do_open(self, slot: int, name: str, how: int, flags: int) -> Any:
        fd = os.open(self.path(name, how), flags, 0o640)
        if slot in self.fds:
            os.close(self.fds[slot])
        self.fds[slot] = fd
        own, named = os.fstat(fd), os.stat(self.path(name, how))
        same = (own.st_ino, own.st_dev) == (named.st_ino, named.st_dev)
        return self.shown(own) | {"same": same}

    def do_fd_read(self, slot: int, count: int) -> Any:
        if slot not in self.fds:
            return None
        data = os.read(self.fds[slot], count)
        return {"sum": _sum(data), "at": os.lseek(self.fds[slot], 0, os.SEEK_CUR)}

    def do_fd_pread(self, slot: int, count: int, offset: int) -> Any:
        if slot not in self.fds:
            return None
        return {"sum": _sum(os.pread(self.fds[slot], count, offset))}

    def do_fd_stat(self, slot: int) -> Any:
        return self.shown(os.fstat(self.fds[slot])) if slot in self.fds else None

    def do_fd_dup(self, slot: int, to: int) -> Any:
        if slot not in self.fds or slot == to:
            return None
        fd = os.dup(self.fds[slot])
        if to in self.fds:
            os.close(self.fds[to])
        self.fds[to] = fd
        return self.shown(os.fstat(fd))

    def do_fd_flags(self, slot: int) -> Any:
        import fcntl

        if slot not in self.fds:
            return None
        flags = fcntl.fcntl(self.fds[slot], fcntl.F_GETFL)
        return {"access": flags & os.O_ACCMODE, "cloexec": not os.get_inheritable(self.fds[slot])}

    def do_fd_write(self, slot: int, count: int, seed: int) -> Any:
        if slot not in self.fds:
            return None
        return {"wrote": os.write(self.fds[slot], random.Random(seed).randbytes(count))}

    def do_fd_truncate(self, slot: int, size: int) -> Any:
        if slot not in self.fds:
            return None
        os.ftruncate(self.fds[slot], size)
        return "ok"

    def do_fd_chmod(self, slot: int, mode: int) -> Any:
        if slot not in self.fds:
            return None
        os.fchmod(self.fds[slot], mode)
        return "ok"

    def do_fd_close(self, slot: int) -> Any:
        if slot not in self.fds:
            return None
        os.close(self.fds.pop(slot))
        return "ok"

    def do_child_read(self, slot: int) -> Any:
        """A child reads on where its parent stands, and its parent after it."""
        if slot not in self.fds:
            return None
        into, out = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(out, _sum(os.read(self.fds[slot], 100)).encode())
            except OSError as error:
                os.write(out, f"errno {error.errno}".encode())
            finally:
                os._exit(0)
        os.close(out)
        said = os.read(into, 1000).decode()
        os.close(into)
        os.waitpid(child, 0)
        return {"child": said, "at": os.lseek(self.fds[slot], 0, os.SEEK_CUR)}

    # Attributes
    def do_stat(self, name: str, how: int) -> Any:
        return self.shown(os.stat(self.path(name, how)))

    def do_lstat(self, name: str, how: int) -> Any:
        return self.shown(os.lstat(self.path(name, how)))

    def do_access(self, name: str, how: int, mode: int) -> Any:
        return os.access(self.path(name, how), mode)

    def do_list(self, name: str, how: int) -> Any:
        with os.scandir(self.path(name, how)) as entries:
            return sorted([e.name, e.is_dir(), e.is_symlink()] for e in entries)

    def do_readlink(self, name: str, how: int) -> Any:
        return os.readlink(self.path(name, how))

    def do_xattrs(self, name: str, how: int) -> Any:
        return sorted(os.listxattr(self.path(name, how)))

    # Relative to a descriptor of the folder
    def at(self, name: str) -> tuple[int, str]:
        folder, base = os.path.split(os.path.join(self.root, name))
        return os.open(folder, os.O_PATH | os.O_DIRECTORY), base

    def do_at_read(self, name: str, how: int) -> Any:
        folder, base = self.at(name)
        try:
            fd = os.open(base, os.O_RDONLY, dir_fd=folder)
            try:
                return {"sum": _sum(os.read(fd, 1 << 20)), "stat": self.shown(os.fstat(fd))}
            finally:
                os.close(fd)
        finally:
            os.close(folder)

    def do_at_stat(self, name: str, how: int) -> Any:
        folder, base = self.at(name)
        try:
            return self.shown(os.stat(base, dir_fd=folder, follow_symlinks=how % 2 == 0))
        finally:
            os.close(folder)

    def do_at_rename(self, name: str, how: int, to: str) -> Any:
        folder, base = self.at(name)
        try:
            os.rename(base, self.path(to, 0), src_dir_fd=folder)
            return "ok"
        finally:
            os.close(folder)

    def do_at_unlink(self, name: str, how: int) -> Any:
        folder, base = self.at(name)
        try:
            os.unlink(base, dir_fd=folder)
            return "ok"
        finally:
            os.close(folder)

    # Changing
    def do_write(self, name: str, how: int, mode: str, count: int, seed: int) -> Any:
        with open(self.path(name, how), mode) as file:
            if "r" in mode:
                file.seek(min(10, count))
            return {"wrote": file.write(random.Random(seed).randbytes(count))}

    def do_write_again(self, name: str, how: int, count: int, seed: int) -> Any:
        """By the name of a descriptor that was opened for reading."""
        fd = os.open(self.path(name, how), os.O_RDONLY)
        try:
            by_name = f"/{'dev/fd' if how % 2 else 'proc/self/fd'}/{fd}"
            stat = self.shown(os.stat(by_name))
            with open(by_name, "ab") as file:
                file.write(random.Random(seed).randbytes(count))
            return {"stat": stat, "now": self.do_read(name, how)}
        finally:
            os.close(fd)

    def do_outside(self, what: str, seed: int) -> Any:
        """A file outside of the data folders, that a link in them leads to."""
        outside = self.root + "_outside"
        if what == "w":
            with open(outside, "r+b") as file:
                file.write(random.Random(seed).randbytes(100))
        elif what == "rename":
            with open(outside + "_new", "wb") as file:
                file.write(random.Random(seed).randbytes(200))
            os.rename(outside + "_new", outside)
        return [self.do_read("link_outside", 0), self.shown(os.stat(self.path("link_outside", 0)))]

    def do_truncate(self, name: str, how: int, size: int) -> Any:
        os.truncate(self.path(name, how), size)
        return "ok"

    def do_rename(self, name: str, how: int, to: str) -> Any:
        os.rename(self.path(name, how), self.path(to, 0))
        return "ok"

    def do_move_folder(self, name: str, to: str) -> Any:
        os.rename(self.path(name, 0), self.path(to, 0))
        return "ok"

    def do_unlink(self, name: str, how: int) -> Any:
        os.unlink(self.path(name, how))
        return "ok"

    def do_link(self, name: str, how: int, to: str) -> Any:
        os.link(self.path(name, how), self.path(to, 0))
        return "ok"

    def do_symlink(self, name: str, to: str) -> Any:
        os.symlink(os.path.join(self.root, name), self.path(to, 0))
        return "ok"

    def do_mkdir(self, name: str, how: int) -> Any:
        os.mkdir(self.path(name, how), 0o755)
        return "ok"

    def do_rmdir(self, name: str, how: int) -> Any:
        os.rmdir(self.path(name, how))
        return "ok"

    def do_chmod(self, name: str, how: int, mode: int) -> Any:
        os.chmod(self.path(name, how), mode)
        return "ok"

    def do_utime(self, name: str, how: int, seconds: int) -> Any:
        os.utime(self.path(name, how), (OLD + seconds, OLD + seconds))
        return "ok"

    def do_setxattr(self, name: str, how: int) -> Any:
        os.setxattr(self.path(name, how), "user.fuzz", b"1")
        return "ok"

    def do_chdir(self, name: str) -> Any:
        os.chdir(self.path(name, 0))
        return os.path.relpath(os.getcwd(), os.path.realpath(self.root))


def _sum(data: bytes) -> str:
    import zlib

    return f"{len(data)}:{zlib.crc32(data):08x}"


def serve(root: str, into: int, out: int) -> None:
    worker = Worker(root)
    with os.fdopen(into) as requests, os.fdopen(out, "w") as answers:
        for line in requests:
            op, args = json.loads(line)
            if op == "end":
                return
            print(json.dumps(worker.call(op, args)), file=answers, flush=True)


class _Model:
    """Which descriptors for reading stand for a file that was changed after they were opened.

    Told by asking the file system itself which file a name leads to, before each change.
    """

    def __init__(self) -> None:
        self.reading: dict[tuple[int, int], int] = {}  # (worker, slot) -> inode
        self.stale: set[tuple[int, int]] = set()
        self.moved: set[tuple[int, int]] = set()  # a folder above has another name now

    def changed(self, inode: int | None) -> None:
        self.stale |= {key for key, held in self.reading.items() if held == inode}


class Driver:
    def __init__(self, root: str, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed + 1_000_000)
        self.model = _Model()
        self.workers = []
        for _ in range(WORKERS):
            ask_in, ask_out = os.pipe()
            answer_in, answer_out = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(ask_out)
                os.close(answer_in)
                try:
                    serve(root, ask_in, answer_out)
                finally:
                    os._exit(0)
            os.close(ask_in)
            os.close(answer_out)
            self.workers.append((child, os.fdopen(ask_out, "w"), os.fdopen(answer_in)))

    def names(self) -> list[str]:
        """What is there, and what was there once."""
        names = [f"f{i}" for i in range(FILES)] + ["new0", "new1", "link_maybe_dangling"]
        folders = ["", "a/", "b/", "a/deep/", "link_folder/"]
        found = []
        for base, _, files in os.walk(self.root):
            found += [os.path.relpath(os.path.join(base, f), self.root) for f in files]
        found.sort()
        if found and self.rng.random() < 0.9:
            return found
        return [folder + name for folder in folders for name in names]

    def pick(self) -> tuple[str, int]:
        return self.rng.choice(self.names()), self.rng.randrange(4)

    def inode(self, name: str) -> int | None:
        try:
            return os.stat(os.path.join(self.root, name)).st_ino
        except OSError:
            return None

    def ask(self, worker: int, op: str, args: list[Any]) -> Any:
        _, out, into = self.workers[worker]
        print(json.dumps([op, args]), file=out, flush=True)
        return json.loads(into.readline())

    def step(self) -> Any:
        rng, model = self.rng, self.model
        worker = rng.randrange(WORKERS)
        slot = rng.randrange(4)
        name, how = self.pick()
        to, _ = self.pick()
        if rng.random() < 0.3:
            to = rng.choice(["new0", "a/new1", "b/new2", "a/deep/new3"])
        op = rng.choices(
            [
                "read", "text", "map", "sendfile", "open", "fd_read", "fd_pread", "fd_stat",
                "fd_dup", "fd_flags", "fd_write", "fd_truncate", "fd_chmod", "fd_close",
                "child_read", "stat", "lstat", "access", "list", "readlink", "xattrs", "write",
                "truncate", "rename", "unlink", "link", "symlink", "mkdir", "rmdir", "chmod",
                "utime", "setxattr", "chdir", "at_read", "at_stat", "at_rename", "at_unlink",
                "write_again", "move_folder", "outside",
            ],
            [
                12, 4, 4, 2, 12, 6, 4, 6,
                3, 2, 2, 1, 1, 3,
                2, 8, 4, 3, 3, 2, 1, 5,
                2, 4, 2, 1, 1, 1, 1, 2,
                2, 1, 1, 5, 4, 1, 1,
                2, 1, 2,
            ],
        )[0]  # fmt: skip
        args: list[Any] = [name, how]
        key = (worker, slot)
        if op.startswith("fd_") or op == "child_read":
            if key in model.stale and op not in ("fd_close", "fd_flags"):
                return None
            if key in model.moved and op == "fd_chmod":
                return None
            args = [slot]
            if op == "fd_read":
                args += [rng.choice([1, 100, 10_000])]
            elif op == "fd_pread":
                args += [rng.choice([1, 100, 10_000]), rng.choice([0, 50, 4096])]
            elif op == "fd_dup":
                args += [rng.randrange(4)]
            elif op == "fd_write":
                args += [rng.choice([1, 200]), rng.randrange(1000)]
            elif op == "fd_truncate":
                args += [rng.choice([0, 10, 6000])]
            elif op == "fd_chmod":
                args += [rng.choice([0o600, 0o644])]
            inode = model.reading.get(key)
            if op in ("fd_write", "fd_truncate", "fd_chmod"):
                answer = self.ask(worker, op, args)
                model.changed(inode)
                return [op, args, answer]
            if op == "fd_dup" and inode is not None and args[1] != slot:
                model.reading[worker, args[1]] = inode
                model.stale.discard((worker, args[1]))
                if key in model.moved:
                    model.moved.add((worker, args[1]))
            elif op == "fd_close":
                model.reading.pop(key, None)
                model.stale.discard(key)
            return [op, args, self.ask(worker, op, args)]
        if op == "open":
            flags = rng.choice(
                [os.O_RDONLY] * 8
                + [
                    os.O_RDONLY | os.O_NOFOLLOW,
                    os.O_RDONLY | os.O_NONBLOCK,
                    os.O_RDONLY | os.O_DIRECTORY,
                    os.O_RDWR,
                    os.O_WRONLY | os.O_APPEND,
                    os.O_RDWR | os.O_CREAT,
                    os.O_RDWR | os.O_CREAT | os.O_EXCL,
                    os.O_WRONLY | os.O_TRUNC,
                    os.O_RDONLY | os.O_CREAT,
                    os.O_RDONLY | os.O_TRUNC,
                    os.O_PATH,
                ]
            )
            before = self.inode(name)
            answer = self.ask(worker, op, [slot, name, how, flags])
            if flags & os.O_TRUNC:
                model.changed(before)
            if isinstance(answer, dict) and "same" in answer:
                model.stale.discard(key)
                model.moved.discard(key)
                model.reading[key] = self.inode(name) or -1
            return [op, [slot, name, how, flags], answer]
        if op == "sendfile":
            args += [to]
        elif op == "access":
            args += [rng.choice([os.F_OK, os.R_OK, os.W_OK, os.X_OK])]
        elif op == "write":
            args += [rng.choice(["wb", "ab", "r+b", "xb"]), rng.choice([0, 10, 9000])]
            args += [rng.randrange(1000)]
        elif op == "write_again":
            args += [rng.choice([0, 10, 9000]), rng.randrange(1000)]
        elif op == "move_folder":
            args = list(rng.choice([("a", "c"), ("c", "a"), ("a/deep", "b/deep"), ("b/deep", "c")]))
        elif op == "outside":
            args = [rng.choice(["r", "r", "w", "rename"]), rng.randrange(1000)]
        elif op == "truncate":
            args += [rng.choice([0, 10, 6000])]
        elif op in ("rename", "link", "at_rename"):
            args += [to]
        elif op == "symlink":
            args = [name, to]
        elif op == "chmod":
            args += [rng.choice([0o600, 0o644, 0o400])]
        elif op == "utime":
            args += [rng.randrange(1000)]
        elif op == "chdir":
            args = [rng.choice(["", "a", "b", "link_folder"])]
        elif op in ("list", "mkdir", "rmdir") and rng.random() < 0.7:
            args = [rng.choice(["", "a", "b", "a/deep", "c", "link_folder"]), how]
            if op != "list":
                args = [rng.choice(["c", "c/d", "b"]), how]
        touched = [self.inode(name), self.inode(to)]
        answer = self.ask(worker, op, args)
        if op in CHANGES:
            for inode in touched:
                model.changed(inode)
        elif op == "sendfile":
            model.changed(touched[1])
        elif op == "move_folder":
            model.moved |= set(model.reading)
        return [op, args, answer]

    def close(self) -> None:
        for child, out, into in self.workers:
            print(json.dumps(["end", []]), file=out, flush=True)
            out.close()
            into.close()
            os.waitpid(child, 0)


def final_state(root: str) -> list[Any]:
    """The whole tree at the end, read anew."""
    worker = Worker(root)
    found = []
    for base, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files + folders):
            path = os.path.relpath(os.path.join(base, name), root)
            st = worker.shown(os.lstat(os.path.join(root, path)))
            found.append([path, st, worker.call("read", [path, 0])])
    return sorted(found)


def main() -> None:
    root, seed, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if calls == 0:
        make_tree(root, seed)
        return
    os.umask(0o022)
    driver = Driver(root, seed)
    for _ in range(calls):
        said = driver.step()
        if said is not None:
            print(json.dumps(said))
    driver.close()
    print(json.dumps(final_state(root)))


if __name__ == "__main__":
    main()
