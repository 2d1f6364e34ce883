"""Agreement on tars of every kind (224 with `-m long`): our samples are webdataset's, our `.tar.idx` is Energon's.

Where they are not, on purpose:

- webdataset lower-cases extensions; we keep the case and look up without it.
- The same extension twice in a sample is an error here and in webdataset; Energon takes the last.
- Two samples of one shard with one key are two samples here and in webdataset; Energon's `prepare` refuses the shard.
- A tar that ends without zeros, or goes on behind them, is an error here; webdataset and Energon read what they see.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander
from webdataset.writer import TarWriter

import savable_pipeline as sp
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores.tar_store import TARS

Tree = dict[str, bytes | None]  # the files of a tar by name, in order; None: a folder, a link, or a link to nothing
Grouped = list[tuple[str, list[tuple[str, bytes]]]]
FEW, ALL = 5, 14  # tars of each kind
SHORT = 98  # bytes of a name that v7 holds, with "./"


def tree(seed: int, longest: int) -> Tree:
    """A few samples with odd names, and between them what is no part of one."""
    draw = random.Random(seed)
    files: Tree = {}
    for i in range(draw.randrange(1, 9)):
        folder = draw.choice(["", "", "sub/", "a.b/c d/", "é日/", "v1.0/", "__x/", "deep/" * 12, "n" * 90 + "/"])
        stem = draw.choice(["k", "K", "k-", "日本", "a b", "é", "x" * 60, "y" * 130]) + f"{i:03d}"
        for extension in draw.sample(["jpg", "JSON", "txt", "seg.png", "c.d.e", "cls", "input ids", "t" * 40], 3):
            name = f"{folder}{stem}.{extension}"
            if len(name.encode()) <= longest:
                files[name] = draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000]))
        odd = draw.choice(["README", ".hidden", "sub/.hid.den", "__meta__/info.json", "sub/plain", "__a__", "no_dot/x"])
        files.setdefault(odd, b"no sample")
        files.setdefault(draw.choice([f"{i}.link", f"{i}.hard", f"{i}.folder/"]), None)
    return files


def by_python(format: int) -> Callable[[Path, Tree], None]:
    def write(path: Path, files: Tree) -> None:
        with tarfile.open(path, "w", format=format) as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name.rstrip("/"))
                info.size = len(data or b"")
                if data is None:
                    info.type = {"k": tarfile.SYMTYPE, "d": tarfile.LNKTYPE, "/": tarfile.DIRTYPE}[name[-1]]
                    info.linkname = "" if name[-1] == "/" else next(iter(files))
                tar.addfile(info, io.BytesIO(data or b""))

    return write


def by_webdataset(path: Path, files: Tree) -> None:
    with TarWriter(str(path), encoder=False) as writer:
        for i, (name, data) in enumerate(files.items()):
            writer.write({"__key__": f"{i:03d}-{name.replace('.', '_')}", "bin": data or b"", "Txt": b"x"})


def by_program(program: str, *options: str) -> Callable[[Path, Tree], None]:
    def write(path: Path, files: Tree) -> None:
        inside = path.with_suffix(".in")
        for name, data in files.items():
            place = inside / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if data is not None:
                place.write_bytes(data)
            elif name[-1] == "/":
                place.mkdir(exist_ok=True)
            elif name[-1] == "k":
                place.symlink_to("nowhere")
            else:
                os.link(inside / next(iter(files)), place)
        subprocess.run([program, *options, "-cf", path, "-C", inside, "."], check=True, stderr=subprocess.DEVNULL)
        shutil.rmtree(inside)

    return write


WRITERS: dict[str, tuple[Callable[[Path, Tree], None], int]] = {
    "python-ustar": (by_python(tarfile.USTAR_FORMAT), SHORT),
    "python-gnu": (by_python(tarfile.GNU_FORMAT), 400),
    "python-pax": (by_python(tarfile.PAX_FORMAT), 400),
    "webdataset": (by_webdataset, 60),
    **{
        f"tar-{kind}": (by_program("tar", f"--format={kind}", "--sort=name"), SHORT if kind in ("v7", "ustar") else 400)
        for kind in ("v7", "oldgnu", "gnu", "ustar", "posix")
    },
    "tar-records": (by_program("tar", "--format=gnu", "-b", "128"), 400),
    **{
        f"bsdtar-{kind}": (by_program("bsdtar", "--format", kind), SHORT if kind in ("v7", "ustar") else 400)
        for kind in ("v7", "ustar", "pax", "gnutar", "posix")
    },
}


@pytest.fixture(scope="module", params=[FEW, pytest.param(ALL, marks=pytest.mark.long)])
def tars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tars, by the kind of their writer; those of programs that are not here are left out."""
    root = tmp_path_factory.mktemp("tars")
    for number, (kind, (write, longest)) in enumerate(WRITERS.items()):
        program = kind.split("-")[0]
        if program in ("tar", "bsdtar") and not shutil.which(program):
            continue
        for i in range(request.param):
            write(root / f"{kind}-{i:02d}.tar", tree(number * 1000 + i, longest))
    return root


def names_of(tars: Path, kind: str) -> list[str]:
    names = sorted(path.name for path in tars.glob(f"{kind}-[0-9][0-9].tar"))
    if not names:
        pytest.skip(f"{kind.split('-')[0]} is not installed (Debian: apt-get install tar libarchive-tools)")
    return names


def by_us(path: Path) -> Grouped:
    try:
        reader = sp.TarShardReader(path, sp.Lane(), shuffle=False, epochs=1)
    except sp.ShardError as error:
        assert "no sample in" in str(error)
        return []
    return [(sample.key, [(extension.lower(), data) for extension, data in sample.items()]) for sample in reader]


def by_them(path: Path) -> Grouped:
    with path.open("rb") as file:
        samples = group_by_keys(tar_file_expander([{"url": path.name, "stream": file}]))
        return [(s["__key__"], [(e, data) for e, data in s.items() if not e.startswith("__")]) for s in samples]


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_equal_webdatasets(tars: Path, kind: str) -> None:
    names = names_of(tars, kind)
    found = [by_us(tars / name) for name in names]
    assert found == [by_them(tars / name) for name in names]
    assert sum(map(len, found)) > len(names) >= FEW  # the tars do hold samples


@pytest.mark.parametrize("kind", WRITERS)
def test_offsets_equal_energons(tars: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    names = names_of(tars, kind)
    for name in names:
        shutil.copy(tars / name, tmp_path / name)
    assert not index_files(tmp_path, TARS, processes=1)[1]
    for name in names:
        ours = (tmp_path / name).with_suffix(".tar.idx").read_bytes()
        (tmp_path / name).with_suffix(".tar.idx").unlink()
        list(WebdatasetPreparator._preprocess_tar(name, {name: 0}, EPath(str(tmp_path)), 10))
        assert (tmp_path / name).with_suffix(".tar.idx").read_bytes() == ours, name
