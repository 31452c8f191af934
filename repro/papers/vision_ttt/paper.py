"""The declaration of Vision-TTT for the report."""

from pathlib import Path

from ...report import dense, measured, verdicts
from ...report.paper import Document, load_paper
from . import photographs, readings_page, sections

_ROOM = Path(__file__).parent

PAPER = load_paper(
    __package__,
    # their public functions share one namespace in the texts; of two with one name, that of the later module is called
    [measured, dense, photographs, readings_page, sections],
    drawings=photographs.plan_photographs,
    passages={
        "docs/architecture.md": {"statuses": verdicts.describe_statuses},
        "docs/readings.md": {"choices": readings_page.describe_choices},
        "results/speed.md": {"spread": measured.list_spreads},
    },
    documents=(
        Document(file="results/papers/readings.md", text=_ROOM / "readings.md", records="ablate/reading_*"),
        Document(file="results/papers/night.md", text=_ROOM / "night.md"),
        Document(file="results/papers/reproduction.md", text=_ROOM / "reproduction.md.j2"),
        Document(file="results/papers/scenes.md", text=_ROOM / "scenes.md"),
    ),
    pictures=dict.fromkeys(sections.PANELS, ("fig7", sections.draw_fig7)),
)
