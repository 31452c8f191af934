"""The program of test_ranks.py, run under torchrun: what the processes exchange, and what they train together."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from repro.core.ranks import joined
from repro.data.loader import TrainOrder
from repro.models.registry import build_model
from repro.training.checkpoint import Checkpointer
from repro.training.loop import Task, fit
from repro.training.params import OptimParams, TrainParams
from repro.training.watch import Watch

BATCH, STEPS, HELD_OUT = 8, 3, 6
VITTT, NORMED = "vittt_nano_patch16_144", "resnet_nano"
# the second has batch norms, with a moving average of the weights and without
TRAININGS = ((VITTT, None), (NORMED, None), (NORMED, 0.5))


def build(name):
    torch.manual_seed(0)
    if name == NORMED:
        return build_model(name, num_classes=5)
    return build_model(name, img_size=32, num_classes=5, depth=1, embed_dim=32).double()


def draw(model, indices):
    """Images whose mean and deviation grow with their numbers, and their classes."""
    dtype = next(model.parameters()).dtype
    generators = [torch.Generator().manual_seed(index) for index in indices]
    noise = [torch.randn(3, 32, 32, generator=generator, dtype=dtype) for generator in generators]
    images = [(1 + index % 7) * x + index % 5 for index, x in zip(indices, noise, strict=True)]
    return torch.stack(images), torch.tensor([index % 5 for index in indices])


@torch.no_grad()
def find_loss(model, numbers):
    """The sum of the losses of held-out images."""
    images, labels = draw(model, [1000 + number for number in numbers])
    return F.cross_entropy(model(images), labels, reduction="sum").item()


class Drawn(Task):
    batch_size, steps_per_epoch, device = BATCH, STEPS, torch.device("cpu")
    curve_split, reported_split = "val", "test"

    def __init__(self, ranks, model):
        self.ranks, self.model, self.losses, self.gradients = ranks, model, [], None
        self.marks = torch.zeros(4, dtype=torch.uint8)
        self.marks[[ranks.rank, 2]] = 1
        self.order = TrainOrder(BATCH * STEPS, ranks.share(BATCH, "batch"), 0, ranks.rank, ranks.world_size)

    def batches(self, epoch, start):
        for keys in self.order.batches(epoch, start):
            # the first step is done; its gradients still stand, averaged over the ranks
            if self.losses and self.gradients is None:
                self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            yield draw(self.model, [index for _, index in keys])

    def loss(self, network, batch):
        loss = F.cross_entropy(network(batch[0]), batch[1])
        self.losses.append(self.ranks.sum([loss.item()])[0] / self.ranks.world_size)
        return {"loss": loss}

    def evaluate(self, model, split):
        own = range(self.ranks.rank, HELD_OUT, self.ranks.world_size)
        return {"val_loss": self.ranks.sum([find_loss(model, own)])[0] / HELD_OUT}


def copy_state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def train(folder, ranks, name, ema_decay):
    """What two epochs of a model showed: losses, the first gradients, scores, and the states behind them."""
    task, snapshots = Drawn(ranks, build(name)), {}
    optim = OptimParams(lr=1e-3, lr_batch_size=BATCH, warmup_epochs=0, clip_grad_norm=None)
    watch = Watch(folder, device="cpu", jsonl=True, tensorboard=False, every=2, ranks=ranks)
    options = {"drop_path": 0.0, "optim": optim, "ema_decay": ema_decay}
    params = TrainParams(model="", data="", epochs=2, batch_size=BATCH, **options)
    how = {"checkpointer": Checkpointer(folder / "state"), "watch": watch, "save_every_steps": 2}
    run, model = fit(task, params, snapshot=lambda epoch, model: snapshots.update({epoch: copy_state(model)}), **how)
    found = {"losses": task.losses, "gradients": task.gradients, "snapshots": snapshots}
    found["scores"] = [*(row["val_loss"] for row in run.curve), run.scores["val_loss"]]
    return found | {"states": ranks.gather(copy_state(model)), "marks": ranks.gather(task.marks.tolist())}


def exchange(ranks):
    assert ranks.any(ranks.rank == 1, False) == [True, False]
    assert ranks.sum([1.0, ranks.rank]) == [2.0, 1.0]
    assert ranks.gather(ranks.rank * 10) == ([0, 10] if ranks.first else [])
    assert ranks.from_first({"rank": ranks.rank}) == {"rank": 0}


def average(ranks):
    one = float(1 + 2 * ranks.rank)
    values = [torch.full((2, 3), one), torch.tensor(one, dtype=torch.bfloat16), torch.full((2,), one).double()]
    values += [torch.tensor(int(one)), torch.full((4, 2), one).T, torch.zeros(0), torch.full((), one).half()]
    kept = values[3].clone()
    ranks.average(values)
    assert all((x == 2).all() for i, x in enumerate(values) if i != 3) and values[3] == kept
    same = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    copy = same.clone()
    ranks.average([copy])
    assert torch.equal(copy, same)  # what is equal stays so to the bit
    ranks.average([])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with joined("cpu") as ranks:
        exchange(ranks)
        average(ranks)
        found = {case: train(folder / "_".join(map(str, case)), ranks, *case) for case in TRAININGS}
        if ranks.first:
            torch.save(found, folder / "found.pt")
