"""What the page of ViT³ says of denoisers that were trained by hand; intervals by hand with t = 4.3027 of two degrees
of freedom.
"""

import re

import pytest
from PIL import Image

from repro.papers import load_papers
from repro.papers.vit3.sections import list_denoisers
from repro.report.markdown import render_blocks, render_markdown
from repro.report.pages import build_document
from repro.report.results import Results
from tests.report.conftest import JUDGE, SCORES

PAPER = load_papers()["vit3"]
SHARED = {"judged_samples": 200, "sampling": {"sampler": "ddpm", "steps": 50, "guidance": 2.0}}


def train(checkout, name, model, losses, judged=(90.0, 95.0, 100.0), device="cpu", **more):
    runs = [
        {"seed": seed, "held_out_mse": loss, "judged_percent": share, "real_judged_percent": 97.5} | SHARED
        for seed, (loss, share) in enumerate(zip(losses, judged, strict=False))
    ]
    about = {
        "by_seed": runs,
        "held_out_mse": sum(losses) / len(losses),
        "epochs": 22,
        "steps": 2200,
        "batch_size": 32,
        "image_size": 8,
    }
    folder = f"measured/{device}/generate/{name}"
    checkout.train(folder, model, "digits", held_out_images=359, split="test", **{**about, **more})
    picture = checkout.paths.results / folder / "examples/samples.png"
    picture.parent.mkdir()
    Image.new("RGB", (4, 4)).save(picture)


@pytest.fixture
def three(checkout):
    train(checkout, "dit_3seeds", "dit_nano_patch1", (0.055, 0.0575, 0.059))
    train(checkout, "cpe_3seeds", "dit_nano_patch1", (0.049, 0.053, 0.055), options={"cpe": True})
    train(checkout, "dit3_3seeds", "dit3_nano_patch1", (0.050, 0.052, 0.054), num_params=169_681)
    return checkout


def blocks(checkout) -> str:
    return render_blocks(list_denoisers(JUDGE(PAPER, Results(checkout.paths, [PAPER], SCORES))), "../results/")


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
    assert (
        "`dit3_nano_patch1` against `dit_nano_patch1`: the loss is lower by 0.0052 [0.0044, 0.0059] over 3 seeds."
        in found
    )
    assert (
        "against `dit_nano_patch1[cpe=True]`: the losses are not separated; they differ by 0.0003 [-0.0025, 0.0032] over 3 seeds."
        in found
    )


def test_one_seed_has_no_interval(checkout):
    train(checkout, "dit", "dit_nano_patch1", (0.06,))
    train(checkout, "dit3", "dit3_nano_patch1", (0.05,))
    found = blocks(checkout)
    assert "| 0.0500 | 90.0 % | 97.5 % |" in found
    assert "the loss is lower by 0.0100; one seed has no interval, and another may say otherwise." in found


def test_other_settings_are_not_compared(checkout):
    train(checkout, "dit", "dit_nano_patch1", (0.06,))
    train(checkout, "dit3", "dit3_nano_patch1", (0.05,), steps=1400)
    found = blocks(checkout)
    assert found.count("| denoiser |") == 2 and "against" not in found


def test_the_record_with_the_most_seeds_stands_for_a_model(three):
    train(three, "dit3", "dit3_nano_patch1", (0.01,))
    assert "0.0100" not in blocks(three)


def test_samples_stand_beside_each_other_with_links_from_each_page(three):
    (row,) = (line for line in blocks(three).splitlines() if "![" in line)
    assert row.count("![") == 3 and "](../results/measured/cpu/generate/dit3_3seeds/examples/samples.png)" in row
    report = JUDGE(PAPER, Results(three.paths, [PAPER], SCORES))
    page = render_markdown(build_document(report), "../")
    assert (
        "\n## Generation on embedded digits\n" in page
        and "](../measured/cpu/generate/dit_3seeds/examples/samples.png)" in page
    )


def test_without_a_judge_there_is_no_share(checkout):
    train(checkout, "dit", "dit_nano_patch1", (0.06,))
    runs = [
        {"seed": 0, "held_out_mse": 0.06, "judged_percent": None, "judged_percent_reason": "no judge is named"} | SHARED
    ]
    checkout.train("measured/cpu/generate/dit", "dit_nano_patch1", "digits", held_out_images=359, by_seed=runs, held_out_mse=0.06,
                   epochs=22, steps=2200, batch_size=32, image_size=8)  # fmt: skip
    assert "| 0.0600 | – | – |" in blocks(checkout) and "359 images of val;" in blocks(checkout)


def test_they_are_no_runs_of_the_other_tasks(three):
    """The page of the primary paper lists runs by the scores of the stages of the graph, and these have none of them."""
    assert "generate/dit3_3seeds" not in three.page().split("\n## Runs on other data")[1].split("\n## ")[0]
