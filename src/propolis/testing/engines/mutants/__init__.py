"""Engines that are wrong in one way each: a suite that cannot fail proves nothing.

Each mutant wraps any engine and misbehaves through its public verbs alone, so that the same mutants
serve engines that do not exist yet.  `check_engine` must tell every one of them from a right engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.machine import Difference, check_engine
from propolis.testing.engines.mutants.batches import (
    CallbackTwice,
    MemberCountedTwice,
    NoCallback,
    NoFailedCallback,
    SealedAtOnce,
)
from propolis.testing.engines.mutants.counters import ReleaseCounted, ReplayKeepsCounters
from propolis.testing.engines.mutants.leases import (
    AnyHolder,
    BeganForgotten,
    CrashNotCounted,
    EmptyRenewal,
    EverybodyToBlame,
    ForgetfulSnooze,
    LeasedTwice,
    LossNotCounted,
    LostIsAccepted,
    NeverParked,
    NoCrashLimit,
    NoFence,
    ParkedForAll,
    ParkedForGood,
    RevivingRenewal,
    StillFence,
)
from propolis.testing.engines.mutants.limits import (
    BurstIgnored,
    FirstTokenNotTaken,
    OneCountForAllKeys,
    PrefixBeforeKey,
    PrefixForOneKey,
    RateIgnored,
    ShortestPrefix,
    TaskBeforeKeys,
    TokenNotGivenBack,
    TokenTooEarly,
)
from propolis.testing.engines.mutants.order import (
    EarlyDelivery,
    ExpiredDelivered,
    LastInFirstOut,
    LostToBack,
    PriorityIgnored,
    ReleaseToBack,
    RetryAtOnce,
    RetryToFront,
)
from propolis.testing.engines.mutants.outcomes import (
    CancelIgnored,
    CancelNotAsked,
    CheckpointLost,
    EmissionsDropped,
    EndedUntold,
    LastWordsDropped,
    LostLeaseEmits,
    LostLeaseNotes,
    LostLeaseOpens,
    OpensLeftOut,
    ResultLost,
)
from propolis.testing.engines.mutants.puts import (
    ChosenIdForgotten,
    LastOfBundleLost,
    PayloadRewritten,
    PutTwiceById,
    TokenForgotten,
    UniqueIgnored,
    UniqueNeverFreed,
)
from propolis.testing.engines.mutants.rules import (
    BlockIgnored,
    CapIgnored,
    EveryKey,
    ForgetsWho,
    LimitIgnored,
    OverAndHolding,
    PauseIgnored,
)
from propolis.testing.engines.mutants.wrapped import Wrapped

MUTANTS: dict[str, type[Wrapped]] = {
    "no fence": NoFence,
    "a fence that stands still": StillFence,
    "a running job leased twice": LeasedTwice,
    "a renewal that revives": RevivingRenewal,
    "a renewal without effect": EmptyRenewal,
    "a lost lease accepted": LostIsAccepted,
    "a loss not counted": LossNotCounted,
    "a crash not counted": CrashNotCounted,
    "a crash of somebody else's": EverybodyToBlame,
    "a snooze that forgets": ForgetfulSnooze,
    "a beginning nobody hears of": BeganForgotten,
    "any holder": AnyHolder,
    "never parked": NeverParked,
    "parked for good": ParkedForGood,
    "parked for all": ParkedForAll,
    "no limit to crashes": NoCrashLimit,
    "early delivery": EarlyDelivery,
    "last in, first out": LastInFirstOut,
    "priority ignored": PriorityIgnored,
    "a retry to the front": RetryToFront,
    "a retry without its delay": RetryAtOnce,
    "a release to the back": ReleaseToBack,
    "a loss to the back": LostToBack,
    "an expired job delivered": ExpiredDelivered,
    "a release that counts": ReleaseCounted,
    "a replay that resets nothing": ReplayKeepsCounters,
    "a second job by id": PutTwiceById,
    "a chosen id forgotten": ChosenIdForgotten,
    "a token forgotten": TokenForgotten,
    "a job of a bundle lost": LastOfBundleLost,
    "a unique key ignored": UniqueIgnored,
    "a unique key never freed": UniqueNeverFreed,
    "a payload rewritten": PayloadRewritten,
    "emissions dropped": EmissionsDropped,
    "last words dropped": LastWordsDropped,
    "emissions of a lost lease": LostLeaseEmits,
    "a batch of an outcome left out": OpensLeftOut,
    "a batch of a lost lease": LostLeaseOpens,
    "a result lost": ResultLost,
    "a checkpoint lost": CheckpointLost,
    "a note of a lost lease": LostLeaseNotes,
    "ends untold": EndedUntold,
    "a cancelled job kept": CancelIgnored,
    "a running job not asked to stop": CancelNotAsked,
    "a pause ignored": PauseIgnored,
    "a block ignored": BlockIgnored,
    "a limit ignored": LimitIgnored,
    "a cap ignored": CapIgnored,
    "a rule holds that is over": OverAndHolding,
    "a rule on a task of one key holds for every key": EveryKey,
    "a rule set again says what it said": ForgetsWho,
    "a rate ignored": RateIgnored,
    "a burst ignored": BurstIgnored,
    "a first token not taken": FirstTokenNotTaken,
    "a token too early": TokenTooEarly,
    "a token not given back": TokenNotGivenBack,
    "a prefix before exactly the key": PrefixBeforeKey,
    "the shortest prefix before longer ones": ShortestPrefix,
    "the limit of a task before that of a key": TaskBeforeKeys,
    "a limit on a prefix for no key": PrefixForOneKey,
    "one count for all keys of a task": OneCountForAllKeys,
    "no callback": NoCallback,
    "no callback for a failure": NoFailedCallback,
    "a callback twice": CallbackTwice,
    "a batch sealed too early": SealedAtOnce,
    "a member counted twice": MemberCountedTwice,
}


def catch(
    mutant: type[Wrapped],
    make: Callable[[FakeClock], Engine],
    *,
    examples: int = 300,
    steps: int = 50,
    seed: int | None = None,
    check: Callable[..., None] = check_engine,
) -> bool:
    """Whether `check_engine`, or another check, tells this mutant of the engine from a right one.

    It stops at the first difference.  False means that the suite is blind in one eye.
    """

    def broken(clock: FakeClock) -> Engine:
        return cast(Engine, mutant(make(clock), clock))

    try:
        check(broken, examples=examples, steps=steps, seed=seed, shrink=False)
    except Difference:
        return True
    return False
