"""CSV files that this project did not write."""

import pytest

from repro.core.csvfile import read_typed_csv
from repro.core.errors import UserError


@pytest.mark.parametrize("content", [b"a,b\n1,\xff\n", b"a,b\n1," + b"2" * 200_000])
def test_a_file_that_is_no_csv_is_named(tmp_path, content):
    """A byte that is no UTF-8, and a value beyond the limit of the csv module."""
    (file := tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.csv: not valid CSV: .*; move the file away"):
        read_typed_csv(file, {})
