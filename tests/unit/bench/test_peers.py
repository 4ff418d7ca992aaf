"""The pure parts of benchmarks/peers.py, and its way with programs that fail.  No peer is run here."""

from __future__ import annotations

import json
import math
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from harness.catalogue import PEERS, Engine, Language, chosen
from harness.charts import Bar, Curve, bars, curves, dots
from harness.document import between_markers, section, write
from harness.environments import ADAPTERS, Environment, last_words, package_name, without_version
from harness.process import Adapter, StepFailed, ask
from harness.results import Results, Row, dump, read
from harness.sampling import sampled
from harness.statistics import Summary, percentile, ratio, summary
from harness.tables import by_drain, digits, notes, number, ratios, table, with_spread
from one_job import Cost, Profile
from one_job import table as table_of_parts

SVG = "{http://www.w3.org/2000/svg}"


def a_row(peer: str, *rates: float, language: str = "python") -> Row:
    row = Row(peer, language, version="1.2", settings="as it comes")
    for rate in rates:
        row.add("drain", {"rate": rate, "cpu_us": 5.0, "server_us": 4.0, "rss_mb": 40.0})
    return row


def some_results(*rows: Row) -> Results:
    return Results(
        engine="postgres",
        storage="PostgreSQL 18.6",
        storage_settings="fsync=on",
        date="2026-11-15 12:00 UTC",
        machine="2 cores",
        options={"jobs": 20_000, "backlog": 0, "repeat": 3},
        caveat="Others used the machine.",
        rows=list(rows),
    )


def a_program(tmp_path: Path, text: str) -> Environment:
    path = tmp_path / "adapter.py"
    path.write_text(text)
    return Environment((sys.executable, "-P", str(path)), {"PYTHONPATH": str(ADAPTERS.parent)}, {})


# Statistics.


def test_a_summary_tells_the_median_and_the_spread() -> None:
    assert summary([3.0, 1.0, 10.0]) == Summary(3.0, 1.0, 10.0, 3)


def test_what_has_no_number_is_left_out_of_a_summary() -> None:
    assert summary([math.nan, 2.0]) == Summary(2.0, 2.0, 2.0, 1)
    assert summary([math.nan]) is None
    assert summary([]) is None


def test_ratios_are_taken_turn_by_turn() -> None:
    assert ratio([10.0, 100.0, 30.0], [5.0, 50.0, 10.0]) == 2.0
    assert ratio([10.0, 30.0], [5.0]) == 4.0
    assert ratio([], [5.0]) is None


@pytest.mark.parametrize(("share", "value"), [(0, 1.0), (50, 50.0), (99, 99.0), (100, 100.0)])
def test_a_percentile_is_a_value_that_was_measured(share: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], share) == value


def test_a_percentile_of_few_values_is_the_largest_of_them() -> None:
    assert percentile([1.0, 2.0], 99) == 2.0
    assert math.isnan(percentile([], 50))


# Tables.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123_456.0, "123,000"),
        (1_234.0, "1,230"),
        (999.6, "1,000"),
        (123.4, "123"),
        (12.34, "12.3"),
        (0.123, "0.12"),
    ],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert digits(value) == text


def test_a_single_run_has_no_spread() -> None:
    assert with_spread(Summary(1000.0, 1000.0, 1000.0, 1)) == "**1,000**"
    assert with_spread(Summary(1000.0, 900.0, 1100.0, 3)) == "**1,000** (900–1,100)"
    assert number(None) == "–"


def test_the_fastest_drain_comes_first_and_a_failed_one_last() -> None:
    rows = [a_row("slow", 10.0), a_row("failed"), a_row("fast", 100.0)]
    assert [row.peer for row in by_drain(rows)] == ["fast", "slow", "failed"]


def test_drains_are_told_as_a_share_of_the_raw_loop() -> None:
    lines = table(
        some_results(a_row("raw loop", 1000.0), a_row("huey", 250.0), a_row("rq", 5.0))
    ).splitlines()
    assert [line.split(" | ")[4] for line in lines[2:]] == ["1.00", "0.25", "0.005"]


def test_a_step_that_failed_says_so_and_why() -> None:
    row = a_row("rq")
    row.failures["drain"] = "drain: stands still at 7 of 20,000"
    results = some_results(row)
    assert "| failed |" in table(results)
    assert "drain failed: drain: stands still at 7 of 20,000" in notes(results)


def test_a_peer_that_could_not_start_fails_in_every_column() -> None:
    row = Row("bullmq", "node")
    row.failures["start"] = "node and npm are not installed"
    assert table(some_results(row)).count("failed") == 5
    assert "node and npm are not installed" in notes(some_results(row))


def test_a_job_that_was_lost_in_one_of_several_turns_is_told() -> None:
    row = a_row("huey", 10.0)
    for unfinished in (0.0, 1.0, 0.0):
        row.add("crash", {"unfinished": unfinished, "twice": 0.0, "whole_after_s": math.nan})
    assert "| 1 / 0 |" in table(some_results(row))


def test_ratios_are_ours_to_theirs() -> None:
    results = some_results(
        a_row("propolis", 40_000.0), a_row("raw loop", 50_000.0), a_row("pgqueuer", 10_000.0)
    )
    assert ratios(results) == (
        "Drain of propolis: 0.8 × raw loop, 4 × pgqueuer.\n"
        "CPU of worker and server for a job, compared with propolis's: 1 × raw loop, 1 × pgqueuer."
    )


def test_without_our_own_drain_there_are_no_ratios() -> None:
    assert ratios(some_results(a_row("pgqueuer", 10_000.0))) == "propolis has no drain in this run."


# Charts.


def widths(svg: str) -> list[float]:
    return [float(bar.attrib["width"]) for bar in ElementTree.fromstring(svg).iter(f"{SVG}rect")]


def test_bars_are_as_long_as_their_values() -> None:
    one, other = widths(bars("t", "u", [Bar("a", 100.0, 100.0, 100.0), Bar("b", 50.0, 50.0, 50.0)]))
    assert one == pytest.approx(2 * other, abs=0.2)


def test_a_chart_escapes_what_it_is_given() -> None:
    chart = ElementTree.fromstring(bars("a < b & c", "u", [Bar("<x>", 1.0, 1.0, 1.0)]))
    assert "<x>" in [text.text for text in chart.iter(f"{SVG}text")]


def test_latencies_of_a_decade_apart_are_a_decade_apart() -> None:
    rows = [Bar("a", 1.0, 1.0, 10.0), Bar("b", 10.0, 10.0, 100.0)]
    chart = ElementTree.fromstring(dots("t", "u", rows))
    places = [float(dot.attrib["cx"]) for dot in chart.iter(f"{SVG}circle")]
    assert places[1] == pytest.approx(places[2])
    assert places[1] - places[0] == pytest.approx(places[3] - places[2])


def test_a_chart_of_nothing_is_still_a_picture() -> None:
    for chart in (bars("t", "u", []), dots("t", "u", [])):
        assert ElementTree.fromstring(chart).tag == f"{SVG}svg"


# The document.


def test_what_people_wrote_around_the_markers_stays() -> None:
    once = between_markers("# Head\n\nBefore.\n", "redis", "first")
    text = once.rstrip() + "\n\nAfter.\n"
    again = between_markers(text, "redis", "second")
    assert "first" not in again
    assert again == text.replace("first", "second")


def test_each_engine_has_markers_of_its_own() -> None:
    text = between_markers(between_markers("# Head\n", "redis", "R"), "sqlite", "S")
    assert between_markers(text, "redis", "new").count("S") == text.count("S")


def test_a_missing_end_marker_is_an_error_and_not_a_lost_document() -> None:
    text = between_markers("# Head\n", "redis", "R").replace("<!-- redis: end -->", "")
    with pytest.raises(ValueError, match="redis: end"):
        between_markers(text, "redis", "new")


def test_a_run_with_a_label_stands_beside_the_one_without(tmp_path: Path) -> None:
    plain, special = some_results(a_row("propolis", 10.0)), some_results(a_row("propolis", 20.0))
    special.label = "1,000,000 waiting"
    document = tmp_path / "benchmarks.md"
    files = {*write(plain, document), *write(special, document)}
    assert len(files) == 5
    assert "### PostgreSQL\n" in document.read_text()
    assert "### PostgreSQL, 1,000,000 waiting\n" in document.read_text()


def test_a_document_tells_date_machine_durability_and_the_caveat() -> None:
    text = section(some_results(a_row("propolis", 10.0)), "benchmarks")
    for fact in (
        "2026-11-15",
        "2 cores",
        "fsync=on",
        "Others used the machine.",
        "benchmarks/postgres-run.json",
    ):
        assert fact in text


def test_results_come_back_from_the_file_that_was_written(tmp_path: Path) -> None:
    row = a_row("huey", 10.0)
    row.add("crash", {"unfinished": 1.0, "whole_after_s": math.nan})
    results = some_results(row)
    dump(results, tmp_path / "run.json")
    found = read(tmp_path / "run.json")
    assert table(found) == table(results)
    assert found.rows[0].of("crash", "whole_after_s") is None


def test_a_document_is_written_with_its_charts_and_raw_results(tmp_path: Path) -> None:
    row = a_row("propolis", 10.0)
    row.add("latency", {"p50_ms": 1.0, "p99_ms": 2.0})
    written = write(some_results(row), tmp_path / "benchmarks.md")
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "benchmarks.md",
        "benchmarks/postgres-drain.svg",
        "benchmarks/postgres-latency.svg",
        "benchmarks/postgres-run.json",
    ]
    assert all(path.stat().st_size for path in written)


def test_without_latencies_there_is_no_chart_of_them(tmp_path: Path) -> None:
    written = write(some_results(a_row("propolis", 10.0)), tmp_path / "benchmarks.md")
    assert not [path for path in written if "latency" in path.name]
    assert "latency.svg" not in written[0].read_text()


# Peers, and programs that fail.


def test_every_peer_has_an_adapter() -> None:
    for peer in PEERS:
        ending = "mjs" if peer.language is Language.NODE else "py"
        assert (ADAPTERS / f"{peer.adapter}.{ending}").is_file(), peer.name


def test_each_engine_has_propolis_and_the_raw_loop() -> None:
    for engine in Engine:
        assert {"propolis", "raw loop"} <= {peer.name for peer in chosen([engine], [])}


def test_a_name_that_no_peer_has_is_an_error_with_the_names_there_are() -> None:
    with pytest.raises(LookupError, match=r"cellery.*celery"):
        chosen([Engine.REDIS], ["cellery"])


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("a[b,c]==1.0", "a"),
        ("a==1", "a"),
        ("bee-queue@2.0.0", "bee-queue"),
        ("@x/y@1", "@x/y"),
        ("redis", "redis"),
    ],
)
def test_packages_are_named_without_version_and_extras(package: str, name: str) -> None:
    assert package_name(package) == name
    assert "==" not in without_version(package)


def test_last_words_are_the_error_without_the_folders_of_a_machine() -> None:
    error_text = (
        'Traceback:\n  File "/a/x.py", line 3\nValueError: no /home/me/secret/file.db\n  at /a/y.js:3\n'
    )
    assert last_words(error_text) == "ValueError: no file.db"
    assert last_words("") == "it said nothing"


def test_a_program_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"about: ended with exit code 1: RuntimeError: no luck"):
        ask(a_program(tmp_path, "raise RuntimeError('no luck')"), "about", {}, within=30)


def test_a_program_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(StepFailed, match="not done before the deadline"):
        ask(a_program(tmp_path, "import threading; threading.Event().wait()"), "work", {}, within=0.5)
    assert time.monotonic() - began < 10


def test_nothing_told_is_lost_when_a_reader_stops_in_between(tmp_path: Path) -> None:
    text = "from adapters.protocol import emit\nfor number in range(50): emit(finished=number)"
    with Adapter(a_program(tmp_path, text), "work", {}) as adapter:
        deadline = time.monotonic() + 30
        first = next(adapter.events(deadline))
        rest = list(adapter.events(deadline))
    assert [event["finished"] for event in (first, *rest)] == list(range(50))


def test_a_worker_tells_the_first_job_and_the_last(tmp_path: Path) -> None:
    text = """
from adapters.protocol import Bodies, Jobs, Peer, main

class Loop(Peer):
    distribution, settings = "", ""
    def send(self, bodies: Bodies) -> None:
        for body in bodies:
            assert len(body) == 300
    def work(self, jobs: Jobs) -> None:
        for number in range(7):
            jobs.run(f"{number}|0|")

main(Loop)
"""
    environment = a_program(tmp_path, text)
    sent = ask(environment, "send", {"count": 5}, within=30)
    assert sent["sent"] == 5
    with Adapter(environment, "work", {"task": "noop", "count": 7}) as worker:
        marks = [event["done"] for event in worker.events(time.monotonic() + 30)]
    assert (marks[0], marks[-1]) == (1, 7)


def test_raw_results_are_json_without_nan(tmp_path: Path) -> None:
    row = a_row("huey")
    row.add("crash", {"whole_after_s": math.nan})
    dump(some_results(row), tmp_path / "run.json")
    found = json.loads((tmp_path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found["rows"][0]["steps"]["crash"] == [{"whole_after_s": None}]


# What grows, and where the time goes.


def test_curves_have_a_point_for_each_size_and_a_label_at_their_end() -> None:
    drawn = ElementTree.fromstring(
        curves(
            "Jobs waiting", "µs", [Curve("sqlite", [(0, 20.0), (1000, 30.0)]), Curve("redis", [(0, 10.0)])]
        )
    )
    assert len(drawn.findall(f"{SVG}circle")) == 3
    assert len(drawn.findall(f"{SVG}path")) == 2
    assert {"sqlite 30", "redis 10", "0", "1,000"} <= {each.text for each in drawn.findall(f"{SVG}text")}


def test_samples_are_given_to_the_innermost_part_and_add_up_to_the_cpu() -> None:
    def part_of(_: str, function: str) -> str | None:
        return {"outer": "outer", "inner": "inner"}.get(function)

    def outer() -> None:
        inner()

    def inner() -> None:
        began = time.process_time()
        while time.process_time() - began < 0.05:
            pass

    with sampled(part_of, waiting="none") as samples:
        outer()
    seconds = samples.seconds()
    assert set(seconds) - {"other"} == {"inner"}
    assert sum(seconds.values()) == pytest.approx(samples.cpu)


def test_a_job_costs_what_its_parts_cost() -> None:
    found = Profile(
        "redis", "none", Cost(5.0, {"the driver": 2.0, "tiny": 0.01}), Cost(4.0, {"the driver": 1.5})
    )
    lines = table_of_parts([found]).splitlines()
    assert "| the driver | 2.0 |" in lines
    assert "| **this process** | **2.0** |" in lines
    assert "| **the server** | **4.0** |" in lines
    assert not [line for line in lines if "tiny" in line]
