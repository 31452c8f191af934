"""The ablations on the page: the paper's rows next to ours, verdicts, missing variants, what is never joined, Fig. 7."""

import re

import pytest

from repro.bench.flops import cost
from repro.papers.vision_ttt.paper import PAPER
from repro.report.answer import verdict_blocks
from repro.report.results import Missing
from repro.report.variants import find_groups, find_last_scores, find_shown, list_ablations, plan_figures

TABLES_AND_FIGURES = [table.place for table in PAPER.compared]
OPTIONS = {name: {"design": name} for name in ("ttt_layer", "share_qk", "gating", "conv1d", "dual")}
OPTIONS |= {name: {"pool": name} for name in ("head", "mid", "double", "max")}
OPTIONS |= {f"chunk{size}": {"chunk_size": size} for size in (4, 8, 32, 64)} | {"chunk_all": {"chunk_size": 0}}
OPTIONS |= {"conv2d": {}, "w0_shared": {"w0": "shared"}, "w0_frozen": {"w0": "frozen"}}
SUITE, OWN = "ablate/{}_digits_7s", "ablate/{}_digits_own_7s"  # of replications/cpu
MINI = {"conv1d": "pretrain/conv1d_digits", "dual": "pretrain/dual_digits", "conv2d": "pretrain/vittt_nano_digits"}
NANO, TINY = "vittt_nano_patch16_144", "vittt_tiny_patch16_224"


def train(checkout, name, top1, *, cells=SUITE, machine="cpu", **more):
    """A variant's record as the stage leaves it, of a cell outside the pipeline or, of `MINI`, of the pipeline."""
    usual = {"model": NANO, "data": "digits", "kind": "digits", "image_size": 144, "epochs": 4}
    usual |= {"top1_std_percent": 0.25, "num_params": 329_310, "held_out_images": 100_000}
    path = MINI[name] if cells is MINI else f"replications/{machine}/{cells.format(name)}"
    checkout.train(path, options=OPTIONS[name], top1=tuple(top1), **{**usual, **more})


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
    return re.split(r"(?m)^(?=### )", list_ablations(checkout.report()))


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
        (checkout.paths.results / f"replications/cpu/{SUITE.format(name)}.json").unlink()
    text = part(checkout, "### Table 4")
    assert "Not trained here: mid; `repro profile use digits && dvc repro ablate`" in text
    assert "| pool head |" in text and "mid >" not in text
    assert "Not trained here: chunk_all" in part(checkout, "### Fig. 7(a)")


def test_the_cells_of_a_suite_are_a_group_and_others_join_none(checkout):
    train(checkout, "conv2d", [80, 81], cells=MINI)
    train(checkout, "dual", [70, 71], cells=MINI)
    train(checkout, "conv2d", [90, 91])
    train(checkout, "head", [89, 90], cells="ablate/{}_digits_28e_7s")  # of no suite
    groups = find_groups(checkout.results(), checkout.paper)
    assert sorted(tuple(group.variants) for group in groups) == [("conv2d",), ("dual", "conv2d")]
    _, only = parts(checkout)
    assert only.startswith("### Table 3") and "90.50" not in only
    assert not find_shown(checkout.report())  # those of `pretrain` have a row of their own


@pytest.mark.parametrize(
    "other",
    [{"epochs": 8}, {"data": "connect"}, {"held_out_images": 9}, {"init": {"weights": "w", "weights_hash": "x"}}],
)
def test_variants_that_were_trained_otherwise_join_no_pair(checkout, other):
    for name in ("conv2d", "head", "mid"):
        train(checkout, name, [80, 81, 82], **(other if name == "mid" else {}))
    (group,) = find_groups(checkout.results(), checkout.paper)
    assert tuple(group.variants) == ("conv2d", "head")
    (absent,) = [line for line in part(checkout, "### Table 4").splitlines() if line.startswith("Not trained here")]
    assert "mid" in absent and "head" not in absent


def test_variants_at_rates_of_their_own_are_one_group_besides_those_at_one_rate(checkout):
    for name, rate in (("conv2d", 4e-3), ("head", 2e-3), ("mid", 4e-3)):
        train(checkout, name, [80, 81, 82])
        train(checkout, name, [90, 91], cells=OWN)
        with checkout.edit(f"replications/cpu/{OWN.format(name)}.json") as record:
            record["identity"]["recipe"] |= {"options": OPTIONS[name], "learning_rate": {"peak": rate}}
    groups = find_groups(checkout.results(), checkout.paper)
    both = [(False, "conv2d", "head", "mid"), (True, "conv2d", "head", "mid")]
    assert sorted((group.has_own_rates, *group.variants) for group in groups) == both
    text = "".join(parts(checkout))
    assert "| pool head, rate 0.002 |" in text and "| Vittt, rate 0.004 |" in text and "| pool head |" in text


IMAGENET = {"model": TINY, "data": "imagenet", "kind": "imagenet", "held_out_images": 50_000, "epochs": 300}
IMAGENET |= {"classes": 1000, "image_size": 224}


def test_the_papers_own_scale_is_a_suite_and_detectors_belong_to_their_weights(checkout):
    checkout.train("pretrain/dual_imagenet", top1=77.4, options={"design": "dual"}, num_params=329_310, **IMAGENET)
    tiny = IMAGENET | {"num_params": 6_983_116}
    checkout.train("pretrain/vittt_tiny_imagenet", top1=(77.5, 77.7), **tiny)
    checkout.train("ablate/w0_shared_imagenet", top1=77.0, options={"w0": "shared"}, **IMAGENET)
    init = {"weights": "artifacts/pretrain/dual_imagenet/weights.safetensors", "weights_hash": "pretrain/dual_imagenet"}
    for path, hash, box, mask in (
        ("detect/dual", init["weights_hash"], 42.6, 38.5),
        ("detect/other", "of another training in that file", 5.0, 4.0),
        ("replications/gpu/detect/dual", init["weights_hash"], 6.0, 5.0),
    ):
        scores = {"ap_box_percent": box, "ap_mask_percent": mask, "init": init | {"weights_hash": hash}}
        checkout.train(path, TINY, "coco", held_out_images=5000, options={"design": "dual"}, **scores)
    text = part(checkout, "### Table 3")
    ours = f"0.3293 | {count_macs(TINY, 224, 1000, design='dual')} | 77.40 | 42.6 | 38.5"
    assert f"| design dual | 77.5 | 42.7 | 38.6 | {ours} |" in text
    assert "| Vittt | 77.7 | 42.9 | 38.7 | 6.983 | 1.457 | 77.60 | – | – |" in text
    assert "| w0 shared |" in part(checkout, "### Fig. 7(b)")
    assert "results/pretrain/vittt_tiny_imagenet/metrics.json" not in find_shown(checkout.report())
    assert checkout.judge()["table3.dual.top1_percent"].ours == pytest.approx(77.4)
    train(checkout, "gating", [70.0], **IMAGENET)  # outside the pipeline, for as many epochs as somebody wished
    assert checkout.judge()["table3.gating.top1_percent"].ours is None


def test_fig_7_is_drawn_once_per_data_set_with_the_same_bytes(checkout):
    grid(checkout)
    train(checkout, "conv2d", [80, 81], cells=MINI)
    folder = checkout.paths.results / "figures"
    train(checkout, "chunk8", [71, 72], cells="ablate/{}_connect_7s", data="connect")  # one alone makes no figure

    def draw():
        for name, (_, draw_picture) in plan_figures(checkout.report()).items():
            draw_picture(folder / name)
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    files, shown = draw(), {name: sources for name, (sources, _) in plan_figures(checkout.report()).items()}
    assert sorted(files) == sorted(shown) == ["fig7_digits.png"]
    assert all(source.most_seeds == 3 for of_figure in shown.values() for source in of_figure)
    assert draw() == files and files["fig7_digits.png"].startswith(b"\x89PNG")
    linked = [text for text in parts(checkout) if "figures/fig7_digits.png" in text]
    assert len(linked) == 1 and "4 epochs, 3 seeds" in linked[0]


def test_nothing_trained_says_how(checkout):
    with pytest.raises(Missing, match="no variant is trained"):
        parts(checkout)
    assert plan_figures(checkout.report()) == {}


@pytest.mark.parametrize(
    ("repeated", "recipe", "is_judged"), [("dual", {}, False), ("dual", {"lr": 1}, True), ("gating", {}, True)]
)
def test_a_group_of_the_pipeline_is_judged_unless_the_same_have_more_seeds(checkout, repeated, recipe, is_judged):
    """By another recipe, or with a variant that nobody repeated, it is judged."""
    for name in ("conv1d", repeated, "conv2d"):
        train(checkout, name, [50, 60, 70])
    for name in ("conv1d", "dual"):
        train(checkout, name, [50], cells=MINI)
        with checkout.edit(f"{MINI[name]}/metrics.json") as record:
            record["identity"]["recipe"] |= recipe
    rows = [row for row in parts(checkout)[0].splitlines() if row.startswith("| Table 3") and "one seed" in row]
    assert len(rows) == is_judged


def test_whether_a_curve_still_rises_is_read_on_one_split():
    """The score that is reported, on other images, may be lower than the curve's last but one."""
    on_tune = {"top1_percent": 80.0, "tune_top1_percent": 90.0, "tune_top1_previous_percent": 89.0}
    assert find_last_scores(on_tune) == (89.0, 90.0)
    assert find_last_scores({"top1_percent": 80.0, "top1_previous_percent": 79.0}) == (79.0, 80.0)


def test_the_opening_counts_the_pairs_that_are_seen(checkout):
    """All of 15, 10, 5 and 3 ordered pairs, two points apart; none at chance, on data of two classes."""
    grid(checkout)
    for name in ("conv1d", "dual", "conv2d"):
        train(checkout, name, [50.0, 50.1, 50.2], cells="ablate/{}_connect_7s", data="connect", classes=2)
    for name, cell, top1 in (("chunk64", "ablate/{}_imagenet", 60.0), ("conv2d", "pretrain/vittt_tiny_imagenet", 50.0)):
        train(checkout, name, [top1, top1 + 1, top1 + 2], cells=cell, data="other")
    page = verdict_blocks(checkout.report())
    scope = f"{checkout.CPU}; outside the pipeline; 3 seeds"
    for data, counts in (
        ("connect", "Table 3: insufficient budget"),
        ("digits", "Table 3: 15 of 15; Table 4: 10 of 10; Fig. 7(a): 5 of 5; Fig. 7(b): 3 of 3"),
        ("other", "Fig. 7(a): 0 of 1, 1 contradicted"),
    ):
        assert f"| pairs that the paper orders, seen on {data}, one rate | – | {counts} | {scope} |" in page


def train_on(checkout, machine, **top1):
    """Variants of Table 4 that one machine trained."""
    for name, values in top1.items():
        train(checkout, name, values, machine=machine)
        with checkout.edit(f"replications/{machine}/{SUITE.format(name)}.json") as record:
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
    shown = {f"results/replications/one/{SUITE.format(name)}.json" for name in ours}
    assert find_shown(checkout.report()) == shown


def test_machines_are_compared_on_the_variants_that_both_trained(checkout):
    """Two variants have the same numbers on both; the third is another one on each, and separates nothing."""
    alike = {"conv2d": [80, 81, 82.01], "max": [77, 78, 79]}
    train_on(checkout, "one", **alike, head=[77, 78, 79])
    train_on(checkout, "other", **alike, double=[77, 90, 60])
    assert "The machine changes the verdict" not in checkout.page()


def search(checkout, machine, name, rate, trials):
    metrics = {"cell": f"ablate.{name}_digits_own_7s", "model": NANO, "chosen": {"lr": rate, "warmup_epochs": 2}}
    path = f"replications/{machine}/tune/{name}_digits"
    checkout.record(path, {**metrics, "trials": [{}] * trials}, f"cpu: {machine}, 1 thread")


def test_a_row_names_the_search_of_its_rate_with_its_trials_and_both_sets_are_in_the_summary(checkout):
    """`mid` was trained at a rate that its machine's own search did not choose."""
    rates = {"conv2d": (0.004, 80), "head": (0.002, 74), "mid": (0.032, 77)}
    for name, (rate, top1) in rates.items():
        train(checkout, name, [top1, top1 + 1, top1 + 2], machine="some processor", cells=OWN)
        with checkout.edit(f"replications/some processor/{OWN.format(name)}.json") as record:
            record["identity"]["recipe"] |= {"options": OPTIONS[name], "learning_rate": {"peak": rate}}
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
    page = verdict_blocks(checkout.report())
    assert "digits, rates by own searches | – | Table 4: 3 of 3 |" in page
    assert "digits, one rate | – | Table 4: 0 of 1, 1 contradicted |" in page
