"""The status of every entry of the ledger, by code: `matched`, `differs`, `not measured` or `paper inconsistent`."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Literal

from .arithmetic import Number, agreement, conjuncts, evaluate, left_of_comparison, near, references
from .ledger import Entry, Ledger, Relation
from .sources import Missing, Results, SpeedGroup

Status = Literal["matched", "differs", "not measured", "paper inconsistent"]
STAGES_FOLDER = Path(__file__).resolve().parents[2] / "stages"
STATUSES: tuple[Status, ...] = ("matched", "differs", "not measured", "paper inconsistent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What a claim on speed or memory comes to on another device, or under other conditions, than the paper's.

    Args:
        group: the rows that it was taken from.
        value: the paper's quantity, or whether the statement holds there, DeiT with unfused attention as in the paper.
        fused: the same with DeiT's fused attention, as a user runs it; None where DeiT is not part of it, or was not measured so.
        unit: of the quantity.
        parts: how many of a statement's comparisons were measured, and how many there are.
    """

    group: SpeedGroup
    value: float | bool
    fused: float | bool | None
    unit: str
    parts: tuple[int, int]

    def said(self, value: float | bool | None) -> str:
        """`value`, this one's or its `fused`, in words."""
        if value is None:
            return "–"
        if isinstance(value, bool):
            measured, all_of_them = self.parts
            return ("holds" if value else "does not hold") + (
                "" if measured == all_of_them else f" in the {measured} of {all_of_them} measured"
            )
        return f"{value:.4g}{self.unit if self.unit in '×%' else ''}"

    def __str__(self) -> str:
        fused = "" if self.fused is None else f"; against fused DeiT {self.said(self.fused)}"
        return f"{self.said(self.value)} ({self.group}{fused})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What code found out about one entry.

    Args:
        entry: the ledger's entry.
        status: `paper inconsistent` goes before all others; then whether ours equals the paper's.
        ours: our number, or whether the statement holds for ours; None where nothing was measured.
        how: `rounding`, `truncation` or `equality` for numbers, `holds` for statements; None where ours is not the paper's.
        delta: ours - paper; None for statements and where nothing was measured.
        evidence: why the paper contradicts itself.
        reason, command: why nothing was measured, and what would.
        elsewhere: the same quantity on other devices than the paper's; not compared.
        sources: the records that ours was read from.
        checks, violations: relations to the paper's own numbers that could be decided, and those that do not hold.
    """

    entry: Entry
    status: Status
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


def judge(ledger: Ledger, results: Results, speed_dtype: str) -> dict[str, Verdict]:
    """The verdict on every entry, in the ledger's order.

    Args:
        ledger: what the paper says.
        results: what we measured.
        speed_dtype: the precision in which our rows on the paper's device stand for the paper's, which does not name its own.
    """
    bench = _Bench(ledger, results, speed_dtype)
    return {entry.id: bench.verdict(entry) for entry in ledger.entries.values()}


def is_of_speed(entry: Entry) -> bool:
    """Whether ours is read from measured speeds or peaks of memory."""
    return entry.ours is not None and any(f"{name}(" in entry.ours for name in ("fps", "memory_mib"))


def status_counts(verdicts: Mapping[str, Verdict]) -> Counter[Status]:
    """How many entries have each status."""
    return Counter(verdict.status for verdict in verdicts.values())


def decimals(printed: str) -> int:
    """Digits after the point in a printed number: 2 for `1.44`, 3 for `1e-3`."""
    return max(-int(Decimal(printed).as_tuple().exponent), 0)


def _shown(value: Number, places: int) -> str:
    text = f"{float(value):.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def runnable(command: str) -> str:
    """The command, with a word where its stage does not exist yet."""
    verb = re.match(r"repro ([a-z-]+)", command)
    if verb is None or (STAGES_FOLDER / f"{verb[1].replace('-', '_')}.py").is_file():
        return command
    return f"{command.partition('  #')[0]}  # not built yet"


class _Bench:
    def __init__(self, ledger: Ledger, results: Results, speed_dtype: str):
        self.ledger, self.results = ledger, results
        paper = ledger.paper
        fitting = [
            group
            for group in results.speed_rows
            if paper.speed_device in group.device
            and str(group.batch) == paper.speed_batch
            and group.dtype == speed_dtype
            and group.mode == "infer"
        ]
        self.paper_group = fitting[0] if fitting else None
        self.other_groups = [group for group in results.speed_rows if group != self.paper_group and group.mode == "infer"]
        self.no_speed = (
            f"the paper measured on one {paper.speed_device} at batch {paper.speed_batch}; there are no such rows ({speed_dtype})"
        )

    def verdict(self, entry: Entry) -> Verdict:
        evidence, checks = self._check_paper(entry)
        found = {"evidence": "; ".join(evidence) or None, "checks": checks, "violations": len(evidence)}
        if entry.contradiction:
            found["evidence"] = entry.contradiction
        self.results.used.clear()
        try:
            ours = self._ours(entry, self.paper_group)
        except Missing as missing:
            status = "paper inconsistent" if found["evidence"] else "not measured"
            found |= {"reason": missing.reason, "command": runnable(missing.command), "elsewhere": tuple(self._elsewhere(entry))}
            return Verdict(entry=entry, status=status, **found)
        found["sources"] = tuple(sorted(self.results.used))
        if entry.printed is None:
            how, delta = ("holds" if ours else None), None
        else:
            how = agreement(ours, entry.printed, exact=entry.kind == "setting")
            ours, delta = float(ours), float(ours) - float(Fraction(entry.printed))
        status = "paper inconsistent" if found["evidence"] else "matched" if how else "differs"
        return Verdict(entry=entry, status=status, ours=ours, how=how, delta=delta, **found)

    def _check_paper(self, entry: Entry) -> tuple[list[str], int]:
        """Evidence for each relation that the paper's own numbers violate, and how many could be decided."""
        evidence, checks = [], 0
        for relation in entry.relations:
            try:
                violation = self._violation(entry, relation)
            except Missing:
                continue
            checks += 1
            if violation is not None:
                evidence.append(violation)
        if entry.holds is not None:
            try:
                holds = evaluate(entry.holds, self._printed, self._paper_functions())
            except Missing:
                return evidence, checks
            checks += 1
            if not holds:
                left = evaluate(left_of_comparison(entry.holds), self._printed, self._paper_functions())
                evidence.append((entry.because or "the statement is false of the paper's own numbers").format(computed=_shown(left, 3)))
        return evidence, checks

    def _violation(self, entry: Entry, relation: Relation) -> str | None:
        if relation.requires is not None:
            if evaluate(relation.requires, self._printed, self._paper_functions()):
                return None
            computed = evaluate(left_of_comparison(relation.requires), self._printed, self._paper_functions())
            return relation.because.format(computed=_shown(computed, 1))
        if relation.equals_count is not None:
            computed = evaluate(relation.equals_count, self._printed, self.results.functions())
        else:
            computed = evaluate(relation.expression, self._printed, self._paper_functions())
        if self._satisfies(computed, entry, relation):
            return None
        rounding = "; the digits that the paper cut off could explain it" if self._explained_by_rounding(entry, relation) else ""
        return relation.because.format(computed=_shown(computed, decimals(entry.printed) + 1)) + rounding

    @staticmethod
    def _satisfies(computed: Number, entry: Entry, relation: Relation) -> bool:
        slack = Fraction(relation.within_percent or 0)
        return near(Fraction(entry.printed), computed, slack) or agreement(computed, entry.printed) is not None

    def _explained_by_rounding(self, entry: Entry, relation: Relation) -> bool:
        """Whether the relation holds for some operands that round or truncate to the printed ones, taken at their extremes."""
        names = sorted(set(references(relation.expression)))
        units = {name: Fraction(1, 10 ** decimals(self.ledger.entries[name].printed)) for name in names}
        for shifts in itertools.product((Fraction(-1, 2), 1 - Fraction(1, 10**9)), repeat=len(names)):
            moved = {name: self._printed(name) + shift * units[name] for name, shift in zip(names, shifts, strict=True)}
            if names and self._satisfies(evaluate(relation.expression, moved.__getitem__, self._paper_functions()), entry, relation):
                return True
        return False

    def _printed(self, entry_id: str) -> Fraction:
        return Fraction(self.ledger.entries[entry_id].printed)

    def _paper_functions(self) -> dict[str, Callable]:
        def nothing(*args):
            raise Missing("the paper prints no such number", "")

        return {**dict.fromkeys([*self.results.functions(), "fps", "memory_mib"], nothing), "agrees": self._agrees}

    def _agrees(self, value: Number, entry_id: str) -> bool:
        return agreement(value, self.ledger.entries[entry_id].printed) is not None

    def _ours(self, entry: Entry, group: SpeedGroup | None) -> Number | bool:
        """Our counterpart of an entry, speeds taken from one group of rows.

        Raises:
            Missing: a part of it was not measured.
        """
        if entry.ours is None:
            raise Missing(entry.reason, entry.command)
        return evaluate(entry.ours, lambda name: self._ours(self.ledger.entries[name], group), self._our_functions(group))

    def _our_functions(self, group: SpeedGroup | None, deit: str = "unfused") -> dict[str, Callable]:
        def nothing(*args):
            raise Missing(self.no_speed, f"repro efficiency  # on one {self.ledger.paper.speed_device}")

        speed = {"fps": nothing, "memory_mib": nothing} if group is None else self.results.speed_functions(group, deit)
        return {**self.results.functions(), **speed, "agrees": self._agrees}

    def _elsewhere(self, entry: Entry) -> Iterator[Elsewhere]:
        """What the entry comes to on each other group of rows that has something of what it needs."""
        if not is_of_speed(entry):
            return
        parts = conjuncts(entry.ours)
        for group in self.other_groups:
            values = self._decided(parts, group, "unfused")
            if not values:
                continue
            fused = self._decided(parts, group, "fused") if '"unfused"' in entry.ours else []
            as_one = all if isinstance(values[0], bool) else lambda numbers: float(numbers[0])
            yield Elsewhere(
                group=group,
                value=as_one(values),
                fused=as_one(fused) if len(fused) == len(values) else None,
                unit=entry.unit,
                parts=(len(values), len(parts)),
            )

    def _decided(self, parts: list[str], group: SpeedGroup, deit: str) -> list[Number | bool]:
        """The values of the parts of which everything was measured."""
        values = []
        for part in parts:
            try:
                values.append(evaluate(part, lambda name: self._ours(self.ledger.entries[name], group), self._our_functions(group, deit)))
            except Missing:
                continue
        return values
