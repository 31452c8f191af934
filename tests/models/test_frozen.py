"""A frozen model notices every write to its weights that PyTorch counts, and stays frozen where there is none."""

import copy
import pickle

import pytest
import torch

from repro.models import fused_block
from tests.models.helpers import small_vittt
from tests.models.writes import NO_WRITES, UNCOUNTED, WRITES, require_kept, require_seen, run


@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(change):
    require_seen(small_vittt(), change)


@pytest.mark.parametrize("change", NO_WRITES.values(), ids=NO_WRITES)
def test_what_writes_nothing_keeps_it(change):
    require_kept(small_vittt(), change, fused_block.LoopConstants)


@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
def test_a_write_that_nobody_counts_needs_another_freeze(write):
    """In evaluation: neither `_version` nor the address moves. In training the write is seen, see `WRITES`."""
    model, images = small_vittt().freeze(), torch.randn(1, 3, 48, 48)
    kept, weight = model.blocks[0].frozen, model.blocks[0].mixer.in_proj.weight
    known = weight._version, weight.data_ptr()
    write(model)
    run(model, images)
    assert model.blocks[0].frozen is kept and known == (weight._version, weight.data_ptr())
    assert torch.equal(run(model.freeze(), images), run(copy.deepcopy(model), images))


def test_a_copy_is_not_frozen():
    model, images = small_vittt().freeze(), torch.randn(1, 3, 48, 48)
    expected = run(model, images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0].frozen is None and torch.equal(run(other, images), expected)
    block = model.blocks[0]
    assert fused_block.find_frozen(copy.copy(block)) is None and fused_block.find_frozen(block)


def test_weights_whose_writes_are_not_counted_are_refused():
    with torch.inference_mode():
        model = small_vittt()
    with pytest.raises(ValueError, match=r"^dwconv.weight is an inference tensor, whose writes nobody counts; "):
        model.freeze()
