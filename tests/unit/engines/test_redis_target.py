"""What the URL of a Redis says."""

from __future__ import annotations

import ssl

import pytest

from propolis.engines.address import Address
from propolis.engines.redis.client.target import Layout, Login, Tls, target_of
from propolis.errors import BadSetting


@pytest.mark.parametrize(
    ("url", "places", "db"),
    [
        ("redis://", (("localhost", 6379),), 0),
        ("redis://box", (("box", 6379),), 0),
        ("redis://box:7000/3", (("box", 7000),), 3),
        ("redis://box?db=4", (("box", 6379),), 4),
        ("redis://box/4?db=4", (("box", 6379),), 4),
        ("redis://[::1]:7000", (("::1", 7000),), 0),
        ("redis://[::1]/2", (("::1", 6379),), 2),
        ("redis+unix:///run/redis.sock?db=2", ("/run/redis.sock",), 2),
    ],
)
def test_a_url_names_a_place_and_a_database(url: str, places: object, db: int) -> None:
    target = target_of(Address(url))
    assert (target.layout, target.places, target.db, target.tls) == (Layout.SINGLE, places, db, None)


def test_sentinels_and_the_name_of_the_master_are_in_the_url() -> None:
    target = target_of(
        Address("redis+sentinel://bee:pw@a:1,b,c:3/mymaster/2?sentinel_username=s&sentinel_password=t")
    )

    assert target.layout is Layout.SENTINEL
    assert target.places == (("a", 1), ("b", 26379), ("c", 3))
    assert (target.master, target.db) == ("mymaster", 2)
    assert (target.login, target.sentinel_login) == (Login("bee", "pw"), Login("s", "t"))


def test_a_cluster_is_named_by_some_of_its_nodes() -> None:
    target = target_of(Address("rediss+cluster://a:1,b:2"))
    assert (target.layout, target.places) == (Layout.CLUSTER, (("a", 1), ("b", 2)))
    assert target.tls == Tls()


def test_times_and_numbers_are_options() -> None:
    target = target_of(
        Address("redis://?patience=5s&connect_within=500ms&in_flight=7&copies=2&copied_within=100ms")
    )
    assert (target.patience, target.connect_within, target.in_flight) == (5.0, 0.5, 7)
    assert (target.copies, target.copied_within) == (2, 0.1)


@pytest.mark.parametrize(
    ("url", "login", "command"),
    [
        ("redis://box", Login(), None),
        ("redis://:pw@box", Login(None, "pw"), ("AUTH", "pw")),
        ("redis://bee:p%40w%2F@box", Login("bee", "p@w/"), ("AUTH", "bee", "p@w/")),
        ("redis://:@box", Login(None, ""), ("AUTH", "")),
    ],
)
def test_a_login_is_in_the_url(url: str, login: Login, command: object) -> None:
    target = target_of(Address(url))
    assert target.login == login
    assert target.login.command() == command


def test_no_password_is_ever_shown() -> None:
    target = target_of(Address("redis+sentinel://bee:secret@a/m?sentinel_password=secret"))
    assert "secret" not in repr(target)
    assert target.shown == "redis+sentinel://bee:***@a/m?sentinel_password=***"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://box?patiense=5s", "patiense"),
        ("redis://box:port", "no host and port"),
        ("redis://box:99999", "no host and port"),
        ("redis://box/mail", "number of a database"),
        ("redis+sentinel://box", "name the master"),
        ("redis+cluster://box/1", "only database 0"),
        ("redis://box?ssl_ca_certs=/x", "rediss"),
        ("rediss://box?ssl_cert_reqs=maybe", "required or none"),
        ("rediss://box?ssl_check_hostname=1", "true or false"),
        ("redis://box?patience=soon", "duration"),
        ("redis://box?patience=0s", "longer than nothing"),
        ("redis://box?in_flight=0", "whole number"),
        ("redis://box?copies=-1", "whole number"),
        ("redis://box?patience=1s&copied_within=2s", "shorter"),
        ("redis://box/0?db=3", "leave one of them out"),
    ],
)
def test_what_is_wrong_with_a_url_is_told(url: str, reason: str) -> None:
    with pytest.raises(BadSetting, match=reason):
        target_of(Address(url))


def test_the_engine_has_options_of_its_own() -> None:
    assert target_of(Address("redis://box?prefix=x"), own=("prefix",)).shown == "redis://box?prefix=x"


def test_tls_checks_everything_unless_told_otherwise() -> None:
    context = Tls().context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    context = Tls(check_hostname=False).context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)
    context = Tls(verify=False).context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    with pytest.raises(BadSetting, match="certificates"):
        Tls(ca_certs="/no/such/file").context()
