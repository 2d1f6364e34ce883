"""Agents of nodes as processes of this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import savable_pipeline as sp

ROOT = Path(__file__).parents[2]


class Agent:
    """An agent, `savable serve`, on a port of this machine."""

    def __init__(self, key_file: Path, workers: int, port: int = 0, **environment: str) -> None:
        command = [sys.executable, "-c", "from savable_pipeline.tools.cli.main import app; app()", "serve"]
        options = [f"--listen=127.0.0.1:{port}", f"--key-file={key_file}", f"--workers={workers}"]
        self.log = key_file.parent / f"agent {secrets.token_hex(4)}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, env=environment)
        assert self.process.stdout is not None
        told = self.process.stdout.readline().decode()
        assert told.startswith("listening on"), told + self.log.read_text()
        self.address = told.split()[-1]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the process with a signal, and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()


def write_key(folder: Path) -> Path:
    """Write a new key to a file."""
    file = folder / "nodes.key"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(16))
    return file


@contextmanager
def agents(folder: Path, *workers: int) -> Iterator[tuple[list[Agent], Path]]:
    """Start agents with these numbers of workers, and yield them and the file of their key."""
    key_file = write_key(folder)
    made: list[Agent] = []
    try:
        made.extend(Agent(key_file, each) for each in workers)
        yield made, key_file
    finally:
        for agent in made:
            agent.end()


def socket_workers(made: list[Agent], key_file: Path, **settings: Any) -> sp.SocketWorkers:
    """Return the workers of these agents, as an argument of a loader."""
    return sp.SocketWorkers([agent.address for agent in made], key_file=key_file, **settings)
