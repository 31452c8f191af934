"""`repro report`: comparison of the papers' numbers with ours, from the records under results/."""

import importlib
import re
from typing import Annotated

import typer

from repro.core.errors import RunError
from repro.core.paths import Paths, find_root
from repro.papers import load_papers

from . import PURPOSES, Stage, list_graph, list_verbs, load_stages, verb_of

STAGE = Stage()


def command(
    html: Annotated[
        bool, typer.Option("--html/--no-html", help="Also write report.html, one page for a browser.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; name each page that is not what the records give.")
    ] = False,
) -> None:
    """Compare the papers' numbers with ours: write the pages of all papers, their figures, report.html and claims.csv."""
    paths = find_root()
    report_on_papers(paths, html=html, check=check)


def report_on_papers(paths: Paths, *, html: bool = True, check: bool = False) -> None:
    """Write the pages of every paper, or with `check` only compare them with the records.

    See `write_report` and `find_outdated` in `repro.report.pages`.

    Raises:
        RunError: with `check`, a page differs from what the records give.
    """
    from repro.bench import campaign
    from repro.report import kernels
    from repro.report.pages import find_outdated, write_report
    from repro.report.results import Results

    papers = list(load_papers().values())
    results = Results(paths, papers, load_scores())
    passages = [
        ("README.md", "verbs", describe_verbs()),
        ("docs/models.md", "families", _describe_families()),
        *campaign.make_passages(paths),
        *kernels.make_passages(paths),
    ]
    if not check:
        print(write_report(papers, results, passages=passages, with_html=html))
        return
    outdated = find_outdated(papers, results, passages=passages)
    for name in outdated:
        print(f"report: {name}: not what the records and the ledger give")
    if outdated:
        raise RunError(f"report: {len(outdated)} outdated or edited by hand; run `repro report`")
    print("report: every page is what the records and the ledger give")


def load_scores() -> dict[str, dict[str, str]]:
    """Return stage -> key of a score -> label, for the stages whose records the report reads, in dvc.yaml's order."""
    table = load_stages()
    return {name: dict(table[name].scores) for name in list_graph() if name in table and table[name].shown}


def describe_verbs() -> str:
    """Tabulate the verbs by purpose in the order of use, as the Markdown block of README.md."""
    table = load_stages()
    lines = [
        f"| {PURPOSES[purpose]} | {', '.join(f'`{verb_of(name)}`' for name in names if not table[name].hidden)} |"
        for purpose, names in list_verbs(table).items()
    ]
    return "\n".join(["| purpose | `repro` ... |", "|---|---|", *lines])


def _describe_families() -> str:
    """Tabulate the families with the sizes of their models, without nanos, and the first paragraph of each module."""
    import timm

    import repro.models
    from repro.models.registry import denoiser_names, family_module

    found: dict[str, dict[str, list[str]]] = {}
    order = "tiny", "small", "base", "large", "xlarge"
    # module of a family -> name with `*` for the size -> its sizes; the search tries `xlarge` before `large`
    for name in sorted({*timm.list_models(), *denoiser_names()}):
        module, size = family_module(name), re.search("|".join(reversed(order)), name)
        if module.startswith(f"{repro.models.__name__}.") and size and not re.search("_nano|_deep", name):
            sizes = found.setdefault(module, {}).setdefault(name.replace(size[0], "*"), [])
            sizes.append(size[0])
    lines = ["| names: sizes | what it is |", "|---|---|"]
    for module, patterns in sorted(found.items()):
        names = "; ".join(
            f"`{pattern}`: {', '.join(sorted(sizes, key=order.index))}" for pattern, sizes in patterns.items()
        )
        about = str(importlib.import_module(module).__doc__).split("\n\n")[0]
        lines.append(f"| {names} | {' '.join(about.split())} |")
    return "\n".join(lines)
