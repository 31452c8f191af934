"""What was measured, on the page: a sweep's matrices, comparisons and withheld ratios; other image sizes; searches."""

import pytest

from repro.report.markdown import render_blocks
from repro.report.measured import list_speeds, over_resolution

CPU = "cpu: Made-up, 2 threads"
VITTT, DEIT, VIM = "vittt_tiny_patch16_224", "deit_tiny_patch16_224", "vim_tiny_patch16_224"


def row(model, attention, size, latency, memory, **more):
    about = {"row": f"{model}@{size}", "model": model, "attention": attention, "image_size": [size, size], "run": 1}
    about |= {"batch_size": 1, "dtype": "fp32", "compile": False, "attention_kernel": "flash", "reason": "made up"}
    measured = {"latency_ms": latency, "latency_ms_ci95": None, "peak_memory_mib": memory, "macs_g": size**2 / 1e5}
    return {**about, **measured, "throughput_img_per_s": None if latency is None else 1e3 / latency, **more}


GROUP = {"batch_size": 1, "dtype": "fp32", "mode": "infer", "compile": False}
RATIO = {"size": "T", "image_size": 512, "speedup": 4.0, "memory_saved_percent": 73.8}
RATIO |= {"crossover": "from", "crossover_image_size": 440.4}
NO_RATIO = dict.fromkeys(("image_size", "speedup", "memory_saved_percent", "crossover", "crossover_image_size"))
POWERS = {"macs_exponent": 1.0, "latency_exponent": 1.123, "memory_exponent": 0.5}


def test_matrices_comparisons_and_growth(checkout):
    """What was measured twice counts once, by its mean; Vim's interval is half as wide as its median is long."""
    rows = [row(VITTT, None, size, size**2 / 1e3, size**2 / 1e4) for size in (512, 1024)]
    rows += [row(DEIT, "unfused", 512, 1048.576, 100.0), row(DEIT, "unfused", 1024, None, None, status="oom")]
    rows += [row(VITTT, None, 512, 1.02 * 512**2 / 1e3, 512**2 / 1e4, run=2)]
    rows += [row(VITTT, None, 512, 9.0, 9.0, compile=True), row(VIM, None, 512, 1000.0, 1.0)]
    rows[-1] |= {"latency_ms_ci95": [750.0, 1250.0]}
    noisy = {"speedup": None, "speedup_reason": f"{VIM} at 512 is noisy: spread", "crossover": None}
    noisy |= {"crossover_reason": "noisy", "crossover_image_size": None, "crossover_image_size_reason": "noisy"}
    never = {"crossover": "never", "crossover_image_size": None, "reason": "never faster"}
    compared = [
        {**GROUP, **RATIO, "against": "deit"},
        {**GROUP, **RATIO, "against": "vit3", **never},
        {**GROUP, **NO_RATIO, "size": "T", "against": "vim", "reason": "its operator is too slow"},
        {**GROUP, **RATIO, "against": "vrwkv", "batch_size": 64},
        {**GROUP, **RATIO, "size": "S", "against": "vim", **noisy},
    ]
    growth = [{**GROUP, **POWERS, "model": VITTT, "attention": "none", "image_sizes": [512, 1024]}]
    growth += [{**GROUP, **POWERS, "model": DEIT, "attention": "unfused", "image_sizes": [512]}]
    about = {"gates": [], "compared": compared, "growth": growth}
    checkout.speed(*rows, device=CPU, path="measured/cpu_made_up", **about)
    text = render_blocks(list_speeds(checkout.report()))
    assert f"| {VITTT} | 265 | 1049 |" in text
    assert f"| {VIM} | 1000 (noisy) | – |" in text
    assert f"| S | vim | 512² | no ratio: {VIM} at 512 is noisy: spread | 73.8 % | – |" in text
    assert f"| {DEIT}, unfused | 1049 | oom |" in text
    assert "| T | deit | 512² | 4.00× | 73.8 % | from 440² |" in text
    assert "| T | vit3 | 512² | 4.00× | 73.8 % | never |" in text
    assert "| T | vim | – | no ratio: its operator is too slow | – | – |" in text
    assert "vrwkv" not in text  # of another batch, which has no rows here
    assert f"| {VITTT} | 1.00 | 1.12 | 0.500 |" in text
    assert text.count("| 1.12 |") == 1  # one size shows no growth
    assert f"### {CPU}, batch 1, fp32, infer\n" in text and f"### {CPU}, batch 1, fp32, infer, compiled\n" in text


def test_accuracies_and_times_are_in_a_row_for_each_model(checkout):
    assert over_resolution(checkout.report()) == []  # without a record there is no section
    rows = []
    for family, shift in (("vittt", 0), ("deit", 20)):
        for size, top1, time in ((64, 90.0, 1.0), (96, 50.125, 2.5)):
            row = {"family": family, "model": f"{family}_nano", "image_size": [size, size], "latency_ms": time}
            rows.append({**row, "top1_percent": top1 - shift, "noisy": ["spread"] if size == 96 else []})
    about = {"data_set": "digits", "split": "test", "held_out_images": 359, "train_image_size": 64, "evaluated": rows}
    checkout.record("resolution", about)
    (section,) = over_resolution(checkout.report())
    text = render_blocks(section.blocks)
    assert "| model | 64² (1×) | 96² (1.5×) |" in text and "on the 359 test images of digits" in text
    assert "| vittt_nano | 90.0 | 50.1 |" in text and "| deit_nano | 70.0 | 30.1 |" in text
    assert text.count("| 1.00 | 2.50 (noisy) |") == 2
    assert f"`results/resolution/metrics.json`: {checkout.CPU}" in text
    assert "](resolution/accuracy_and_time.png)" in text


@pytest.mark.parametrize(("warmup", "shown"), [(3, "| 3 |"), (2, "| 3, trained with 2 |")])
def test_a_search_whose_choice_nobody_trains_with_says_so(checkout, warmup, shown):
    """The highest of three scores is of the largest rate tried and of a warm-up of three epochs."""
    checkout.write("params.yaml", f"pretrain: {{nano: {{optim: {{lr: 0.004, warmup_epochs: {warmup}}}}}}}\n")
    tried = ((0.002, 1, 90.0), (0.004, 2, 97.7), (0.004, 3, 98.6))
    trials = [dict(zip(("lr", "warmup_epochs", "top1_percent"), each), diverged=False) for each in tried]
    metrics = {"cell": "pretrain.nano", "split": "tune", "score": "top1_percent", "seed": 7, "rule": "the highest"}
    metrics |= {"trials": trials, "chosen": {"lr": 0.004, "warmup_epochs": 3}}
    checkout.record("measured/cpu/tune", metrics, name="nano")
    row = next(line for line in checkout.runs().splitlines() if line.startswith("| `pretrain.nano`"))
    assert f"| 0.004, at the edge {shown} 0.002 (1): 90.0; 0.004 (3): 98.6 |" in row
