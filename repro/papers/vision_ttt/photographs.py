"""The results on CIFAR-10 after 6 epochs: the questions of cifar10.yaml, with a verdict once all seeds are trained.

No difference, p-value or verdict is computed before every model of a question has all its seeds. page.md and
claims.md.j2 call `list_photographs`, `find_commit` and `answer_primary` by name.
"""

import dataclasses
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.config import load_yaml
from ...core.errors import UserError
from ...core.figures import new_figure, save_png
from ...core.paths import Paths
from ...core.record import read_json, unpack_hits
from ...core.statistics import Interval, describe_sample, share_interval
from ...report.claims import Report
from ...report.ledger import Ledger
from ...report.markdown import bullets, join, number, picture, show_interval, show_p, strong, table
from ...report.ordering import ALPHA, TOP1, compare_pairs, holm, round_off
from ...report.variants import count_macs, find_printed

_FIGURE = "cifar10_pairs.png"
_TIE = 1.2  # points of Top-1 on tune; its 5,000 images cannot separate learning rates that lie closer
_POINT = 1.0  # the margin of equivalence in points of Top-1
_DRAWS = 2000  # of the bootstrap
# model of cifar10.yaml -> the row of the paper with its accuracy on ImageNet-1K; the controls have none
_ROWS = {
    **{name: f"table1.{name}_t" for name in ("vittt", "deit", "vrwkv", "vim", "vit3")},
    **{name: f"table3.{name}" for name in ("ttt_layer", "share_qk", "gating", "conv1d", "dual")},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the questions, with its trainings and its search of the learning rate.

    Args:
        seeds: seed -> content of its result file.
        trials: learning rate -> Top-1 in percent on tune.
    """

    name: str
    seeds: Mapping[int, Mapping[str, Any]]
    trials: Mapping[float, float]

    @property
    def top1(self) -> dict[int, float]:
        """Return seed -> Top-1 in percent on the test images."""
        return {seed: found[TOP1] for seed, found in self.seeds.items()}

    @property
    def processors(self) -> dict[int, str]:
        """Return seed -> the name of the processor that trained it."""
        return {seed: found["device"]["cpu"] for seed, found in self.seeds.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdict on a pair of models over their common seeds, in points of Top-1."""

    first: str
    second: str
    difference: float
    interval: Interval  # 95 %, by Student's t over the seeds
    drawn: Interval  # 95 %, by a bootstrap over seeds and images
    # two-sided, after Holm's correction over the pairs of the question; the largest of the tests that must agree; None
    # where no order was asked
    p: float | None
    word: str


@functools.cache
def load_photographs() -> dict[str, Any]:
    """Read cifar10.yaml."""
    return load_yaml(Path(__file__).with_name("cifar10.yaml"))


def find_models(paths: Paths, questions: Mapping[str, Any]) -> dict[str, Model]:
    """Read the seeds and trials in results/seeds of every model that the questions name, in their order.

    Raises:
        UserError: seeds of different commits, data or recipes, which cannot be compared.
    """
    models: dict[str, Model] = {}
    of_any: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(name for each in questions["questions"].values() for name in _list_models(each)):
        where = f"results/seeds/{questions['data']}/{name}"
        folder = paths.root / where
        own = {seed: folder / f"{seed}.json" for seed in questions["seeds"]}
        seeds = {seed: read_json(file) for seed, file in own.items() if file.is_file()}
        trials = [read_json(file) for file in folder.glob("rate_*.json")]
        models[name] = Model(name=name, seeds=seeds, trials={each["rate"]: each[TOP1] for each in trials})
        if any(each["commit"] != questions["commit"] for each in seeds.values()):
            raise UserError(f"{where}: trained by the code of another commit than was registered")
        if len({json.dumps(each["params"] | {"seeds": None}, sort_keys=True) for each in seeds.values()}) > 1:
            raise UserError(f"{where}: seeds of more than one recipe; keep those of one")
        of_any += seeds.values()
    for key in ("data_hash", "epochs", "images"):
        if len({str(each[key]) for each in of_any}) > 1:
            raise UserError(f"results/seeds/{questions['data']}: seeds of more than one {key}; keep those of one")
    return models


def _list_models(question: Mapping[str, Any]) -> list[str]:
    """Return each model of the pairs that a question names, including those that are shown without a verdict."""
    pairs = [pair for kind in ("pairs", "not_worse", "shown") for pair in question.get(kind, ())]
    return list(dict.fromkeys(name for pair in pairs for name in pair))


def is_finished(question: Mapping[str, Any], models: Mapping[str, Model], seeds: Sequence[int]) -> bool:
    """Tell whether every model of a question has all the registered seeds."""
    return all(set(models[name].seeds) >= set(seeds) for name in _list_models(question))


def judge_pairs(question: Mapping[str, Any], models: Mapping[str, Model]) -> list[Judged]:
    """Judge the pairs of a finished question by the rules of cifar10.yaml; other models may have fewer seeds."""
    asked, not_worse, shown = (
        [(first, second) for first, second in question.get(kind, ())] for kind in ("pairs", "not_worse", "shown")
    )
    top1 = {name: models[name].top1 for name in _list_models(question)}
    # the least standard deviation that is distinguished from 0: scores are rounded to whole images
    least = round_off(next(found["images"] for name in top1 for found in models[name].seeds.values()))
    unpaired = holm([_test_unpaired(models[first], models[second]) for first, second in asked])
    welch = dict(zip(asked, unpaired, strict=True))
    found = []
    # two calls, because `compare_pairs` corrects the p of each pair for the number of its pairs
    for each in (*compare_pairs(top1, asked, least), *compare_pairs(top1, [*not_worse, *shown], least)):
        pair = each.better, each.worse
        first, second = (models[name] for name in pair)
        drawn, sides = bootstrap(first, second), ((first, second), (second, first))
        # of the difference and of its opposite
        lowest = [bound_below([one.top1[seed] - other.top1[seed] for seed in one.top1], least) for one, other in sides]
        p = each.p
        # as cifar10.yaml registered: where the models ran on different CPUs, the unpaired tests must agree
        if first.processors != second.processors:
            p = max(p, welch.get(pair, 1.0))
            lowest = [min(paired, _bound_unpaired(*side)) for paired, side in zip(lowest, sides, strict=True)]
        if pair in asked:
            apart = "seen" if each.difference > 0 else "contradicted"
            is_seen = p < ALPHA and drawn[0] * drawn[1] > 0
            word = apart if is_seen else "equal within a point" if min(lowest) > -_POINT else "undecided"
        elif pair in not_worse:
            word = "not worse" if lowest[0] > -question["margin_points"] else "undecided"
            word += f" (95 % above {lowest[0]:+.2f})"
        else:
            word = "no verdict asked"
        judged = Judged(
            first=first.name,
            second=second.name,
            difference=each.difference,
            interval=each.interval,
            drawn=drawn,
            p=p if pair in asked else None,
            word=word,
        )
        found.append(judged)
    return found


def bound_below(values: Sequence[float], least: float = 0.0) -> float:
    """Return the lower end of the one-sided 95 % interval of the mean, by Student's t.

    `least` is a lower bound of the standard deviation, for values that differ by less than their rounding.
    """
    from scipy.stats import t as student

    error = max(statistics.stdev(values), least) / len(values) ** 0.5
    return statistics.mean(values) - float(student.isf(ALPHA, len(values) - 1)) * error


def bootstrap(first: Model, second: Model) -> Interval:
    """Return the 95 % bootstrap interval of the difference in points, with seeds and images drawn with replacement.

    Each draw takes the same seeds and images of both models, because they are paired. A pair is seen or contradicted only
    if the interval leaves out 0, so the number of draws and their generator's seed must stay.
    """
    import numpy as np

    def read_hits(found: Mapping[str, Any]) -> np.ndarray:
        """Return 1 for each test image that is classified correctly, else 0, (images)."""
        return np.array(unpack_hits(found["hits"], found["images"]), dtype=np.int8)

    apart = np.stack([read_hits(first.seeds[seed]) - read_hits(second.seeds[seed]) for seed in sorted(first.seeds)])
    seeds, images = apart.shape
    random, means = np.random.default_rng(0), []
    for _ in range(_DRAWS):
        of_image = apart[random.integers(seeds, size=seeds)].sum(0)
        means.append(100 * of_image[random.integers(images, size=images)].mean() / seeds)
    low, high = np.quantile(means, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def _test_unpaired(first: Model, second: Model) -> float:
    """Return the two-sided p-value of Welch's t test over the seeds; 1 if both models have the same scores.

    Where the models of a pair ran on different processors, the larger of this p and the paired test's is judged.
    """
    from scipy import stats

    values = [list(model.top1.values()) for model in (first, second)]
    return 1.0 if values[0] == values[1] else float(stats.ttest_ind(*values, equal_var=False).pvalue)


def _bound_unpaired(first: Model, second: Model) -> float:
    """Return the bound of `bound_below` for the first model's mean minus the second's, by Welch's t over the seeds."""
    from scipy import stats

    values = [list(model.top1.values()) for model in (first, second)]
    found = stats.ttest_ind(*values, equal_var=False, alternative="greater")
    return float(found.confidence_interval(1 - ALPHA).low)


def _printed_difference(ledger: Ledger, first: str, second: str) -> float | None:
    """Return the paper's Top-1 of the first model minus that of the second, in points on ImageNet-1K.

    The result is None for a control. Vittt is the last row of Table 3, so it can be compared with rows of both tables.
    """
    if first not in _ROWS or second not in _ROWS:
        return None
    return float(find_printed(ledger, _ROWS[first], TOP1)) - float(find_printed(ledger, _ROWS[second], TOP1))


def list_photographs(report: Report) -> str:
    """Write the accuracies of all models so far, then the verdicts of each question, or how many trainings it has."""
    questions = load_photographs()
    models = find_models(report.results.paths, questions)
    finished, open_questions = [], []
    for name, question in questions["questions"].items():
        if is_finished(question, models, questions["seeds"]):
            finished.append(f"### {name}. {question['asks']}")
            finished += _list_judged(question, judge_pairs(question, models), report.paper.ledger)
        else:
            own = _list_models(question)
            done = sum(len(models[each].seeds) for each in own)
            asked = len(own) * len(questions["seeds"])
            open_questions.append(f"{name}. {question['asks']} Not finished: {done} of {asked} trainings.")
    shown = picture(f"figures/{_FIGURE}", "differences of all pairs, with the paper's") if finished else ""
    repeats = _list_repeats(report.results.paths, questions, models)
    return join([count_trainings(report), _list_accuracies(models), repeats, shown, *finished, bullets(open_questions)])


def _list_repeats(paths: Paths, questions: Mapping[str, Any], models: Mapping[str, Model]) -> str:
    """Write how a seed that was trained again, by later code, differs: it shows whether that code trains alike.

    Its result is `<seed>_again.json` beside the seed's own, in the same form, and enters no accuracy or verdict.
    """
    lines = []
    for name, model in models.items():
        for seed, found in model.seeds.items():
            file = paths.root / f"results/seeds/{questions['data']}/{name}/{seed}_again.json"
            if not file.is_file():
                continue
            again = read_json(file)
            if any(again[key] != found[key] for key in ("params_hash", "data_hash")):
                raise UserError(f"{file}: of another recipe or other data than {seed}.json; remove it")
            pairs = zip(*(unpack_hits(each["hits"], each["images"]) for each in (found, again)), strict=True)
            others = sum(first != second for first, second in pairs)
            scores = f"{again[TOP1]:.2f} % ({found[TOP1]:.2f} % above)"
            same = "the weights are the same, bit by bit" if again["weights_hash"] == found["weights_hash"] else ""
            apart = same or f"{others:,} of {again['images']:,} images are right in one of the two alone"
            lines.append(f"Seed {seed} of {name}, trained again by commit {again['commit'][:8]}: {scores}; {apart}.")
    return bullets(lines)


def find_commit(_: Report) -> str:
    """Return the short hash of the commit whose code trains all seeds."""
    return load_photographs()["commit"][:8]


def describe_photographs(report: Report) -> str:
    """Describe the trials, which of their rates is trained, and how and where the trainings so far ran."""
    questions = load_photographs()
    search, models = questions["search"], find_models(report.results.paths, questions)
    trial = f"A trial has {search['epochs']} epochs and is scored on {search['split']}."
    rate = "The first rate of a row, whose trial scored highest, is the one that is trained; the others of the row lie "
    rate += f"within {_TIE} points of it, which so few images cannot tell apart."
    trained = [found for each in models.values() for found in each.seeds.values()]
    if not trained:
        return f"{trial} {rate}"
    one, cpus = trained[0], sorted({found["device"]["cpu"] for found in trained})
    threads = sorted({found["device"]["threads"] for found in trained})
    length = f"A training has {one['epochs']} epochs of {one['train_images']:,} images, and is scored on "
    length += f"{one['images']:,} of {one['split']}"
    how = f"{one['params']['precision']}, {' or '.join(map(str, threads))} thread{'s' * (threads != [1])}"
    return f"{trial} {rate} {length}; {how}, {' and '.join(cpus)}."


def count_trainings(report: Report) -> str:
    """Write in a sentence how many of the registered trainings and trials have run."""
    questions = load_photographs()
    models = find_models(report.results.paths, questions).values()
    seeds, trials = sum(len(each.seeds) for each in models), sum(len(each.trials) for each in models)
    asked, searched = len(models) * len(questions["seeds"]), len(models) * len(questions["search"]["rates"])
    return f"{seeds} of {asked} trainings and {trials} of {searched} trials of their searches have run."


def answer_primary(report: Report) -> str:
    """Write the verdicts of the primary questions once all of them are finished, and until then the trainings so far.

    The first question alone would say nothing of test-time training: its controls are in another one.
    """
    questions = load_photographs()
    models = find_models(report.results.paths, questions)
    primary = [each for each in questions["questions"].values() if each["primary"]]
    if not all(is_finished(each, models, questions["seeds"]) for each in primary):
        return count_trainings(report)
    judged = [each for question in primary for each in judge_pairs(question, models)]
    return "; ".join(
        f"{each.first} against {each.second}: {each.word}, {each.difference:+.1f} points" for each in judged
    )


def _list_accuracies(models: Mapping[str, Model]) -> str:
    """Tabulate each model's search, and its Top-1, parameters, multiply-adds and core-hours once it has a seed."""
    rows, grid = [], load_photographs()["search"]["rates"]
    for name, model in models.items():
        row = [name, _show_rates(model.trials, grid), len(model.trials), len(model.seeds)]
        if not model.seeds:
            rows.append([*row, *["–"] * 4])
            continue
        one, values = next(iter(model.seeds.values())), list(model.top1.values())
        sample, params = describe_sample(values, is_share=True), one["params"]
        interval = sample.ci95 or share_interval(sample.mean, one["images"])
        macs = count_macs(params["model"], json.dumps(params["options"]), params["transform"]["image_size"], 10)
        hours = sum(each["core_hours"] for each in model.seeds.values())
        row += [show_interval(sample.mean, interval, ".2f"), number(one["num_params"], ",")]
        rows.append([*row, number(None if macs is None else 1000 * macs, "#.4g"), number(hours, ".1f")])
    header = ["model", "rate (Top-1 on tune)", "trials", "seeds", "Top-1 (%) [95 %]", "parameters"]
    return table([*header, "multiply-adds (M)", "core-hours"], rows)


def _show_rates(trials: Mapping[float, float], grid: Sequence[float]) -> str:
    """Show the best learning rate of a search, whether a finished search ends with it, and those within `_TIE` of it."""
    if not trials:
        return "–"
    best = max(sorted(trials), key=lambda rate: trials[rate])
    is_edge = set(trials) >= set(grid) and best in (min(grid), max(grid))
    close = [rate for rate in sorted(trials) if rate != best and trials[rate] > trials[best] - _TIE]
    others = "".join(f", {rate:g} ({trials[rate]:.2f})" for rate in close)
    return f"{best:g} ({trials[best]:.2f}{', the edge of the grid' if is_edge else ''}){others}"


def _list_judged(question: Mapping[str, Any], judged: Sequence[Judged], ledger: Ledger) -> list[str]:
    """Write the verdicts of a question in a sentence and as a table, with the question's own remarks in `differs`."""
    words = [f"{each.first} against {each.second}: {each.word}" for each in judged]
    says = f"After 6 epochs, at rates chosen with one seed: {'; '.join(words)}."
    rows, differs = [], question.get("differs")
    for each in judged:
        printed = _printed_difference(ledger, each.first, each.second)
        drawn = "[{:+.2f}, {:+.2f}]".format(*each.drawn)
        word = strong(each.word) if each.word == "contradicted" else each.word
        ours = show_interval(each.difference, each.interval, "+.2f")
        rows.append([f"{each.first} − {each.second}", number(printed, "+.1f"), ours, drawn, show_p(each.p), word])
        if differs:
            rows[-1].append(differs.get(each.second, ""))
    header = ["", "paper, ImageNet-1K (points)", "ours (points) [95 %]", "by bootstrap", "p (Holm)", "verdict"]
    return [says, table([*header, "what else differs"] if differs else header, rows)]


def draw_pairs(path: Path, judged: Sequence[Judged], ledger: Ledger) -> Path:
    """Draw a forest plot: each difference with its 95 % interval, and the paper's on ImageNet-1K."""
    figure, (panel,) = new_figure(1)
    figure.set_size_inches(7.5, 1.2 + 0.35 * len(judged))
    for place, each in enumerate(reversed(judged)):
        low, high = each.interval
        error = [[each.difference - low], [high - each.difference]]
        panel.errorbar(each.difference, place, xerr=error, fmt="o", color="#D55E00", capsize=3, label="ours, CIFAR-10")
        if (printed := _printed_difference(ledger, each.first, each.second)) is not None:
            panel.plot(printed, place, "D", color="black", markerfacecolor="white", label="the paper, ImageNet-1K")
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(judged)), [f"{each.first} − {each.second}" for each in reversed(judged)], fontsize=9)
    panel.set(xlabel="difference of Top-1 (points), 95 % over seeds", ylim=(-0.6, len(judged) - 0.4))
    panel.grid(True, axis="x", linewidth=0.4, alpha=0.5)
    handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.5 / (1.2 + 0.35 * len(judged)), 1, 1))
    return save_png(figure, path)


def plan_photographs(report: Report) -> dict[str, Any]:
    """Plan the forest plot of the finished questions; there is none before one is finished."""
    questions = load_photographs()
    models = find_models(report.results.paths, questions)
    asked = [each for each in questions["questions"].values() if is_finished(each, models, questions["seeds"])]
    judged = [pair for question in asked for pair in judge_pairs(question, models)]
    return {_FIGURE: ([], lambda path: draw_pairs(path, judged, report.paper.ledger))} if judged else {}
