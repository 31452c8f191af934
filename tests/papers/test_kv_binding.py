"""The room of the paper on KV binding: its ledger's verdicts, its formulas, variants, recipe, and what its page says of
made-up records.
"""

import re

import pytest
import torch

from repro.bench.forms import COLUMNS
from repro.core.config import load_section
from repro.core.csvfile import write_csv
from repro.core.paths import Paths
from repro.models import fast_weights, inner
from repro.models.registry import build_model
from repro.papers import load_papers
from repro.papers.kv_binding import formulas
from repro.papers.kv_binding.forms import compare_setting, find_setting, list_backbones, list_ratios, show_picture
from repro.papers.kv_binding.sections import CHANGES, UNLIKE, count_probed, list_changes, list_probes, weigh_learners
from repro.report.pages import build_document
from repro.report.results import Missing, Results
from repro.report.variants import find_groups
from repro.tasks.classification.params import ClassifierParams
from tests.conftest import ROOT
from tests.papers.conftest import find_statuses, judge, load_variants
from tests.report.conftest import JUDGE, SCORES

PAPER = load_papers()["kv_binding"]
SUITES = {data: f"ablate/kv_{{variant}}_{data}_5s" for data in ("digits", "connect")}
FORMS = ("recurrent", "parallel")
BASE = "ladder_vit3_base_patch16_224"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The ledger judged without any record: what its own formulas say."""
    paths = Paths(tmp_path_factory.mktemp("checkout"))
    return JUDGE(PAPER, Results(paths, [PAPER], SCORES))


# --- the ledger ---------------------------------------------------------------------------------------------------------------------


def test_what_the_paper_proves_holds_and_its_misprints_are_explained(report):
    found = find_statuses(report, ".*")
    # the rate of a step outside of the momentum; ViT³'s last step as run
    explained = {"text.5_3.eq1_linear", "text.6_1.vit3", "text.appendix_e.rate"}
    assert set(found["differs, explained"]) == explained and "differs, unexplained" not in found
    # of what contradicts itself, where a repair of one side holds: the orthogonalization of a sum is no sum; without
    # its rate; the momentum matrix in place of its cumulated sum
    differing = {"text.5_3.eq1", "text.5_4.glu", "text.appendix_h.mask"}
    others = {f"text.{name}" for name in ("6_1.value", "5_3.momentum", "5_2.distinct")}
    others |= {f"text.appendix_{name}" for name in ("e.shapes", "h.rates", "h.covers")}
    assert set(found["paper inconsistent"]) == differing | others
    explained = {name for name, verdict in report.verdicts.items() if verdict.compared == "differs, explained"}
    assert differing <= explained and not others & explained
    proved = ("theorem5_1", "theorem5_2", "theorem5_3", "4_2.theorem", "5_4.conv", "6_2.exists")
    assert {f"text.{name}" for name in proved} <= set(found["matched"])
    assert {name for name in report.verdicts if name.endswith(("psnr", "top1_percent"))} <= set(found["not measured"])


def test_what_needs_a_language_model_is_out_of_scope_and_novel_views_are_not(report):
    of_language = {name for name in report.verdicts if name.endswith("perplexity") or "llm" in name}
    # judged whole, with a perplexity among their numbers
    whole = "4_2.comparable 4_4.little 6_1.best 6_1.orthogonal 6_1.perplexity_v6 6_2.training_v2 6_2.convergence"
    of_language |= {f"text.{name}" for name in (*whole.split(), "appendix_a.tokens_tokens")}
    assert set(find_statuses(report, ".*")["out of scope"]) == of_language
    assert all(report.verdicts[name].command == "none" and report.verdicts[name].reason for name in of_language)
    assert PAPER.ledger.entries["text.6_2.speedup_most"].printed == "4.0"


@pytest.mark.parametrize(
    ("losses", "status"), [([(1, 2), (-3, -1)], "matched"), ([(1, 2), (3, 2)], "differs, unexplained")]
)
def test_ascent_is_judged_by_trained_models(checkout, report, losses, status):
    assert report.verdicts["text.4_2.raises"].status == "not measured"
    for number, (before, after) in enumerate(losses):
        probed = {"inner_loss_before": before, "inner_loss_after": after}
        checkout.record(f"replications/cpu/{number}", {"probe": "ascent", "probed": probed})
    found = judge(checkout, PAPER).verdicts["text.4_2.raises"]
    assert (found.status, len(found.sources)) == (status, 2)


@pytest.mark.parametrize(("step", "params", "products"), [
    ("own", 90_055_912, 6),
    ("v1", 90_055_912, 4),
    ("v3", 89_466_088, 2),
    ("v3_as_run", 90_055_912, 3),
    ("v6", 89_466_088, 2),
    ("v6_as_run", 90_055_912, 3),
])  # fmt: skip
def test_a_step_has_the_parameters_and_products_of_its_equations(step, params, products):
    """V3 leaves out 12 blocks of a C x d matrix, which what was run keeps. Products are N·C·d multiply-adds in each block;
    what remains is the shell and the convolution of ViT³.
    """
    with torch.device("meta"):
        model = build_model(BASE, step=step)
    assert sum(p.numel() for p in model.parameters()) == params
    assert model.mac_terms((224, 224))["inner_glu"] == 12 * products * 196 * 768 * 64


# --- the formulas -------------------------------------------------------------------------------------------------------------------


def test_a_broken_learner_shows_in_the_residuals(monkeypatch):
    """The recurrence of LaCT with a step that is a thousandth too long."""
    find = inner._find_gradients
    monkeypatch.setattr(inner, "_find_gradients", lambda *arguments: [1.001 * step for step in find(*arguments)])
    assert formulas.parallel_error.__wrapped__("v6") > 1e-4
    assert formulas.identity_error.__wrapped__("v6_of_lact") > 1e-4


def test_the_authors_division_underflows_and_ours_does_not():
    """cumprod(½) falls below their 1e-8 between 26 and 27 chunks."""
    assert 0.5**27 < 1e-8 < 0.5**26
    errors = [formulas.momentum_error(chunks, "divided") for chunks in (16, 32, 256)]
    assert errors[0] < 1e-3 < 0.1 < errors[1] < errors[2]
    assert max(formulas.momentum_error(chunks, "ours") for chunks in (16, 64, 256, 1024)) < 1e-6


# --- variants and recipe ------------------------------------------------------------------------------------------------------------


MODELS = {"vit3": "ladder_vit3_nano_patch4_32", "lact": "lact_nano_patch4_32", "vittt": "ladder_vittt_nano_patch16_144"}


@pytest.mark.parametrize("data", ["digits", "connect"])
def test_every_variant_is_a_model_at_the_recipe_of_its_suite(data):
    variants = load_variants(PAPER, SUITES[data])
    assert {name.partition("_")[2] for name in variants} == set(CHANGES)
    tokens = {"vit3": 64, "lact": 64, "vittt": 81} if data == "digits" else dict.fromkeys(MODELS, 16)
    for name, params in variants.items():
        family = name.split("_")[0]
        assert params.model.startswith(MODELS[family].partition("_nano")[0]) and params.data == data
        with torch.device("meta"):
            model = build_model(params.model, num_classes=10, img_size=params.transform.image_size, **params.options)
        assert model.grid_size[0] * model.grid_size[1] == tokens[family], name
        assert family != "lact" or tokens[family] == 4 * params.options.get("chunk_size", 16), name


def test_variants_of_equal_options_are_told_apart_by_their_cell(checkout):
    about = {"image_size": 32, "epochs": 20, "options": {"step": "ascent"}, "held_out_images": 359, "top1": 90.0}
    for name, model in MODELS.items():
        checkout.train(f"replications/cpu/ablate/kv_{name}_ascent_digits_5s", model, "digits", **about)
    groups = find_groups(judge(checkout, PAPER).results, PAPER)
    found = {name: source.metrics["model"] for group in groups for name, source in group.variants.items()}
    assert len(groups) == 3 and found == {f"{name}_ascent": model for name, model in MODELS.items()}


@pytest.mark.parametrize("step", ["own", "ascent", "q_is_k", "v1", "v3", "v3_as_run", "v6", "v6_as_run"])
def test_the_paper_profile_trains_each_step_as_appendix_a_says(step):
    params = load_section(ClassifierParams, ROOT / "profiles/paper.yaml", "pretrain", f"ladder_vit3_{step}_imagenet")
    assert (params.model, params.epochs, params.batch_size) == (BASE, 60, 2 * 256)
    assert params.options == ({} if step == "own" else {"step": step})
    # ViT³'s rate at this batch
    assert params.optim.lr * params.batch_size / params.optim.lr_batch_size == pytest.approx(5e-4)


# --- the page -----------------------------------------------------------------------------------------------------------------------


OWN = (90.0, 91.0, 92.0, 90.5, 91.5)


def train(checkout, **changes: tuple[float, ...] | float) -> None:
    """Steps of Vittt's ladder: name -> what is added to the accuracies of the unchanged model, by seed."""
    for name, added in {"own": 0.0, **changes}.items():
        values = added if isinstance(added, tuple) else (added,) * len(OWN)
        options = {} if name == "own" else {"step": name}
        about = {"options": options, "image_size": 32, "epochs": 20, "macs_g": 1.0}
        about["top1"] = tuple(own + value for own, value in zip(OWN, values, strict=True))
        place = f"replications/cpu/ablate/kv_vittt_{name}_digits_5s"
        checkout.train(place, MODELS["vittt"], "digits", held_out_images=100_000, **about)


def test_a_change_is_said_with_its_interval(checkout):
    """Differences by hand: ascent 0.2 ± noise is not separated, plain is ten points below, in every seed."""
    train(checkout, ascent=(1.0, -1.0, 0.5, -0.5, 1.0), plain=(-9.9, -10.1, -9.9, -10.1, -10.0))
    page = list_changes(judge(checkout, PAPER))
    assert "`vittt_own` | 91.0 | – | – | – |" in page and "ViT³" not in page
    # t(4, 97.5 %) = 2.776; the standard deviation of (1, −1, .5, −.5, 1) is 0.908
    assert "`vittt_ascent` | 91.2 | +0.20 [-0.93, +1.33] |" in page and "| not separated |" in page
    assert "`vittt_plain` | 81.0 | -10.00 [-10.12, -9.88] |" in page and "| worse |" in page


@pytest.mark.parametrize(
    ("gap", "milliseconds", "verdict", "backend"),
    [
        (-10.0, 50.0, "faster, worse", "torch"),
        (0.0, 50.0, "faster, not separated", "numba"),
        (-10.0, 150.0, "slower, worse", "torch"),
        (-10.0, 150.0, f"{UNLIKE}, worse", "numba"),
    ],
)
def test_the_choice_follows_from_accuracy_and_time(checkout, gap, milliseconds, verdict, backend):
    changed = tuple(gap + noise for noise in (0.1, -0.1, 0.1, -0.1, 0.0))
    train(checkout, plain=changed, dot=changed)
    times = {("own", "auto"): 100.0}
    times |= {(step, form): milliseconds * (1 + (form == "recurrent")) for step in ("plain", "dot") for form in FORMS}
    rows = [
        {**BACKBONE, "learner": step, "form": form, "latency_ms": ms, "tokens": tokens}
        | {"backend": backend if step == "own" else "torch"}
        for (step, form), ms in times.items()
        for tokens in (6400, 196)
    ]
    write_forms(checkout, [*forms(), *rows])
    page = weigh_learners(judge(checkout, PAPER))
    assert "1280²" in page and page.count(f"| parallel | {milliseconds / 100:.2f} | {verdict} |") == 2


def test_without_records_the_page_says_what_would_make_them(checkout):
    page = build_document(judge(checkout, PAPER))
    for command in ("profile use digits && dvc repro ablate`", "kernels forms`", "explain --probe steps=4"):
        assert f": `repro {command}" in page
    assert "| 256 | 100 % | < 1e-6 |" in page


BACKBONE = {"setting": "vittt_tiny", "mode": "infer", "status": "ok", "peak_memory_mib": 99.0, "samples_ms": ""}


def write_forms(checkout, rows):
    """A file of `repro kernels forms`."""
    about = {"device": checkout.CPU, "commit": "0123456789ab"}
    write_csv(checkout.paths.results / "speed/forms/cpu.csv", [about | row for row in rows], COLUMNS)


def forms() -> list[dict]:
    """Rows in which the parallel form of V6 passes the recurrent one at 400 tokens, in each of nine turns."""
    rows = []
    lact = {"learner": "lact_v6", "mode": "infer", "status": "ok", "samples_ms": " ".join(["8"] * 9)}
    for tokens, ratio in ((100, 0.5), (400, 2.0), (6400, 4.0)):
        shared = {**lact, "setting": "vision", "tokens": tokens, "heads": 3, "head_dim": 64, "chunk_size": 256}
        rows.append({**shared, "form": "recurrent", "latency_ms": 8.0, "peak_memory_mib": 2.0})
        faster = {"latency_ms": 8.0 / ratio, "peak_memory_mib": 6.0, "samples_ms": " ".join([f"{8 / ratio}"] * 9)}
        rows.append({**shared, "form": "parallel", **faster})
    rows.append({**rows[0], "learner": "vittt_dot", "chunk_size": 16})
    paper = {**rows[0], "setting": "paper", "tokens": 32768, "heads": 4, "head_dim": 384, "chunk_size": 2048}
    rows.append({**paper, "form": "recurrent", "tokens_m_per_s": 0.25, "samples_ms": "8 8 8"})
    rows.append({**paper, "form": "parallel", "tokens_m_per_s": 0.2, "samples_ms": "10 10 10"})
    own = {**BACKBONE, "learner": "plain", "form": "parallel", "backend": "torch", "tokens": 6400, "latency_ms": 1234.0}
    return [*rows, own]


def test_the_forms_are_told_with_crossover_and_memory(checkout):
    write_forms(checkout, forms())
    report = judge(checkout, PAPER)
    page = "\n\n".join((list_ratios(report), compare_setting(report), show_picture(report)))
    row = (
        "| LaCT, V6 | 0.50 [0.50, 0.50] (3.0×) | 2.00 [2.00, 2.00] (3.0×) | 4.00 [4.00, 4.00] (3.0×) | ahead from 400 |"
    )
    assert row in page
    # the paper's 89.67 and 124.6 million tokens a second beside ours
    assert "| LaCT, V6 | 89.67 | 124.6 | 1.39 | 0.250 | 0.200 | 0.80 |" in page
    assert "No row is of a GPU" in page
    assert "| plain | parallel | 1234.0 | 99 |" in list_backbones(judge(checkout, PAPER))


def test_forms_of_an_interrupted_measurement_are_told(checkout):
    """LaCT comes first; Vittt and the paper's setting are not measured yet."""
    write_forms(checkout, forms()[:6])
    report = judge(checkout, PAPER)
    assert "chunks of LaCT 256 tokens" in list_ratios(report)
    with pytest.raises(Missing):
        find_setting(report, "tokens")


def test_the_table_of_learners_says_yes_where_the_code_has_a_parallel_form():
    """docs/inner_loops.md has a row for each step of LaCT's ladder; its column says what the code can do."""
    page = (ROOT / "docs/inner_loops.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| LaCT(?:, (V\d))? \|.*\| (yes|no)[:;][^|]*\|[^|]*\|$", page, re.M)
    said = {step.lower() or "own": word for step, word in rows}
    assert said.keys() == {"own", *(f"v{number}" for number in range(1, 7))}
    loops = {step: inner.InnerLoop(**fast_weights.LACT_STEPS[step]) for step in said}
    assert said == {step: "no" if fast_weights.find_obstacle(loop) else "yes" for step, loop in loops.items()}


def test_probes_are_set_against_the_papers_first_figure(checkout):
    """Both losses fall; of the scores one falls by 30 points, and one by 6 images, which is within the intervals of
    both.
    """
    numbers = {"top1_percent": 90.0, "held_out_images": 359, "inner_loss_before": 0.0, "inner_loss_after": -1.0}
    about = {"data": "digits", "split": "test", "probe": "steps=4", "options": {}, "unchanged": numbers}
    for name, top1 in (("lact_nano_patch4_32", 60.0), ("ladder_vit3_nano_patch4_32", 90 - 600 / 359)):
        probed = {**numbers, "top1_percent": top1, "inner_loss_after": -2.0}
        checkout.record(f"replications/cpu/probes/{name}/steps4", {**about, "model": name, "probed": probed})
    report = judge(checkout, PAPER)
    page = list_probes(report)
    assert "| `lact_nano_patch4_32` | digits, 359 of test | steps=4 | 90.00 % | 60.00 % | -1 | -2 |" in page
    assert [count_probed(report, what) for what in ("rows", "lower", "worse", "both")] == [2, 2, 1, 1]


def test_where_some_seeds_learn_the_page_counts_them(checkout):
    """Half the way from chance, 50 % of two classes, is 75 %."""
    about = {"model": "ladder_vit3_nano_patch16_144", "kind": "connect", "classes": 2, "split": "test"}
    for name, top1 in (("own", (88.0, 89.0, 62.0)), ("ascent", (60.0, 61.0, 76.0))):
        options = {} if name == "own" else {"step": name}
        place = f"replications/cpu/ablate/kv_vit3_{name}_connect_5s"
        checkout.train(place, **about, options=options, held_out_images=1000, top1=top1)
    page = list_changes(judge(checkout, PAPER))
    assert "75.0 %" in page and "`vit3_own` 2 of 3, `vit3_ascent` 1 of 3" in page
