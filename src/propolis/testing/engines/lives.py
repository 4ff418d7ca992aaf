"""How long a state machine lives, and how often."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ROUND = 8  # lives per run of Hypothesis: in a longer one, most lives are variations of few (measured)


def live(
    machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int, seed: int | None, *, shrink: bool
) -> None:
    """Let a machine live so many lives of so many steps; a seed repeats them."""
    limits = settings(
        max_examples=min(examples, ROUND),
        stateful_step_count=steps,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    for number in range(-(-examples // ROUND)):
        if seed is not None:
            with_seed(seed + number)(machine)
        run_state_machine_as_test(machine, settings=limits)  # type: ignore[arg-type]  # any factory will do
