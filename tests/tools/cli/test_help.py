"""What `--help` prints: commands and options in groups, and an example of each command that its parser takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from savable_pipeline.tools.cli.main import app
from tests.project.test_writing import commands_of

GROUP: Any = typer.main.get_command(app)
COMMANDS = dict(commands_of(GROUP))


def help_of(*words: str) -> str:
    """Return the help of a command at 80 columns."""
    return CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output


def test_commands_are_grouped_in_the_order_of_use() -> None:
    words = (line.strip("│╭╮╰╯─ ").split(" ")[0] for line in help_of().splitlines())
    groups = [
        "Look info preview check",
        "Prepare convert index",
        "Run plan verify-resume state ledger",
        "Cluster serve",
    ]
    assert " ".join(filter(None, words)).endswith(" ".join(groups))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_that_its_parser_takes(name: str) -> None:
    command = COMMANDS[name]
    _, _, example = command.epilog.strip("`").partition("`")
    program, *words = shlex.split(example)
    named = [words.pop(0), words.pop(0)] if words[0] == "ledger" else [words.pop(0)]
    assert (program, named[-1]) == ("savable", name)
    command.make_context(name, words, resilient_parsing=False)  # raises what is wrong with an option
    assert help_of(*named).rstrip().endswith(f"Example: {example}"), "in one line of 80 columns"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_a_group_with_a_short_help(name: str) -> None:
    for option in COMMANDS[name].params:
        if option.param_type_name == "option" and option.name != "help":
            assert option.rich_help_panel in ("Input", "Output", "Parallelism"), option.name
            assert 0 < len(option.help.partition(" Default")[0]) <= 50, option.help
