"""The rules of writing that a program can check, as numbers that only go down.

`GOAL` has the rules that hold everywhere. `MOST` has the numbers of the last change where a rule is broken still.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from savable_pipeline.tools.cli.main import app
from tests.project.pages import PAGES, README, ROOT, blocks_of, name_of

TEXTS = [README, *PAGES]
CODE = [path for name in ("savable_pipeline", "task_encoders") for path in sorted((ROOT / name).rglob("*.py"))]
TOOLS = sorted((ROOT / "tools").rglob("*.py"))

# Private words, and the words of the field that replace them.
PRIVATE_WORDS = {
    r"go(es|ing)? on\b": "resumes, continues",
    r"begin(s|ning)?\b|\bbegun\b|\bbegan\b": "start",
    r"comes? again\b|made again\b": "is repeated, rebuilt",
    r"filler rows?\b": "padding rows",
    r"end marks?\b": "end-of-turn or EOS tokens",
    r"(is|are) (not )?learned\b": "contributes to the loss",
    r"page-locked\b": "pinned",
    r"processor time\b": "CPU time",
    r"Python's lock\b": "the GIL",
    r"films?\b": "video",
    r"sounds\b": "audio",
    r"faults?\b": "error, corruption",
    r"mend(s|ed)?\b|cures?\b": "fix, solution",
    r"left out\b": "skipped, dropped",
    r"behind (a|an|the) (URL|address)\b": "remote",
    r"anew\b|the like\b": "again, similar",
    r"is told\b|by its marks\b": "detected",
    r"by property\b|soaks?\b": "property-based, stress test",
    r"hours of all ranks\b": "rank-hours",
    r"(a|one|each|every|the first|the next) pass\b": "epoch",
}
FRAGMENT = re.compile(
    r"^(- )?(Kills|Trains|Makes|Writes|Reads|Takes|Gives|Shows|Says|Runs|Creates|Lists)\b", re.MULTILINE
)
CLAUSE_AS_NOUN = re.compile(r"\b(What|Who) (is|was|has|it|the)\b")
NEGATIVE = re.compile(r"\bno \w+( \w+)? that (is|are)\b")
NAMING = re.search(r"No identifier has one of the words\s(.*?)\.", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
BANNED_NAMES = set(re.findall(r"\w+", NAMING[1] if NAMING else ""))
FIELD_NAMES = {
    "out": "the argument of NumPy and torch",
    "fan_out": "one sample becomes several items",
    "left_pad": "the side of padding, as tokenizers call it",
    "in_place": "an operation of torch that changes its argument",
}
COORDINATES = {"right", "top", "upper"}  # where one of them is defined, `left` is a side

LONG, BANNED = "summaries of docstrings over 80 characters", "banned identifiers"
MOST = {  # what the last change had reached
    "private words on pages": 0,
    "sentences without a subject": 0,
    "clauses as nouns": 0,
    "marks above one in 60 words": 1,
    "pages without code in 25 lines": 0,
    "headings": 0,
    "code lines over 84 characters": 0,
    "long messages": 0,
    "messages with internal numbers": 0,
    "negatives in messages": 0,
}
MOST_IN: dict[str, dict[str, int]] = {}  # the same per folder; a folder at 0 is not in it
CONVENTIONAL = {"log", "main"}  # every module's logger, and a program's first function


def words_of(page: Path) -> str:
    """The text of a page with its tables, without code, pictures, comments and addresses."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^!\[.*$|^</?(div|sub).*?>|^:::.*$(\n    .*$)*", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", text))


def prose_of(page: Path) -> str:
    """The text of a page without code, tables, pictures, comments and addresses."""
    return re.sub(r"^\|.*$", "", words_of(page), flags=re.MULTILINE)


def found() -> dict[str, Counter[str]]:
    """How often each rule is broken, by page or file."""
    broken: dict[str, Counter[str]] = {name: Counter() for name in [*MOST, LONG, BANNED]}
    for page in TEXTS:
        name, prose = name_of(page), prose_of(page)
        lines = page.read_text().splitlines()
        private = "|".join(PRIVATE_WORDS)
        broken["private words on pages"][name] = len(re.findall(rf"(?i)\b(?:{private})", words_of(page)))
        broken["sentences without a subject"][name] = len(FRAGMENT.findall(prose))
        broken["clauses as nouns"][name] = max(0, len(CLAUSE_AS_NOUN.findall(prose)) - 2)
        words, marks = len(prose.split()), len(re.findall(r"[:;](?=\s)", prose))
        broken["marks above one in 60 words"][name] = max(0, marks - words // 60 - 2)
        first = next((number for number, line in enumerate(lines, 1) if line.startswith(("```", ":::"))), 10**6)
        broken["pages without code in 25 lines"][name] = int(first > 25 and page != README)
        headings = [line for line in prose.splitlines() if line.startswith("#")]
        broken["headings"][name] = sum(bool(re.match(r"#+ The\b|.*…", line)) for line in headings)
        code = [line for block in blocks_of(page) for line in block.text.splitlines()]
        broken["code lines over 84 characters"][name] = 0 if page == README else sum(len(line) > 84 for line in code)
    for path in CODE:
        name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        for text in _messages(tree):
            broken["long messages"][name] += len(text.split("\n")[0]) > 200
            broken["messages with internal numbers"][name] += bool(re.search(r"\bref \(", text))
            broken["negatives in messages"][name] += bool(NEGATIVE.search(text))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                summary = (ast.get_docstring(node) or "").split("\n\n")[0]
                public = not getattr(node, "name", "").startswith("_")
                broken[LONG][name] += public and len(summary) > 80
    for path in [*CODE, *TOOLS]:
        broken[BANNED][str(path.relative_to(ROOT))] = len(_banned(set(_identifiers(ast.parse(path.read_text())))))
    return broken


def _messages(tree: ast.AST) -> Iterator[str]:
    """Texts of raised errors and of warnings, `…` where a value is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and re.search(r"\bwarn(ing)?\b", ast.unparse(node.func)):
            call = node
        else:
            continue
        for argument in call.args:
            if isinstance(argument, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in argument.values)
            elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def _identifiers(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _banned(names: set[str]) -> set[str]:
    """Those of a module's names that have a banned word."""
    found = set()
    for name in names:
        words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().strip("_")
        if words not in FIELD_NAMES and not BANNED_NAMES.isdisjoint(words.split("_")):
            found.add(name)
    sides = {"left", "_LEFT"} if COORDINATES & {name.strip("_").lower() for name in names} else set()
    return found - sides


def _public_names(tree: ast.Module) -> Iterator[str]:
    """The classes, functions and constants of a module without leading underscore; a type variable is none."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_") and len(name) > 1)


BROKEN = found()


@pytest.mark.parametrize("rule", MOST)
def test_no_rule_of_writing_is_broken_more_often_than_before(rule: str) -> None:
    broken = +BROKEN[rule]
    assert broken.total() <= MOST[rule], f"{broken.total()}: {broken.most_common()}"


@pytest.mark.parametrize("rule", [LONG, BANNED])
def test_no_folder_breaks_a_rule_more_often_than_before(rule: str) -> None:
    broken: dict[str, Counter[str]] = {}
    for name, number in (+BROKEN[rule]).items():
        broken.setdefault(str(Path(name).parent), Counter())[name] = number
    most = {folder: numbers.get(rule, 0) for folder, numbers in MOST_IN.items()}
    assert not {folder: found for folder, found in broken.items() if found.total() > most.get(folder, 0)}


def test_no_public_name_is_defined_in_two_files() -> None:
    names = Counter(name for path in CODE for name in set(_public_names(ast.parse(path.read_text()))))
    assert {name for name, files in names.items() if files > 1} <= CONVENTIONAL


def test_each_writing_check_finds_its_example() -> None:
    assert FRAGMENT.search("Text.\n\nKills a process that takes batches.")
    assert CLAUSE_AS_NOUN.search("Who has the key can run code") and CLAUSE_AS_NOUN.search("What is skipped is counted")
    assert NEGATIVE.search("unreadable image (no image format that is read)")
    assert _banned({"_tell_held", "TarSaid", "LEFT_OUT"}) == {"_tell_held", "TarSaid", "LEFT_OUT"}
    assert not _banned({"layout", "timeout_s", "FanOut", "left_pad"})
    assert len(BANNED_NAMES) == 23  # in CONTRIBUTING.md
    assert _banned({"left", "right"}) == set() and _banned({"left", "rest"}) == {"left"}
    assert list(_public_names(ast.parse("A = _b = 1\nT = 2\nCD: int = 3\nclass E:\n    F = 4"))) == ["CD"]
    assert list(_messages(ast.parse("raise ValueError(f'a {b} c')"))) == ["a … c"]


def test_no_table_cell_says_only_the_same() -> None:
    assert not [name_of(page) for page in TEXTS if re.search(r"\| *the same *\|", page.read_text())]


def test_the_first_line_of_each_command_is_a_short_imperative() -> None:
    found = list(commands_of(typer.main.get_command(app)))
    assert len(found) == 12
    for name, command in found:
        summary = (command.help or "").strip().split("\n")[0]
        assert 0 < len(summary) <= 60, f"{name}: {summary}"
        assert " so that " not in summary and not re.match(r"\w+s\b(?<!ss)", summary), f"{name}: {summary}"


def commands_of(group: Any) -> Iterator[tuple[str, Any]]:
    """Each command of a group, also of groups in it; typer has its own classes for both, or those of click."""
    for name, command in group.commands.items():
        yield from commands_of(command) if hasattr(command, "commands") else [(name, command)]
