"""`repro segment`: UperNet on a pretrained backbone (Table 2, right; on the embedded scenes in the mini profile)."""

from repro.tasks.segmentation.spec import SPEC

from . import CellOption, FlipOption, FromOption, GpusOption, ModelOption, OwnOption, SeedsOption, Sha256Option, Stage
from .detect import EpochsOption, RandomOption

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC, models=lambda params: [params.model])


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    random: RandomOption = False,
    epochs: EpochsOption = None,
    data: OwnOption = None,
    model: ModelOption = None,
    source: FromOption = None,
    flip: FlipOption = False,
    sha256: Sha256Option = None,
) -> None:
    """Train a segmenter on a pretrained backbone, and measure mIoU; a stopped run continues where it was."""
    from repro.runs.cells import read_cells, train_cells
    from repro.runs.own import train_own

    own = {"model": model, "source": source, "flip": flip, "sha256": sha256, "epochs": epochs, "seeds": seeds}
    if not train_own("segment", SPEC, data, **own, gpus=gpus, without={"cell": cell, "random": random}):
        train_cells(read_cells("segment", SPEC, cell, random=random, epochs=epochs, seeds=seeds), gpus)
