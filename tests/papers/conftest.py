"""The checkout with made-up records that the tests of the report use."""

from tests.report.conftest import checkout, paper

__all__ = ["checkout", "paper"]
