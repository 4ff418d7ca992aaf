"""Which kind of file system a folder is on."""

from __future__ import annotations

from pathlib import Path


def file_system_of(folder: Path, table: str = "/proc/self/mounts") -> str:
    """The type of the file system, such as "ext4", "nfs4" or "fuse.sshfs"; "" where that is unknown."""
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
