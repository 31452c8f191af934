"""What the report needs of Vision-TTT, in one place."""

from pathlib import Path

from ...report.paper import Contest, Paper, Question, Variants, VariantTable
from .figures import FIGURES, draw_fig7a, draw_fig7b
from .formulas import vim_blocks_g, vit_g, vittt_g, vittt_trivial_g
from .variants import TABLES_AND_FIGURES, VARIANTS

# Fig. 7 prints no numbers; the text says which is better (entries text.fig7a.chunk and text.fig7b.initial_states)
_FIG_7A = tuple((name, "chunk64") for name in TABLES_AND_FIGURES["Fig. 7(a)"] if name != "chunk64")
_FIG_7B = (("conv2d", "w0_shared"), ("w0_shared", "w0_frozen"), ("conv2d", "w0_frozen"))
_NOTE = "The paper prints no number of this figure but Vittt's own; its text says that {}."
_OWN_ROWS = ("table1.vittt_*", "table2_*.vittt_*", "table3.*", "table4.*")
_TOP1 = ("text.abstract.top1_*", "text.1.top1_*", "text.5_1.top1_*")


def _figure_rows(place: str) -> dict[str, str | None]:
    return {name: "table3.conv2d" if name == "conv2d" else None for name in TABLES_AND_FIGURES[place]}


PAPER = Paper(
    id="vision_ttt",
    name="Vision-TTT",
    model="Vittt",
    ledger_file=Path(__file__).with_name("ledger.yaml"),
    primary=True,
    claim="The paper claims that Vittt, a backbone whose layers take gradient steps along the tokens of an image while they run, is more "
    "accurate than DeiT, Vim, Vision-RWKV and ViT³ on ImageNet-1K, COCO and ADE20K. Its cost grows linearly with the number of tokens: at "
    "1280×1280, Vittt-T is said to need 79.4 % fewer FLOPs and 88.9 % less memory than DeiT-T and to run 4.72× as fast.",
    baseline="DeiT",
    families={"vittt": {"design": "conv2d", "pool": "mean", "chunk_size": "16", "w0": "per_direction"}, "vim": {}, "vrwkv": {}, "vit3": {}},
    formulas={"vit_g": vit_g, "vim_blocks_g": vim_blocks_g, "vittt_g": vittt_g, "vittt_trivial_g": vittt_trivial_g},
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
            entries=(*(f"{row}.params_m" for row in _OWN_ROWS), "text.4_3.dwconv_params_*", "text.5_4.share_params_*"),
            shown=tuple(f"table1.vittt_{size}.params_m" for size in "tsb"),
            shown_label="Vittt-T/S/B",
        ),
        Question(
            label="multiply-adds (FLOPs) of the paper's own model",
            entries=(*(f"{row}.macs_g" for row in _OWN_ROWS), "text.*.flops_saved_1280_*"),
            shown=tuple(f"table1.vittt_{size}.macs_g" for size in "tsb"),
            shown_label="Vittt-T/S/B at 224²",
        ),
        Question(
            label="its accuracies on ImageNet-1K, COCO and ADE20K",
            entries=(*(f"{row}.{score}" for row in _OWN_ROWS for score in ("top1_percent", "a*_percent", "miou_percent")), *_TOP1),
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
    pictures=("figures/readme_resolution.png", "visualize/fig8_receptive_field.png", "visualize/fig3_*.png"),
    figures=FIGURES,
    variants=Variants(
        options=VARIANTS,
        tables=(
            VariantTable(place="Table 3", rows={name: f"table3.{name}" for name in TABLES_AND_FIGURES["Table 3"]}),
            VariantTable(
                place="Table 4", rows={name: f"table4.{'mean' if name == 'conv2d' else name}" for name in TABLES_AND_FIGURES["Table 4"]}
            ),
            VariantTable(
                place="Fig. 7(a)",
                rows=_figure_rows("Fig. 7(a)"),
                columns=("fps", "top1_percent"),
                orders=_FIG_7A,
                note=_NOTE.format("b = 64 is the worst"),
                figure="fig7a",
                draw=draw_fig7a,
            ),
            VariantTable(
                place="Fig. 7(b)",
                rows=_figure_rows("Fig. 7(b)"),
                columns=("fps", "top1_percent"),
                orders=_FIG_7B,
                note=_NOTE.format("more learnable states are better"),
                figure="fig7b",
                draw=draw_fig7b,
            ),
        ),
        places="Tables 3 and 4, Fig. 7",
        stage="ablate",
        about="Vittt-T on ImageNet-1K",
    ),
)
