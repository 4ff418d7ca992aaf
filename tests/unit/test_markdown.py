"""Pages are wrapped at 110, their links lead somewhere, and decisions are dated and listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
WIDTH = 110

LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines_of_text(page: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced code, by their numbers."""
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        inside ^= fence
        if not inside and not fence:
            yield number, line


def too_long(page: str) -> list[int]:
    """The lines over the width that could be wrapped: not tables, nor a single word such as an address."""
    return [
        number
        for number, line in lines_of_text(page)
        if len(line) > WIDTH and not line.lstrip().startswith("|") and len(line.split()) > 2
    ]


def anchors(page: str) -> set[str]:
    """The headings as GitHub makes anchors of them."""
    text = "\n".join(line for _, line in lines_of_text(page))
    words = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in HEADING.findall(text))
    return {re.sub(r"\s", "-", each.strip()) for each in words}


def broken_links(page: Path) -> list[str]:
    text = "\n".join(line for _, line in lines_of_text(page.read_text("utf-8")))
    broken = []
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        if not found.exists() or (anchor and anchor not in anchors(found.read_text("utf-8"))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_wrapped(page: Path) -> None:
    assert too_long(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_line_that_is_too_long_is_found_outside_of_tables_and_code() -> None:
    long = "word " * 30
    page = f"short\n{long}\n```\n{long}\n```\n| {long} |\nhttps://{'x' * 120}\n{long}"
    assert too_long(page) == [2, 8]


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# What is it, really?\n")
    page = tmp_path / "a.md"
    page.write_text("[b](b.md#what-is-it-really) [c](c.md) [d](b.md#no) [e](#no) [f](https://example.org)")
    assert broken_links(page) == ["c.md", "b.md#no", "#no"]


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_has_a_date_and_a_status_and_is_listed(page: Path) -> None:
    _, _, status, *_ = page.read_text("utf-8").splitlines()
    found = re.fullmatch(r"\*(?P<date>\d{4}-\d\d-\d\d); (proposed|accepted|superseded)\b.*\.\*", status)
    assert found is not None
    index = (page.parent / "README.md").read_text("utf-8").splitlines()
    [row] = [line for line in index if line.startswith(f"| [{page.name[:4]}]({page.name}) |")]
    assert f"| {found['date']} |" in row
