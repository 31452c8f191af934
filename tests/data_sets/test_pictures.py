"""Which files and folders make a data set: class folders, archives, lists and `predict FOLDER` agree, in many forms."""

import csv
import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.cells import find_data_root, open_cell
from repro.data.check.run import Depth, check_parts
from repro.data.findings import RaiseFirst
from repro.data.kinds import KINDS
from repro.data.own import parse_own, split_own
from repro.data.pictures import list_classes
from repro.data.prepare import prepare_own, scan_manifest
from repro.data.tree import scan_tree
from repro.inference.predict import find_pictures
from tests.data_sets.conftest import findings, only
from tests.data_sets.made import picture


def plant(*names: str | bytes) -> Callable[[Path], None]:
    """Files below a folder; a name that ends in a slash is a folder."""

    def write(folder: Path) -> None:
        for name in names:
            place = Path(os.fsdecode(os.path.join(os.fsencode(folder), os.fsencode(name))))
            (place if os.fsdecode(name).endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
            if not place.is_dir():
                place.write_bytes(b"no picture")

    return write


# what lies in a class folder beside its pictures
BESIDE = {
    "hidden": plant("._0.jpg", ".hidden.jpg", ".thumbnails/0.jpg", ".ipynb_checkpoints/0-checkpoint.jpg"),
    "of systems": plant(
        *("__MACOSX/cat/._0.jpg", "@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg", "@Recycle/1.jpg", "#recycle/1.jpg"),
        *("$RECYCLE.BIN/0.jpg", "System Volume Information/0.jpg", "Thumbs.db", "desktop.ini", "lost+found/0.jpg"),
        *("__macosx/0.jpg", "@EADIR/1.jpg"),
    ),
    "folders that look like pictures": plant("x.jpg/", "y.PNG/"),
    "a pipe": lambda folder: os.mkfifo(folder / "waits.jpg"),
}


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes of four pictures."""
    for label in ("cat", "dog"):
        for number in range(4):
            picture(tmp_path / "pets" / label / f"{number}.jpg", (8, 8), seed=number)
    return tmp_path / "pets"


def link_splits(pets: Path, root: Path) -> Path:
    """Make a set whose splits are both this folder of classes."""
    root.mkdir()
    for split in ("train", "val"):
        (root / split).symlink_to(pets)
    return root


def pack_splits(pets: Path, root: Path) -> Path:
    """Make a set whose splits are both an archive of this folder of classes."""
    for split, name in (("train", "0.tar"), ("val", "0.TAR")):
        (root / split).mkdir(parents=True)
        with tarfile.open(root / split / name, "w") as archive:
            archive.add(pets, ".")
    return root


@pytest.mark.parametrize("form", BESIDE)
def test_what_lies_beside_pictures_is_left_out_wherever_pictures_are_listed(pets, tmp_path, form):
    expected = {label: [f"{label}/{number}.jpg" for number in range(4)] for label in ("cat", "dog")}
    BESIDE[form](pets / "cat")
    if form not in ("a pipe", "folders that look like pictures"):  # these would be empty classes
        BESIDE[form](pets)
    assert list_classes(pets, RaiseFirst()) == expected
    assert find_pictures([pets / "cat"], unique_names=True) == [pets / name for name in expected["cat"]]
    for root in (link_splits(pets, tmp_path / "split"), pack_splits(pets, tmp_path / "packed")):
        if form == "a pipe" and root.name == "packed":
            with pytest.raises(UserError, match="waits.jpg"):
                scan_tree(root, "folder")
            continue
        tree = scan_tree(root, "folder")
        assert tree.classes == ("cat", "dog") and tree.splits["val"].names.tolist() == 2 * [
            b"%d.jpg" % number for number in range(4)
        ]


@pytest.mark.parametrize("suffix", [".tif", ".HEIC", ""])
def test_a_file_that_may_be_a_picture_and_is_not_read_is_counted_and_named(pets, tmp_path, capsys, suffix):
    plant(f"dog/a{suffix}", f"dog/b{suffix}", "dog/notes.txt")(pets)
    named = suffix.lower() or "without suffix"

    def said() -> list[str]:
        return [line for line in capsys.readouterr().out.splitlines() if f"2 {named}" in line]

    list_classes(pets, RaiseFirst(progress=True))
    assert len(said()) == 1
    find_pictures([pets / "dog"])
    assert len(said()) == 1
    packed = pack_splits(pets, tmp_path / "packed")
    for _ in range(2):  # the second time from the listing that was kept
        scan_manifest(packed, "folder", report=RaiseFirst(progress=True))
        assert len(said()) == 2
    lines, _, _ = findings("folder", link_splits(pets, tmp_path / "split"))
    assert len([line for line in only(lines, "warning") if named in line]) == 2
    (tmp_path / "pets/list.csv").write_text(f"file,label\ncat/0.jpg,cat\ndog/a{suffix},dog\n")
    with pytest.raises(UserError, match="line 3.*dog/a"):
        split_own(Paths(tmp_path), parse_own(f"folder:{pets / 'list.csv'}"))


def test_pictures_of_these_suffixes_are_read(pets):
    suffixes = [".jfif", ".JPE", ".jpeg", ".Png", ".bmp", ".WebP"]
    for suffix in suffixes:
        picture(pets / f"cat/0{suffix}.jpg").rename(pets / f"cat/0{suffix}")
    assert {f"cat/0{suffix}" for suffix in suffixes} <= set(list_classes(pets, RaiseFirst())["cat"])


def link_up(pets: Path) -> None:
    (pets / "cat/up").symlink_to(pets)


def link_itself(pets: Path) -> None:
    (pets / "cat/more").mkdir()
    (pets / "cat/more/again").symlink_to(pets / "cat")


def link_twice(pets: Path) -> None:
    (pets.parent / "pool").mkdir()
    picture(pets.parent / "pool/9.jpg", (8, 8))
    for name in ("a", "b"):
        (pets / "cat" / name).symlink_to(pets.parent / "pool")


def link_class(pets: Path) -> None:
    (pets / "fox").symlink_to(pets.parent / "fox")
    picture(pets.parent / "fox/deep/9.jpg", (8, 8))


LINKS = {
    "to a folder above": (link_up, {"cat": 4, "dog": 4}),
    "to itself": (link_itself, {"cat": 4, "dog": 4}),
    "to one folder twice": (link_twice, {"cat": 5, "dog": 4}),
    "to a class": (link_class, {"cat": 4, "dog": 4, "fox": 1}),
    "to nothing": (lambda pets: (pets / "cat/8.jpg").symlink_to(pets / "gone"), "8.jpg: .*broken"),
    "in a circle": (lambda pets: (pets / "cat/x.jpg").symlink_to(pets / "cat/x.jpg"), "x.jpg"),
    "to another class": (lambda pets: (pets / "cat/more").symlink_to(pets / "dog"), "cat/more.*another class"),
    "of a class to another": (lambda pets: (pets / "kitty").symlink_to(pets / "cat"), "kitty.*another class"),
}


@pytest.mark.parametrize("form", LINKS)
def test_linked_folders_are_followed_and_end(pets, form):
    link, expected = LINKS[form]
    link(pets)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            list_classes(pets, RaiseFirst())
        return
    assert {label: len(files) for label, files in list_classes(pets, RaiseFirst()).items()} == expected


def test_what_no_class_takes_is_said(pets, capsys):
    plant("loose.jpg", "notes/todo.txt", "more.tar")(pets)
    list_classes(pets, RaiseFirst(progress=True))
    said = capsys.readouterr().out
    assert "1 picture outside" in said and "notes: holds no picture" in said and "1 .tar" in said
    link_up(pets)
    list_classes(pets, RaiseFirst(progress=True))
    assert "cat/up" in capsys.readouterr().out


def nest(root: Path, *folders: str, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for folder in folders:
        for label in classes:
            for number in range(3):
                picture(root / folder / label / f"{number}.jpg", (8, 8), seed=number)
    return root


SPLITS = {
    ("train", "test"): ("train", "test"),
    ("Train", "Test"): ("Train", "Test"),
    ("training", "validation"): ("training", "validation"),
    ("train", "holdout"): ("train", "holdout"),
    ("seg_train", "seg_test"): ("seg_train", "seg_test"),
    ("Training Data", "Validation Data"): ("Training Data", "Validation Data"),
    ("train", "val", "test"): ("train", "val"),
    ("train", "val", "validation"): ("train", "val"),
    ("train", "tune", "test"): ("train", "test"),
}


@pytest.mark.parametrize("folders", SPLITS)
def test_splits_by_any_common_name_are_read_as_splits_and_said(tmp_path, capsys, folders):
    root, (train, held_out) = nest(tmp_path / "set", *folders), SPLITS[folders]
    data, paths = f"folder:{root}", Paths(tmp_path / "checkout")
    prepare_own(data, paths, Runtime(data_roots={}))
    said = capsys.readouterr().out
    assert f"{train}/ is learned" in said and f"{held_out}/ is held out" in said
    assert not (tmp_path / "checkout/data").exists()
    cell = open_cell(paths, Runtime(data_roots={}), data)
    tree = cell.open_tree()
    assert tree.classes == ("cat", "dog")
    assert tree.folder("train") == root / train and tree.folder(cell.row.reported_split) == root / held_out
    lines, errors, _ = findings("folder", root)
    assert errors == 0 and any(f"{held_out}/ is held out" in line for line in lines)
    assert scan_manifest(root, "folder") == cell.manifest
    for idle in set(folders) - {train, held_out, "tune"}:
        assert f"{idle}/ is not read" in said


OPEN = {
    "train alone": ("train",),
    "nothing to train on": ("test", "val"),
    "numbered": ("train1", "train2", "test"),
    "two for one": ("train", "valid", "validation"),
    "split numbers": ("split_1", "split_2"),
    "another language": ("entrenamiento", "prueba"),
    "with a class": ("train", "fish"),
}


@pytest.mark.parametrize("form", OPEN)
def test_folders_that_look_like_splits_are_refused_before_anything_is_linked(tmp_path, form):
    root = nest(tmp_path / "set", *OPEN[form])
    for try_it in (
        lambda: prepare_own(f"folder:{root}", Paths(tmp_path / "checkout"), Runtime(data_roots={})),
        lambda: check_parts(KINDS["folder"], root, RaiseFirst(), Depth()),
        lambda: scan_manifest(root, "folder"),
    ):
        with pytest.raises(UserError, match=f"{root}(/val|/train)?: .*/") as caught:
            try_it()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "checkout").exists()


def vehicles(root: Path) -> None:
    for label in ("bus", "car", "train"):
        picture(root / label / "0.jpg", (8, 8))
        picture(root / label / "1.jpg", (8, 8))


CLASSES = {
    "a class called train": (vehicles, {"bus", "car", "train"}),
    "one folder in each": (lambda root: nest(root, "cat", "dog", classes=("images",)), {"cat", "dog"}),
    "one shared": (
        lambda root: [nest(root, "bird", classes=("owl", "rest")), nest(root, "fish", classes=("eel", "rest"))],
        {"bird", "fish"},
    ),
    "pictures beside": (
        lambda root: [nest(root, "cat", "dog", classes=("2020", "2021")), picture(root / "cat/0.jpg", (8, 8))],
        {"cat", "dog"},
    ),
}


@pytest.mark.parametrize("form", CLASSES)
def test_classes_that_only_resemble_splits_are_classes(tmp_path, form):
    make, expected = CLASSES[form]
    make(tmp_path / "set")
    split_own(Paths(tmp_path / "checkout"), parse_own(f"folder:{tmp_path / 'set'}"))
    for split in ("train", "val"):
        assert {folder.name for folder in (tmp_path / "checkout/data/own_set" / split).iterdir()} == expected


def test_one_class_is_refused_with_splits_too(tmp_path):
    root = nest(tmp_path / "set", "train", "val", classes=("images",))
    with pytest.raises(UserError, match="'images'"):
        prepare_own(f"folder:{root}", Paths(tmp_path / "checkout"), Runtime(data_roots={}))
    assert not (tmp_path / "checkout").exists()


def pack(root: Path, members: Iterable[tuple], format: int = tarfile.PAX_FORMAT) -> None:
    """Write both splits as an archive of members: name, content, and what else than a file it is, with its target."""
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        with tarfile.open(root / split / "0.tar", "w", format=format) as archive:
            for name, content, *link in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                if link:
                    member.type, member.linkname = link
                archive.addfile(member, io.BytesIO(content))


LNK, SYM = tarfile.LNKTYPE, tarfile.SYMTYPE
MEMBERS: dict[str, list[tuple]] = {
    "same stems": [("cat/a.jpg", b"1"), ("cat/a.png", b"22"), ("cat/a.JPG", b"333"), ("dog/a.jpg", b"4")],
    "hard links": [("cat/a.jpg", b"1"), ("cat/b.jpg", b"", LNK, "cat/a.jpg"), ("dog/c.jpg", b"", LNK, "cat/a.jpg")],
    "symbolic links": [("cat/a.jpg", b"1"), ("cat/b.jpg", b"", SYM, "a.jpg"), ("dog/c.jpg", b"", SYM, "../cat/a.jpg")],
    "a link to a link": [
        ("dog/c.jpg", b"", SYM, "../cat/b.jpg"),
        ("cat/b.jpg", b"", SYM, "a.jpg"),
        ("cat/a.jpg", b"1"),
    ],
    "a link to a hidden file": [("cat/a.jpg", b"", SYM, "../.pool/x"), (".pool/x", b"1"), ("dog/a.jpg", b"2")],
    "appended again": [("cat/a.jpg", b"old"), ("dog/a.jpg", b"2"), ("cat/a.jpg", b"later")],
    "with ./": [("./cat/a.jpg", b"1"), ("./dog/a.jpg", b"22"), ("./cat/./b.jpg", b"3")],
    "twins": [("cat/a.jpg", b"1"), ("cat/._a.jpg", b"x"), ("__MACOSX/cat/._a.jpg", b"x"), ("dog/a.jpg", b"2")],
    "long names": [(f"cat/{'x' * 200}.jpg", b"1"), (f"dog/{'日' * 80}.jpg", b"2")],
    "a file, then a link": [("dog/a.jpg", b"2"), ("cat/a.jpg", b"1"), ("cat/a.jpg", b"", SYM, "../dog/a.jpg")],
    "a link, then a file": [
        ("cat/b.jpg", b"2"),
        ("cat/a.jpg", b"", SYM, "b.jpg"),
        ("cat/a.jpg", b"1"),
        ("dog/a.jpg", b""),
    ],
    "names that are not UTF-8": [("cat/caf\udce9.jpg", b"1"), ("dog/a.jpg", b"2")],
}


@pytest.mark.parametrize(
    ("form", "format"), [*((form, tarfile.PAX_FORMAT) for form in MEMBERS), ("long names", tarfile.GNU_FORMAT)]
)
def test_an_archive_holds_what_its_folder_holds(tmp_path, form, format):
    """The folder is what tar itself unpacks."""
    pack(tmp_path / "packed", MEMBERS[form], format)
    (tmp_path / "folders/val").mkdir(parents=True)
    (tmp_path / "folders/train").symlink_to("val")
    subprocess.run(["tar", "-xf", tmp_path / "packed/val/0.tar", "-C", tmp_path / "folders/val"], check=True)
    packed, folders = (scan_tree(tmp_path / name, "folder") for name in ("packed", "folders"))
    assert packed.classes == folders.classes
    assert packed.splits["val"].names.tolist() == folders.splits["val"].names.tolist()
    places = range(len(folders.splits["val"].names))
    assert [packed.source("val", place).read() for place in places] == [
        folders.source("val", place).read() for place in places
    ]


UNFIT = {
    "a link out of it": ("cat/b.jpg", b"", SYM, "../../elsewhere.jpg"),
    "a link to itself": ("cat/b.jpg", b"", SYM, "b.jpg"),
    "a link to a folder": ("kitty", b"", SYM, "cat"),
    "a hard link to nothing": ("cat/b.jpg", b"", LNK, "cat/gone.jpg"),
    "a pipe": ("cat/b.jpg", b"", tarfile.FIFOTYPE, ""),
}


@pytest.mark.parametrize("form", UNFIT)
def test_a_member_that_cannot_be_read_by_place_is_one_line(tmp_path, form):
    pack(tmp_path, [("cat/a.jpg", b"1"), ("dog/a.jpg", b"2"), UNFIT[form]])
    with pytest.raises(UserError, match=f"0.tar: {UNFIT[form][0]} is"):
        scan_tree(tmp_path, "folder")


def test_a_sparse_file_is_one_line(tmp_path):
    (tmp_path / "cat").mkdir()
    with open(tmp_path / "cat/a.jpg", "wb") as stream:
        stream.seek(2**20)
        stream.write(b"end")
    for split in ("train", "val"):
        (tmp_path / "set" / split).mkdir(parents=True)
        subprocess.run(
            ["tar", "--sparse", "-cf", tmp_path / "set" / split / "0.tar", "-C", tmp_path, "cat"], check=True
        )
    with pytest.raises(UserError, match="cat/a.jpg is a sparse file"):
        scan_tree(tmp_path / "set", "folder")


# members -> file and class of each picture, or what the error names; as WebDataset writes them
KEYS = {
    "single": (["0001.jpg", "0001.cls=3"], {"0001.jpg": "0003"}),
    "double": (["0001.input.jpg", "0001.cls=3"], {"0001.input.jpg": "0003"}),
    "double on both sides": (["0001.rgb.jpg", "0001.rgb.cls=3"], {"0001.rgb.jpg": "0003"}),
    "dots in the key": (["a.1.jpg", "a.1.cls=1", "a.2.jpg", "a.2.cls=2"], {"a.1.jpg": "0001", "a.2.jpg": "0002"}),
    "a dot in front": (["./0001.jpg", "0001.cls=3"], {"0001.jpg": "0003"}),
    "label again": (["0001.cls=3", "0001.jpg", "0001.cls=12"], {"0001.jpg": "0012"}),
    "sorted as numbers": (["a.jpg", "a.cls=10", "b.jpg", "b.cls=9"], {"b.jpg": "0009", "a.jpg": "0010"}),
    "in the folder of a class": (["cat/0001.jpg", "cat/0001.json={}"], {"0001.jpg": "cat"}),
    "no class": (["0001.jpg", "0001.json={}"], "0001.cls"),
    "one without": (["0001.jpg", "0001.cls=3", "0002.jpg"], "0002.jpg has no"),
    "two classes": (["0001.jpg", "0001.a.cls=3", "0001.b.cls=4"], "0001.jpg has 2"),
}


@pytest.mark.parametrize("form", KEYS)
def test_the_key_of_a_member_gives_its_class(tmp_path, form):
    members, expected = KEYS[form]
    pairs = (member.partition("=") for member in members)
    pack(tmp_path, [(name, content.encode()) for name, _, content in pairs])
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            scan_tree(tmp_path, "folder")
        return
    tree = scan_tree(tmp_path, "folder")
    found = [
        (os.fsdecode(name), tree.classes[target])
        for name, target in zip(tree.splits["val"].names, tree.splits["val"].targets)
    ]
    assert found == list(expected.items())


LABELS = ["..", "a/b", ".hidden", "@eaDir", "日" * 86, "a\x07b", " "]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_that_no_class_folder_can_have_is_refused_by_line(pets, tmp_path, label):
    (pets / "list.csv").write_text(f"file,label\ncat/0.jpg,cat\ncat/1.jpg,{label}\n")
    with pytest.raises(UserError, match="line 3") as caught:
        split_own(Paths(tmp_path / "checkout"), parse_own(f"folder:{pets / 'list.csv'}"))
    assert "\n" not in str(caught.value) and not (tmp_path / "checkout").exists()


@pytest.mark.parametrize("label", ["x.jpg", "train", "~", "日本", "x" * 255])
def test_any_other_label_is_a_class(pets, tmp_path, label):
    rows = [
        f"{name}/{number}.jpg,{label if name == 'cat' else 'dog'}" for name in ("cat", "dog") for number in range(4)
    ]
    (pets / "list.csv").write_text("\n".join(["file,label", *rows]))
    data, paths = f"folder:{pets / 'list.csv'}", Paths(tmp_path / "checkout")
    prepare_own(data, paths, Runtime(data_roots={}))
    assert set(open_cell(paths, Runtime(data_roots={}), data).open_tree().classes) == {label, "dog"}


def test_a_list_cannot_name_what_is_left_out(pets, tmp_path):
    picture(pets / "cat/.0.jpg", (8, 8))
    (pets / "list.csv").write_text("file,label\ncat/0.jpg,cat\ncat/.0.jpg,dog\n")
    with pytest.raises(UserError, match=r"line 3: cat/\.0"):
        split_own(Paths(tmp_path / "checkout"), parse_own(f"folder:{pets / 'list.csv'}"))


NAMES = [
    b"caf\xe9.jpg",
    "日".encode() * 83 + b"ab.jpg",
    "e\u0301\u202f.jpg".encode(),
    b"a\nb.jpg",
    b"a,b\"c'.jpg",
    b"~.jpg",
]
NAMES += [b"\xff" * 251 + b".jpg"]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_of_any_name_is_linked_and_listed(pets, tmp_path, name):
    file = os.path.join(os.fsencode(pets), b"cat", name)
    os.rename(pets / "cat/0.jpg", file)
    data, paths = f"folder:{pets}", Paths(tmp_path / "checkout")
    prepare_own(data, paths, Runtime(data_roots={}))
    tree = open_cell(paths, Runtime(data_roots={}), data).open_tree()
    linked = {
        os.path.realpath(os.fsencode(tree.path(split, place)))
        for split in ("train", "val")
        for place in range(len(tree.splits[split].names))
    }
    assert len(linked) == 8 and file in linked
    with open(paths.root / "data/own_pets/split.csv", newline="", encoding="utf-8") as stream:
        assert len(list(csv.DictReader(stream))) == 8


def test_a_long_path_leaves_no_link_behind(pets, tmp_path, monkeypatch):
    monkeypatch.setattr("repro.data.own.MOST_BYTES", 300)  # as on a disk that takes shorter names
    (pets / "cat/0.jpg").rename(pets / f"cat/{'x' * 251}.jpg")
    with pytest.raises(UserError, match="too long") as caught:
        split_own(Paths(tmp_path / "checkout"), parse_own(f"folder:{pets}"))
    assert "\n" not in str(caught.value) and not list((tmp_path / "checkout/data").iterdir())


def other_folder(tmp_path: Path) -> str:
    return f"folder:{nest(tmp_path / 'b/pets', 'cat', 'dog', classes=('.',))}"


def other_spelling(tmp_path: Path) -> str:
    return f"folder:{nest(tmp_path / 'b/my.pets', 'train', 'test')}"


@pytest.mark.parametrize(("first", "other"), [("pets", other_folder), ("my_pets", other_spelling)])
def test_two_sets_of_one_name_do_not_mix(tmp_path, first, other):
    """Their names in results are made of letters, digits and _."""
    mine = f"folder:{nest(tmp_path / 'a' / first, 'cat', 'dog', classes=('.',))}"
    paths, runtime, theirs = Paths(tmp_path / "checkout"), Runtime(data_roots={}), other(tmp_path)
    prepare_own(mine, paths, runtime)
    before = {file: file.read_bytes() for file in paths.root.rglob("*") if file.is_file()}
    for try_it in (prepare_own, lambda data, paths, runtime: open_cell(paths, runtime, data)):
        with pytest.raises(UserError, match="another set") as caught:
            try_it(theirs, paths, runtime)
        assert str(tmp_path / "a" / first) in str(caught.value)
    assert {file: file.read_bytes() for file in paths.root.rglob("*") if file.is_file()} == before
    prepare_own(mine.replace("/a/", "/b/../a/"), paths, runtime)  # the same one by another path


def test_a_folder_whose_name_ends_in_a_space_is_the_same_set_when_it_is_opened(tmp_path):
    data = f"folder:{nest(tmp_path / 'pets ', 'cat', 'dog', classes=('.',))}"
    paths, runtime = Paths(tmp_path / "checkout"), Runtime(data_roots={})
    prepare_own(data, paths, runtime)
    assert open_cell(paths, runtime, data).open_tree().classes == ("cat", "dog")


@pytest.mark.parametrize("label", [b"caf\xe9", "caf\u00e9".encode()])
def test_class_folders_of_any_name_are_prepared(pets, tmp_path, label):
    os.rename(pets / "cat", os.path.join(os.fsencode(pets), label))
    data, paths, runtime = f"folder:{pets}", Paths(tmp_path / "checkout"), Runtime(data_roots={})
    prepare_own(data, paths, runtime)
    shown = label.decode("utf-8", "backslashreplace")
    assert open_cell(paths, runtime, data).open_tree().classes == (shown, "dog")
    with open(paths.root / "data/own_pets/split.csv", newline="", encoding="utf-8") as stream:
        assert {row["label"] for row in csv.DictReader(stream)} == {shown, "dog"}
    root = link_splits(pets, tmp_path / "split")  # read in place
    if shown != os.fsdecode(label):
        with pytest.raises(UserError, match="not UTF-8; rename it"):
            prepare_own(f"folder:{root}", paths, runtime)


def test_the_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    nest(tmp_path / "pets", "train", "val")
    assert (
        find_data_root(Paths(tmp_path / "x"), Runtime(data_roots={"pets": "~/pets"}), "pets", "folder")
        == tmp_path / "pets"
    )
    assert parse_own("folder:~/pets").path == tmp_path / "pets"
    with pytest.raises(UserError, match="nobody-of-this-name"):
        parse_own("folder:~nobody-of-this-name/pets")


def test_two_pictures_of_one_stem_are_refused_where_names_must_be_unique(pets):
    assert len(find_pictures([pets / "cat", pets / "dog"])) == 8
    assert len(find_pictures([pets / "cat"], unique_names=True)) == 4
    picture(pets / "cat/3.png", (8, 8))
    with pytest.raises(UserError, match="named 3"):
        find_pictures([pets / "cat"], unique_names=True)


def test_predict_says_which_links_are_broken_with_the_unreadable_ones(tmp_path):
    picture(tmp_path / "a.jpg", (8, 8))
    (tmp_path / "b.jpg").symlink_to(tmp_path / "gone")
    assert [path.name for path in find_pictures([tmp_path])] == ["a.jpg", "b.jpg"]
