"""Tables of records: rows crossed with columns, numbers with their units, and which of several records is shown."""

import types

from repro.report.document import cross, number, plain
from repro.report.paper import list_functions
from repro.report.records import group_by, keep_best


def test_a_crossed_table_has_its_columns_in_order_and_says_where_nothing_is():
    cells = {("b", 64): 2.0, ("a", 8): 1.0, ("b", 8): None}
    crossed = cross("model", cells, lambda cell: number(cell, ".1f", " ms"))
    assert crossed.header == ("model", "8²", "64²")
    rows = [[plain(*line) for line in row] for row in crossed.rows]
    assert rows == [["b", "–", "2.0 ms"], ["a", "1.0 ms", "–"]]
    assert crossed.right_aligned == [False, True, True]


def test_the_first_with_the_most_seeds_is_kept_of_each_name():
    listed = (("a", 1, 0), ("a", 3, 1), ("b", 2, 2), ("a", 3, 3), ("a", 2, 4))
    found = [types.SimpleNamespace(name=name, most_seeds=seeds, place=place) for name, seeds, place in listed]
    assert [each.place for each in keep_best(found, lambda each: each.name)] == [1, 2]
    assert list(group_by("bab", str.upper).items()) == [("B", ["b", "b"]), ("A", ["a"])]


def test_a_module_offers_what_it_defines_itself_and_names_in_public():
    module = types.ModuleType("made_up")
    exec("from math import sqrt\nLIMIT = 3\ndef shown(): ...\ndef _hidden(): ...", vars(module))
    assert list(list_functions(module)) == ["shown"]
