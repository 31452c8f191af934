"""What the paper does to three inner learners: LaCT's and ViT³'s, as in its Tables 1 and 2, and Vittt's, which it does
not have.

The name of a variant begins with its model. This module imports nothing, so that a stage that trains the variants
depends on no report.
"""

# beginning of a variant's name -> the family whose model it is
FAMILIES = {"vit3": "ladder_vit3", "lact": "lact", "vittt": "ladder_vittt"}

# the steps of each model beside `own`; see `repro.models.vit3`, `fast_weights` and `ttt_mixer`
_STEPS = {
    "vit3": ("ascent", "q_is_k", "v1", "v3", "v3_as_run", "v6", "v6_as_run"),
    "lact": ("ascent", "q_is_k", "v1", "v2", "v3", "v4", "v5", "v6"),
    "vittt": ("ascent", "q_is_k", "plain", "dot"),
}

# variant -> the options of the model that it changes
VARIANTS: dict[str, dict[str, str | int]] = {}
for _model, _steps in _STEPS.items():
    VARIANTS |= {f"{_model}_own": {}, **{f"{_model}_{_step}": {"step": _step} for _step in _steps}}
    if _model != "vittt":  # its operator takes one step on a chunk
        VARIANTS |= {f"{_model}_steps{_count}": {"inner_steps": _count} for _count in (2, 4)}


def find_family(variant: str) -> str:
    """The family whose model a variant is."""
    return FAMILIES[variant.split("_")[0]]


# table -> variant -> its row in the ledger, in the paper's order; None where it prints no accuracy of such a classifier
ROWS: dict[str, dict[str, str | None]] = {
    "Table 1, ViT³": {"vit3_own": "table1.baseline", "vit3_ascent": "table1.ascent", "vit3_q_is_k": "table1.q_is_k"},
    "Table 2, ViT³": {
        "vit3_own": "table2.baseline",
        "vit3_v1": "table2.v1",
        "vit3_v3_as_run": "table2.v3",
        "vit3_v6_as_run": "table2.v6",
        "vit3_v3": None,
        "vit3_v6": None,
    },
    "Table 2, LaCT": {f"lact_{step}": None for step in ("own", "v1", "v2", "v3", "v4", "v5", "v6")},
}

# table -> (better, worse) by the text, where that says less than the printed Top-1, or nothing is printed; elsewhere
# Top-1 is the order
ORDERS: dict[str, tuple[tuple[str, str], ...]] = {
    # to learn only the last layer is best; what follows is within 0.3 points, which the text does not order
    "Table 2, ViT³": tuple(("vit3_v1", f"vit3_{step}") for step in ("own", "v3_as_run", "v6_as_run")),
    "Table 2, LaCT": tuple(("lact_v1", f"lact_{step}") for step in ("own", "v2", "v3", "v4", "v5", "v6")),
}
