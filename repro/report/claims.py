"""The status of every entry of a ledger, set by code; see `statuses`."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial

from .arithmetic import Number, agreement, decimals, near
from .expressions import Expression
from .ledger import Claim, Entry, Relation
from .paper import Paper
from .results import Missing, Results, SpeedGroup
from .statuses import DIFFERS, INCONSISTENT, MATCHED, NOT_MEASURED

_SPEEDS = {"fps", "memory_mib"}
_COSTS = {*_SPEEDS, "macs_g", "macs_saved_percent", "operator"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What a claim on speed or memory comes to on another device, or under other conditions, than the paper's.

    Args:
        group: the rows that it was taken from.
        value: the paper's quantity, or whether the statement holds there. The baseline has unfused attention, as in the paper.
        fused: the same with the fused attention that users run; None where there is no baseline in it, or no such row.
        baseline: its name.
        unit: the quantity's unit.
        parts: how many of a statement's comparisons were measured, and how many there are.
    """

    group: SpeedGroup
    value: float | bool
    fused: float | bool | None
    baseline: str
    unit: str
    parts: tuple[int, int]

    def format(self, value: float | bool | None) -> str:
        """`value`, which is this one's `value` or `fused`, in words."""
        if value is None:
            return "–"
        if isinstance(value, bool):
            measured, there_are = self.parts
            scope = "" if measured == there_are else f" in the {measured} of {there_are} measured"
            return ("holds" if value else "does not hold") + scope
        return f"{value:.4g}{self.unit if self.unit in '×%' else ''}"

    def __str__(self) -> str:
        fused = "" if self.fused is None else f"; against fused {self.baseline} {self.format(self.fused)}"
        return f"{self.format(self.value)} ({self.group}{fused})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What code found out about one entry.

    Args:
        entry: the ledger's entry.
        status: a key of `statuses.STATUSES`. `paper inconsistent` goes before the others; then ours is compared with the paper's.
        ours: our number, or whether the statement holds for ours; None where nothing was measured.
        how: `rounding`, `truncation` or `equality` for a number, `holds` for a statement; None where ours is not the paper's.
        delta: ours − paper; None for statements and where nothing was measured.
        evidence: why the paper contradicts itself.
        reason, command: why nothing was measured, and what would measure it.
        elsewhere: the same quantity under other conditions than the paper's; it is shown and not compared.
        sources: the records that ours was read from.
        checks, violations: how many relations to the paper's own numbers could be decided, and how many of them do not hold.
    """

    entry: Entry
    status: str
    ours: float | bool | None = None
    how: str | None = None
    delta: float | None = None
    evidence: str | None = None
    reason: str | None = None
    command: str | None = None
    elsewhere: tuple[Elsewhere, ...] = ()
    sources: tuple[str, ...] = ()
    checks: int = 0
    violations: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One paper's ledger, judged by the records.

    Args:
        paper: what the paper says.
        results: what we measured.
        verdicts: id of an entry -> the verdict on it, in the ledger's order.
        named: what params.yaml holds, in words.
    """

    paper: Paper
    results: Results
    verdicts: Mapping[str, Verdict]
    named: str

    @property
    def all(self) -> list[Verdict]:
        """The verdicts on all entries."""
        return list(self.verdicts.values())

    def of_claim(self, claim: Claim) -> list[Verdict]:
        """The verdicts on the entries of a claim."""
        return [self.verdicts[entry.id] for entry in claim.entries]


def judge_paper(paper: Paper, results: Results, *, speed_dtype: str, verbs: Sequence[str], profile: str | None) -> Report:
    """Judge every entry of a paper's ledger.

    Args:
        paper: what the paper says.
        results: what we measured.
        speed_dtype: the precision in which our rows on the paper's device stand for the paper's, which does not name its own.
        verbs: the verbs of the command line. A command with another verb is marked as not built yet.
        profile: the profile that params.yaml equals; None where it was edited.
    """
    judge = _Judge(paper, results, speed_dtype, verbs)
    verdicts = {entry.id: judge.judge(entry) for entry in paper.ledger.entries.values()}
    named = f"the {profile} profile" if profile else "edited parameters that equal no profile"
    return Report(paper=paper, results=results, verdicts=verdicts, named=named)


def is_of_speed(entry: Entry) -> bool:
    """Whether ours is read from measured speeds or peaks of memory."""
    return entry.ours is not None and any(call.name in _SPEEDS for call in entry.ours.calls)


def is_of_cost(entry: Entry) -> bool:
    """Whether ours is read from measured speeds, peaks of memory, or counts of multiply-adds."""
    return entry.ours is not None and any(call.name in _COSTS for call in entry.ours.calls)


class _Judge:
    def __init__(self, paper: Paper, results: Results, speed_dtype: str, verbs: Sequence[str]):
        self.paper, self.entries, self.results, self.verbs = paper, paper.ledger.entries, results, verbs
        conditions = paper.ledger.paper
        inference = [group for group in results.speed_rows if group.mode == "infer"]
        self.paper_group = next(
            (
                group
                for group in inference
                if conditions.speed_device in group.device and (str(group.batch_size), group.dtype) == (conditions.speed_batch, speed_dtype)
            ),
            None,
        )
        self.other_groups = [group for group in inference if group != self.paper_group]
        where = f"one {conditions.speed_device}"
        self.no_speed = (
            f"the paper measured on {where} at batch {conditions.speed_batch}; there are no such rows ({speed_dtype})",
            f"repro efficiency  # on {where}",
        )

    def judge(self, entry: Entry) -> Verdict:
        evidence, checks = self._check_paper(entry)
        found = {"evidence": entry.contradiction or "; ".join(evidence) or None, "checks": checks, "violations": len(evidence)}
        self.results.used.clear()
        try:
            ours = self._ours(entry, self.paper_group)
        except Missing as missing:
            status = INCONSISTENT if found["evidence"] else NOT_MEASURED
            found |= {"reason": missing.reason, "command": self._known(missing.command), "elsewhere": tuple(self._elsewhere(entry))}
            return Verdict(entry=entry, status=status.word, **found)
        found["sources"] = tuple(sorted(self.results.used))
        if entry.printed is None:
            how, delta = ("holds" if ours else None), None
        else:
            how = agreement(ours, entry.printed, exact=entry.kind == "setting")
            ours, delta = float(ours), float(ours) - float(Fraction(entry.printed))
        status = INCONSISTENT if found["evidence"] else MATCHED if how else DIFFERS
        return Verdict(entry=entry, status=status.word, ours=ours, how=how, delta=delta, **found)

    def _check_paper(self, entry: Entry) -> tuple[list[str], int]:
        """Evidence for each relation that the paper's own numbers violate, and how many relations could be decided."""
        checks = [partial(self._violation, entry, relation) for relation in entry.relations]
        if entry.holds is not None:
            checks.append(partial(self._refutation, entry))
        decided = []
        for check in checks:
            with contextlib.suppress(Missing):
                decided.append(check())
        return [evidence for evidence in decided if evidence], len(decided)

    def _violation(self, entry: Entry, relation: Relation) -> str | None:
        if relation.requires is not None:
            return None if self._of_paper(relation.expression) else self._explain(relation.because, relation.expression.left, 1)
        # a count of the model that the paper names is ours; everything else is the paper's own
        functions = self.results.functions() if relation.equals_count else None
        computed = self._of_paper(relation.expression, functions)
        if _satisfies(computed, entry, relation):
            return None
        rounding = "; the digits that the paper cut off could explain it" if self._explained_by_rounding(entry, relation) else ""
        return relation.because.format(computed=_format_computed(computed, decimals(entry.printed) + 1)) + rounding

    def _refutation(self, entry: Entry) -> str | None:
        if self._of_paper(entry.holds):
            return None
        return self._explain(entry.because or "the statement is false of the paper's own numbers", entry.holds.left, 3)

    def _explain(self, because: str, computed: Expression, places: int) -> str:
        return because.format(computed=_format_computed(self._of_paper(computed), places))

    def _explained_by_rounding(self, entry: Entry, relation: Relation) -> bool:
        """Whether the relation holds for some operands that round or truncate to the printed ones, tried at their extremes."""
        names = relation.expression.references
        units = {name: Fraction(1, 10 ** decimals(self.entries[name].printed)) for name in names}
        for shifts in itertools.product((Fraction(-1, 2), 1 - Fraction(1, 10**9)), repeat=len(names)):
            moved = {name: self._printed(name) + shift * units[name] for name, shift in zip(names, shifts, strict=True)}
            if names and _satisfies(relation.expression.evaluate(moved.__getitem__, self._paper_functions()), entry, relation):
                return True
        return False

    def _of_paper(self, expression: Expression, functions: dict[str, Callable] | None = None) -> Number | bool:
        """The value of an expression over the paper's printed numbers."""
        return expression.evaluate(self._printed, {**self._paper_functions(), **(functions or {})})

    def _printed(self, entry_id: str) -> Fraction:
        return Fraction(self.entries[entry_id].printed)

    def _paper_functions(self) -> dict[str, Callable]:
        def not_printed(*args):
            raise Missing("the paper prints no such number", "")

        measured = dict.fromkeys([*self.results.functions(), *_SPEEDS], not_printed)
        return {**measured, **self.paper.formulas, "agrees": self._agrees}

    def _agrees(self, value: Number, entry_id: str) -> bool:
        return agreement(value, self.entries[entry_id].printed) is not None

    def _ours(self, entry: Entry, group: SpeedGroup | None) -> Number | bool:
        """Our counterpart of an entry, with speeds from one group of rows; `Missing` where a part of it was not measured."""
        if entry.ours is None:
            raise Missing(entry.reason, entry.command)
        return self._evaluate_ours(entry.ours, group)

    def _evaluate_ours(self, expression: Expression, group: SpeedGroup | None, attention: str = "unfused") -> Number | bool:
        def not_measured(*args):
            raise Missing(*self.no_speed)

        speeds = self.results.speed_functions(group, attention) if group else dict.fromkeys(_SPEEDS, not_measured)
        functions = {**self.results.functions(), **speeds, **self.paper.formulas, "agrees": self._agrees}
        return expression.evaluate(lambda name: self._ours(self.entries[name], group), functions)

    def _elsewhere(self, entry: Entry) -> Iterator[Elsewhere]:
        """What the entry comes to on each other group of rows that has some of what it needs."""
        if not is_of_speed(entry):
            return
        parts = entry.ours.conjuncts
        has_baseline = any("unfused" in call.args for call in entry.ours.calls)
        for group in self.other_groups:
            values = self._decide(parts, group, "unfused")
            if not values:
                continue
            fused = self._decide(parts, group, "fused") if has_baseline else []
            yield Elsewhere(
                group=group,
                value=_join(values),
                fused=_join(fused) if len(fused) == len(values) else None,
                baseline=self.paper.baseline,
                unit=entry.unit,
                parts=(len(values), len(parts)),
            )

    def _decide(self, parts: Sequence[Expression], group: SpeedGroup, attention: str) -> list[Number | bool]:
        """The values of those parts for which everything was measured."""
        values = []
        for part in parts:
            with contextlib.suppress(Missing):
                values.append(self._evaluate_ours(part, group, attention))
        return values

    def _known(self, command: str) -> str:
        words = command.split()
        if words[:1] != ["repro"] or words[1] in self.verbs:
            return command
        return f"{command.partition('  #')[0]}  # not built yet"


def _satisfies(computed: Number, entry: Entry, relation: Relation) -> bool:
    slack = Fraction(relation.within_percent or 0)
    return near(Fraction(entry.printed), computed, slack) or agreement(computed, entry.printed) is not None


def _join(values: Sequence[Number | bool]) -> float | bool:
    """The parts of a statement hold together; a quantity has one part."""
    return all(values) if isinstance(values[0], bool) else float(values[0])


def _format_computed(value: Number | bool, places: int) -> str:
    text = f"{float(value):.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text
