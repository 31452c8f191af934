"""The variants of Vittt that the paper ablates: 20 entries of Tables 3 and 4 and Fig. 7, which are 17 models, as Vittt
is in each list.

This module imports nothing, so that a stage that trains the variants depends on no report.
"""

# variant -> the options of the model that it changes
VARIANTS: dict[str, dict[str, str | int]] = {
    **{name: {"design": name} for name in ("ttt_layer", "share_qk", "gating", "conv1d", "dual")},
    "conv2d": {},  # Vittt itself: the last design, mean pooling, chunks of 16, a learned state per direction
    **{name: {"pool": name} for name in ("head", "mid", "double", "max")},
    **{f"chunk{size}": {"chunk_size": size} for size in (4, 8, 32, 64)},
    "chunk_all": {"chunk_size": 0},  # the whole sequence as one chunk
    **{f"w0_{mode}": {"w0": mode} for mode in ("shared", "frozen")},
}

# table or figure -> the variants that it compares, in the paper's order
TABLES_AND_FIGURES: dict[str, tuple[str, ...]] = {
    "Table 3": ("ttt_layer", "share_qk", "gating", "conv1d", "dual", "conv2d"),
    "Table 4": ("head", "mid", "double", "max", "conv2d"),
    "Fig. 7(a)": ("chunk4", "chunk8", "conv2d", "chunk32", "chunk64", "chunk_all"),
    "Fig. 7(b)": ("w0_frozen", "w0_shared", "conv2d"),
}
