from pathlib import Path

import pytest
from PIL import Image

CLASSES = {"ant": 5, "bee": 9, "cat": 6}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small tree of class folders: 20 train and 20 val images of 16x16, each with a grey value of 10 times its place
    in sorted order.
    """
    folder = tmp_path / "set"
    for split in ("train", "val"):
        place = 0
        for name, count in sorted(CLASSES.items()):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                grey = (10 * place,) * 3
                Image.new("RGB", (16, 16), grey).save(folder / split / name / f"{i:03d}.png")
                place += 1
    return folder
