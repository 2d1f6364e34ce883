"""A shard has the bytes that webdataset's TarWriter would write; neither that nor torch is imported for it."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from webdataset.writer import TarWriter

from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.convert.shard_series import ShardFile
from savable_pipeline.tools.convert.shard_writer import name_fault

Sample = tuple[str, dict[str, bytes]]  # key, and bytes by extension

names = st.text(
    st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="/."), min_size=1, max_size=130
)
extensions = names.filter(lambda name: not name.startswith("_"))
samples = st.lists(
    st.tuples(
        st.lists(names, min_size=1, max_size=3).map("/".join),
        st.dictionaries(extensions, st.binary(max_size=1500), min_size=1, max_size=3),
    ),
    max_size=8,
    unique_by=lambda sample: sample[0],
)


def by_us(given: list[Sample]) -> bytes:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ShardFile(Path(folder, "a.tar"), "a.tar")) as shard,
    ):
        for key, parts in given:
            shard.add(key, parts)
        rows = shard.finish()
        if not any(name_fault(key, extension) for key, parts in given for extension in parts):
            assert rows == TARS.scan(Path(folder), "a.tar"), "the rows are those that a scan finds"
        return Path(folder, "a.tar").read_bytes()


def by_webdataset(given: list[Sample]) -> bytes:
    file = io.BytesIO()
    with TarWriter(file, encoder=False, user="", group="", mode=0o644, mtime=0, format="PAX_FORMAT") as writer:
        for key, parts in given:
            writer.write({"__key__": key, **parts})
    return file.getvalue()


@settings(max_examples=33 if settings().max_examples == 100 else settings().max_examples)
@given(samples)
@example([])
@example([("a/b", {"txt": b"", "seg.png": b"x" * 512, "JPG": b"y" * 10_240})])
@example([(f"{'d' * 120}/{'k' * 200}", {"json": b"{}"}), ("é/日本", {"txt": b"z"})])
def test_bytes_equal_those_of_webdatasets_writer(given: list[Sample]) -> None:
    assert by_us(given) == by_webdataset(given)
