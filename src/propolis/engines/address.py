"""The URL of an engine, taken apart; and what of it may be shown.

A URL holds passwords, so nothing of it is shown but what is known to be safe: its scheme, its user beside a
password, its hosts, its path, and the options named in `SAFE`.  Whatever can be read in two ways may be a
piece of a password, and is refused: then only the scheme is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from propolis.engines.table import ENGINES
from propolis.errors import BadSetting

Host = tuple[str, int | None]  # a name, which may be empty, and a port

HIDDEN = "***"

# Options whose values are shown.
SAFE = frozenset(
    {
        "application_name",
        "connect_within",
        "copied_within",
        "copies",
        "database",
        "db",
        "dbname",
        "host",
        "in_flight",
        "migrate",
        "partitions",
        "patience",
        "port",
        "prefix",
        "prepare",
        "schema",
        "shards",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "ssl_max_protocol_version",
        "ssl_min_protocol_version",
        "sslmode",
        "sslnegotiation",
        "synchronous",
        "target_session_attrs",
        "tls",
        "transactions",
        "unsafe",
        "user",
    }
)
# Options whose values are URLs, and are shown as such.
NESTED = frozenset({"listen"})
# Options of which only the name is shown; the name of any other may be a piece of the value before it.
NAMED = frozenset(
    {
        "options",
        "passfile",
        "password",
        "sentinel_password",
        "sentinel_username",
        "service",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslpassword",
        "sslrootcert",
    }
)
LONE_USERS = ("postgres", "postgresql")  # a user may well have no password, and is shown
FILES = ("sqlite", "redis+unix")  # the path is that of a file, and may well hold an @

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,39})://(?P<authority>[^/?]*)(?P<path>/[^?]*)?(?:\?(?P<query>.*))?",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,39}://", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOST = re.compile(
    r"(?P<name>\[[0-9a-f:.]+(?:%[\w.-]+)?\]|(?:[\w.~-]|%[0-9a-f]{2})*)(?::(?P<port>[0-9]{1,5}))?",
    re.IGNORECASE,
)
_OPTION = re.compile(r"[a-z*][\w.*-]{0,63}", re.IGNORECASE)  # *, because what was shown may be shown again
_ADVICE = (
    "percent-encode the user, the password and the values of options (%23 for #, %25 for %, %26 for &, "
    "%2F for /, %3A for :, %3F for ?, %40 for @)"
)

# In a text of somebody else's.
_ENGINES = sorted({scheme.partition("+")[0] for scheme in ENGINES})
_URL_IN_TEXT = re.compile(
    r"(?P<url>[a-z0-9+.-]*[a-z][a-z0-9+.-]*://(?:\S+|[ \t]+\S*@\S*))(?P<more>[^\n]{0,500}@\S*)?",
    re.IGNORECASE,
)
_BEFORE = re.compile(rf"(.*?)((?:{'|'.join(_ENGINES)})(?:\+[a-z]+)?://.*)", re.IGNORECASE | re.DOTALL)
_LOGIN = re.compile(r"(://[^/\s:@]*):(?![0-9]{1,5}(?:[/?#]|$))\S+@")  # but not a port
_PUNCTUATION = ".,:;!?)]}>'\"`"


class Address:
    """A URL taken apart: what an engine needs to know of it.

    `BadSetting` says what is wrong with one that cannot be, and shows nothing of it but its scheme.
    """

    def __init__(self, url: str) -> None:
        found = _URL.fullmatch(_checked(url))
        if found is None:
            raise _unreadable(url, "a URL begins with its scheme, as in sqlite:///jobs.db or redis://host")
        login, at, hosts = found["authority"].rpartition("@")
        user, colon, password = login.partition(":")
        raw_path, query = found["path"] or "", found["query"] or ""
        self.url = url
        self.scheme = found["scheme"].lower()
        if "@" in raw_path and (self.scheme not in FILES or found["authority"]):
            raise _unreadable(url, f"there is an @ after the host: {_ADVICE}")
        self._raw_options = [_option(url, part) for part in query.split("&") if part]
        try:
            self.user = _decoded(user) if at and user else None
            self.password = _decoded(password) if colon else None
            self.options = {name: _decoded(raw, plus=True) for name, raw in self._raw_options}
        except UnicodeError:
            raise _unreadable(url, f"it is no UTF-8: {_ADVICE}") from None
        self.hosts = tuple(_host(url, each) for each in hosts.split(",")) if hosts else ()
        self.path = unquote(raw_path)
        shown = "&".join(map(self._shown_option, self._raw_options))
        self.shown = f"{self.scheme}://{self._shown_login()}{hosts}{raw_path}" + (
            f"?{shown}" if shown else ""
        )

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def reject_unknown(self, *known: str) -> None:
        """A misspelt option fails here, not silently."""
        before: list[str] = []
        for name in self.options:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise BadSetting(
                    f"{self.scheme} engines have no option {_named(name, before)}: they know {listed}"
                )
            before.append(name)

    def without_options(self, *names: str) -> str:
        """The same URL, with its password, but without these options."""
        before, _, _ = self.url.partition("?")
        kept = "&".join(f"{name}={raw}" for name, raw in self._raw_options if name not in names)
        return f"{before}?{kept}" if kept else before

    def with_option(self, name: str, value: str) -> str:
        """The same URL, with its password, and with this value of this option."""
        url = self.without_options(name)
        return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"

    def hide_secrets(self, text: str) -> str:
        """`text`, which may be a driver's, without anything that `shown` does not show."""
        secrets = [self.password or "", self.user or "" if self._hides_user else ""]
        for name, value in self.options.items():
            if name in NESTED:
                text = _hidden_nested(text, value)
            elif name not in SAFE:
                secrets.append(value)
        return hidden(text, secrets)

    @property
    def _hides_user(self) -> bool:
        """Alone, it may be a token, or a password whose colon was forgotten."""
        return not self.password and self.scheme not in LONE_USERS

    def _shown_login(self) -> str:
        if self.user is None and self.password is None:
            return ""
        user = HIDDEN if self.user and self._hides_user else quote(self.user or "", safe="*")
        return f"{user}@" if self.password is None else f"{user}:{HIDDEN}@"

    def _shown_option(self, option: tuple[str, str]) -> str:
        name, raw = option
        if name in SAFE:
            return f"{name}={raw}"
        if name in NESTED:
            return f"{name}={masked(self.options[name])}"
        return f"{name if name in NAMED else HIDDEN}={HIDDEN}"


def masked(url: str) -> str:
    """What of a URL may be shown in messages and logs; of one that cannot be read, its scheme."""
    try:
        return Address(url).shown
    except BadSetting:
        return _scheme_of(url)


def masked_text(text: str) -> str:
    """Somebody's text, as with the message of an error, without the passwords of the URLs in it."""
    return _URL_IN_TEXT.sub(_masked_match, text) if "://" in text else text


def hidden(text: str, secrets: Iterable[str]) -> str:
    """`text` without these secrets, however they are quoted in it.

    A short one may also be a piece of any word: only where it stands alone is it taken for the secret.
    """
    forms = {form for secret in secrets for form in _forms(secret)}
    for form in sorted(forms, key=len, reverse=True):
        pattern = re.escape(form)
        text = re.sub(pattern if len(form) > 3 else rf"(?<!\w){pattern}(?!\w)", HIDDEN, text)
    return text


# --- reading -----------------------------------------------------------------------------


def _checked(url: str) -> str:
    if _CONTROL.search(url):
        raise _unreadable(url, f"there is a line break or another control character in it: {_ADVICE}")
    if "#" in url:
        raise _unreadable(url, f"there is a # in it: {_ADVICE}")
    return url


def _unreadable(url: str, why: str) -> BadSetting:
    return BadSetting(f"the URL {_scheme_of(url)} cannot be read: {why}")


def _scheme_of(url: str) -> str:
    found = _SCHEME.match(url)
    return f"{found[0].lower() if found else ''}{HIDDEN}"


def _decoded(text: str, *, plus: bool = False) -> str:
    value = (unquote_plus if plus else unquote)(text, errors="strict")
    value.encode()  # what came from the environment may hold what cannot be sent
    return value


def _option(url: str, part: str) -> tuple[str, str]:
    name, equals, raw = part.partition("=")
    if not equals or not _OPTION.fullmatch(name):
        raise _unreadable(url, f"after the ? each option is name=value, with an & between them: {_ADVICE}")
    if "@" in raw and not (name in NESTED and "://" in raw):
        raise _unreadable(url, f"there is an @ after the host: {_ADVICE}")
    return name, raw


def _host(url: str, text: str) -> Host:
    found = _HOST.fullmatch(text)
    port = None if found is None or found["port"] is None else int(found["port"])
    if found is None or not text or port == 0 or (port or 0) > 65535:
        raise _unreadable(
            url, f"behind its scheme, user and password is no host and port: write host:port, and {_ADVICE}"
        )
    name = unquote(found["name"].removeprefix("[").removesuffix("]"))
    if not name.startswith("/") and not _resolvable(name):
        raise _unreadable(url, f"there is no name of a host in it: {_ADVICE}")
    return name, port


def _resolvable(name: str) -> bool:
    """Can it be asked for?  What could not makes an error of the codec, late."""
    try:
        labels = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError:
        return False
    return not name or all(0 < len(label) < 64 for label in labels.removesuffix(".").split("."))


def _named(name: str, before: list[str]) -> str:
    """An option by its name, unless that may be a piece of a value which holds a plain &."""
    if SAFE.issuperset(before):
        return repr(name)
    return f"number {len(before) + 1} (write & as %26 in the value of another)"


# --- showing -----------------------------------------------------------------------------


def _forms(secret: str) -> set[str]:
    written = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret), repr(secret)[1:-1]}
    return written - {""}


def _hidden_nested(text: str, url: str) -> str:
    try:
        return Address(url).hide_secrets(text)
    except BadSetting:
        return hidden(text, [url])


def _masked_match(found: re.Match[str]) -> str:
    url, more = found["url"], found["more"] or ""
    behind = _BEFORE.fullmatch(url)
    if behind is None:
        return _LOGIN.sub(rf"\1:{HIDDEN}@", url) + masked_text(more)
    return behind[1] + _masked_ours(behind[2], more)  # it may stand behind dots, a dash or a number


def _masked_ours(url: str, more: str) -> str:
    if url.rstrip(_PUNCTUATION) == _scheme_of(url):  # it was shown by us
        return url + masked_text(more)
    for end in (len(url), len(url.rstrip(_PUNCTUATION))):
        try:
            return Address(url[:end]).shown + url[end:] + masked_text(more)
        except BadSetting:
            continue
    return _scheme_of(url)  # and what is behind a space, up to an @, may be the rest of its password
