"""The pages for migrants: what they call missing is missing, what is here they name, what they map is so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import savable_pipeline as sp
from tests.conftest import write_tar
from tests.project.pages import ROOT, name_of

PAGES = sorted((ROOT / "docs/migrate").glob("*.md"))
_CLAIM = re.compile(r"^\| .+ \| none\b.*|^Not available here: (?:[^.]|\.\b)+\.", re.MULTILINE)


def named(*names: str) -> Callable[[], bool]:
    """Return whether one of these is in `sp`: `Reader`, `TaskEncoder.method`, or `SavableLoader(argument)`."""

    def is_here() -> bool:
        return any(_exists(name) for name in names)

    return is_here


def opens(path: str) -> Callable[[], bool]:
    """Return whether such a path or URL is read; one that is not is an error that says so."""

    def is_here() -> bool:
        try:
            sp.open_dataset(path)
        except sp.ShardError as error:
            return not re.search("cannot be read at an offset|is not read", str(error))
        return True

    return is_here


# Every claim that something is not here, by words of it, with what would be true if it were.
NOT_HERE = {
    "migrate/energon.md": {
        "`cookers`": named("TaskEncoder.cookers", "TaskEncoder.cook", "Cooker"),
        "`current_batch_index`": named("Rng.index", "TaskEncoder.current_batch_index", "Rng.batch_index"),
        "`cache`": named("TaskEncoder.cache", "Encode(cache)", "Cache"),
    },
    "migrate/grain.md": {
        "| ArrayRecord files |": named("ArrayRecordReader"),
        "Random access into a whole pipeline": named("Stage.__getitem__", "Batcher.__getitem__", "MapDataset"),
    },
    "migrate/hf-datasets.md": {"Scripts of a repository": named("load_dataset", "read(script)")},
    "migrate/mosaic.md": {
        "another choice of samples in each epoch": named("TarShardReader(sampling_method)", "TarShardReader(choose)"),
    },
    "migrate/torchdata.md": {
        "| a sampler |": named("SavableLoader(sampler)", "Sampler"),
        "`snapshot_every_n_steps`": named("SavableLoader(snapshot_every_n_steps)"),
        "`worker_init_fn`": named("SavableLoader(worker_init_fn)", "SavableLoader(generator)"),
        "Samplers over": named("SavableLoader(sampler)", "Sampler"),
    },
    "migrate/lancedb.md": {
        "Search, edits and reading from a LanceDB server": named("LanceReader", "Dataset.search"),
    },
    "migrate/webdataset.md": {"`pipe:` URLs": opens("pipe:cat x.tar")},
}

# What is here, and what those who come from there look for.
HERE = {
    "migrate/index.md": ["sp.open_dataset", "sp.join", "sp.ShardWriter", "sp.read"],
    "migrate/grain.md": ["own-store.md"],
    "migrate/megatron.md": ["A sample here is a document"],
    "migrate/energon.md": ["sp.open_dataset", "sp.join"],
}


def test_features_called_missing_on_a_page_are_listed_in_this_test() -> None:
    found = {
        name_of(page).removeprefix("docs/"): [" ".join(claim.split()) for claim in _CLAIM.findall(page.read_text())]
        for page in PAGES
    }
    for page, claims in found.items():
        listed = NOT_HERE.get(page, {})
        assert [claim for claim in claims if not any(words in claim for words in listed)] == [], page
        assert [words for words in listed if not any(words in claim for claim in claims)] == [], page


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, claims in NOT_HERE.items() for words in claims])
def test_features_called_missing_on_a_page_are_missing(page: str, words: str) -> None:
    assert not NOT_HERE[page][words](), f"docs/{page} says that it is not here: {words}"


def test_search_for_missing_features_would_find_them() -> None:
    assert named("TarShardReader")() and named("Sampler", "TaskEncoder.encode")() and named("SavableLoader(seed)")()
    assert not named("TaskEncoder.sampler", "SavableLoader(sampler)", "Sampler(seed)")()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_names_exactly_existing_features(page: Path) -> None:
    text = page.read_text()
    plain = text.replace("*", "")
    assert [
        words for words in HERE.get(name_of(page).removeprefix("docs/"), []) if words not in plain.replace("\n", " ")
    ] == []
    assert [name for name in re.findall(r"\bsp\.(\w+)", text) if name not in sp.__all__] == []


@pytest.mark.parametrize(
    ("theirs", "until", "small", "large"),
    [
        ("first_exhausted", "first", 1, 1),
        ("all_exhausted", "first", None, 1),
        ("all_exhausted_without_replacement", "all", 1, 1),
    ],
)
def test_blend_ends_like_its_interleave_datasets_strategy(
    tmp_path: Path, theirs: str, until: str, small: int | None, large: int
) -> None:
    """datasets 5.2.0 gives of 4 and 12 samples, by equal shares, 4 + 4, 12 + 12 and 4 + 12 with these strategies."""
    write_tar(tmp_path / "small.tar", [(f"small{i}.txt", b"") for i in range(4)])
    write_tar(tmp_path / "large.tar", [(f"large{i}.txt", b"") for i in range(12)])
    lane = sp.Lane(seed=7)
    readers = {
        name: sp.TarShardReader(tmp_path / f"{name}.tar", lane, epochs=epochs)
        for name, epochs in (("small", small), ("large", large))
    }
    keys = [sample.key for sample in sp.Blend(readers, weights={"small": 1, "large": 1}, until=until, stride=1)]
    counts = tuple(sum(key.startswith(name) for key in keys) for name in readers)
    near = {"first_exhausted": (4, 4), "all_exhausted": (12, 12), "all_exhausted_without_replacement": (4, 12)}[theirs]
    assert counts in [near, (near[0] + 1, near[1]), (near[0], near[1] + 1)]  # in which turn it ends is drawn
    ended = "small" if theirs == "first_exhausted" else "large"
    assert len({key for key in keys if key.startswith(ended)}) == counts[list(readers).index(ended)], "each once"
    row = next(line for line in (ROOT / "docs/migrate/hf-datasets.md").read_text().split("\n") if f'"{theirs}"' in line)
    assert f'until="{until}"' in row and "epochs=1" in row


def _exists(name: str) -> bool:
    name, _, argument = name.rstrip(")").partition("(")
    owner, _, attribute = name.partition(".")
    if owner not in sp.__all__:
        return False
    found = getattr(sp, owner)
    if argument:
        return argument in inspect.signature(found).parameters
    return not attribute or hasattr(found, attribute)
