"""Which rules a job that is to be leased has to obey."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from propolis.core.clock import LATEST_US
from propolis.core.limits import Rate
from propolis.core.protocols import EACH, UNBOUNDED, RuleKind, Scope, task_and_key, task_key
from propolis.engines.sqlite.rows import are_sound, text_of
from propolis.engines.sqlite.steps.rules.openings import open_each
from propolis.engines.sqlite.steps.work import Named, Work

_HOLDS = (RuleKind.PAUSE, RuleKind.BLOCK)
_OVER_AT_ONCE = 100  # rules that are over, of which a lease sees to those that they have kept back


class Allowance(NamedTuple):
    n: int
    rate: Rate | None


class Terms(NamedTuple):
    """What the rules of one name say."""

    halts: bool
    limit: Allowance | None


class Bound(NamedTuple):
    """A rule that holds for a job; `limit` is None where nothing may start.

    `counted` is whose runs and tokens count, and `group` where it sets aside what it keeps back.
    """

    group: Named
    counted: Named
    limit: Allowance | None


_NOTHING = Terms(halts=False, limit=None)


def remove_rule(work: Work, kind: RuleKind, scope: Scope, name: str) -> bool:
    """False if there was none, or it was over."""
    work.woken.add(None)
    if kind is RuleKind.LIMIT and scope in (Scope.KEY, Scope.TASK_KEY) and name.endswith(EACH):
        open_each(work, scope, name)
    else:
        work.open_groups(work.closed_groups(scope, name))
    row = work.run("remove_rule", kind=kind, scope=scope, name=name, now_us=work.now_us).fetchone()
    return row is not None and not row[0]


def remove_over(work: Work, most: int) -> int:
    """A bite of the rules whose time is over; those that they kept back may go."""
    over = work.run("rules_over", now_us=work.now_us, most=most).fetchall()
    for kind, scope, name in over:
        remove_rule(work, RuleKind(kind), Scope(scope), name)
    return len(over)


def prefixes(work: Work) -> list[tuple[str, Allowance]]:
    """What keys begin with that have a limit each; the longest comes first."""
    rows = work.run("prefixes", now_us=work.now_us)
    found = [(name.removesuffix(EACH), _limit(*terms)) for name, *terms in rows]
    return sorted(found, key=lambda each: -len(each[0]))


def _limit(n: int, every_us: Any, burst: Any) -> Allowance:
    """Of a rate that is damaged nothing holds (L7)."""
    if every_us is None or not are_sound((every_us, burst)) or not 0 < burst * every_us <= LATEST_US:
        return Allowance(n, None)
    return Allowance(n, Rate(every_us, burst))


def _terms_in(rows: list[Any]) -> Terms:
    if not rows:
        return _NOTHING
    limits = [_limit(*terms) for kind, *terms in rows if kind == RuleKind.LIMIT]
    return Terms(any(kind in _HOLDS for kind, *_ in rows), limits[0] if limits else None)


class Rulebook:
    """Each rule is looked up when a job asks for it: there may be many, of others."""

    def __init__(self, work: Work) -> None:
        self._work = work
        ruled, self.has_groups, self.has_removals = work.run("circumstances").fetchone()
        scopes = work.run("ruled_scopes", now_us=work.now_us).fetchone() if ruled else (0,) * 8
        queues, tasks, keys, task_keys, prefixes_too, each, rates, over = scopes
        self._ruled = {Scope.QUEUE: queues, Scope.TASK: tasks, Scope.KEY: keys, Scope.TASK_KEY: task_keys}
        self._has_prefixes, self._limits_each = bool(prefixes_too), bool(each)
        self.has_rates, self._has_over = bool(rates), bool(over)
        self.rules_jobs = tasks or keys or task_keys or each
        self._terms: dict[Named, Terms] = {}
        self._known: dict[tuple[str, str | None], list[Bound]] = {}
        self._known_of: dict[Named, list[Bound]] = {}
        self._prefixes: list[tuple[str, Allowance]] | None = None

    def see_to_those_over(self) -> None:
        if self._has_over:
            remove_over(self._work, _OVER_AT_ONCE)

    def look_up(self, keys: Iterable[str]) -> None:
        """What holds for these, and how many of them run: at once, and not one by one."""
        if not self._ruled[Scope.KEY]:
            return
        new = [key for key in {*keys} if (Scope.KEY, key) not in self._terms]
        self._work.look_up_keys(new)
        rows: defaultdict[str, list[Any]] = defaultdict(list)
        for key, *terms in self._work.run("rules_of_keys", keys=text_of(new), now_us=self._work.now_us):
            rows[key].append(terms)
        for key in new:
            self._terms[Scope.KEY, key] = _terms_in(rows[key])

    # --- what holds ----------------------------------------------------------------------

    def _terms_of(self, scope: Scope, name: str) -> Terms:
        found = self._terms.get((scope, name))
        if found is None:
            rows = self._work.run("rules_of", scope=scope, name=name, now_us=self._work.now_us)
            found = self._terms[scope, name] = _terms_in(rows.fetchall())
        return found

    def _limit_of(self, scope: Scope, name: str) -> Allowance | None:
        """Of a queue, a task, or a key by itself: that of exactly this key, else of the longest prefix."""
        if not self._ruled[scope]:
            return None
        if scope is not Scope.KEY:
            return self._terms_of(scope, name).limit
        own = None if name.endswith(EACH) else self._terms_of(scope, name).limit
        if own is not None or not self._has_prefixes:
            return own
        if self._prefixes is None:
            self._prefixes = prefixes(self._work)
        return next((limit for prefix, limit in self._prefixes if name.startswith(prefix)), None)

    def _limit_of_key(self, task: str, key: str) -> tuple[Named, Allowance | None]:
        """The key's limit, and where those are set aside that it keeps back."""
        own = self._limit_of(Scope.KEY, key)
        if own is not None or not self._limits_each:
            return (Scope.KEY, key), own
        return (Scope.TASK_KEY, task_key(task, key)), self._terms_of(
            Scope.TASK_KEY, task_key(task, EACH)
        ).limit

    def _halts(self, scope: Scope, name: str) -> bool:
        return bool(self._ruled[scope]) and self._terms_of(scope, name).halts

    def _bounds(self, task: str, key: str | None) -> list[Bound]:
        """All that hold for a job."""
        found = self._known.get((task, key))
        if found is None:
            found = self._known[task, key] = [*self._bound_by(Scope.TASK, task)]
            if key is not None:
                of_key = Scope.KEY, key
                if self._halts(*of_key):
                    found.append(Bound(of_key, of_key, None))
                if self._ruled[Scope.TASK_KEY]:
                    of_both = Scope.TASK_KEY, task_key(task, key)
                    found += [Bound(of_both, of_both, None)] if self._halts(*of_both) else []
                group, limit = self._limit_of_key(task, key)
                if limit is not None:
                    found.append(Bound(group, of_key, limit))
        return found

    def _bound_by(self, scope: Scope, name: str) -> list[Bound]:
        """What holds for a whole queue, or for all that is set aside under this name."""
        by = counted = scope, name
        if by in self._known_of:
            return self._known_of[by]
        found = [Bound(by, by, None)] if self._halts(scope, name) else []
        if scope is Scope.TASK_KEY:
            task, key = task_and_key(name)
            counted, limit = (Scope.KEY, key), self._limit_of_key(task, key)[1]
        else:
            limit = self._limit_of(scope, name)
        if limit is not None:
            found.append(Bound(by, counted, limit))
        self._known_of[by] = found
        return found

    # --- how many may go -----------------------------------------------------------------

    def room(self, scope: Scope, name: str) -> int | None:
        """How many more of what is set aside there, or of a queue, may run now; None: as many as like."""
        return min((self._room_under(each) for each in self._bound_by(scope, name)), default=None)

    def _room_under(self, bound: Bound) -> int:
        if bound.limit is None:
            return 0
        n, rate = bound.limit
        room = n if n == UNBOUNDED else max(0, n - self._work.running_of(*bound.counted))
        if rate is None or not room:
            return room
        full_us, now_us = self._work.full_at(*bound.counted), self._work.now_us
        if rate.bounded(full_us, now_us) != full_us:
            self._work.full_us[bound.counted] = rate.bounded(full_us, now_us)
        return min(room, rate.free(full_us, now_us))

    def opens_us(self, scope: Scope, name: str) -> int | None:
        """When there is a token for what is set aside there; None: it waits for something else."""
        if not self.has_rates:
            return None
        for bound in self._bound_by(scope, name):
            if bound.limit is None or bound.limit.n <= self._work.running_of(*bound.counted):
                return None
            if bound.limit.rate is not None:
                next_us = bound.limit.rate.next_us(self._work.full_at(*bound.counted), self._work.now_us)
                return next_us if next_us > self._work.now_us else None
        return None

    def has_room_for(self, jobs: Mapping[tuple[str, str | None], int]) -> bool:
        """Do all of them fit, so many of each task and key?  Where that is hard to say, they do not.

        Those that nothing binds count for the others of their key.
        """
        bounds: dict[Named, Bound] = {}
        wanted: defaultdict[Named, int] = defaultdict(int)
        for (task, key), n in jobs.items():
            wanted[Scope.TASK, task] += n
            wanted[Scope.KEY, key or ""] += n
            for bound in self._bounds(task, key):
                if bound.limit is None or bounds.setdefault(bound.counted, bound).limit != bound.limit:
                    return False
        return all(self._room_under(bound) >= wanted[counted] for counted, bound in bounds.items())

    def kept_back_by(self, task: str, key: str | None) -> Named | None:
        """Where this job is to be set aside; None: it may start."""
        if self.rules_jobs:
            for bound in self._bounds(task, key):
                if not self._room_under(bound):
                    return bound.group
        return None

    # --- tokens --------------------------------------------------------------------------

    def take_tokens(self, queue: str, task: str, key: str | None, n: int) -> None:
        for named, rate in self._rates(queue, task, key):
            full_us = rate.taken(self._work.full_at(*named), self._work.now_us)
            self._work.full_us[named] = full_us + (n - 1) * rate.every_us

    def give_token_back(self, queue: str, task: str, key: str | None) -> None:
        for named, rate in self._rates(queue, task, key):
            self._work.full_us[named] = rate.given_back(self._work.full_at(*named), self._work.now_us)
            self._work.refunded.add(named)

    def _rates(self, queue: str, task: str, key: str | None) -> Iterator[tuple[Named, Rate]]:
        if self.has_rates:
            for bound in (*self._bound_by(Scope.QUEUE, queue), *self._bounds(task, key)):
                if bound.limit is not None and bound.limit.rate is not None:
                    yield bound.counted, bound.limit.rate
