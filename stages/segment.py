"""`repro segment`: UperNet on a pretrained backbone (Table 2, right; on the embedded scenes in the mini profile)."""

from repro.tasks.segmentation.spec import SPEC

from . import Stage
from .detect import make_command

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC)

command = make_command("segment", SPEC, "Train a segmenter on a pretrained backbone, and measure mIoU")
