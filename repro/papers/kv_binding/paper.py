"""What the report needs of "Test-Time Training with KV Binding Is Secretly Linear Attention", in one place."""

from pathlib import Path

from ...report.paper import Drawing, Paper, Question, Variants, VariantTable
from ..variants import load_variants
from . import formulas
from .changes import list_changes, weigh_learners
from .forms import (
    PICTURE,
    compare_setting,
    draw_forms,
    find_forms,
    find_setting,
    list_backbones,
    list_ratios,
    show_picture,
)
from .probes import count_probed, list_probes
from .residuals import compare_momenta, list_residuals

_VARIANTS = load_variants("kv_binding")
_FORMULAS = (
    formulas.identity_error,
    formulas.theorem_error,
    formulas.lact_error,
    formulas.mirrored_training_error,
    formulas.reads_static_kernel,
    formulas.parallel_error,
    formulas.order_error,
)
_NOTES = {
    "Table 2, ViT³": "ViT³ has no row norms, rates and momentum, so that V2 is V1, and V4 and V5 are V3. The pairs are those of the text: V1 "
    "is best. `as_run` is what the authors' code computes, `vit3_v3` and `vit3_v6` what the paper derives.",
    "Table 2, LaCT": "The paper's LaCT is of language and novel views, and none of its numbers stands beside a classifier. The pairs are "
    "those of the text: V1 is best in all tasks.",
}

PAPER = Paper(
    id="kv_binding",
    name="KV binding is linear attention",
    model="ladder",
    ledger_file=Path(__file__).with_name("ledger.yaml"),
    claim="The paper says that test-time training with KV binding stores nothing: learning up the inner loss works as well as down, keys "
    "can be read out in place of queries, and most parts of the inner loop can go. What remains is linear attention, which it derives, and "
    "which has a parallel form that is several times as fast.",
    baseline="the recurrent form",
    families={"lact": {"step": "own", "inner_steps": "1"}, "ladder": {"step": "own", "inner_steps": "1"}},
    formulas={function.__name__: function for function in _FORMULAS},
    headlines=("text.4_2.theorem", "text.theorem5_", "text.5_3.", "text.6_2.exists"),
    questions=(
        Question(
            label="equations and theorems",
            says="equations and theorems",
            entries=(
                "text.4_2.negated",
                "text.4_2.theorem",
                "text.5*",
                "text.2_1.*",
                "text.theorem5_*",
                "text.6_1.*",
                "text.appendix_[deh].*",
            ),
        ),
        Question(
            label="what has a parallel form, and what has none",
            entries=("text.6_2.exists", "text.6_2.kernel", "text.6_2.norm"),
        ),
        Question(
            label="accuracies on ImageNet-1K",
            says="accuracies",
            why="they take ImageNet-1K and GPUs",
            entries=("table?.*.top1_percent",),
        ),
        Question(label="speeds", entries=("table2_*.*.tokens_m_per_s",)),
    ),
    drawings=(Drawing(file=PICTURE, find=find_forms, draw=draw_forms),),
    text=Path(__file__).with_name("page.md"),
    parts={
        "residuals": list_residuals,
        "momenta": compare_momenta,
        "ratios": list_ratios,
        "forms_setting": find_setting,
        "paper_setting": compare_setting,
        "forms_picture": show_picture,
        "changes": list_changes,
        "backbones": list_backbones,
        "choice": weigh_learners,
        "probes": list_probes,
        "probed": count_probed,
    },
    variants=Variants(
        options=_VARIANTS.options,
        models={name: each.changes["model"].partition("_nano")[0] for name, each in _VARIANTS.variants.items()},
        tables=tuple(
            VariantTable(
                place=place,
                rows=rows,
                columns=("top1_percent",),
                orders=_VARIANTS.orders.get(place),
                note=_NOTES.get(place, ""),
            )
            for place, rows in _VARIANTS.rows.items()
        ),
        places="Tables 1 and 2",
        stage="ablate",
        flags="--paper kv_binding",
        about="ViT³-B on ImageNet-1K after 60 epochs",
        label="the unchanged model",
    ),
)
