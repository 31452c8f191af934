"""The stated hash of a file."""

import pytest

from repro.core.errors import UserError
from repro.core.hashing import hash_file, require_hash


def test_eight_digits_of_a_hash_are_enough_and_seven_are_not(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    digits = hash_file(file, digits=64)
    for count in (8, 16, 64):
        require_hash(file, digits[:count])
    for stated in (digits[:7], digits[:7] + ("0" if digits[7] != "0" else "1")):
        with pytest.raises(UserError):
            require_hash(file, stated)
