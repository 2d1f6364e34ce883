"""What we write loads in Megatron-Energon, and what it prepared loads here: the same samples with the same bytes."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.tools.convert import Options, run_conversion
from savable_pipeline.tools.convert.describe import describe
from tests.conftest import write_tar
from tests.energon.conftest import no_collection
from tests.support.record_cases import png
from tests.support.toy_files import SMALL, jpeg, write_captioned_images, write_lines

energon = pytest.importorskip("megatron.energon")

__all__ = ["no_collection"]  # a fixture

Parts = dict[str, bytes]


@energon.stateless
def cook(sample: dict[str, Any]) -> Any:
    """Key and parts as they are."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    return energon.TextSample(**energon.basic_sample_keys(sample), text=parts)


class AsItIs(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Gives every sample of a crude dataset, undecoded."""

    decoder = None
    cookers = [energon.Cooker(cook)]  # noqa: RUF012

    @energon.stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        return samples


def by_energon(root: Path, encoder: Any, split: str = "train") -> list[Any]:
    """One epoch of batches of one."""
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}
    data = energon.get_train_dataset(root, split_part=split, worker_config=config, task_encoder=encoder, **settings)
    return list(energon.get_loader(data))


def crude(root: Path, split: str = "train") -> dict[str, Parts]:
    """By key: the parts of each sample, as Energon gives them."""
    samples = [batch[0] for batch in by_energon(root, AsItIs(), split)]
    assert len({sample.__key__ for sample in samples}) == len(samples)
    return {sample.__key__: sample.text for sample in samples}


def ours(root: Path, split: str = "train") -> dict[str, Parts]:
    reader = sp.TarShardReader(root, sp.Lane(), split=split, epochs=1)
    return {sample.key: dict(sample.items()) for sample in reader}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Compressed tars whose samples have unlike parts, in folders, with long names and members of no sample."""
    samples = [(f"{'d' * 60}/é{i}", [("jpg", jpeg(i)), ("seg.png", png(i)), ("json", b"[%d]" % i)]) for i in range(9)]
    for shard in range(3):
        members = [("README", b"no sample"), ("__meta__/x.txt", b"metadata")]
        for key, parts in samples[3 * shard : 3 * shard + 3]:
            members += [(f"{key}.{extension}", data) for extension, data in parts[: 2 + shard % 2]]
        write_tar(tmp_path / "plain.tar", members)
        path = tmp_path / "packed" / f"s{shard}" / "x.tar.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes()))
    return tmp_path / "packed"


def test_repacked_tars_load_in_energon_with_the_bytes_that_we_read(packed: Path, tmp_path: Path) -> None:
    report = run_conversion(packed, tmp_path / "out", Options())
    assert (report.samples, report.rejected) == (9, [])
    assert crude(tmp_path / "out") == ours(tmp_path / "out")
    assert len(ours(tmp_path / "out")) == 9


def test_excludes_leave_out_the_same_samples_in_energon(packed: Path, tmp_path: Path) -> None:
    for path in packed.rglob("*.tar.gz"):
        plain = tmp_path / "out" / path.relative_to(packed).with_suffix("")
        plain.parent.mkdir(parents=True)
        plain.write_bytes(gzip.decompress(path.read_bytes()))
    describe(tmp_path / "out")
    key = f"{'d' * 60}/é"
    splits = {
        "split_parts": {"train": ["s{0..1}/x.tar"], "val": ["s2/x.tar"], "all": ["s{0..2}/x.tar"]},
        "exclude": [f"s0/x.tar/{key}{{1,2}}", "s1/x.tar"],
    }
    (tmp_path / "out/.nv-meta/split.yaml").write_text(json.dumps(splits))
    for split, count in {"train": 1, "val": 3, "all": 4}.items():
        found = ours(tmp_path / "out", split)
        assert len(found) == count
        assert crude(tmp_path / "out", split) == found


@pytest.mark.parametrize("kind", ["folder", "jsonl"])
def test_converted_captions_load_in_energon_by_our_field_map(tmp_path: Path, kind: str) -> None:
    source = write_captioned_images(tmp_path / "in", 7)
    if kind == "jsonl":
        names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.jpg"))
        lines = [{"image": name, "caption": f"no. {i} é"} for i, name in enumerate(names)]
        source = write_lines(source / "meta.jsonl", *lines)
    run_conversion(source, tmp_path / "out", SMALL)
    expected = {}
    for sample in sp.TarShardReader(tmp_path / "out", sp.Lane(), split="train", epochs=1):
        caption = sample.field("caption")
        text = caption.decode() if isinstance(caption, bytes) else caption
        pixels = np.asarray(Image.open(io.BytesIO(sample.field("image")))).transpose(2, 0, 1)  # uint8 (3, 8, 8)
        expected[sample.key] = (text, pixels.tolist())
    found = {}
    for batch in by_energon(tmp_path / "out", energon.DefaultTaskEncoder()):
        pixels = (batch.image[0] * 255).round().int()  # Energon gives floats from 0 to 1
        found[batch.__key__[0]] = (batch.caption[0], pixels.tolist())
    assert found == expected
    assert len(expected) == 7


def test_datasets_prepared_by_energon_are_read_split_by_split(packed: Path, tmp_path: Path) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    root = tmp_path / "theirs"
    for shard in range(3):
        (root / f"s{shard}").mkdir(parents=True)
        raw = gzip.decompress((packed / f"s{shard}" / "x.tar.gz").read_bytes())
        (root / f"s{shard}" / "x.tar").write_bytes(raw)
    names = [f"s{shard}/x.tar" for shard in range(3)]
    patterns = [("train", "s{0..1}/x.tar"), ("val", "s2/.*")]
    WebdatasetPreparator.prepare_dataset(EPath(str(root)), names, split_parts_patterns=patterns, workers=1)
    (root / ".nv-meta/dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for split in ("train", "val"):
        assert ours(root, split) == crude(root, split)
    assert {path: path.read_bytes() for path in before} == before


def test_metadataset_has_energons_datasets_weights_repetitions_and_subflavors(tmp_path: Path) -> None:
    from megatron.energon.metadataset.loader import load_dataset

    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"caption": "{name} {i}"}}\n' for i in range(9)))
        run_conversion(tmp_path / f"{name}.jsonl", tmp_path / "data" / name, Options())
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: "
    texts = {
        "blend": "{blend: [{path: data/a, weight: 3, subflavors: {x: 1, y: 1}}, {path: data/b}]}}",
        "outer": "{blend: [{path: blend.yaml, weight: 2, subflavors: {x: 2}}, {path: data/c, weight: 0.5}]}}",
        "epochs": "{blend_epochized: [{path: data/a, repetitions: 0.5}, {path: data/b}]}}",
        "more": "{blend_epochized: [{path: epochs.yaml, repetitions: 3}, {path: data/c, repetitions: 0}]}}",
        "single": "{path: data/c, split_part: train}}",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(head + text)
    first = "splits: {train: {datasets: [{path: data/a, weight: 3, subflavor: old}, {path: data/c}]}}"
    (tmp_path / "first.yaml").write_text(first)
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    for name in [*texts, "first"]:
        path = tmp_path / f"{name}.yaml"
        loaded = load_dataset(path).get_datasets(training=True, split_part="train", worker_config=config).datasets
        theirs = [(str(d.dataset.path), d.weight, d.repetitions, d.dataset.subflavors or {}) for d in loaded]
        found = list(flat(custom.read_mixture(path, split="train")))
        assert [place for place, *_ in found] == [place for place, *_ in theirs]
        for (_, weight, repetitions, tags), (_, their_weight, their_repetitions, subflavors) in zip(
            found, theirs, strict=True
        ):
            assert weight == (pytest.approx(their_weight) if their_weight is not None else weight)
            assert (repetitions, tags) == (their_repetitions, subflavors)


def flat(mixture: custom.Mixture, share: float = 1.0) -> Any:
    """Path, share, repetitions and tags of each dataset."""
    total = sum(float(entry.weight or 0) for entry in mixture.sources.values()) or 1.0
    for entry in mixture.sources.values():
        own = share * float(entry.weight or 0) / total
        if isinstance(entry, custom.Mixture):
            yield from flat(entry, own)
        else:
            yield entry.path, own, entry.repetitions, entry.tags
