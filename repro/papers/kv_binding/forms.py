"""The report's tables and figure on the recurrent and parallel forms of inner learners (`repro kernels forms`).

page.md calls most public functions by name.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...core.figures import new_figure, save_png
from ...report.claims import Report
from ...report.markdown import cross, join, number, picture, show_interval, table
from ...report.paper import Drawings
from ...report.records import Source, describe_origin, group_by
from ...report.results import Missing

_COMMAND = "repro kernels forms"
_PICTURE = "kv_binding_forms.png"
_STEPS = ("own", "v1", "v2", "v3", "v4", "v5", "v6")  # of LaCT, towards linear attention
_NAMES = {
    **{f"lact_{step}": f"LaCT, {step.upper() if step != 'own' else 'unchanged'}" for step in _STEPS},
    "vittt_own": "Vittt, unchanged (LayerNorm)",
    "vittt_plain": "Vittt, plain",
    "vittt_dot": "Vittt, dot",
}
_MODELS = {"lact": "LaCT", "vittt": "Vittt"}
# learner -> (colour, marker) in the figure; the others have no parallel form
_STYLES = {
    "lact_v2": ("#E69F00", "o"),
    "lact_v3": ("#56B4E9", "s"),
    "lact_v4": ("#009E73", "^"),
    "lact_v5": ("#CC79A7", "v"),
    "lact_v6": ("#0072B2", "D"),
    "vittt_plain": ("#D55E00", "P"),
    "vittt_dot": ("#000000", "x"),
}
_FORMS = ("recurrent", "parallel")
_MODES = {"infer": "forward", "train": "forward and backward"}


def _find_forms(report: Report) -> list[Source]:
    """Read the files of `repro kernels forms`, those of GPUs first; the metrics of each are its `rows` and `ratios`."""
    from ...bench.forms import compare_forms, read_forms  # loads torch

    found, paths = [], report.results.paths
    for file in sorted(paths.speed.glob("forms/*.csv")):
        if rows := read_forms(file):
            metrics = {"rows": rows, "ratios": compare_forms(rows)}
            identity = {"device": rows[0]["device"], "parent_commit": rows[-1]["commit"]}
            found.append(Source(file.relative_to(paths.root).as_posix(), metrics, identity))
    return sorted(found, key=lambda source: (not source.device.startswith("cuda"), source.device))


def list_ratios(report: Report) -> str:
    """Tabulate, for each device and mode, the speed ratios over the number of tokens, with crossover and memory."""
    blocks: list[str] = []
    for source in _require_forms(report):
        timed = [row for row in source.metrics["rows"] if row["setting"] == "vision"]
        memory = {(row["learner"], row["mode"], row["tokens"], row["form"]): row["peak_memory_mib"] for row in timed}
        chunks = {row["learner"].partition("_")[0]: row["chunk_size"] for row in timed}
        for mode, words in _MODES.items():
            rows = [row for row in source.metrics["ratios"] if (row["setting"], row["mode"]) == ("vision", mode)]
            if not rows:
                continue
            cells: dict[tuple[str, float], str] = {}
            for learner, alike in group_by(rows, lambda row: row["learner"]).items():
                for row in alike:
                    recurrent, parallel = (memory[learner, mode, row["tokens"], form] for form in _FORMS)
                    ratio = show_interval(row["ratio"], row["ratio_ci95"], ".2f")
                    cells[_NAMES[learner], row["tokens"]] = f"{ratio} ({parallel / recurrent:.1f}×)"
                cells[_NAMES[learner], math.inf] = find_crossover(alike)  # the column after all lengths
            size = f"one image, {timed[0]['heads']} heads of {timed[0]['head_dim']}, chunks of"
            lengths = ", ".join(f"{_MODELS[model]} {chunk}" for model, chunk in chunks.items())
            blocks.append(f"### {words.capitalize()}, {size} {lengths} tokens; {describe_origin([source])}")
            blocks.append(
                cross("learner", cells, number, lambda tokens: "crossover" if tokens == math.inf else f"T {tokens:,}")
            )
    return join(blocks)


def find_setting(report: Report, key: str) -> int:
    """Return a number of the paper's setting from the first record that has such rows.

    Raises:
        Missing: none has, e.g. since `repro kernels forms` was interrupted.
    """
    rows = (row for source in _require_forms(report) for row in source.metrics["rows"] if row["setting"] == "paper")
    if (row := next(rows, None)) is None:
        raise Missing("the paper's setting is not measured yet", _COMMAND)
    return row[key]


def show_picture(report: Report) -> str:
    """Embed the figure, with a sentence if no record comes from a GPU."""
    sources = _require_forms(report)
    shown = picture(f"figures/{_PICTURE}", "the parallel form's speed over the recurrent one's")
    said = "No row is of a GPU: none was at hand. `repro kernels forms` measures the same rows there."
    return join([shown, "" if any(source.device.startswith("cuda") for source in sources) else said])


def list_backbones(report: Report) -> str:
    """Tabulate time and memory of one image at each size, for Vittt-T with each learner and form."""

    def name(row: Mapping[str, Any]) -> tuple[str, str]:
        """Return (learner, form); for the unchanged learner, its backend in place of the form."""
        return row["learner"], row["backend"] if row["form"] == "auto" else row["form"]

    blocks: list[str] = []
    for source in _require_forms(report):
        rows = _list_backbone_rows(source)
        sides = sorted({row["tokens"] for row in rows})
        body: list[list[str]] = []
        for (step, form), alike in group_by(rows, name).items():
            timed = {row["tokens"]: row for row in alike if row["latency_ms"] is not None}
            body.append(["unchanged" if step == "own" else step, form])
            for tokens in sides:
                row = timed.get(tokens, {})
                body[-1].append(number(row.get("latency_ms"), ".1f"))
                body[-1].append(number(row.get("peak_memory_mib") or None, ".0f"))
        columns = [f"{find_side(tokens)}² ({unit})" for tokens in sides for unit in ("ms", "MiB")]
        if rows:
            blocks.append(f"Vittt-T, one image, fp32; {describe_origin([source])}.")
            blocks.append(table(["learner", "form", *columns], body))
    return join(blocks)


def _list_backbone_rows(source: Source) -> list[Mapping[str, Any]]:
    """Return the rows that measure the whole backbone Vittt-T."""
    from ...bench.forms import BACKBONE

    return [row for row in source.metrics["rows"] if row["setting"] == BACKBONE]


def find_side(tokens: int) -> int:
    """Return the side in pixels of a square image with so many tokens of 16×16 pixels."""
    return 16 * math.isqrt(tokens)


def _require_forms(report: Report) -> list[Source]:
    """Return the files of `_find_forms`; raise `Missing` without any."""
    if not (sources := _find_forms(report)):
        raise Missing("nothing is measured yet", _COMMAND)
    return sources


def find_backbones(report: Report) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return (learner, form) -> row of the largest image at which Vittt-T was timed with every learner of the device.

    The device is the first that timed the unchanged learner and another one; the result is empty if none did.
    """
    for source in _find_forms(report):
        timed = [row for row in _list_backbone_rows(source) if row["latency_ms"] is not None]
        learners = {row["learner"] for row in timed}
        for tokens in sorted({row["tokens"] for row in timed}, reverse=True):
            found = {(row["learner"], row["form"]): row for row in timed if row["tokens"] == tokens}
            if ("own", "auto") in found and len(learners) > 1 and {learner for learner, _ in found} == learners:
                return found
    return {}


def plan_drawings(report: Report) -> Drawings:
    """Plan the figure of the ratios, if any were measured."""
    sources = _find_forms(report)
    return {_PICTURE: (sources, partial(_draw_forms, source=sources[0]))} if sources else {}


def _draw_forms(path: Path, source: Source) -> Path:
    """Draw the ratios over the number of tokens, with one panel for each mode."""
    figure, panels = new_figure(len(_MODES))
    for panel, (mode, words) in zip(panels, _MODES.items(), strict=True):
        for learner, (colour, marker) in _STYLES.items():
            asked = ("vision", learner, mode)
            ratios = source.metrics["ratios"]
            rows = [row for row in ratios if (row["setting"], row["learner"], row["mode"]) == asked]
            if not rows:
                continue
            x, y = [row["tokens"] for row in rows], [row["ratio"] for row in rows]
            panel.plot(x, y, color=colour, marker=marker, markersize=5, label=_NAMES[learner])
            if all(row["ratio_ci95"] for row in rows):
                ends = zip(*(row["ratio_ci95"] for row in rows), strict=True)
                panel.fill_between(x, *ends, color=colour, alpha=0.12, linewidth=0)
        panel.axhline(1, color="#777777", linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel="tokens", title=words)
        ticks = sorted({row["tokens"] for row in source.metrics["ratios"] if row["setting"] == "vision"})
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
        panel.set_xticks([], minor=True)
        panel.set_yticks(shown := [0.25, 0.5, 1, 2, 4], [f"{tick:g}" for tick in shown])
        panel.set_yticks([], minor=True)
        panel.grid(True, linewidth=0.4, alpha=0.5)
    panels[0].set_ylabel("speed of the parallel form over the recurrent one")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"{source.device}, fp32; above 1 the parallel form is faster", fontsize=11)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    return save_png(figure, path)


def find_crossover(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write in words from how many tokens on the parallel form is faster; `rows` are the ratios of one learner.

    It is faster where the interval of the ratio lies above one. Too few turns for an interval count by their ratio.
    """
    lengths = sorted(row["tokens"] for row in rows)
    ahead = sorted(row["tokens"] for row in rows if min(row["ratio_ci95"] or [row["ratio"]]) > 1)
    if not ahead:
        return "never ahead"
    if ahead == lengths:
        return "always ahead"
    if ahead == lengths[-len(ahead) :]:
        return f"ahead from {ahead[0]:,}"
    if ahead == lengths[: len(ahead)]:
        return f"ahead below {lengths[len(ahead)]:,}"
    return "ahead at " + ", ".join(f"{tokens:,}" for tokens in ahead)


def compare_setting(report: Report) -> str:
    """Tabulate the paper's Table 2 next to our numbers in the same setting, for each device."""
    entries = report.paper.ledger.entries
    blocks: list[str] = []
    for source in _require_forms(report):
        rows = {(row["learner"], row["form"]): row for row in source.metrics["rows"] if row["setting"] == "paper"}
        ratios = {row["learner"]: row["ratio"] for row in source.metrics["ratios"] if row["setting"] == "paper"}
        body: list[list[str]] = []
        for step in _STEPS:
            row, learner = "baseline" if step == "own" else step, f"lact_{step}"
            theirs = [entries.get(f"table2_{form}.{row}.tokens_m_per_s") for form in _FORMS]
            printed = [entry and float(entry.printed) for entry in theirs]
            speeds = [rows[learner, form]["tokens_m_per_s"] if (learner, form) in rows else None for form in _FORMS]
            shown = [number(value, "g") for value in printed]
            shown += [number(None if None in printed else printed[1] / printed[0], ".2f")]
            shown += [number(speed, ".3f") for speed in speeds]
            body.append([_NAMES[learner], *shown, number(ratios.get(learner), ".2f")])
        names = (*(f"{form} (M/s)" for form in _FORMS), "ratio")
        header = [f"{whose}: {name}" for whose in ("paper", "ours") for name in names]
        origin = f"`{source.path}`: {describe_origin([source])}"
        blocks += [origin, table(["", *header], body)] if rows else []
    return join(blocks)
