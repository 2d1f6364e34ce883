"""Clips by one decoder in one process, without a loader: `media.py` starts it, also with other interpreters.

    python media_peers.py DECODER FOLDER SEED

Each line on its input is a number of clips to make of random videos at random times, and drop: it answers with that
number, and at the start with "ready" or the reason why it is not. A clip is 2 s at 8 frames a second,
uint8 (16, 3, 224, 224). Nothing of this library is imported, so that it runs where only the decoder is installed.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LENGTH_S, FPS, SIDE = 2.0, 8, 224
Decoder = Callable[[Path, random.Random], Any]
_read = functools.cache(Path.read_bytes)  # "over bytes in memory"


def _times(duration_s: float, draw: random.Random) -> list[float]:
    start = draw.random() * (duration_s - LENGTH_S)
    return [start + n / FPS for n in range(round(LENGTH_S * FPS))]


def pyav(interpolation: str) -> Decoder:
    """A loop over PyAV as its documentation has it: seek, decode, convert the frames that are wanted."""
    import av

    def clip(path: Path, draw: random.Random) -> Any:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            assert stream.duration is not None and stream.time_base is not None
            times = _times(float(stream.duration * stream.time_base), draw)
            container.seek(int(times[0] / stream.time_base), stream=stream)
            made: list[Any] = []
            before: Any = None
            for frame in container.decode(stream):
                while len(made) < len(times) and before is not None and frame.time > times[len(made)]:
                    made.append(_pixels(before, interpolation))
                if len(made) == len(times):
                    break
                before = frame
            while len(made) < len(times):
                made.append(_pixels(before, interpolation))
        return np.ascontiguousarray(np.stack(made).transpose(0, 3, 1, 2))

    return clip


def _pixels(frame: Any, interpolation: str) -> Any:
    return frame.reformat(width=SIDE, height=SIDE, format="rgb24", interpolation=interpolation).to_ndarray()


def energon() -> Decoder:
    """Megatron-Energon's AVDecoder; one range for each frame, which is quicker than to convert all of the clip's."""
    from megatron.energon.av.av_decoder import AVDecoder

    warnings.simplefilter("ignore")

    def clip(path: Path, draw: random.Random) -> Any:
        decoder = AVDecoder(io.BytesIO(_read(path)))
        times = _times(decoder.get_metadata().video_duration, draw)
        frames, _ = decoder.get_video_clips([(time, time) for time in times], "seconds", (SIDE, SIDE))
        import torch

        return torch.cat(frames).contiguous()

    return clip


def torchcodec(seek_mode: Any) -> Decoder:
    """torchcodec, which resizes while it decodes."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    resize = Resize((SIDE, SIDE))

    def clip(path: Path, draw: random.Random) -> Any:
        decoder = VideoDecoder(_read(path), transforms=[resize], seek_mode=seek_mode, num_ffmpeg_threads=1)
        times = _times(decoder.metadata.duration_seconds, draw)
        return decoder.get_frames_played_at(times).data.contiguous()

    return clip


DECODERS: dict[str, Callable[[], Decoder]] = {
    "PyAV": lambda: pyav("BILINEAR"),
    "PyAV, bicubic": lambda: pyav("BICUBIC"),
    "Energon": energon,
    "torchcodec": lambda: torchcodec("exact"),
    "torchcodec, approximate": lambda: torchcodec("approximate"),
}


def main() -> None:
    name, folder, seed = sys.argv[1:]
    paths, draw = sorted(Path(folder).glob("*.mp4")), random.Random(int(seed))
    try:
        clip = DECODERS[name]()
        made = clip(paths[0], draw)
        assert tuple(made.shape) == (round(LENGTH_S * FPS), 3, SIDE, SIDE), made.shape
        print("ready", flush=True)
    except (ImportError, RuntimeError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return
    for line in sys.stdin:
        for _ in range(int(line)):
            clip(draw.choice(paths), draw)
        print(int(line), flush=True)


if __name__ == "__main__":
    main()
