"""VMamba's mixer against its official release, and the published counts; the whole model is in test_hierarchies.py."""

import pytest
import timm
import torch

from repro.bench.flops import cost
from repro.models.pyramid import build_pyramid
from repro.models.vmamba import SS2D
from repro.tasks.detection.mask_rcnn import MaskRcnn
from repro.tasks.detection.params import MaskRcnnParams
from tests.models import helpers
from tests.models.helpers import below, count, read_data


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_official_mixer(ratio, backend):
    """The output and every gradient, with a state dict under the official names."""
    data = read_data("vmamba.npz", f"mixer_s{ratio}/")
    mixer = SS2D(int(data["config/d_model"]), int(data["config/ssm_ratio"]))
    mixer.backend = backend
    helpers.assert_official_part(mixer, data, run=lambda part, x: part(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    assert set(below(data, "grads/")) == {name for name, _ in mixer.named_parameters()}


@pytest.mark.parametrize(("size", "params", "fvcore"), [
    ("tiny", 30_249_064, 4_905_609_984),
    ("small", 50_147_752, 8_715_774_720),
    ("base", 88_557_800, 15_358_944_256),
])  # fmt: skip
def test_published_counts(size, params, fvcore):
    """Parameters, and fvcore's multiply-adds; ours are those without norms, with 4 for a state."""
    counted = cost(f"vmamba_{size}_224", {}, (224, 224))
    assert (counted.num_params, sum(counted.paper_terms.values())) == (params, fvcore)
    assert counted.macs_g_paper_convention == fvcore / 1e9
    of = counted.paper_terms
    own = fvcore - of["layer_norm"] - of["pooling"] - of["scan"] * 6 // 10
    assert counted.macs == own and counted.method == "analytic"


# parameters of the backbone, and of the detector in millions; multiply-adds at 800 x 1280 and 512 x 2048 pixels
DENSE = {
    "tiny": (29_481_408, 50, 100.15, 102.56),
    "small": (49_380_096, 70, 177.91, 182.18),
    "base": (87_534_592, 108, 313.50, 321.02),
}


@pytest.mark.parametrize("size", DENSE)
def test_dense_backbones_have_the_published_counts(size):
    """Without the head and its norm, with a norm for each map; multiply-adds by fvcore's convention."""
    params, millions, *gigas = DENSE[size]
    with torch.device("meta"):
        pyramid = build_pyramid(f"vmamba_{size}_224")
        detector = MaskRcnn(pyramid, 80, MaskRcnnParams())
        model = timm.create_model(f"vmamba_{size}_224", num_classes=0)
    assert count(pyramid) == params and round(count(detector) / 1e6) == millions
    for image_size, giga in zip(((800, 1280), (512, 2048)), gigas, strict=True):
        terms, grids = model.paper_mac_terms(image_size), model.grids_of(*image_size)
        maps = [h * w * C for (h, w), C in zip(grids, model.widths, strict=True)]
        # the norm of the last map is in place of the final one
        total = sum(terms.values()) - terms["pooling"] + 5 * sum(maps[:3])
        assert round(total / 1e9, 2) == giga


def test_the_sum_of_the_routes_stays_in_fp32_under_autocast(monkeypatch):
    """fp16 would overflow in it; norms bring it back."""
    from repro.models import vmamba

    seen = []
    scan = vmamba.selective_scan_routes

    def noted(u, *rest, **options):
        seen.append((u, scan(u, *rest, **options)))
        return seen[-1][1]

    monkeypatch.setattr(vmamba, "selective_scan_routes", noted)
    mixer, x = SS2D(8, 1), torch.randn(1, 3, 4, 8)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert mixer(x).dtype == dtype
        assert [(u.dtype, y.dtype) for u, y in seen] == [(dtype, torch.float32)]
        seen.clear()
