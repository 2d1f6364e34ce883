"""The layouts of data that open without settings: the kind, the number of samples and the parts of the first sample.

This table specifies the recognizer. At most 8 layouts are errors, which say what was found and how to choose.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.data.stores import formats, sample_names
from savable_pipeline.data.stores.opening import find_source
from tests.conftest import write_tar
from tests.support.toy_lerobot import write_lerobot
from tests.support.toy_records import write_captioned_litdata, write_captioned_mds

JPG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffd9")


class Layout(NamedTuple):
    """How it is written, and what opening it gives."""

    name: str
    write: Callable[[Path], None]
    kind: str
    samples: int
    parts: frozenset[str] = frozenset()
    error: str = ""  # that opening it raises


def put(root: Path, **files: bytes | str) -> None:
    """Write files; `__` in a name is a slash and `_dot_` a dot, at which Python's names end."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write(root: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def tar(root: Path, name: str = "00000.tar") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    write_tar(
        root / name, [(f"{n}.{end}", JPG if end == "jpg" else b"{}") for n in range(3) for end in ("jpg", "json")]
    )


def parquet(root: Path, name: str = "part-0.parquet") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), root / name)


def arrow(root: Path, name: str = "data.arrow") -> None:
    feather.write_feather(pa.table({"text": ["a", "b", "c"]}), root / name, compression="uncompressed")


def jsonl(root: Path, name: str = "data.jsonl") -> None:
    write(root, {name: '{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n'})


def table(root: Path, name: str = "data.csv") -> None:
    write(root, {name: "text\na\nb\nc\n"})


def images(root: Path, *folders: str) -> None:
    write(root, {f"{folder}{n}.jpg": JPG for folder in folders or ("",) for n in range(3)})


def both(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    def all_of(root: Path) -> None:
        for each in writers:
            each(root)

    return all_of


def named(writer: Callable[..., None], *names: str) -> Callable[[Path], None]:
    return both(*((lambda root, name=name: writer(root, name)) for name in names))


def files(**content: bytes | str) -> Callable[[Path], None]:
    return lambda root: put(root, **content)


def metadata(ending: str) -> Callable[[Path], None]:
    """Images with the metadata of HF's image folder."""

    def both_of(root: Path) -> None:
        images(root)
        rows = [{"file_name": f"{n}.jpg", "text": f"caption {n}"} for n in range(3)]
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), root / "metadata.parquet")
        elif ending == "jsonl":
            write(root, {"metadata.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
        else:
            text = io.StringIO()
            writer = csv.DictWriter(text, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(rows)
            write(root, {"metadata.csv": text.getvalue()})

    return both_of


def hub_snapshot(root: Path) -> None:
    """A file in `blobs/`, and a link to it in the snapshot, which is what a user names."""
    (root.parent / "blobs").mkdir()
    parquet(root.parent, "blobs/0123abcd")
    (root / "data").mkdir()
    (root / "data" / "train-00000-of-00001.parquet").symlink_to("../../blobs/0123abcd")


def npy_pairs(root: Path) -> None:
    for n in range(3):
        np.save(root / f"{n}.npy", np.arange(4))
        (root / f"{n}.txt").write_text("caption")


def pairs(*endings: str) -> Callable[[Path], None]:
    return lambda root: write(root, {f"{n}.{end}": JPG if end == "jpg" else "{}" for n in range(3) for end in endings})


def nested(folder: str) -> Callable[[Path], None]:
    return lambda root: pairs("jpg", "json")(root / folder)


def kaldi(segments: str = "") -> Callable[[Path], None]:
    """Two utterances: of two recordings, or segments of one."""
    tables = {"text": "a1 good day\na2 bye\n", "utt2spk": "a1 s1\na2 s1\n", "spk2utt": "s1 a1 a2\n"}
    recordings = "r wav/a1.wav\n" if segments else "a1 wav/a1.wav\na2 wav/a2.wav\n"
    tables |= {"wav.scp": recordings} | ({"segments": segments} if segments else {})
    return lambda root: write(root, {**tables, "wav/a1.wav": b"RIFF1", "wav/a2.wav": b"RIFF22"})


def shar(root: Path, second: str = "b") -> None:
    """Two shards of Lhotse Shar with two cuts each; in the second, one has no recording."""
    for shard, cuts in enumerate((["a", second], ["c", "d"])):
        lines = [{"id": cut, "supervisions": [{"text": f"say {cut}"}]} for cut in cuts]
        targets = [{"cut_id": cut, "target": shard} for cut in cuts]
        for name, rows in {"cuts": lines, "target": targets}.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (root / f"{name}.{shard:06d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        members = [(f"{cut}.{end}", json.dumps(f"{cut} {end}").encode()) for cut in cuts for end in ("flac", "json")]
        members = [
            (n.replace("flac", "nodata").replace("json", "nometa"), b"") if n[0] == "d" else (n, b) for n, b in members
        ]
        write_tar(root / f"recording.{shard:06d}.tar", members)


SPOKEN = frozenset({"json", "wav"})


def of_splits(writer: Callable[[Path], None]) -> Callable[[Path], None]:
    """The same in a folder for each split."""

    def both_of(root: Path) -> None:
        for split in ("train", "val"):
            (root / split).mkdir()
            writer(root / split)

    return both_of


def written(*names: str) -> Callable[[Path], None]:
    """Files of one byte."""
    return lambda root: write(root, dict.fromkeys(names, b"x"))


def mds_splits(root: Path) -> None:
    for split in ("train", "val"):
        write_captioned_mds(root / split, 5)


def capital_images(root: Path) -> None:
    write(root, {f"IMG_{n}.JPG": JPG for n in range(3)})
    write(root, {"metadata.csv": "file_name,text\n" + "".join(f"IMG_{n}.JPG,a\n" for n in range(3))})


def capital_array(root: Path) -> None:
    np.save(root / "a.npy", np.ones((4, 8), "u2"))
    (root / "a.npy").rename(root / "A.NPY")


def img2dataset_files(root: Path) -> None:
    """What img2dataset writes as files: a folder, and beside it its table and statistics."""
    pairs("jpg", "json", "txt")(root / "00000")
    parquet(root, "00000.parquet")
    write(root, {"00000_stats.json": '{"count": 3}'})


def mixed_list(root: Path) -> None:
    """A list as of ShareGPT, of which some rows have no image."""
    write(root, {"images/0.jpg": JPG})
    write(root, {"chat.json": json.dumps([{"id": 0, "text": "a"}, {"id": 1, "image": "images/0.jpg"}])})


def two_images(root: Path) -> None:
    write(root, {"a.jpg": JPG, "b.jpg": JPG + b"2"})
    write(root, {"edits.jsonl": json.dumps({"source": "a.jpg", "target": "b.jpg", "n": 1}) + "\n"})


def named_images(ending: str, field: str = "image", folder: str = "images") -> Callable[[Path], None]:
    """Images in a folder, and a table that names them."""

    def all_of(root: Path) -> None:
        write(root, {f"{folder}/{n}.jpg": JPG for n in range(2)})
        rows = [{field: f"{folder}/{n}.jpg", "text": "a"} for n in range(2)]
        lines = (
            [f"{field},text", *(",".join(row.values()) for row in rows)] if ending == "csv" else map(json.dumps, rows)
        )
        write(root, {f"train.{ending}": "".join(f"{line}\n" for line in lines)})

    return all_of


def llava(root: Path) -> None:
    """A list of JSON that names images, as LLaVA's."""
    write(root, {f"{n}.jpg": JPG for n in range(2)})
    write(root, {"llava.json": json.dumps([{"image": f"{n}.jpg", "id": n} for n in range(2)])})


def nemo(root: Path) -> None:
    """A manifest of NeMo, which is JSONL called JSON."""
    write(root, {f"wav/{n}.wav": b"RIFF" for n in range(2)})
    rows = [{"audio_filepath": f"wav/{n}.wav", "duration": 1.0, "text": "hi"} for n in range(2)]
    write(root, {"manifest.json": "".join(json.dumps(row) + "\n" for row in rows)})


def common_voice(*tables: str) -> Callable[[Path], None]:
    """Clips, and tables of splits beside their folder. One table is about sentences without a clip."""

    def all_of(root: Path) -> None:
        write(root, {f"clips/common_voice_en_{n}.mp3": b"ID3" for n in range(3)})
        rows = "".join(f"client\tcommon_voice_en_{n}.mp3\tHello {n}\n" for n in range(3))
        write(root, {f"{name}.tsv": f"client_id\tpath\tsentence\n{rows}" for name in tables})
        write(root, {"reported.tsv": "sentence_id\tsentence\treason\n1\tx\tgrammar\n"})

    return all_of


def below_images(root: Path) -> None:
    """A list as LLaVA's, whose paths are relative to the folder of images."""
    write(root, {f"images/coco/{n}.jpg": JPG for n in range(2)})
    write(root, {"llava.json": json.dumps([{"image": f"coco/{n}.jpg", "conversations": []} for n in range(2)])})


def label_table(root: Path) -> None:
    write(root, {f"{n}.jpg": JPG for n in range(2)})
    write(root, {"labels.csv": "filename,label\n0.jpg,cat\n1.jpg,dog\n"})


def megatron(root: Path) -> None:
    """Two documents of two tokens of uint16, of the type 8 of Megatron."""
    np.arange(4, dtype="<u2").tofile(root / "a.bin")
    lengths, pointers, firsts = np.array([2, 2], "<i4"), np.array([0, 4], "<i8"), np.array([0, 1, 2], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    (root / "a.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes())


def audio_folder(audio: str, table: str, *splits: str) -> Callable[[Path], None]:
    """Audio of each split in `audio`, and a table `table` of it with paths relative to the table."""

    def all_of(root: Path) -> None:
        for split in splits:
            folder, rows = (audio.format(split), table.format(split).rpartition("/")[0])
            names = [f"{folder}/{n}.wav".removeprefix(f"{rows}/") for n in range(3)]
            write(root, {f"{folder}/{n}.wav": b"RIFF" for n in range(3)})
            path = root / table.format(split)
            old = path.read_text() if path.exists() else "file_name,transcription\n"
            write(root, {table.format(split): old + "".join(f'{name},"Hi, you"\n' for name in names)})

    return all_of


def covost(root: Path) -> None:
    """Translations of Common Voice, whose name has dots and whose quotes are text."""
    write(root, {f"clips/{name}.mp3": b"ID3" for name in "ab"})
    rows = 'a.mp3\t"Hi," he said\tx\nb.mp3\tBye\t"y\n'
    write(root, {"covost_v2.en_de.train.tsv": f"path\tsentence\ttranslation\n{rows}"})


def flickr30k(root: Path) -> None:
    write(root, {f"flickr30k_images/{n}.jpg": JPG for n in range(2)})
    write(root, {"results.csv": "image_name| comment_number| comment\n0.jpg| 0| x, y, z\n1.jpg| 1| y\n"})


def wids(root: Path) -> None:
    tar(root)
    index = {"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "00000.tar", "nsamples": 3}]}
    write(root, {"index.json": json.dumps(index)})


def datacomp(root: Path) -> None:
    """Shards with their tables beside them, and tables of all in a folder of their own."""
    for n in range(2):
        tar(root, f"shards/{n:08d}.tar")
        write(root, {f"shards/{n:08d}_stats.json": "{}"})
        named(parquet, f"shards/{n:08d}.parquet", f"metadata/{n}.parquet")(root)


def tar_of_tars(root: Path) -> None:
    tar(root.parent, "inner.tar")
    inner = (root.parent / "inner.tar").read_bytes()
    write_tar(root / "outer.tar", [("a.tar", inner), ("b.tar", inner)])


def link_to_a_tar(root: Path) -> None:
    tar(root.parent, "elsewhere/00000.tar")
    (root / "00000.tar").symlink_to(root.parent / "elsewhere/00000.tar")


def odd_names(root: Path) -> None:
    pairs("jpg", "json")(root / "my data#1 100%")
    for path in sorted((root / "my data#1 100%").iterdir()):
        path.rename(path.with_name(f"größe {path.name}"))


def odd_paths(root: Path) -> None:
    write(root, {f"im #{n} 50%.jpg": JPG for n in range(2)})
    write(root, {"meta.csv": "file_name,text\n" + "".join(f"im #{n} 50%.jpg,a\n" for n in range(2))})


def no_rows(root: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), root / "empty.parquet")


def conversations(root: Path) -> None:
    """A list as of LLaVA with several images a row, and the images in a folder."""
    write(root, {f"images/{n}.jpg": JPG for n in range(2)})
    write(root, {"data.json": json.dumps([{"image": ["images/0.jpg", "images/1.jpg"], "conversations": []}] * 2)})


def many_tables(root: Path) -> None:
    for n in range(20):
        write(root, {f"{n}/0.jpg": JPG, f"{n}/metadata.csv": "file_name,text\n0.jpg,a\n"})


COCO = '{"info": {}, "images": [{"id": 1, "file_name": "0.jpg"}], "annotations": []}'
ANNOTATED: dict[str, tuple[Callable[[Path], None], str]] = {
    "YOLO": (both(written("images/train/0.jpg"), written("labels/train/0.txt")), "labels/train/0.txt"),
    "COCO": (
        both(written("train2017/0.jpg"), lambda root: write(root, {"annotations/instances_train2017.json": COCO})),
        "annotations/instances_train2017.json",
    ),
    "COCO of Roboflow": (
        both(written("0.jpg"), lambda root: write(root, {"_annotations.coco.json": COCO})),
        "_annotations.coco.json",
    ),
    "VOC": (
        written("JPEGImages/0.jpg", "Annotations/0.xml", "ImageSets/Main/train.txt"),
        "Annotations/0.xml",
    ),
    "DOTA": (written("images/P0.png", "labelTxt/P0.txt"), "labelTxt/P0.txt"),
    "KITTI": (written("image_2/0.png", "label_2/0.txt", "calib/0.txt"), "calib/0.txt"),
    "captions in a file of JSON": (both(images, files(captions_dot_json='{"0.jpg": "a"}')), "captions.json"),
    "captions beside pairs": (both(pairs("jpg", "txt"), files(captions_dot_json="{}")), "captions.json"),
    "captions of Flickr8k": (
        both(
            written("Images/0.jpg", "Images/1.jpg"),
            lambda root: write(root, {"text/Flickr8k.token.txt": "0.jpg#0\ta dog\n1.jpg#0\tb\n"}),
        ),
        "text/Flickr8k.token.txt",
    ),
    "classes of labelImg": (both(pairs("jpg", "txt"), files(classes_dot_txt="dog")), "classes.txt"),
    "lists of CUB": (
        both(
            written("images/1.Black/0.jpg", "images/1.Black/1.jpg"),
            files(images_dot_txt="1 1.Black/0.jpg\n2 1.Black/1.jpg\n", sizes_dot_txt="1 20\n"),
        ),
        "images.txt",
    ),
    "transcripts of AISHELL": (
        both(written("wav/S1/B0.wav", "wav/S1/B1.wav"), files(transcript__all_dot_txt="B0 good day\nB1 bye\n")),
        "transcript/all.txt",
    ),
    "a list as of LJSpeech": (
        both(written("wavs/LJ1.wav", "wavs/LJ2.wav"), files(train_dot_txt="LJ1|Good day\nLJ2|Bye\n")),
        "train.txt",
    ),
    "pickled labels": (both(images, written("targets.pkl")), "targets.pkl"),
    "a folder a sample": (written("a/image.png", "a/meta.json", "b/image.png", "b/meta.json"), "a/meta.json"),
    "VCTK": (written("wav48/p225/p225_1.wav", "txt/p225/p225_1.txt"), "txt/p225/p225_1.txt"),
    "LibriSpeech": (written("84/1/84-1-0.flac", "84/1/84-1-1.flac", "84/1/84-1.trans.txt"), "84/1/84-1.trans.txt"),
}
PEOPLE = files(README_dot_md="# data", LICENSE="MIT")
STATE = json.dumps({"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "1", "_format_type": None})
RECORD, ROW = frozenset({"json", "text"}), frozenset({"json"})
TEXT, PAIR, IMAGE = frozenset({"text"}), frozenset({"jpg", "json"}), frozenset({"jpg"})
CAPTIONED = RECORDS = frozenset({"jpg", "json"})
CLASSES = ("train/cat/", "train/dog/", "val/cat/", "val/dog/")
LOGO: dict[str, bytes | str] = {"assets/logo.png": b"\x89PNG", "preview.jpg": JPG}
EPISODE = frozenset({"episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"}) | frozenset(
    {"observation.images.top", "observation.state", "action", "task", "index"}
)

LAYOUTS = [
    Layout("one tar", tar, "tar", 3, PAIR),
    Layout("tars in folders", named(tar, "a/0.tar", "b/0.tar"), "tar", 6, PAIR),
    Layout(
        "img2dataset",
        both(tar, named(parquet, "00000.parquet"), files(**{"00000_stats_dot_json": "{}"})),
        "tar",
        3,
        PAIR,
    ),
    Layout("tars with README and LICENSE", both(tar, PEOPLE), "tar", 3, PAIR),
    Layout("tars beside a hidden file", both(tar, files(_dot_DS_Store="x")), "tar", 3, PAIR),
    Layout("one Parquet file", parquet, "parquet", 3, TEXT),
    Layout("Parquet files in folders", named(parquet, "train/0.parquet", "train/1.parquet"), "parquet", 6, TEXT),
    Layout("Spark", both(parquet, files(_SUCCESS="", **{"_dot_part-0_dot_parquet_dot_crc": "x"})), "parquet", 3, TEXT),
    Layout(
        "Hive partitions",
        named(parquet, "lang=de/0.parquet", "lang=en/0.parquet"),
        "parquet",
        6,
        frozenset({"lang", "text"}),
    ),
    Layout("Parquet with README and LICENSE", both(parquet, PEOPLE), "parquet", 3, TEXT),
    Layout("Hub snapshot with links", hub_snapshot, "parquet", 3, TEXT),
    Layout("one Arrow file", arrow, "arrow", 3, TEXT),
    Layout(
        "saved by HF datasets", both(arrow, files(state_dot_json=STATE, dataset_info_dot_json="{}")), "arrow", 3, TEXT
    ),
    Layout("one JSONL file", jsonl, "jsonl", 3, RECORD),
    Layout("JSONL files in folders", named(jsonl, "a/0.jsonl", "b/0.jsonl"), "jsonl", 6, RECORD),
    Layout("JSONL with README and LICENSE", both(jsonl, PEOPLE), "jsonl", 3, RECORD),
    Layout("one CSV file", table, "csv", 3, ROW),
    Layout("CSV with README", both(table, PEOPLE), "csv", 3, ROW),
    Layout("images alone", images, "folder", 3, IMAGE),
    Layout("images in folders of classes", lambda root: images(root, "cat/", "dog/"), "folder", 6, IMAGE),
    Layout("images with README and LICENSE", both(images, PEOPLE), "folder", 3, IMAGE),
    Layout("images with a stray table", both(images, table, PEOPLE), "folder", 3, IMAGE),
    Layout("jpg and json pairs", pairs("jpg", "json"), "folder", 3, PAIR),
    Layout("jpg and json pairs beside a stray data.jsonl", both(pairs("jpg", "json"), jsonl), "folder", 3, PAIR),
    Layout("jpg and txt pairs", pairs("jpg", "txt"), "folder", 3, frozenset({"jpg", "txt"})),
    Layout("npy and txt pairs", npy_pairs, "folder", 3, frozenset({"npy", "txt"})),
    Layout("HF image folder with metadata.jsonl", metadata("jsonl"), "jsonl", 3, CAPTIONED),
    Layout("HF image folder with metadata.csv", metadata("csv"), "csv", 3, CAPTIONED),
    Layout("HF image folder with metadata.parquet", metadata("parquet"), "parquet", 3, CAPTIONED),
    Layout("HF image folder of splits, JSONL", of_splits(metadata("jsonl")), "jsonl", 6, CAPTIONED),
    Layout("HF image folder of splits, Parquet", of_splits(metadata("parquet")), "parquet", 6, CAPTIONED),
    Layout("HF image folder of splits, CSV", of_splits(metadata("csv")), "csv", 6, CAPTIONED),
    Layout("images of splits and classes", lambda root: images(root, *CLASSES), "folder", 12, IMAGE),
    Layout("Parquet in capitals", named(parquet, "A.PARQUET"), "parquet", 3, TEXT),
    Layout("tar in capitals", named(tar, "A.TAR"), "tar", 3, PAIR),
    Layout("JSONL in capitals", named(jsonl, "A.JSONL"), "jsonl", 3, RECORD),
    Layout("CSV in capitals", named(table, "A.CSV"), "csv", 3, ROW),
    Layout("arrays in capitals", capital_array, "tokens", 4, frozenset({"tokens"})),
    Layout("images in capitals with metadata", capital_images, "csv", 3, frozenset({"JPG", "json"})),
    Layout("an archive of macOS, unpacked", both(tar, written("__MACOSX/._00000.tar", ".DS_Store")), "tar", 3, PAIR),
    Layout("images of a Synology NAS", both(images, written("@eaDir/0.jpg/SYNO_THUMB.jpg")), "folder", 3, IMAGE),
    Layout("Spark in progress", both(parquet, written("_temporary/0/part-1.parquet")), "parquet", 3, TEXT),
    Layout("checksums of Spark", both(parquet, written("part-0.parquet.crc", "_metadata")), "parquet", 3, TEXT),
    Layout("Parquet without a suffix", named(parquet, "part-00000", "part-00001"), "parquet", 6, TEXT),
    Layout("JSONL without a suffix", both(named(jsonl, "part-0", "part-1"), files(_SUCCESS="")), "jsonl", 6, RECORD),
    Layout("tars without a suffix", named(tar, "part-0", "part-1"), "tar", 6, PAIR),
    Layout("blanks and Unicode in names", named(tar, "my data/größe 1.tar"), "tar", 3, PAIR),
    Layout("tables called in Japanese", named(jsonl, "日本 データ.jsonl"), "jsonl", 3, RECORD),
    Layout("tars beside unfinished ones", both(tar, written("1.tar.tmp", "2.tar.part", "0.tar.md5")), "tar", 3, PAIR),
    Layout("JSONL beside an empty one", both(jsonl, files(empty_dot_jsonl="")), "jsonl", 3, RECORD),
    Layout("img2dataset, a folder of files", img2dataset_files, "folder", 3, PAIR | {"txt"}),
    Layout("Parquet beside a picture of it", both(parquet, lambda root: write(root, LOGO)), "parquet", 3, TEXT),
    Layout("JSONL beside a logo", both(jsonl, lambda root: write(root, LOGO)), "jsonl", 3, RECORD),
    Layout("a list whose first row names no image", mixed_list, "json", 2, ROW),
    Layout("CSV that names images in the column path", named_images("csv", "path"), "csv", 2, CAPTIONED),
    Layout("JSONL that names two images a row", two_images, "jsonl", 1, frozenset({"jpg", "json", "target.jpg"})),
    Layout("a cover that a table names", named_images("csv", "image", "covers"), "csv", 2, CAPTIONED),
    Layout("tars of a train and a test folder", named(tar, "train/0.tar", "test/0.tar"), "tar", 6, PAIR),
    Layout("tars beside a Parquet file of another name", both(tar, named(parquet, "urls.parquet")), "tar", 3, PAIR),
    Layout("tars beside a CSV table", both(tar, table), "tar", 3, PAIR),
    Layout("Parquet files with the ending .pq", named(parquet, "a.pq", "b.pq"), "parquet", 6, TEXT),
    Layout("Spark in folders", both(named(parquet, "a/0.parquet"), files(a___SUCCESS="")), "parquet", 3, TEXT),
    Layout("Parquet beside Croissant's metadata", both(parquet, files(croissant_dot_json="{}")), "parquet", 3, TEXT),
    Layout("Hub dataset with .gitattributes", both(parquet, files(_dot_gitattributes="x")), "parquet", 3, TEXT),
    Layout("Feather file", named(arrow, "a.feather"), "arrow", 3, TEXT),
    Layout("NDJSON file", named(jsonl, "a.ndjson"), "jsonl", 3, RECORD),
    Layout("JSONL beside its dataset_info.json", both(jsonl, files(dataset_info_dot_json="{}")), "jsonl", 3, RECORD),
    Layout("two CSV files", named(table, "a.csv", "b.csv"), "csv", 6, ROW),
    Layout("CSV with LICENSE", both(table, files(LICENSE="MIT")), "csv", 3, ROW),
    Layout("JSON list", files(a_dot_json='[{"text": "a"}, {"text": "b"}]'), "json", 2, ROW),
    Layout("jpg, json and txt of one stem", pairs("jpg", "json", "txt"), "folder", 3, PAIR | {"txt"}),
    Layout("pairs in folders of splits", both(*(nested(name) for name in ("train", "val"))), "folder", 6, PAIR),
    Layout("images beside Thumbs.db", both(images, files(Thumbs_dot_db="x")), "folder", 3, IMAGE),
    Layout("MDS of Mosaic Streaming", lambda root: write_captioned_mds(root, 5), "mds", 5, RECORDS | {"npy"}),
    Layout("LitData", lambda root: write_captioned_litdata(root, 5), "litdata", 5, RECORDS),
    Layout("LeRobot, version 3", write_lerobot, "lerobot", 4, EPISODE),
    Layout("NeMo manifest beside audio", nemo, "jsonl", 2, frozenset({"json", "wav"})),
    Layout("table of a list of JSON that names images", llava, "json", 2, CAPTIONED),
    Layout("Common Voice with one table", common_voice("validated"), "csv", 3, frozenset({"json", "mp3"})),
    Layout("a list of JSON that names images of a folder beside it", below_images, "json", 2, CAPTIONED),
    Layout("JSONL that names images in a folder below", named_images("jsonl"), "jsonl", 2, CAPTIONED),
    Layout("CSV that names images in a folder below", named_images("csv"), "csv", 2, CAPTIONED),
    Layout(
        "leftovers of HF's cache", both(named(arrow, "x-train.arrow", "cache-1.arrow", "tmp1.arrow")), "arrow", 3, TEXT
    ),
    Layout("Megatron tokens", megatron, "tokens", 2, frozenset({"tokens"})),
    Layout(
        "arrays of rows of tokens",
        lambda root: np.save(root / "a.npy", np.ones((4, 8), "u2")),
        "tokens",
        4,
        frozenset({"tokens"}),
    ),
    Layout(
        "TSV files", named(lambda root, name: write(root, {name: "text\tn\na\t1\n"}), "a.tsv", "b.tsv"), "csv", 2, ROW
    ),
    Layout(
        "objects of JSON in files of their own", files(a_dot_json='{"n": 1}', b_dot_json='{"n": 2}'), "folder", 2, ROW
    ),
    Layout(
        "an object a line in files called JSON",
        files(a_dot_json='{"n": 1}\n{"n": 2}\n'),
        "jsonl",
        2,
        frozenset({"json", "n"}),
    ),
    Layout(
        "audio and text pairs",
        lambda root: write(root, {"a.wav": b"RIFF", "a.txt": "hi"}),
        "folder",
        1,
        frozenset({"txt", "wav"}),
    ),
    Layout(
        "videos and JSON pairs",
        lambda root: write(root, {"a.mp4": b"ftyp", "a.json": "{}"}),
        "folder",
        1,
        frozenset({"json", "mp4"}),
    ),
    Layout("texts alone", files(a_dot_txt="a", b_dot_txt="b"), "folder", 2, frozenset({"txt"})),
    Layout("Parquet beside a table of statistics", both(parquet, named(table, "stats.csv")), "parquet", 3, TEXT),
    Layout(
        "Parquet beside arrays", both(parquet, lambda root: np.save(root / "x.npy", np.ones(4))), "parquet", 3, TEXT
    ),
    Layout(
        "HF DatasetDict",
        files(dataset_dict_dot_json='{"splits": ["train", "test"]}'),
        "",
        0,
        error="2 splits, test, train",
    ),
    Layout(
        "Parquet beside JSONL",
        both(parquet, jsonl),
        "",
        0,
        error='parquet .1 file.*Pass format="parquet" or format="jsonl"',
    ),
    Layout(
        "one tar beside many images",
        both(tar, images),
        "",
        0,
        error='several kinds of files, .*tar .1 file.*format="tar"',
    ),
    Layout(
        "LeRobot, version 2.1",
        files(meta__info_dot_json='{"codebase_version": "v2.1"}'),
        "",
        0,
        error=r"LeRobot v2\.1, but",
    ),
    Layout("Kaldi", kaldi(), "kaldi", 2, SPOKEN),
    Layout("Kaldi with segments", kaldi(segments="a1 r 0.0 0.5\na2 r 0.5 1\n"), "kaldi", 2, SPOKEN),
    Layout("Kaldi's folders of splits", of_splits(kaldi()), "kaldi", 4, SPOKEN),
    Layout("Lhotse Shar", shar, "shar", 4, frozenset({"json", "flac", "recording.json", "target.json"})),
    Layout("Kaldi beside tars", both(kaldi(), tar), "", 0, error='several kinds of files, kaldi .*format="tar"'),
    Layout("MDS in folders of splits", mds_splits, "", 0, error="2 folders of records, train, val. Name one"),
    Layout("a list as of ShareGPT", files(a_dot_json='[{"conversations": []}, {"conversations": []}]'), "json", 2, ROW),
    Layout("CSV labels by the names of images", label_table, "csv", 2, CAPTIONED),
    Layout("archives", files(a_dot_zip=b"PK", b_dot_zip=b"PK"), "", 0, error=r"\.zip is not read here"),
    Layout(
        "HF audio folder of splits",
        audio_folder("data/{}", "data/{}/metadata.csv", "train", "test"),
        "csv",
        6,
        SPOKEN,
    ),
    Layout("audio below the table of a split", audio_folder("{}/audio", "{}/metadata.csv", "a", "b"), "csv", 6, SPOKEN),
    Layout("a table of the audio of all splits", audio_folder("{}", "metadata.csv", "train", "test"), "csv", 6, SPOKEN),
    Layout("CoVoST", covost, "csv", 2, frozenset({"json", "mp3"})),
    Layout("Flickr30k", flickr30k, "csv", 2, CAPTIONED),
    Layout("WebDataset's index of shards", wids, "tar", 3, PAIR),
    Layout("DataComp", datacomp, "tar", 6, PAIR),
    Layout("tars with pointers of DVC", both(tar, written("00000.tar.dvc")), "tar", 3, PAIR),
    Layout("checkpoints of Jupyter", both(tar, written(".ipynb_checkpoints/0-checkpoint.tar")), "tar", 3, PAIR),
    Layout("a folder called .parquet", named(parquet, "a.parquet/part.0.parquet"), "parquet", 3, TEXT),
    Layout("metadata of Dask", both(parquet, written("_metadata", "_common_metadata")), "parquet", 3, TEXT),
    Layout("Parquet beside a file without rows", both(parquet, no_rows), "parquet", 3, TEXT),
    Layout("configurations of the Hub", named(parquet, "de/train-0.parquet", "en/train-0.parquet"), "parquet", 6, TEXT),
    Layout("signs in names", odd_names, "folder", 3, PAIR),
    Layout("signs in the paths of a table", odd_paths, "csv", 2, CAPTIONED),
    Layout("tars with braces and brackets in names", named(tar, "a {1,2}.tar", "[x] 20%.tar"), "tar", 6, PAIR),
    Layout("a tar of tars", tar_of_tars, "tar", 2, frozenset({"tar"})),
    Layout("a link to a tar", link_to_a_tar, "tar", 3, PAIR),
    Layout("pairs in capitals", written("A.JPG", "A.TXT", "B.JPG", "B.txt"), "folder", 2, frozenset({"JPG", "TXT"})),
    Layout("WebP and captions", written("0.webp", "0.txt", "1.webp", "1.txt"), "folder", 2, frozenset({"txt", "webp"})),
    Layout("CSV beside a compressed table", both(table, written("old.csv.gz")), "csv", 3, ROW),
    Layout("tars beside a compressed one", both(tar, written("old.tar.gz")), "tar", 3, PAIR),
    Layout("several images a row", conversations, "json", 2, frozenset({"0.jpg", "1.jpg", "json"})),
    Layout("a table of images and another table", both(label_table, named(table, "classes.csv")), "csv", 2, CAPTIONED),
    Layout("many folders with a table each", many_tables, "csv", 20, CAPTIONED),
    Layout(
        "lists of JSON of splits", files(a_dot_json='[{"n": 1}, {"n": 2}]', b_dot_json='[{"n": 3}]'), "json", 3, ROW
    ),
    Layout(
        "compressed tars",
        named(lambda root, name: write(root, {name: b"x"}), "a.tar.gz"),
        "",
        0,
        error="1 compressed ones",
    ),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_the_table_has_sixty_layouts_and_at_most_eight_are_errors() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) >= 60
    assert sum(bool(layout.error) for layout in LAYOUTS) <= 8


@pytest.mark.parametrize("layout", [pytest.param(each, id=each.name) for each in LAYOUTS if not each.error])
def test_a_layout_opens_without_settings(layout: Layout, root: Path) -> None:
    layout.write(root)
    assert find_source(str(root)).format.name == layout.kind
    samples = sp.open_dataset(root)
    assert len(samples) == layout.samples
    assert frozenset(samples[0]) == layout.parts
    assert sum(1 for _ in sp.read(str(root), epochs=1)) == layout.samples


@pytest.mark.parametrize("name", ANNOTATED)
def test_annotations_in_files_of_their_own_are_an_error_and_no_samples(name: str, root: Path) -> None:
    writer, file = ANNOTATED[name]
    writer(root)
    with pytest.raises(sp.ShardError, match=rf"{file} .*shares its name with no image.*or write a row for each into"):
        sp.open_dataset(root)


@pytest.mark.parametrize("layout", [pytest.param(each, id=each.name) for each in LAYOUTS if each.error])
def test_ambiguous_layout_is_an_error(layout: Layout, root: Path) -> None:
    layout.write(root)
    for opened in (sp.open_dataset, lambda path: sp.read(str(path)).take(1)):
        with pytest.raises(sp.ShardError, match=layout.error):
            opened(root)


def test_several_tables_of_the_same_clips_are_an_error_and_each_opens_alone(root: Path) -> None:
    common_voice("dev", "test", "train", "validated")(root)
    with pytest.raises(sp.ShardError, match=r"Name one of them: dev\.tsv, test\.tsv, train\.tsv, validated\.tsv$"):
        sp.open_dataset(root)
    for opened in (sp.open_dataset(root / "train.tsv"), sp.read(str(root / "train.tsv"), epochs=1, shuffle=False)):
        assert [(sample["mp3"], sample.json()["sentence"]) for sample in opened][1] == (b"ID3", "Hello 1")


def test_paths_that_a_table_names_stay_inside_the_source(root: Path, tmp_path: Path) -> None:
    below_images(root)
    (root / "images").rename(tmp_path / "elsewhere")
    (root / "images").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sp.ShardError, match=r"missing file: the field 'image' names 'coco/0\.jpg'"):
        sp.open_dataset(root / "llava.json")[0]["jpg"]
    (root / "images").unlink()
    for name in ("a", "b"):  # either could be meant
        write(root, {f"{name}/coco/{n}.jpg": JPG for n in range(2)})
    with pytest.raises(sp.ShardError, match=r"missing file: the field 'image' names 'coco/0\.jpg'"):
        sp.open_dataset(root / "llava.json")[0]["jpg"]


def test_layout_of_several_formats_opens_with_a_format_or_setting(root: Path) -> None:
    both(jsonl, table, parquet)(root)
    assert len(sp.open_dataset(root, format="csv")) == 3
    assert [next(iter(sp.read(str(root), format="jsonl", shuffle=False))).json()["text"]] == ["a"]
    assert list(sp.open_dataset(root, columns=["text"])[0]) == ["text"]
    with pytest.raises(ValueError, match=r"no format 'table'\. Use one of tar, mds"):
        sp.open_dataset(root, format="table")


@pytest.mark.parametrize(
    ("writer", "match"),
    [
        (both(metadata("csv"), metadata("jsonl")), r'csv .*metadata\.csv.*jsonl .*Pass format="jsonl" or format="csv"'),
        (written("a.xlsx"), r"\.xlsx is not read here .a\.xlsx.: save each sheet as CSV"),
        (written("a.orc"), r"\.orc is not read here .a\.orc.: iterate over it with its own library"),
        (written("a.jsonl.gz", "b.jsonl.gz"), r"no \.jsonl .* but 2 compressed ones\. Unpack it, or run"),
        (
            files(dataset_dict_dot_json='{"splits": ["train"]}'),
            r"1 split, train\. Read the folder of one, such as train",
        ),
        (written(".DS_Store", "Thumbs.db"), r"no \.tar file in this folder"),
        (written("a.tfrecord-00000-of-00002", "a.tfrecord-00001-of-00002"), r"is not read here .a\.tfrecord-00000-of"),
    ],
)
def test_what_is_not_read_is_one_error_that_says_what_to_do(
    root: Path, writer: Callable[[Path], None], match: str
) -> None:
    writer(root)
    with pytest.raises(sp.ShardError, match=match):
        sp.open_dataset(root)


def test_links_to_images_elsewhere_are_an_error_that_says_so(root: Path) -> None:
    images(root.parent / "elsewhere")
    for n in range(3):
        (root / f"{n}.jpg").symlink_to(root.parent / f"elsewhere/{n}.jpg")
    with pytest.raises(sp.ShardError, match=r"data: 3 files left out .*: 0\.jpg: outside the source"):
        sp.open_dataset(root)


@pytest.mark.parametrize(
    "name",
    [
        "_delta_log/00000000000000000000.json",
        "_delta_log/00000000000000000010.checkpoint.parquet",
        "tables/a/metadata/v1.metadata.json",
        "metadata/v1.metadata.json",
        ".hoodie/hoodie.properties",
        "snapshot/snapshot-1",
    ],
)
def test_files_with_rows_of_older_versions_are_an_error(root: Path, name: str) -> None:
    both(parquet, written(name))(root)
    with pytest.raises(sp.ShardError, match=r"a table of (Delta Lake|Apache \w+), whose files have rows of older"):
        sp.open_dataset(root)


def test_ignored_table_next_to_photos_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cat.jpg", "cat.txt", "notes.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n')
    assert [sample.key for sample in sp.open_dataset(tmp_path)] == ["cat"]
    assert f"{tmp_path}: notes.jsonl is not read" in caplog.text and "Name it alone" in caplog.text
    assert sp.open_dataset(tmp_path / "notes.jsonl")[0].json() == {"a": 1}


UNREAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "an archive beside tars": (both(tar, written("images.zip")), "tar", "images.zip is"),
    "another archive beside tars": (both(tar, written("b.7z")), "tar", "b.7z is"),
    "an archive beside Parquet": (both(parquet, written("images.zip")), "parquet", "images.zip is"),
    "an archive beside JSONL": (both(jsonl, written("data.zip")), "jsonl", "data.zip is"),
    "an archive beside CSV": (both(table, written("images.zip")), "csv", "images.zip is"),
    "an archive beside the images of it": (both(images, written("images.zip")), "folder", "images.zip is"),
    "an archive beside MDS": (
        lambda root: (write_captioned_mds(root, 5), written("a.zip")(root))[1],
        "mds",
        "a.zip is",
    ),
    "a compressed tar beside Parquet": (both(parquet, written("images.tar.gz")), "parquet", "images.tar.gz is"),
    "compressed JSONL beside CSV": (both(table, written("b.jsonl.gz")), "csv", "b.jsonl.gz is"),
    "records of TensorFlow beside tars": (both(tar, written("a.tfrecord")), "tar", "a.tfrecord is"),
    "features beside images": (both(images, written("features.h5")), "folder", "features.h5 is"),
    "labels of MATLAB beside images": (both(images, written("labels.mat")), "folder", "labels.mat is"),
    "a script beside images": (both(images, written("load.py")), "folder", "load.py is"),
    "a database beside Parquet": (both(parquet, written("a.sqlite")), "parquet", "a.sqlite is"),
    "CSV beside Parquet": (both(parquet, named(table, "labels.csv")), "parquet", "labels.csv is"),
    "a list of JSON beside Parquet": (both(parquet, files(a_dot_json='[{"a": 1}]')), "parquet", "a.json is"),
    "CSV beside JSONL": (both(jsonl, table), "jsonl", "data.csv is"),
    "arrays beside Parquet": (both(parquet, written("a.npy", "b.npy")), "parquet", "a.npy, b.npy are"),
    "Parquet beside tars": (both(tar, parquet), "tar", "part-0.parquet is"),
    "a table of the samples beside tars": (both(tar, named(table, "en/train.tsv")), "tar", "en/train.tsv is"),
    "images beside tars": (both(named(tar, "0.tar", "1.tar"), written("x/a.jpg")), "tar", "x/a.jpg is"),
    "ids of images": (both(images, files(labels_dot_csv="id,breed\n0,a\n1,b\n")), "folder", "labels.csv is"),
    "two of the three tables": (
        both(label_table, named(table, "classes.csv"), named(table, "more.csv")),
        "csv",
        "classes.csv, more.csv are",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_data_that_is_not_read_is_one_warning(name: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, kind, unread = UNREAD[name]
    writer(root)
    assert find_source(str(root)).format.name == kind
    (text,) = [record.getMessage() for record in caplog.records if "not read beside" in record.getMessage()]
    assert text.startswith(f"{root}: {unread} not read beside the {kind} files. Name it alone to read it, or unpack it")
    if kind == "folder":
        assert text.endswith(", or name media such as 0.jpg in a field file_name")
        assert [sample.key for sample in sp.open_dataset(root)] == ["0", "1", "2"]
    caplog.clear()
    assert find_source(str(root), format=kind).format.name == kind
    assert "not read beside" not in caplog.text, "the user named the format"


@pytest.mark.parametrize(
    "writer",
    [
        both(tar, PEOPLE, written("0.tar.md5", "00000_stats.json"), named(parquet, "00000.parquet")),
        img2dataset_files,
        both(images, PEOPLE, written(".DS_Store")),
        both(parquet, lambda root: write(root, LOGO)),
        both(parquet, files(dataset_info_dot_json="{}", _SUCCESS="")),
        metadata("parquet"),
        kaldi(),
        shar,
        megatron,
    ],
)
def test_files_about_a_dataset_are_no_warning(
    writer: Callable[[Path], None], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer(root)
    find_source(str(root))
    assert "not read" not in caplog.text


@pytest.mark.parametrize(("writer", "kind"), [(tar, "tar"), (parquet, "parquet"), (images, "folder"), (table, "csv")])
def test_data_that_is_not_read_and_has_most_of_the_bytes_is_an_error(
    writer: Callable[[Path], None], kind: str, root: Path
) -> None:
    writer(root)
    size = sum(path.stat().st_size for path in root.iterdir())
    (root / "more.zip").write_bytes(bytes(2 * size))
    assert find_source(str(root)).format.name == kind
    (root / "more.zip").write_bytes(bytes(2 * size + 1))
    match = rf'more\.zip is not read beside the {kind} files, with most of the bytes.*pass format="{kind}"$'
    with pytest.raises(sp.ShardError, match=match):
        sp.open_dataset(root)
    assert len(sp.open_dataset(root, format=kind)) == 3


def test_each_name_is_split_twice_at_most_to_recognize_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    split = list[str]()
    for function in ("suffix_of", "stem_of"):
        original = getattr(sample_names, function)
        for module in (sample_names, formats):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda name, to=original: (split.append(name), to(name))[1])
    names = sample_names.FileNames(f"{n}.{end}" for n in range(1000) for end in ("jpg", "txt"))
    assert formats.recognize(names, dict.fromkeys(formats.wanted(names), b"")).format.name == "folder"
    assert len(split) <= 2 * len(names.all) + 100
