"""A trained classifier with a changed inner loop, and its weights as they are: the work of `repro explain --probe`."""

import dataclasses
import time

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug
from ..data.cells import DataCell
from ..data.tree import Tree
from ..explain.inner import OverrideTTTLinear
from ..explain.ladders import InnerLosses, change_options, has_ladder
from ..explain.probes import Probe, describe_reported
from ..models.registry import build_model, family_module
from .classifier import Classifier, require_same_classes

BATCH_SIZE = 64
UNCHANGED = "unchanged"  # in place of the name of a probe
_CHOICES = ("step", "inner_steps")  # of a ladder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeParams:
    """What the numbers of a probe depend on besides the data; its hash is in the record's identity."""

    model: str
    weights_hash: str
    probe: str


def run_probe(classifier: Classifier, tree: Tree, name: str, workers: int) -> dict[str, float]:
    """`top1_percent`, `held_out_images`, `inner_loss_before` and `inner_loss_after` over the reported split with a
    changed inner loop.

    An unknown probe, or a model without an inner learner, is a UserError.
    """
    try:
        scores, (before, after) = (_run_ladder if has_ladder(classifier.checkpoint.model) else _run_operator)(
            classifier, tree, name, workers
        )
    except ValueError as error:
        raise UserError(f"explain: {error}") from None
    kept = {key: scores[key] for key in ("top1_percent", "held_out_images")}
    return kept | {"inner_loss_before": before, "inner_loss_after": after}


def compare_probe(classifier: Classifier, cell: DataCell, name: str, paths: Paths, runtime: Runtime) -> None:
    """Print a model's accuracy and inner losses on the reported split, unchanged and with a probe, and record them.

    The record stands under results/measured/<device>/probes. Raises as `run_probe`; data with other classes than the
    model's are a UserError, too.
    """
    started, device = time.monotonic(), choose_device(runtime.device)
    tree = cell.open_tree()
    require_same_classes(classifier.checkpoint, tree.classes, cell.name)
    found = run_probe(classifier, tree, name, runtime.workers)
    unchanged = run_probe(classifier, tree, UNCHANGED, runtime.workers)
    before, after = unchanged["top1_percent"], found["top1_percent"]
    print(
        f"{classifier.name} on {cell.name}, {found['held_out_images']} {tree.kind.reported_split} images: "
        f"top-1 {before:.2f} %, with {name} {after:.2f} % ({after - before:+.2f})"
    )
    for which, numbers in (("unchanged", unchanged), (f"with {name}", found)):
        losses = f"{numbers['inner_loss_before']:.3f}, {numbers['inner_loss_after']:.3f}"
        print(f"inner loss before and after its steps, {which}: {losses}")
    print(f"Liu et al. report: {describe_reported(name)}")

    checkpoint = classifier.checkpoint
    params = ProbeParams(model=classifier.name, weights_hash=checkpoint.hash, probe=name)
    about = {
        "model": checkpoint.model,
        "data": cell.name,
        "split": tree.kind.reported_split,
        "weights_hash": checkpoint.hash,
        "probe": name,
    }
    about |= {"options": {key: checkpoint.options[key] for key in _CHOICES if key in checkpoint.options}}
    place = {"device": device_label(device), "dtype": "fp32", "backend": "torch"}
    code = [__name__, family_module(checkpoint.model)]
    identity = make_identity(paths.root, code, params, data_manifest=cell.manifest_path, **place)
    folder = paths.measured(device_slug(device)) / "probes" / f"{classifier.name}_{cell.name}_{checkpoint.hash[:8]}"
    record = {**about, "unchanged": unchanged, "probed": found}
    write_record(folder, record, identity, time.monotonic() - started, name=name.replace("=", ""))


def _run_operator(
    classifier: Classifier, tree: Tree, name: str, workers: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """Of Vittt, whose operator is observed."""
    probe = Probe("steps=1" if name == UNCHANGED else name)
    with OverrideTTTLinear(probe):
        scores = classifier.measure_accuracy(tree, batch_size=BATCH_SIZE, workers=workers)
    return scores, probe.inner_losses()


def _run_ladder(
    classifier: Classifier, tree: Tree, name: str, workers: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """Rebuild a ladder with the probe's options and load the same weights."""
    checkpoint = classifier.checkpoint
    options = checkpoint.options if name == UNCHANGED else change_options(checkpoint.options, name)
    model = build_model(checkpoint.model, **options).to(classifier.device).eval().requires_grad_(False)
    model.load_state_dict(classifier.model.state_dict())
    losses = InnerLosses()
    with losses.observe(model):
        scores = dataclasses.replace(classifier, model=model).measure_accuracy(
            tree, batch_size=BATCH_SIZE, workers=workers
        )
    return scores, losses.means
