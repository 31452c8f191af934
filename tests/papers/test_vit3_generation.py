"""What the page of ViT³ says of denoisers that were trained; intervals by hand with t = 4.3027 of two degrees
of freedom.
"""

import re

import pytest

from repro.papers import load_papers
from repro.papers.vit3.sections import list_denoisers
from repro.report.pages import build_document
from tests.papers.conftest import judge

PAPER = load_papers()["vit3"]
SHARED = {"judged_samples": 200, "sampling": {"sampler": "ddpm", "steps": 50, "guidance": 2.0}}
UNJUDGED = {"judged_percent": None, "judged_percent_reason": "no judge is named"}


def train(checkout, name, model, losses, judged=(90.0, 95.0, 100.0), root="replications/cpu/", **more):
    runs = [{"seed": seed, "held_out_mse": loss, **SHARED} for seed, loss in enumerate(losses)]
    for run, share in zip(runs, judged, strict=False):
        run |= UNJUDGED if share is None else {"judged_percent": share, "real_judged_percent": 97.5}
    about = {"by_seed": runs, "held_out_mse": sum(losses) / len(losses), "epochs": 22, "steps": 2200, "split": "test"}
    about |= {"batch_size": 32, "image_size": 8, "held_out_images": 359, **more}
    checkout.train(f"{root}ablate_generate/{name}", model, "digits", **about)


@pytest.fixture
def three(checkout):
    train(checkout, "dit_3s", "dit_nano_patch1", (0.055, 0.0575, 0.059))
    train(checkout, "cpe_3s", "dit_nano_patch1", (0.049, 0.053, 0.055), options={"cpe": True})
    train(checkout, "dit3_3s", "dit3_nano_patch1", (0.050, 0.052, 0.054), num_params=169_681)
    return checkout


def blocks(checkout) -> str:
    return list_denoisers(judge(checkout, PAPER))


def test_the_table_has_means_and_intervals(three):
    found = blocks(three)
    (about, *_) = found.splitlines()
    assert re.findall(r"[\d,]*\d", about) == "8 8 2,200 32 3 359 200 50 2".split() and "DDPM" in about
    # no share is above 100 %
    shares = "95.0 % [82.6, 100.0] | 97.5 % | cpu: some processor, 2 threads; outside the pipeline |"
    assert f"| `dit3_nano_patch1` | 169,681 | 3 | 0.0520 [0.0470, 0.0570] | {shares}" in found
    rows = [line.split("`")[1] for line in found.splitlines() if line.startswith("| `dit")]
    assert rows == ["dit3_nano_patch1", "dit_nano_patch1[cpe=True]", "dit_nano_patch1"]  # by their losses


def test_losses_are_compared_seed_by_seed(three):
    found = blocks(three)
    assert "`dit3_nano_patch1` against `dit_nano_patch1`: the loss is lower by 0.0052 [0.0044, 0.0059] over" in found
    assert "against `dit_nano_patch1[cpe=True]`: the losses are not separated" in found
    assert "0.0003 [-0.0025, 0.0032] over 3 seeds, p " in found
    # the record with the most seeds stands for a model
    train(three, "dit3", "dit3_nano_patch1", (0.01,))
    assert blocks(three) == found
    # the page of the primary paper lists runs by the scores of the stages of the graph, of which these have none
    assert "ablate_generate/dit3_3s" not in three.runs().split("\n## Runs")[1].split("\n## ")[0]


def test_more_pairs_ask_for_more(checkout):
    """By hand: differences of 3, 5 and 6 thousandths have t = 5.29 and p = 0.034, which three pairs make 0.10."""
    train(checkout, "dit_3s", "dit_nano_patch1", (0.053, 0.056, 0.058))
    train(checkout, "dit3_3s", "dit3_nano_patch1", (0.050, 0.051, 0.052))
    found = blocks(checkout)
    assert "against `dit_nano_patch1`: the loss is lower by" in found and "p 0.034 (Holm)" in found
    train(checkout, "cpe_3s", "dit_nano_patch1", (0.051, 0.049, 0.0541), options={"cpe": True})
    lines = blocks(checkout).splitlines()
    (said,) = (line for line in lines if "`dit3_nano_patch1` against `dit_nano_patch1`:" in line)
    assert "not separated" in said and "p 0.10" in said


@pytest.mark.parametrize(
    ("steps", "said"),
    [(2200, "the loss is lower by 0.0100; one seed has no interval"), (1400, None)],
    ids=["equal settings", "other settings"],
)
def test_one_seed_has_no_interval_and_other_settings_are_not_compared(checkout, steps, said):
    train(checkout, "dit", "dit_nano_patch1", (0.06,), judged=(None,))
    train(checkout, "dit3", "dit3_nano_patch1", (0.05,), steps=steps)
    found = blocks(checkout)
    assert "| 0.0500 | 90.0 % | 97.5 % |" in found and "| 0.0600 | – | – |" in found
    assert said in found if said else found.count("| denoiser |") == 2 and "against" not in found


def test_the_section_stands_on_the_papers_page(three):
    page = build_document(judge(three, PAPER))
    section = page.partition("\n## Generation on embedded digits\n")[2].partition("\n## ")[0]
    assert section.count("| `dit") == 3


@pytest.mark.parametrize("root", ["", "replications/cpu/"])
def test_denoisers_of_one_machine_are_compared_wherever_their_records_lie(checkout, root):
    """One of the pipeline, the other of it or not; those of another machine stand in a table of their own."""
    train(checkout, "dit_3s", "dit_nano_patch1", (0.055, 0.0575, 0.059), root="")
    train(checkout, "dit3_3s", "dit3_nano_patch1", (0.050, 0.052, 0.054), root=root)
    found = blocks(checkout)
    assert found.count("| denoiser |") == 1 and "the loss is lower by 0.0052 [0.0044, 0.0059] over 3" in found
    with checkout.edit(f"{root}ablate_generate/dit3_3s{'' if root else '/metrics'}.json") as record:
        record["identity"]["device"] = "cuda: NVIDIA H200"
    found = blocks(checkout)
    assert found.count("| denoiser |") == 2 and "the loss is lower" not in found
