"""The ablations on the page: the paper's rows beside ours, verdicts, missing cells, what never stands together, and Fig. 7."""

import pytest

from repro.core.variants import PLACES, VARIANTS
from repro.report.ablations import ablation_parts, draw_figures, drawn_from, groups, orders_of

NANO, TINY = "vittt_nano_patch16_144", "vittt_tiny_patch16_224"


def train(checkout, name, top1, *, folder="measured/cpu/ablate/digits", recipe="r", dtype="fp32", **more):
    metrics = {
        "model": NANO,
        "options": VARIANTS[name],
        "data": "digits",
        "data_cell": "digits",
        "classes": 10,
        "recipe": recipe,
        "image_size": 144,
        "epochs": 4,
        "batch_size": 32,
        "val_images": 100_000,
        "params": 329_310,
        "macs_g": 0.035,
        "weights": "w",
        "top1_percent": sum(top1) / len(top1),
        "top1_spread_percent": 0.25,
        "throughput_img_per_s": 321.4,
        "throughput_batch": 64,
        "seeds": [{"seed": seed, "top1_percent": value, "top1_previous_percent": value - 0.1} for seed, value in enumerate(top1)],
        **more,
    }
    checkout.record(f"{folder}/{name}", metrics, dtype=dtype)
    checkout.write(f"results/{folder}/{name}/recipe.json", "{}")  # as the stage leaves it: no record


def grid(checkout, step=2.0, **more):
    """All 17 in the paper's order of Table 3 and 4, `step` points apart; chunks and states too."""
    ladder = [
        "share_qk",
        "ttt_layer",
        "gating",
        "conv1d",
        "double",
        "head",
        "mid",
        "chunk64",
        "w0_frozen",
        "w0_shared",
        "chunk_all",
        "chunk32",
        "chunk8",
    ]
    for name in VARIANTS:
        rank = ladder.index(name) if name in ladder else {"dual": 13, "max": 14, "chunk4": 15, "conv2d": 16}[name]
        train(checkout, name, [50 + step * rank, 51 + step * rank, 52.01 + step * rank], **more)


def part(checkout, title):
    (found,) = [text for text in ablation_parts(checkout.results(), checkout.ledger) if text.startswith(title)]
    return found


def test_the_papers_orders_are_its_tables(ledger):
    """Table 3 and 4 have no two equal Top-1: every two are ordered."""
    assert {place: len(orders_of(place, ledger)) for place in PLACES} == {"Table 3": 15, "Table 4": 10, "Fig. 7(a)": 5, "Fig. 7(b)": 3}
    assert ("ttt_layer", "share_qk") in orders_of("Table 3", ledger) and ("conv2d", "max") in orders_of("Table 4", ledger)


def test_a_whole_grid_in_the_papers_order_is_seen_and_its_rows_stand_beside_the_papers(checkout):
    grid(checkout)
    head, *parts = ablation_parts(checkout.results(), checkout.ledger)
    assert head.count("**ordering seen**") == 4 and head.count("| 1.00 |") == 4
    assert [text.split(":")[0] for text in parts] == [f"### {place}" for place in PLACES]
    assert "| Vittt | 6.98 | 1.44 | 2029 | 77.7 | 0.3293 | 0.035 | 321 | 83.00 ± 0.25 |" in part(checkout, "### Table 3")
    assert "| pool max | 6.98 | 1.44 | 77.2 | 0.3293 |" in part(checkout, "### Table 4")
    assert "| chunk_size all | – | – | 0.3293 |" in part(checkout, "### Fig. 7(a)")
    assert "Not trained here" not in "".join(parts)


def test_a_missing_cell_is_named_and_the_rest_is_shown(checkout):
    grid(checkout)
    for name in ("mid", "chunk_all"):
        (checkout.paths.results / "measured/cpu/ablate/digits" / name / "metrics.json").unlink()
    text = part(checkout, "### Table 4")
    assert (
        "Not trained here: mid; `repro ablate --all --data digits --epochs 4` trains all" in text
        and "| pool head |" in text
        and "mid >" not in text
    )
    assert "Not trained here: chunk_all" in part(checkout, "### Fig. 7(a)")


def test_other_recipes_and_other_folders_are_other_groups(checkout):
    train(checkout, "conv2d", [80, 81], folder="ablate")
    train(checkout, "head", [70, 71], folder="ablate")
    train(checkout, "conv2d", [90, 91])
    train(checkout, "head", [89, 90], recipe="another")
    assert sorted(len(group.variants) for group in groups(checkout.results())) == [1, 1, 2]
    (only,) = [text for text in ablation_parts(checkout.results(), checkout.ledger) if text.startswith("### ")]
    assert only.startswith("### Table 4") and "90.50" not in only


def test_on_imagenet_vittt_itself_is_pretrains_and_detectors_belong_to_their_weights(checkout):
    more = {
        "model": TINY,
        "data": "imagenet",
        "data_cell": "imagenet",
        "val_images": 50_000,
        "epochs": 300,
        "batch_size": 1024,
        "classes": 1000,
        "image_size": 224,
    }
    train(checkout, "dual", [77.4], folder="ablate", dtype="bf16", **more)
    same = {key: more[key] for key in ("model", "data", "epochs", "batch_size", "val_images")}
    checkout.record("pretrain/tiny", {**same, "options": {}, "top1_percent": 77.6, "params": 6_983_116})
    about = {"model": TINY, "data": "coco", "val_images": 5000, "epochs": 12, "ap_box_percent": 42.6, "ap_mask_percent": 38.5}
    checkout.record("detect/dual", {**about, "options": {"design": "dual"}, "initial": "results/ablate/dual/weights.safetensors"})
    text = part(checkout, "### Table 3")
    assert "| design dual | 6.96 | 1.42 | 2068 | 77.5 | 42.7 | 38.6 | 0.3293 | 0.035 | 321 | 77.40 ± 0.25 | 42.6 | 38.5 |" in text
    assert "| Vittt | 6.98 | 1.44 | 2029 | 77.7 | 42.9 | 38.7 | 6.983 | – | – | 77.60 | – | – |" in text
    assert "insufficient budget" in ablation_parts(checkout.results(), checkout.ledger)[0]
    assert checkout.judge()["table3.dual.top1_percent"].ours == pytest.approx(77.4)
    train(checkout, "gating", [70.0], **more)  # by hand: of as many epochs as somebody wished
    assert checkout.judge()["table3.gating.top1_percent"].ours is None


def test_digits_never_stand_for_the_papers_accuracy(checkout):
    grid(checkout)
    assert all(verdict.ours is None for name, verdict in checkout.judge().items() if name.startswith("table3.") and "top1" in name)
    assert not checkout.results().mini_cells


def test_fig_7_is_drawn_once_per_data_set_with_the_same_bytes(checkout):
    grid(checkout)
    train(checkout, "conv2d", [80, 81], folder="ablate")
    train(checkout, "w0_frozen", [70, 71], folder="ablate", throughput_img_per_s=None, throughput_img_per_s_reason="not measured yet")
    folder = checkout.paths.results / "figures"
    train(checkout, "chunk8", [71, 72], folder="ablate_elsewhere")  # one alone makes no figure
    files = draw_figures(checkout.results(), checkout.ledger, folder)
    shown = drawn_from(checkout.results())
    assert sorted(shown) == sorted(file.name for file in files) and not any("elsewhere" in s.path for of in shown.values() for s in of)
    assert sorted(file.name for file in files) == ["fig7a_digits.png", "fig7b_digits.png"]
    before = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in draw_figures(checkout.results(), checkout.ledger, folder)] == before and before[0].startswith(
        b"\x89PNG"
    )
    linked = [text for text in ablation_parts(checkout.results(), checkout.ledger) if "figures/fig7b_digits.png" in text]
    assert len(linked) == 1 and "4 epochs, 3 seeds" in linked[0]


def test_nothing_trained_says_how(checkout):
    assert (
        "None is trained yet: `repro ablate`" in ablation_parts(checkout.results(), checkout.ledger)[0]
        and draw_figures(checkout.results(), checkout.ledger, checkout.paths.results) == []
    )
