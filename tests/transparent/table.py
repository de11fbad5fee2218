"""The table of files (src/files/table.h), which a service shares with programs in memory."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from pathlib import Path

PASSED_BY = 48  # FileTableHeader::passed_by
_HEADER_BYTES = 128
_QUESTION = "<IHHHHIQQ"  # files::Header
_MAGIC, _TABLE = 0x31594246, 12


def table_of(service: Path) -> mmap.mmap:
    """Asks the service at this socket for it, as programs do."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(str(service))
        connection.send(struct.pack(_QUESTION, _MAGIC, _TABLE, 0, 0, 0, 0, 0, 0))
        _, (fd,), _, _ = socket.recv_fds(connection, 64, 1)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)  # the parts that are in use
    finally:
        os.close(fd)


def opens_in(table: mmap.mmap) -> int:
    """How often programs opened a copy, also of files that have been changed since."""
    return sum(opens for *_, opens, _ in struct.iter_unpack("<QQIIQ", table[_HEADER_BYTES:]))
