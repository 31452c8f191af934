"""Diffusion against the official release, a distribution whose denoiser is known, and sums by hand; scores."""

import math
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial.distance import cdist
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.core.hashing import hash_file
from repro.data.classification import ToInput
from repro.data.settings import TransformSettings
from repro.tasks.classification.task import accuracy
from repro.tasks.generation import scores as measures
from repro.tasks.generation.diffusion import Diffusion, guide, make_generator
from repro.tasks.generation.params import InputSettings, JudgeParams, LatentSettings, SamplingParams
from repro.tasks.generation.reference import KNOWN, ReferenceBatch
from repro.tasks.generation.scores import Inception, Judge, Moments, Tally, compare_tallies, precision_recall
from repro.tasks.generation.task import Generation, draw_samples, to_inputs, to_pictures
from tests.models.helpers import read_data, relative, save_model
from tests.slow import slow
from tests.tasks.backbones import Batches

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


def test_losses_equal_the_official_releases_and_the_bound_trains_the_variance_alone():
    truth, diffusion = read_data("dit3.npz", "diffusion/"), Diffusion.linear()
    x_start, noise, step, output = (truth[name] for name in ("x_start", "noise", "t", "model_output"))
    assert relative(diffusion.betas, truth["betas"]) < 1e-12
    x = diffusion.add_noise(x_start, step, noise)
    assert relative(x, truth["x_t"]) < 1e-5
    found = diffusion.losses(output.requires_grad_(), x_start, x, step, noise)
    (gradient,) = torch.autograd.grad(found["vb"].sum(), output, retain_graph=True)
    assert not gradient[:, :4].any() and (gradient[:, 4:].flatten(1).abs().sum(1) > 0).all()
    for ours, name in ((found["mse"], "mse"), (found["vb"], "vb"), (found["mse"] + found["vb"], "loss")):
        assert relative(ours.detach(), truth[name]) < 1e-5


def test_the_respaced_reverse_step_equals_the_official_releases():
    truth, whole = read_data("dit3.npz", "diffusion/respaced/"), read_data("dit3.npz", "diffusion/")
    x = whole["x_start"]  # the release takes it for x_t
    chain = Diffusion.linear().respaced(int(truth["steps"]))
    assert torch.equal(chain.timesteps, truth["use_timesteps"]) and relative(chain.betas, truth["betas"]) < 1e-12
    found = chain.reverse(whole["model_output"], x, truth["t"])
    for ours, name in ((found.mean, "mean"), (found.log_variance, "log_variance"), (found.x_start, "pred_xstart")):
        assert relative(ours, truth[name]) < 1e-5, name
    assert relative(chain.ddim_step(found, x, truth["t"]), truth["ddim_eta0"]) < 1e-5


def test_guidance_by_hand():
    def model(x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        return torch.cat((x * 0 + labels.view(-1, 1, 1, 1), x * 0 + 100 * labels.view(-1, 1, 1, 1)), dim=1)

    x, timesteps, labels = torch.zeros(2, 1, 2, 2), torch.zeros(2), torch.tensor([1.0, 3.0])
    for scale, expected in ((0, [7, 7]), (1, [1, 3]), (2, [-5, -1])):
        out = guide(model, null=7, scale=scale, channels=1)(x, timesteps, labels)
        assert out[:, 0, 0, 0].tolist() == expected and out[:, 1, 0, 0].tolist() == [100, 300]


class Gaussian(nn.Module):
    """The best denoiser of independent normal values with their class's mean and one deviation: E[ε | x_t]."""

    num_classes = 2
    means, deviation = torch.tensor([-0.5, 0.8, 0.0]), 0.3

    def __init__(self):
        super().__init__()
        self.alphas_bar = Diffusion.linear().alphas_bar.float()

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        alpha_bar, mean = self.alphas_bar[timesteps].view(-1, 1, 1, 1), self.means[labels].view(-1, 1, 1, 1)
        rest = 1 - alpha_bar
        return rest.sqrt() * (x - alpha_bar.sqrt() * mean) / (alpha_bar * self.deviation**2 + rest)


PIXELS = InputSettings(image_size=8, channels=3, hflip=0.0)
LATENTS = InputSettings(image_size=64, latents=LatentSettings())  # not clipped


@pytest.mark.parametrize(
    ("sampler", "steps", "bias"),
    [("ddpm", 250, 0.02), ("ddim", 50, 0.08), slow("ddpm", 1000, 0.01), slow("ddim", 250, 0.02)],
)
def test_samples_have_the_mean_and_the_deviation_of_the_data(sampler, steps, bias):
    """Beside chance, four standard errors, few steps have a bias: the chain is then no longer fine enough."""
    labels = torch.tensor([0, 1]).repeat(8)
    sampling = SamplingParams(sampler=sampler, steps=steps)
    how = {"sampling": sampling, "seed": 3, "batch_size": 16}
    (samples,) = draw_samples(Gaussian(), Diffusion.linear(), LATENTS, labels, range(16), **how)
    for label in (0, 1):
        values = samples[labels == label].flatten()
        chance = 4 * Gaussian.deviation / math.sqrt(len(values))
        assert abs(values.mean().item() - Gaussian.means[label].item()) < chance + bias * Gaussian.deviation
        assert abs(values.std().item() - Gaussian.deviation) < chance / math.sqrt(2) + bias * Gaussian.deviation


def test_a_sample_follows_from_its_place_and_the_seed_alone():
    labels, chain = torch.tensor([0, 1, 0, 1, 0]), Diffusion.linear()

    def draw(batch_size: int, seed: int = 0, sampler: str = "ddpm") -> Tensor:
        how = {"sampling": SamplingParams(sampler=sampler, steps=5), "seed": seed, "batch_size": batch_size}
        return torch.cat(list(draw_samples(Gaussian(), chain, PIXELS, labels, range(5), **how)))

    assert torch.equal(draw(5), draw(2)) and torch.equal(draw(1), draw(5)) and draw(5).abs().max() <= 1.5
    assert not torch.equal(draw(5), draw(5, seed=1)) and not torch.equal(draw(5), draw(5, sampler="ddim"))
    assert draw(5)[0].ne(draw(5)[2]).any()  # the same class, another place


@pytest.mark.parametrize("steps", [1, 1001])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(ValueError, match=f"{steps} steps: expected 2 to 1000"):
        Diffusion.linear().respaced(steps)


def test_pictures_become_inputs_and_come_back():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(to_pictures(to_inputs(every, CPU)), every) and to_inputs(every, CPU).aminmax() == (-1, 1)
    assert to_pictures(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


class Silent(nn.Module):
    """Predicts no noise, and notes the labels and steps that it sees."""

    num_classes = 3

    def __init__(self):
        super().__init__()
        self.labels, self.steps = [], []

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        self.labels += labels.tolist()
        self.steps += timesteps.tolist()
        return torch.zeros_like(x)


def make_task(held_out: Batches, judge: Judge | None = None, changes: dict | None = None) -> Generation:
    asked = {"transform": InputSettings(image_size=4, channels=1), "label_dropout": 0.1, "seeds": (0,)}
    params = SimpleNamespace(**asked | {"sampling": SamplingParams(steps=2)} | (changes or {}))
    shared = {"num_classes": 3, "batch_size": 4, "device": CPU}
    return Generation(Silent(), Batches(), {"val": held_out}, params=params, judge=judge, **shared)


def test_the_held_out_loss_is_of_fixed_noise_whatever_the_batches_are():
    pictures, labels = torch.randint(0, 256, (7, 1, 4, 4), dtype=torch.uint8), torch.arange(7) % 3
    steps, expected = [], 0.0
    for generator in (make_generator(2, place) for place in range(7)):
        steps.append(int(torch.randint(1000, (), generator=generator)))
        expected += torch.randn(1, 4, 4, generator=generator).square().mean().item() / 7
    for size in (7, 3):
        task = make_task(Batches(zip(pictures.split(size), labels.split(size), strict=True)))
        found = task.evaluate(task.model, "val")
        assert found["held_out_images"] == 7 and found["held_out_mse"] == pytest.approx(expected, rel=1e-6)
        assert task.model.steps == steps and task.model.labels == labels.tolist()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_classes_are_left_out_in_training(share):
    torch.manual_seed(0)
    task = make_task(Batches(), changes={"label_dropout": share})
    labels = torch.zeros(2000, dtype=torch.long)
    loss = task.loss(task.model, (torch.zeros(2000, 1, 4, 4, dtype=torch.uint8), labels))
    assert set(loss) == {"loss"} and loss["loss"].item() == pytest.approx(1, abs=0.05)  # the mean square of noise
    left_out = sum(label == 3 for label in task.model.labels)
    chance = 4 * math.sqrt(2000 * share * (1 - share))
    assert set(task.model.labels) <= {0, 3} and left_out == pytest.approx(2000 * share, abs=chance)
    steps = task.model.steps
    assert np.mean(steps) == pytest.approx(499.5, abs=4 * 1000 / math.sqrt(12 * 2000)) and min(steps) >= 0


def test_a_judge_says_what_the_classifier_says_of_the_same_images(tmp_path):
    """A picture at the judge's own size goes through its evaluation unchanged."""
    path, classes = tmp_path / "judge.safetensors", ["a", "b", "c"]
    model = save_model(path, "vit3_nano_patch16_144", side=32, classes=classes, depth=1)
    settings = TransformSettings(image_size=32, crop_pct=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    judge = Judge.open(path, classes, CPU)
    pictures, labels = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8), torch.arange(9) % 3
    found = accuracy(model, [(pictures, labels)], ToInput(settings, CPU))
    assert judge.count_right(pictures, labels, batch_size=4) == round(9 * found["top1_percent"] / 100)
    grey_inputs = InputSettings(image_size=32, channels=1)
    changes = {"transform": grey_inputs, "judge": JudgeParams(weights=str(path), samples=5)}
    task = make_task(Batches([(pictures[:, :1], labels)]), judge, changes)
    scores = task.evaluate(task.model, "val")
    grey = accuracy(model, [(pictures[:, :1].expand(-1, 3, -1, -1), labels)], ToInput(settings, CPU))
    assert scores["real_judged_percent"] == pytest.approx(grey["top1_percent"])
    assert scores["judged_percent"] in range(0, 101, 20)
    with pytest.raises(UserError, match="cannot judge, since it was trained on other classes"):
        Judge.open(path, ["a", "b", "d"], CPU)


def moments(features: Tensor) -> Moments:
    found = Moments()
    for part in features.split(13):
        found.add(part)
    return found


def test_the_frechet_distance_is_its_formula():
    """Against a root of the product of the covariances that is computed by another method."""
    torch.manual_seed(0)
    ours = torch.randn(60, 5).double() @ torch.randn(5, 5).double()
    theirs = torch.randn(40, 5).double() * torch.arange(1, 6) + 2
    root = scipy.linalg.sqrtm(np.cov(ours, rowvar=False) @ np.cov(theirs, rowvar=False)).real
    means = (ours.mean(0) - theirs.mean(0)).square().sum().item()
    expected = means + np.trace(np.cov(ours, rowvar=False) + np.cov(theirs, rowvar=False) - 2 * root)
    assert measures.frechet_distance(moments(ours), moments(theirs)) == pytest.approx(expected, rel=1e-9)
    assert measures.frechet_distance(moments(ours), moments(ours)) == pytest.approx(0, abs=1e-9)
    few = torch.randn(3, 5)  # fewer samples than features, and a root of a singular matrix
    assert measures.frechet_distance(moments(few), moments(few + 1)) == pytest.approx(5, abs=1e-5)


def test_the_inception_score_of_known_distributions():
    assert measures.inception_score(torch.zeros(20, 7)) == pytest.approx(1)
    # sure of itself, of all classes alike
    assert measures.inception_score(1e4 * torch.eye(7).repeat(3, 1)) == pytest.approx(7)
    # a part of 5,000 that knows one class scores 1, and the 2,000 after it, of two classes, 2
    labels = torch.cat((torch.zeros(5000, dtype=torch.long), torch.arange(2000) % 2))
    assert measures.inception_score(1e4 * nn.functional.one_hot(labels, 3).float()) == pytest.approx(1.5)


@pytest.mark.parametrize("rows", [4, 512])
def test_precision_and_recall_by_all_distances(monkeypatch, rows):
    monkeypatch.setattr("repro.tasks.generation.scores._ROWS", rows)
    torch.manual_seed(0)
    real, drawn = torch.randn(30, 3), 0.7 * torch.randn(26, 3) + 1.5

    def share(points: Tensor, centres: Tensor) -> float:
        radii = np.sort(cdist(centres, centres))[:, 3]
        return (cdist(points, centres) <= radii).any(1).mean()

    found = precision_recall(real, drawn)
    assert found == pytest.approx((share(drawn, real), share(real, drawn))) and 0 < found[1] < found[0] < 1
    assert precision_recall(real, real) == (1, 1) and precision_recall(real, drawn + 100) == (0, 0)


class StandIn(nn.Module):
    """As NVIDIA's Inception file is called, with a layer of its name, on pictures of 299 pixels."""

    def __init__(self, layer: str):
        super().__init__()
        last = nn.Sequential(OrderedDict(conv=nn.Conv2d(4, 9, 18, stride=17)))  # sFID takes its first channels
        self.layers = nn.Sequential(OrderedDict([("stem", nn.Conv2d(3, 4, 1)), (layer, last)]))
        self.output = nn.Linear(3, 5)

    def forward(self, img: Tensor, return_features: bool = False) -> Tensor:
        assert return_features
        return img.float().mean(dim=(2, 3))


@pytest.fixture
def inception(tmp_path):
    """Features by the file of a module with this layer, and the module."""

    def make(layer: str) -> tuple[Inception, StandIn]:
        torch.manual_seed(0)
        module, path = StandIn(layer).eval(), tmp_path / "inception.pt"
        torch.jit.script(module).save(str(path))
        return Inception(path, CPU, hash_file(path)), module

    return make


def tally(inception: Inception, pictures: Tensor) -> Tally:
    found = Tally(None, inception)
    found.add(pictures, torch.zeros(len(pictures)))
    return found


@pytest.mark.slow
@torch.no_grad()
def test_features_are_those_of_the_file(inception):
    found, module = inception("mixed_6")
    pictures = torch.randint(0, 256, (3, 3, 299, 299), dtype=torch.uint8)
    torch.testing.assert_close(found.pooled(pictures), pictures.float().mean(dim=(2, 3)))

    def convolve(shown: Tensor) -> Tensor:
        return module.layers((shown - 128) / 128)[:, :7].permute(0, 2, 3, 1).flatten(1)

    torch.testing.assert_close(found.spatial(pictures), convolve(pictures.float()), rtol=1e-4, atol=1e-4)
    # of a picture whose columns rise by 2 from 0 on, column i of the result is 2·i·100/299, up to the last column
    ramp = (2 * torch.arange(100.0)).expand(1, 3, 60, 100).to(torch.uint8)
    shown = (2 * torch.arange(299) * (100 / 299)).clamp(max=198).expand(1, 3, 299, 299)
    torch.testing.assert_close(found.spatial(ramp), convolve(shown), rtol=1e-4, atol=1e-3)
    scores = compare_tallies(tally(found, pictures), tally(found, 255 - pictures))
    assert scores["fid"] > 0 and scores["sfid"] > 0
    assert scores["judged_percent"] is None and scores["judged_percent_reason"] == "no judge"
    logits = pictures.float().mean(dim=(2, 3)) @ module.output.weight.T  # its bias is left out
    assert scores["inception_score"] == pytest.approx(measures.inception_score(logits))
    assert scores["precision"] is None and scores["recall_reason"] == "needs 4 pictures of each"


def test_an_inception_file_is_known_by_its_hash(inception, tmp_path):
    judge, _ = inception("other")
    drawn, real = torch.randint(0, 256, (2, 3, 1, 8, 8), dtype=torch.uint8)
    scores = compare_tallies(tally(judge, drawn), tally(judge, real))
    assert scores["fid"] >= 0 and scores["sfid"] is None and "no layer mixed_6" in scores["sfid_reason"]
    for pair in ((drawn, real[:1]), (drawn[:1], real)):
        alone = compare_tallies(*(tally(judge, pictures) for pictures in pair))
        assert alone["fid"] is None and alone["fid_reason"] == "needs 2 pictures of each"
    for wanted in (None, "0123456789abcdef", judge.hash[:8]):
        with pytest.raises(UserError, match=f"has SHA-256 {judge.hash}"):
            Inception(tmp_path / "inception.pt", CPU, wanted)
    with pytest.raises(UserError, match="no such Inception file"):
        Inception(tmp_path / "absent.pt", CPU)


def write_batch(path: Path, **changes) -> dict[str, np.ndarray]:
    """A reference batch of five pictures for the stand-in's features, with changed arrays; None leaves one out."""
    random = np.random.default_rng(0)
    arrays = {"mu": random.normal(size=3), "sigma": np.diag([1.0, 2.0, 3.0]), "mu_s": random.normal(size=289)}
    arrays |= {"sigma_s": np.eye(289), "arr_0": random.integers(256, size=(5, 8, 8, 3), dtype=np.uint8)}
    arrays = {key: value for key, value in (arrays | changes).items() if value is not None}
    np.savez(path, **arrays)
    return arrays


def test_scores_against_a_reference_batch(inception, tmp_path, monkeypatch):
    """With one spatial channel of seven, since a root of 2,023 x 2,023 takes seconds."""
    monkeypatch.setattr(measures, "SPATIAL_CHANNELS", 1)
    judge, _ = inception("mixed_6")
    arrays = write_batch(tmp_path / "batch.npz")
    batch = ReferenceBatch.open(tmp_path / "batch.npz", 8)
    pictures = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    drawn = tally(judge, pictures)
    found = compare_tallies(drawn, batch.read(judge))
    assert batch.known is None and found["real_judged_percent"] is None
    whole = measures.Gaussian(torch.from_numpy(arrays["mu"]), torch.from_numpy(arrays["sigma"]))
    pooled = moments(torch.cat(drawn.pooled))
    assert found["fid"] == pytest.approx(measures.frechet_distance(pooled, whole), rel=1e-6)
    whole = measures.Gaussian(torch.from_numpy(arrays["mu_s"]), torch.from_numpy(arrays["sigma_s"]))
    spatial = moments(judge.spatial(pictures))
    assert found["sfid"] == pytest.approx(measures.frechet_distance(spatial, whole), rel=1e-6)
    # precision and recall are of the pictures, which a data set could hold as well
    same = compare_tallies(drawn, tally(judge, torch.from_numpy(arrays["arr_0"]).permute(0, 3, 1, 2)))
    assert (found["precision"], found["recall"]) == (same["precision"], same["recall"]) and same["fid"] != found["fid"]


WRONG_BATCHES = [
    ({"mu_s": None}, "has no mu_s"),
    ({"sigma": np.eye(4)}, "sigma has shape (4, 4), expected (3, 3)"),
    ({"mu": np.zeros(4), "sigma": np.eye(4)}, "mu has length 4, and the Inception file gives 3 features"),
    ({"mu": np.array([0, np.nan, 0])}, "mu has values of float64, expected finite ones"),
    ({"arr_0": np.zeros((5, 16, 16, 3), np.uint8)}, "arr_0 has shape (5, 16, 16, 3), expected (5, 8, 8, 3)"),
    ({"arr_0": np.zeros((0, 8, 8, 3), np.uint8)}, "arr_0 has shape (0, 8, 8, 3)"),
    ({"arr_0": np.zeros((5, 8, 8, 3))}, "arr_0 has values of float64"),
    ({"mu": np.array([None] * 3)}, "not a readable .npz file"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_BATCHES, ids=[message for _, message in WRONG_BATCHES])
def test_a_wrong_reference_batch_is_one_line(inception, tmp_path, changes, message):
    write_batch(tmp_path / "batch.npz", **changes)
    with pytest.raises(UserError) as error:
        ReferenceBatch.open(tmp_path / "batch.npz", 8).read(inception("other")[0])
    assert message in str(error.value) and "\n" not in str(error.value) and "batch.npz: " in str(error.value)


def test_a_damaged_reference_batch_is_one_line(tmp_path):
    path = tmp_path / "batch.npz"
    write_batch(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # in the values of sigma_s
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (flipped, whole[:-100], b"text", b"", (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match="batch.npz: not a readable .npz file"):
            ReferenceBatch.open(path, 8)


def test_a_reference_batch_is_known_by_its_hash(tmp_path):
    (published,) = KNOWN.values()
    with pytest.raises(UserError, match="no such reference batch"):
        ReferenceBatch.open(tmp_path / published, 8)
    write_batch(tmp_path / published)
    with pytest.raises(UserError, match=f"{published}: has SHA-256 .*, expected b32732719497e426"):
        ReferenceBatch.open(tmp_path / published, 8)
