"""The URL of an engine, taken apart."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, unquote, urlsplit

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
    """`url` without its passwords, for messages and logs: its own, and those of its options."""
    parts = urlsplit(url)
    for name, value in parse_qsl(parts.query):
        if name == "password":
            url = url.replace(f"password={quote(value, safe='')}", "password=***")
            url = url.replace(f"password={value}", "password=***")
        elif "://" in value and (inner := masked(value)) != value:
            url = url.replace(value, inner).replace(quote(value, safe=""), quote(inner, safe="*"))
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)
