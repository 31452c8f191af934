"""Writing rows to a CSV file and reading them back, always through pandas."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .record import write_text


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write rows as CSV atomically, floats at full precision; a key that a row lacks, and None, are left empty.

    Only `columns` are written, in their order; those of the rows, as they come, if None.
    """
    import pandas as pd

    listed = list(rows)
    names = list(dict.fromkeys(name for row in listed for name in row)) if columns is None else list(columns)
    table = pd.DataFrame([[row.get(name) for name in names] for row in listed], columns=names, dtype=object)
    write_text(path, table.to_csv(index=False, lineterminator="\n"))


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, without their empty values; a missing or damaged file is a `UserError` naming it."""
    import pandas as pd

    try:
        table = pd.read_csv(path).convert_dtypes()  # a column of whole numbers stays whole where a value is missing
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid CSV: {' '.join(str(error).split())}") from None
    return [{name: value for name, value in row.items() if pd.notna(value)} for row in table.to_dict("records")]
