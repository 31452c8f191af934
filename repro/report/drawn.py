"""Scores of drawn pictures that may stand beside a paper's."""

from typing import Any

from .records import Missing

# of published scores: how many pictures are drawn, what they are compared with, and what their models see
DRAWN, REFERENCE, IMAGES = 50_000, "VIRTUAL_imagenet256_labeled.npz", 50_000


def find_drawn(results: Any, model: str, key: str) -> float:
    """A score against ADM's reference batch, of pictures by weights of a whole training by the cell of the profile."""
    cell = results.find_cell("generate", model, "latents")
    if cell is None:
        raise Missing("profiles/paper.yaml has no generate cell for it", "none")
    asked = results.paper_profile["generate"][cell]
    about = {name: asked[name] for name in ("epochs", "batch_size")} | {"kind": "latents", "classes": 1000}
    about |= {"steps": asked["epochs"] * asked["steps_per_epoch"], "init": None, "image_size": 256}
    about |= {"split": "val", "held_out_images": IMAGES}
    alike = (source for source in results.score_sources if about.items() <= source.metrics.items())
    own = (source for source in alike if results.model_key(source.metrics, source.path) == model)
    trained = {run["weights_hash"] for source in own for run in source.metrics.get("by_seed", ())}
    for source in results.sources:
        m = source.metrics
        if (
            (m.get("protocol"), m.get("samples"), m.get("image_size")) == (REFERENCE, DRAWN, 256)
            and m["weights_hash"] in trained
            and m["sampling"] == asked["sampling"]
            and len(m["classes"]) == about["classes"]
            and m.get(key) is not None
        ):
            results.used.add(source.path)
            return m[key]
    files = "--vae DECODER --inception inception-2015-12-05.pt"
    draw = f"repro generate --weights WEIGHTS --samples {DRAWN} {files} --data {REFERENCE}"
    why = f"no {DRAWN:,} pictures by a whole training were scored against ADM's reference batch"
    train = f"repro profile use paper && repro generate --cell {cell}"
    raise Missing(f"{why}; others are never compared", f"{train} && {draw}")
