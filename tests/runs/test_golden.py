"""Golden losses: they hold, by every backend; each option that a profile turns has a line; planted faults are seen."""

import pytest

from repro.core.config import load_yaml
from repro.core.paths import find_root
from repro.core.record import read_json
from repro.runs import golden
from tests.slow import first, slow

CASES = golden.read_cases()
PATHS = find_root()
# registered name up to its size -> the family of results/golden
FAMILIES = {"ladder": None, "dit3": "dit", "dit5": "dit"}
# these change the size of a model, or the numbers' precision, and no equation
SIZES = {"patch_size", "embed_dim", "depth"}


@pytest.fixture(scope="module")
def scratch():
    with golden.scratch_checkout(PATHS) as root:
        yield root


def read_kept(family):
    return read_json(golden.find_golden(PATHS, family))


@pytest.mark.parametrize("every", [False, slow(True)])
@pytest.mark.parametrize("family", CASES["families"])
def test_values_hold(scratch, family, every):
    """Of a family's model with each setting of a training; and with every option, which `tests/models` has too."""
    lines, kept = golden.list_lines(CASES, family), read_kept(family)
    assert lines.keys() == kept.keys()
    own = lines["base"][1]["options"]
    chosen = {name: line for name, line in lines.items() if every or line[1]["options"] == own}
    found = {name: golden.train_line(scratch, name, *line) for name, line in chosen.items()}
    assert golden.compare_lines(family, found, {name: kept[name] for name in chosen}) == {}


@pytest.mark.parametrize("family", first(["vim", "vittt", "vrwkv", "vmamba", "mambavision"]))
def test_the_torch_backend_agrees(family):
    """With the values in results/golden, which are of numba's loops."""
    ((_, found),) = golden.run_families(PATHS, [family], lambda job: job.task.model.set_backend("torch"))
    assert golden.compare_lines(family, found, read_kept(family)) == {}


def list_turned():
    """(family, option, value) of every cell of a profile and every variant of a paper."""
    files = [*sorted(PATHS.profiles.glob("*.yaml")), *sorted((PATHS.root / "repro/papers").glob("*/variants.yaml"))]
    for file in files:
        content = load_yaml(file)
        sections = [content["variants"]] if "variants" in content else content.values()
        for cell in (cell for section in sections if isinstance(section, dict) for cell in section.values()):
            if isinstance(cell, dict) and "options" in cell:
                model = (
                    cell.get("model") or cell.get("changes", {}).get("model") or content.get("recipe", {}).get("model")
                )
                model = model or {"linearize": "t5", "vision_ttt": "vittt"}[file.parent.name]
                parts = model.split("_")
                name = parts[1] if parts[0] == "ladder" else parts[0]
                for option, value in cell["options"].items():
                    yield FAMILIES.get(name, name), option, value


def test_every_option_that_a_profile_turns_has_a_line():
    trained = {
        (family, option, value)
        for family in CASES["families"]
        for _, section in golden.list_lines(CASES, family).values()
        for option, value in section["options"].items()
    }
    turned = set(list_turned())
    assert len(turned) > 60
    # what a line leaves out is the model's default; the golden files hold it as `base`
    defaults = {("t5", "inner", "swiglu"), ("t5", "dwc", "qk"), ("lact", "chunk_size", 16)}
    assert sorted(map(str, (one for one in turned - trained - defaults if one[1] not in SIZES))) == []


def test_an_update_keeps_what_holds_and_writes_what_does_not(tmp_path, monkeypatch):
    old = {"loss": [1.0, 2.0], "grad_norm": [1.0, 1.0], "scores": {"top1_percent": 50.0}}
    near = {**old, "loss": [1.0, 2.0 + 1e-6]}
    far = {**old, "grad_norm": [1.0, 1.1]}
    assert golden.compare_lines("deit", {"base": near}, {"base": old}) == {}
    assert len(golden.compare_lines("deit", {"base": far}, {"base": old})) == 1
    monkeypatch.setattr(golden, "find_golden", lambda paths, family: tmp_path / f"{family}.json")
    monkeypatch.setattr(golden, "run_families", lambda paths, families: iter([("deit", {"base": found})]))
    texts = []
    for found in (old, near, far):
        golden.update_families(["deit"])
        texts.append((tmp_path / "deit.json").read_bytes())
    assert texts[0] == texts[1] != texts[2]
    found = old
    assert len(golden.update_families(["deit"], check=True)) == 1
    assert (tmp_path / "deit.json").read_bytes() == texts[2]


def change(**optim):
    return {"optim": optim}


# name -> the line it is planted in, and what it changes there
FAULTS = {
    "weight decay 20 % lower": ("base", change(weight_decay=0.8)),
    "no clipping": ("base", change(clip_grad_norm=None)),
    "clipping at twice the norm": ("base", change(clip_grad_norm=1.0)),
    "a longer average of the weights": ("base", {"ema_decay": 0.91}),
    "rate 1 % higher": ("base", change(lr=1.01e-2)),
    "last rate 10 % higher": ("base", change(min_lr=1.1e-3)),
    "first rate 10 % higher": ("base", change(warmup_lr=1.1e-3)),
    "no warm-up": ("base", change(warmup_epochs=0)),
    "first average of Adam": ("base", change(betas=[0.91, 0.999])),
    "second average of Adam": ("base", change(betas=[0.9, 0.998])),
    "epsilon of Adam": ("base", change(eps=1.1e-4)),
    "less label smoothing": ("base", {"mix": {"label_smoothing": 0.09}}),
    "no flips": ("base", {"transform": {"hflip": 0.0}}),
    "larger crops": ("base", {"transform": {"scale": [0.75, 1.0]}}),
    "another crop in evaluation": ("base", {"transform": {"crop_pct": 0.9}}),
    "another filter of the resize": ("base", {"transform": {"interpolation": "bilinear"}}),
    "another order and start": ("base", {"seeds": [1]}),
    "weaker stochastic depth": ("stochastic depth", {"drop_path": 0.4}),
    "another design": ("base", {"options": {"design": "dual"}}),
    "another pool": ("base", {"options": {"pool": "mid"}}),
    "another chunk": ("base", {"options": {"chunk_size": 8}}),
    "a shared start of the learner": ("base", {"options": {"w0": "shared"}}),
    "weaker mixing": ("mixup and cutmix", {"mix": {"mixup": 0.7}}),
    "rates of the layers": ("layer decay", change(layer_decay=0.61)),
    "a weaker teacher": ("mesa", {"mesa": {"weight": 1.9}}),
}


@pytest.mark.parametrize("fault", [slow(fault) for fault in FAULTS])
def test_a_planted_fault_moves_a_line_by_five_tolerances(scratch, fault):
    line, changes = FAULTS[fault]
    task, section = golden.list_lines(CASES, "vittt")[line]
    found = golden.train_line(scratch, "fault", task, golden._merge(section, changes))
    kept = read_kept("vittt")[line]
    allowed = golden.find_tolerances("vittt", line)
    moved = golden.measure_differences(found, kept)
    assert max(moved[part] / allowed[part] for part in golden.PARTS) > 5, moved
