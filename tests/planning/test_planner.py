"""What each stage is charged, against numbers worked out by hand."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

from repro.bench.adapted import adapted_cost
from repro.bench.flops import cost
from repro.bench.params import ComplexityParams, EfficiencyParams
from repro.bench.rows import write_rows
from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.models.registry import build_model
from repro.papers import load_papers
from repro.planning.planner import CostPlan, Planner, PlanRow, Rates, parse_rates, plan_costs
from repro.report.results import Results
from repro.runs.cells import record_speed

NANO = "vittt_nano_patch16_144"
GIVEN = Rates(given={NANO: 7.19})


def make_planner(root, rates=GIVEN, micro_batch=None):
    def prepared(kind, classes, train):
        return SimpleNamespace(kind=kind, expected=SimpleNamespace(classes=classes, train=train))

    data = {"digits": prepared("digits", 10, 1438), "photos": prepared("imagenet", 1000, 1_281_167)}
    data["coco"] = prepared("coco", 80, 118_287)
    return Planner(Paths(root), rates, Results(Paths(root), load_papers().values(), {}), data, micro_batch=micro_batch)


def make_params(transform, **changes):
    """A cell of a training stage, of which the planner reads attributes alone."""
    shared = {"model": NANO, "options": {"depth": 1}, "data": "digits", "seeds": (0,), "epochs": 2, "batch_size": 16}
    shared |= {"steps_per_epoch": None, "ema_decay": None, "snapshot_epochs": (), "precision": "auto"}
    return SimpleNamespace(**shared | changes, transform=SimpleNamespace(**transform))


@pytest.mark.parametrize(
    ("changes", "seconds", "copies", "basis"),
    [
        # 2 epochs of 1438 images at 7.19 images per second; three states of weights and two moments, and the weights
        # twice
        ({}, 400, 11, "1 × 2 × 1,438 images"),
        ({"snapshot_epochs": (0, 2)}, 400, 11 + 3 * 2, "1 × 2 × 1,438 images"),
        ({"ema_decay": 0.99}, 400, 11 + 3, "1 × 2 × 1,438 images"),
        # a second seed adds two states and its weights
        ({"seeds": (3, 5)}, 800, 11 + 2 * 3 + 1, "2 × 2 × 1,438 images"),
        # 2 epochs of 719 steps of 16 images
        ({"steps_per_epoch": 719}, 3200, 11, "1 × 2 × 11,504 images"),
    ],
)
def test_a_classifier_by_hand(tmp_path, changes, seconds, copies, basis):
    planner = make_planner(tmp_path)
    row = planner.charge("pretrain", "nano", make_params({"image_size": 32}, **changes))
    assert row.command == "dvc repro pretrain@nano" and row.hours == pytest.approx(seconds / 3600)
    model = build_model(NANO, img_size=32, depth=1, num_classes=10)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    assert row.disk_gb == pytest.approx(copies * 4 * num_params / 1e9)
    assert (row.basis, row.mark) == (basis, "") and row.note.startswith("given: 7.2 img/s")
    # the weights, their gradients and two moments, and the moving average
    held = 4 + bool(changes.get("ema_decay"))
    assert row.memory_gib is None and row.least_memory_gib == pytest.approx(held * 4 * num_params / 2**30)
    assert row.measure == "repro pretrain --cell nano --epochs 1 --seeds 1"
    assert row.gives == {("accuracy", "digits", f"{NANO}[depth=1]")}
    assert planner.trained == {NANO, f"{NANO}[depth=1]"}


@pytest.mark.parametrize(
    ("stage", "measure"),
    [
        ("pretrain", "repro pretrain --cell nano --epochs 1 --seeds 1"),
        ("linearize", "repro linearize --cell nano"),
        ("ablate", "repro ablate --cell ablate.nano"),
        ("ablate_linearize", "repro ablate --cell ablate_linearize.nano"),
    ],
)
def test_every_section_of_classifiers_takes_a_given_rate_and_names_its_verb(tmp_path, stage, measure):
    row = make_planner(tmp_path).charge(stage, "nano", make_params({"image_size": 32}))
    assert (row.command, row.measure) == (f"dvc repro {stage}@nano", measure) and row.note.startswith("given: ")


def test_an_estimate_is_of_the_multiply_adds_at_the_size_and_classes_of_the_data(tmp_path):
    planner = make_planner(tmp_path, Rates(tflops=1e-3, utilisation=0.5))
    params = make_params({"image_size": 64}, data="photos", options={"design": "conv2d"})
    row = planner.charge("ablate", "nano", params)
    macs = cost(NANO, {"num_classes": 1000}, (64, 64)).macs
    assert row.hours * 3600 == pytest.approx(2 * 1_281_167 * 3 * 2 * macs / 0.5e9)
    assert row.mark == "~" and row.gives == {("accuracy", "imagenet", NANO)}


def test_an_estimated_step_takes_at_least_the_hosts_time(tmp_path):
    """Two forward passes took 11 and 12 ms with 33 times the work: three passes of 12 ms for each 8 of 1,438 images."""
    usual = {"model": "vittt_tiny_patch16_224", "batch_size": 1, "dtype": "bf16", "mode": "infer", "backend": "triton"}
    usual |= {"device": "cuda: a GPU", "status": "ok", "throughput_img_per_s": 90.0, "attention": "fused", "run": 1}
    usual |= {"options": {}, "compile": False, "commit": "c0de"}
    rows = [{**usual, "image_size": [side] * 2, "latency_ms": ms} for side, ms in ((224, 11.0), (1280, 12.0))]
    write_rows(tmp_path / "results/speed/a_gpu.csv", rows)
    row = make_planner(tmp_path, Rates(), micro_batch=8).charge("pretrain", "nano", make_params({"image_size": 32}))
    assert row.hours * 3600 == pytest.approx(2 * 1438 / 8 * 3 * 0.012) and "12 ms" in row.note and row.mark == "~"
    # where the work takes longer, it decides
    row = make_planner(tmp_path, Rates(tflops=1e-4)).charge("pretrain", "nano", make_params({"image_size": 32}))
    assert row.hours * 3600 > 100 and not row.note


@pytest.mark.parametrize(
    ("stage", "transform", "changes", "images", "image_size"),
    [
        # 12 passes over 118,287 images at the largest scale, whose sides 800 and 1333 are padded to multiples of 32
        ("detect", {"min_size": (480, 800), "max_size": 1333}, {"epochs": 12, "data": "coco"}, 1_419_444, (800, 1344)),
        # 10 times 16,000 steps of 16 crops, for two seeds
        (
            "segment",
            {"crop_size": 512},
            {"epochs": 10, "steps_per_epoch": 16_000, "seeds": (0, 1)},
            5_120_000,
            (512, 512),
        ),
    ],
)
def test_dense_tasks_by_hand(tmp_path, stage, transform, changes, images, image_size):
    planner = make_planner(tmp_path)
    row = planner.charge(stage, "nano", make_params(transform, **changes, options={"design": "dual"}))
    macs = adapted_cost(NANO, image_size, {"design": "dual"}).macs
    # the speed that is given is a classifier's, and does not apply
    assert row.hours == pytest.approx(images * 6 * macs / (0.3 * 312e12) / 3600) and row.mark == "≥"
    assert row.disk_gb is None and not planner.trained


def record(root, stage, params, speed, gpu="NVIDIA L40S", processes=1, micro_batch=None, dtype="bf16"):
    """Write a record as a training on a GPU does."""
    cell = SimpleNamespace(params=params, paths=Paths(root), stage=stage, name="nano", where=f"{stage}.nano")
    cell.ranks, cell.runtime = Ranks(world_size=processes), SimpleNamespace(micro_batch=micro_batch)
    params.needs_even_parts = False
    speed = {"peak_memory_mib": 2048.0, **speed}
    record_speed(cell, [speed], gpu.lower().replace(" ", "_"), {"device": f"cuda: {gpu}", "dtype": dtype}, 1.0)


def test_a_training_on_a_gpu_is_planned_by_its_record(tmp_path):
    """200 images per second on two processes, of which each sends 8 at once through the model: 100 on one of them, in
    2 GiB.
    """
    params = make_params({"image_size": 32, "color_jitter": None})
    record(tmp_path, "pretrain", params, {"throughput_img_per_s": 200.0}, processes=2)
    gpu, another = Rates(gpu="L40S"), Rates(gpu="A100")
    row = make_planner(tmp_path, gpu, micro_batch=8).charge("pretrain", "other", params)
    assert row.hours * 3600 == pytest.approx(2 * 1438 / 100) and (row.mark, row.memory_gib) == ("", 2.0)
    assert "results/replications/nvidia_l40s/speed/pretrain/nano.json" in row.note
    # the speed of another GPU is not this one's, but the memory is
    row = make_planner(tmp_path, another, micro_batch=8).charge("pretrain", "nano", params)
    assert (row.mark, row.memory_gib) == ("~", 2.0)
    # another stage that trains classifiers has the speed, and its memory is not known
    row = make_planner(tmp_path, gpu, micro_batch=8).charge("ablate", "nano", params)
    assert (row.mark, row.memory_gib) == ("", None)
    for changes, micro_batch, mark in (
        ({}, 4, ""),  # images at once
        ({"ema_decay": 0.9}, 8, ""),
        ({"precision": "fp32"}, 8, "~"),
        ({"options": {"depth": 2}}, 8, "~"),
    ):
        changed = make_params({"image_size": 32}, **changes)
        row = make_planner(tmp_path, gpu, micro_batch=micro_batch).charge("pretrain", "nano", changed)
        assert (row.mark, row.memory_gib) == (mark, None), changes
    larger = make_params({"image_size": 64})
    row = make_planner(tmp_path, gpu, micro_batch=8).charge("pretrain", "nano", larger)
    assert (row.mark, row.memory_gib) == ("~", None)


def test_a_detector_takes_a_measured_speed_of_its_own_stage_alone(tmp_path):
    detector = make_params({"min_size": (24, 30), "max_size": 32, "crop_size": (8, 9)}, options={})
    classifier = make_params({"image_size": 32}, options={})
    for stage, params, rate in (("pretrain", classifier, 2.0), ("detect", detector, 8.0)):
        record(tmp_path, stage, params, {"throughput_img_per_s": rate}, processes=2)
    planner = make_planner(tmp_path, Rates(gpu="L40S"))
    row = planner.charge("detect", "nano", detector)
    assert row.hours == pytest.approx(2 * 1438 / 4 / 3600) and row.mark == ""
    assert planner.charge("segment", "nano", make_params({"crop_size": 32}, options={})).mark == "≥"
    assert planner.charge("ablate", "nano", classifier).hours == pytest.approx(2 * 1438 / 1 / 3600)


def test_counts_come_from_the_manifest_once_it_is_written(tmp_path):
    folder = tmp_path / "results" / "prepare_data" / "digits"
    folder.mkdir(parents=True)
    split = {"images": 100, "bytes": 7_000, "folders": {}}
    content = {"kind": "digits", "classes": {"a": 0, "b": 1, "c": 2}, "splits": {"train": split, "val": split}}
    (folder / "manifest.json").write_text(json.dumps({**content, "departures": [], "generated": None, "hash": "x"}))
    planner = make_planner(tmp_path)
    assert planner.find_data("pretrain", "nano", "digits") == ("digits", 3, 100)
    for cell, params, size in (
        ("digits", planner.data["digits"], (14_000 / 1e9, "CPU; size from its manifest")),
        ("photos", planner.data["photos"], (150, "CPU; size as published")),
        ("other", SimpleNamespace(kind="digits"), (None, "CPU; size unknown as yet")),
    ):
        row = planner.charge("prepare_data", cell, params)
        assert (row.disk_gb, row.basis) == size


def test_counting_is_free_and_gives_both_conventions(tmp_path):
    groups = [{"models": [NANO], "image_sizes": [144], "vary": {"design": ["dual", "conv2d"]}}]
    adapters = {"backbones": [NANO], "image_sizes": [{"height": 64, "width": 96}]}
    params = build(ComplexityParams, {"sizes": {}, "groups": groups, "adapters": adapters}, "complexity")
    row = make_planner(tmp_path).charge("complexity", None, params)
    assert (row.hours, row.disk_gb) == (0, 0)
    names = {f"{NANO}[design=dual]@144": "macs_g", f"{NANO}@144": "macs_g"}  # conv2d is the default
    names[f"vit_adapter[backbone={NANO}]@64x96"] = "macs_g_paper_convention"
    assert row.gives == {(kind, name, "") for name, macs in names.items() for kind in ("params_m", macs)}


def test_measuring_takes_at_most_every_row_its_budget(tmp_path):
    sizes = {size: {"model": f"v_{size}", "baseline": f"d_{size}"} for size in "TS"}
    params = build(
        EfficiencyParams,
        {"sizes": sizes, "others": ["o"], "image_sizes": [32, 64, 96], "budget_s": 600.0},
        "efficiency",
    )
    row = make_planner(tmp_path).charge("efficiency", None, params)
    # Vittt, DeiT with two kinds of attention, for two sizes, and one more model, at three image sizes
    assert row.hours == (2 * 3 + 1) * 3 * 600 / 3600 and (row.basis, row.mark) == ("21 rows of 600 s", "≤")
    assert row.gives == {
        (kind, model, "") for kind in ("fps", "memory_mib") for model in ("v_T", "v_S", "d_T", "d_S", "o")
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "digit"}, "pretrain.nano.data: digit: prepare_data has no such cell; did you mean 'digits'?"),
        ({"model": "vittt_nono"}, "pretrain.nano: vittt_nono: no such model"),
        ({"options": {"designs": "dual"}}, "pretrain.nano: vittt_nano_patch16_144: cannot be built"),
    ],
)
def test_a_cell_that_cannot_be_trained_is_named(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        make_planner(tmp_path).charge("pretrain", "nano", make_params({"image_size": 32}, **changes))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_every_section_is_charged_in_the_order_of_the_file(tmp_path):
    """By a table of made-up stages: what has no row is of unknown cost, and what is free is neither listed nor read."""
    make_stage = partial(SimpleNamespace, params=ComplexityParams, scores={})
    stages = {name: make_stage(cells=True, purpose="graph") for name in ("many", "none")}
    stages |= {name: make_stage(cells=False, purpose="graph") for name in ("complexity", "tune")}
    stages["use"] = make_stage(cells=True, purpose="use")
    empty = {"sizes": {}, "groups": []}
    sections = {"runtime": {}, "other": {}, "many": {"a": empty}, "use": {"b": empty}, "tune": {"odd": 1}}
    file = tmp_path / "params.yaml"
    file.write_text(json.dumps(sections | {"none": None, "complexity": empty}))
    plan = plan_costs(stages, file, Paths(tmp_path), [Rates()])[0]
    unknown = ["dvc repro other", "dvc repro many@a", "repro use --cell b"]
    assert [row.command for row in plan.rows] == [*unknown, "dvc repro complexity"] and plan.unknown == unknown
    with pytest.raises(UserError, match="^plan: --img-per-s m: no cell trains this model$"):
        plan_costs(stages, file, Paths(tmp_path), [Rates(given={"m": 1.0})])
    for wrong, message in (
        ("many: [1]", "many: expected a mapping of cells"),
        ("many: {a: {odd: 1}}", "many.a.odd: unknown key"),
    ):
        file.write_text(f"{wrong}\n")
        with pytest.raises(UserError, match=f"^{message}"):
            plan_costs(stages, file, Paths(tmp_path), [Rates()])[0]


def test_which_numbers_the_rows_cover():
    a, b, c = (("accuracy", "coco", name) for name in "abc")
    unknown = {"hours": None, "disk_gb": 0.0, "basis": ""}
    rows = [PlanRow(command=number[2], gives=frozenset({number}), **unknown) for number in (a, b)]
    plan = CostPlan(rows, {"Table 1": [{a}, {a, b}, {b, c}, set()], "Table 2": [{c}]})
    assert plan.count_covered() == {"Table 1": (2, 4), "Table 2": (0, 1)}
    assert plan.find_rows("Table 1") == rows and plan.find_rows("Table 2") == []


def test_a_measured_speed_is_the_slowest_of_one_gpu(tmp_path):
    params = make_params({"image_size": 32})
    for stage, rate, more in (
        ("pretrain", 2000.0, {"processes": 2}),
        ("ablate", 3000.0, {}),
        ("ablate", 1.0, {"gpu": "NVIDIA H200"}),
        ("linearize", None, {}),
    ):
        why = {"throughput_img_per_s_reason": "no step was timed"}
        record(tmp_path, stage, params, {"throughput_img_per_s": rate, **why}, **more)
    planner = make_planner(tmp_path, Rates(gpu="l40s"))
    found = planner.find_trainings(f"{NANO}[depth=1]", params, ("pretrain", "ablate", "linearize"))
    speed, note = planner.find_measured(found)
    assert speed == 1000.0 and "cuda: NVIDIA L40S" in note and "nvidia_l40s/speed/pretrain/nano.json" in note
    assert not planner.find_trainings(f"{NANO}[depth=1]", params, ("detect",))


def test_a_given_speed_is_of_a_model_with_or_without_its_options(tmp_path):
    """The more exact name counts, and one with other options does not."""
    for given, note in (
        ({NANO: 7.0}, "given: 7.0 img/s"),
        ({NANO: 7.0, f"{NANO}[depth=1]": 8.0}, "given: 8.0 img/s"),
        ({f"{NANO}[depth=2]": 8.0}, ""),
    ):
        row = make_planner(tmp_path, Rates(given=given)).charge("pretrain", "nano", make_params({"image_size": 32}))
        assert row.note.startswith(note) and row.mark == ("" if note else "~")


@pytest.mark.parametrize("text", ["m=fast", "m=0", "m=-1", "m=nan", "m=inf", "5", "=5", "m"])
def test_rates_are_read_from_text_and_others_are_refused(text):
    assert parse_rates(["m=5", "m[design=dual]=1e3"]) == {"m": 5.0, "m[design=dual]": 1000.0}
    with pytest.raises(UserError, match="expected MODEL=NUMBER with a number above 0$"):
        parse_rates([text])


@pytest.mark.parametrize(
    "change", [{"tflops": 0.0}, {"tflops": float("nan")}, {"utilisation": 30.0}, {"utilisation": 0.0}]
)
def test_assumptions_out_of_range_are_refused(change):
    with pytest.raises(UserError, match=f"^plan: --{next(iter(change))} "):
        Rates(**change)
