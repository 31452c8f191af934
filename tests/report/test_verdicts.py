"""Every status from a made-up ledger: a case that gets it, and a near case that does not, by chosen numbers."""

import pytest

from repro.report.comparison import count_relations, list_differences, list_kinds, list_ways, not_measurable
from repro.report.measured import format_scores
from repro.report.verdicts import STATUSES

MODEL = "toy_tiny"
MISSING = 'params_m("toy_small@224")'  # which is not counted
EXPLANATION = "  - {ids: [text.x_v], text: 'it gives {computed}', %s}\n"
STATEMENT = "  - {id: text.s, place: Section 1, says: s, kind: statement, %s}\n"


def count(checkout, num_params: int = 12_000_000, macs_g: float = 1.0, paper_convention: float | None = None) -> None:
    """One row of counts, of MODEL at 224×224."""
    row = {"model": MODEL, "options": {}, "image_size": [224, 224], "num_params": num_params, "macs_g": macs_g}
    row |= {} if paper_convention is None else {"macs_g_paper_convention": paper_convention}
    checkout.record("complexity", {"rows": {"toy": row}, "saved_at_1280_percent": {}, "dwconv_params_m": {}})


def claim(printed: str = "12.0", kind: str = "count", name: str = "text.x", **fields: str) -> str:
    """A claim with one number, whose entry is `text.x_v`; without `ours`, ours is the parameters of MODEL."""
    fields = {"ours": f'params_m("{MODEL}@224")', **fields}
    listed = "".join(f"\n        {key}: {value!r}" for key, value in fields.items() if value)
    return f"  - id: {name}\n    place: Section 1\n    says: s\n    kind: {kind}\n    values:\n      v:\n        printed: {printed}{listed}\n"


@pytest.mark.parametrize(("classes", "top5"), [(2, False), (5, False), (10, True)])
def test_no_interval_of_a_share_passes_100_and_top5_needs_more_than_five_classes(classes, top5):
    metrics = {"classes": classes, "top1_percent": 81.7, "top1_ci95_percent": [59.3, 104.0], "top5_percent": 100.0}
    text = format_scores(metrics, {"top1_percent": "top-1", "top5_percent": "top-5"})
    assert "[59.3, 100.0]" in text and ("top-5" in text) == top5


def judge(checkout, *claims: str, more: str = "", **about):
    return checkout.report_on(f"claims:\n{''.join(claims)}{more}", **about).verdicts


def test_what_was_fitted_or_declared_and_what_is_arithmetic_is_no_match(checkout):
    count(checkout, paper_convention=5.0)
    convention, declared = f'macs_g_paper_convention("{MODEL}@224")', {"ours": "", "declared": "constant()"}
    fitted = {"ours": convention, "fitted": "one term was fitted to this row"}
    cases = {
        "said": ("5.0", fitted, "fitted"),
        "unsaid": ("5.0", {"ours": convention}, "fitted"),  # whoever writes the ledger cannot forget it
        "of_fitted": ("10.0", {"ours": "2 * text.unsaid_v"}, "fitted"),
        "other": ("5.1", fitted, "differs, unexplained"),
        "counted": ("12.0", {}, "matched"),
        "twice": ("24.0", {"ours": "2 * text.counted_v"}, "matched"),
        "declared": ("12", declared, "declared"),
        "declared_otherwise": ("13", declared, "differs, unexplained"),
        "arithmetic": ("196", {"ours": "(224 / 16) ** 2"}, "declared"),
        "of_arithmetic": ("392", {"ours": "2 * text.arithmetic_v"}, "declared"),
        "setting": ("12", {"kind": "setting"}, "declared"),
        "by_formula": ("12", {"ours": "constant()"}, "matched"),
    }
    claims = [claim(printed, name=f"text.{name}", **fields) for name, (printed, fields, _) in cases.items()]
    verdicts = judge(checkout, *claims, formulas=lambda: {"constant": lambda: 12})
    for name, (_, _, status) in cases.items():
        assert verdicts[f"text.{name}_v"].status == status, name


def test_declared_is_asked_only_where_ours_has_no_number(checkout):
    declared = claim(declared="12")
    assert judge(checkout, declared)["text.x_v"].status == "declared"
    count(checkout)
    assert judge(checkout, declared)["text.x_v"].status == "matched"
    count(checkout, 13_000_000)
    assert judge(checkout, declared)["text.x_v"].status == "differs, unexplained"


@pytest.mark.parametrize(
    ("evidence", "explanation"),
    [
        ('shows: "10 + 2"', "it gives 12"),
        ('shows: "10 + 2.06"', "it gives 12.06"),  # cut to 12.0
        ('shows: "10 + 2.1"', None),
        (f"shows: 'params_m(\"{MODEL}@224\") - 1'", "it gives 12"),  # 13 - 1, by our own counts
        (f"shows: 'params_m(\"{MODEL}@224\") > 12.9'", "it gives {computed}"),
        (f"shows: 'params_m(\"{MODEL}@224\") > 13.1'", None),
        ("shows: 'params_m(\"toy_small@224\") > 1'", None),  # it was not counted
        ("source: 'A. Author (2020), Table 1'", "it gives {computed} (A. Author (2020), Table 1)"),
    ],
)
def test_an_explanation_is_given_only_with_its_evidence(checkout, evidence, explanation):
    """Also below one that fails; and none is given where ours matches."""
    listed = f"explanations:\n{EXPLANATION % 'shows: 10 + 5'}{EXPLANATION % evidence}"
    count(checkout, 13_000_000)
    verdict = judge(checkout, claim(), more=listed)["text.x_v"]
    status = "differs, explained" if explanation else "differs, unexplained"
    assert (verdict.status, verdict.explanation) == (status, explanation)
    count(checkout)
    matched = judge(checkout, claim(), more=listed)["text.x_v"]
    assert (matched.status, matched.explanation) == ("matched", None)


def test_a_number_explains_no_statement(checkout):
    count(checkout)
    false = STATEMENT % f"ours: 'params_m(\"{MODEL}@224\") < 1'"
    why = "explanations: [{ids: [text.s], text: why, shows: %s}]\n"
    assert judge(checkout, false, more=why % "1 < 2")["text.s"].status == "differs, explained"
    with pytest.raises(ValueError, match="text.s: an explanation of a statement `shows` a condition, and no number"):
        judge(checkout, false, more=why % "1 + 2")


@pytest.mark.parametrize(
    ("printed", "equals", "violated"),
    [
        ("3.0", "1.5 + 1.5", False),
        ("3.0", "1.5 + 1.7", True),
        ("3.0", "1.5 + 1.54", False),  # 3.04 rounds to 3.0
        ("3.0", "1.5 + 1.59", False),  # 3.09 is cut to 3.0
        # over printed numbers the digits that were cut off count: 1.5 is 1.45 to 1.6, so its double is 2.9 to 3.2
        ("3.1", "2 * text.base_v", False),
        ("2.9", "2 * text.base_v", False),
        ("3.3", "2 * text.base_v", True),
        ("2.8", "2 * text.base_v", True),
    ],
)
def test_a_relation_is_violated_only_where_no_rounding_explains_it(checkout, printed, equals, violated):
    count(checkout)
    base = claim("1.5", name="text.base", ours=MISSING)
    related = {"equals": equals, "because": "it is {computed}"}
    asked = claim(printed, ours=MISSING, **related)
    verdict = judge(checkout, base, asked)["text.x_v"]
    assert (verdict.checks, verdict.violations) == (1, int(violated))
    expected = ("paper inconsistent", "⚠") if violated else ("not measured", "–")
    assert (verdict.status, verdict.status.mark) == expected
    assert (verdict.evidence or "").startswith("it is ") == violated
    # a contradiction goes before a match, which stays visible
    verdict = judge(checkout, base, claim(printed, ours=f'{printed} + 0 * params_m("{MODEL}@224")', **related))
    assert verdict["text.x_v"].compared == "matched"
    assert verdict["text.x_v"].status == ("paper inconsistent" if violated else "matched")


def test_what_nobody_can_have_measured_is_not_compared(checkout):
    count(checkout)
    about = {"because": "it takes {computed} GB of 48"}
    asked = {"cannot": "62.9 < 48", "can": "31.5 < 48"}
    verdicts = judge(checkout, *(claim(name=f"text.{name}", measurable=text, **about) for name, text in asked.items()))
    found = verdicts["text.cannot_v"]
    assert (found.status, found.ours, found.evidence) == ("not measurable as described", None, "it takes 62.9 GB of 48")
    assert (verdicts["text.can_v"].status, verdicts["text.can_v"].evidence) == ("matched", None)


def test_how_each_number_can_be_made_again(checkout):
    """From a record of the graph, from one outside it, from none, or not at all."""
    count(checkout)
    losses = {"inner_loss_after": 2.0, "inner_loss_before": 1.0}
    checkout.record("replications/cpu/probes/p", {"probe": "ascent", "probed": losses})
    report = checkout.report_on(
        "claims:\n"
        + claim()
        + claim("100", name="text.y", ours='raised_percent("ascent")')
        + claim(name="text.z", ours=MISSING)
        + claim(name="text.w", ours="", out_of_scope="no model of images")
    )
    rows = list_ways(report).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["1"] * 4


def test_a_setting_of_a_profile_is_made_again_by_the_report_and_a_cell_of_another_profile_by_a_run(checkout):
    checkout.write("profiles/mini.yaml", "pretrain: {}\n")
    checkout.write("profiles/paper.yaml", "visualize: {images: 300}\n")
    checkout.train("pretrain/t", "vittt_tiny_patch16_224", "imagenet", top1=77.7, held_out_images=50_000)
    report = checkout.report_on(
        "claims:\n"
        + claim("300", name="text.x", ours='profile_setting("visualize", "images")')
        + claim("77.7", name="text.y", ours='accuracy("imagenet", "vittt_tiny_patch16_224", "top1_percent")')
    )
    assert [row.split(" | ")[1] for row in list_ways(report).splitlines()[2:]] == ["1", "1"]


def test_every_status_can_be_had_and_is_counted(checkout):
    """Also in the page's counts and its sections on what differs and what is not measurable."""
    count(checkout, 12_060_000, paper_convention=5.0)
    report = checkout.report_on(
        "claims:\n"
        + claim("12.1", name="text.a")
        + claim("12.0", name="text.b")
        + claim("5.0", name="text.c", ours=f'macs_g_paper_convention("{MODEL}@224")')
        + claim("4", name="text.d", ours="2 + 2")
        + claim("13.0", name="text.e")
        + claim("14.0", name="text.f")
        + claim("15.0", name="text.g", equals="1 + 1")
        + claim("16.0", name="text.h", measurable="2 < 1", because="no")
        + claim("17.0", name="text.i", ours=MISSING)
        + claim("18.0", name="text.j", ours="", out_of_scope="no model of images")
        + "explanations:\n  - {ids: [text.e_v], text: 'ours lacks {computed}', shows: 12 + 1}\n"
    )
    assert [verdict.status for verdict in report.all] == list(STATUSES)
    text = list_kinds(report)
    assert "| **all** |" + " **1** |" * 10 + " **10** |" in text
    assert [count_relations(report, what) for what in ("checked", "hold", "broken")] == [1, 0, 1]
    rows = list_differences(report).splitlines()[-2:]
    assert rows == ["| text.e_v | 13.0 → 12.06 | ours lacks 13 |", "| text.f_v | 14.0 → 12.06 | **unexplained** |"]
    assert not_measurable(report).splitlines()[-1] == "| Section 1 | **16.0**: s | no |"
    assert not_measurable(checkout.report_on("claims:\n" + claim())) == ""
