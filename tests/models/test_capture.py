"""Inference can be captured as a CUDA graph, as tensors without data tell: nothing waits for or leaves it."""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import repro.models  # noqa: F401


class Watch(TorchDispatchMode):
    """Keeps the name of every operation with a tensor that is not on the GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves([args, kwargs or {}, out]) if isinstance(x, torch.Tensor)}
        if devices - {"cuda"}:
            self.found.append(f"{func} on {', '.join(sorted(devices))}")
        return out


def move(model):
    """Give the model parameters and buffers on a GPU that need not exist."""
    for module in model.modules():
        for key, x in list(module.named_parameters(recurse=False)):
            x = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
            setattr(module, key, torch.nn.Parameter(x, requires_grad=False))
        for key, x in list(module.named_buffers(recurse=False)):
            dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
            module.register_buffer(key, torch.empty(x.shape, dtype=dtype, device="cuda"))


def watch(name, harm=lambda x: None):
    """What a model's second call in bf16 inference does that a graph cannot hold; `harm` changes its norm's output."""
    model = timm.create_model(name).eval()
    model.norm.register_forward_hook(lambda module, inputs, out: harm(out))
    side = int(name.rpartition("_")[2])
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        move(model)
        images = torch.empty(1, 3, side, side, dtype=torch.bfloat16, device="cuda")
        model(images)
        with Watch() as seen:
            out = model(images)
    assert out.device.type == "cuda"
    return seen.found


@pytest.mark.parametrize("family", ["vittt", "vim", "vrwkv", "vit3", "t5"])
def test_a_warm_model_stays_on_its_device(family):
    assert watch(f"{family}_tiny_patch16_224") == []


@pytest.mark.parametrize(
    "harm", [lambda x: x + torch.ones(1, device="cpu").to(x.device), lambda x: x + x.cpu().to(x.device)]
)
def test_what_leaves_the_device_is_seen(harm):
    assert watch("vittt_nano_patch16_144", harm)


@pytest.mark.parametrize("harm", [lambda x: x * x.sum().item(), lambda x: x[x > 0].sum() + x])
def test_what_waits_for_the_device_is_seen(harm):
    """By these tensors themselves: they have no data."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        watch("vittt_nano_patch16_144", harm)
