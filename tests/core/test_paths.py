import pytest

from repro.core.errors import Interrupted, UserError
from repro.core.paths import Paths, find_root
from repro.core.runtime import Runtime, load_runtime


def test_root_is_found_from_below(tmp_path):
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("")
    below = tmp_path / "results" / "pretrain"
    below.mkdir(parents=True)
    (below / "params.yaml").write_text("")  # alone it makes no root
    assert find_root(below) == find_root(tmp_path) == Paths(tmp_path.resolve())


def test_outside_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run inside a checkout"):
        find_root()


def test_folders(tmp_path):
    paths = Paths(tmp_path)
    assert paths.cell("pretrain", "nano_digits") == tmp_path / "results/pretrain/nano_digits"
    assert paths.run_state("pretrain", "nano_digits", "abc") == tmp_path / ".runs/pretrain/nano_digits/abc"
    assert paths.measured("nvidia_l40s") == tmp_path / "results/measured/nvidia_l40s"


def test_data_roots(tmp_path):
    (tmp_path / "params.yaml").write_text("runtime: {data_roots: {digits: data/digits, imagenet: /big/imagenet}}")
    paths = Paths(tmp_path)
    runtime = load_runtime(paths)
    assert runtime.data_root(paths, "digits") == tmp_path / "data/digits"
    assert str(runtime.data_root(paths, "imagenet")) == "/big/imagenet"
    with pytest.raises(UserError, match=r"runtime\.data_roots\.coco: missing; say where the coco data set lies"):
        runtime.data_root(paths, "coco")


@pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 143)])
def test_exit_code_of_a_signal(signum, code):
    assert Interrupted(signum, "saved at step 3").exit_code == code


def test_cuda_that_is_not_there():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    from repro.core.runtime import choose_device

    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"runtime\.device: cuda was asked for"):
        choose_device("cuda")


def test_runtime_defaults_need_only_the_data_roots():
    assert Runtime(data_roots={}).workers == 0
