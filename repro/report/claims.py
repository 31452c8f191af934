"""Judgement of a ledger: the verdict on each entry, computed from our records; `verdicts` has the statuses."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from typing import Any

from ..core.statistics import Interval
from .arithmetic import FUNCTIONS, Number, agreement, decimals, near
from .expressions import Expression
from .ledger import CHOSEN_BY_ROW, Entry, Relation
from .paper import Paper, Question
from .results import Choose, Missing, Results, SpeedGroup
from .verdicts import OPEN, Elsewhere, Status, Verdict, significant

_SPEEDS = {"fps", "memory_mib"}  # the functions of `Results.speed_functions`
_SPEED_DTYPE = "fp16"  # of our rows on the paper's device that are compared with the paper's, whose dtype is not named
_FITTED = {"macs_g_paper_convention"}  # counts by a convention that was fitted to the paper's rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # hashed by identity, for the cache of `judge_variants`
class Report:
    """A paper's ledger, judged by our records."""

    paper: Paper
    results: Results
    verdicts: Mapping[str, Verdict]  # by id of the entry, in the ledger's order

    @property
    def all(self) -> list[Verdict]:
        """The verdicts on all entries, in the ledger's order."""
        return list(self.verdicts.values())

    def select(self, question: Question) -> list[Verdict]:
        """Return the verdicts on a question's entries, in the ledger's order."""
        return [
            verdict
            for name, verdict in self.verdicts.items()
            if any(fnmatchcase(name, pattern) for pattern in question.entries)
        ]


def judge_paper(paper: Paper, results: Results) -> Report:
    """Judge every entry of a paper's ledger."""
    judge = _Judge(paper, results)
    verdicts = {name: judge.judge(entry) for name, entry in paper.ledger.entries.items()}
    return Report(paper=paper, results=results, verdicts=verdicts)


def _calls(entry: Entry, functions: Set[str]) -> bool:
    """Tell whether an entry's own expression, and none of an entry that it names, calls one of the functions."""
    return entry.ours is not None and any(call.name in functions for call in entry.ours.calls)


class _Judge:
    """Judges the entries of one paper.

    Attributes:
        paper_group: our speed rows under the paper's conditions; None if nobody measured any.
        other_groups: our other rows of inference.
        formulas: the paper's functions that an expression may call; `agrees` compares with an entry's printed number.
        counts: the functions that read our records, apart from `_SPEEDS`.
        unread: the same names, and those of `_SPEEDS`, for expressions over the paper's numbers: each raises `Missing`.
        no_speeds: `_SPEEDS` without rows under the paper's conditions: each raises `Missing`.
    """

    def __init__(self, paper: Paper, results: Results):
        self.paper, self.results = paper, results
        self.ledger, self.entries = paper.ledger, paper.ledger.entries
        inference = [group for group in results.speed_rows if group.mode == "infer"]
        device, batch = paper.ledger.paper.speed_device, paper.ledger.paper.speed_batch
        fitting = [each for each in inference if (str(each.batch_size), each.dtype) == (batch, _SPEED_DTYPE)]
        self.paper_group = next((each for each in fitting if device in each.device), None)
        self.other_groups = [group for group in inference if group != self.paper_group]
        missing = f"the paper does not say at which batch it measured on its {device}", "none"
        if batch:
            reason = f"no rows of one {device} at batch {batch}, as in the paper ({_SPEED_DTYPE})"
            missing = reason, f"repro efficiency  # on one {device}"
        self.formulas = {**paper.formulas(), "agrees": self._agrees}
        self.counts = results.functions()
        self.unread = dict.fromkeys([*self.counts, *_SPEEDS], _raise_missing("the paper prints no such number", ""))
        self.no_speeds = dict.fromkeys(_SPEEDS, _raise_missing(*missing))

    def _agrees(self, ours: Number, name: str) -> bool:
        """Tell whether a number is the one that the paper prints in an entry, rounded or truncated."""
        return agreement(ours, self.entries[name].printed) is not None

    def judge(self, entry: Entry) -> Verdict:
        """Judge an entry by the first case that applies.

        Nobody can have measured it; it is out of scope; we have no number of it; ours is compared with it. A
        contradiction within the paper goes before the second case and replaces the status of the last two.
        """
        decided = []
        for relation in entry.relations:
            with contextlib.suppress(Missing):
                decided.append(self._violation(entry, relation))
        violations = [evidence for evidence in decided if evidence]
        evidence = entry.contradiction or "; ".join(violations) or None
        conclude = partial(Verdict, checks=len(decided), violations=len(violations))
        if entry.measurable is not None and (why := self._violation(entry, entry.measurable)):
            found = {"evidence": why, "reason": why, "command": "none", "elsewhere": tuple(self._elsewhere(entry))}
            return conclude(entry=entry, status=Status.NOT_MEASURABLE, **found)
        beyond = (each.out_of_scope for each in self.ledger.trace(entry) if each.out_of_scope)
        if evidence is None and (why := next(beyond, None)):
            return conclude(entry=entry, status=Status.OUT_OF_SCOPE, reason=why, command="none")
        self.results.used.clear()  # from here on it collects the records of this entry alone
        entry, plainly = self._count_plainly(entry)
        conclude = partial(conclude, entry=entry, evidence=evidence, plainly=plainly)
        try:
            ours, is_declared = self._ours_or_declared(entry)
        except Missing as missing:
            reason, command = missing.args
            status = Status.INCONSISTENT if evidence else Status.NOT_MEASURED
            return conclude(status=status, reason=reason, command=command, elsewhere=tuple(self._elsewhere(entry)))
        sources = tuple(sorted(self.results.used))
        how, delta = ("holds" if ours else None), None  # of a statement
        if entry.printed is not None:
            how = agreement(ours, entry.printed, exact=entry.kind == "setting")
            ours, delta = float(ours), float(ours) - float(Fraction(entry.printed))
        explanation = None if how else self._explain(entry)
        compared = self._compare(entry, how, explanation, is_declared)
        return conclude(
            status=Status.INCONSISTENT if evidence else compared,
            compared=compared,
            ours=ours,
            how=how,
            delta=delta,
            explanation=explanation,
            sources=sources,
        )

    def _count_plainly(self, entry: Entry) -> tuple[Entry, bool | None]:
        """Return the entry, and whether the column's own convention gives the printed number; None if that is unknown.

        If it does so by rounding, the entry has it in place of the convention that was chosen for the row: a choice
        that was not needed makes no number fitted.
        """
        if entry.plain is None:
            return entry, None
        try:
            agrees = agreement(self._evaluate_ours(entry.plain, self.paper_group), entry.printed)
        except Missing:
            return entry, None
        finally:
            self.results.used.clear()
        if agrees == "rounding" and entry.fitted == CHOSEN_BY_ROW:
            entry = dataclasses.replace(entry, ours=entry.plain, plain=None, fitted=None)
        return entry, agrees is not None

    def _ours_or_declared(self, entry: Entry) -> tuple[Number | bool, bool]:
        """Return our counterpart, and whether it is only declared; raise `Missing` if there is neither."""
        try:
            return self._ours(entry, self.paper_group), False
        except Missing:
            if entry.declared is None:
                raise
            self.results.used.clear()  # records of which the value is not made
        return self._evaluate_ours(entry.declared, self.paper_group), True

    def _compare(self, entry: Entry, how: str | None, explanation: str | None, is_declared: bool) -> Status:
        """Return the status of our value against the paper's; only independent numbers can match."""
        if how is None:
            return Status.EXPLAINED if explanation else Status.UNEXPLAINED
        parts = list(self.ledger.trace(entry))
        # computed from constants alone, from no record and no model
        is_arithmetic = all(each.ours and all(call.name in FUNCTIONS for call in each.ours.calls) for each in parts)
        if is_declared or entry.kind == "setting" or is_arithmetic:
            return Status.DECLARED
        if any(each.ours and (each.fitted or _calls(each, _FITTED)) for each in parts):
            return Status.FITTED
        return Status.TRUNCATED if how == "truncation" else Status.MATCHED

    def _explain(self, entry: Entry) -> str | None:
        """Return the confirmed explanation of a difference, with its evidence; None if there is none.

        A published source confirms an explanation, and so does a computation that holds or gives the printed number.

        Raises:
            ValueError: the explanation of a statement computes a number.
        """
        for explanation in entry.explanations:
            if explanation.source is not None:
                return f"{explanation.text} ({explanation.source})"
            try:
                shown = self._of_paper(explanation.expression, counted=True)
            except Missing:
                continue
            if shown is True:
                return explanation.text
            if shown is False:
                continue
            if entry.printed is None:
                where = f"ledger: {entry.id}"
                raise ValueError(f"{where}: an explanation of a statement `shows` a condition, and no number")
            if agreement(shown, entry.printed):
                return explanation.text.format(computed=_format_computed(shown, decimals(entry.printed) + 2))
        return None

    def _violation(self, entry: Entry, relation: Relation) -> str | None:
        """Return evidence that the paper's numbers violate a relation; None if they satisfy it, perhaps after rounding.

        Raises:
            Missing: it calls a function of our numbers, so the paper's alone cannot decide it.
        """
        if relation.requires is not None:
            wrong = (part for part in relation.expression.conjuncts if not self._of_paper(part))
            failing = [part for part in wrong if not self._is_explained_by_rounding(part, bool)]
            if not failing:
                return None
            return relation.because.format(computed=significant(float(self._of_paper(failing[0].left))))

        def satisfies(computed: Number) -> bool:
            """Tell whether a value of `equals` is the printed number, within its slack or after rounding."""
            slack = Fraction(relation.within_percent or 0)
            return near(Fraction(entry.printed), computed, slack) or agreement(computed, entry.printed) is not None

        computed = self._of_paper(relation.expression)
        if satisfies(computed) or self._is_explained_by_rounding(relation.expression, satisfies):
            return None
        return relation.because.format(computed=_format_computed(computed, decimals(entry.printed) + 1))

    def _is_explained_by_rounding(self, expression: Expression, satisfies: Callable[[Any], bool]) -> bool:
        """Tell whether operands that round or truncate to the printed ones may satisfy an expression.

        Each operand is tried at both ends of its range: half a unit of the last digit below, where rounding begins, and
        almost a unit above, where truncation ends. Without operands, nothing can have been rounded.
        """
        printed = {name: self.entries[name].printed for name in expression.references}
        ends = [
            [Fraction(digits) + shift / 10 ** decimals(digits) for shift in (Fraction(-1, 2), 1 - Fraction(1, 10**9))]
            for digits in printed.values()
        ]
        corners = (dict(zip(printed, values, strict=True)) for values in itertools.product(*ends))
        return bool(printed) and any(satisfies(self._of_paper(expression, moved)) for moved in corners)

    def _of_paper(
        self, expression: Expression, moved: Mapping[str, Number] | None = None, *, counted: bool = False
    ) -> Number | bool:
        """Evaluate an expression over the printed numbers, or those in `moved`; with `counted`, over our counts too.

        Raises:
            Missing: it calls a function whose numbers it may not use.
        """
        printed = moved.__getitem__ if moved else lambda name: Fraction(self.entries[name].printed)
        return expression.evaluate(printed, self.unread | (self.counts if counted else {}) | self.formulas)

    def _ours(self, entry: Entry, group: SpeedGroup | None, choose: Choose | None = None) -> Number | bool:
        """Evaluate our counterpart, with speeds from one group of rows; raise `Missing` if a part was not measured.

        `choose` as in `_evaluate_ours`, which calls this method for each id in an expression.
        """
        if entry.ours is None:
            raise Missing(entry.reason or entry.out_of_scope, entry.command or "none")
        return self._evaluate_ours(entry.ours, group, choose=choose)

    def _evaluate_ours(
        self, expression: Expression, group: SpeedGroup | None, attention: str = "unfused", choose: Choose | None = None
    ) -> Number | bool:
        """Evaluate an expression for our numbers.

        Args:
            expression: of a ledger; the ids in it stand for our counterparts.
            group: the rows of speed; None if none was measured under the paper's conditions.
            attention: the attention whose rows stand for the paper's unfused ones in the calls of this expression, not
                in those of entries that it names.
            choose: picks each speed, see `Choose`; None takes the median.
        """
        speeds = self.results.speed_functions(group, attention, choose) if group else self.no_speeds
        functions = self.counts | speeds | self.formulas
        try:
            return expression.evaluate(lambda name: self._ours(self.entries[name], group, choose), functions)
        except ZeroDivisionError:
            raise Missing("it divides by a difference of our numbers, which are equal", "none") from None

    def _elsewhere(self, entry: Entry) -> Iterator[Elsewhere]:
        """Evaluate the entry on each other group of rows that has some of its inputs.

        The baseline's fused attention is evaluated beside the unfused one, if its rows have the same inputs.
        """
        if not _calls(entry, _SPEEDS):
            return
        parts = entry.ours.conjuncts
        has_baseline = any("unfused" in call.args for call in entry.ours.calls)
        for group in self.other_groups:
            values = self._decide(parts, group, "unfused")
            fused = self._decide(parts, group, "fused") if has_baseline else {}
            if values:
                of_fused = _join([*fused.values()]) if fused.keys() == values.keys() else (None, None, 0)
                about = self.paper.baseline, entry.unit, (len(values), len(parts))
                yield Elsewhere(group, *_join([*values.values()]), *of_fused, *about)

    def _decide(self, parts: Sequence[Expression], group: SpeedGroup, attention: str) -> dict[int, list[Number | bool]]:
        """Return place -> values, see `_spread`, for each part whose speeds were all measured on a group.

        `attention` chooses the rows that stand for the paper's unfused baseline.
        """
        values = {}
        for place, part in enumerate(parts):
            with contextlib.suppress(Missing):
                values[place] = self._spread(part, group, attention)
        return values

    def _spread(self, part: Expression, group: SpeedGroup, attention: str) -> list[Number | bool]:
        """Return the value at the medians of the speeds, then at each combination of the ends of their ranges.

        A row of one process has no range. The median's value then is the only one, and a statement gets its contrary as
        well, so that it is not separated. Memory has no ends: without a speed the one combination repeats the value.
        """
        intervals: dict[str, Interval | None] = {}  # row in words -> the ends of its speed

        def note(row: str, speed: float, ends: Interval | None) -> float:
            """Take the median, and keep the ends for the combinations."""
            intervals[row] = ends
            return speed

        values = [self._evaluate_ours(part, group, attention, note)]
        if None in intervals.values():
            return [values[0], not values[0]] if isinstance(values[0], bool) else values
        for ends in itertools.product(*intervals.values()):
            at = dict(zip(intervals, ends, strict=True))
            values.append(self._evaluate_ours(part, group, attention, lambda row, *_, at=at: at[row]))
        return values


def _raise_missing(reason: str, command: str) -> Callable:
    """Make a function that raises `Missing`, in place of one whose data does not exist."""

    def function(*args: Any) -> None:
        raise Missing(reason, command)

    return function


def _join(parts: Sequence[Sequence[Number | bool]]) -> tuple[float | bool | str, Interval | None, int]:
    """Combine the values of the parts, see `_spread`: a quantity and its ends, or a statement's word.

    A statement holds if all its parts do at every speed. It does not if a part never does; otherwise it is `OPEN`. The
    number of the parts that never hold is the last of the result.
    """
    if isinstance(parts[0][0], bool):
        if failing := sum(not any(part) for part in parts):
            return False, None, failing
        return (True if all(map(all, parts)) else OPEN), None, 0
    median, *corners = map(float, parts[0])
    return median, (min(corners), max(corners)) if len(corners) > 1 else None, 0


def _format_computed(value: Number | bool, places: int) -> str:
    """Write a number for `{computed}` in a ledger's sentence, with at most `places` decimals and no zeros at the end."""
    text = f"{float(value):.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text
