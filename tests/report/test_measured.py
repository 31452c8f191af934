"""What was measured, on the page: a sweep's matrices, comparisons and withheld ratios; other image sizes; searches."""

import pytest

from repro.bench.pooling import HOST
from repro.report.measured import list_speeds, over_resolution

CPU = "cpu: Made-up, 2 threads"
VITTT, DEIT, VIM = "vittt_tiny_patch16_224", "deit_tiny_patch16_224", "vim_tiny_patch16_224"


def row(model, attention, size, latency, memory, **more):
    about = {"row": f"{model}@{size}", "model": model, "attention": attention, "image_size": [size, size], "ends": None}
    about |= {"batch_size": 1, "dtype": "fp32", "reason": "made up"}
    return {**about, "latency_ms": latency, "peak_memory_mib": memory, "macs_g": size**2 / 1e5, **more}


def test_matrices_comparisons_and_growth(checkout):
    """Vittt takes 0.98, 1 and 1.02 times as long in three processes at 512²; DeiT has one process."""
    three = {"ends": (0.98, 1.02)}
    rows = [row(VITTT, None, size, size**2 / 1e3, size**2 / 1e4, **three) for size in (512, 1024)]
    rows += [row(DEIT, "unfused", 512, 1048.576, 100.0), row(DEIT, "unfused", 1024, None, None, status="oom")]
    rows += [row(VITTT, None, 512, 9.0, 9.0, compile=True), row(VIM, None, 512, 1000.0, 1.0)]
    checkout.speed(*rows, device=CPU, path="cpu_made_up")
    text = list_speeds(checkout.report())
    assert f"| {VITTT} | 262 | 1049 |" in text
    assert f"| {VIM} | 1000 | – |" in text
    assert f"| {DEIT}, unfused | 1049 | oom |" in text
    assert "| T | deit | 512² | 1.00 | 4.00× (one process) | 73.8 % | not known: one process, no interval |" in text
    assert "| T | vim | – | – | no ratio: the speed of its operator was not measured" in text
    assert f"| {VITTT} | 1.00 | 1.00 | 1.00 |" in text
    assert text.count("| 1.00 | 1.00 | 1.00 |") == 1  # one size shows no growth
    assert f"### {CPU}, batch 1, fp32, infer, commit 0123456789ab\n" in text
    assert f"### {CPU}, batch 1, fp32, infer, compiled, commit 0123456789ab\n" in text


def test_numbers_of_threads_are_not_compared(checkout):
    """The file is of a processor, and DeiT was measured with fewer threads."""
    three = {"ends": (0.98, 1.02)}
    rows = [row(VITTT, None, size, 10.0, 1.0, **three, device="cpu: some processor, 8 threads") for size in (512, 1024)]
    rows += [row(DEIT, "unfused", size, 20.0, 1.0, **three, device=CPU) for size in (512, 1024)]
    checkout.speed(*rows, device=CPU, path="cpu_made_up")
    assert "Ours against" not in list_speeds(checkout.report())


def test_a_crossover_needs_four_sizes_and_names_the_smallest(checkout):
    """Vittt takes 2 ms at each size; DeiT once longer, once shorter, once as long as may be."""
    sizes = (224, 384, 640, 1280)
    for theirs, words in (
        ((3.0, 3.0, 3.0, 3.0), "always at 4 sizes from 224² on"),
        ((1.0, 1.1, 1.2, 1.3), "never at 4 sizes from 224² on"),
        ((1.0, 3.0, 3.0, 3.0), "from 384² on: faster at 384², 640², 1280²; slower at 224²"),
        ((3.0, 3.0, 3.0), "faster at 224², 384², 640²"),
    ):
        alike = {"ends": (1.0, 1.0)}
        rows = [row(VITTT, None, size, 2.0 + size / 1e6, 1.0, **alike) for size in sizes]
        rows += [row(DEIT, "unfused", size, ms, 1.0, **alike) for size, ms in zip(sizes, theirs, strict=False)]
        checkout.speed(*rows, device=CPU, path="cpu_made_up")
        assert f"| {words} |" in list_speeds(checkout.report())


def test_times_of_the_host_are_marked_and_give_nothing(checkout):
    rows = [row(VITTT, None, size, ms, 6.0, device=checkout.H200) for size, ms in ((224, 11.0), (1280, 12.0))]
    rows += [row(DEIT, "fused", size, ms, 5.0, device=checkout.H200) for size, ms in ((224, 3.0), (1280, 14.0))]
    checkout.speed(*rows, device=checkout.H200, path="a_gpu")
    text = list_speeds(checkout.report())
    assert f"| {VITTT} | 11.0 (host) | 12.0 (host) |" in text and "| 3.00 (host?) | 14.0 (host?) |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| T | deit_fused")]
    assert HOST in line and "-20.0 %" in line and "×" not in line and "faster" not in line


def test_accuracies_and_times_are_in_a_row_for_each_model(checkout):
    assert over_resolution(checkout.report()) == ""  # without a record there is no section
    rows = []
    for family, shift in (("vittt", 0), ("deit", 20)):
        for size, top1, time in ((64, 90.0, 1.0), (96, 50.125, 2.5)):
            row = {"family": family, "model": f"{family}_nano", "image_size": [size, size], "latency_ms": time}
            rows.append({**row, "top1_percent": top1 - shift})
    about = {"data_set": "digits", "split": "test", "held_out_images": 359, "train_image_size": 64, "evaluated": rows}
    checkout.record("resolution", about)
    text = over_resolution(checkout.report())
    assert "| model | 64² (1×) | 96² (1.5×) |" in text and "on the 359 test images of digits" in text
    assert "| vittt_nano | 90.0 | 50.1 |" in text and "| deit_nano | 70.0 | 30.1 |" in text
    assert text.count("| 1.00 | 2.50 |") == 2
    assert f"`results/resolution/metrics.json`: {checkout.CPU}" in text


@pytest.mark.parametrize(("warmup", "shown"), [(3, "| 3 |"), (2, "| 3, trained with 2 |")])
def test_a_search_whose_choice_nobody_trains_with_says_so(checkout, warmup, shown):
    """The highest of three scores is of the largest rate tried and of a warm-up of three epochs."""
    checkout.write("profiles/mini.yaml", f"pretrain: {{nano: {{optim: {{lr: 0.004, warmup_epochs: {warmup}}}}}}}\n")
    tried = ((0.002, 1, 90.0), (0.004, 2, 97.7), (0.004, 3, 98.6))
    trials = [dict(zip(("lr", "warmup_epochs", "top1_percent"), each), diverged=False) for each in tried]
    metrics = {"cell": "pretrain.nano", "split": "tune", "score": "top1_percent", "seed": 7, "rule": "the highest"}
    metrics |= {"trials": trials, "chosen": {"lr": 0.004, "warmup_epochs": 3}}
    checkout.record("replications/cpu/tune/nano", metrics)
    row = next(line for line in checkout.runs().splitlines() if line.startswith("| `pretrain.nano`"))
    assert f"| 0.004, at the edge {shown} 0.002 (1): 90.0; 0.004 (3): 98.6 |" in row
