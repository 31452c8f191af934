"""Which published weights Table 1 can be compared with, and what it prints for them."""

import timm

from ...core.errors import UserError
from ...models.published import Published, find_published
from .paper import PAPER


def find_table1_models() -> tuple[list[tuple[Published, int]], dict[str, list[str]]]:
    """The rows of Table 1 that published weights can fill, with their image side; reason -> labels of the others."""
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
    """The accuracy in percent that Table 1 prints for a model at an image side in pixels; None if it has no such row."""
    rows = PAPER.ledger.table("table1").records.values()
    return next((row["top1_percent"] for row in rows if (row["model"], row["size"]) == (model, str(image_size))), None)
