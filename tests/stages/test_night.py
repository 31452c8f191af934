"""A cell of CIFAR-100 from the published files to the page."""

from pathlib import Path

import yaml

CELL = Path("results/pretrain/vittt_tiny_cifar100")


def test_from_the_files_to_the_page(checkout, cifar100_files, repro_cli):
    params = yaml.safe_load(Path("params.yaml").read_text())
    roots = {"cifar100": "data/c", "torchvision": str(cifar100_files)}
    params["runtime"]["data_roots"] = roots
    expected, split = {"classes": 2, "train": 8, "tune": 4, "test": 4}, {"images_per_class": 2, "seed": 0}
    params["prepare_data"] = {"cifar100": {"kind": "cifar100", "expected": expected, "tune_split": split}}
    cell = params["pretrain"].pop("nano") | {"data": "cifar100", "batch_size": 4, "epochs": 1, "snapshot_epochs": []}
    cell |= {"options": {"depth": 1, "patch_size": 4}}
    params |= {"report": {"speed_dtype": "fp16"}}
    params["pretrain"][CELL.name] = cell
    Path("params.yaml").write_text(yaml.safe_dump(params))
    repro_cli.run("prepare-data")
    repro_cli.run("pretrain", "--cell", CELL.name)
    repro_cli.run("report")
    page = Path("results/tables.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| Vittt-T |") and line.endswith("| – |"))
    assert row.count("%") == 1, "the slot of CIFAR-100 is filled, that of ImageNet-100 is not"
