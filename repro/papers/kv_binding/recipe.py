"""How Appendix A of the paper trains a step of the ladder."""

from ..recipe import PAPER_HAS, Printed

# of ViTTT-B: 60 epochs, and 256 images on each of two GPUs; for the rest the appendix names ViT³'s recipe
PRINTED = Printed(models={"ladder_vit3_base_patch16_224": {}}, said={PAPER_HAS: {"epochs": 60, "batch_size": 512}})
