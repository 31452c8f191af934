"""Accuracy and time beyond the image size of the training, as the page shows them."""

from repro.report.markdown import render_blocks
from repro.report.measured import over_resolution

SIZES = {64: (90.0, 1.0), 96: (50.125, 2.5)}


def test_accuracies_and_times_stand_in_a_row_for_each_model(checkout):
    assert over_resolution(checkout.report()) == []  # without a record there is no section
    rows = []
    for family, shift in (("vittt", 0), ("deit", 20)):
        for size, (top1, time) in SIZES.items():
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
