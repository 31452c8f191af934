"""The design study: 31 inner learners of Tables 1, 2, 3, 4 and 6, in one shell (`repro.models.study`).

This module imports nothing, so that a stage that trains the variants depends on no report.
"""

# variant -> the options of the model that it changes
VARIANTS: dict[str, dict[str, str | int | float]] = {
    "mlp": {},  # a two-layer MLP of width d, the dot product, one epoch of one batch, rate 1
    **{loss: {"inner_loss": loss} for loss in ("mse", "rmse", "mae", "smooth_l1")},
    **{f"batches{count}": {"inner_batches": count} for count in (2, 3, 4)},
    **{f"epochs{count}": {"inner_epochs": count} for count in (2, 3, 4)},
    **{f"lr{rate:g}": {"inner_lr": rate} for rate in (0.1, 0.2, 0.5, 2.0, 5.0, 10.0)},
    "dynamic": {"inner_rate": "dynamic"},
    **{f"width{ratio}": {"inner_width": ratio} for ratio in (2, 3, 4)},
    "layers3": {"inner_depth": 3},
    **{model: {"inner_model": model} for model in ("fc", "silu_fc", "swiglu", "glu", "conv", "dwconv")},
    "residual": {"inner_model": "mlp_residual"},
    "plus_identity": {"inner_model": "mlp_identity"},
    "start_identity": {"inner_start": "identity"},
}

# table -> variant -> its row in the ledger, in the paper's order; a table that asks several questions is one for each
ROWS: dict[str, dict[str, str]] = {
    "Table 1": {"mlp": "table1.dot", **{loss: f"table1.{loss}" for loss in ("mse", "rmse", "mae", "smooth_l1")}},
    "Table 2, batch size": {"mlp": "table2.e1_n1", **{f"batches{count}": f"table2.e1_n{count}" for count in (2, 3, 4)}},
    "Table 2, epochs": {"mlp": "table2.e1_n1", **{f"epochs{count}": f"table2.e{count}_n1" for count in (2, 3, 4)}},
    "Table 3": {
        "lr0.1": "table3.lr0_1",
        "lr0.2": "table3.lr0_2",
        "lr0.5": "table3.lr0_5",
        "mlp": "table3.lr1",
        "lr2": "table3.lr2",
        "lr5": "table3.lr5",
        "lr10": "table3.lr10",
        "dynamic": "table3.dynamic",
    },
    "Table 4, width": {"mlp": "table4.r1_l2", **{f"width{ratio}": f"table4.r{ratio}_l2" for ratio in (2, 3, 4)}},
    "Table 4, depth": {
        "fc": "table4.fc",
        "mlp": "table4.r1_l2",
        "layers3": "table4.r1_l3",
        "silu_fc": "table4.silu_fc",
        "swiglu": "table4.swiglu",
        "glu": "table4.glu",
    },
    "Fig. 3": {"fc": "table4.fc", "mlp": "table4.r1_l2", "layers3": "table4.r1_l3"},
    "Table 4, convolutions": {
        "mlp": "table4.r1_l2",
        **{model: f"table4.{model}" for model in ("fc", "silu_fc", "glu", "conv", "dwconv")},
    },
    "Table 6": {
        "mlp": "table4.r1_l2",
        "silu_fc": "table4.silu_fc",
        **{name: f"table6.{name}" for name in ("residual", "plus_identity", "start_identity")},
    },
}

_LINEAR = ("mlp", "fc", "silu_fc", "glu")
# table -> (better, worse) by the text, where that says less or more than the printed Top-1; elsewhere those are the
# order
ORDERS: dict[str, tuple[tuple[str, str], ...]] = {
    # Insight 3: small rates learn too little, large ones are unstable, dynamic ones generally help less
    "Table 3": (
        *(("mlp", other) for other in ("lr0.1", "lr0.2", "lr0.5", "lr5", "lr10", "dynamic")),
        ("lr0.5", "lr0.2"),
        ("lr0.5", "lr0.1"),
        ("lr0.2", "lr0.1"),
    ),
    # Insight 5: accuracy falls with depth, and rises where the output layer is removed
    "Table 4, depth": (("fc", "mlp"), ("mlp", "layers3"), ("fc", "layers3"), ("silu_fc", "mlp"), ("glu", "swiglu")),
    # Insight 6: convolutions are particularly appropriate
    "Table 4, convolutions": tuple((conv, other) for conv in ("dwconv", "conv") for other in _LINEAR),
    # its caption: some improvements, and all below SiLU(FC)
    "Table 6": (
        *(("silu_fc", other) for other in ("residual", "plus_identity", "start_identity")),
        ("plus_identity", "mlp"),
        ("start_identity", "mlp"),
    ),
}
