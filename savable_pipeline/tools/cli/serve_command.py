"""`savable serve`: the agent of a node, until it is told to end."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from savable_pipeline.tools.cli.console import errors_as_lines, out


def serve(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address of one network. Port 0: a free one.")],
    key_file: Annotated[Path, typer.Option(help="A file with the key, that only you can read; the trainers' too.")],
    workers: Annotated[int, typer.Option(help="Workers of this machine, which the ranks of a loader share.")],
) -> None:
    """Run the workers of loaders on other machines: sp.SocketWorkers(["HOST:PORT"], key_file=…).

    Who has the key can run code here, as you. What passes is not encrypted: use a private network, or a tunnel.
    """
    from savable_pipeline.run.nodes.agent import Agent
    from savable_pipeline.run.nodes.handshake import read_key

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with errors_as_lines():
        agent = Agent(listen, read_key(key_file), workers)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        out.print(f"listening on {agent.address}", markup=False, soft_wrap=True)
        try:
            while True:
                agent.step()
        except KeyboardInterrupt:
            pass
        finally:
            agent.close()
