"""haskell-bee's StarMap and SquareMap: the sum of squares, one job per number, as a flow.

    propolis worker star_map:app &
    python star_map.py 100

haskell-bee's StarMap keeps the squares in a table of its own and polls the table every few seconds until all
squares are there: if a square dies it polls for ever, a square that runs twice is counted twice, and users
must remove the table.  Here the squares are kept with the batch of the flow, in their order and each of them
once.  Whatever is killed on the way, the flow goes on when another worker has taken over the leases.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from propolis import App
from propolis.flows import Flow, each

app = App(os.environ.get("PROPOLIS_URL", "sqlite:///star_map.db"))


@app.task(name="star_map")
def star_map(count: int) -> list[int]:
    return list(range(1, count + 1))


@app.task(name="square_map")
def square_map(x: int) -> int:
    return x * x


@app.task(name="total")
def total(squares: list[int]) -> int:
    return sum(squares)


def sum_of_squares(count: int) -> Flow[Any, int]:
    return star_map.step(count) | each(square_map.step()) | total.step()


if __name__ == "__main__":
    flow = sum_of_squares(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    run = flow.enqueue()
    print(run.result(timeout="1m"))
    if status := run.status():
        print(status.draw())
    app.close()
