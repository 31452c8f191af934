"""`repro profile`: what it shows; and it never loses edited parameters."""

import shutil

import pytest

from repro.core.config import load_yaml
from repro.core.errors import UserError
from stages import profile
from tests.conftest import ROOT


@pytest.fixture
def checkout(bare_checkout):
    shutil.copy(ROOT / "profiles" / "mini.yaml", bare_checkout / "params.yaml")
    return bare_checkout


def test_the_committed_parameters_are_the_mini_profile():
    assert load_yaml(ROOT / "params.yaml") == load_yaml(ROOT / "profiles" / "mini.yaml")


def test_use_writes_and_show_names_the_active_one(checkout, capsys):
    """A comment is no edit."""
    params = checkout / "params.yaml"
    params.write_text("# a remark\n" + params.read_text())
    profile.use("paper")
    assert params.read_bytes() == (checkout / "profiles" / "paper.yaml").read_bytes()
    profile.show(None)
    assert capsys.readouterr().out.endswith("active: paper\nprofiles: cifar10, digits, mini, night, paper\n")
    profile.show("paper")
    assert capsys.readouterr().out == params.read_text()


def test_edited_parameters_are_not_overwritten(checkout, capsys):
    params = checkout / "params.yaml"
    edited = params.read_text().replace("seed: 0", "seed: 1", 1)
    params.write_text(edited)
    profile.show(None)
    assert "active: none" in capsys.readouterr().out
    with pytest.raises(UserError, match="would be lost; keep a copy"):
        profile.use("paper")
    assert params.read_text() == edited
    profile.use("paper", force=True)
    assert load_yaml(params) == load_yaml(checkout / "profiles" / "paper.yaml")
