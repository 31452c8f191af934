"""What an expression may ask of a training."""

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
