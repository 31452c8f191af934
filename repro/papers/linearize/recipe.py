"""The recipe of the authors' release (LeapLabTHU/Transformer-to-TTT, T5) to linearize a softmax model.

The paper's text has no recipe for ImageNet-1K.
"""

from typing import Any

from ..recipe import Printed

RELEASED: dict[str, Any] = {
    "epochs": 30,
    "batch_size": 2048,
    "drop_path": 0.0,
    "optim.lr": 8e-5,  # 2e-5 for each 512 images; the release does not scale the next two rates with the batch
    "optim.warmup_lr": 2e-8,
    "optim.min_lr": 2e-7,
    "optim.lr_batch_size": 2048,
    "optim.weight_decay": 0.05,
    "optim.warmup_epochs": 5,
    "optim.clip_grad_norm": None,
    "new_lr_factor": 20.0,
    "decay_all": True,
    "ema_decay": 0.99996,
    "mix.mixup": 0.8,
    "mix.cutmix": 1.0,
    "mix.label_smoothing": 0.1,
    "transform.auto_augment": "rand-m9-mstd0.5-inc1",
    "transform.re_prob": 0.25,
    "transform.crop_pct": 0.875,
    "repeated augmentation": "three views of an image in a batch",
}
PRINTED = Printed(
    models={"t5_tiny_patch16_224": {}},  # a class-free DeiT-T
    said={"the release has {} autocast": {"precision": "fp16"}, "the release has {}": RELEASED},
    choices={},
)
