"""What coding agents read, llms.txt and the skill, is what the pages say."""

from __future__ import annotations

import re
import runpy

import yaml

from tests.project.pages import PAGES, ROOT

AGENTS = runpy.run_path(str(ROOT / "tools/site/agents.py"))
SKILL = ROOT / "skills" / AGENTS["NAME"] / "SKILL.md"


def test_files_for_agents_match_the_pages() -> None:
    stale = [path.name for path, text in AGENTS["texts"]().items() if path.read_text() != text]
    assert not stale, "run `python tools/site/agents.py`"


def test_llms_txt_has_each_page_once_with_its_purpose() -> None:
    title, summary, *lines = (line for line in (ROOT / "docs/llms.txt").read_text().splitlines() if line)
    assert (title, summary[:2]) == ("# savable_pipeline", "> ")
    found = [re.fullmatch(r"- \[.+\]\((.+\.md)\): (\S.*\w\S*)\.", line) for line in lines if not line.startswith("## ")]
    assert all(found)
    assert sorted(each[1] for each in found if each) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


def test_skill_has_front_matter_recipe_mistakes_and_valid_links() -> None:
    _, front, text = SKILL.read_text().split("---\n", 2)
    found = yaml.safe_load(front)
    assert found.keys() == {"name", "description"} and found["name"] == SKILL.parent.name
    assert len(found["description"]) <= 1024
    for heading in ("A complete training loop", "Avoid common mistakes", "Command line", "The pages"):
        assert re.search(rf"^## {heading}\n\n(?!## )\S", text, re.MULTILINE), heading
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > len(PAGES)
    assert not [link for link in links if not (SKILL.parent / link).is_file()]
