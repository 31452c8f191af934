"""What a denoiser of latents needs of its VAE: the latents of a data set, and a decoder for `repro generate --vae`.

    python docs/examples/sd_vae.py encode VAE data/imagenet data/imagenet_latents
    python docs/examples/sd_vae.py decoder VAE decoder.pt2

VAE is an `AutoencoderKL` as diffusers (`pip install diffusers`) loads it: a folder, or a name on the Hugging Face hub.
Both commands have `--help`; docs/training.md says more.
"""

import io
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from repro.core.record import atomic
from repro.core.ui import Progress
from repro.data.loader import EvalLoader
from repro.data.tree import scan_tree
from repro.tasks.generation.data import open_split
from repro.tasks.generation.params import InputSettings
from repro.tasks.generation.task import to_inputs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Side = Annotated[int, typer.Option(help="Side of the pictures in pixels.")]


def open_vae(name: str) -> Any:
    """An `AutoencoderKL` in eval mode."""
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(name).eval().requires_grad_(False)


@app.command()
def encode(
    vae: str,
    pictures: Path,
    latents: Path,
    kind: Annotated[Literal["imagenet", "folder"], typer.Option(help="How the pictures are laid out.")] = "imagenet",
    image_size: Side = 256,
    batch_size: int = 16,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Write the latents of every picture and of its mirror image; those that are there are not made again."""
    write_latents(open_vae(vae).to(device), pictures, latents, kind=kind, image_size=image_size, batch_size=batch_size)


def write_latents(vae: Any, pictures: Path, latents: Path, *, kind: str, image_size: int, batch_size: int) -> None:
    """Write <latents>/<split>/<class>/<file of the picture>.npy, fp16 (2, K, h, w), without the scale; each is drawn
    from what the encoder gives.
    """
    tree, device = scan_tree(pictures, kind), next(vae.parameters()).device
    for split, own in tree.splits.items():
        named = zip(own.targets, own.names, strict=True)
        files = [latents / split / tree.classes[target] / f"{name.decode()}.npy" for target, name in named]
        loader = EvalLoader(
            open_split(tree, split, InputSettings(image_size=image_size, hflip=0.0)), batch_size=batch_size
        )
        with Progress(f"latents of {split}", len(files), unit="images") as progress, torch.inference_mode():
            for batch, _ in loader:
                asked = files[progress.done : progress.done + len(batch)]
                if not all(file.exists() for file in asked):
                    torch.manual_seed(progress.done)  # a repeated run writes the same
                    x = to_inputs(batch, device)
                    both = torch.stack([vae.encode(each).latent_dist.sample() for each in (x, x.flip(-1))], dim=1)
                    for file, array in zip(asked, both.half().cpu().numpy(), strict=True):
                        buffer = io.BytesIO()
                        np.save(buffer, array)
                        with atomic(file) as temporary:
                            temporary.write_bytes(buffer.getvalue())
                progress.update(progress.done + len(batch))
        loader.close()


class Decoder(torch.nn.Module):
    """The latents of a picture without their scale (1, K, h, w) -> the picture (1, 3, H, W) in [-1, 1]."""

    def __init__(self, vae: Any):
        super().__init__()
        self.vae = vae

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(latents).sample


@app.command()
def decoder(vae: str, file: Path, image_size: Side = 256) -> None:
    """Export the decoder with torch.export, for one picture at a time; FILE ends in .pt2."""
    own = open_vae(vae)
    side = image_size // 2 ** (len(own.config.block_out_channels) - 1)
    latents = torch.zeros(1, own.config.latent_channels, side, side)
    torch.export.save(torch.export.export(Decoder(own), (latents,)), file)


if __name__ == "__main__":
    app()
