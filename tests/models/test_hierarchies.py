"""VMamba and MambaVision as a whole against their official releases: logits, gradients, maps and files."""

from types import SimpleNamespace

import pytest
import torch

from repro.core.errors import UserError
from repro.models.mambavision import MambaVision
from repro.models.pyramid import build_pyramid
from repro.models.vmamba import VMamba
from repro.models.weights import open_file, translate_official
from tests.models.helpers import below, load_official, read_data, relative


@pytest.fixture(scope="module", params=["vmamba", "mambavision"])
def official(request) -> SimpleNamespace:
    """The release's small model: its tensors, its weights under our names, and what builds ours with them or without."""
    part = {"vmamba": "model_s2/", "mambavision": "model_layer_scale/"}[request.param]
    data = below(read_data(f"{request.param}.npz"), part)
    config = {key: value.tolist() for key, value in below(data, "config/").items()}
    if request.param == "vmamba":
        assert (config["d_state"], config["mlp_ratio"]) == (1, 4)
        kind, width, options = VMamba, config["embed_dim"], {"expand": int(config["ssm_ratio"])}
    else:
        kind, width, options = MambaVision, config["dim"], {"stem": config["in_dim"]}
        options |= {"num_heads": config["num_heads"][2:], "windows": config["window_size"][2:]}
        options["layer_scale"] = config["layer_scale"]
    options |= {"widths": [width << i for i in range(4)], "depths": config["depths"]}
    module, state = f"repro.models.{request.param}", below(data, "state_dict/")

    def build(state: dict[str, torch.Tensor] | None = state) -> torch.nn.Module:
        model = kind(num_classes=int(config["num_classes"]), **options).eval()
        if state is not None:
            load_official(model, state)
        return model

    return SimpleNamespace(name=request.param, module=module, data=data, state=state, options=options, build=build)


def test_logits_and_gradients(official):
    """The gradients are of each part of a hierarchy. In training, norms take the statistics of the batch."""
    model, data = official.build(), official.data
    logits = model(data["x"])
    assert relative(logits.detach(), data["logits"]) < 1e-5
    logits.backward(data["grad_out"])
    parameters, gradients = dict(model.named_parameters()), translate_official(below(data, "grads/"), official.module)
    gradients = {name: expected for name, expected in gradients.items() if name in parameters}
    assert {name.split(".")[0] for name in gradients} == {"patch_embed", "stages", "norm", "head"}
    errors = {name: relative(parameters[name].grad, expected) for name, expected in gradients.items()}
    assert len(errors) == {"vmamba": 15, "mambavision": 16}[official.name] and max(errors.values()) < 1e-4, errors
    if "logits_train" in data:
        with torch.no_grad():
            assert relative(model.train()(data["x"]), data["logits_train"]) < 1e-5


@pytest.mark.parametrize("run", ["", "2"])
@torch.no_grad()
def test_maps_pooled_features_and_logits(official, run):
    """With the release's norms, also the maps for dense tasks.

    VMamba's second image has grids of 10 x 14, 5 x 7, 3 x 4 and 2 x 2; MambaVision's windows of 7 and 3 are padded on
    grids of 4 x 4 or 4 x 6, and 2 x 2 or 2 x 3.
    """
    model, data = official.build(), official.data
    image = data[f"x{run}"]
    final, maps = model.forward_intermediates(image)
    assert relative(model.forward_head(final, pre_logits=True), data[f"pooled{run}"]) < 1e-5
    assert relative(model(image), data[f"logits{run}"]) < 1e-5
    pyramid = build_pyramid(f"{official.name}_nano_144", options=official.options).eval()
    norms = {f"norms.{key.removeprefix('outnorm')}": value for key, value in below(data, "outnorm_state_dict/").items()}
    trunk = {f"backbone.{key}": x for key, x in model.state_dict().items() if not key.startswith(("norm.", "head."))}
    pyramid.load_state_dict(norms | trunk)
    for i, (level, dense) in enumerate(zip(maps, pyramid(image), strict=True)):
        assert relative(level, data[f"features{run}/{i}"]) < 1e-5
        assert relative(dense, data[f"dense{run}/{i}"]) < 1e-5


def with_convolutions(state):
    """With linear layers as convolutions, with a moving average and a training's state, as in VMamba's release."""
    linear = ("in_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight")
    as_convs = {key: x[..., None, None] if key.endswith(linear) else x for key, x in state.items()}
    averaged = {key: torch.zeros_like(x) for key, x in state.items()}
    return {"model": as_convs, "model_ema": averaged, "optimizer": {"state": {}}, "epoch": 263}


def with_prefix(prefix, counters):
    """With the prefix of a wrapper, with or without the counters that early versions of BatchNorm did not have."""

    def wrap(state):
        given = {f"{prefix}{key}": x for key, x in state.items() if counters or not key.endswith("num_batches_tracked")}
        if "encoder." in prefix:
            given[prefix.replace("encoder.", "decoder.weight")] = torch.zeros(1)
        return {"state_dict": given, "epoch": 309, "arch": "mamba_vision_T"}

    return wrap


PREFIXES = {"": True, "module.": False, "module.encoder.": True, "encoder.": False}
FILES = [("vmamba", with_convolutions, "layers.0.blocks.0.op.Ds", True)]
FILES += [
    ("mambavision", with_prefix(prefix, counters), "levels.2.blocks.0.mixer.D", counters)
    for prefix, counters in PREFIXES.items()
]


@pytest.mark.parametrize(("official", "wrap", "lost", "counters"), FILES, indirect=["official"])
def test_official_files(official, tmp_path, wrap, lost, counters):
    torch.save(wrap(official.state), tmp_path / "official.pth.tar")
    model, image = official.build(open_file(tmp_path / "official.pth.tar")[0]), official.data["x2"]
    with torch.no_grad():
        assert torch.equal(model(image), official.build()(image))
    stored = translate_official(official.state, official.module)
    counted = {key: x.item() for key, x in model.state_dict().items() if key.endswith("num_batches_tracked")}
    assert counted == {key: stored[key].item() if counters else 0 for key in counted}
    assert len(counted) == {"vmamba": 0, "mambavision": 7}[official.name]
    ours = lost.replace("layers.", "stages.").replace("levels.", "stages.").replace(".op.", ".mixer.")
    with pytest.raises(UserError, match=f"{ours} missing"):
        official.build({key: x for key, x in official.state.items() if key != lost})
