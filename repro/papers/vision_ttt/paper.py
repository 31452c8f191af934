"""What the report needs of Vision-TTT, in one place."""

from pathlib import Path

from ...report.measured import list_records
from ...report.paper import Document, Variants, list_tables, load_paper
from ...report.passages import compare_without_learning, count_noisy_rows, describe_statuses
from . import formulas
from .figures import draw_fig7a, draw_fig7b
from .readings_page import count_fits, describe_choices, describe_trained, list_readings, name_rounded
from .sections import describe_models, find_counter, list_findings
from .variants import TABLES_AND_FIGURES, VARIANTS

_ROOM = Path(__file__).parent
# place -> (better, worse) by the text's words on Fig. 7 (entries text.fig7a.chunk and text.fig7b.initial_states)
_ORDERS = {
    "Fig. 7(a)": tuple((name, "chunk64") for name in TABLES_AND_FIGURES["Fig. 7(a)"] if name != "chunk64"),
    "Fig. 7(b)": (("conv2d", "w0_shared"), ("w0_shared", "w0_frozen"), ("conv2d", "w0_frozen")),
}


def _find_row(place: str, name: str) -> str | None:
    """A variant's row in the ledger; of Fig. 7 the paper prints Vittt's own number alone."""
    if place.startswith("Fig."):
        return "table3.conv2d" if name == "conv2d" else None
    return "table4.mean" if (place, name) == ("Table 4", "conv2d") else f"table{place[-1]}.{name}"


PAPER = load_paper(
    _ROOM,
    formulas=(
        formulas.vit_g,
        formulas.vim_blocks_g,
        formulas.vim_trivial_g,
        formulas.vittt_g,
        formulas.vittt_design_g,
        formulas.vittt_trivial_g,
        formulas.table3_step_g,
        formulas.score_tensors_gb,
        formulas.padded_tokens,
        formulas.model_constant,
    ),
    parts={
        "search": find_counter,
        "origin": describe_models,
        "findings": list_findings,
        "fits": count_fits,
        "rounded": name_rounded,
        "trained": describe_trained,
        "readings": list_readings,
        "scenes": compare_without_learning,
        "records": list_records,
    },
    passages={
        "docs/architecture.md": {"statuses": describe_statuses},
        "docs/readings.md": {"choices": describe_choices},
        "results/speed.md": {"noise": count_noisy_rows},
    },
    documents=(
        Document(
            file="results/papers/readings.md", text=_ROOM / "readings.md", records="results/measured/*/readings/*"
        ),
        Document(file="results/papers/scenes.md", text=_ROOM / "scenes.md"),
        Document(file="results/provenance.md", text=_ROOM / "provenance.md"),
    ),
    variants=Variants(
        options=VARIANTS,
        tables=list_tables(
            {place: {name: _find_row(place, name) for name in names} for place, names in TABLES_AND_FIGURES.items()},
            _ORDERS,
            {"Fig. 7(a)": ("fig7a", draw_fig7a), "Fig. 7(b)": ("fig7b", draw_fig7b)},
        ),
    ),
)
