"""Flows: chains, fan-outs and reductions, compiled to jobs, memberships and emissions."""

from __future__ import annotations

from skep.flow.run import FlowRun, FlowState, FlowStatus
from skep.flow.steps import Flow, each, fork, start

__all__ = ["Flow", "FlowRun", "FlowState", "FlowStatus", "each", "fork", "start"]
