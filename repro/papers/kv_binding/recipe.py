"""The recipe of Appendix A of the paper for a step of the ablation chain."""

from ..recipe import PAPER_HAS, Printed

# ViTTT-B: 60 epochs, 256 images on each of two GPUs; for the other settings the appendix refers to ViT³'s recipe
PRINTED = Printed(models={"ladder_vit3_base_patch16_224": {}}, said={PAPER_HAS: {"epochs": 60, "batch_size": 512}})
