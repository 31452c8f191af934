"""The recipe for classifiers of Sections 4 and 5.1 of the paper.

Beyond these settings the paper follows Swin's protocol, which is not compared.
"""

from ..recipe import PAPER_HAS, Printed

PRINTED = Printed(
    # DeiT-S with inner learners (the study), then the models that Section 5 builds from its results
    models={"study_small_patch16_224": {}}
    | {name.format(size): {} for name in ("vit3_{}_patch16_224", "hvit3_{}_224") for size in ("tiny", "small", "base")},
    said={
        PAPER_HAS: {
            "epochs": 300,
            "batch_size": 4096,
            "optim.lr": 4e-3,
            "optim.lr_batch_size": 4096,
            "optim.weight_decay": 0.05,
            "optim.warmup_epochs": 20,
        }
    },
)
