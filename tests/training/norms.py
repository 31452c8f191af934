"""A program of test_ranks.py, run under torchrun: it trains models with batch norms, and rank 0 writes the results."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from repro.core.ranks import joined
from repro.models.registry import build_model
from repro.training.checkpoint import Checkpointer
from repro.training.loop import Task, fit
from repro.training.params import OptimParams, TrainParams
from repro.training.watch import Watch

BATCH, STEPS, HELD_OUT = 8, 3, 6


def build(name):
    torch.manual_seed(0)
    return build_model(name, img_size=32, num_classes=5) if "resnet" not in name else build_model(name, num_classes=5)


def draw(index):
    """An image whose mean and deviation grow with its number, and its class."""
    noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
    return (1 + index % 7) * noise + index % 5, index % 5


@torch.no_grad()
def find_loss(model, indices):
    """The sum of the losses of held-out images."""
    images, labels = zip(*(draw(1000 + i) for i in indices), strict=True)
    return F.cross_entropy(model(torch.stack(images)), torch.tensor(labels), reduction="sum").item()


class Normed(Task):
    batch_size, steps_per_epoch, device = BATCH, STEPS, torch.device("cpu")
    curve_split, reported_split = "val", "test"

    def __init__(self, ranks, model):
        self.ranks, self.model = ranks, model

    def batches(self, epoch, start):
        for step in range(start, STEPS):
            first = (epoch * STEPS + step) * BATCH
            images, labels = zip(
                *(draw(first + i) for i in range(self.ranks.rank, BATCH, self.ranks.world_size)), strict=True
            )
            yield torch.stack(images), torch.tensor(labels)

    def loss(self, network, batch):
        return {"loss": F.cross_entropy(network(batch[0]), batch[1])}

    def evaluate(self, model, split):
        own = range(self.ranks.rank, HELD_OUT, self.ranks.world_size)
        return {"val_loss": self.ranks.sum([find_loss(model, own)])[0] / HELD_OUT}


def train(folder, ranks, name, ema_decay):
    task = Normed(ranks, build(name))
    optim = OptimParams(lr=1e-3, lr_batch_size=BATCH, warmup_epochs=0)
    watch = Watch(folder, device="cpu", jsonl=False, tensorboard=False, every=9, ranks=ranks)
    options = {"drop_path": 0.0, "optim": optim, "ema_decay": ema_decay}
    params = TrainParams(model="", data="", epochs=2, batch_size=BATCH, **options)
    how = {"checkpointer": Checkpointer(folder, lambda line: None), "watch": watch}
    seen = {}

    def keep(epoch, model):
        seen[epoch] = {key: value.clone() for key, value in model.state_dict().items()}

    run, model = fit(task, params, save_every_steps=2, snapshot=keep, **how)
    everyone = ranks.gather({key: value.clone() for key, value in model.state_dict().items()})
    scores = [row["val_loss"] for row in run.curve]
    return {"scores": [*scores, run.scores["val_loss"]], "states": everyone, "snapshots": seen}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with joined("cpu") as ranks:
        found = {}
        for name in sys.argv[2:]:
            for decay in (None, 0.5):
                inside = folder / f"{name}_{decay}"
                found[name, decay] = train(inside, ranks, name, decay)
        if ranks.first:
            torch.save(found, folder / "found.pt")
