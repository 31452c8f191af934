"""Data that tests of several tasks read."""

import pytest

from tests.data_sets.made import write_ade20k


@pytest.fixture(scope="session")
def ade20k(tmp_path_factory):
    """A tree in ADE20K's format, with five classes, four training images and three others; not to be changed."""
    root = write_ade20k(tmp_path_factory.mktemp("ade"), classes=5)
    return write_ade20k(root, classes=5, split="validation", pairs=3)
