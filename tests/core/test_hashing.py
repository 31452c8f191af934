"""The hash of sources: what changes it, and what does not; and the stated hash of a file."""

import hashlib

import pytest

from repro.core.errors import UserError
from repro.core.hashing import hash_file, hash_sources, require_hash

SOURCE = '''"""Says what this is."""

import os  # for paths


class Box:
    """Holds things."""

    size: int = 3  # how many

    def fill(self, things):
        """Put things in.

        # not a comment
        """
        text = "# no comment"
        more = f"{self.size:>{3}} # of {len('#')}"
        return [
            text,
            more,
        ]

    def only_says(self):
        """Nothing else."""


def join(a, b): "One line."; return f"""
{a}  # kept

{b}"""
'''


def hash_of(folder, source, **options):
    (folder / "m.py").write_text(source, encoding="utf-8")
    return hash_sources(folder, ["m.py"], **options)


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("for paths", "for names", True),
        ("  # how many", "", True),
        ("import os  # for paths", "# first\nimport os", True),
        ("Says what this is.", 'Says "what" it is: é', True),
        ('"""Says what this is."""', "", True),
        ("# not a comment", "a line", True),
        ('"""Nothing else."""', '("Nothing "  # in two parts\n         "else.")', True),
        ("One line.", "One line; still.", True),
        ('"One line."; ', "", True),
        ("\n\n\n", "\n \n", True),
        ("int = 3  #", "int = 3 \\\n  #", True),
        ("        ]", "        ]  ", True),
        ("    ", "  ", True),
        ("[\n            text,\n            more,\n        ]", "[text, more,]", True),
        ("= 3", "= 4", False),
        ('"# no comment"', '"# a comment"', False),
        ("# of", "#  of", False),
        ("# kept", "# changed", False),
        ("# kept\n\n", "# kept\n", False),
        ("# kept\n", "# kept \n", False),
        ("{self.size:>{3}}", "{self.size:>{4}}", False),
        ("{self.size:>{3}}", "{self.size :>{3}}", False),  # `{x = }` prints its own spaces, so those in braces count
        ("            more,\n", "", False),
        ("        return [", '        """No docstring."""\n        return [', False),
        ("\n    def only_says", "\ndef only_says", False),
        ('        """Nothing else."""', "        pass", False),
        ('"One line."; return', "return (); return", False),
    ],
)
def test_an_edit_changes_the_hash_where_it_has_a_meaning(tmp_path, old, new, is_same):
    assert old in SOURCE
    assert (hash_of(tmp_path, SOURCE.replace(old, new)) == hash_of(tmp_path, SOURCE)) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('def f(): "Says."\nx = 1\n', "def f(): x = 1\n"),  # the line break after a lone docstring ends the function
        ('def f():\n    "Says."\n    x = 1\n', 'def f():\n    "Says."\nx = 1\n'),
        ("if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n"),
        ("x = 'a' 'b'\n", "x = 'a', 'b'\n"),
        ('x = "a\\\nb"\n', 'x = "a b"\n'),
        ("if a:\n    'text'\n", "if a:\n    'other'\n"),  # no docstring, so that it counts
    ],
)
def test_programs_that_do_other_things_have_other_hashes(tmp_path, one, other):
    assert hash_of(tmp_path, one) != hash_of(tmp_path, other)


def test_the_hash_is_of_tokens_that_every_version_of_python_reads_alike(tmp_path):
    """The tokens by hand; Python 3.12 reads the formatted string in parts."""
    source = '"""Says."""\ndef f(a):\n    "Says."\n    return f"{a + 1:>{2}}" f\'#{"x"}\' % a  # says\n'
    strings = ['f"{a + 1:>{2}}"', "f'#{\"x\"}'"]
    tokens = [*"def f ( a ) :".split(), "\n", " in", "return", *strings, "%", "a", "\n", " out"]
    content = hashlib.sha256("\0".join(tokens).encode()).digest()
    assert hash_of(tmp_path, source) == hashlib.sha256(b"m.py\0" + content).hexdigest()[:16]


def test_whole_files_and_files_in_other_languages_count_as_they_are(tmp_path):
    assert hash_of(tmp_path, "x = 1  # one\n", whole=["m.py"]) != hash_of(tmp_path, "x = 1\n", whole=["m.py"])
    (tmp_path / "page.html").write_text("a # b\n")
    before = hash_sources(tmp_path, ["page.html"])
    (tmp_path / "page.html").write_text("a\n")
    assert hash_sources(tmp_path, ["page.html"]) != before


def test_eight_digits_of_a_hash_are_enough_and_seven_are_not(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    digits = hash_file(file, digits=64)
    for count in (8, 16, 64):
        require_hash(file, digits[:count])
    for stated in (digits[:7], digits[:7] + ("0" if digits[7] != "0" else "1")):
        with pytest.raises(UserError):
            require_hash(file, stated)
