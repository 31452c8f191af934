"""The paper's recipe for classifiers (Appendix D); where it is silent, DeiT's augmentation and Swin's defaults."""

from typing import Any

from ..recipe import BF16, NO_REPEATS, PAPER_HAS, Printed

# The paper prints no numbers for the augmentation, only that it is DeiT's, and says that its code is based on Swin's.
SAID: dict[str, dict[str, Any]] = {
    PAPER_HAS: {  # Appendix D
        "epochs": 300,
        "batch_size": 1024,
        "optim.optimizer": "adamw",
        "optim.lr": 1e-3,
        "optim.lr_batch_size": 1024,
        "optim.weight_decay": 0.05,
        "optim.warmup_epochs": 20,
        "transform.image_size": 224,
    },
    # Tables 3 and 4, Fig. 7; these are also the models' defaults
    "the paper has {} (and varies it in its ablations)": {
        "options.design": "conv2d",
        "options.pool": "mean",
        "options.chunk_size": 16,
        "options.w0": "per_direction",
    },
    "the paper has DeiT's {}": {  # Swin's config.py has the same numbers
        "transform.scale": (0.08, 1.0),
        "transform.ratio": (3 / 4, 4 / 3),
        "transform.hflip": 0.5,
        "transform.re_prob": 0.25,
        "transform.auto_augment": "rand-m9-mstd0.5-inc1",
        "mix.mixup": 0.8,
        "mix.cutmix": 1.0,
        "mix.prob": 1.0,
        "mix.switch_prob": 0.5,
    },
    # Swin's config.py, which states learning rates at batch 512, half of these; Swin-T, S and B themselves override its
    # drop path by 0.2, 0.3 and 0.5
    "Swin's default is {}, which the paper does not state": {
        "optim.warmup_lr": 1e-6,
        "optim.min_lr": 1e-5,
        "optim.betas": (0.9, 0.999),
        "optim.eps": 1e-8,
        "optim.clip_grad_norm": 5.0,
        "optim.layer_decay": None,
        "drop_path": 0.1,
        "ema_decay": None,
        "seeds": (0,),
        "mix.label_smoothing": 0.1,
        "transform.interpolation": "bicubic",
        "transform.crop_pct": 0.875,
        "transform.mean": (0.485, 0.456, 0.406),
        "transform.std": (0.229, 0.224, 0.225),
    },
    "Swin's default is {} autocast, which the paper does not state": {"precision": "fp16"},
    "the paper has random weights": {"init": None},
    "Swin's default is {} in effect (RandAugment switches it off), which the paper does not state": {
        "transform.color_jitter": None
    },
}
_VITTT_B = "vittt_base_patch16_224"
_DROP_PATH_B = {"drop_path": 0.4}  # ViT3-B's; this project's choice, as profiles/paper.yaml says

PRINTED = Printed(
    models={
        "vittt_tiny_patch16_224": {},
        "vittt_small_patch16_224": {},
        _VITTT_B: {"ViT3-B's is {}, which the paper does not state": _DROP_PATH_B},
    },
    said=SAID,
    choices={
        **NO_REPEATS,
        "drop path 0.4: ViT3-B's; Swin's default is 0.1": {"model": _VITTT_B, **_DROP_PATH_B},
        **BF16,
    },
)
