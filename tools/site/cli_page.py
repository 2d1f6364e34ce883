"""Write docs/cli.md from the help of the command line.

Run `python tools/site/cli_page.py` after changing the help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from savable_pipeline.tools.cli.main import app

PAGE = Path(__file__).parents[2] / "docs/cli.md"
HEAD = """# Command line

Inspect data, convert it, and check runs with the command `savable`, which the package installs.

```console
$ savable info shards/
$ savable check shards/
```

`PATH` and `SRC` may be a folder, a glob, a file or a URL. Results go to stdout, progress and errors to stderr. The exit
code is 0 if all is well, 1 if the data or the run has an error, 2 if the command failed, and 130 after Ctrl-C. Every
command has `--help`. Ctrl-C or SIGTERM ends `savable convert` after the current samples, and a second SIGTERM at once.
"""


def text() -> str:
    """Return the page."""
    page = HEAD
    commands = list(commands_of(typer.main.get_command(app)))
    for panel, commands_of_panel in groupby(commands, key=lambda name_command_panel: name_command_panel[2]):
        page += f"\n## {panel}\n" if panel else ""
        page += "".join(_section(name, command) for name, command, _ in commands_of_panel)
    return page


def commands_of(group: Any, path: str = "savable", panel: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield name, command and panel of each command, in the order of `savable --help`.

    Commands of groups are included.
    """
    for name in group.list_commands(None):
        command, full_name = group.commands[name], f"{path} {name}"
        own_panel = getattr(command, "rich_help_panel", None)
        own_panel = own_panel if isinstance(own_panel, str) else panel
        is_group = hasattr(command, "commands")
        yield from commands_of(command, full_name, own_panel) if is_group else [(full_name, command, own_panel)]


def _section(name: str, command: Any) -> str:
    """Return the section of a command, with its usage, help and options."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([name, *(f"[{_metavar(each)}]" if not each.required else _metavar(each) for each in arguments)])
    rows = [(f"`{_metavar(each)}`", _plain(each.help)) for each in arguments if each.help]
    rows += [
        (" ".join(f"`{spelling}`" for spelling in _spellings(each)), _described(each))
        for each in _by_panel(command.params)
        if each.param_type_name == "option" and not each.hidden and each.name != "help"
    ]
    example = f"\n\n{_plain(command.epilog)}" if command.epilog else ""
    # Markdown dialects disagree about a bar inside code in a table
    table = "".join(f"| {option.replace('|', '/')} | {meaning} |\n" for option, meaning in rows)
    return f"\n### {name}\n\n`{usage}`\n\n{_help(command)}{example}\n\n| option | meaning |\n|---|---|\n{table}"


def _by_panel(params: list[Any]) -> list[Any]:
    """Return the options panel by panel, in the order of the help."""
    panels = list(dict.fromkeys(getattr(each, "rich_help_panel", None) for each in params))
    return sorted(params, key=lambda each: panels.index(getattr(each, "rich_help_panel", None)))


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()) + ("…" if argument.nargs == -1 else "")


def _spellings(option: Any) -> list[str]:
    """Return all names of an option, the last one with its value."""
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    spellings = [*option.opts, *option.secondary_opts]
    return [*spellings[:-1], spellings[-1] + value]


def _described(option: Any) -> str:
    """Return the help of an option, with its default."""
    default = option.default
    is_shown = option.show_default is not False and not option.is_flag and isinstance(default, str | int | float)
    described = _plain(option.help) + (f" Default: {default}." if is_shown and default != "" else "")
    return f"{described} Required." if option.required else described


def _help(command: Any) -> str:
    """Return the help with one line per paragraph, without the line breaks of the source."""
    paragraphs = re.split(r"\n\s*\n", (command.help or "").replace("\f", "").replace("\b\n", "").strip())
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _plain(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "/")


if __name__ == "__main__":
    PAGE.write_text(text())
