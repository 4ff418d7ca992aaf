"""All rules of an engine, however many there are."""

from __future__ import annotations

from collections.abc import AsyncIterator

from propolis.core.protocols import Rule, Rules

_PAGE = 1000


async def every_rule(engine: Rules) -> AsyncIterator[Rule]:
    """In the order of their kinds, scopes and names, page by page."""
    page = await engine.rules(limit=_PAGE)
    while page:
        for rule in page:
            yield rule
        page = await engine.rules(limit=_PAGE, after=page[-1]) if len(page) == _PAGE else []
