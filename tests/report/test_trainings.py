"""What an expression may ask of a training, and how searches are shown."""

import pytest

from repro.report.results import Training

MESA = {"weight": 1.0}
INIT = {"weights": "results/pretrain/teacher/weights.safetensors"}


@pytest.mark.parametrize(
    ("asked", "about", "fits"),
    [
        ((), {"epochs": 12, "mesa": MESA, "image_size": 224}, True),
        ((224,), {"image_size": 224}, True),
        ((224,), {"image_size": 384}, False),
        ((224,), {}, True),  # a cell of a params file says it elsewhere
        (("36 epochs",), {"epochs": 36}, True),
        (("36 epochs",), {"epochs": 12}, False),
        (("MESA",), {"mesa": MESA}, True),
        (("MESA",), {"mesa": None}, False),
        (("no MESA",), {}, True),
        (("no MESA",), {"mesa": MESA}, False),
        ((224, "no MESA"), {"image_size": 384}, False),
        (("linearized",), {"init": INIT, "freeze": False}, True),
        (("linearized",), {"init": INIT, "freeze": True}, False),
        (("linearized",), {"init": None}, False),  # from random weights
        (("linearized, frozen",), {"init": INIT, "freeze": True}, True),
        (("linearized, frozen",), {"init": INIT}, False),
    ],
)
def test_a_training_fits(asked, about, fits):
    assert Training.parse(asked).fits(about) == fits


@pytest.mark.parametrize("asked", ["mesa", "36", "36 epoch", "without MESA", "frozen"])
def test_another_word_is_refused(asked):
    with pytest.raises(ValueError, match=f"'{asked}': no training; write a side in pixels"):
        Training.parse([asked])


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
