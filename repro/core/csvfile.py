"""Reading and writing of CSV files as rows."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .record import write_text


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write rows as CSV atomically; see `format_csv`."""
    write_text(path, format_csv(rows, columns))


def format_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Format rows as CSV with floats at full precision; None and missing keys are left empty.

    Only `columns` are written, in their order; None writes the rows' keys in the order of their first use. With dtype
    object an integer in a column with a missing value stays `1`; `read_typed_csv` would refuse `1.0`.
    """
    import pandas as pd

    listed = list(rows)
    names = list(dict.fromkeys(name for row in listed for name in row)) if columns is None else list(columns)
    table = pd.DataFrame([[row.get(name) for name in names] for row in listed], columns=names, dtype=object)
    return table.to_csv(index=False, lineterminator="\n")


def parse_csv(text: str, where: str) -> list[dict[str, Any]]:
    """Parse the rows of a CSV text whose columns are not known before, as those of a curve; see `read_typed_csv`.

    pandas guesses the types, and empty values are left out. Raises UserError for a bad text; it begins with `where`.
    """
    import pandas as pd

    try:
        # convert_dtypes keeps a column of integers with a missing value from becoming floats
        table = pd.read_csv(io.StringIO(text)).convert_dtypes()
    except ValueError as error:
        raise UserError(f"{where}: not valid CSV: {' '.join(str(error).split())}") from None
    return [{name: value for name, value in row.items() if pd.notna(value)} for row in table.to_dict("records")]


def read_typed_csv(path: Path, types: Mapping[str, Callable[[str], Any]]) -> list[dict[str, Any]]:
    """Read the rows of a CSV file whose columns have known types; an empty value is None, a missing file has no rows.

    Args:
        types: column -> parser of its text. Other columns stay text, so that a commit hash of digits is no number.

    Raises:
        UserError: the file is no CSV in UTF-8, or a value does not parse; the message names file, line and column.
    """
    if not path.is_file():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            lines = list(csv.DictReader(stream))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not valid CSV: {error}; move the file away") from None
    rows = []
    for number, texts in enumerate(lines, 2):
        row: dict[str, Any] = {}
        for name, text in texts.items():
            try:
                row[name] = types.get(name, str)(text) if text else None
            except (LookupError, TypeError, ValueError):
                raise UserError(
                    f"{path}: line {number}: {name}: {text!r} was not written by us; remove the row"
                ) from None
        rows.append(row)
    return rows
