"""What a paper ablates, from the `variants.yaml` of its room. It imports no report, as the stage that trains them."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.config import load_yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant of a model.

    Args:
        options: the options of the model that it changes; empty for the plain model.
        changes: what else it changes of the recipe, as nested mappings.
        elsewhere: the same on other data than the recipe's own; None for `changes`.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    elsewhere: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantSet:
    """Variants that are trained alike.

    Args:
        variants: name -> variant.
        model: what the model without changes is called.
        family: of the models whose recipe they share: that of the first one in `section`; None for `recipe` alone.
        section: of params.yaml, in which that recipe is.
        recipe: a cell, for where `section` has no model of the family; None where it must have one.
        changes: what all of them change of the recipe.
        task: the folder of repro/tasks that trains them.
        stage: the stage that trains them.
        folder: where the results go, below results/measured/<device>/.
        flags: of the command line, with which the stage trains these variants.
        inherits: whether they begin with the weights of a softmax model, for which another one may be given.
        tables: table -> `rows`, from each variant that it compares to its row in the ledger, or null, in the paper's
            order; and, where the printed Top-1 is not the order of the text, `orders`, from a better variant to worse,
            and `not_worse`, see `repro.report.paper.VariantTable`.
    """

    variants: Mapping[str, Variant]
    model: str
    family: str | None
    section: str = "pretrain"
    recipe: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: str = "classification"
    stage: str = "ablate"
    folder: str
    flags: tuple[str, ...] = ()
    inherits: bool = False
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def options(self) -> dict[str, Mapping[str, Any]]:
        """Variant -> the options of the model that it changes."""
        return {name: variant.options for name, variant in self.variants.items()}

    @property
    def recipes(self) -> dict[str, Mapping[str, Any]]:
        """Variant -> what of the recipe tells it from others; none where it names its own model."""
        return {name: {} if "model" in each.changes else each.changes for name, each in self.variants.items()}

    @functools.cached_property
    def changed(self) -> frozenset[str]:
        """The options that tell variants apart."""
        return frozenset().union(*self.options.values())

    @functools.cached_property
    def changed_recipe(self) -> frozenset[str]:
        """The settings of the recipe that tell variants apart; one that is off need not be in a record."""
        return frozenset().union(*self.recipes.values())

    @property
    def rows(self) -> dict[str, dict[str, str | None]]:
        """Table -> variant -> its row in the ledger."""
        return {place: table["rows"] for place, table in self.tables.items()}


@functools.cache
def load_variants(room: str) -> VariantSet | None:
    """What the paper of a room of repro/papers ablates; None where it has no `variants.yaml`."""
    file = Path(__file__).parent / room / "variants.yaml"
    if not file.is_file():
        return None
    content = load_yaml(file)
    variants = {name: Variant(**variant) for name, variant in content.pop("variants").items()}
    return VariantSet(variants=variants, flags=("--paper", room), **content)
