"""The linearizations that the paper compares: of a softmax model of class-free DeiT-T, in Tables 1, 2 and 3
(`repro.models.t5`).

This module imports nothing, so that a stage that trains the variants depends on no report.
"""

_MAIN: dict[str, dict[str, str | int]] = {
    "linear": {"inner": "linear", "key_norm": "none", "dwc": "none"},
    "projqk": {"inner": "projqk", "key_norm": "none", "dwc": "none"},
    **{inner: {"inner": inner, "dwc": "none"} for inner in ("gate", "2layer", "3layer")},
    "swiglu": {"dwc": "none"},
}

# variant -> the options of the model that it changes
VARIANTS: dict[str, dict[str, str | int]] = {
    **_MAIN,
    **{f"{name}_frozen": options for name, options in _MAIN.items() if name != "linear"},
    "cpe": {"dwc": "cpe"},
    "dwc_v": {"dwc": "v"},
    "dwc_qk": {},  # T5 itself: SwiGLU, the keys' instance norm, convolutions of q and k
    "nat3": {"neighbours": 3},
    "nat5": {"neighbours": 5},
    "norm_none": {"key_norm": "none"},
    **{kind: {"key_norm": kind} for kind in ("rms", "layer", "no_std", "no_mean")},
}

# those whose inherited weights stay as they are; linear attention has no other ones, so it is not among them
FROZEN = frozenset(name for name in VARIANTS if name.endswith("_frozen"))

_ROWS = {
    "linear": "linear",
    "projqk": "projqk",
    "gate": "gate",
    "2layer": "two_layers",
    "3layer": "three_layers",
    "swiglu": "swiglu",
}

# table -> variant -> its row in the ledger, in the order of the text; Table 1 has two accuracies and is one table for
# each
ROWS: dict[str, dict[str, str]] = {
    "Table 1, fine-tuned": {name: f"table1.{row}" for name, row in _ROWS.items()},
    "Table 1, frozen": {f"{name}_frozen": f"table1_frozen.{row}" for name, row in _ROWS.items() if name != "linear"},
    "Table 2": {
        "norm_none": "table2.none",
        "rms": "table2.rms",
        "layer": "table2.layer",
        "dwc_qk": "table2.instance",
        "no_std": "table2.no_std",
        "no_mean": "table2.no_mean",
    },
    "Table 3": {
        "swiglu": "table3.none",
        "cpe": "table3.cpe",
        "dwc_v": "table3.dwc_v",
        "dwc_qk": "table3.dwc_qk",
        "nat3": "table3_nat.nat3",
        "nat5": "table3_nat.nat5",
    },
}

# table -> (better, worse) by the text, where that says less than the printed Top-1; elsewhere those are the order
ORDERS: dict[str, tuple[tuple[str, str], ...]] = {
    # a norm that subtracts the mean over the tokens is ahead of all that do not, its division does not matter, and no
    # norm is last
    "Table 2": (
        *((centred, other) for centred in ("dwc_qk", "no_std") for other in ("rms", "layer", "no_mean", "norm_none")),
        *((other, "norm_none") for other in ("rms", "layer", "no_mean")),
    )
}
