"""Accuracy and time beyond the image size of the training, as the page shows them."""

from repro.report.markdown import render_blocks
from repro.report.measured import over_resolution

SIZES = {64: (90.0, 1.0), 96: (50.125, 2.5)}


def record(checkout, noisy=()):
    rows = [
        {
            "family": family,
            "model": f"{family}_nano",
            "image_size": [size, size],
            "top1_percent": top1 - shift,
            "latency_ms": time,
            "noisy": list(noisy) if size == 96 else [],
        }
        for family, shift in (("vittt", 0), ("deit", 20))
        for size, (top1, time) in SIZES.items()
    ]
    about = {"data_set": "digits", "split": "test", "held_out_images": 359, "train_image_size": 64, "evaluated": rows}
    checkout.record("resolution", about)


def test_without_a_record_there_is_no_section(checkout):
    assert over_resolution(checkout.report()) == []


def test_accuracies_and_times_stand_in_a_row_for_each_model(checkout):
    record(checkout, noisy=["spread"])
    (section,) = over_resolution(checkout.report())
    text = render_blocks(section.blocks)
    assert (
        "| model | 64² (1×) | 96² (1.5×) |" in text
        and "trained at 64² pixels with one seed, on the 359 test images of digits" in text
    )
    assert "| vittt_nano | 90.0 | 50.1 |" in text and "| deit_nano | 70.0 | 30.1 |" in text
    assert text.count("| 1.00 | 2.50 (noisy) |") == 2
    assert (
        f"`results/resolution/metrics.json`: {checkout.CPU}" in text and "](resolution/accuracy_and_time.png)" in text
    )
