"""Pages of a dataset: every sample on one of them, only those that match, and links from page to page."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from savable_pipeline.tools.preview.dataset_page import SampleChoice, dataset_pages, preview_dataset
from tests.conftest import write_tar
from tests.tools.preview.test_preview import Page, run

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 700 samples in two shards. Each seventh has a `seg.PNG` too, and each tenth is a cat."""
    root = tmp_path_factory.mktemp("data") / "shards"
    for shard in range(2):
        members = []
        for number in range(350 * shard, 350 * shard + 350):
            key = f"{'cat' if number % 10 == 0 else 'dog'}{number:03d}"
            members.append((f"{key}.txt", f"text {number}".encode()))
            members += [(f"{key}.seg.PNG", PNG)] * (number % 7 == 0)
        write_tar(root / f"{shard}.tar", members)
    return root


def keys_on(page: bytes) -> list[str]:
    """Return the keys of the samples on a page."""
    return [title for title in Page(page).titles if title[:3] in ("cat", "dog")]


def test_pages_show_every_sample_once_in_order_with_links(shards: Path) -> None:
    written = list(dataset_pages(shards, SampleChoice(300, 5)))
    assert [name for name, _ in written] == ["preview.html", "preview-2.html", "preview-3.html"]
    keys = [key for _, page in written for key in keys_on(page)]
    assert [int(key[3:]) for key in keys] == list(range(700))
    links = []
    for _, raw in written:
        page = Page(raw)
        page.check_harmless()
        links.append([attributes["href"] for tag, attributes in page.elements if tag == "a"][:-1])
    first, second, third = "preview.html", "preview-2.html", "preview-3.html"
    assert links == [[second, third] * 2, [first, first, third, third] * 2, [first, second] * 2]
    assert "page 2 of 3" in Page(written[1][1]).text and "All samples" in Page(written[2][1]).titles


def test_sampled_pages_cover_all_shards_without_repetition(shards: Path) -> None:
    keys = [key for _, page in dataset_pages(shards, SampleChoice(20, 2)) for key in keys_on(page)]
    assert len(set(keys)) == 40 and keys == sorted(keys, key=lambda key: int(key[3:]))
    assert {int(key[3:]) // 350 for key in keys} == {0, 1}


@pytest.mark.parametrize(
    ("part", "key", "numbers"),
    [
        ("*.png", "", range(0, 700, 7)),
        ("", "cat*", range(0, 700, 10)),
        ("SEG.png", "cat[0-3]*", range(0, 400, 70)),
    ],
)
def test_only_samples_with_such_a_part_or_key_are_shown(shards: Path, part: str, key: str, numbers: range) -> None:
    page = preview_dataset(shards, samples=500, part=part, key=key)
    assert [int(each[3:]) for each in keys_on(page)] == [*numbers]
    assert f"{len(numbers)} samples with a" in Page(page).text
    fewer = preview_dataset(shards, samples=3, part=part, key=key)
    assert len(keys_on(fewer)) == 3 and f"3 of {len(numbers)} samples with a" in Page(fewer).text


def test_preview_writes_pages_and_reports_when_nothing_matches(shards: Path) -> None:
    page = shards.parent / "my page.html"
    result = run("preview", shards, "-o", page, "--samples", "40", "--pages", "3", "--key", "cat*")
    assert result.exit_code == 0 and result.stdout.startswith(f"{page} and 1 page more: ")
    second = Page((shards.parent / "my page-2.html").read_bytes())
    assert [attributes["href"] for tag, attributes in second.elements if tag == "a"][:-1] == ["my%20page.html"] * 4
    for wrong in (["--key", "cow*"], ["--part", "mp4"], ["--samples", "501"], ["--pages", "0"]):
        assert run("preview", shards, "-o", shards.parent / "x.html", *wrong).exit_code == 2
    assert "none of 700 samples has a part 'mp4'" in run("preview", shards, "-o", page, "--part", "mp4").stderr
    assert not (shards.parent / "x.html").exists()
