"""What the report needs of Vision-TTT, in one place."""

from collections.abc import Callable
from pathlib import Path

from ...report.measured import list_records
from ...report.paper import Contest, Document, Paper, Question, Variants, VariantTable
from ...report.passages import compare_without_learning, count_noisy_rows, describe_statuses
from ..variants import load_variants
from . import formulas
from .figures import FIGURES, draw_fig7a, draw_fig7b
from .readings_page import count_fits, describe_choices, describe_trained, list_readings, name_rounded
from .sections import describe_models, find_counter, list_findings

_VARIANTS = load_variants("vision_ttt")
_ROOM = Path(__file__).parent
_FORMULAS = (
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
)
_OWN_ROWS = ("table1.vittt_*", "table2_*.vittt_*", "table3.*", "table4.*")
_TOP1 = ("text.abstract.top1_*", "text.1.top1_*", "text.5_1.top1_*")


def _panel(name: str, says: str, draw: Callable[..., Path]) -> VariantTable:
    """A panel of Fig. 7, which prints no number but Vittt's own."""
    place = f"Fig. 7({name})"
    note = f"For this figure the paper prints only Vittt's own number; its text says that {says}."
    of_place = {"rows": _VARIANTS.rows[place], "orders": _VARIANTS.orders[place], "columns": ("fps", "top1_percent")}
    return VariantTable(place=place, note=note, figure=f"fig7{name}", draw=draw, **of_place)


PAPER = Paper(
    id="vision_ttt",
    name="Vision-TTT",
    model="Vittt",
    ledger_file=Path(__file__).with_name("ledger.yaml"),
    primary=True,
    claim="The paper claims that Vittt, a backbone whose layers take gradient steps along the tokens of an image while they run, is more "
    "accurate than DeiT, Vim, Vision-RWKV and ViT³ on ImageNet-1K, COCO and ADE20K. Its cost grows linearly with the number of tokens: at "
    "1280×1280, Vittt-T is claimed to need 79.4 % fewer FLOPs and 88.9 % less memory than DeiT-T and to run 4.72× as fast.",
    baseline="DeiT",
    families={
        "vittt": {"design": "conv2d", "pool": "mean", "chunk_size": "16", "w0": "per_direction", "reading": ""},
        "vim": {},
        "vrwkv": {},
        "vit3": {},
        "vmamba": {},
        "mambavision": {},
    },
    formulas={function.__name__: function for function in _FORMULAS},
    headlines=(
        "text.abstract.",
        "text.5_3.flops_saved_1280",
        "text.5_3.speedup_1280",
        "text.5_3.memory_saved_1280",
        "text.5_3.faster_than_vim",
    ),
    questions=(
        Question(
            label="parameters of the paper's own model",
            says="parameters",
            entries=(*(f"{row}.params_m" for row in _OWN_ROWS), "text.4_3.dwconv_params_*", "text.5_4.share_params_*"),
            shown=tuple(f"table1.vittt_{size}.params_m" for size in "tsb"),
            shown_label="Vittt-T/S/B",
        ),
        Question(
            label="multiply-adds (FLOPs) of the paper's own model",
            says="FLOPs",
            why="the counter that was used is unknown",
            entries=(*(f"{row}.macs_g" for row in _OWN_ROWS), "text.*.flops_saved_1280_*"),
            shown=tuple(f"table1.vittt_{size}.macs_g" for size in "tsb"),
            shown_label="Vittt-T/S/B at 224²",
        ),
        Question(
            label="its accuracies on ImageNet-1K, COCO and ADE20K",
            says="accuracies",
            why="they take ImageNet-1K, COCO, ADE20K and GPUs",
            entries=(
                *(f"{row}.{score}" for row in _OWN_ROWS for score in ("top1_percent", "a*_percent", "miou_percent")),
                *_TOP1,
            ),
        ),
        Question(
            label="its speeds and memory on the paper's device",
            entries=("table3.*.fps", "text.*.speedup_1280_*", "text.*.memory_saved_1280_*"),
        ),
    ),
    contest=Contest(
        ours=("vittt_tiny_patch16_224", "Vittt-T"),
        theirs=("deit_tiny_patch16_224", "DeiT-T"),
        sizes=(224, 1280),
        picture="readme_resolution.png",
        series={
            "vittt": ("vittt_tiny_patch16_224", None),
            "deit_fused": ("deit_tiny_patch16_224", "fused"),
            "deit": ("deit_tiny_patch16_224", "unfused"),
        },
    ),
    figures=FIGURES,
    text=_ROOM / "page.md",
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
        tables=(
            *(VariantTable(place=place, rows=_VARIANTS.rows[place]) for place in ("Table 3", "Table 4")),
            _panel("a", "b = 64 is the worst", draw_fig7a),
            _panel("b", "more learnable states are better", draw_fig7b),
        ),
        places="Tables 3 and 4, Fig. 7",
        stage="ablate",
        about="Vittt-T on ImageNet-1K",
    ),
)
