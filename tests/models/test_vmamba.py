"""VMamba against its official release, a token-by-token implementation, the published counts, and timm's conventions."""

import pytest
import timm
import torch
from torch import Tensor

from repro.bench.flops import cost
from repro.core.errors import UserError
from repro.models.pyramid import build_pyramid
from repro.models.vmamba import SS2D, VMamba, official_state_dict
from repro.models.weights import read_official
from repro.tasks.detection.mask_rcnn import MaskRcnn
from repro.tasks.detection.params import MaskRcnnParams
from tests.models import helpers
from tests.models.helpers import below, count, load_official, read_data


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    return read_data("vmamba.npz")


def shape(truth) -> dict:
    config = {key: value.tolist() for key, value in below(truth, "model_s2/config/").items()}
    assert (config["d_state"], config["mlp_ratio"]) == (1, 4)
    widths = [config["embed_dim"] << i for i in range(4)]
    return {"widths": widths, "depths": config["depths"], "expand": int(config["ssm_ratio"])}


def released(truth) -> VMamba:
    """The small model of the release, with its weights."""
    model = VMamba(num_classes=int(truth["model_s2/config/num_classes"]), **shape(truth)).eval()
    load_official(model, below(truth, "model_s2/state_dict/"))
    return model


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_official_mixer(truth, ratio, backend):
    """The output and every gradient, with a state dict under the official names."""
    data = below(truth, f"mixer_s{ratio}/")
    mixer = SS2D(int(data["config/d_model"]), int(data["config/ssm_ratio"]))
    mixer.backend = backend
    helpers.assert_official_part(mixer, data, run=lambda part, x: part(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    assert set(below(data, "grads/")) == {name for name, _ in mixer.named_parameters()}


def test_official_model(truth):
    model = released(truth)
    logits = model(truth["model_s2/x"])
    logits.backward(truth["model_s2/grad_out"])
    helpers.assert_official_gradients(model, official_state_dict(below(truth, "model_s2/grads/")))


@pytest.mark.parametrize("run", ["", "2"], ids=["64x96", "40x56"])
def test_official_maps_pooling_and_logits(truth, run):
    """At 40 x 56 pixels the grids are 10 x 14, 5 x 7, 3 x 4 and 2 x 2. Maps for dense tasks have the release's norms."""
    helpers.assert_official_maps("vmamba_nano_144", released(truth), shape(truth), below(truth, "model_s2/"), run)


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


def test_an_official_file_loads_with_linear_layers_as_convolutions(truth, tmp_path):
    """Beside it are a moving average and a training's state, as in the release."""
    state = below(truth, "model_s2/state_dict/")
    linear = ("in_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight")
    as_convs = {key: x[..., None, None] if key.endswith(linear) else x for key, x in state.items()}
    averaged = {key: torch.zeros_like(x) for key, x in state.items()}
    content = {"model": as_convs, "model_ema": averaged, "optimizer": {"state": {}}, "epoch": 263}
    torch.save(content, tmp_path / "official.pth")
    model, image = VMamba(num_classes=7, **shape(truth)).eval(), truth["model_s2/x2"]
    load_official(model, read_official(tmp_path / "official.pth"))
    with torch.no_grad():
        assert torch.equal(model(image), released(truth)(image))
    with pytest.raises(UserError, match=r"stages\.0\.blocks\.0\.mixer\.Ds missing"):
        load_official(model, {key: x for key, x in state.items() if key != "layers.0.blocks.0.op.Ds"})


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
