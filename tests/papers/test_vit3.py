"""The room of ViT³: the ledger against the paper's text, every count that its models have, its formulas by hand, its
variants.
"""

import dataclasses
import re

import pytest

from repro.bench.flops import cost
from repro.core.config import load_yaml
from repro.core.csvfile import format_csv
from repro.data.kinds import list_wnids
from repro.papers import load_papers
from repro.papers.vit3 import formulas
from repro.papers.vit3.sections import compare_losses, find_losses
from repro.report.pages import build_document, build_runs
from repro.report.results import Missing, Results
from repro.report.variants import find_groups, plan_figures
from repro.tasks.generation.params import SamplingParams
from repro.tasks.generation.reference import KNOWN
from tests.conftest import ROOT
from tests.models.test_dit import COUNTS
from tests.papers.conftest import count_model, count_statuses, find_keys, find_statuses, judge, judge_counts, read_key
from tests.report.conftest import JUDGE, SCORES

PAPER = load_papers()["vit3"]
# the official H-ViT3-T/S/B: parameters, and multiply-adds at 224 as fvcore counts them, from the authors' code
(PUBLISHED,) = KNOWN.values()
H_VIT3 = {"tiny": (28_703_560, 4.9198), "small": (54_362_056, 8.7602), "base": (94_369_304, 16.7227)}
# the official DiT3, with its table of positions: parameters, and multiply-adds with norms, which DiT's are without
DIT3 = {
    "dit3_small_patch8": (34_972_928, 0.4042),
    "dit3_small_patch4": (34_769_792, 1.5691),
    "dit3_small_patch2": (34_788_128, 6.2289),
    "dit3_base_patch8": (134_521_856, 1.5099),
    "dit3_base_patch4": (134_115_968, 5.8778),
    "dit3_base_patch2": (134_152_736, 23.3498),
}
DIT = {name: counts for name, counts in COUNTS.items() if name.startswith(("dit_small", "dit_base"))}
# the official VMamba-T/S/B: parameters, and multiply-adds at 224 as its authors count them, from their code
VMAMBA = {"tiny": (30_249_064, 4.905609984), "small": (50_147_752, 8.71577472), "base": (88_557_800, 15.358944256)}
COUNTED = {f"hvit3_{size}_224": counts for size, counts in H_VIT3.items()} | DIT3 | DIT


def count_rows():
    """The rows of `repro complexity` that the ledger asks for: models of this project are counted, the others are the
    known ones.
    """
    for key in find_keys(PAPER):
        name, _, side = read_key(key)
        about = {"model": name, "options": {}, "image_size": [side, side], "method": "counter"}
        if name.startswith("vmamba"):
            count, macs = VMAMBA[name.split("_")[1]]
            yield key, {**about, "num_params": count, "macs_g": 0.98 * macs, "macs_g_paper_convention": macs}
        elif name in COUNTED:
            count, macs = COUNTED[name]
            ours = macs if name in DIT else 0.9 * macs  # by our own convention, which rounds to other digits
            yield key, {**about, "num_params": count, "macs_g": ours, "macs_g_fvcore": macs}
        elif name.startswith(("study", "vit3", "deit")):
            yield key, count_model(key)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    return judge_counts(tmp_path_factory.mktemp("counts"), PAPER, dict(count_rows()))


def test_every_claim_is_judged_and_every_count_of_the_study_is_the_papers(judged):
    """27 FLOPs; as many parameters, to which the shell was fitted; of the others, those that no convention had to be
    chosen for.
    """
    assert len(judged.verdicts) == len(PAPER.ledger.entries) == 690
    study = r"table[1246]\.\w+\."
    assert count_statuses(judged, study + "macs_g") == {"matched": 27}
    assert count_statuses(judged, study + "params_m") == {"fitted": 27}
    own = r"table(5\w*|9)\.h_vit3_\w\.(params_m|macs_g)", r"table7\.vit3_\w\.(params_m|macs_g)"
    chosen = [f"{table}.h_vit3_{size}.macs_g" for table in ("table5", "table5_mesa_flops") for size in "tsb"]
    chosen += ["table7.vit3_b.macs_g", *(f"table9.h_vit3_{size}.macs_g" for size in "tsb")]
    assert find_statuses(judged, *own)["fitted"] == chosen
    assert count_statuses(judged, *own) == {"matched": 14, "fitted": 10}
    assert count_statuses(judged, r"table10\.\w+\.(params_m|macs_g)") == {"matched": 6, "fitted": 6}
    assert find_statuses(judged, r"table10_dit\.\w+\.(params_m|macs_g)").keys() == {"matched", "matched, truncated"}
    detectors = find_statuses(judged, r"table8_\dx\.h_vit3_\w\.macs_g")
    assert detectors == {
        "fitted": [f"table8_{schedule}.h_vit3_{size}.macs_g" for schedule in ("1x", "3x") for size in "ts"],
        "differs, unexplained": ["table8_1x.h_vit3_b.macs_g", "table8_3x.h_vit3_b.macs_g"],
    }


def test_what_the_paper_contradicts_and_what_is_shown(judged):
    """VMamba-S has other FLOPs in the two halves of Table 8; one convolution instead of a head is not 24 M."""
    assert find_statuses(judged, ".*")["paper inconsistent"] == ["table8_3x.vmamba_s.macs_g", "text.5.one_head"]
    shown = find_statuses(judged, "eq.*", "text.4_1.mixed_derivative", "text.5_5.linear")
    assert shown["matched"] == ["text.4_1.mixed_derivative", "text.5_5.linear"]
    assert shown["declared"] == ["eq4.linear_attention", "eq7.rate"]
    compute, speed = judged.verdicts["text.4_2.compute_x"], judged.verdicts["table1.dot.fps"]
    assert (compute.status, compute.ours) == ("differs, explained", 3)
    assert not [v for v in judged.all if v.entry.kind in ("accuracy", "speed") and v.ours is not None]
    assert "at which batch" in speed.reason and speed.command == "none"
    assert judged.verdicts["table5.cswin_b.params_m"].reason == "CSWin is not built in this project"
    page = build_document(judged)
    assert "27 of 27 match" in page and "0 of 27 match, 27 agree by a fitted convention" in page


def test_the_rows_of_vmamba_are_its_authors_counts_or_those_of_its_first_release(judged):
    """T of the left half of Table 8 and of Table 9 is the later model; that of Table 5 and of the right half is the
    first, `s2l5`.
    """
    rows = r"table[59]\.vmamba_\w\.(params_m|macs_g)", r"table8_\dx\.vmamba_\w\.macs_g"
    assert find_statuses(judged, *rows) == {
        "differs, explained": ["table5.vmamba_t.params_m", "table8_3x.vmamba_t.macs_g"],
        "matched": [f"table5.vmamba_{size}.params_m" for size in "sb"],
        "fitted": [
            *(f"table5.vmamba_{size}.macs_g" for size in "tsb"),
            *(f"table8_1x.vmamba_{size}.macs_g" for size in "tb"),
            *(f"table9.vmamba_{size}.{count}" for size in "tb" for count in ("params_m", "macs_g")),
        ],
        "differs, unexplained": ["table8_1x.vmamba_s.macs_g"],
        "paper inconsistent": ["table8_3x.vmamba_s.macs_g"],
    }
    # the release's list of models: 30,705,832 parameters, 4.858 G
    assert formulas.vmamba_s2l5("params_m") * 10**6 == 30_705_832
    assert round(float(formulas.vmamba_s2l5("macs_g")), 3) == 4.858


def test_what_is_not_measured_names_a_cell_that_would_measure_it(judged):
    asked = {
        "table1.mse.top1_percent": "pretrain --cell study_mse_imagenet",
        "table5.h_vit3_t.top1_percent": "pretrain --cell hvit3_tiny_imagenet",
        "table5_mesa.h_vit3_t.top1_percent": "pretrain --cell hvit3_tiny_mesa_imagenet",
        "table8_3x.h_vit3_s.ap75_mask_percent": "detect --cell hvit3_small_coco_3x",
    }
    for name, command in asked.items():
        assert judged.verdicts[name].command == f"repro profile use paper && repro {command}"
    profile, stages = load_yaml(ROOT / "profiles" / "paper.yaml"), ("pretrain", "detect", "segment", "generate")
    cells = {f"{stage} --cell {cell}" for stage in stages for cell in profile[stage]}
    commands = {verdict.command for verdict in judged.all if "paper && " in (verdict.command or "")}
    named = {re.search(r"repro (\w+ --cell \w+)", command.partition(" && ")[2])[1] for command in commands}
    assert len(named) > 50 and named <= cells
    assert "repro generate --cell dit3_base_patch2_imagenet && " in judged.verdicts["table10.dit3_b_2.is"].command


def test_trainings_with_and_without_mesa_and_of_12_and_36_epochs_are_told_apart(checkout):
    init = {"weights": "results/pretrain/b/weights.safetensors", "weights_hash": "ab"}
    mesa = {"mesa": {"weight": 1.0, "temperature": 1.0, "start_fraction": 0.25}}
    for size, top1, more in (("tiny", 83.41, {}), ("tiny", 84.02, mesa), ("small", 84.9, mesa)):
        full = {"classes": 1000, "held_out_images": 50_000, "top1": top1, **more}
        checkout.train(f"pretrain/{top1}", f"hvit3_{size}_224", "imagenet", **full)
    for epochs, score in ((36, 48.9), (12, 47.3)):
        scores = {"ap_box_percent": score, "init": init, "epochs": epochs, "image_size": 800}
        checkout.train(f"detect/{epochs}", "hvit3_tiny_224", "coco", held_out_images=5000, **scores)
    # nobody knows how an official file was trained
    evaluated = {"model": "hvit3_base_224", "options": {}, "kind": "imagenet", "image_size": 224, "split": "val"}
    checkout.record("replications/gpu/evaluate/b", {**evaluated, "held_out_images": 50_000, "top1_percent": 84.9})
    found = judge(checkout, PAPER).verdicts
    rows = [f"table5{mesa}.h_vit3_{size}" for size in "tsb" for mesa in ("", "_mesa")]
    assert [found[f"{row}.top1_percent"].ours for row in rows] == [83.41, 84.02, None, 84.9, None, None]
    assert [found[f"table8_{schedule}.h_vit3_t.ap_box_percent"].ours for schedule in ("1x", "3x")] == [47.3, 48.9]


def test_drawn_pictures_are_judged_only_as_the_paper_draws_them(checkout):
    drawn = {"model": "dit3_base_patch2", "samples": 50_000, "classes": list_wnids(), "image_size": 256}
    drawn |= {"sampling": dataclasses.asdict(SamplingParams()), "weights_hash": "ab", "protocol": PUBLISHED}
    drawn |= {"fid": 39.31, "inception_score": 36.99, "precision": 0.514, "recall": 0.64}
    trained = {"model": "dit3_base_patch2", "options": {}, "kind": "latents", "data": "l", "classes": 1000}
    trained |= {"epochs": 40, "steps": 400_000, "batch_size": 256, "image_size": 256, "split": "val", "init": None}
    trained |= {"held_out_images": 50_000, "by_seed": [{"seed": 0, "weights_hash": "ab"}]}

    def read(training: dict, **changes) -> Results:
        checkout.record("replications/gpu/draw/b2", {**drawn, "protocol_reason": "a data set", **changes})
        checkout.record("replications/gpu/generate/b2", {**trained, "init_reason": "random weights", **training})
        return Results(checkout.paths, [PAPER], SCORES)

    checkout.write("profiles/paper.yaml", (ROOT / "profiles" / "paper.yaml").read_text(encoding="utf-8"))
    wrong = [{"protocol": None}, {"samples": 10_000}, {"classes": ["n01440764"]}, {"weights_hash": "of nobody"}]
    wrong += [{"sampling": dataclasses.asdict(SamplingParams(guidance=1.5))}]
    cases = [({}, changes) for changes in wrong]
    cases += [({"steps": 1000}, {}), ({"init": {"weights": "w"}}, {}), ({"kind": "digits"}, {}), ({"classes": 10}, {})]
    cases += [({"model": "dit3_base_patch4"}, {})]
    for training, changes in cases:
        with pytest.raises(Missing, match="against ADM's reference batch"):
            read(training, **changes).functions()["drawn"]("dit3_base_patch2", "fid")
    found = JUDGE(PAPER, read({})).verdicts
    of_row = {key: found[f"table10.dit3_b_2.{key}"] for key in ("fid", "is", "precision", "recall")}
    assert [verdict.ours for verdict in of_row.values()] == [39.31, 36.99, 0.514, 0.64]
    assert [verdict.status for verdict in of_row.values()] == ["matched"] * 3 + ["differs, unexplained"]
    others = [name for name in found if re.fullmatch(r"table10\w*\.\w+_s_\d\.fid", name)]
    assert len(others) == 6 and {found[name].status for name in others} == {"not measured"}


def test_a_run_stands_on_the_pages_of_the_papers_that_name_its_family(checkout):
    """A variant, which stands in a section of its own, an H-ViT3, a ViT3, which both papers compare, and a ResNet,
    which none names.
    """
    about = {"held_out_images": 9, "options": {"inner_model": "glu"}, "top1": 50.0}
    checkout.train("replications/cpu/ablate/study_glu_digits_5s", "study_nano_patch4_32", "digits", **about)
    for model in ("hvit3_nano_144", "vit3_nano_patch16_144", "resnet_nano", "vittt_nano_patch16_144"):
        checkout.train(f"replications/cpu/pretrain/{model}", model, "digits", held_out_images=9, top1=50.0)
    results = Results(checkout.paths, [checkout.paper, PAPER], SCORES)
    listed = []
    for paper in (checkout.paper, PAPER):
        text = build_runs(JUDGE(paper, results))
        section = text.partition("\n## Runs")[2].partition("\n## ")[0]
        listed.append(sorted(re.findall(r"(?m)^\| `pretrain/(.*?)` ", section)))
    assert listed[0] == ["resnet_nano", "vit3_nano_patch16_144", "vittt_nano_patch16_144"]
    assert listed[1] == ["hvit3_nano_144", "vit3_nano_patch16_144"]


@pytest.mark.parametrize(("two_layers", "word"), [(1.2, "ordering seen"), (0.8, "ordering contradicted")])
def test_the_training_loss_of_fig_3_is_tested_over_seeds(checkout, two_layers, word):
    """Losses 1.0, 1.2, 1.4 with differences of 0.2 ± 0.01 over three seeds; or two layers with a lower loss than one."""
    options = {"fc": {"inner_model": "fc"}, "mlp": {}, "layers3": {"inner_depth": 3}}
    for name, loss in {"fc": 1.0, "mlp": two_layers, "layers3": 1.4}.items():
        rows = []
        for seed, wobble in enumerate((-0.01, 0.0, 0.01)):
            for epoch in (2, 16):
                train_loss = loss + 1 / epoch + wobble * (name == "mlp")
                rows.append({"seed": seed, "epoch": epoch, "train_loss": train_loss, "top1_percent": 50.0})
        about = {"options": options[name], "image_size": 32, "epochs": 16, "held_out_images": 359}
        about |= {"top1": (50.0, 51.0, 52.0), "curve": format_csv(rows).splitlines()}
        checkout.train(f"replications/cpu/ablate/study_{name}_digits_5s", "study_nano_patch4_32", "digits", **about)
    report = judge(checkout, PAPER)
    (group,) = find_groups(report.results, PAPER)
    assert find_losses(group)["fc"] == pytest.approx(dict.fromkeys(range(3), 1 + 1 / 16))
    text = compare_losses(report)
    (row,) = [line for line in text.splitlines() if line.startswith("| two layers > one layer |")]
    # t of two degrees of freedom: 4.3027 * 0.01 / sqrt(3) = 0.0248
    mean, low, high = (two_layers - 1 + half for half in (0, -0.0248, 0.0248))
    assert f"| {mean:+.4f} [{low:+.4f}, {high:+.4f}] |" in row and word in row
    _, draw = plan_figures(report)["vit3_fig3_digits.png"]
    assert draw(checkout.paths.root / "drawn.png").read_bytes().startswith(b"\x89PNG")


def count_map_norms(row: str, grids: list[int]) -> int:
    """What fvcore counts of the norms of a backbone's four maps, less the classifier's head."""
    widths = formulas.STAGES[row]
    return 5 * sum(grid * width for grid, width in zip(grids, widths, strict=True)) - 1000 * widths[3]


@pytest.mark.parametrize(
    ("size", "row", "params", "neck_and_heads"),
    [
        ("tiny", "h_vit3_t", 57_903_094, 842.43),
        ("small", "h_vit3_s", 83_561_590, 842.43),
        ("base", "h_vit3_b", 124_407_942, 844.92),
    ],
)
def test_uperhead_by_the_official_counts(size, row, params, neck_and_heads):
    """Parameters of the segmenters as built from the official modules; the head's products alone, without norms and
    interpolation.
    """
    assert H_VIT3[size][0] + formulas.upernet_params_m(row) * 10**6 == params
    grids = [512 * 2048 // side**2 for side in (4, 8, 16, 32)]
    norms = 2 * 512 * (50 + grids[3] + 2 * sum(grids[:3]) + grids[0])
    interpolation = 4 * 512 * (4 * grids[3] + sum(grids[:3]) + 3 * grids[0])
    beside = (norms + interpolation + count_map_norms(row, grids)) / 1e9
    assert round(float(formulas.upernet_macs_g(row, 512, 2048)) - beside, 2) == neck_and_heads


@pytest.mark.parametrize(("row", "fpn"), [("h_vit3_t", 52.17), ("h_vit3_b", 53.12)])
def test_mask_rcnn_by_the_official_counts(row, fpn):
    """FPN, RPN 50.62, box head 14.30 and mask head 52.99 of the official modules."""
    beside = (256 * 84_000 + count_map_norms(row, [64_000, 16_000, 4_000, 1_000])) / 1e9
    expected = fpn + 50.62 + 14.30 + 52.99
    assert float(formulas.mask_rcnn_macs_g(row, 800, 1280)) - beside == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("size", "width", "heads"), [("tiny", 192, 6), ("small", 384, 6), ("base", 768, 12)])
def test_vit3_by_the_text_is_the_model_less_one_head(size, width, heads):
    """The released model has the convolution beside all heads: its q, k, v and its part of the projection, and a gated
    head more.
    """
    d, model = width // heads, cost(f"vit3_{size}_patch16_224", {}, (224, 224)).num_params
    head = width * 3 * d + 3 * d + d * width + 2 * d * d
    assert model - formulas.vit3_params_m(width, heads) * 10**6 == 12 * head


def test_compute_of_an_inner_module():
    """Six products for two: by the 1 + 2 + 1 of the paper it would be eight."""
    assert formulas.inner_over_outer("mlp", "dot") == 3 and formulas.inner_over_outer("mlp", "mse") * 2 == 7
    assert formulas.inner_over_outer("fc", "mse") == 3 and formulas.inner_over_outer("fc", "dot") == 2
