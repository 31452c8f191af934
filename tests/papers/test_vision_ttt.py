"""The room of Vision-TTT: its formulas by hand, its variants, and that it loads without the report's pages."""

import subprocess
import sys
from fractions import Fraction

from repro.papers import find_rooms, load_papers, load_primary
from repro.papers.vision_ttt.formulas import vim_blocks_g, vit_g, vittt_g, vittt_trivial_g


def test_formulas_by_hand():
    # Vittt-T at 224: 12·196·(6·36864 + 6·192·64 + 4·16·192 + 3·192·512) + 196·768·192 + 192000
    assert vittt_g(192, 196) == Fraction(12 * 196 * 602_112 + 28_901_376 + 192_000, 10**9)
    # its Conv1d of both directions, DWConv and learning rates: 2·8·192 + 9·192 + 192·3 per token and layer
    assert vittt_trivial_g(192, 196) == Fraction(12 * 196 * (3072 + 1728 + 576), 10**9)
    # DeiT-T has 197 tokens: 12·(12·197·36864 + 2·197²·192) + 196·768·192 + 192000
    assert vit_g(192, 197) == Fraction(12 * (87_146_496 + 14_902_656) + 28_901_376 + 192_000, 10**9)
    # Vim-T: 24·197·(6·36864 + 18·384·16), the number that the paper cuts to 1.5
    assert vim_blocks_g(192, 197, 18) == Fraction(24 * 197 * (221_184 + 110_592), 10**9)


def test_every_question_is_about_the_papers_own_model():
    """23 of 24 counts of parameters and 2 of 25 of FLOPs is what an audit by hand found; the numbers of entries are
    its.
    """
    ledger = load_primary().ledger
    found = [question.find(ledger) for question in load_primary().questions]
    assert [len(names) for names in found[:2]] == [24, 25]
    assert not any("vim" in name or "deit" in name or "vit3" in name for names in found for name in names)
    assert all(name in ledger.entries for question in load_primary().questions for name in question.shown)


def test_rooms_are_found_by_lying_there_and_load_nothing_heavy():
    assert list(load_papers()) == ["vision_ttt", "kv_binding", "linearize", "vit3"]
    assert find_rooms() == [f"repro.papers.{room}.paper" for room in ("kv_binding", "linearize", "vision_ttt", "vit3")]
    heavy = "{'torch', 'timm', 'pandas', 'matplotlib', 'scipy', 'numpy'}"
    code = f"import sys; from repro.papers import load_papers; load_papers(); assert not {heavy} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
