"""Parameters of every training. Imports nothing heavy: the stages need them for `--help`.

A new field changes the hash of every cell: saved states are then not continued, and files of results/seeds are refused.
Give it the default None and a name that no other field has, and add this to `repro.core.config._NEWER`: the hash then
ignores the field while it is None. If it changes what a GPU keeps besides the weights, `repro.runs.cells._KEEPS` names
it, too.
"""

import dataclasses
import re
from typing import Annotated, Any, Literal, Self

from ..core.config import Each, bounded, params_hash
from ..core.runtime import torch_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimParams:
    """The optimiser and its schedule, after Appendix D of Vision-TTT.

    Values that it leaves open for classification are Swin's.

    Args:
        optimizer: `adamw`, or timm's `lamb`, which by itself clips the global norm of the gradient to 1.
        lr: peak learning rate at a total batch of `lr_batch_size`; the three rates scale linearly with the batch.
        warmup_lr, min_lr: first rate of the warm-up, and last rate of the cosine, at the same batch.
        lr_batch_size: total batch for which the rates are stated.
        weight_decay: for every parameter that timm's rule and the model's `no_weight_decay()` do not exempt.
        betas, eps: of the optimiser's two moving averages.
        schedule: `cosine`; `step`, which divides the rate by ten after each milestone; or `poly`, linear to 0 over all
            steps.
        milestones: finished epochs, for `step`.
        warmup_epochs: epochs of linear warm-up; the cosine takes the epochs after them.
        warmup_steps: steps of linear warm-up, instead of epochs; with `step` and `poly` it multiplies their rates.
        layer_decay: ratio of the rates of neighbouring layers, counted down from the last layer, whose factor is 1;
            null for one rate.
        clip_grad_norm: largest global L2 norm of the gradient; null switches clipping off.
    """

    optimizer: Literal["adamw", "lamb"] = "adamw"
    lr: float = bounded(gt=0)
    warmup_lr: float = bounded(1e-6, ge=0)
    min_lr: float = bounded(1e-5, ge=0)
    lr_batch_size: int = bounded(1024, ge=1)
    weight_decay: float = bounded(0.05, ge=0)
    betas: tuple[Annotated[float, Each(ge=0, le=1)], ...] = (0.9, 0.999)
    eps: float = bounded(1e-8, gt=0)
    schedule: Literal["cosine", "step", "poly"] = "cosine"
    milestones: tuple[Annotated[int, Each(ge=1)], ...] = ()
    warmup_epochs: int = bounded(20, ge=0)
    warmup_steps: int = bounded(0, ge=0)
    layer_decay: float | None = bounded(None, gt=0, le=1)
    clip_grad_norm: float | None = bounded(5.0, gt=0)

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"betas: expected two numbers, got {len(self.betas)}")
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError(
                f"milestones: {list(self.milestones)} with schedule {self.schedule}; `step` needs some, and no other takes them"
            )
        if self.warmup_steps and self.warmup_epochs and self.schedule == "cosine":
            raise ValueError("warmup_steps: the cosine takes either these or warmup_epochs; set warmup_epochs: 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitParams:
    """The initial weights of a training.

    Args:
        weights: a file of this project or of an official release of the model; a path from the checkout's root.
        sha256: the file's SHA-256, 16 hex digits or more; needed where no record in its folder states it.
    """

    weights: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{16,}", self.sha256):
            raise ValueError(f"sha256: {self.sha256!r}, expected 16 hex digits or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainParams:
    """Common parameters of the cells of all training stages.

    Args:
        model: registered name of the model, or of the backbone.
        family: stem of the file of results/golden that dvc.yaml depends on in place of this training's code: the
            model's family, the task for detectors and segmenters, or `resnet` for timm's own models.
        options: further keyword arguments of `timm.create_model`, e.g. design, pool, chunk_size, w0.
        init: the initial weights; null for random ones.
        data: a cell of `prepare_data`.
        seeds: one training each; a seed determines initialisation, order and augmentation.
        epochs: passes over the training data, or multiples of `steps_per_epoch` steps.
        steps_per_epoch: steps in an epoch, where a recipe counts steps; null for a pass over the data.
        batch_size: images per step, over all GPUs together.
        drop_path: stochastic depth, rising linearly from 0 to this over the blocks.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        snapshot_epochs: finished epochs after which the weights are kept (0: before training), for `explain`.
        precision: `fp32`, `bf16` or `fp16` (autocast; the inner learner always computes in fp32; fp16 scales its loss
            adaptively); `auto` is bf16 on GPUs and fp32 elsewhere.
        ema_decay: decay of a moving average of the weights, which is then evaluated and saved instead of the raw
            weights; null for none.
        max_bad_steps: the run stops when this many more steps were non-finite (loss or gradient) than finite, counted
            from any step on, and names the last batch. It thus ends where more than half fail, and after as many in a
            row.
        optim: optimiser and schedule.
    """

    model: str
    family: str = ""
    options: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    init: InitParams | None = None
    data: str
    seeds: tuple[Annotated[int, Each(ge=0)], ...] = (0,)
    epochs: int = bounded(ge=1)
    steps_per_epoch: int | None = bounded(None, ge=1)
    batch_size: int = bounded(ge=1)
    drop_path: float = bounded(ge=0, le=1)
    evaluate_every: int = bounded(1, ge=1)
    snapshot_epochs: tuple[Annotated[int, Each(ge=0)], ...] = ()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    ema_decay: float | None = bounded(None, gt=0, le=1)
    max_bad_steps: int = bounded(20, ge=1)
    optim: OptimParams

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)}, expected one or more, each once")
        for name, epochs in (("snapshot_epochs", self.snapshot_epochs), ("optim.milestones", self.optim.milestones)):
            if late := [epoch for epoch in epochs if epoch > self.epochs]:
                raise ValueError(f"{name}: {late[0]} is after the last epoch, {self.epochs}")
        if reserved := {"num_classes", "img_size", "drop_path_rate"} & set(self.options):
            raise ValueError(
                f"options: {min(reserved)} follows from the data, from the transform or from drop_path; leave it out"
            )

    @property
    def needs_even_parts(self) -> bool:
        """Whether a forward pass in training takes an even number of images."""
        return False

    @property
    def teacher_from(self) -> float | None:
        """Share of the epochs after which the loss also uses the moving average of the weights; None for never."""
        return None

    def resolve_precision(self, device: Any) -> str:
        """Return the precision on a device: `fp32`, `bf16` or `fp16`."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if device.type == "cuda" else "fp32"

    def autocast(self, device: Any) -> Any:
        """Return a context manager for a forward pass in the precision of a device."""
        import torch

        precision = self.resolve_precision(device)
        return torch.autocast(device.type, torch_dtype(precision), enabled=precision != "fp32")

    def state_key(self, seed: int) -> str:
        """Return the name of the folder of a seed's state; by the hash of its params, no run continues another.

        `repro.graph` looks for the beginning `seed_`: with another, `repro status` would show no interrupted run.
        """
        return f"seed_{seed}-{params_hash(self.with_seed(seed))}"

    def with_seed(self, seed: int) -> Self:
        """Return the same training with one seed."""
        return dataclasses.replace(self, seeds=(seed,))

    def with_epochs(self, epochs: int) -> Self:
        """Return the same training over another number of epochs.

        Milestones and a cosine's warm-up steps are scaled in proportion, and later snapshots are dropped. Warm-up
        epochs stay, and so do the warm-up steps of other schedules.
        """
        milestones = tuple(max(1, round(milestone * epochs / self.epochs)) for milestone in self.optim.milestones)
        optim = dataclasses.replace(self.optim, milestones=milestones)
        if optim.schedule == "cosine":
            optim = dataclasses.replace(optim, warmup_steps=round(optim.warmup_steps * epochs / self.epochs))
        snapshots = tuple(epoch for epoch in self.snapshot_epochs if epoch <= epochs)
        return dataclasses.replace(self, epochs=epochs, optim=optim, snapshot_epochs=snapshots)
