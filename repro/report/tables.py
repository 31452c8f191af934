"""results/tables.md from the verdicts and the records. The same records give the same bytes: no dates, no order of chance."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .ablations import ablation_parts
from .claims import STATUSES, Verdict, is_of_speed, status_counts
from .gallery import examples_md, figures_md
from .index import index_md, shown_commands
from .ledger import Claim, Entry, Ledger, Table
from .sources import Results, Source, SpeedGroup, missing_cells
from .wording import KINDS, MARKS, grid, marks, ours, significant

HEADLINES = (
    "text.abstract.",
    "text.5_3.flops_saved_1280",
    "text.5_3.speedup_1280",
    "text.5_3.memory_saved_1280",
    "text.5_3.faster_than_vim",
)
SCORES = {
    "top1": "top1",
    "top5": "top5",
    "ap_box": "box AP",
    "ap50_box": "AP50",
    "ap_mask": "mask AP",
    "ap50_mask": "AP50",
    "miou": "mIoU",
    "aacc": "pixels",
}


def tables_md(ledger: Ledger, verdicts: Mapping[str, Verdict], results: Results, profile: str | None) -> str:
    """The page that a reader opens first.

    Args:
        ledger: what the paper says.
        verdicts: what became of it.
        results: the records, for what is shown beside the comparison.
        profile: the profile that params.yaml equals; None when it was edited.
    """
    named = f"the `{profile}` profile" if profile else "edited parameters that equal no profile"
    parts = [
        _head(ledger, named),
        *_missing(results),
        _summary(verdicts),
        _headlines(ledger, verdicts),
        *(_table(table, verdicts) for table in ledger.tables),
        figures_md(verdicts, results, named),
        *ablation_parts(results, ledger),
        _efficiency_claims(ledger, verdicts),
        _efficiency(results),
        _mini(results),
        examples_md(results, named),
        _claims(ledger, verdicts),
        _contradictions(verdicts),
        _not_measured(verdicts),
        index_md(ledger, verdicts),
        _provenance(results),
    ]
    return "\n\n".join(parts) + "\n"


def _head(ledger: Ledger, named: str) -> str:
    paper = ledger.paper
    return f"""# The paper's numbers and ours

*{paper.title}*, {paper.version}: every number of its tables and text beside ours.
`repro report` writes this page from the records under `results/` and from the ledger `repro/report/paper.yaml`; code sets every
status. params.yaml holds {named}. All entries, with reasons, commands and records, are in `claims.csv` and `claims.json`.

| mark | status | means |
|---|---|---|
| ✓ | matched | ours, rounded to the paper's printed digits, is the paper's number; ✓ᵗ where it takes truncation instead |
| ≠ | differs | it is not; the difference ours − paper stands in parentheses |
| – | not measured | no number of ours exists under the paper's conditions; reasons and commands are listed below |
| ⚠ | paper inconsistent | the paper contradicts itself, or a count of the model that it names; evidence below |

Parameters are in millions; the paper's FLOPs are multiply-adds, and so are ours. Accuracy is compared only when it was taken on
the whole validation split of the paper's data set, speed and memory only when taken on one {paper.speed_device} at batch
{paper.speed_batch}."""


def _missing(results: Results) -> list[str]:
    """What the pipeline would write at these parameters and is not there; nothing where all of it is."""
    missing = missing_cells(results.paths)
    if not missing:
        return []
    rows = [[f"`{record}`", f"`{command}`"] for record, command in missing]
    text = "dvc.yaml and params.yaml ask for these records, and they are not there: not run yet, or interrupted (`repro status`)."
    return [f"## Missing cells\n\n{text}\n\n" + grid(["record", "what makes it"], rows)]


def _summary(verdicts: Mapping[str, Verdict]) -> str:
    rows = []
    for kind, label in KINDS.items():
        of_kind = {name: verdict for name, verdict in verdicts.items() if verdict.entry.kind == kind}
        counts = status_counts(of_kind)
        rows.append([label, *(counts[status] for status in STATUSES), len(of_kind)])
    counts = status_counts(verdicts)
    rows.append(["**all**", *(f"**{counts[status]}**" for status in STATUSES), f"**{len(verdicts)}**"])
    checks, violations = (sum(getattr(verdict, name) for verdict in verdicts.values()) for name in ("checks", "violations"))
    counted = grid(["entries of the ledger", *STATUSES, "all"], rows)
    return f"""## Summary

{counted}

{checks} relations that the paper's numbers must satisfy among themselves were recomputed (differences quoted in the text,
the same model in two tables, Eq. 13, counts of named models): {checks - violations} hold, {violations} do not."""


def _headlines(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> str:
    chosen = [claim for claim in ledger.claims if any(entry.id.startswith(HEADLINES) for entry in claim.entries)]
    return "## Headline claims\n\n" + _claim_grid(chosen, verdicts, reasons=True)


def _table(table: Table, verdicts: Mapping[str, Verdict]) -> str:
    header = ["", *(f"{column.label} ({column.unit})" for column in table.columns.values())]
    rows = [[label, *(_cell(verdicts[f"{table.id}.{row}.{column}"]) for column in table.columns)] for row, label in table.rows.items()]
    counts = status_counts({name: verdict for name, verdict in verdicts.items() if name.startswith(f"{table.id}.")})
    counted = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    note = f" {table.note}" if table.note else ""
    return f"## {table.place}: {table.title}\n\nEach cell: paper → ours. {counted}.{note}\n\n" + grid(header, rows)


def _cell(verdict: Verdict) -> str:
    printed = verdict.entry.printed
    mark = MARKS[verdict.status]
    if verdict.ours is None:
        return f"{printed} {mark}" if verdict.status == "paper inconsistent" else f"{printed} → {mark}"
    return f"{printed} → {ours(verdict)} {marks(verdict)}"


def _efficiency_claims(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> str:
    """Every claim of the paper on cost, and what it comes to: counted, on the paper's device, and on each of ours."""
    rows = []
    for claim in ledger.claims:
        for verdict in (verdicts[entry.id] for entry in claim.entries):
            counted = any(name in (verdict.entry.ours or "") for name in ('complexity("saved', "macs_g(", "operator("))
            if not counted and not is_of_speed(verdict.entry):
                continue
            about = [claim.place, claim.says, _key(claim, verdict) + (verdict.entry.printed or "")]
            if verdict.ours is not None:
                rows.append([*about, ", ".join(verdict.sources), f"{ours(verdict)} {marks(verdict)}", "–"])
            rows += [[*about, each.group, each.said(each.value), each.said(each.fused)] for each in verdict.elsewhere]
            if verdict.ours is None and not verdict.elsewhere:
                rows.append([*about, "–", verdict.reason, "–"])
    head = ["where", "the paper says", "number", "measured on, or counted in", "as in the paper: unfused DeiT", "fused DeiT"]
    return (
        "## The paper's efficiency claims, here\n\n"
        "The paper's DeiT has unfused attention; today's users run the fused one, so both stand here. Speed of another device than\n"
        "the paper's says what holds on that device.\n\n" + grid(head, rows)
    )


def _efficiency(results: Results) -> str:
    title = "## Speed and memory measured here"
    if not results.speed_rows:
        return f"{title}\n\nNothing is measured yet: `repro efficiency`."
    parts = [
        f"{title}\n\nMedian step of a fresh process per row, with the distribution-free 95 % interval. DeiT runs twice:\n"
        "`unfused` attention is what the paper's quadratic memory implies, `fused` is what a user runs today.\n"
        "These rows stand for their own device only."
    ]
    head = ["model", "attention", "pixels", "images/s", "step (ms)", "95 % interval", "peak memory (MiB)", "multiply-adds (G)"]
    for group, rows in results.speed_rows.items():
        parts.append(f"### {group}, {group.mode}")
        swept = [(row, source) for row, source in rows if "compared" in source.metrics]
        listed = [_speed_row(row) for row, source in rows if "compared" not in source.metrics]
        parts += [grid(head, listed) + _ratios(results, group)] if listed else []
        parts += [_sweep(group, swept)] if swept else []
    return "\n\n".join(parts)


def _sweep(group: SpeedGroup, rows: Sequence[tuple[Mapping[str, Any], Source]]) -> str:
    """A sweep of one group: time and memory of every model over the side, and what they say of Vittt."""
    names = list(dict.fromkeys((row["model"], row["attention"]) for row, _ in rows))
    sides = sorted({row["resolution"][0] for row, _ in rows})
    cells = {(row["model"], row["attention"], row["resolution"][0]): row for row, _ in rows}
    parts = []
    for key, label in (("latency_ms", "Step (ms)"), ("peak_memory_mib", "Peak memory (MiB)")):
        table = []
        for model, attention in names:
            found = [cells.get((model, attention, side)) for side in sides]
            shown = ["–" if row is None else significant(row[key]) if row["status"] == "ok" else row["status"] for row in found]
            table.append([f"{model}{f', {attention}' if attention else ''}", *shown])
        parts.append(f"{label}, by image side:\n\n" + grid(["model", *(f"{side}²" for side in sides)], table))
    metrics = rows[0][1].metrics
    same = [each for each in metrics["compared"] if _of_group(each, group)]
    if same:
        parts.append(
            "Vittt against each family at the largest side where both ran, and from which side on it is faster:\n\n"
            + grid(["size", "against", "side", "speed-up", "memory saved", "faster"], [_compared_row(each) for each in same])
        )
    grown = [each for each in metrics["growth"] if _of_group(each, group) and len(each["sides"]) > 1]
    if grown:
        powers = "macs_exponent", "latency_exponent", "memory_exponent"
        table = [[_named(each), *(significant(each[power]) for power in powers)] for each in grown]
        parts.append(
            "Growth with the tokens from 512 pixels on, as fitted exponents (1 linear, 2 quadratic; Eq. 13 and 14):\n\n"
            + grid(["model", "multiply-adds", "time", "memory"], table)
        )
    return "\n\n".join(parts)


def _of_group(found: Mapping[str, Any], group: SpeedGroup) -> bool:
    mode = f"{found['mode']}, compiled" if found["compile"] else found["mode"]
    return (found["batch"], found["dtype"], mode) == (group.batch, group.dtype, group.mode)


def _named(found: Mapping[str, Any]) -> str:
    return found["model"] if found["attention"] == "none" else f"{found['model']}, {found['attention']}"


def _compared_row(found: Mapping[str, Any]) -> list[str]:
    if found["speedup"] is None:
        return [found["size"], found["against"], "–", f"no ratio: {found['reason']}", "–", "–"]
    faster = found["crossover"] if found["crossover_side"] is None else f"{found['crossover']} {found['crossover_side']:.0f}²"
    saved = "–" if found["memory_saved_percent"] is None else f"{significant(found['memory_saved_percent'])} %"
    return [found["size"], found["against"], f"{found['side']}²", f"{significant(found['speedup'])}×", saved, faster]


def _speed_row(row: Mapping[str, Any]) -> list[str]:
    height, width = row["resolution"] if isinstance(row["resolution"], list) else (row["resolution"],) * 2
    low, high = row["latency_ms_ci95"] or (None, None)
    return [
        row["model"],
        row["attention"] or "–",
        f"{height}×{width}",
        significant(row["throughput_img_per_s"]) if row["status"] == "ok" else row["status"],
        significant(row["latency_ms"]),
        "–" if low is None else f"{significant(low)} – {significant(high)}",
        significant(row["peak_memory_mib"]),
        significant(row["macs_g"]),
    ]


def _ratios(results: Results, group: SpeedGroup) -> str:
    """The paper's two ratios, Vittt against DeiT at 1280×1280, for the records of this group."""
    lines = []
    for source in dict.fromkeys(source.path for _, source in results.speed_rows[group]):
        metrics = next(s.metrics for s in results.sources if s.path == source)
        for key, label, unit in (("speedup_at_1280", "speed-up", "×"), ("memory_saved_at_1280_percent", "memory saved", " %")):
            for size, compared in sorted((metrics.get(key) or {}).items()):
                shown = [_ratio(compared, attention, unit) for attention in ("unfused", "fused")]
                lines.append(f"- Vittt-{size} against DeiT-{size} at 1280×1280, {label}: {', '.join(shown)}.")
        share = (metrics.get("op") or {}).get("share_of_matmul_rate")
        if share is not None:
            lines.append(f"- The op `ttt_linear_bidir` alone reaches {100 * share:.0f} % of the machine's matrix-product rate.")
    return "\n\n" + "\n".join(lines) if lines else ""


def _ratio(compared: Mapping[str, Any], attention: str, unit: str) -> str:
    value = compared.get(f"vs_deit_{attention}")
    if value is None:
        return f"against {attention} not measured ({compared.get(f'vs_deit_{attention}_reason', 'no such row')})"
    return f"{significant(value)}{unit} against {attention}"


def _mini(results: Results) -> str:
    title = "## Runs on other data: no comparison with the paper"
    cells = results.mini_cells
    if not cells:
        return f"{title}\n\nNone yet: `repro pretrain`."
    rows = []
    for source in cells:
        m = source.metrics
        held_out = m.get("val_images", m.get("images"))
        run = source.path.removeprefix("results/").removesuffix("/metrics.json")
        rows.append(
            [
                f"`{run}`",
                results.model_key(m, source.path),
                m["data"],
                m.get("epochs", "–"),
                "–" if held_out is None else f"{held_out:.0f}",
                _scores(m),
                source.device,
            ]
        )
        # runs on the same data have it in common
        if "without_learning" in m and not any(row[2] == m["data"] and row[5] == _scores(m["without_learning"]) for row in rows):
            rows.append(
                [f"`{run}`", "no learning: threshold, nearest example", m["data"], "–", rows[-1][4], _scores(m["without_learning"]), "–"]
            )
    text = "These show that the code trains and evaluates. They say nothing about the paper's accuracies, and no status uses them."
    return f"{title}\n\n{text}\n\n" + grid(["run", "model", "data", "epochs", "held-out images", "scores", "device"], rows)


def _scores(metrics: Mapping[str, Any]) -> str:
    values = ((label, metrics.get(f"{name}_percent")) for name, label in SCORES.items())
    return ", ".join(f"{label} {value:.2f} %" for label, value in values if isinstance(value, (int, float)))


def _claims(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> str:
    return "## The text's claims\n\n" + _claim_grid(ledger.claims, verdicts)


def _claim_grid(claims: Iterable[Claim], verdicts: Mapping[str, Verdict], *, reasons: bool = False) -> str:
    rows = []
    for claim in claims:
        own = [verdicts[entry.id] for entry in claim.entries]
        elsewhere = [f"{_key(claim, v)}{', '.join(map(str, v.elsewhere))}" for v in own if v.elsewhere]
        notes = {f"elsewhere: {', '.join(elsewhere)}": None} if elsewhere else {}
        if reasons:
            notes |= dict.fromkeys(v.reason for v in own if v.status == "not measured")
            notes |= dict.fromkeys("[⚠ why](#where-the-paper-contradicts-itself)" for v in own if v.status == "paper inconsistent")
        rows.append([claim.place, claim.says, _joined(ours(v) for v in own), _joined(marks(v) for v in own), "; ".join(notes)])
    return grid(["where", "the paper says", "ours", "status", "note"], rows)


def _key(claim: Claim, verdict: Verdict) -> str:
    return f"{verdict.entry.id.removeprefix(claim.id + '_').upper()} " if len(claim.entries) > 1 else ""


def _joined(items: Iterable[str]) -> str:
    """One item where all are the same, else all of them in order."""
    listed = list(items)
    return listed[0] if len(set(listed)) == 1 else " / ".join(listed)


def _contradictions(verdicts: Mapping[str, Verdict]) -> str:
    groups: dict[tuple, list[Entry]] = {}
    for verdict in verdicts.values():
        if verdict.status == "paper inconsistent":
            entry = verdict.entry
            groups.setdefault((entry.printed or entry.id, entry.unit, verdict.evidence), []).append(entry)
    rows = [
        ["; ".join(dict.fromkeys(entry.place for entry in entries)), _prints(entries[-1]), evidence]
        for (_, _, evidence), entries in groups.items()
    ]
    return (
        "## Where the paper contradicts itself\n\n"
        "Numbers are recomputed by code from the paper's own, or counted on the published model that a row names;\n"
        "formulas were compared by reading.\n\n" + grid(["where", "it prints", "but"], rows)
    )


def _prints(entry: Entry) -> str:
    if entry.printed is None:
        return entry.says
    number = f"{entry.printed} {entry.unit}".strip()
    return number if entry.id.startswith("table") else f"**{number}**: {entry.says}"


def _not_measured(verdicts: Mapping[str, Verdict]) -> str:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts.values():
        if verdict.status == "not measured":
            groups.setdefault(verdict.reason, []).append(verdict)
    rows = []
    for reason, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        rows.append([len(members), reason, shown_commands(member.command for member in members)])
    return "## Not measured, and why\n\n" + grid(["entries", "reason", "what would measure it"], rows)


def _provenance(results: Results) -> str:
    rows = []
    for source in results.sources:
        identity = source.identity
        versions = ", ".join(f"{name} {version}" for name, version in (identity.get("versions") or {}).items() if version)
        commit = str(identity.get("parent_commit") or "–")[:12]
        rows.append(
            [
                f"`{source.path}`",
                source.device,
                identity.get("dtype", "–"),
                identity.get("backend", "–"),
                commit,
                identity.get("code", "–"),
                identity.get("params", "–"),
                versions,
            ]
        )
    if not rows:
        return "## Provenance\n\nNo record was found under `results/`: `dvc repro` makes them."
    head = ["record", "device", "dtype", "backend", "parent commit", "code", "params", "versions"]
    return "## Provenance\n\nEach record names what explains its numbers; `code` and `params` are hashes.\n\n" + grid(head, rows)
