"""The shape of a flow, as one line of text that people read and programs take apart; and its drawings.

    fetch | parse | each ( score | norm ) | fork ( mail , store ) | report

That line is the note of the flow's batch, so whoever has its id can draw it.  Names of tasks hold no
white space, and everything else stands between spaces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from propolis.errors import FlowBroken

PREFIX = "flow: "
GIVEN = "[given]"  # the value that a flow starts with, where it starts with no task
PARTIAL = "?"
_PIECE = re.compile(r"(?P<word>[^\s|]\S*)(?: \( (?P<inner>.+?) \)(?= |$))?")


class One(Struct, frozen=True):
    """One task."""

    name: str

    def __str__(self) -> str:
        return self.name


class Fanned(Struct, frozen=True):
    """Chains of tasks side by side."""

    chains: tuple[tuple[str, ...], ...]
    each: bool = True
    partial: bool = False

    @property
    def word(self) -> str:
        return ("each" if self.each else "fork") + (PARTIAL if self.partial else "")

    def __str__(self) -> str:
        return f"{self.word} ( {' , '.join(' | '.join(chain) for chain in self.chains)} )"


Part = One | Fanned


class Segment(Struct, frozen=True):
    """The jobs of one batch of a flow: a chain, and the fan-out behind it (None: this is the end)."""

    chain: tuple[str, ...] = ()
    fan: Fanned | None = None


def as_line(parts: Sequence[Part]) -> str:
    return PREFIX + " | ".join(str(part) for part in parts)


def parse(line: str) -> list[Part]:
    """The reverse of `as_line`; `FlowBroken` for what is not the note of a flow."""
    if not line.startswith(PREFIX):
        raise FlowBroken("this batch is no flow: `propolis batches show` shows what it is")
    found: list[Part] = []
    for piece in _PIECE.finditer(line.removeprefix(PREFIX)):
        word, inner = piece["word"], piece["inner"]
        if inner is None:
            found.append(One(word))
        else:
            chains = tuple(tuple(chain.split(" | ")) for chain in inner.split(" , "))
            found.append(Fanned(chains, word.startswith("each"), word.endswith(PARTIAL)))
    return found


def segments(parts: Sequence[Part]) -> list[Segment]:
    """The parts by the batches that hold their jobs; the last segment is that of the flow itself."""
    found: list[Segment] = []
    chain: list[str] = []
    for part in parts:
        if isinstance(part, Fanned):
            found.append(Segment(tuple(chain), part))
            chain = []
        elif part.name != GIVEN:
            chain.append(part.name)
    return [*found, Segment(tuple(chain))]


# --- drawings ----------------------------------------------------------------------------


def tree(parts: Sequence[Part], captions: Sequence[str] = ()) -> str:
    """A line per part, with its caption; the chains of a fan-out below it."""
    lines: list[tuple[str, str]] = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        about = captions[index] if captions else ""
        head = part.name if isinstance(part, One) else part.word
        lines.append((("└─ " if last else "├─ ") + head, about))
        if isinstance(part, Fanned):
            rail = "   " if last else "│  "
            for number, chain in enumerate(part.chains):
                branch = "└─ " if number == len(part.chains) - 1 else "├─ "
                lines.append((rail + branch + " | ".join(chain), ""))
    width = max(len(left) for left, _ in lines)
    return "\n".join(f"{left:<{width}}  {right}".rstrip() for left, right in lines)


def mermaid(parts: Sequence[Part], captions: Sequence[str] = ()) -> str:
    """The same for https://mermaid.js.org, as many places render it."""
    lines = ["flowchart LR"]
    before: list[str] = []
    arrow = "-->"
    for index, part in enumerate(parts):
        about = captions[index] if captions else ""
        chains = ((part.name,),) if isinstance(part, One) else part.chains
        if isinstance(part, Fanned) and part.each:
            arrow = "-->|each|"
        ends = []
        for number, chain in enumerate(chains):
            nodes = [f"s{index}_{number}_{place}" for place in range(len(chain))]
            lines += [
                f'    {node}["{_label(name, about if node == nodes[-1] else "")}"]'
                for node, name in zip(nodes, chain, strict=True)
            ]
            lines += [f"    {one} {arrow} {nodes[0]}" for one in before]
            lines += [f"    {one} --> {other}" for one, other in pairwise(nodes)]
            ends.append(nodes[-1])
        before = ends
        arrow = "-->|all|" if isinstance(part, Fanned) else "-->"
    return "\n".join(lines)


def _label(name: str, about: str) -> str:
    text = f"{name}<br/>{about}" if about else name
    return text.replace('"', "#quot;")
