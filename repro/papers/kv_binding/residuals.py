"""The residuals of what the paper proves: the error of every equation in fp64, and of what we put in place of those
that fail.
"""

from ...report.claims import Report
from ...report.document import Block, Piece, number, table
from ...report.expressions import Call
from . import formulas

ROUNDING = 1e-12
CHUNKS = (16, 32, 64, 256)
# equal bit for bit, on every processor
EXACT = (Call("identity_error", ("negated_loss",)), Call("mirrored_training_error", ()))


def list_residuals(report: Report) -> list[Block]:
    """A row for each equation of the ledger: where, what it says, its largest error in fp64, and that of the repaired
    equation.
    """
    rows: list[list[Piece]] = []
    for verdict in report.all:
        entry = verdict.entry
        calls = _find_errors(entry.ours.calls if entry.ours else ())
        if not calls:
            continue
        repaired = [
            call for each in entry.explanations if each.expression for call in _find_errors(each.expression.calls)
        ]
        shown = "; ".join(_format(report, call, named=len(calls) > 1) for call in calls)
        mended = "; ".join(_format(report, call, named=len(repaired) > 1) for call in repaired) or "–"
        rows.append([entry.place, entry.says, number(shown), number(mended), verdict.status])
    return [table(["where", "the paper says", "residual", "repaired", "status"], rows)]


def compare_momenta(_: Report) -> list[Block]:
    """By number of chunks, the error of the momenta of the authors' parallel code and of ours; large ones alone are
    told in digits.
    """
    rows: list[list[Piece]] = []
    for chunks in CHUNKS:
        divided, ours = (formulas.momentum_error(chunks, form) for form in ("divided", "ours"))
        rows.append(
            [
                number(chunks),
                number(f"{100 * divided:.0f} %" if divided > 0.01 else "< 0.1 %" if divided < 0.001 else "< 1 %"),
                number("< 1e-6" if ours < 1e-6 else f"{ours:.0e}"),
            ]
        )
    return [table(["chunks", "by division", "ours"], rows)]


def _find_errors(calls: tuple[Call, ...]) -> list[Call]:
    """Those that give a residual."""
    return [call for call in calls if call.name.endswith("_error")]


def _format(report: Report, call: Call, named: bool) -> str:
    """Two digits, or `< 1e-12`: what rounding leaves differs from one processor to the next. An equality bit for bit is
    0.
    """
    value = report.paper.formulas[call.name](*call.args)
    shown = f"{value:.1e}" if value >= ROUNDING else "0" if value == 0 and call in EXACT else f"< {ROUNDING:.0e}"
    return f"{call.args[0]} {shown}" if named else shown
