"""The host's time for a block of Vittt, measured without a GPU: `python tests/kernels/host_time.py`.

The launches go through Triton's own launcher to a `libcuda.so.1` that does nothing, which is compiled on the spot;
tensors lie on the CPU, and matrix products, which a GPU's library would launch, give memory alone. So the times are
Python's, PyTorch's and Triton's, and lack the driver's and that library's. Of training it times the passes of the node
of autograd, and what calling an empty node of the same arguments costs.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FUNCTIONS = """cuInit cuCtxSetCurrent cuCtxSetLimit cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchKernelEx cuModuleUnload
cuTensorMapEncodeTiled cuTensorMapEncodeIm2col"""
SOURCE = """
#include <stddef.h>
typedef unsigned long long u64;
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetLimit(size_t *l, int k) { *l = 0; return 0; }
int cuDeviceGet(int *d, int o) { *d = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 1 ? 1024 : a == 10 ? 32 : a == 16 ? 132 : a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : 65536; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 64 : 0; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "none"; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)2; return 0; }
int cuModuleLoadData(void **m, const void *d) { *m = (void *)3; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 1; return 0; }
int cuPointerGetAttribute(void *v, int a, u64 p) { *(u64 *)v = p; return 0; }
int cuPointerGetAttributes(unsigned n, int *a, void **v, u64 p) {
  for (unsigned i = 0; i < n; i++) *(u64 *)v[i] = p; return 0; }
"""
ROOT = Path(__file__).resolve().parents[2]


def build_driver(folder: Path) -> None:
    """Compile the library that answers every question about a GPU of sm_90, and launches nothing."""
    source = SOURCE + "".join(f"int {name}() {{ return 0; }}\n" for name in FUNCTIONS.split())
    (folder / "cuda.c").write_text(source)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def install_driver() -> None:
    """Have Triton launch by it, and the operators take Triton for tensors on the CPU, each in its first config."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    from kernels import triton_launch
    from kernels.around import op as around
    from kernels.ttt_linear.op import CUSTOM_OP
    from repro.models import fused_block

    driver = nvidia.CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 0
    driver.get_device_capability = lambda device=0: (9, 0)
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(driver)
    fused_block._choose_backend = lambda *given: "triton"
    for operator in (around.CONV_NORM, around.SCAN_CONVS, around.GATED_NORM, around.GATED_LINEAR, CUSTOM_OP):
        operator._select = lambda backend, x: "triton"

    def choose_first(kernel: Any, candidates: Any, *sizes: Any) -> Any:
        config = candidates(*sizes)[0]
        launch = lambda grid: lambda **given: kernel[grid](**given, **config.all_kwargs())  # noqa: E731
        return type("First", (), {"best_config": config, "__getitem__": lambda self, grid: launch(grid)})()

    triton_launch.tuned = choose_first
    torch.set_num_threads(1)


def skip_products() -> None:
    """Let matrix products give memory alone."""
    import torch

    torch.nn.functional.linear = lambda x, w, b=None: x.new_empty(*x.shape[:-1], len(w))
    torch.Tensor.__matmul__ = lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1])
    torch.Tensor.addmm_ = lambda out, a, b: out
    torch.addmm = lambda c, a, b, **given: c.new_empty(len(a), b.shape[-1])


def measure(what: str, call: Callable[[], Any], calls: int = 1000) -> None:
    """Print the least and the median time of a call in microseconds."""
    for _ in range(5):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    times.sort()
    print(f"{what}: min {1e6 * times[0]:.0f}, median {1e6 * times[calls // 2]:.0f} us", flush=True)


def main() -> None:
    """Time a block in eager inference, and in training."""
    import timm
    import torch

    import repro.models  # noqa: F401  registers the models
    from repro.models import fused_block, fused_training

    install_driver()
    model = timm.create_model("vittt_tiny_patch16_224", depth=1, embed_dim=64, num_heads=1).to(torch.bfloat16)
    model.set_backend("triton")
    block, grid = model.blocks[0], (2, 2)
    tokens = torch.randn(1, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    inputs, g = [tokens, *block.parameters()], torch.randn(1, 4, 64, dtype=torch.bfloat16)
    measure(
        "training, forward and backward, products on the CPU",
        lambda: torch.autograd.grad(block(tokens, grid), inputs, g),
    )
    read = lambda: fused_block.read_weights(block, 4)  # noqa: E731
    weights = read()
    leaves = [x.detach().requires_grad_() for x in weights]

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given[4:])
            return given[4].clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return None, None, None, None, *ctx.saved_tensors

    def call_empty() -> Any:
        return torch.autograd.grad(Empty.apply(0, 0, 0, 0, tokens, *leaves), [tokens, *leaves], g)

    measure("training, an empty node of as many tensors", call_empty)
    skip_products()
    measure("training, the weights read", read)
    ctx = SimpleNamespace(needs_input_grad=(False,) * 4 + (True,) * (1 + len(weights)))
    ctx.save_for_backward = lambda *kept: setattr(ctx, "saved_tensors", kept)
    settings = 2, [1e-6] * 4, torch.bfloat16, None
    with torch.no_grad():
        given = tokens.detach(), *(x.detach() for x in weights)
        measure("training, the node's forward pass", lambda: fused_training._Node.forward(ctx, *settings, *given))
        measure("training, the node's backward pass", lambda: fused_training._Node.backward(ctx, g))
        model.eval().freeze()
        measure("inference, a frozen block", lambda: block(tokens, grid))


if __name__ == "__main__":
    if os.environ.get("TRITON_LIBCUDA_PATH") is None:
        with tempfile.TemporaryDirectory() as name:
            build_driver(Path(name))
            paths = dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), name)
            paths |= {"TRITON_CACHE_DIR": f"{name}/cache", "PYTHONPATH": str(ROOT)}
            sys.exit(subprocess.run([sys.executable, __file__], env=os.environ | paths).returncode)
    main()
