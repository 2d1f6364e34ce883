"""A TCP proxy between loaders and an agent that delays, drops, doubles, swaps, halves or alters frames, or hangs."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

from savable_pipeline.run.nodes import wire

TROUBLES = ("delay", "drop", "half", "twice", "swapped", "changed", "silent")
_HEADER_BYTES = wire.HEADER.size + wire.CODE_BYTES
_CHUNK = 1 << 20
_PIECE = 1 << 16  # bytes of a piece on a slow link


class FaultyProxy:
    """A proxy at `address`, in front of an agent. Each trouble has a probability per frame, by name."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self.troubles: dict[str, float] = {}
        self.bytes_per_s: float | None = None  # limit of each connection
        self.seen = dict.fromkeys(TROUBLES, 0)
        self.frames = 0
        self.draw = random.Random(seed)
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._silent: set[int] = set()  # pairs of connections that carry nothing more
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port), 5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._ends += [near, far]
                pair = (near, far)
                for source, target, before in (
                    (near, far, [wire.REPLY_BYTES]),
                    (far, near, [wire.HELLO_BYTES, 32]),
                ):
                    threading.Thread(target=self._carry, args=(pair, source, target, before), daemon=True).start()

    def _carry(
        self, pair: tuple[socket.socket, ...], source: socket.socket, target: socket.socket, before: list[int]
    ) -> None:
        """Pass on the messages of the handshake, and then frames."""
        try:
            for size in before:
                target.sendall(_exactly(source, size))
            kept = b""
            while True:
                header = _exactly(source, _HEADER_BYTES)
                _, _, head, _, body, _, _ = wire.HEADER.unpack_from(header)
                kept = self._pass_on(pair, header + _exactly(source, head + body), body, kept, target)
        except OSError:
            pass
        finally:
            if id(pair) not in self._silent:
                _shut(pair)

    def _pass_on(
        self, pair: tuple[socket.socket, ...], frame: bytes, body: int, kept: bytes, target: socket.socket
    ) -> bytes:
        """Send a frame, subject to the troubles. Returns a frame that is sent after the next one."""
        self.frames += 1
        often = 0.05 if frame[4] in (wire.PING, wire.PONG) else 1.0
        trouble = next((name for name in TROUBLES if self.draw.random() < often * self.troubles.get(name, 0.0)), "")
        if id(pair) in self._silent:
            return b""
        if trouble:
            self.seen[trouble] += 1
        if trouble == "delay":
            time.sleep(self.draw.choice((0.01, 0.1, 0.5)))
        elif trouble == "drop":
            raise OSError
        elif trouble == "half":
            target.sendall(frame[: self.draw.randrange(len(frame))])
            raise OSError
        elif trouble == "changed" and body:
            at = len(frame) - 1 - self.draw.randrange(body)
            frame = frame[:at] + bytes([frame[at] ^ 1 << self.draw.randrange(8)]) + frame[at + 1 :]
        elif trouble == "twice":
            frame += frame
        elif trouble == "silent":
            self._silent.add(id(pair))
            return b""
        elif trouble == "swapped" and not kept:
            return frame
        self._send(target, frame + kept)
        return b""

    def _send(self, target: socket.socket, found: bytes) -> None:
        for at in range(0, len(found), _PIECE):
            target.sendall(found[at : at + _PIECE])
            if (rate := self.bytes_per_s) is not None:  # the test may remove the limit in the meantime
                time.sleep(len(found[at : at + _PIECE]) / rate)

    def cut(self) -> None:
        """Drop all connections."""
        ends, self._ends = self._ends, []
        _shut(ends)

    def close(self) -> None:
        """Drop all connections, and accept no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def _exactly(source: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        more = source.recv(min(_CHUNK, size - len(found)))
        if not more:
            raise OSError
        found += more
    return bytes(found)


def _shut(ends: list[socket.socket] | tuple[socket.socket, ...]) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
