"""What the report needs of ViT³, in one place."""

from pathlib import Path

from ...report.paper import Variants, list_tables, load_paper
from ..variants import load_variants
from . import formulas
from .sections import compare_losses, draw_depth, list_denoisers

_VARIANTS = load_variants("vit3")

PAPER = load_paper(
    Path(__file__).parent,
    formulas=(
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
    ),
    parts={"losses": compare_losses, "denoisers": list_denoisers},
    variants=Variants(
        options=_VARIANTS.options,
        tables=list_tables(_VARIANTS.rows, _VARIANTS.orders, {"Fig. 3": ("vit3_fig3", draw_depth)}),
    ),
)
