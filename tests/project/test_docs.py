"""The pages in docs/: their code runs, the site builds without a network, and a page loads nothing from elsewhere."""

from __future__ import annotations

import ast
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import savable_pipeline
from savable_pipeline import custom
from tests.project.pages import PAGES, README, ROOT, blocks_of, name_of, run_blocks, write_captioned_shards, write_files

# How many blocks of each page are not run. Each says why on the line above it.
NOT_RUN = {
    "docs/convert-remote.md": 3,
    "docs/hub.md": 1,
    "docs/migrate/lancedb.md": 1,
    "docs/migrate/energon.md": 2,
    "docs/model-parallel.md": 2,
    "docs/multimodal.md": 1,
    "docs/own-format.md": 1,
    "docs/remote-workers.md": 3,
    "docs/remote.md": 2,
    "docs/trainers/accelerate.md": 2,
    "docs/trainers/composer.md": 1,
    "docs/trainers/hf.md": 2,
    "docs/trainers/lightning.md": 2,
    "docs/trainers/megatron.md": 1,
    "docs/trainers/torch.md": 3,
    "docs/trainers/torchtitan.md": 1,
    "docs/trainers/trl.md": 3,
    "docs/trainers/vision-language.md": 2,
}
FOR_CONTRIBUTORS = {"docs/own-format.md"}  # pages whose code is to be a part of the library
# Pages that start in an empty folder and need nothing that they do not make.
FROM_NOTHING = {"docs/tutorials/images.md", "docs/tutorials/language-model.md", "docs/tutorials/multi-gpu.md"}
RUN = [
    pytest.param(page, marks=pytest.mark.landing if name_of(page) in FROM_NOTHING else ())
    for page in PAGES
    if any(block.runs for block in blocks_of(page))
]
LANGUAGES = {"python", "console", "text", "sh", "yaml", "json"}

# Addresses in the theme's scripts, and the mark of a page that would load them. No page has these marks.
LOADED_BY = {
    "http://www.w3.org/": None,  # names of XML, never loaded
    "https://unpkg.com/resize-observer-polyfill": None,  # for browsers released before 2020
    "https://unpkg.com/mermaid@": 'class="mermaid',
    "https://unpkg.com/glightbox@": 'class="glightbox',
    "https://unpkg.com/ace-builds@": 'class="pyodide',
    "https://unpkg.com/pyodide@": 'class="pyodide',
    "https://cdn.jsdelivr.net/pyodide/": 'class="pyodide',
    "https://api.github.com/": 'data-md-component="source"',  # see tools/site/theme/partials/source.html
    "https://${e}/api/v4/projects/": 'data-md-component="source"',
}


@pytest.fixture(scope="module")
def shards_and_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_captioned_shards(folder / "shards")
    write_files(folder)
    return folder


@pytest.fixture
def folder_of_a_page(
    page: Path, shards_and_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Shards and files, or nothing; what a page sets for its whole process is as before afterwards."""
    if name_of(page) not in FROM_NOTHING:
        shutil.copytree(shards_and_files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    logger = logging.getLogger("savable_pipeline")
    level = logger.level
    yield
    logger.setLevel(level)
    for name in ("train", "data"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", RUN, ids=name_of)
@pytest.mark.usefixtures("folder_of_a_page")
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.runs]
    given = {} if name_of(page) in FROM_NOTHING else {"train_step": lambda batch: None}
    run_blocks(blocks, {**given, "__name__": page.stem})


def test_every_code_block_has_a_language_and_unrun_ones_are_counted() -> None:
    blocks = {name_of(page): blocks_of(page) for page in PAGES}
    assert {block.language for found in blocks.values() for block in found} <= LANGUAGES
    not_run = {name: sum(block.why is not None for block in found) for name, found in blocks.items()}
    assert {name: number for name, number in not_run.items() if number} == NOT_RUN
    for page in PAGES:
        fences = page.read_text().count("\n```")
        assert fences == 2 * len(blocks[name_of(page)]), f"{name_of(page)}: a fence that is indented or not closed"


def test_savable_commands_are_in_executed_blocks() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            if block.language in ("sh", "text"):
                assert not re.search(r"^(\$ )?savable ", block.text, re.MULTILINE), block.place


def test_pages_mention_only_existing_modules_and_files() -> None:
    for page in [*PAGES, README]:
        for name in re.findall(r"`((?:tools|tests|savable_pipeline|task_encoders)/[\w/]+\.py)", page.read_text()):
            assert (ROOT / name).is_file(), f"{name_of(page)}: {name}"


def test_pages_mention_only_existing_loggers() -> None:
    for page in [*PAGES, README]:
        for name in re.findall(r"`(savable_pipeline(?:\.(?!testing)[a-z_]+)+)`", page.read_text()):
            path = ROOT / name.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{name_of(page)}: {name}"


def test_pages_import_only_public_names() -> None:
    for page in [*PAGES, README]:
        for block in blocks_of(page) if name_of(page) not in FOR_CONTRIBUTORS else ():
            inner = re.findall(
                r"^\s*(?:from|import) (savable_pipeline\.(?!custom\b|errors\b|testing\b|trainers\b|energon\b)\S+)",
                block.text,
                re.MULTILINE,
            )
            assert not inner, f"{block.place}: {inner}"


def test_api_pages_have_every_public_name_once() -> None:
    text = "".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
    for module, names in (("", savable_pipeline.__all__), ("custom.", custom.__all__)):
        listed = re.findall(rf"^::: savable_pipeline\.{module}(\w+)$", text, re.MULTILINE)
        assert Counter(listed) == Counter(names)


def test_command_line_page_matches_the_help() -> None:
    page = runpy.run_path(str(ROOT / "tools/site/cli_page.py"))
    assert page["PAGE"].read_text() == page["text"](), "run `python tools/site/cli_page.py`"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of its sources without access to a network."""
    pytest.importorskip("zensical", reason="needs the extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "tools/site"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("savable_pipeline", "task_encoders"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    unreachable = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "HTTP", "HTTPS")}
    for command in (["-m", "zensical", "build", "--strict"], ["tools/site/agents.py", "site"]):
        built = subprocess.run(
            [sys.executable, *command], cwd=folder, env={**os.environ, **unreachable}, capture_output=True, text=True
        )
        assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


class _Loads(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and given.get("rel", "") not in ("canonical", "next", "prev", "alternate"):
            self.found.append(given.get("href", ""))
        if tag not in ("a", "link", "area"):
            self.found += [given.get(name, "") for name in ("src", "srcset", "data", "poster", "href", "xlink:href")]
        self.found += _urls_of_css(given.get("style", ""))


def _urls_of_css(text: str) -> list[str]:
    imported = re.findall(r"@import\s+[\"']([^\"']+)", text)
    return imported + re.findall(r"url\(\s*[\"']?([^\"')]+)", text)


def _elsewhere(addresses: list[str]) -> list[str]:
    return [address for address in addresses if re.match(r"\s*(https?:)?//", address)]


@pytest.mark.landing
def test_no_docs_page_loads_files_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES) / 2
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        styles = re.findall(r"<style[^>]*>(.*?)</style>", page.read_text(), re.DOTALL)
        assert not _elsewhere(loads.found + [url for style in styles for url in _urls_of_css(style)]), page
    for sheet in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not _elsewhere(_urls_of_css(sheet.read_text())), sheet
    for picture in site.rglob("*.svg"):
        assert not re.search(r"<(script|image|use)\b", picture.read_text()), picture


@pytest.mark.landing
def test_theme_scripts_load_nothing_from_another_host(site: Path) -> None:
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    for script in site.rglob("*.js"):
        for address in re.findall(r"[\"'`](https?://[^\"'`]+)", script.read_text()):
            (mark,) = [mark for start, mark in LOADED_BY.items() if address.startswith(start)] or [address]
            assert mark is None or mark not in pages, f"{script}: {mark} loads {address}"
            assert mark != address, f"{script}: unknown address {address}"


@pytest.mark.landing
def test_every_page_is_in_the_contents(site: Path) -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    assert not [name_of(page) for page in PAGES if str(page.relative_to(ROOT / "docs")) not in contents]


@pytest.mark.landing
def test_the_site_has_llms_txt_and_the_pages_that_it_names(site: Path) -> None:
    links = re.findall(r"\]\((\S+\.md)\)", (site / "llms.txt").read_text())
    assert len(links) == len(PAGES)
    assert not [link for link in links if not (site / link).is_file()]


def test_images_for_phones_fit_a_phone() -> None:
    shown = {name for page in PAGES for name in re.findall(r'"picture narrow".*\n!\[.+\]\((.+)\)', page.read_text())}
    assert shown == {
        f"assets/{name}.svg" for name in ("checkpoint", "data-path", "in-flight", "packing", "ranks", "types")
    }
    for name in shown:
        width = re.search(r'viewBox="0 0 (\d+) ', (ROOT / "docs" / name.removeprefix("../")).read_text())
        assert width and int(width[1]) <= 390, name
    assert re.search(r"\.picture\.narrow img \{ min-width: 0;", (ROOT / "docs/assets/pages.css").read_text())


def test_messages_page_matches_the_code() -> None:
    told = _texts_of_the_code()
    text = (ROOT / "docs/troubleshooting.md").read_text()
    messages = [line[2:].split("` | ")[0].strip("`") for line in text.splitlines() if line.startswith("| `")]
    messages = [message for message in messages if " " in message]  # the others are names of errors
    assert len(messages) > 25
    stale = [message for message in messages if not any(_is_written_so(message, text) for text in told)]
    assert not stale, "no such message in the code (… stands for what differs):\n" + "\n".join(stale)


def _texts_of_the_code() -> list[str]:
    """Every text in the package, `…` where a value is put in."""
    texts = []
    for path in (ROOT / "savable_pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[.\d]*[a-z]", "…", node.value))
    return texts


def _is_written_so(message: str, text: str) -> bool:
    """Return whether the words of a message, between what differs, stand in this order in a text."""
    place = 0
    for words in message.split("…"):
        found = text.find(words.strip(" :;"), place)
        if found < 0:
            return False
        place = found + len(words.strip(" :;"))
    return True
