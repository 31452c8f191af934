"""What the report needs of Vision-TTT, in one place."""

from pathlib import Path

from ...report.measured import list_records
from ...report.paper import Document, Variants, list_tables, load_paper
from ...report.passages import compare_without_learning, count_noisy_rows, describe_statuses
from ..variants import load_variants
from . import formulas
from .figures import draw_fig7a, draw_fig7b
from .readings_page import count_fits, describe_choices, describe_trained, list_readings, name_rounded
from .sections import describe_models, find_counter, list_findings

_ROOM = Path(__file__).parent
_VARIANTS = load_variants("vision_ttt")

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
        options=_VARIANTS.options,
        tables=list_tables(
            _VARIANTS.rows, _VARIANTS.orders, {"Fig. 7(a)": ("fig7a", draw_fig7a), "Fig. 7(b)": ("fig7b", draw_fig7b)}
        ),
    ),
)
