"""The program of test_ranks.py, run alone and under torchrun: five deterministic steps of Vittt-nano in fp64."""

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

BATCH, STEPS = 64, 5


class Random(Task):
    batch_size, steps_per_epoch, device = BATCH, STEPS, torch.device("cpu")
    curve_split = reported_split = "val"

    def __init__(self, ranks):
        torch.manual_seed(0)
        self.model = build_model("vittt_nano_patch16_144", img_size=32, num_classes=10, depth=2).double()
        self.ranks, self.losses, self.gradients = ranks, [], None
        self.order = TrainOrder(BATCH * STEPS, ranks.share(BATCH, "batch"), 0, ranks.rank, ranks.world_size)

    def batches(self, epoch, start):
        for keys in self.order.batches(epoch, start):
            # the first step is done; its gradients still stand, averaged over the ranks
            if self.losses and self.gradients is None:
                self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            drawn = [torch.Generator().manual_seed(index) for _, index in keys]
            images = [torch.randn(3, 32, 32, generator=g, dtype=torch.float64) for g in drawn]
            yield torch.stack(images), torch.tensor([i % 10 for _, i in keys])

    def loss(self, network, batch):
        loss = F.cross_entropy(network(batch[0]), batch[1])
        self.losses.append(self.ranks.sum([loss.item()])[0] / self.ranks.world_size)
        return {"loss": loss}

    def evaluate(self, model, split):
        return {}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with joined("cpu") as ranks:
        task = Random(ranks)
        optim = OptimParams(lr=1e-3, lr_batch_size=BATCH, warmup_epochs=0, clip_grad_norm=None)
        watch = Watch(folder, device="cpu", jsonl=True, tensorboard=False, every=2, ranks=ranks)
        params = TrainParams(model="", data="", epochs=1, batch_size=BATCH, drop_path=0.0, optim=optim)
        how = {"checkpointer": Checkpointer(folder / "state", lambda line: None), "watch": watch}
        fit(task, params, save_every_steps=200, snapshot=lambda epoch, model: None, **how)
        if ranks.first:
            torch.save({"losses": task.losses, "gradients": task.gradients}, folder / "seen.pt")
