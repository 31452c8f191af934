"""What the report needs of ViT³, in one place."""

from pathlib import Path

from ...report.paper import Contest, Figure, Paper, Question, Variants, VariantTable
from ..variants import load_variants
from . import formulas
from .depth import compare_losses, draw_depth
from .generation import list_denoisers

_VARIANTS = load_variants("vit3")
_FORMULAS = (
    formulas.recipe_setting,
    formulas.upernet_params_m,
    formulas.upernet_aux_params_m,
    formulas.upernet_macs_g,
    formulas.mask_rcnn_macs_g,
    formulas.vit3_params_m,
    formulas.vmamba_s2l5,
    formulas.inner_over_outer,
    formulas.largest_value_gradient,
    formulas.least_value_gradient,
    formulas.identity_error,
)
_STUDY = ("table1.*", "table2.*", "table4.*", "table6.*")
_OWN = ("table5*.h_vit3_*", "table7.vit3_*", "table9.h_vit3_*", "table10.*")
_NOTES = {
    "Table 2, epochs": "The paper's Top-1 of four epochs is the best before the training diverged.",
    "Table 3": "The pairs are those that the text orders; the paper's Top-1 of the rates 5 and 10 are the best before divergence.",
    "Table 4, depth": "The pairs are those of the text: deeper is worse, and so is an output layer.",
    "Fig. 3": "The pairs are those of the caption: deeper inner models have a lower accuracy. Their training losses are compared below.",
    "Table 4, convolutions": "The pairs are those of the text: a convolution is ahead of the linear layers.",
    "Table 6": "The pairs are those of the text: some improvement, and less than by removing the output layer.",
}

PAPER = Paper(
    id="vit3",
    name="ViT³",
    model="ViT³",
    ledger_file=Path(__file__).with_name("ledger.yaml"),
    claim="The paper trains 31 inner learners in the shell of DeiT-S and claims six insights: among them that a loss must let gradients "
    "reach the values, that one full batch at rate 1 suffices, and that convolutions are the best inner models. It claims that the models "
    "that follow, ViT³ and H-ViT³, beat other models of linear complexity.",
    baseline="DeiT",
    families={
        "vit3": {},
        "hvit3": {},
        "dit3": {},
        "dit": {},
        "study": {
            "mixer": "inner",
            "positions": "block_table",
            "inner_model": "mlp",
            "inner_width": "1",
            "inner_depth": "2",
            "inner_loss": "dot",
            "inner_lr": "1.0",
            "inner_rate": "fixed",
            "inner_epochs": "1",
            "inner_batches": "1",
            "inner_start": "random",
        },
    },
    formulas={function.__name__: function for function in _FORMULAS},
    headlines=("text.4_1.mixed_derivative", "text.5_5."),
    questions=(
        Question(label="parameters of the design study", entries=tuple(f"{rows}.params_m" for rows in _STUDY)),
        Question(
            label="multiply-adds (FLOPs) of the design study",
            says="the design study's FLOPs",
            entries=tuple(f"{rows}.macs_g" for rows in _STUDY),
            shown=(
                "table4.fc.macs_g",
                "table4.r1_l2.macs_g",
                "table4.glu.macs_g",
                "table4.conv.macs_g",
                "table4.dwconv.macs_g",
            ),
            shown_label="FC, MLP, gated, Conv, DWConv",
        ),
        Question(
            label="parameters of ViT³, H-ViT³ and DiT³",
            says="the models' parameters",
            entries=tuple(f"{rows}.params_m" for rows in _OWN),
            shown=tuple(f"table7.vit3_{size}.params_m" for size in "tsb"),
            shown_label="ViT³-T/S/B",
        ),
        Question(
            label="multiply-adds (FLOPs) of ViT³, H-ViT³ and DiT³",
            says="the models' FLOPs",
            why="the paper does not say which counter it used",
            entries=(*(f"{rows}.macs_g" for rows in _OWN), "table8*.h_vit3_*.macs_g"),
            shown=tuple(f"table7.vit3_{size}.macs_g" for size in "tsb"),
            shown_label="ViT³-T/S/B at 224²",
        ),
        Question(
            label="the study's accuracies on ImageNet-1K",
            says="accuracies",
            why="they take ImageNet-1K and GPUs",
            entries=tuple(f"table{number}.*.top1_percent" for number in (1, 2, 3, 4, 6)),
        ),
        Question(
            label="other accuracies of its own models",
            entries=(
                *(f"{rows}.{score}" for rows in _OWN for score in ("top1_percent", "miou_percent", "fid")),
                "table8*.h_vit3_*.ap*",
            ),
        ),
        Question(
            label="its speeds and memory",
            entries=("table?.*.fps", "text.5_5.speedup_1248_*", "text.5_5.memory_saved_1248_*"),
        ),
    ),
    contest=Contest(
        ours=("vit3_tiny_patch16_224", "ViT³-T"),
        theirs=("deit_tiny_patch16_224", "DeiT-T"),
        sizes=(224, 1248),
        picture="vit3_resolution.png",
        series={
            "vit3": ("vit3_tiny_patch16_224", None),
            "deit_fused": ("deit_tiny_patch16_224", "fused"),
            "deit": ("deit_tiny_patch16_224", "unfused"),
        },
    ),
    figures=(
        Figure(
            place="Fig. 3",
            shows="training loss and accuracy with inner models of 1, 2 and 3 layers",
            files="figures/vit3_fig3_*.png",
            command="repro ablate --paper vit3 --all",
        ),
        Figure(
            place="Fig. 4",
            shows="FPS and memory of ViT³-T and DeiT-T over the resolution",
            files="figures/vit3_resolution.png",
            command="repro efficiency --families vit3,deit,deit_fused --sizes T --res 224,1248",
        ),
    ),
    text=Path(__file__).with_name("page.md"),
    parts={"losses": compare_losses, "denoisers": list_denoisers},
    variants=Variants(
        options=_VARIANTS.options,
        tables=tuple(
            VariantTable(
                place=place,
                rows=rows,
                orders=_VARIANTS.orders.get(place),
                note=_NOTES.get(place, ""),
                figure="vit3_fig3" if place == "Fig. 3" else None,
                draw=draw_depth if place == "Fig. 3" else None,
            )
            for place, rows in _VARIANTS.rows.items()
        ),
        places="Tables 1 to 4 and 6, Fig. 3",
        stage="ablate",
        flags="--paper vit3",
        about="inner learners in DeiT-S on ImageNet-1K",
        label="two-layer MLP",
    ),
)
