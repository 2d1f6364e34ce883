"""Write the files that coding agents read. Run `python tools/site/agents.py` after a page has changed.

docs/llms.txt                        title, summary, and each page with its first sentence (form of llmstxt.org)
skills/savable-pipeline/SKILL.md     sections of pages: training loop, settings, mistakes, glossary and commands

`python tools/site/agents.py site` also copies the Markdown pages into a built site, where llms.txt links to them.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAME = "savable-pipeline"
WHEN = (  # when a coding agent should use the skill
    "Write, change or debug a training data loader with the Python library savable_pipeline (imported as sp): "
    "reading shards or tables, encoders, packing, checkpoints of the data that resume bit for bit, ranks, trainers."
)
SECTIONS = {  # sections of the skill, by page
    "index.md": ["A complete training loop", "Glossary", "Command line"],
    "tutorials/images.md": ["Write the pipeline", "Choose seed and lanes", "Avoid common mistakes"],
}


def texts() -> dict[Path, str]:
    """Return the contents of llms.txt and of the skill, by path."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    head = f"# {settings['site_name']}\n\n> {settings['site_description']}\n"
    contents = head + "".join(_contents(each) for each in settings["nav"])
    sections = "".join(_section(page, title) for page, titles in SECTIONS.items() for title in titles)
    pages = "\n## The pages\n\n" + "\n".join(re.findall(r"^- .*", contents, re.MULTILINE)) + "\n"
    skill = f"---\nname: {NAME}\ndescription: {WHEN!r}\n---\n\n{head}{sections}{pages}"
    return {
        DOCS / "llms.txt": contents,
        ROOT / "skills" / NAME / "SKILL.md": re.sub(r"\]\((?=[\w/-]+\.md)", "](../../docs/", skill),
    }


def _contents(entry: dict[str, Any]) -> str:
    """Return the section of llms.txt for a section of the navigation."""
    ((title, below),) = entry.items()
    return f"\n## {title}\n\n" + "".join(_line(page) for page in _pages(below))


def _pages(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the navigation, at all levels."""
    for each in [entry] if isinstance(entry, str) else entry.values() if isinstance(entry, dict) else entry:
        yield from [each] if isinstance(each, str) else _pages(each)


def _line(page: str) -> str:
    """Return a link to a page, with the first sentence of the page."""
    prose = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    title, *paragraphs = prose.removeprefix("# ").split("\n\n")
    text = next(each for each in paragraphs if each.strip() and not each.startswith(("#", "`pip ", "<", "|")))
    sentence = re.split(r"(?<=[.:?]) ", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(text.split())))[0]
    return f"- [{title.replace('`', '')}]({page}): {sentence.rstrip(':.')}.\n"


def _section(page: str, title: str) -> str:
    """Return a section of a page, with links relative to docs/."""
    lines, inside, code = [], False, False
    for line in (DOCS / page).read_text().splitlines():
        code ^= line.startswith("```")
        if line.startswith("## ") and not code:
            inside = line == f"## {title}"
        lines += [line] if inside else []
    text = "\n".join(lines).rstrip()
    folder = posixpath.dirname(page)
    return (
        "\n"
        + re.sub(r"(?<=\]\()[\w./-]+\.md", lambda link: posixpath.normpath(f"{folder}/{link[0]}").lstrip("/"), text)
        + "\n"
    )


def copy_pages(site: Path) -> None:
    """Copy the Markdown pages into a built site."""
    for page in DOCS.rglob("*.md"):
        target = site / page.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)


if __name__ == "__main__":
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in sys.argv[1:]:
        copy_pages(Path(folder))
