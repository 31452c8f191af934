"""The closed forms of VMamba and MambaVision against counts of their official modules, and one block of each by hand."""

import pytest

from repro.measure.flops import cost
from repro.papers import load_primary
from repro.papers.vision_ttt.closed_forms import MODELS, closed_form_macs_g, list_closed_forms
from repro.report.arithmetic import agreement

# parameters and, in fvcore's convention, multiply-adds of the official modules
OFFICIAL = {
    "vmamba_t": (30_249_064, 4_905_609_984),
    "vmamba_s": (50_147_752, 8_715_774_720),
    "vmamba_b": (88_557_800, 15_358_944_256),
    "mambavision_t": (31_794_248, None),
    "mambavision_s": (50_140_584, None),
    "mambavision_b": (97_685_288, None),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_they_count_what_the_official_modules_have(name):
    num_params, macs = OFFICIAL[name]
    found = list_closed_forms()[name]
    assert found["num_params"] == num_params
    assert macs is None or found["macs"] == macs


def test_mambavision_counts_convolutions_and_linear_layers():
    """In units of 1e9, T's, S's and B's 2-D convolutions and linear layers apart."""
    official = {"mambavision_t": (1.7991, 2.6600), "mambavision_s": (3.7066, 3.7739), "mambavision_b": (6.4956, 8.4583)}
    for name, (convolutions, linear) in official.items():
        counted = MODELS[name].count_macs()
        assert round(counted["convolutions"] / 1e9, 4) == convolutions and round(counted["linear_layers"] / 1e9, 4) == linear


@pytest.mark.parametrize("name", OFFICIAL)
def test_they_count_what_the_models_count(name):
    """The models' own terms were written apart from these."""
    row = load_primary().ledger.table("table1").records[name]
    counted = cost(row["model"], {}, (224, 224))
    expected = {"num_params": counted.num_params, "macs": sum(counted.paper_terms.values())}
    assert row["model"].startswith(name.removesuffix(name[-1])) and list_closed_forms()[name] == expected


def test_they_are_the_cells_of_table_1():
    entries, by_truncation = load_primary().ledger.entries, set()
    for name in MODELS:
        found = agreement(closed_form_macs_g(name), entries[f"table1.{name}.macs_g"].printed)
        assert found, (name, float(closed_form_macs_g(name)))
        by_truncation |= {name} if found == "truncation" else set()
        assert agreement(list_closed_forms()[name]["num_params"] / 1e6, entries[f"table1.{name}.params_m"].printed) == "rounding"
    assert by_truncation == {"mambavision_t"}


def test_blocks_by_hand():
    # VMamba-T, first stage, C = E = 96, R = 6: in and out 2·9216, depth-wise 864, X 4·8·96, T 4·96·6, bias, A and D 3·384,
    # LayerNorm of the scan 192, MLP 2·36864 + 384 + 96, two LayerNorms 384
    assert MODELS["vmamba_t"].count_block_params(96) == 18_432 + 864 + 3_072 + 2_304 + 1_152 + 192 + 74_208 + 384
    # MambaVision-T, third stage, C = 320, E = 160, R = 20: in and out 2·102400, Conv1d 960, X 36·160, T 20·160, bias 160, A 1280,
    # D 160; MLP 819200 + 1280 + 320, two LayerNorms 1280
    mlp_and_norms = 819_200 + 1_600 + 1_280
    scan = 204_800 + 960 + 5_760 + 3_200 + 160 + 1_280 + 160
    assert MODELS["mambavision_t"].count_block_params(320, scan=True) == scan + mlp_and_norms
    assert MODELS["mambavision_t"].count_block_params(320, scan=False) == 4 * 102_400 + 4 * 320 + mlp_and_norms


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="no closed form of 'vmamba_l'"):
        closed_form_macs_g("vmamba_l")
