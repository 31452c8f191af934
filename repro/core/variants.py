"""The variants of Vittt that the paper ablates: 20 entries of Tables 3 and 4 and Fig. 7, which are 17 models, Vittt being in each list."""

# what a variant changes of Vittt, as options of its model
VARIANTS: dict[str, dict[str, str | int]] = {
    **{name: {"design": name} for name in ("ttt_layer", "share_qk", "gating", "conv1d", "dual")},
    "conv2d": {},  # Vittt itself: the last design, mean pooling, chunks of 16, a learned state per direction
    **{name: {"pool": name} for name in ("head", "mid", "double", "max")},
    **{f"chunk{size}": {"chunk_size": size} for size in (4, 8, 32, 64)},
    "chunk_all": {"chunk_size": 0},  # the whole sequence as one chunk
    **{f"w0_{mode}": {"w0": mode} for mode in ("shared", "frozen")},
}

# table or figure -> the variants in it, in the paper's order
PLACES: dict[str, tuple[str, ...]] = {
    "Table 3": ("ttt_layer", "share_qk", "gating", "conv1d", "dual", "conv2d"),
    "Table 4": ("head", "mid", "double", "max", "conv2d"),
    "Fig. 7(a)": ("chunk4", "chunk8", "conv2d", "chunk32", "chunk64", "chunk_all"),
    "Fig. 7(b)": ("w0_frozen", "w0_shared", "conv2d"),
}
