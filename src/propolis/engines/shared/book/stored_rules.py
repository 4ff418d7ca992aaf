"""The rules of the book over a store, and what they keep back, which is set aside by what they name.

rule <kind> <scope> <name>          a rule; also as prefix <name>, where it is for keys that begin so
rule-end <time> <kind> <scope> <name>  when it is over
held-by <scope> <name> <queue> …    the jobs that it keeps back; those of a key also as
held-of <key> <task> <queue> …      since each task may have a limit of its own for it
thaw <scope> <name>                 what no rule keeps back any more, as long as some of it is set aside
walk <prefix>                       the last of the keys that were seen to since something changed for many
bucket <scope> <name>               when the bucket of a rate is full; until then also as
bucket-end <time> <scope> <name>
turn <time> <scope> <name>          when a token comes that somebody waits for
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from propolis.core.clock import to_us
from propolis.core.protocols import BITE, Rule, RuleKind, Scope
from propolis.core.transitions import Retention
from propolis.engines.shared.book.steps import Steps
from propolis.engines.shared.book.store import Pages, Table, key, number_in
from propolis.engines.shared.book.stored_entries import Bucket, StoredBatch, StoredEntry

FEW = 16  # queues, or rules that are gone, that one call sees to

Group = tuple[str, ...]  # what the marks of some jobs that are set aside begin with


class StoredRules(Steps[StoredEntry, StoredBatch]):
    """What they keep back comes back in its old order, as it has its place."""

    def __init__(self, table: Table, now_us: int, retention: Retention) -> None:
        super().__init__(retention, table)
        self.now_us = now_us
        self.pages = Pages(table)
        self.see_rules()
        self.line_changed = False
        self._names: dict[bool, bool] = {}
        self._prefixes: list[Rule] | None = None

    @abstractmethod
    def there(self, job_id: str) -> StoredEntry:
        """One that a mark names."""

    @abstractmethod
    def save(self, entry: StoredEntry) -> None:
        """Bring marks and counts in line with the job."""

    def see_rules(self) -> None:
        self.ruled = any(self.pages.has(kind) for kind in ("rule", "thaw", "walk"))

    # --- what they say -------------------------------------------------------------------

    def rule(self, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
        return self.pages.get(key("rule", kind, scope, name), Rule) if self.ruled else None

    def rules(self, limit: int, after: Rule | None) -> list[Rule]:
        start, end = "rule\0", "rule\1"
        if after is not None:
            start = key("rule", after.kind, after.scope, after.name) + "\0"
        found: list[Rule] = []
        while len(found) < limit and (page := self.pages.listed(Rule, start, end, limit)):
            found += [rule for _, rule in page if not rule.is_over(self.now)]
            start = page[-1][0] + "\0"
        return found[:limit]

    def rules_over(self, limit: int) -> list[Rule]:
        if not self.ruled:
            return []
        over = [mark.split("\0", 4)[2:] for mark, _ in self.pages.until(self.now_us, limit, "rule-end")]
        found = [self.rule(RuleKind(kind), Scope(scope), name) for kind, scope, name in over]
        return [rule for rule in found if rule is not None]

    def names_task_keys(self) -> bool:
        return self._has_task_keys(RuleKind.PAUSE, RuleKind.BLOCK)

    def names_each_key(self) -> bool:
        return self._has_task_keys(RuleKind.LIMIT)

    def _has_task_keys(self, *kinds: RuleKind) -> bool:
        are_limits = RuleKind.LIMIT in kinds
        if are_limits not in self._names:
            self._names[are_limits] = any(self.pages.has("rule", kind, Scope.TASK_KEY) for kind in kinds)
        return self._names[are_limits]

    def prefixes(self) -> list[Rule]:
        if self._prefixes is None:
            names = [mark.split("\0", 1)[1] for mark, _ in self.pages.first(BITE, "prefix")]
            found = [self.rule(RuleKind.LIMIT, Scope.KEY, name) for name in names]
            self._prefixes = [rule for rule in found if rule is not None]
        return [rule for rule in self._prefixes if not rule.is_over(self.now)]

    def set_rule(self, rule: Rule) -> None:
        self.ruled = True
        self._keep_rule(rule, there=True)
        self.pages.table.delete(key("thaw", rule.scope, rule.name))
        self._loosen_all_under(rule)

    def remove_rule(self, rule: Rule) -> None:
        self._keep_rule(rule, there=False)
        self._loosen_all_under(rule)

    def _keep_rule(self, rule: Rule, *, there: bool) -> None:
        """With a mark of its end, if it has one, and of its prefix."""
        place = (rule.kind, rule.scope, rule.name)
        before = self.rule(*place)
        if before is not None and before.until is not None:
            self.pages.table.delete(key("rule-end", to_us(before.until), *place))
        if there and rule.until is not None:
            self.pages.mark(key("rule-end", to_us(rule.until), *place))
        if rule.prefix is not None and there:
            self.pages.mark(key("prefix", rule.name))
        elif rule.prefix is not None:
            self.pages.table.delete(key("prefix", rule.name))
        self.pages.put(key("rule", *place), rule if there else None)
        self._names, self._prefixes = {}, None
        if there and rule.scope is Scope.TASK_KEY:
            self._names[rule.kind is RuleKind.LIMIT] = True

    # --- what they keep back -------------------------------------------------------------

    def _loosen_all_under(self, rule: Rule) -> None:
        """Some of those that were kept back may start: of one name, or of many keys."""
        prefix = "" if rule.scope is Scope.TASK_KEY and rule.kind is RuleKind.LIMIT else rule.prefix
        if prefix is None:
            self._loosen(rule.scope, rule.name)
        elif self.pages.has("held-by", Scope.KEY):
            self.pages.mark(key("walk", prefix))
            self._walk()

    def _walk(self) -> None:
        """A bite of the keys that begin so, each once."""
        for mark, last in self.pages.first(FEW, "walk"):
            prefix = mark.split("\0", 1)[1]
            group = key("held-by", Scope.KEY)
            start = f"{group}\0{last}\1" if last else f"{group}\0{prefix}"
            for _ in range(BITE):
                rows = self.pages.between(start, group + "\1", 1)
                name = rows[0][0].split("\0")[2] if rows else None
                if name is None or not name.startswith(prefix):
                    self.pages.table.delete(mark)
                    break
                self._loosen(Scope.KEY, name)
                start = f"{group}\0{name}\1"
                self.pages.mark(mark, name)

    def _groups(self, scope: Scope, name: str) -> list[tuple[Group, int | None]]:
        """What is set aside by this name, with how many of it may start; None: any number."""
        room = self.room(scope, name)
        if room is not None or scope is not Scope.KEY or not self.names_each_key():
            return [(("held-by", scope, name), room)]
        tasks = self.pages.names("held-of", name)
        return [(("held-of", name, task), self.room(scope, name, task)) for task in tasks]

    def _loosen(self, scope: Scope, name: str) -> None:
        """Let go those that have room; what nothing keeps back any more goes bite by bite."""
        if not self.pages.has("held-by", scope, name):
            return
        for group, room in self._groups(scope, name):
            if room is None:
                self.pages.mark(key("thaw", scope, name))
            else:
                self._let_go(group, min(room, BITE))
        self._thaw()

    def _thaw(self, *queue: str) -> None:
        """Give those that no rule names any more back to their lines, a bite; more come with the next call.

        As many as are taken at once come back before, so the order stays.
        """
        for mark, _ in self.pages.first(FEW, "thaw"):
            _, scope, name = mark.split("\0")
            free = [group for group, room in self._groups(Scope(scope), name) if room is None]
            for group in free:
                self._release_all(self.pages.first(BITE, *group, *queue))
            if not any(self.pages.has(*group) for group in free):
                self.pages.table.delete(mark)

    def follow(self, entry: StoredEntry, marks: set[str]) -> None:
        """Where it stood in line, or ran, a limit may have room for another one."""
        if self.ruled and any(mark.startswith(("line\0", "until\0")) for mark in marks):
            self.let_next_go(entry)

    def let_next_go(self, entry: StoredEntry) -> None:
        for scope, name in entry.scopes()[1:]:
            if (scope, name) != entry.by and self.pages.has("held-by", scope, name):
                for group, room in self._groups(scope, name):
                    self._let_go(group, min(room or 0, 1))

    def _let_go(self, group: Group, most: int) -> None:
        """The first ones of each queue: who will ask for which queue is not known."""
        if most > 0:
            for queue in self.pages.names(*group)[:FEW]:
                self._release_all(self.pages.first(most, *group, queue))

    def _release_all(self, marks: Iterable[tuple[str, str]]) -> None:
        for _, job_id in marks:
            self.release(self.there(job_id))

    def release(self, entry: StoredEntry) -> None:
        entry.by = None
        self.save(entry)
        self.line_changed = True

    # --- buckets -------------------------------------------------------------------------

    def _bucket(self, scope: Scope, name: str) -> Bucket | None:
        return self.pages.get(key("bucket", scope, name), Bucket)

    def full_us(self, scope: Scope, name: str) -> int:
        bucket = self._bucket(scope, name)
        return 0 if bucket is None else bucket.full_us

    def set_full(self, scope: Scope, name: str, full_us: int) -> None:
        bucket = self._bucket(scope, name)
        if bucket is None:
            bucket = Bucket()
            self.pages.mark(key("bucket-end", full_us, scope, name))
        bucket.full_us = full_us
        self.pages.put(key("bucket", scope, name), bucket)

    def await_token(self, scope: Scope, name: str, at_us: int) -> None:
        bucket = self._bucket(scope, name)
        if bucket is not None and bucket.turn_us != at_us:
            if bucket.turn_us is not None:
                self.pages.table.delete(key("turn", bucket.turn_us, scope, name))
            bucket.turn_us = at_us
            self.pages.put(key("bucket", scope, name), bucket)
            self.pages.mark(key("turn", at_us, scope, name))

    def let_turns_come(self, limit: int) -> None:
        """Let go what waits for tokens that have come."""
        self._see_to_turns(mark for mark, _ in self.pages.until(self.now_us, limit, "turn"))

    def follow_turns(self, after: str, limit: int) -> str | None:
        marks = [mark for mark, _ in self.pages.between(after or "turn\0", "turn\1", limit)]
        self._see_to_turns(marks)
        return marks[-1] if len(marks) == limit else None

    def awaits_tokens(self) -> bool:
        return self.pages.has("turn")

    def next_token_us(self) -> int | None:
        first = self.pages.first(1, "turn") if self.ruled else []
        return number_in(first[0][0], 1) if first else None

    def _see_to_turns(self, marks: Iterable[str]) -> None:
        for mark in marks:
            _, _, scope, name = mark.split("\0", 3)
            self.pages.table.delete(mark)
            bucket = self._bucket(Scope(scope), name)
            if bucket is not None:
                bucket.turn_us = None
                self.pages.put(key("bucket", scope, name), bucket)
            if Scope(scope) is Scope.QUEUE:
                self.room(Scope.QUEUE, name)  # which waits for the next one, if that has not come
            else:
                self._loosen(Scope(scope), name)

    def forget_buckets(self, limit: int) -> None:
        """Those that are full again."""
        for mark, _ in self.pages.until(self.now_us, limit, "bucket-end"):
            _, _, scope, name = mark.split("\0", 3)
            self.pages.table.delete(mark)
            bucket = self._bucket(Scope(scope), name)
            if bucket is not None and bucket.full_us > self.now_us:
                self.pages.mark(key("bucket-end", bucket.full_us, scope, name))
            else:
                self.pages.put(key("bucket", scope, name), None)
