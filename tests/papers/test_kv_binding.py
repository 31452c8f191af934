"""The room of the paper on KV binding: its ledger's verdicts, its formulas, variants, recipe, and what its page says of
made-up records.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from repro.core.config import build, load_section
from repro.core.paths import Paths
from repro.models import fast_weights, inner
from repro.models.registry import build_model
from repro.papers import describe_recipe, load_papers
from repro.papers.grid import choose_variants, vary_recipe
from repro.papers.kv_binding import formulas
from repro.papers.kv_binding.forms import compare_setting, list_backbones, list_ratios, show_picture
from repro.papers.kv_binding.sections import CHANGES, count_probed, list_changes, list_probes, weigh_learners
from repro.papers.variants import load_variants
from repro.report.markdown import render_blocks, render_markdown
from repro.report.pages import build_document
from repro.report.results import Results
from repro.report.variants import find_variant
from repro.tasks.classification.params import ClassifierParams
from tests.report.conftest import JUDGE, SCORES
from tests.slow import first

SET = load_variants("kv_binding")
VARIANTS, ROWS, ORDERS = SET.options, SET.rows, SET.orders
ROOT = Path(__file__).parents[2]
PAPER = load_papers()["kv_binding"]
FORMS = ("recurrent", "parallel")
BASE = "ladder_vit3_base_patch16_224"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """The ledger judged without any record: what its own formulas say."""
    paths = Paths(tmp_path_factory.mktemp("checkout"))
    return JUDGE(PAPER, Results(paths, [PAPER], SCORES)).verdicts


# --- the ledger ---------------------------------------------------------------------------------------------------------------------


def test_what_the_paper_proves_holds_and_its_misprints_are_explained(verdicts):
    found = {}
    for name, verdict in verdicts.items():
        found.setdefault(verdict.status, set()).add(name)
    assert found["differs, explained"] == {
        "text.5_3.eq1_linear",  # the rate of a step outside of the momentum
        "text.6_1.vit3",  # ViT³'s last step as run
        "text.appendix_e.rate",
    }
    differing = {  # of what contradicts itself, where a repair of one side holds
        "text.5_3.eq1",  # the orthogonalization of a sum is no sum
        "text.5_4.glu",  # without its rate
        "text.appendix_h.mask",  # the momentum matrix in place of its cumulated sum
    }
    contradictions = {
        "text.6_1.value",
        "text.appendix_e.shapes",
        "text.5_3.momentum",
        "text.5_2.distinct",
        "text.appendix_h.rates",
    }
    assert found["paper inconsistent"] == differing | contradictions | {"text.appendix_h.covers"}
    assert {name for name in differing if verdicts[name].compared == "differs, explained"} == differing
    assert "differs, unexplained" not in found
    proved = (
        "text.theorem5_1",
        "text.theorem5_2",
        "text.theorem5_3",
        "text.4_2.theorem",
        "text.5_4.conv",
        "text.6_2.exists",
    )
    assert set(proved) <= found["matched"]
    assert {name for name in verdicts if name.endswith(("psnr", "top1_percent"))} <= found["not measured"]


def test_what_needs_a_language_model_is_out_of_scope_and_novel_views_are_not(verdicts):
    of_language = {name for name in verdicts if name.endswith("perplexity") or "llm" in name}
    # judged whole, with a perplexity among their numbers
    of_language |= {
        f"text.{name}" for name in ("4_2.comparable", "4_4.little", "6_1.best", "6_1.orthogonal", "6_1.perplexity_v6")
    }
    of_language |= {"text.6_2.training_v2", "text.6_2.convergence", "text.appendix_a.tokens_tokens"}
    assert {name for name, verdict in verdicts.items() if verdict.status == "out of scope"} == of_language
    assert all(verdicts[name].command == "none" and verdicts[name].reason for name in of_language)


@pytest.mark.parametrize(
    ("losses", "status"), [([(1, 2), (-3, -1)], "matched"), ([(1, 2), (3, 2)], "differs, unexplained")]
)
def test_ascent_is_judged_by_trained_models(tmp_path, losses, status):
    assert JUDGE(PAPER, Results(Paths(tmp_path), [PAPER], SCORES)).verdicts["text.4_2.raises"].status == "not measured"
    for number, (before, after) in enumerate(losses):
        file = tmp_path / "results" / "measured" / "cpu" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        metrics = {"probe": "ascent", "probed": {"inner_loss_before": before, "inner_loss_after": after}}
        file.write_text(json.dumps({"identity": {}, "metrics": metrics}), encoding="utf-8")
    found = JUDGE(PAPER, Results(Paths(tmp_path), [PAPER], SCORES)).verdicts["text.4_2.raises"]
    assert (found.status, len(found.sources)) == (status, 2)


def test_printed_numbers_are_the_papers():
    def printed(table, *keys):
        return [PAPER.ledger.entries[f"{table}.{key}"].printed for key in keys]

    rows = ("baseline", "ascent", "q_is_k")
    assert printed("table1", *(f"{row}.top1_percent" for row in rows)) == ["79.34", "79.61", "79.18"]
    assert printed("table1", *(f"{row}.perplexity" for row in rows)) == ["16.43", "16.19", "16.18"]
    ladder = [f"v{number}" for number in range(1, 7)]
    assert printed("table2", *(f"{row}.top1_percent" for row in ladder)) == [
        "79.63",
        "79.63",
        "79.39",
        "79.39",
        "79.39",
        "79.54",
    ]
    assert (
        printed("table2_recurrent", *(f"{row}.tokens_m_per_s" for row in ladder))
        == "10.60 11.02 12.95 13.31 14.40 89.67".split()
    )
    assert (
        printed("table2_parallel", *(f"{row}.tokens_m_per_s" for row in ladder[1:]))
        == "30.18 49.69 53.99 57.28 124.6".split()
    )
    assert PAPER.ledger.entries["text.6_2.speedup_most"].printed == "4.0"


@pytest.mark.slow
def test_the_papers_size_is_counted():
    """By hand: ViT³-B has 90,055,912 parameters; V3 leaves out 12 blocks of a C x d matrix, which what was run keeps."""
    counts = {
        step: sum(p.numel() for p in build_model(BASE, step=step).parameters())
        for step in ("own", "v1", "v3", "v3_as_run", "v6")
    }
    assert counts == {"own": 90_055_912, "v1": 90_055_912, "v3": 89_466_088, "v3_as_run": 90_055_912, "v6": 89_466_088}


@pytest.mark.parametrize(("step", "products"), [("own", 6), ("v1", 4), ("v3", 2), ("v3_as_run", 3), ("v6_as_run", 3)])
def test_a_step_needs_as_many_products_as_its_equations(step, products):
    """Of N·C·d multiply-adds in each block; what remains is the shell and the convolution of ViT³."""
    with torch.device("meta"):
        macs = build_model(BASE, step=step).mac_terms((224, 224))
    assert macs["inner_glu"] == 12 * products * 196 * 768 * 64


# --- the formulas -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: formulas.identity_error("no"),
        lambda: formulas.theorem_error("5.4"),
        lambda: formulas.lact_error("no"),
        lambda: formulas.momentum_error(4, "no"),
    ],
)
def test_an_unknown_name_is_refused(call):
    with pytest.raises(ValueError, match="they are"):
        call()


def test_a_broken_learner_shows_in_the_residuals(monkeypatch):
    """The recurrence of LaCT with a step that is a thousandth too long."""
    for function in (formulas.parallel_error, formulas.identity_error):
        function.cache_clear()
    find = inner._find_gradients
    monkeypatch.setattr(inner, "_find_gradients", lambda *arguments: [1.001 * step for step in find(*arguments)])
    try:
        assert formulas.parallel_error("v6") > 1e-4 and formulas.identity_error("v6_of_lact") > 1e-4
    finally:
        for function in (formulas.parallel_error, formulas.identity_error):
            function.cache_clear()


def test_a_learner_that_has_no_parallel_form_is_refused():
    with pytest.raises(ValueError, match="norm state is applied to the state"):
        formulas.parallel_error("v1")


def test_the_authors_division_underflows_and_ours_does_not():
    """cumprod(½) falls below their 1e-8 between 26 and 27 chunks."""
    assert 0.5**27 < 1e-8 < 0.5**26
    assert (
        formulas.momentum_error(16, "divided")
        < 1e-3
        < 0.1
        < formulas.momentum_error(32, "divided")
        < formulas.momentum_error(256, "divided")
    )
    assert max(formulas.momentum_error(chunks, "ours") for chunks in (16, 64, 256, 1024)) < 1e-6


def test_the_value_rows_are_those_of_the_heads():
    model = build_model("ladder_vit3_nano_patch4_32", num_classes=3)
    training = model.blocks[0].attn
    x = torch.randn(1, 64, 48)
    _, _, v = training._split(training.qkv(x)[..., : 3 * 48], 2)
    rows = formulas.find_values(model, "blocks.0.attn.qkv.weight")
    stated = x @ training.qkv.weight[rows].T + training.qkv.bias[rows]
    assert torch.allclose(v.transpose(1, 2).flatten(2), stated, atol=1e-6)
    assert formulas.find_values(model, "blocks.0.mlp.fc1.weight") == slice(0)


# --- variants and recipe
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits", "connect"])
@pytest.mark.parametrize("name", first(VARIANTS, 4))
def test_every_variant_is_a_model_at_the_recipe_of_the_grid(name, data):
    params = vary_recipe(choose_variants("kv_binding"), name, Paths(ROOT), data=data, seeds=(0,), epochs=None)
    families = {"vit3": "ladder_vit3", "lact": "lact", "vittt": "ladder_vittt"}
    assert params.model.startswith(families[name.split("_")[0]]) and params.data == data
    model = build_model(params.model, num_classes=10, img_size=params.transform.image_size, **params.options)
    tokens = {"digits": {"vit3": 64, "lact": 64, "vittt": 81}, "connect": dict.fromkeys(("vit3", "lact", "vittt"), 16)}
    height, width = model.grid_size
    assert height * width == tokens[data][name.split("_")[0]]
    if name.startswith("lact"):
        assert height * width == 4 * params.options.get("chunk_size", 16)


def test_the_rows_are_variants_and_the_orders_are_of_the_rows():
    assert all(set(rows) <= set(VARIANTS) for rows in ROWS.values())
    assert all({name for pair in pairs for name in pair} <= set(ROWS[place]) for place, pairs in ORDERS.items())
    assert {name.partition("_")[2] for name in VARIANTS} == set(CHANGES)


def test_variants_of_equal_options_are_told_apart_by_their_model(checkout):
    about = {"image_size": 32, "epochs": 20, "num_params": 7, "macs_g": 1.0}
    models = {
        "vit3": "ladder_vit3_nano_patch4_32",
        "lact": "lact_nano_patch4_32",
        "vittt": "ladder_vittt_nano_patch16_144",
    }
    for name, model in models.items():
        checkout.train(
            f"measured/cpu/ablate/kv_binding/digits/{name}_ascent",
            model,
            "digits",
            options={"step": "ascent"},
            held_out_images=359,
            top1=(90.0, 91.0),
            **about,
        )
    results = Results(checkout.paths, [checkout.paper, PAPER], SCORES)
    found = {
        source.metrics["model"]: find_variant(results, PAPER.variants, source.metrics) for source in results.sources
    }
    assert found == {model: f"{name}_ascent" for name, model in models.items()}


@pytest.mark.parametrize("step", ["own", "ascent", "q_is_k", "v1", "v3", "v3_as_run", "v6", "v6_as_run"])
def test_the_paper_profile_trains_each_step_as_appendix_a_says(step):
    params = load_section(ClassifierParams, ROOT / "profiles/paper.yaml", "pretrain", f"ladder_vit3_{step}_imagenet")
    assert (params.model, params.epochs, params.batch_size) == (BASE, 60, 2 * 256) and params.options == (
        {} if step == "own" else {"step": step}
    )
    # ViT³'s rate at this batch
    assert params.optim.lr * params.batch_size / params.optim.lr_batch_size == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"epochs": 20}, "epochs: 20, the paper has 60"),
        ({"batch_size": 256}, "batch_size: 256, the paper has 512"),
        ({"model": "lact_nano_patch4_32"}, f"model: lact_nano_patch4_32, the paper has {BASE}"),
        ({"data": "digits"}, "data: digits (1,281,167 training images), the paper has ImageNet-1K (1,281,167)"),
    ],
)
def test_a_departure_has_a_line(changes, line):
    asked = {"model": BASE, "data": "imagenet", "epochs": 60, "batch_size": 512, "drop_path": 0.4}
    asked |= {"optim": {"lr": 5e-4}, "mix": {}, "transform": {"image_size": 224}, **changes}
    params = build(ClassifierParams, asked, "a step")
    world = {"world_size": 2, "micro_batch": params.batch_size // 2, "accumulate": 1}
    described, listed = describe_recipe(
        params, {**world, "device": "cuda", "dtype": "bf16", "backend": "torch", "train_images": 1_281_167}
    )
    found = described["departures_from_the_paper"]
    assert found == ([] if line is None else [line]) and (line is None or f"departs from the paper: {line}" in listed)


# --- the page -----------------------------------------------------------------------------------------------------------------------


def train(checkout, scores: dict[str, tuple[float, ...]], model: str, data: str = "digits") -> None:
    for name, top1 in scores.items():
        about = {"options": VARIANTS[name], "image_size": 32, "epochs": 20, "num_params": 7, "macs_g": 1.0}
        folder = f"measured/cpu/ablate/kv_binding/{data}/{name}"
        checkout.train(folder, model, data, held_out_images=100_000, top1=top1, **about)


def judge(checkout):
    return JUDGE(PAPER, Results(checkout.paths, [checkout.paper, PAPER], SCORES))


def test_a_change_is_said_with_its_interval(checkout):
    """Differences by hand: ascent 0.2 ± noise is not separated, plain is ten points below, in every seed."""
    own = (90.0, 91.0, 92.0, 90.5, 91.5)
    scores = {
        "vittt_own": own,
        "vittt_ascent": tuple(value + change for value, change in zip(own, (1.0, -1.0, 0.5, -0.5, 1.0), strict=True)),
        "vittt_plain": tuple(
            value - 10 + change for value, change in zip(own, (0.1, -0.1, 0.1, -0.1, 0.0), strict=True)
        ),
    }
    train(checkout, scores, "ladder_vittt_nano_patch16_144")
    page = render_blocks(list_changes(judge(checkout)), "")
    assert "| the unchanged model | `vittt_own` | 91.0 | – | – | – |" in page
    # t(4, 97.5 %) = 2.776; the standard deviation of (1, −1, .5, −.5, 1) is 0.908
    assert (
        "| learns up its loss | `vittt_ascent` | 91.2 | +0.20 [-0.93, +1.33] |" in page and "| not separated |" in page
    )
    assert (
        "| without LayerNorm and bias | `vittt_plain` | 81.0 | -10.00 [-10.12, -9.88] |" in page and "| worse |" in page
    )
    assert "ViT³" not in render_blocks(list_changes(judge(checkout)), "")


@pytest.mark.parametrize(
    ("gap", "milliseconds", "verdict"),
    [
        (-10.0, 50.0, "faster, worse"),
        (0.0, 50.0, "faster, not separated"),
        (-10.0, 150.0, "slower, worse"),
        (0.0, 150.0, "slower, not separated"),
    ],
)
def test_the_choice_follows_from_accuracy_and_time(checkout, gap, milliseconds, verdict):
    own, noise = (90.0, 91.0, 92.0, 90.5, 91.5), (0.1, -0.1, 0.1, -0.1, 0.0)
    scores = {"vittt_own": own}
    scores |= {
        f"vittt_{step}": tuple(value + gap + change for value, change in zip(own, noise, strict=True))
        for step in ("plain", "dot")
    }
    train(checkout, scores, "ladder_vittt_nano_patch16_144")
    record = forms()
    (row,) = record["backbones"]
    times = {("own", "torch"): 100.0}
    times |= {(step, form): milliseconds * (1 + (form == "recurrent")) for step in ("plain", "dot") for form in FORMS}
    record["backbones"] = [
        {
            **row,
            "options": {} if step == "own" else {"step": step},
            "backend": form,
            "latency_ms": ms,
            "image_size": [side, side],
        }
        for (step, form), ms in times.items()
        for side in (1280, 224)
    ]
    checkout.record("measured/cpu", record, name="forms")
    page = render_blocks(weigh_learners(judge(checkout)), "")
    assert "1280²" in page and page.count(f"| parallel | {milliseconds / 100:.2f} | {verdict} |") == 2


def test_without_records_the_page_says_what_would_make_them(checkout):
    page = render_markdown(build_document(judge(checkout)))
    for command in ("ablate --paper kv_binding --all", "forms`", "explain --probe steps=4"):
        assert f": `repro {command}" in page
    assert "| 256 | 100 % | < 1e-6 |" in page


def forms(device: str = "cpu") -> dict:
    """A record of `repro forms` in which the parallel form of V6 passes the recurrent one at 400 tokens."""
    rows, ratios = [], []
    for tokens, ratio in ((100, 0.5), (400, 2.0), (6400, 4.0)):
        about = {"setting": "vision", "learner": "lact_v6", "mode": "infer", "tokens": tokens}
        shared = {**about, "heads": 3, "head_dim": 64, "chunk_size": 256, "noisy": [], "tokens_m_per_s": 1.0}
        rows += [{**shared, "form": "recurrent", "latency_ms": 8.0, "peak_memory_mib": 2.0}]
        rows += [
            {
                **shared,
                "form": "parallel",
                "latency_ms": 8.0 / ratio,
                "peak_memory_mib": 6.0,
                "noisy": ["load"] if tokens == 400 else [],
            }
        ]
        ratios.append({**about, "ratio": ratio, "ratio_ci95": [ratio - 0.1, ratio + 0.1]})
    rows.append({**rows[0], "learner": "vittt_dot", "chunk_size": 16})
    shared = {**rows[0], "setting": "paper", "tokens": 32768, "heads": 4, "head_dim": 384, "chunk_size": 2048}
    rows += [
        {**shared, "form": form, "tokens_m_per_s": speed} for form, speed in (("recurrent", 0.25), ("parallel", 0.2))
    ]
    ratios.append(
        {
            "setting": "paper",
            "learner": "lact_v6",
            "mode": "infer",
            "tokens": 32768,
            "ratio": 0.8,
            "ratio_ci95": None,
            "ratio_ci95_reason": "three turns",
        }
    )
    backbone = {
        "options": {"step": "plain"},
        "backend": "parallel",
        "image_size": [1280, 1280],
        "latency_ms": 1234.0,
        "peak_memory_mib": 99.0,
        "noisy": [],
    }
    return {"rows": rows, "ratios": ratios, "backbones": [backbone]}


def test_the_forms_are_told_with_crossover_memory_and_noise(checkout):
    checkout.record("measured/cpu", forms(), name="forms")
    report = judge(checkout)
    page = render_blocks([*list_ratios(report), *compare_setting(report), *show_picture(report)], "")
    row = "| LaCT, V6 | 0.50 [0.40, 0.60] (3.0×) | 2.00 [1.90, 2.10] (3.0×; noisy) | 4.00 [3.90, 4.10] (3.0×) | ahead from 400 |"
    assert row in page
    # the paper's 89.67 and 124.6 million tokens a second beside ours
    assert "| LaCT, V6 | 89.67 | 124.6 | 1.39 | 0.250 | 0.200 | 0.80 |" in page
    assert "No row is of a GPU" in page
    assert "| plain | parallel | 1234.0 | 99 |" in render_blocks(list_backbones(judge(checkout)), "")


def test_the_table_of_learners_says_yes_where_the_code_has_a_parallel_form():
    """docs/inner_loops.md has a row for each step of LaCT's ladder; its column says what the code can do."""
    page = (ROOT / "docs/inner_loops.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| LaCT(?:, (V\d))? \|.*\| (yes|no)[:;][^|]*\|[^|]*\|$", page, re.M)
    said = {step.lower() or "own": word for step, word in rows}
    assert said.keys() == {"own", *(f"v{number}" for number in range(1, 7))}
    loops = {step: inner.InnerLoop(**fast_weights.LADDER[step]) for step in said}
    assert said == {step: "no" if fast_weights.find_obstacle(loop) else "yes" for step, loop in loops.items()}


def test_probes_are_set_against_the_papers_first_figure(checkout):
    """Both losses fall; of the scores one falls by 30 points, and one by 6 images, which is within the intervals of
    both.
    """
    numbers = {"top1_percent": 90.0, "held_out_images": 359, "inner_loss_before": 0.0, "inner_loss_after": -1.0}
    for name, top1 in (("lact_nano_patch4_32", 60.0), ("ladder_vit3_nano_patch4_32", 90 - 600 / 359)):
        probed = {**numbers, "top1_percent": top1, "inner_loss_after": -2.0}
        about = {
            "model": name,
            "data": "digits",
            "split": "test",
            "probe": "steps=4",
            "options": {},
            "unchanged": numbers,
            "probed": probed,
        }
        checkout.record(f"measured/cpu/probes/{name}", about, name="steps4")
    page = render_blocks(list_probes(judge(checkout)), "")
    assert "| `lact_nano_patch4_32` | digits, 359 of test | steps=4 | 90.00 % | 60.00 % | -1 | -2 |" in page
    counts = [count_probed(judge(checkout), what) for what in ("rows", "lower", "worse", "both")]
    assert counts == [2, 2, 1, 1]


def test_where_some_seeds_learn_the_page_counts_them(checkout):
    """Half the way from chance, 50 % of two classes, is 75 %."""
    for name, top1 in (("own", (88.0, 89.0, 62.0)), ("ascent", (60.0, 61.0, 76.0))):
        options = {} if name == "own" else {"step": name}
        about = {
            "model": "ladder_vit3_nano_patch16_144",
            "kind": "connect",
            "options": options,
            "classes": 2,
            "split": "test",
        }
        checkout.train(f"measured/cpu/ablate/vit3_{name}", **about, held_out_images=1000, top1=top1, stage="ablate")
    page = render_blocks(list_changes(judge(checkout)), "")
    assert "75.0 %" in page and "`vit3_own` 2 of 3, `vit3_ascent` 1 of 3" in page
