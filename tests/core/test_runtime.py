"""What a record says of the machine, from texts that other systems gave; the root of a checkout, and the data's roots."""

import platform

import pytest
import torch

from repro.core.errors import UserError
from repro.core.paths import Paths, expand_home, find_root
from repro.core.runtime import (
    choose_device,
    cpu_name,
    describe_machine,
    describe_place,
    device_label,
    explain_emulation,
    find_peak,
    load_runtime,
    parse_blas,
)
from tests.conftest import run_python

INTEL = {"cpu family": "6", "model": "143", "stepping": "8"}
INTEL["flags"] = "fpu sse2 sse4_2 fma avx avx2 avx512f avx512_bf16 amx_tile avx_vnni"
ARM = {"Features": "fp asimd evtstrm aes asimddp sve sve2 sha1", "CPU part": "0xd40"}
MKL = "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64\n  - Build settings: BLAS_INFO=mkl, X=1"
OLD_MKL = "  - Intel(R) Math Kernel Library Version 2019.0.5 Product Build 20190808\n"


@pytest.fixture
def processor(monkeypatch):
    """A function that sets the fields of /proc/cpuinfo."""
    return lambda fields: monkeypatch.setattr("repro.core.runtime._read_cpuinfo", lambda: fields)


def test_a_processor_by_its_fields(processor):
    def describe(fields):
        processor(fields)
        return {name: value for name, value in describe_machine().items() if name.startswith(("family", "flags"))}

    flags = ["amx_tile", "avx", "avx2", "avx512_bf16", "avx512f", "fma", "sse4_2"]
    assert describe(INTEL) == {"family_model_stepping": "6 143 8", "flags": flags}
    unknown = {"family_model_stepping": None, "family_model_stepping_reason": "/proc/cpuinfo does not say it"}
    assert describe(ARM) == {"flags": ["asimd", "asimddp", "sve", "sve2"], **unknown}
    assert describe({})["flags"] is None and describe({})["flags_reason"]


@pytest.mark.parametrize(
    ("cpuinfo", "emulated"),
    [
        (INTEL, {"fp16"}),
        (ARM, {"bf16", "fp16"}),
        ({"Features": "fp asimd asimdhp bf16"}, set()),
        ({"flags": "avx2 f16c"}, {"bf16", "fp16"}),  # f16c converts numbers, and multiplies none
        ({}, set()),  # unknown
    ],
)
def test_a_dtype_without_units_is_emulated(processor, cpuinfo, emulated):
    processor(cpuinfo)
    assert {dtype for dtype in ("fp32", "bf16", "fp16") if explain_emulation(dtype)} == emulated


def test_processors_of_one_name_are_told_apart(processor):
    processor({**INTEL, "model name": "Intel(R) Xeon(R) Processor @ 2.00GHz"})
    assert cpu_name() == "Intel Xeon Processor @ 2.00GHz family 6 model 143"
    processor({"model name": "Some   CPU"})
    assert cpu_name() == "Some CPU"
    processor({})
    assert cpu_name()


@pytest.mark.parametrize(
    ("text", "library"),
    [
        (MKL, "Intel oneAPI MKL 2024.2"),
        (OLD_MKL, "Intel MKL 2019.0.5"),
        ("  - Build settings: BLAS_INFO=open, BUILD_TYPE=Release", "OpenBLAS"),
        ("  - Build settings: BLAS_INFO=nobody, BUILD_TYPE=Release", None),
        ("PyTorch built with:", None),
    ],
)
def test_the_library_of_matrix_products(text, library):
    assert parse_blas(text) == library


def test_a_label_counts_its_threads():
    assert device_label("cpu", 1).endswith(", 1 thread") and device_label("cpu", 2).endswith(", 2 threads")


def test_the_place_is_on_the_machine():
    place, machine = describe_place("cpu: some processor, 1 thread"), describe_machine()
    shared = ("cpu", "family_model_stepping", "flags")
    assert {name: place[name] for name in shared} == {name: machine[name] for name in shared} and "gpus" not in place
    gpu = describe_place("cuda: some GPU")
    for name in ("gpus", "cuda"):
        assert gpu[name] or gpu[f"{name}_reason"]


def test_root_is_found_from_below_alone(tmp_path, monkeypatch):
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("")
    below = tmp_path / "results" / "pretrain"
    below.mkdir(parents=True)
    (below / "params.yaml").write_text("")  # alone it makes no root
    for folder in (below, tmp_path):
        monkeypatch.chdir(folder)
        assert find_root() == Paths(tmp_path.resolve())
    assert find_root().run_state("pretrain", "nano", "abc") == tmp_path.resolve() / ".runs/pretrain/nano/abc"
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UserError, match="run inside a checkout"):
        find_root()


def test_data_roots(tmp_path):
    (tmp_path / "params.yaml").write_text("runtime: {data_roots: {digits: data/digits, imagenet: /big/imagenet}}")
    paths = Paths(tmp_path)
    runtime = load_runtime(paths)
    assert runtime.workers == 0  # by default the main process loads the data
    assert runtime.data_root(paths, "digits") == tmp_path / "data/digits"
    assert str(runtime.data_root(paths, "imagenet")) == "/big/imagenet"
    with pytest.raises(UserError, match=r"runtime\.data_roots\.coco: missing; say where the coco data set lies"):
        runtime.data_root(paths, "coco")


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"runtime\.device: cuda was asked for"):
        choose_device("cuda")


THREADS = {
    "4": 4,
    "4 , 2": 4,
    "+4": 4,
    "\t2\n": 2,
    "16": 8,
    # not a number of OpenMP's: as if it were not set
    **dict.fromkeys(["", "0", "-4", "4.5", ",4", "4 2", "\u0664"], 8),
}


@pytest.mark.parametrize("given", THREADS)
def test_the_first_number_of_the_environment_limits_the_threads(tmp_path, monkeypatch, given):
    (tmp_path / "params.yaml").write_text("runtime: {threads: 8, data_roots: {}}\n")
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert load_runtime(Paths(tmp_path)).threads == THREADS[given]


HOMES = {
    **{word: word.replace("~", "/users/me") for word in ("~", "--data=folder:~/a b", "coco:~/pets", "-o~/x")},
    **{word: word for word in ("a~", "x/~", "./~", "~nobody_of_this_name/x", "--probe=steps=2", "", "a=~b")},
}


@pytest.mark.parametrize("word", HOMES)
def test_a_path_of_the_command_line_may_begin_at_the_home(monkeypatch, word):
    monkeypatch.setenv("HOME", "/users/me")
    assert expand_home(word) == HOMES[word]


def test_the_command_line_reads_every_path_so(tmp_path, monkeypatch, bare_checkout, repro_cli):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for words in ("predict ~/p.png --weights=~/w", "pretrain --data=folder:~/w", "linearize --from=~/w.pth --model x"):
        assert f"{tmp_path}/me/w" in repro_cli.refuse(*words.split())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    """By the kernel's count of page faults: a new mapping of 40 MiB takes up to 10,240, and none where it is kept.

    An aligned block leaves a small gap before it. malloc's cache of the thread holds up to seven such gaps as if they
    were in use, and a block that is freed beside one is too short for the next request. So sixteen requests come first.
    """
    script = """
import resource, torch
from repro.core.runtime import keep_freed_memory

def count():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(40 * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

by_default = count()
keep_freed_memory()
for _ in range(16):
    torch.ones(40 * 2**20, dtype=torch.uint8)
print(by_default, count())
"""
    by_default, kept = map(int, run_python("-c", script).stdout.split())
    assert by_default > 40 > kept  # at least 20 huge pages of 2 MiB for each mapping


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        # a part of one, or another chip of nearly its name
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA L4", None),
    ],
)
def test_a_peak_is_that_of_the_whole_gpu(gpu, tflops):
    assert find_peak(gpu) == tflops
