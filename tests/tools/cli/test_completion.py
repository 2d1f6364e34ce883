"""The Tab key: `savable` completes commands, options and files in bash and zsh, as `--show-completion` sets it up."""

from __future__ import annotations

import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

SHELLS = {
    "bash": (["bash", "--norc", "-i"], 'eval "$(savable --show-completion)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u; eval "$(savable --show-completion)"'),
}
_PATIENCE_S = 120


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """Start a shell with completion in a folder with a folder of photos and a state."""
    command, set_up = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    (tmp_path / "photos").mkdir()
    (tmp_path / "state.pt").touch()
    shell = Shell(command, tmp_path)
    request.addfinalizer(shell.end)
    shell.send(f"{set_up}; echo set''up\n")
    shell.read_until("setup")
    return shell


def test_the_tab_key_completes_commands_options_and_paths(shell: Shell) -> None:
    for typed, completed in [
        ("savable prev\t", "savable preview"),
        ("savable check --wo\t", "savable check --workers"),
        ("savable state st\t", "savable state state.pt"),
    ]:
        shell.send(typed)
        shell.read_until(completed)
        shell.send("\x15")  # Ctrl-U: an empty line again


class Shell:
    """Shell in its own process, with a terminal."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.process, self._terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            os.execvpe(command[0], command, {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "> "})
        self._poll = select.poll()
        self._poll.register(self._terminal, select.POLLIN)
        self.seen = ""

    def send(self, typed: str) -> None:
        """Send keys."""
        self.seen = ""
        os.write(self._terminal, typed.encode())

    def read_until(self, text: str) -> None:
        """Wait until the shell has printed this text since the last keys."""
        end = time.monotonic() + _PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} is not in {self.seen!r}"
            if self._poll.poll(1000):
                self.seen += os.read(self._terminal, 1 << 16).decode(errors="replace")

    def end(self) -> None:
        """Close the terminal, which ends the shell."""
        os.close(self._terminal)
        os.waitpid(self.process, 0)
