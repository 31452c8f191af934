"""Every verb refuses wrong input: exit code 2, one line with the names that explain it, and nothing is written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from PIL import Image

from repro.models.registry import build_model
from repro.models.weights import save_weights
from tests.conftest import ROOT
from tests.stages import helpers
from tests.stages.helpers import ABLATE, DIGITS, GENERATE, NANO, SHELL, T5, WEIGHTS, add_params, save_model
from tests.stages.test_own import draw_scenes

OTHERS = f"""
resolution:
  {{data: digits, models: {{vittt: vittt.safetensors, deit: deit.safetensors}}, image_sizes: [32, 64], repeats: 3}}
efficiency:
  sizes: {{T: {{model: {NANO}, baseline: deit_tiny_patch16_224}}}}
  image_sizes: [32]
  backend: auto
tune:
  nano: {{cell: pretrain.nano, family: vittt, data: digits, lr: [0.003, 0.006], warmup_epochs: [0], seed: 7}}
"""


@pytest.fixture(scope="module")
def lab(prepared, tmp_path_factory) -> Path:
    """A checkout with a cell of every task, and files of every sort; no test may change it."""
    root = tmp_path_factory.mktemp("lab")
    shutil.copytree(prepared, root, symlinks=True, dirs_exist_ok=True)
    (root / "tests").symlink_to(ROOT / "tests")
    save_model(root / "vittt.safetensors", NANO, depth=1, img_size=32)
    save_model(root / "deit.safetensors", "deit_nano_patch16_144", depth=1, img_size=32)
    save_model(root / "larger.safetensors", "deit_nano_patch16_144", depth=1)
    save_model(root / "student.safetensors", T5, **SHELL)
    shown = {"image_size": 16, "channels": 1, "hflip": 0.0}
    task = {"name": "generate", "transform": shown, "sampling": {"sampler": "ddim", "steps": 4, "guidance": 2.0}}
    helpers.save_denoiser(root / "own.safetensors", "dit3_nano_patch4", task=task)
    helpers.save_official(root / "vit3.pth", "vit3_nano_patch16_144")
    torch.save({"model": timm.create_model("deit_tiny_patch16_224", depth=1).state_dict()}, root / "short.pth")
    options = {"depth": 1, "img_size": 32, "num_classes": 10}
    described = {"options": options, "preprocessing": {"input_size": [3, 32, 32]}, "classes": DIGITS}
    unknown = root / "unknown.safetensors"
    save_weights(unknown, build_model(NANO, **options), name="vittt_nanno_patch16_144", **described)
    helpers.save_denoiser(root / "lacking.safetensors", "dit3_nano_patch4", task={"name": "generate"})
    helpers.save_denoiser(root / "foreign.safetensors", "dit3_nano_patch4", task={"name": "sort"})
    Image.new("RGB", (20, 20)).save(root / "picture.png")
    (root / "text.png").write_text("no picture")
    (root / "there.pt2").write_text("somebody's")
    draw_scenes(root / "rooms")
    for text in (ABLATE, GENERATE, OTHERS):
        add_params(root, text)
    helpers.add_dense(root)
    dense = yaml.safe_load(helpers.DENSE)
    add_params(
        root, yaml.safe_dump({f"ablate_{name}": {"twin": dense[name]["nano"]} for name in ("detect", "segment")})
    )
    helpers.write_student(root)
    return root


# command -> what its line names; where a word is one of several, the more exact one
COMMANDS = {
    "ablate --cell conv1": "--cell conv1 'conv1d'",
    "ablate --cell nano": "--cell nano digits",
    "ablate --cell ablate_detect.conv1d": "--cell ablate_detect.conv1d digits",
    "ablate --cell twin": "--cell ablate_detect.twin ablate_segment.twin",
    "detect --flip": "--flip --data",
    "detect --data folder:.": "--data folder:. coco:",
    "detect --data coco:rooms --random": "--random --data",
    "detect --data coco:rooms --from own.safetensors": "own.safetensors classif",
    "detect --data coco:rooms --model resnet18.nosuchtag": "--model resnet18.nosuchtag tag",
    "pretrain --data folder:rooms/images --model dit3_nano_patch4": "--model dit3_nano_patch4 classifier",
    "efficiency --batch-size 0": "--batch-size 1",
    "efficiency --compile --graphs": "--compile --graphs",
    "efficiency --batches 2": "--batches --batch-size --help",
    "efficiency --minutes 0": "--minutes 0.1",
    "efficiency --mode test": "--mode",
    "efficiency --res 225": "--res 225 224",
    "efficiency --runs 10": "--runs",
    "efficiency --families deit,vmi": "--families vmi 'vim'",
    "efficiency --sizes L": "--sizes L B",
    "efficiency --device cuda": "cuda",
    "evaluate --data digit --weights vittt.safetensors": "digit 'digits'",
    "evaluate --data scenes_hard --weights vittt.safetensors": "scenes_hard profiles/paper.yaml",
    "evaluate --data digits --model vittt_tiny_patch16_224": "--weights --pretrained",
    "evaluate --data digits --pretrained": "--model",
    "evaluate --data digits --weights vittt.safetensors --limit 359": "--limit 359 test",
    "evaluate --data digits --weights vittt.safetensors --image-size 32 --image-size 32": "--image-size 32",
    "evaluate --data digits --weights vittt.safetensors --image-size 32 --image-size 40": "40x40 16",
    "evaluate --data digits --weights vittt.safetensors --models a --models b": "weights 2 --model",
    "evaluate --data digits --weights vittt.safetensors --table1": "--table1",
    "evaluate --data digits --weights absent.safetensors": "absent.safetensors",
    # before its data: the wrong file is what its user has to know
    "evaluate --data absent --weights own.safetensors": "own.safetensors 'generate' classifier",
    "evaluate --data digits --pretrained --model deit_tiny_patch16_224": "1000 digits 10",
    "evaluate --data digits --pretrained --model deit_tiny_patch16_22": "'deit_tiny_patch16_224'",
    "evaluate --data digits --pretrained --model deit_tiny_patch16_224.nobody_in1k": "nobody_in1k fb_in1k",
    "evaluate --data digits --pretrained --model vittt_tiny_patch16_224": "vittt_tiny_patch16_224 timm",
    "evaluate --data digits --weights vit3.pth --model vit3_tiny_patch16_224": "vit3.pth ViT3",
    "evaluate --data digits --weights vit3.pth --model deit_tiny_patch16_224": "vit3.pth deit_tiny_patch16_224",
    "evaluate --data digits --weights vit3.pth --model vit3_nano_patch16_144 --image-size 100": "100x100 16",
    "explain text.png": "text.png",
    "explain picture.png --probe ascent": "--probe",
    "explain picture.png -o out.pdf": "out.pdf PNG",
    "explain picture.png --map gmm --weights deit.safetensors": "deit.safetensors --map erf",
    "explain --probe ascent --weights deit.safetensors": "Vision-TTT",
    "explain --data digits --map erf": "pictures",
    "explain picture.png --data digits --map erf": "--data --probe --map attention",
    "explain picture.png --map gmm --teacher softmax.safetensors": "--teacher --map attention",
    "explain picture.png --map attention": f"{WEIGHTS} --map erf",
    "explain picture.png --map attention --data digits": "--map attention --data",
    "explain picture.png --map attention --weights softmax.safetensors --teacher softmax.safetensors": "teacher",
    "explain picture.png --map attention --weights student.safetensors --teacher student.safetensors": "student.s",
    "explain picture.png --map attention --weights student.safetensors --teacher deit.safetensors": "fit student",
    "export --format onnx": "--weights",
    "export --weights vittt.safetensors --format safetensors --image-size 64": "--image-size onnx torch_export",
    "export --weights vittt.safetensors --format safetensors --any-size": "--any-size onnx torch_export",
    "export --weights vittt.safetensors --format torch_export -o there.pt2": "there.pt2",
    "generate": "--cell --weights",
    "generate --class-label 3": "--class-label --weights",
    "generate --cell nano --from absent.pt": "--from absent.pt",
    "generate --cell nano --from vittt.safetensors": f"vittt.safetensors {NANO}",
    "generate --weights own.safetensors --cell nano": "--cell --weights",
    "generate --weights own.safetensors -o out --class-label 10": "--class-label 10 0 9",
    "generate --weights own.safetensors -o out --class-label -1": "--class-label -1",
    "generate --weights own.safetensors -o out --class-label digit_x": "digit_x 'digit_",
    "generate --weights own.safetensors -o out --guidance -1": "generate.guidance -1.0 >= 0",
    "generate --weights own.safetensors -o out --steps 1001": "generate.steps 1001 1000",
    "generate --weights own.safetensors -o out --steps 1": "generate.steps 1 >= 2",
    "generate --weights own.safetensors -o out --image-size 18": "18x18 4",
    "generate --weights own.safetensors -o out --image-size 0": "image_size 0 >= 1",
    "generate --weights own.safetensors -o out --vae own.safetensors": "own.safetensors pixels",
    "generate --weights own.safetensors -o out --data digits": "--data --inception --judge",
    "generate --weights own.safetensors -o out --judge own.safetensors": "own.safetensors 'generate'",
    "generate --weights own.safetensors -o out --judge vit3.pth": "vit3.pth judge",
    "generate --weights own.safetensors -o out --judge vittt.safetensors --data numbers": "numbers prepare_data",
    "generate --weights own.safetensors -o out --judge vittt.safetensors --data batch.npz": "--data batch.npz judge",
    "generate --weights own.safetensors -o out --inception own.safetensors": "--inception --data",
    "generate --weights own.safetensors -o out --inception-sha256 0000000000000000": "--inception-sha256 --inception",
    "generate --weights vittt.safetensors -o out": "vittt.safetensors classify generate",
    "generate --weights absent.safetensors -o out": "absent.safetensors",
    "generate --weights lacking.safetensors -o out": "lacking.safetensors 'transform'",
    "generate --weights params.yaml -o out": "params.yaml checkpoint",
    "generate --weights vit3.pth -o out": "vit3.pth --model",
    "generate --weights params.yaml -o out --model dit3_xl": "--model dit3_xl",
    "generate --weights params.yaml -o out --model dit3_small_patch2": "params.yaml",
    "kernels check": "CUDA",
    "kernels check --op bi_wvk": "bi_wvk 'bi_wkv'",
    "linearize --data digits": "--data --from",
    "linearize --inner gate": "--inner --from",
    "linearize --cell student --freeze": "--freeze --from",
    "linearize --from absent.pth": "--from absent.pth",
    "linearize --from resnet18": "--from resnet18 ViT",
    "linearize --from short.pth": "short.pth --model",
    "linearize --from softmax.safetensors --cell student": "--from --cell",
    "linearize --from softmax.safetensors --data coco": "coco profiles/paper.yaml",
    "linearize --from softmax.safetensors --data coco:.": "--data coco:. folder:",
    "linearize --from softmax.safetensors --neighbours 4": "neighbours 4",
    "linearize --from softmax.safetensors --inner linear --dwc none --freeze": "freeze linear none",
    "plan --gpu K80": "K80",
    "plan --profile papr": "papr 'paper'",
    "predict picture.png --weights picture.png": "picture.png",
    "predict picture.png --weights foreign.safetensors": "foreign.safetensors 'sort' segment",
    "predict picture.png --weights unknown.safetensors": f"'{NANO}'",
    "predict picture.png --weights vittt.safetensors --task detect": "vittt.safetensors classify detect",
    "predict picture.png --weights own.safetensors": "own.safetensors generate",
    "predict text.png --weights vittt.safetensors": "text.png",
    "prepare-data --cell imagenet": "data/imagenet",
    "pretrain --cell nan": "pretrain.nan 'nano'",
    "pretrain --model vim_nano_patch16_144": "--model --data",
    "pretrain --data folder:. --cell nano": "--data --cell",
    "pretrain --data folder:. --model vittt_nanno_patch16_144": "--model vittt_nanno_patch16_144",
    "pretrain --data coco:.": "--data coco:. folder:",
    "pretrain --data folder:": "--data folder: no such",
    "pretrain --data folder:nowhere": "folder:nowhere",
    "pretrain --data zip:a": "zip:a folder:PATH",
    "pretrain --data digits": "--data digits folder:",
    "tune --cell nanno": "tune.nanno 'nano'",
}
# a value of params.yaml -> what the line of its stage names; tests/core/test_config.py has the types and the bounds
VALUES = {
    "ablate.conv1d.seeds=[]": "ablate.conv1d seeds",
    "ablate.conv1d.seeds=[0, 0]": "ablate.conv1d seeds",
    "ablate.conv1d.seeds=[-1]": "ablate.conv1d seeds",
    "detect.nano.model=vim_nano_patch16_144": f"{WEIGHTS} {NANO} vim_nano_patch16_144",
    "detect.nano.options={depth: 8}": f"{WEIGHTS} {NANO}",
    "detect.nano.options={depth: 3}": "4 blocks",
    "detect.nano.optim.milestones=[3]": "milestones 3 2",
    "efficiency.sizes.T.model=vittt_nano_patch16_14": f"'{NANO}'",
    "efficiency.backend=triton": "cpu CUDA",
    "generate.nano.model=dit3_nano_patch": "'dit3_nano_patch4'",
    "generate.nano.options={in_channels: 3}": "in_channels transform",
    "generate.nano.transform.image_size=18": "generate.nano 18x18 4",
    "generate.nano.transform.channels=2": "generate.nano.transform.channels 2 1 3",
    "generate.nano.transform.latents={stride: 3}": "latents channels image_size 3",
    "generate.nano.transform={image_size: 16, channels: 3, latents: {}, hflip: 0.0}": "transform.latents digits",
    "generate.nano.sampling.sampler=dpm": "'dpm' ddpm ddim",
    "generate.nano.drop_path=0.1": "generate.nano.drop_path 0.1 <= 0",
    "generate.nano.label_dropout=1.5": "generate.nano.label_dropout 1.5 <= 1",
    "generate.nano.judge.weights=nobody.safetensors": "nobody.safetensors",
    "linearize.student.init=null": "init softmax",
    "linearize.student.optim.layer_decay=0.6": "optim.layer_decay",
    f"linearize.student.model={NANO}": f"linearize.student.model {NANO}",
    "linearize.student.options.depth=3": "student blocks.2",
    "linearize.student.transform.image_size=36": "36x36 8",
    "pretrain.nano.epochs=1": "snapshot_epochs 2",
    "pretrain.nano.optim.schedule=poly": "pretrain.nano optim.schedule poly cosine",
    "pretrain.nano.batch_size=127": "batch_size 127",
    "pretrain.nano.batch_size=4096": "1079",
    "pretrain.nano.options={depht: 1}": "depht",
    "pretrain.nano.options={drop_path_rate: 0.1}": "options drop_path_rate",
    "pretrain.nano.data=numbers": "numbers prepare_data",
    "resolution.models.deit=larger.safetensors": "sizes",
    "resolution.repeats=0": "resolution.repeats 0 >= 1",
    "tune.nano.cell=nano": "tune.nano.cell nano SECTION.CELL pretrain",
    "tune.nano.cell=pretrian.nano": "tune.nano.cell pretrian.nano pretrain",
    "tune.nano.cell=generate.nano": "tune.nano.cell generate.nano held_out_mse",
    "tune.nano.cell=pretrain.nanno": "pretrain.nanno 'nano'",
    "tune.nano.family=vit3": "tune.nano.family vit3 pretrain.nano vittt",
    "tune.nano.data=scenes": "tune.nano.data scenes pretrain.nano digits",
    "tune.nano.seed=0": "tune.nano.seed 0 pretrain.nano",
    "tune.nano.lr=[]": "tune.nano lr []",
    "tune.nano.lr=[0.0]": "tune.nano.lr 0.0",
    "tune.nano.lr=[0.003, 0.003]": "tune.nano lr [0.003, 0.003]",
    "tune.nano.warmup_epochs=[0, 2]": "tune.nano.warmup_epochs 2 pretrain.nano",
}


def list_files(root: Path) -> dict[Path, int]:
    """The files with the times of their last change, without those of the code and the data."""
    folders = root / "results", root / ".runs"
    found = [*root.iterdir(), *(file for folder in folders for file in folder.rglob("*"))]
    return {file: file.stat().st_mtime_ns for file in found if file.is_file()}


@pytest.fixture
def refuse(lab, monkeypatch, repro_cli):
    """`refuse("pretrain --flip", "--flip --data")`: assert that the command is refused with a line that has the words."""
    monkeypatch.chdir(lab)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def call(command: str, names: str) -> None:
        before = list_files(lab)
        err = repro_cli.refuse(*command.split())
        assert not [name for name in names.split() if name not in err], err
        assert list_files(lab) == before

    return call


@pytest.mark.parametrize(("command", "names"), COMMANDS.items(), ids=COMMANDS)
def test_a_wrong_command_is_one_line_and_writes_nothing(refuse, command, names):
    refuse(command, names)


@pytest.fixture
def settings(lab):
    """The values of params.yaml, which is as before when the test ends."""
    text = (lab / "params.yaml").read_text()
    yield yaml.safe_load(text)
    (lab / "params.yaml").write_text(text)


def put(values: dict[str, Any], change: str) -> None:
    """Set a value at its place, as in `pretrain.nano.epochs=two`."""
    place, _, value = change.partition("=")
    *path, last = place.split(".")
    for key in path:
        values = values[key]
    values[last] = yaml.safe_load(value)


@pytest.mark.parametrize(("change", "names"), VALUES.items(), ids=VALUES)
def test_a_wrong_value_is_one_line_and_writes_nothing(lab, settings, refuse, change, names):
    put(settings, change)
    (lab / "params.yaml").write_text(yaml.safe_dump(settings))
    stage, cell = change.partition("=")[0].split(".")[:2]
    cells = ("ablate", "detect", "generate", "linearize", "pretrain", "tune")
    refuse(f"{stage} --cell {cell}" if stage in cells else stage, names)


@pytest.mark.parametrize(
    "command",
    [
        "evaluate --data digits --limit 9 --weights vittt.safetensors",
        "predict picture.png --weights vittt.safetensors",
        "export --format safetensors -o out --weights vittt.safetensors",
        "explain picture.png -o out.png --weights vittt.safetensors",
        "linearize --from vittt.safetensors",
        "generate --weights vittt.safetensors",
        "generate --cell nano --from vittt.safetensors",
    ],
)
def test_another_file_than_the_stated_one_is_refused(refuse, command):
    refuse(f"{command} --sha256 00000000", "vittt.safetensors SHA-256")
    refuse(f"{command} --sha256 0000000", "0000000 8")


SECTIONS = ("pretrain", "linearize", "detect", "segment", "tune", "pretrain_seeds", "prepare_data")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_without_a_cell_is_one_line(lab, settings, refuse, section):
    settings[section] = {}
    (lab / "params.yaml").write_text(yaml.safe_dump(settings))
    verbs = {
        "pretrain_seeds": "seeds",
        "prepare_data": "prepare-data",
        "linearize": "linearize --from deit.safetensors",
    }
    refuse(verbs.get(section, section), f"{section}: has no cell")
    if section == "pretrain":
        refuse("explain picture.png -o out.png", "pretrain: has no cell")
