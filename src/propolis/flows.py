"""Chains, fan-outs and reductions: `fetch.step(url) | each(score.step()) | total.step()`."""

from __future__ import annotations

from propolis.app.flow.run import FlowRun, FlowState, FlowStatus
from propolis.app.flow.steps import Flow, each, fork, start

__all__ = [
    "Flow",
    "FlowRun",
    "FlowState",
    "FlowStatus",
    "each",
    "fork",
    "start",
]
