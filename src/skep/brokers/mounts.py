"""Which kind of file system a folder is on, and when a file in it changes (Linux; elsewhere unknown)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_IN_MODIFY = 0x2


def file_system_of(folder: Path, table: str = "/proc/self/mounts") -> str:
    """The type of the file system, such as "ext4", "nfs4" or "fuse.sshfs"; "" where that cannot be told."""
    try:
        lines = Path(table).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real = folder.resolve()
    best, kind = -1, ""
    for line in lines:
        _, point, found, *_ = line.split(" ")
        mounted = Path(point.replace("\\040", " "))
        if real.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), found
    return kind


class FileWatch:
    """A descriptor that becomes readable when a file is written to; None where there is no inotify."""

    def __init__(self, path: str) -> None:
        self.fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.fd = _watch(path)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self.fd is not None:
                os.read(self.fd, 65536)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _watch(path: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return fd
