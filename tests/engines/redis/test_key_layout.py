"""Which code may share what is stored, by the number of its layout."""

from __future__ import annotations

import pytest

from propolis.engines import make_engine
from propolis.engines.redis import key_layout
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.scripts import load_layout
from propolis.errors import EngineError, StorageNotReady
from propolis.testing.engines.samples import a_job


@pytest.fixture
def url(valkey_url: str, prefix: str) -> str:
    return f"{valkey_url}?prefix={prefix}:"


async def open_redis(url: str, *, looks: bool = False) -> RedisEngine:
    engine = make_engine(url)
    assert isinstance(engine, RedisEngine)
    return await (engine.open_to_look() if looks else engine.open())


async def opened(url: str, layout: int, oldest: int, monkeypatch: pytest.MonkeyPatch) -> RedisEngine:
    """By code of this layout, which code from the oldest on can share."""
    monkeypatch.setattr(key_layout, "LAYOUT", layout)
    monkeypatch.setattr(key_layout, "OLDEST", oldest)
    return await open_redis(url)


async def test_the_first_who_writes_leaves_the_number_of_the_layout(
    url: str, link: RedisLink, prefix: str
) -> None:
    with pytest.raises(StorageNotReady, match="propolis init"):
        await open_redis(url, looks=True)
    assert await link.command("KEYS", f"{prefix}:*") == []
    await (await open_redis(url)).close()
    assert await link.command("GET", f"{prefix}:layout") == b"1"
    looker = await open_redis(url, looks=True)
    assert await looker.queues() == {}
    await looker.close()
    assert await link.command("KEYS", f"{prefix}:*") == [f"{prefix}:layout".encode()]


async def test_old_and_new_code_share_a_layout_that_only_adds(
    url: str, link: RedisLink, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await opened(url, 1, 1, monkeypatch)
    for layout in (2, 3):
        await (await opened(url, layout, 1, monkeypatch)).close()
        assert await link.command("GET", f"{prefix}:layout") == b"%d 1" % layout
    for layout in (2, 1):  # a rollback
        engine = await opened(url, layout, 1, monkeypatch)
        await engine.put([a_job()])
        await engine.close()
    assert (await old.queues())["default"].ready == 2
    await old.close()
    assert await link.command("GET", f"{prefix}:layout") == b"3 1"


async def test_whoever_only_looks_does_not_raise_the_layout(
    url: str, link: RedisLink, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await opened(url, 1, 1, monkeypatch)).close()
    monkeypatch.setattr(key_layout, "LAYOUT", 2)
    await (await open_redis(url, looks=True)).close()
    assert await link.command("GET", f"{prefix}:layout") == b"1"


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ("2", "layout 2, which code of layout 2 or later can use, and this propolis knows 1: upgrade"),
        ("7 5", "layout 7, which code of layout 5 or later can use, and this propolis knows 1: upgrade"),
        ("unheard of", "layout 'unheard of', which is none"),
        ("2 1 1", "layout '2 1 1', which is none"),
        ("", "layout '', which is none"),
    ],
)
async def test_a_layout_that_we_cannot_share_is_refused(
    url: str, link: RedisLink, prefix: str, stored: str, why: str
) -> None:
    """S1.18: and not misread, also not by who only looks."""
    await link.command("SET", f"{prefix}:layout", stored)
    for looks in (False, True):
        with pytest.raises(EngineError, match=why):
            await open_redis(url, looks=looks)
    assert await link.command("GET", f"{prefix}:layout") == stored.encode()
    await link.command("SET", f"{prefix}:layout", "1")
    await (await open_redis(url)).close()


async def test_a_layout_that_new_code_has_given_up_is_refused(
    url: str, link: RedisLink, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await opened(url, 4, 1, monkeypatch)).close()
    with pytest.raises(EngineError, match="layout 4, and this propolis can use 5 or later: let workers"):
        await opened(url, 5, 5, monkeypatch)
    assert await link.command("GET", f"{prefix}:layout") == b"4 1"


async def test_a_layout_that_was_raised_meanwhile_is_not_set_back(link: RedisLink, prefix: str) -> None:
    """Somebody else does so between our look and our write."""
    await link.command("SET", f"{prefix}:layout", "3 1")
    keys = [f"{prefix}:".encode()]
    assert await link.call(load_layout(), keys, [b"1", b"2 1"]) == b"3 1"
    assert await link.command("GET", f"{prefix}:layout") == b"3 1"
