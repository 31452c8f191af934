"""The published weights that Table 1 can be compared with, and the accuracies that it prints for them."""

import timm

from ...core.errors import UserError
from ...models.published import Published, find_published
from .paper import PAPER


def find_table1_models() -> tuple[list[tuple[Published, int]], dict[str, list[str]]]:
    """Find the rows of Table 1 for which comparable weights are published.

    Returns:
        (weights, image side in pixels) of each such row, and reason -> labels of the other rows.
    """
    found: list[tuple[Published, int]] = []
    left_out: dict[str, list[str]] = {}
    for row in PAPER.ledger.table("table1").records.values():
        label, size, model = (row[key] for key in ("label", "size", "model"))
        try:
            if not model or not timm.is_model(model):
                raise UserError("not in timm, or not built")
            published = find_published(model)
            if not published.comparable:
                raise UserError(f"timm's weights have seen more than ImageNet-1K ({published.tag})")
            found.append((published, int(size)))
        except UserError as error:
            reason = str(error).removeprefix(f"{model}: ") if model else str(error)
            left_out.setdefault(reason, []).append(label)
    return found, left_out


def find_table1_top1(model: str, image_size: int) -> str | None:
    """Return the Top-1 in percent that Table 1 prints for a model at an image side in pixels; None without a row."""
    rows = PAPER.ledger.table("table1").records.values()
    return next((row["top1_percent"] for row in rows if (row["model"], row["size"]) == (model, str(image_size))), None)
