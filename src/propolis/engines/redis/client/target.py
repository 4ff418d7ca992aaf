"""Where Redis servers are and how to speak to them, as a URL has it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address

from propolis.core.duration import duration
from propolis.engines.address import Address, Host
from propolis.errors import BadSetting

PORT = 6379
SENTINEL_PORT = 26379

Place = tuple[str, int] | str  # a host and a port, or the path of a socket


class Layout(Enum):
    """Who has the keys: one server, the master that sentinels name, or several masters."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_LAYOUTS = {
    "redis": Layout.SINGLE,
    "rediss": Layout.SINGLE,
    "redis+unix": Layout.SINGLE,
    "redis+sentinel": Layout.SENTINEL,
    "rediss+sentinel": Layout.SENTINEL,
    "redis+cluster": Layout.CLUSTER,
    "rediss+cluster": Layout.CLUSTER,
}
SCHEMES = tuple(_LAYOUTS)


@dataclass(frozen=True, slots=True)
class Login:
    user: str | None = None
    password: str | None = None

    def command(self) -> tuple[str, ...] | None:
        """AUTH as this server wants it; None where no login is needed."""
        if self.password is None:
            return None
        return ("AUTH", self.password) if self.user is None else ("AUTH", self.user, self.password)

    def __repr__(self) -> str:
        return f"Login({self.user!r})"  # a password is never shown


@dataclass(frozen=True, slots=True)
class Tls:
    """The options have the names that other clients of Redis gave them."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True
    check_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        """`BadSetting` if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_certs)
            if self.certfile is not None:
                context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            raise BadSetting(f"the certificates given in the URL cannot be used: {error}") from error
        context.check_hostname = self.verify and self.check_hostname
        if not self.verify:
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True)
class Target:
    """Everything that a link needs to know.  Times are in seconds."""

    layout: Layout
    places: tuple[Place, ...]
    shown: str
    db: int = 0
    login: Login = Login()
    master: str = ""
    sentinel_login: Login = Login()
    tls: Tls | None = None
    patience: float = 10.0
    connect_within: float = 3.0
    in_flight: int = 1000
    copies: int = 0
    copied_within: float = 1.0


OPTIONS = (
    "connect_within",
    "copied_within",
    "copies",
    "db",
    "in_flight",
    "patience",
    "sentinel_password",
    "sentinel_username",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)


def target_of(address: Address, *, own: tuple[str, ...] = ()) -> Target:
    """The target that the URL describes; `own` are the options that the engine reads itself.

    `redis://user:password@host:port/db`, `rediss://` with TLS, `redis+unix:///path?db=1`,
    `redis+sentinel://host:port,host:port/name-of-the-master/db` and `redis+cluster://host:port,host:port`.
    `BadSetting` tells what is wrong with it.
    """
    address.reject_unknown(*sorted((*OPTIONS, *own)))
    if address.scheme not in _LAYOUTS:
        raise BadSetting(f"{address.scheme}:// is no Redis: write one of {', '.join(SCHEMES)}")
    layout = _LAYOUTS[address.scheme]
    options = address.options
    master, db = _path_of(address, layout)
    if layout is Layout.CLUSTER and db:
        raise BadSetting("a cluster has only database 0: leave the number out")
    if address.scheme == "redis+unix":
        places: tuple[Place, ...] = (address.path,)
    else:
        places = _places(address.hosts, SENTINEL_PORT if layout is Layout.SENTINEL else PORT)
    copied_within, patience = _seconds(options, "copied_within", "1s"), _seconds(options, "patience", "10s")
    if copied_within >= patience:
        raise BadSetting(f"copied_within ({copied_within} s) must be shorter than patience ({patience} s)")
    return Target(
        layout,
        places,
        shown=address.shown,
        db=db,
        login=Login(address.user, address.password),
        master=master,
        sentinel_login=Login(options.get("sentinel_username"), options.get("sentinel_password")),
        tls=_tls(address),
        patience=patience,
        connect_within=_seconds(options, "connect_within", "3s"),
        in_flight=_number(options, "in_flight", 1000, least=1),
        copies=_number(options, "copies", 0),
        copied_within=copied_within,
    )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _places(hosts: tuple[Host, ...], default: int) -> tuple[Place, ...]:
    return tuple((name or "localhost", port or default) for name, port in hosts or (("", None),))


def _path_of(address: Address, layout: Layout) -> tuple[str, int]:
    """The name of the master, where there are sentinels, and the number of the database."""
    master, number = "", ""
    if address.scheme != "redis+unix":
        parts = [part for part in address.path.split("/") if part]
        if layout is Layout.SENTINEL:
            if not parts:
                raise BadSetting("name the master: redis+sentinel://host:26379/mymaster")
            master = parts.pop(0)
        number = "/".join(parts)
    option = address.options.get("db", number or "0")
    if number and number != option:
        raise BadSetting(f"the URL names database {number!r} and db={option!r}: leave one of them out")
    number = option
    if not number.isdecimal():
        raise BadSetting(f"{number!r} is no number of a database: write redis://host:{PORT}/0")
    return master, int(number)


def _tls(address: Address) -> Tls | None:
    options = address.options
    if not address.scheme.startswith("rediss"):
        for name in options:
            if name.startswith("ssl_"):
                raise BadSetting(f"{name} has no effect with {address.scheme}://: write rediss://")
        return None
    checks = options.get("ssl_cert_reqs", "required")
    if checks not in ("required", "none"):
        raise BadSetting(f"ssl_cert_reqs={checks!r}: write required or none")
    return Tls(
        ca_certs=options.get("ssl_ca_certs"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        verify=checks == "required",
        check_hostname=_flag(options, "ssl_check_hostname"),
    )


def _flag(options: dict[str, str], name: str) -> bool:
    value = options.get(name, "true").lower()
    if value not in ("true", "false"):
        raise BadSetting(f"{name}={value!r}: write true or false")
    return value == "true"


def _seconds(options: dict[str, str], name: str, default: str) -> float:
    seconds = duration(options.get(name, default)).total_seconds()
    if seconds <= 0:
        raise BadSetting(f"{name} must be longer than nothing")
    return seconds


def _number(options: dict[str, str], name: str, default: int, *, least: int = 0) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise BadSetting(f"{name}={text!r}: write a whole number from {least} on")
    return int(text)
