"""No password of a URL is ever shown: not by errors and their tracebacks, commands, workers or logs."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from propolis import App
from propolis.bench.serving import served
from propolis.bench.target import BenchPlace
from propolis.cli import main
from propolis.engines import open_engine
from propolis.engines.address import masked_text
from propolis.errors import BadSetting, EngineError, PropolisError
from propolis.worker.process.log_lines import FORMAT, LogLines

PIECES = ("hunXQ", "XQter2")  # of every password here; what is between them may take a URL apart
PASSWORDS = [f"hunXQ{between}XQter2" for between in "#/[]+@%?&=:;, \\"] + ["hunXQ#/[]+@%?&=: XQter2"]
NOBODY = "127.0.0.1:1"
PLACES = {
    "postgresql": f"{NOBODY}/db",
    "redis": f"{NOBODY}/0",
    "rediss": f"{NOBODY}/0",
    "redis+cluster": f"{NOBODY},{NOBODY}",
    "redis+sentinel": f"{NOBODY}/mymaster",
    "redis+unix": "/nowhere/redis.sock",
}
OPTIONS = {
    "postgresql": ("password", "sslpassword", "passfile", "theirs"),
    "redis": ("password", "theirs"),
    "redis+sentinel": ("sentinel_password", "theirs"),
}

TASKS = """
import os
from propolis import App

app = App(os.environ["PROPOLIS_URL"])

@app.task
def work() -> None: ...
"""


def urls(scheme: str, password: str) -> list[str]:
    """With this password wherever one may be, written as it must be, and as it must not."""
    found = []
    for written in (quote(password, safe=""), password):
        found.append(f"{scheme}://me:{written}@{PLACES[scheme]}")
        found += [f"{scheme}://{PLACES[scheme]}?{name}={written}" for name in OPTIONS.get(scheme, ())]
        if scheme == "postgresql":
            found.append(f"{scheme}://{PLACES[scheme]}?listen={scheme}://me:{written}@{PLACES[scheme]}")
    return found


def assert_silent(text: str) -> None:
    for piece in PIECES:
        assert piece not in text


# --- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("scheme", PLACES)
async def test_an_error_about_a_url_is_ours_and_its_traceback_is_silent(scheme: str, password: str) -> None:
    for url in urls(scheme, password):
        with pytest.raises((BadSetting, EngineError)) as caught:
            await open_engine(url)
        assert_silent("".join(traceback.format_exception(caught.value)))
        assert_silent(repr(caught.value) + repr(vars(caught.value)))


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hunXQ@host:XQter2",
        "redis://me:hunXQ@[::1",
        "redis://me:hunXQ",
        "redis://me:hunXQ@a..b",
        "postgresql://me:hunXQ@host:XQter2/db",
        "postgresql://me:hunXQ@::1]/db",
        "postgresql://me:hunXQ@a,,b/db",
        "postgresql:///db?port=1x&password=hunXQ",
        "postgresql://me:hunXQ@127.0.0.1:1/db?sslmode=never",
        "postgresql://host/db?listen=redis://:hunXQ@host",
        "carrier-pigeon://me:hunXQ@roof",
        "hunXQ",
        "me:hunXQ@host",
        "",
    ],
)
async def test_a_url_that_makes_no_sense_is_an_error_of_ours(url: str) -> None:
    with pytest.raises(PropolisError) as caught:
        await open_engine(url)
    assert isinstance(caught.value, ValueError)
    assert_silent("".join(traceback.format_exception(caught.value)))


async def test_the_words_of_postgresql_are_shown_without_the_value_of_an_option(postgres_url: str) -> None:
    url = f"{postgres_url}?work_mem=hunXQ"
    with pytest.raises(BadSetting, match="work_mem") as caught:
        await open_engine(url)
    assert_silent("".join(traceback.format_exception(caught.value)))


@asynccontextmanager
async def quoting_server() -> AsyncIterator[int]:
    """It takes AUTH for a command that it does not know, and quotes what it was given, as Redis does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = [word.decode() for word in (await reader.read(1000)).split(b"\r\n")]
        quoted = " ".join(f"`{word[:9]}`" for word in words if PIECES[0] in word)
        error = f"-ERR unknown command `AUTH`, with args beginning with: {quoted}\r\n"
        writer.write(error.encode() * 3)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_server_of_redis_that_quotes_a_password_is_not_quoted(scheme: str) -> None:
    async with quoting_server() as port:
        url = f"{scheme}://me:hunXQter2@127.0.0.1:{port}"
        if scheme == "redis+sentinel":
            url += "/m?sentinel_password=hunXQter2"
        with pytest.raises(EngineError, match="unknown command `AUTH`") as caught:
            await open_engine(url)
    assert_silent("".join(traceback.format_exception(caught.value)))


def test_an_app_does_not_show_its_url() -> None:
    assert_silent(repr(App("redis://me:hunXQ@host")) + repr(BenchPlace("redis://me:hunXQ@host", "mail")))


# --- the command line --------------------------------------------------------------------


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("scheme", ["postgresql", "redis", "redis+sentinel"])
def test_commands_show_no_password(scheme: str, password: str) -> None:
    for url in urls(scheme, password):
        for command in (["queues", "--url", url], ["check", "--url", url], ["bench", url]):
            ended = CliRunner().invoke(main, command, env={"PROPOLIS_APP": "", "PROPOLIS_URL": ""})
            assert ended.exit_code in (1, 2), ended.output
            assert isinstance(ended.exception, SystemExit), ended.exception
            assert_silent(ended.output)


def test_what_is_given_in_the_wrong_place_is_not_quoted_with_its_password() -> None:
    for password in PASSWORDS:
        for command in (["queues"], ["enqueue"], []):
            ended = CliRunner().invoke(main, [*command, f"redis://me:{password}@host", "more", "even more"])
            assert ended.exit_code == 2
            assert_silent(ended.output)


def test_the_environment_is_read_with_the_same_care() -> None:
    env = {"PROPOLIS_APP": "", "PROPOLIS_URL": "redis://me:hunXQ/XQter2@host"}
    ended = CliRunner().invoke(main, ["top", "--once"], env=env)
    assert ended.exit_code == 2
    assert "percent-encode" in ended.output
    assert_silent(ended.output)


# --- workers -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", PLACES)
def test_a_worker_shows_no_password(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    for written in (quote(PASSWORDS[-1], safe=""), PASSWORDS[-1]):
        env = {**os.environ, "PROPOLIS_URL": f"{scheme}://me:{written}@{PLACES[scheme]}"}
        ended = subprocess.run(
            [sys.executable, "-m", "propolis", "worker", "tasks:app", "--log-level", "debug"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode in (1, 2)
        assert ended.stderr
        assert_silent(ended.stdout + ended.stderr)


def test_what_is_logged_is_silent_about_what_others_say() -> None:
    """A job may use a driver of its own, which quotes its URL."""
    try:
        try:
            raise OSError("no answer from redis://:hunXQ@host")
        except OSError as error:
            raise ValueError("postgresql://me:XQter2@host/db is not ready") from error
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "job %s raised", ("a",), raised)
    text = LogLines(FORMAT).format(record)
    assert "no answer from redis://:***@host" in text
    assert_silent(text.replace('raise OSError("no answer from redis://:hunXQ@host")', ""))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
async def test_the_arguments_of_a_process_hold_no_url(tmp_path: Path) -> None:
    """Every user of a machine can read them."""
    async with served(BenchPlace(f"sqlite:///{tmp_path}/hunXQ.db", "q"), 1, "serve") as worker:
        assert_silent(await asyncio.to_thread(Path(f"/proc/{worker.pid}/cmdline").read_text))


@pytest.mark.parametrize("given", ["argument", "option", "environment"])
def test_a_url_in_the_place_of_the_app_is_not_shown(tmp_path: Path, given: str) -> None:
    """Its scheme may be the name of a module that is there."""
    (tmp_path / "redis.py").write_text("")
    url = "redis://user:S3cr3tpw@127.0.0.1:1/0"
    arguments = {"argument": ["worker", url], "option": ["jobs", "list", "--app", url]}.get(given, ["worker"])
    python_path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": python_path}
    if given == "environment":
        environment["PROPOLIS_APP"] = url
    command = [sys.executable, "-m", "propolis", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode
    assert "S3cr3tpw" not in ran.stdout + ran.stderr
    assert "--url" in ran.stderr


@pytest.mark.parametrize(
    "text",
    [
        "connecting ...redis://user:S3cr3tpw@host/0",
        "[-redis://user:S3cr3tpw@host/0]",
        "2redis://user:S3cr3tpw@host/0",
        "connecting to...postgresql://host/db?password=S3cr3tpw",
        "redis:// user:S3cr3tpw@host",
    ],
)
def test_a_url_behind_punctuation_is_masked(text: str) -> None:
    assert "S3cr3tpw" not in masked_text(text)
