"""What the report needs of "Linearizing Vision Transformer with Test-Time Training", in one place."""

from pathlib import Path

from ...report.paper import Contest, Paper, Question, Variants, VariantTable
from ..variants import load_variants
from . import formulas
from .attention import find_attention, list_layers
from .recovery import list_students

_VARIANTS = load_variants("linearize")
_FORMULAS = (
    formulas.recipe_setting,
    formulas.neighbours_macs_g,
    formulas.in_tenths,
    formulas.identity_error,
    formulas.shift_error,
    formulas.foreign_weights,
)
_NOTES = {
    "Table 1, fine-tuned": "Linear attention is ours: its kernel, elu + 1, and its normaliser are not stated.",
    "Table 1, frozen": "Only the new weights are trained; linear attention has none, and stays as it was put in.",
    "Table 2": "The pairs are those of the text: what subtracts the mean over the tokens is ahead of what does not, and no norm is last.",
}

PAPER = Paper(
    id="linearize",
    name="Linearizing ViT",
    model="T5",
    ledger_file=Path(__file__).with_name("ledger.yaml"),
    claim="The paper replaces the attention of a pretrained softmax model by an inner learner with two layers, inherits all other weights and "
    "fine-tunes for a short while. It claims that such a learner takes over what softmax attention has learned, as linear attention "
    "cannot, if the keys are centred over the tokens and convolutions of queries and keys bring locality. The text at hand is a third "
    "party's summary of it.",
    baseline="the softmax model",
    families={"t5": {"inner": "swiglu", "key_norm": "instance", "dwc": "qk", "neighbours": "0"}, "dit5": {}},
    formulas={function.__name__: function for function in _FORMULAS},
    headlines=("text.shift.softmax", "text.shift.instance", "text.shift.token_level", "text.structure.ttt"),
    questions=(
        Question(
            label="parameters",
            says="parameters",
            entries=("table?.*.params_m", "table3_nat.*.params_m", "table1.*.new_params_m"),
            shown=tuple(f"table1.{row}.new_params_m" for row in ("projqk", "two_layers", "swiglu")),
            shown_label="new ones of ProjQK, two layers, SwiGLU",
        ),
        Question(
            label="multiply-adds (FLOPs)",
            says="FLOPs",
            entries=("table?*.macs_g",),
            shown=(
                "table1_softmax.softmax.macs_g",
                "table1.linear.macs_g",
                "table1.swiglu.macs_g",
                "table3.dwc_qk.macs_g",
            ),
            shown_label="softmax, linear, SwiGLU, T5-T",
        ),
        Question(
            label="accuracies on ImageNet-1K",
            says="accuracies",
            why="they take ImageNet-1K, a pretrained DeiT and GPUs",
            entries=("table?*.top1_percent",),
        ),
        Question(label="speeds of SD3.5", entries=("text.large.sd_*_at_*",)),
    ),
    contest=Contest(
        ours=("t5_tiny_patch16_224", "T5-T"),
        theirs=("deit_tiny_patch16_224", "DeiT-T"),
        sizes=(224, 1280),
        picture="t5_resolution.png",
        series={
            "t5": ("t5_tiny_patch16_224", None),
            "deit_fused": ("deit_tiny_patch16_224", "fused"),
            "deit": ("deit_tiny_patch16_224", "unfused"),
        },
    ),
    text=Path(__file__).with_name("page.md"),
    parts={"students": list_students, "attention": find_attention, "layers": list_layers},
    variants=Variants(
        options=_VARIANTS.options,
        recipes={name: each.changes for name, each in _VARIANTS.variants.items() if each.changes},
        tables=tuple(
            VariantTable(place=place, rows=rows, orders=_VARIANTS.orders.get(place), note=_NOTES.get(place, ""))
            for place, rows in _VARIANTS.rows.items()
        ),
        places="Tables 1, 2 and 3",
        stage="ablate",
        flags="--paper linearize",
        about="a class-free DeiT-T on ImageNet-1K, linearized",
    ),
)
