"""The record of the two forms of inner learners on small sizes."""

import itertools

import pytest

from repro.bench import forms
from repro.bench.forms import FormsParams, Setting, compare_forms, read_forms, run_forms
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.papers.kv_binding.forms import find_crossover

BOTH = {"lact_v2", "lact_v3", "lact_v4", "lact_v5", "lact_v6", "vittt_plain", "vittt_dot"}
LACT = {f"lact_{step}" for step in ("own", "v1", "v2", "v3", "v4", "v5", "v6")}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Of a device that nobody names, so that the folder is known."""
    root = tmp_path_factory.mktemp("checkout")
    small = {"heads": 2, "head_dim": 64}  # as in models, for which the loops are compiled in any case
    vision = Setting(name="vision", tokens=(6, 20), chunks={"lact": 8, "vittt": 4}, modes=("infer", "train"), **small)
    paper = Setting(name="paper", tokens=(16,), chunks={"lact": 8}, **small)
    runtime = Runtime(device="cpu", threads=1, data_roots={})
    run_forms(Paths(root), runtime, FormsParams(settings=(vision, paper), image_sizes=()))
    (file,) = root.glob("results/speed/forms/*.csv")
    rows = read_forms(file)
    return {"rows": rows, "ratios": compare_forms(rows)}


def test_learners_that_reduce_have_two_forms_and_a_ratio(metrics):
    listed = [tuple(row[key] for key in ("setting", "mode", "tokens", "learner", "form")) for row in metrics["rows"]]
    wanted = set()
    for setting, learners, modes, tokens in (
        ("vision", LACT | {"vittt_own", "vittt_plain", "vittt_dot"}, ("infer", "train"), (6, 20)),
        ("paper", LACT, ("infer",), (16,)),
    ):
        wanted |= set(itertools.product([setting], modes, tokens, learners, ["recurrent"]))
        wanted |= set(itertools.product([setting], modes, tokens, learners & BOTH, ["parallel"]))
    assert set(listed) == wanted and len(listed) == len(wanted)
    assert {row["learner"] for row in metrics["ratios"]} == BOTH


def test_a_row_says_what_was_measured(metrics):
    for row in metrics["rows"]:
        assert row["latency_ms"] > 0 and row["peak_memory_mib"] > 0 and len(row["samples_ms"]) >= 3
        # a token counts once for each head
        assert row["tokens_m_per_s"] == pytest.approx(row["tokens"] * row["heads"] / row["latency_ms"] / 1e3)
        assert row["chunk_size"] == (4 if row["learner"].startswith("vittt") else 8)
    assert all(row["ratio"] > 0 for row in metrics["ratios"])


def test_rows_of_another_number_of_threads_are_measured_again(tmp_path, monkeypatch):
    """The first call is stopped at its third row; the next one has two threads."""
    measured = []

    def measure(step, backend, side, device, runtime):
        measured.append(runtime.threads)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return {"latency_ms": 1.0, "samples_ms": [1.0]}

    monkeypatch.setattr(forms, "_measure_backbone", measure)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    params = FormsParams(settings=(), image_sizes=(32,))
    with pytest.raises(KeyboardInterrupt):
        run_forms(Paths(tmp_path), Runtime(device="cpu", threads=1, data_roots={}), params)
    run_forms(Paths(tmp_path), Runtime(device="cpu", threads=2, data_roots={}), params)
    (file,) = tmp_path.glob("results/speed/forms/*.csv")
    assert measured == [1] * 3 + [2] * len(forms.BACKBONES)
    assert len({row["device"] for row in read_forms(file)}) == 1


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((0.5, 0.9, 1.2, 3.0), "ahead from 400"),
        ((0.5, 0.6, 0.7, 0.8), "never ahead"),
        ((1.5, 1.6, 1.7, 1.8), "always ahead"),
        ((1.5, 1.2, 0.7, 0.8), "ahead below 400"),
        ((1.5, 0.2, 1.7, 0.8), "ahead at 100, 400"),
    ],
)
def test_the_crossover_is_said_in_words(ratios, words):
    alike = {"ratio_ci95": None}
    rows = [
        alike | {"tokens": tokens, "ratio": ratio} for tokens, ratio in zip((100, 200, 400, 800), ratios, strict=True)
    ]
    assert find_crossover(rows[::-1]) == words


def test_a_form_is_ahead_only_where_the_interval_says_so():
    ends = {100: (0.4, 0.6), 200: (0.9, 1.4), 400: (1.1, 1.3)}
    rows = [{"tokens": tokens, "ratio": sum(each) / 2, "ratio_ci95": each} for tokens, each in ends.items()]
    assert find_crossover(rows) == "ahead from 400"
