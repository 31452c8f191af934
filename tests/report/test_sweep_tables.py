"""A sweep on the page: its matrices, its comparisons and withheld ratios, and what does not count twice."""

from repro.core.record import write_record
from repro.report.markdown import render_blocks
from repro.report.measured import list_speeds

CPU = "cpu: Made-up, 2 threads"
VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"


def row(model, attention, size, latency, memory, **more):
    shared = {"batch_size": 1, "dtype": "fp32", "device": CPU, "mode": "infer", "compile": False, "backend": "torch"}
    about = {
        "row": f"{model}@{size}",
        "model": model,
        "attention": attention,
        "image_size": [size, size],
        "options": {},
    }
    about |= {"attention_reason": "none to choose", "attention_kernel": "flash", "num_params": 7, "run": 1}
    measured = {"latency_ms": latency, "latency_ms_ci95": None, "peak_memory_mib": memory, "samples_ms": []}
    measured |= {"throughput_img_per_s": None if latency is None else 1e3 / latency, "macs_g": size**2 / 1e5}
    return {**shared, **about, **measured, "status": "ok", "reason": "made up", **more}


GROUP = {"batch_size": 1, "dtype": "fp32", "mode": "infer", "compile": False}
RATIO = {"size": "T", "image_size": 512, "speedup": 4.0, "memory_saved_percent": 73.8}
RATIO |= {"crossover": "from", "crossover_image_size": 440.4}
NO_RATIO = dict.fromkeys(("image_size", "speedup", "memory_saved_percent", "crossover", "crossover_image_size"))
POWERS = {"macs_exponent": 1.0, "latency_exponent": 1.123, "memory_exponent": 0.5}


def section(checkout, rows, **concluded):
    """The section of a sweep whose record holds these rows, and what the sweep concludes from them."""
    identity = {"device": CPU, "dtype": "fp32", "backend": "torch"}
    metrics = {"rows": rows, "left_out": [], "gates": [], "compared": [], "growth": [], **concluded}
    write_record(checkout.paths.results / "measured" / "cpu_made_up", metrics, identity, 1.0, name="efficiency")
    return render_blocks(list_speeds(checkout.report()))


def test_matrices_comparisons_and_growth(checkout):
    rows = [row(VITTT, None, size, size**2 / 1e3, size**2 / 1e4) for size in (512, 1024)]
    rows += [row(DEIT, "unfused", 512, 1048.576, 100.0), row(DEIT, "unfused", 1024, None, None, status="oom")]
    rows += [row(VITTT, None, 512, 512**2 / 1e3, 512**2 / 1e4, run=2), row(VITTT, None, 512, 9.0, 9.0, compile=True)]
    never = {"crossover": "never", "crossover_image_size": None, "reason": "never faster"}
    compared = [
        {**GROUP, **RATIO, "against": "deit"},
        {**GROUP, **RATIO, "against": "vit3", **never},
        {**GROUP, **NO_RATIO, "size": "T", "against": "vim", "reason": "its operator is too slow"},
        {**GROUP, **RATIO, "against": "vrwkv", "batch_size": 64},
    ]
    growth = [{**GROUP, **POWERS, "model": VITTT, "attention": "none", "image_sizes": [512, 1024]}]
    growth += [{**GROUP, **POWERS, "model": DEIT, "attention": "unfused", "image_sizes": [512]}]
    text = section(checkout, rows, compared=compared, growth=growth)
    assert f"| {VITTT} | 262 | 1049 |" in text
    assert f"| {DEIT}, unfused | 1049 | oom |" in text
    assert "| T | deit | 512² | 4.00× | 73.8 % | from 440² |" in text
    assert "| T | vit3 | 512² | 4.00× | 73.8 % | never |" in text
    assert "| T | vim | – | no ratio: its operator is too slow | – | – |" in text
    assert "vrwkv" not in text  # of another batch, which has no rows here
    assert f"| {VITTT} | 1.00 | 1.12 | 0.500 |" in text
    assert text.count("| 1.12 |") == 1  # one size shows no growth
    assert f"### {CPU}, batch 1, fp32, infer\n" in text and f"### {CPU}, batch 1, fp32, infer, compiled\n" in text


def test_noisy_rows_are_marked_and_give_no_ratio(checkout):
    """DeiT's interval is half as wide as its median is long."""
    rows = [
        row(VITTT, None, 512, 262.0, 26.2),
        {**row(DEIT, "unfused", 512, 1000.0, 100.0), "latency_ms_ci95": [750.0, 1250.0]},
    ]
    withheld = {"speedup": None, "speedup_reason": f"{DEIT} at 512 is noisy: spread"}
    withheld |= {"crossover": None, "crossover_image_size": None}
    reasons = {"crossover_reason": "noisy", "crossover_image_size_reason": "noisy"}
    text = section(checkout, rows, compared=[{**GROUP, **RATIO, "against": "deit", **withheld, **reasons}])
    assert f"| {VITTT} | 262 |" in text and f"| {DEIT}, unfused | 1000 (noisy) |" in text
    assert f"| T | deit | 512² | no ratio: {DEIT} at 512 is noisy: spread | 73.8 % | – |" in text


def test_what_was_measured_twice_counts_once(checkout):
    section(checkout, [row(VITTT, None, 512, 10.0, 1.0), row(VITTT, None, 512, 20.0, 1.0, run=2)])
    (rows,) = checkout.results().speed_rows.values()
    assert [found["latency_ms"] for found, _ in rows] == [15.0]
