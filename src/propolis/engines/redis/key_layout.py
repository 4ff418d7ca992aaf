"""The number of the key layout, by which old and new code see whether they can share what is stored.

The key holds `<layout>`, or `<layout> <oldest>` where code of older layouts can go on beside it: a layout
that only adds keys or fields keeps OLDEST as it is, any other sets it to its own number.
"""

from __future__ import annotations

from collections.abc import Sequence

from propolis.engines.redis.client.link import Link
from propolis.engines.redis.scripts import load_layout
from propolis.errors import EngineError, StorageNotReady

LAYOUT, OLDEST = 1, 1

_layout = load_layout()


async def agree_on_layout(link: Link, keys: Sequence[bytes], prefix: str, *, looks: bool) -> None:
    """Raise what is stored to our layout, where it is older and ours only adds; refuse what we cannot share.

    Whoever only looks changes nothing, and wants something to be there.
    """
    found = await link.command("GET", f"{prefix}layout", reads=True)
    if found is None and looks:
        raise StorageNotReady(link.target.shown, f"nothing of propolis is under {prefix}")
    while needs_ours(found, f"{link.target.shown}: what is under {prefix}") and not looks:
        # Not SET: code with a later layout may have been here since.
        found = await link.call(_layout, keys, [found or b"", _stored()], reads=True)


def needs_ours(found: bytes | None, what: str) -> bool:
    """Is this layout to be replaced by ours?  `EngineError` where we cannot live with it."""
    if found is None:
        return True
    numbers = found.decode(errors="replace").split(" ")
    if len(numbers) > 2 or not all(number.isdecimal() and number.isascii() for number in numbers):
        raise EngineError(
            f"{what} has layout {found.decode(errors='replace')!a}, which is none: use another prefix, or "
            f"restore the key `layout` from a backup"
        )
    layout, oldest = int(numbers[0]), int(numbers[-1])
    if oldest > LAYOUT:
        raise EngineError(
            f"{what} has layout {layout}, which code of layout {oldest} or later can use, and this propolis "
            f"knows {LAYOUT}: upgrade propolis, or use another prefix"
        )
    if layout < OLDEST:
        raise EngineError(
            f"{what} has layout {layout}, and this propolis can use {OLDEST} or later: let workers of the "
            f"version that wrote it finish the jobs, or use another prefix"
        )
    return layout < LAYOUT


def _stored() -> bytes:
    return b"%d" % LAYOUT if LAYOUT == OLDEST else b"%d %d" % (LAYOUT, OLDEST)
