"""The ablations on the page: the paper's rows next to ours, verdicts, missing variants, what is never joined, Fig. 7."""

import pytest

from repro.bench.flops import cost
from repro.papers.variants import load_variants
from repro.report.answer import answer_blocks
from repro.report.document import Heading
from repro.report.markdown import render_blocks
from repro.report.results import Missing
from repro.report.variants import find_ends, find_groups, find_shown, list_ablations, plan_figures

VARIANTS, TABLES_AND_FIGURES = load_variants("vision_ttt").options, load_variants("vision_ttt").rows
NANO, TINY = "vittt_nano_patch16_144", "vittt_tiny_patch16_224"


def train(checkout, name, top1, *, folder="measured/cpu/ablate/digits", throughput=321.4, **more):
    """A variant's record, its throughput and its recipe, as the stage leaves them."""
    usual = {"model": NANO, "data": "digits", "kind": "digits", "image_size": 144, "epochs": 4}
    usual |= {"top1_std_percent": 0.25, "num_params": 329_310, "held_out_images": 100_000}
    checkout.train(f"{folder}/{name}", options=VARIANTS[name], top1=tuple(top1), **{**usual, **more})
    speed = {"throughput_img_per_s": throughput, "reason": "not measured yet"}
    checkout.record(f"{folder}/{name}", speed, name="speed")


def count_macs(model, size, classes, **options):
    """Multiply-adds of an image as the page writes them; the records say nothing of them."""
    return f"{cost(model, {**options, 'num_classes': classes}, (size, size)).macs / 1e9:.4g}"


def grid(checkout, step=2.0, **more):
    """All 17 in the paper's order of Table 3 and 4, `step` points apart; chunks and states too."""
    ladder = "ttt_layer share_qk gating conv1d double head mid chunk64 w0_frozen w0_shared chunk_all chunk32 chunk8"
    for rank, name in enumerate((*ladder.split(), "dual", "max", "chunk4", "conv2d")):
        train(checkout, name, [50 + step * rank, 51 + step * rank, 52.01 + step * rank], **more)


def parts(checkout) -> list[str]:
    """The head of the section, then the text below each heading, with the heading first."""
    found = [""]
    for block in list_ablations(checkout.report()):
        found += [""] if isinstance(block, Heading) else []
        found[-1] += render_blocks([block]) + "\n\n"
    return found


def part(checkout, title):
    (found,) = [text for text in parts(checkout) if text.startswith(title)]
    return found


def test_a_whole_grid_in_the_papers_order_is_seen_and_its_rows_are_next_to_the_papers(checkout):
    grid(checkout)
    head, *found = parts(checkout)
    # digits never count as the paper's accuracy
    judged = checkout.judge()
    assert all(judged[name].ours is None for name in judged if name.startswith("table3.") and "top1" in name)
    assert "There are none yet" in checkout.runs().split("\n## Runs")[1].split("\n## ")[0]
    assert head.count("**ordering seen**") == 4 and head.count("| 1.00 |") == 4
    assert [text.split(":")[0] for text in found] == [f"### {place}" for place in TABLES_AND_FIGURES]
    rows = {
        "Table 3": f"| Vittt | 77.7 | 0.3293 | {count_macs(NANO, 144, 10)} | 83.00 ± 0.25 |",
        "Table 4": "| pool max | 77.2 | 0.3293 |",
        "Fig. 7(a)": "| chunk_size all | – | 0.3293 |",
    }
    for place, row in rows.items():
        assert row in part(checkout, f"### {place}")
    assert "Not trained here" not in "".join(found)


def test_a_missing_variant_is_named_and_the_rest_is_shown(checkout):
    grid(checkout)
    for name in ("mid", "chunk_all"):
        (checkout.paths.results / "measured/cpu/ablate/digits" / name / "metrics.json").unlink()
    text = part(checkout, "### Table 4")
    assert "Not trained here: mid; `repro ablate --all --data digits --epochs 4` trains all" in text
    assert "| pool head |" in text and "mid >" not in text
    assert "Not trained here: chunk_all" in part(checkout, "### Fig. 7(a)")


def test_other_recipes_and_other_devices_are_other_groups(checkout):
    train(checkout, "conv2d", [80, 81], folder="ablate")
    train(checkout, "head", [70, 71], folder="ablate")
    train(checkout, "conv2d", [90, 91])
    train(checkout, "head", [89, 90])
    with checkout.edit("measured/cpu/ablate/digits/head/metrics.json") as record:
        record["identity"]["recipe"]["drop_path"] = 0.1
    groups = find_groups(checkout.results(), checkout.paper.variants)
    assert sorted(len(group.variants) for group in groups) == [1, 1, 2]
    _, only = parts(checkout)
    assert only.startswith("### Table 4") and "90.50" not in only
    assert find_shown(checkout.report()) == {f"results/ablate/{name}/metrics.json" for name in ("conv2d", "head")}


def test_variants_at_rates_of_their_own_are_one_group_besides_those_at_one_rate(checkout):
    """Their recipes differ in the rate alone; a training of another length does not join them."""
    for name, rate, epochs in (("conv2d", 4e-3, 4), ("head", 2e-3, 4), ("mid", 4e-3, 9)):
        train(checkout, name, [80, 81, 82])
        train(checkout, name, [90, 91], folder="measured/cpu/ablate/own_rates/digits", recipe_hash=name)
        recipe = {"options": VARIANTS[name], "learning_rate": {"peak": rate}, "epochs": epochs}
        with checkout.edit(f"measured/cpu/ablate/own_rates/digits/{name}/metrics.json") as record:
            record["identity"]["recipe"] |= recipe
    groups = find_groups(checkout.results(), checkout.paper.variants)
    assert sorted((group.has_own_rates, *group.variants) for group in groups) == [
        (False, "conv2d", "head", "mid"),
        (True, "conv2d", "head"),
        (True, "mid"),
    ]
    text = "".join(parts(checkout))
    assert "| pool head, rate 0.002 |" in text and "| Vittt, rate 0.004 |" in text and "| pool head |" in text


def test_vittt_itself_may_be_pretrains_and_detectors_belong_to_their_weights(checkout):
    """Cells of both stages that were trained alike are one group; of two records of a variant, that of more seeds."""
    more = {"model": TINY, "data": "imagenet", "kind": "imagenet", "held_out_images": 50_000, "epochs": 300}
    more |= {"classes": 1000, "image_size": 224}
    train(checkout, "dual", [77.4], folder="ablate", **more)
    train(checkout, "conv2d", [70.0], folder="ablate", throughput=None, **more)
    tiny = {"held_out_images": 50_000, "classes": 1000, "num_params": 6_983_116}
    checkout.train("pretrain/tiny", TINY, "imagenet", top1=(77.5, 77.7), **tiny)
    init = {"weights": "results/ablate/dual/weights.safetensors", "sha256": "ab"}
    scores = {"ap_box_percent": 42.6, "ap_mask_percent": 38.5}
    checkout.train("detect/dual", TINY, "coco", held_out_images=5000, options={"design": "dual"}, init=init, **scores)
    text = part(checkout, "### Table 3")
    ours = f"0.3293 | {count_macs(TINY, 224, 1000, design='dual')} | 77.40 ± 0.25 | 42.6 | 38.5"
    assert f"| design dual | 77.5 | 42.7 | 38.6 | {ours} |" in text
    assert "| Vittt | 77.7 | 42.9 | 38.7 | 6.983 | 1.457 | 77.60 | – | – |" in text
    assert "insufficient budget" in parts(checkout)[0]
    assert "results/pretrain/tiny/metrics.json" not in find_shown(checkout.report())
    assert checkout.judge()["table3.dual.top1_percent"].ours == pytest.approx(77.4)
    train(checkout, "gating", [70.0], **more)  # by hand, for as many epochs as somebody wished
    assert checkout.judge()["table3.gating.top1_percent"].ours is None


def test_fig_7_is_drawn_once_per_data_set_with_the_same_bytes(checkout):
    grid(checkout)
    train(checkout, "conv2d", [80, 81], folder="ablate")
    train(checkout, "w0_frozen", [70, 71], folder="ablate", throughput=None)
    folder = checkout.paths.results / "figures"
    train(checkout, "chunk8", [71, 72], folder="measured/elsewhere/ablate/digits")  # one alone makes no figure

    def draw():
        for name, (_, draw_picture) in plan_figures(checkout.report()).items():
            draw_picture(folder / name)
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    files, shown = draw(), {name: sources for name, (sources, _) in plan_figures(checkout.report()).items()}
    assert sorted(files) == sorted(shown) == ["fig7a_digits.png", "fig7b_digits.png"]
    assert not any("elsewhere" in source.path for of_figure in shown.values() for source in of_figure)
    assert draw() == files and files["fig7a_digits.png"].startswith(b"\x89PNG")
    linked = [text for text in parts(checkout) if "figures/fig7b_digits.png" in text]
    assert len(linked) == 1 and "4 epochs, 3 seeds" in linked[0]


def test_nothing_trained_says_how(checkout):
    with pytest.raises(Missing, match="repro ablate --all"):
        parts(checkout)
    assert plan_figures(checkout.report()) == {}


@pytest.mark.parametrize(
    ("repeated", "recipe", "is_judged"), [("dual", {}, False), ("dual", {"lr": 1}, True), ("gating", {}, True)]
)
def test_a_group_of_the_pipeline_is_judged_unless_the_same_have_more_seeds(checkout, repeated, recipe, is_judged):
    """Snapshots change its recipe's hash; by another recipe, or with a variant that nobody repeated, it is judged."""
    for name in ("conv1d", repeated, "conv2d"):
        train(checkout, name, [50, 60, 70])
    for name in ("conv1d", "dual"):
        train(checkout, name, [50], folder="ablate", recipe_hash="with snapshots")
        with checkout.edit(f"ablate/{name}/metrics.json") as record:
            record["identity"]["recipe"] |= recipe
    rows = [row for row in parts(checkout)[0].splitlines() if row.startswith("| Table 3") and "one seed" in row]
    assert len(rows) == is_judged


def test_whether_a_curve_still_rises_is_read_on_one_split():
    """The score that is reported, on other images, may be lower than the curve's last but one."""
    on_tune = {"top1_percent": 80.0, "tune_top1_percent": 90.0, "tune_top1_previous_percent": 89.0}
    assert find_ends(on_tune) == (89.0, 90.0)
    assert find_ends({"top1_percent": 80.0, "top1_previous_percent": 79.0}) == (79.0, 80.0)


def test_the_opening_counts_the_pairs_that_are_seen(checkout):
    """All of 15, 10, 5 and 3 ordered pairs, two points apart; none at chance, on data of two classes."""
    grid(checkout)
    for name in ("conv1d", "dual", "conv2d"):
        train(checkout, name, [50.0, 50.1, 50.2], folder="measured/cpu/ablate/connect", data="connect", classes=2)
    for name, top1 in (("chunk64", 60.0), ("conv2d", 50.0)):
        train(checkout, name, [top1, top1 + 1, top1 + 2], folder="measured/cpu/ablate/other", data="other")
    page = render_blocks(answer_blocks(checkout.report())[:1])
    scope = f"{checkout.CPU}; outside the pipeline; 3 seeds"
    for data, counts in (
        ("connect", "Table 3: insufficient budget"),
        ("digits", "Table 3: 15 of 15; Table 4: 10 of 10; Fig. 7(a): 5 of 5; Fig. 7(b): 3 of 3"),
        ("other", "Fig. 7(a): 0 of 1, 1 contradicted"),
    ):
        assert f"| pairs that the paper orders, seen on embedded {data}, one rate | {counts} | {scope} |" in page


def train_on(checkout, machine, **top1):
    """Variants of Table 4 that one machine trained."""
    for name, values in top1.items():
        train(checkout, name, values, folder=f"measured/{machine}/ablate/digits")
        with checkout.edit(f"measured/{machine}/ablate/digits/{name}/metrics.json") as record:
            record["identity"]["device"] = f"cpu: {machine}, 1 thread"


def test_a_table_is_judged_on_the_machine_with_most_of_its_rows(checkout):
    """The other's record of max has more seeds, and is above Vittt: it joins no pair, and stands beside the table."""
    ours = {name: [top1, top1 + 1, top1 + 2.01] for name, top1 in (("conv2d", 80), ("max", 77), ("head", 74))}
    train_on(checkout, "many", **ours)
    train_on(checkout, "one", max=[90, 91, 92, 93])
    text = part(checkout, "### Table 4")
    assert "| conv2d > max | +0.5 | +3.00 [" in text and "one rate, 144² pixels, cpu: many |" in parts(checkout)[0]
    assert "- On cpu: one, 4 seeds: Top-1 (%) max 91.50 ± 0.25." in text
    (verdict,) = [line for line in parts(checkout)[0].splitlines() if line.startswith("| Table 4")]
    assert "**ordering seen**" in verdict and verdict.endswith("| – |")
    assert "The machine changes the verdict" not in checkout.page()
    # where the other machine orders the same variants otherwise, that comes first on the page
    train_on(checkout, "one", conv2d=[80, 81, 82, 83.01])
    (verdict,) = [line for line in parts(checkout)[0].splitlines() if line.startswith("| Table 4")]
    assert "**ordering seen**" in verdict and verdict.endswith("| cpu: one: ordering contradicted, by 1 pair |")
    opening = checkout.page().split("\n\n")[3]
    said = "of Table 4 (digits, one rate; 1 pair): ordering seen on cpu: many, ordering contradicted on cpu: one."
    assert opening.startswith("- **The machine changes the verdict**") and said in opening
    # the other machine has no row less now, and more seeds
    train_on(checkout, "one", head=[74, 75, 76, 77.01])
    assert "**ordering contradicted**" in parts(checkout)[0]
    shown = {f"results/measured/one/ablate/digits/{name}/metrics.json" for name in ours}
    assert find_shown(checkout.report()) == shown


def search(checkout, machine, name, rate, trials):
    metrics = {"cell": f"ablate.digits_{name}", "model": NANO, "chosen": {"lr": rate, "warmup_epochs": 2}}
    path = f"measured/{machine}/tune/variants"
    checkout.record(path, {**metrics, "trials": [{}] * trials}, f"cpu: {machine}, 1 thread", name=f"digits_{name}")


def test_a_row_names_the_search_of_its_rate_with_its_trials_and_both_sets_are_in_the_summary(checkout):
    """`mid` was trained at a rate that its machine's own search did not choose."""
    rates = {"conv2d": (0.004, 80), "head": (0.002, 74), "mid": (0.032, 77)}
    for name, (rate, top1) in rates.items():
        train(checkout, name, [top1, top1 + 1, top1 + 2], folder="measured/some processor/ablate/own_rates/digits")
        with checkout.edit(f"measured/some processor/ablate/own_rates/digits/{name}/metrics.json") as record:
            record["identity"]["recipe"] |= {"options": VARIANTS[name], "learning_rate": {"peak": rate}}
    search(checkout, "some processor", "conv2d", 0.004, 3)
    search(checkout, "other", "conv2d", 0.004, 5)
    search(checkout, "some processor", "mid", 0.016, 5)
    text = part(checkout, "### Table 4")
    assert "best" not in text and "own rates, whose searches are not all here" in text
    assert "| Vittt, rate 0.004 | 3 trials |" in text
    assert "| pool mid, rate 0.032 | no search on record |" in text
    search(checkout, "other", "mid", 0.032, 6)
    search(checkout, "some processor", "head", 0.002, 4)
    text = part(checkout, "### Table 4")
    assert "rates by own searches" in text and "| pool mid, rate 0.032 | 6 trials on cpu: other |" in text
    for name, top1 in (("conv2d", 70), ("head", 77)):
        train(checkout, name, [top1, top1 + 1, top1 + 2])
    page = render_blocks(answer_blocks(checkout.report())[:1])
    assert "embedded digits, rates by own searches | Table 4: 3 of 3 |" in page
    assert "embedded digits, one rate | Table 4: 0 of 1, 1 contradicted |" in page
