"""Handshake by which a trainer and an agent prove that they have the key.

    agent   ── magic │ 32 random bytes ──▶ trainer
    agent   ◀── 32 random bytes │ purpose │ session │ trusted network? │ proof of the transcript ── trainer
    agent   ── proof of the transcript ──▶ trainer

The key itself is never sent. The transcript is all bytes so far. It has random bytes of both sides, so a recorded
handshake cannot be replayed. The proofs are HMAC-SHA256. Both sides derive the keys of each direction of the connection
(wire.py) from the whole transcript, by HMAC-SHA512.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from savable_pipeline.run.nodes.wire import WIRE_MAGIC, Secret

FOR_SESSION, FOR_WORKER, FOR_PEER = 1, 2, 3
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_WANTED = struct.Struct(f"<{_RANDOM_BYTES}sB16s?")
HELLO_BYTES = len(WIRE_MAGIC) + _RANDOM_BYTES
REPLY_BYTES = _WANTED.size + _PROOF_BYTES
_LEAST_KEY = 16  # bytes


class Wanted(NamedTuple):
    """Request of a trainer for a connection."""

    purpose: int
    session: bytes  # 16 random bytes that connect all connections of a session
    trusted: bool  # whether nobody else can change the traffic, so that bodies need no authentication code


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Read the key in a file, without white space around it.

    Raises ValueError if others could read or replace it, or if it is too short.
    """
    file = Path(path)
    try:
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
            found = os.fstat(opened.fileno())
            key = opened.read(1 << 16).strip() if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise ValueError(
            f"{file}: {error.strerror}. Create a key: (umask 077; head -c 32 /dev/urandom | base64 > {file})"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{file} is a pipe or a device. Write the key into a file.")
    if found.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{file} belongs to user {found.st_uid}, who could run code as you. Run chown {os.geteuid()} {file}, or "
            "create another key."
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{file} can be read by other users, who could run code as you. Run chmod 600 {file}.")
    if len(key) < _LEAST_KEY:
        raise ValueError(
            f"{file} has {len(key)} bytes, fewer than {_LEAST_KEY}. Create a key: (umask 077; head -c 32 "
            f"/dev/urandom | base64 > {file})"
        )
    return key


def new_hello() -> bytes:
    """Return the agent's first message."""
    return WIRE_MAGIC + os.urandom(_RANDOM_BYTES)


def answered(key: bytes, hello: bytes, reply: bytes) -> tuple[bytes, Wanted, Secret] | None:
    """Return the agent's proof, the request, and the secret of the connection.

    It is None if the caller has not proved the key.
    """
    transcript = hello + reply[: _WANTED.size]
    if not hmac.compare_digest(_proof(key, b"trainer", transcript), reply[_WANTED.size :]):
        return None
    _, *wanted = _WANTED.unpack_from(reply)
    whole, found = hello + reply, Wanted(*wanted)
    secret = Secret(_keys(key, b"to trainer", whole), _keys(key, b"to agent", whole), found.trusted)
    return _proof(key, b"agent", whole), found, secret


def greet(end: socket.socket, key: bytes, wanted: Wanted) -> Secret:
    """Do the trainer's part of the handshake.

    It waits as long as the socket does. Raises ConnectionError if the other side has another key.
    """
    hello = read_exactly(end, HELLO_BYTES)
    if hello[: len(WIRE_MAGIC)] != WIRE_MAGIC:
        raise ConnectionError("no agent of this version answers. Check the port and the version.")
    transcript = hello + _WANTED.pack(os.urandom(_RANDOM_BYTES), *wanted)
    whole = transcript + _proof(key, b"trainer", transcript)
    end.sendall(whole[len(hello) :])
    if not hmac.compare_digest(_proof(key, b"agent", whole), read_exactly(end, _PROOF_BYTES)):
        raise ConnectionError("the agent has another key. Use the same key_file= on both sides.")
    return Secret(_keys(key, b"to agent", whole), _keys(key, b"to trainer", whole), wanted.trusted)


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def _keys(key: bytes, direction: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, direction + b"\0" + transcript, "sha512")


def read_exactly(end: socket.socket, size: int) -> bytes:
    """Read so many bytes, for which it waits as long as the socket does."""
    found = b""
    while len(found) < size:
        more = end.recv(size - len(found))
        if not more:
            raise ConnectionError("it closed the connection. Use the same --key-file and version on both sides.")
        found += more
    return found
