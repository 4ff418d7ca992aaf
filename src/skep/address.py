"""The URL of an engine, taken apart."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from skep.errors import BadSetting


class Address:
    """A URL taken apart: what an engine needs to know of it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.scheme = parts.scheme
        self.path = unquote(parts.path)
        self.options = dict(parse_qsl(parts.query, keep_blank_values=True))

    def reject_unknown(self, *known: str) -> None:
        """A misspelt option fails here, not silently."""
        for name in self.options:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise BadSetting(f"{self.scheme} engines have no option {name!r}: they know {listed}")


def masked(url: str) -> str:
    """`url` without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)
