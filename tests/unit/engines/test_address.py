"""A URL is taken apart once, and shown without its secrets."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from propolis.engines.address import Address, hidden, masked, masked_text
from propolis.errors import BadSetting


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory://"),
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        ("sqlite:////home/me@corp/jobs.db?synchronous=normal", "sqlite:////home/me@corp/jobs.db?synchronous=normal"),
        ("redis://:pa55@host:1/0", "redis://:***@host:1/0"),
        ("REDIS://:6379", "redis://:6379"),
        ("redis://pa55@host", "redis://***@host"),
        ("redis://pa55:@host", "redis://***:***@host"),
        ("redis+unix://me:pa55@/run/redis.sock", "redis+unix://me:***@/run/redis.sock"),
        ("redis+cluster://[::1]:1,b?prefix={shop}:&shards=16", "redis+cluster://[::1]:1,b?prefix={shop}:&shards=16"),
        ("redis+sentinel://a,b/m?sentinel_password=pa55&db=1", "redis+sentinel://a,b/m?sentinel_password=***&db=1"),
        ("postgresql://me:pa55@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://me:@host/db", "postgresql://me:***@host/db"),
        ("postgresql://m%20e:pa@5[5]@%2Frun/db", "postgresql://m%20e:***@%2Frun/db"),
        ("postgresql://h/d?user=me&password=pa55", "postgresql://h/d?user=me&password=***"),
        ("postgresql://h/d?sslmode=require&sslpassword=pa55", "postgresql://h/d?sslmode=require&sslpassword=***"),
        ("postgresql://h/d?password=pa&a55=1", "postgresql://h/d?password=***&***=***"),
        ("postgresql://h/d?listen=postgresql://me:pa55@h2/d", "postgresql://h/d?listen=postgresql://me:***@h2/d"),
        (
            "postgresql://h/d?listen=postgresql%3A%2F%2Fme%3Apa55%40h2%2Fd",
            "postgresql://h/d?listen=postgresql://me:***@h2/d",
        ),
        ("postgresql://h/d?listen=postgresql://me:pa/55@h2", "postgresql://h/d?listen=postgresql://***"),
    ],
)  # fmt: skip
def test_only_what_is_safe_is_shown(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert masked(shown) == shown
    assert masked_text(shown) == shown
    assert repr(Address(url)) == f"Address({shown!r})"


def test_a_url_is_taken_apart() -> None:
    address = Address("rediss+sentinel://be%20e:p%40%2Fw@a:1,[::1],c/m/2?sentinel_password=%26+%2B&db=")

    assert (address.scheme, address.user, address.password) == ("rediss+sentinel", "be e", "p@/w")
    assert address.hosts == (("a", 1), ("::1", None), ("c", None))
    assert (address.path, address.options) == ("/m/2", {"sentinel_password": "& +", "db": ""})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("pa55", "begins with its scheme"),
        ("me:pa55@host/db", "begins with its scheme"),
        ("", "begins with its scheme"),
        ("redis://:pa/55@host", "after the host: percent-encode"),
        ("redis://:1/pa55@host", "after the host: percent-encode"),
        ("redis+unix://:p/a55@/run/redis.sock", "after the host: percent-encode"),
        ("redis://:1?db=pa55@host", "after the host: percent-encode"),
        ("redis://:pa?55@host", "name=value"),
        ("redis://:1?pa55@host", "name=value"),
        ("redis://host?sentinel_password=pa&55", "name=value"),
        ("redis://:pa#55@host", "a # in it: percent-encode"),
        ("redis://me:pa55", "no host and port"),
        ("redis://me:5555555555", "no host and port"),
        ("redis://:pa55@host:0", "no host and port"),
        ("redis://:pa55@host:port", "no host and port"),
        ("redis://:pa55@[::1", "no host and port"),
        ("redis://:pa55@::1]", "no host and port"),
        ("redis://:pa55@a,,b", "no host and port"),
        ("redis://:pa55@a..b", "no name of a host"),
        ("redis://:pa55@" + "ä" * 70, "no name of a host"),
        ("redis://:pa55%FF@host", "no UTF-8"),
        ("redis://:pa55\udcff@host", "no UTF-8"),
        ("redis://:pa55@host\n", "line break"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused_without_its_secrets(url: str, why: str) -> None:
    with pytest.raises(BadSetting, match=why) as caught:
        Address(url)

    error_text = str(caught.value)
    assert not any(piece in error_text for piece in ("pa55", "pa/", "p/a", "55@", "555", "pa?", "pa#", "pa&"))
    assert caught.value.__cause__ is None
    assert masked(url) in ("***", "redis://***", "redis+unix://***")


def test_an_option_that_may_be_a_piece_of_a_password_is_not_named() -> None:
    with pytest.raises(BadSetting, match="no option 'patiense'"):
        Address("redis://h?db=1&patiense=5s").reject_unknown("db")
    with pytest.raises(BadSetting, match="no option number 2") as caught:
        Address("redis://h?sentinel_password=s3&cret=1").reject_unknown("sentinel_password")
    assert "cret" not in str(caught.value)


def test_a_drivers_words_are_shown_without_what_a_url_hides() -> None:
    address = Address(
        "postgresql://me:p%20w!x@h/d?geqo=hunter2&sslmode=require&listen=postgresql://u:inner@h/d"
    )
    error_text = "bad 'p w!x', p%20w%21x, p+w%21x, \"hunter2\" and inner; require is known"
    assert address.hide_secrets(error_text) == "bad '***', ***, ***, \"***\" and ***; require is known"
    assert Address("redis://h").hide_secrets("as it was") == "as it was"
    assert hidden("127.0.0.1, not 1", ["1"]) == "127.0.0.***, not ***"
    assert hidden("11 of 12", ["1", ""]) == "11 of 12"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no answer from redis://u:hunter2@h:1/0.", "no answer from redis://u:***@h:1/0."),
        ("(redis://u:hunter2@h)", "(redis://u:***@h)"),
        ("'redis://localhost': away", "'redis://localhost': away"),
        ("redis://localhost: ask ann@example.org", "redis://localhost: ask ann@example.org"),
        ("redis://[::1] and redis://:p@h", "redis://[::1] and redis://:***@h"),
        ("unexpected (redis://:hun/ter2@h)", "unexpected (redis://***"),
        ("unexpected (redis://:hun ter2@h)", "unexpected (redis://***"),
        ("redis://***: write %40 for @", "redis://***: write %40 for @"),
        ("postgresql://h/d?password=hunter2 is away", "postgresql://h/d?password=*** is away"),
        ("https://example.org:80/a@b", "https://example.org:80/a@b"),
        ("https://ann:hun@ter/2@example.org/a", "https://ann:***@example.org/a"),
        ("nothing of the kind", "nothing of the kind"),
    ],
)  # fmt: skip
def test_the_urls_in_a_text_are_shown_likewise(text: str, shown: str) -> None:
    assert masked_text(text) == shown


# --- any password, anywhere --------------------------------------------------------------

NASTY = "#/[]+@%?& :;=,\\'\"*\t\n\x00ä\U0001f41d\udcff"
PIECES = ("hunter2", "S3CRET")  # of every password; what is between them may take a URL apart
between = st.text(st.one_of(st.sampled_from(NASTY), st.characters()), max_size=12)
passwords = st.builds(lambda text: f"{PIECES[0]}{text}{PIECES[1]}", between)
schemes = st.sampled_from(
    ["postgresql", "redis", "rediss", "redis+cluster", "redis+sentinel", "redis+unix", "sqlite", "theirs"]
)
options = st.one_of(
    st.sampled_from(["password", "passfile", "sslpassword", "sentinel_password", "theirs", "listen"]),
    st.from_regex(r"[a-z_]{1,9}pass", fullmatch=True),
)
ways = st.sampled_from([str, quote, lambda text: quote(text, safe="")])


def encodable(text: str) -> bool:
    return all(not 0xD800 <= ord(character) < 0xE000 for character in text)


def assert_hidden(url: str, password: str) -> None:
    texts = [masked(url)]
    if not re.search(r"\s", url) and not url.startswith("theirs:"):
        texts.append(masked_text(f"cannot reach {url}: it is away"))
    try:
        address = Address(url)
        address.reject_unknown("password", "sentinel_password", "sslpassword")
        texts.append(address.hide_secrets(f"{url} {password!r} {password}"))
    except BadSetting as error:
        texts.append(str(error))
    for text in texts:
        assert not [piece for piece in PIECES if piece in text], text


@given(schemes, passwords, ways)
def test_no_password_beside_a_user_is_ever_shown(scheme: str, password: str, way: object) -> None:
    assume(way is str or encodable(password))
    assert callable(way)
    logins = [f"me:{way(password)}", f":{way(password)}"]
    if ":" not in way(password) and scheme != "postgresql":  # else it is a user
        logins += [f"{way(password)}:", way(password)]
    for login in logins:
        assert_hidden(f"{scheme}://{login}@host:6379/0?db=1", password)


@given(schemes, options, passwords, ways)
def test_no_value_of_an_option_is_ever_shown(scheme: str, option: str, password: str, way: object) -> None:
    assume(way is str or encodable(password))
    assert callable(way)
    assert_hidden(f"{scheme}://me@host/0?db=1&{option}={way(password)}&schema=x", password)


@given(schemes, passwords)
def test_a_password_that_is_percent_encoded_arrives_as_it_is(scheme: str, password: str) -> None:
    assume(encodable(password))
    written = quote(password, safe="")
    address = Address(f"{scheme}://me:{written}@host?password={written}")
    assert (address.password, address.options["password"]) == (password, password)
