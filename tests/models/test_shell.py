"""The class-free ViT that Study, T5, LaCT and ViT3 share: against timm's, and what holds whatever the mixer is."""

import pytest
import timm
import torch

from tests.models.helpers import nano, relative, shaken

SOFTMAX = {"study": {"mixer": "softmax", "positions": "table"}}
SOFTMAX["t5"] = {"inner": "softmax", "key_norm": "none", "dwc": "none"}


@pytest.mark.parametrize(("family", "options"), SOFTMAX.items())
def test_with_softmax_it_is_timms_vit_without_class_token(family, options):
    ours = shaken(nano(family, **options))
    shape = {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2, "num_classes": 10}
    theirs = timm.models.VisionTransformer(**shape, class_token=False, global_pool="avg", fc_norm=False).eval()
    names = {name: name.replace("patch_embed.", "patch_embed.proj.") for name in ours.state_dict()}
    theirs.load_state_dict({names[name]: value for name, value in ours.state_dict().items()})
    image = torch.randn(2, 3, 144, 144)
    with torch.no_grad():
        assert relative(ours(image), theirs(image)) < 1e-5
