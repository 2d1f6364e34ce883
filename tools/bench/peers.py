"""The other loaders, decoders and writers, each in its fastest form, with the same data and functions as ours.

    webdataset, StatefulDataLoader   tars, read sequentially
    torch's DataLoader               records in memory (faster than any read of tars), or tars at known offsets
    HF datasets, LitData             Parquet, streamed; LitData's own chunks
    Grain, spdl                      tars at known offsets: processes, and threads of this process
    Megatron-Energon                 tars with its metadata
    Mosaic Streaming                 MDS
    DALI                             tars of images, read sequentially, by threads of this process

Libraries are imported where they are used. A library that is not installed is skipped, and a process whose memory is
measured imports no other library. Each loader shuffles in its own way, since that costs all of them about the same.

The program runs one of them in another interpreter, or in a process whose memory or time we measure:

    python peers.py batches NAME FOLDER WORKERS RANK RANKS BATCHES METHOD    consumes batches, prints "ready", and waits
    python peers.py clips DECODER FOLDER SEED    prints "ready", reads numbers of clips from stdin, and confirms each
    python peers.py write WRITER SOURCE TARGET   converts a folder
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Decode: TypeAlias = Callable[[Mapping[str, bytes]], Any]
Collate: TypeAlias = Callable[[list[Any]], Any]
Decoder: TypeAlias = Callable[[Path, random.Random], Any]
SIDE, SCALE = 224, (0.08, 1.0)  # the side of a crop in pixels, and its fraction of the image's area
LENGTH_S, FPS = 2.0, 8  # seconds and frame rate of a clip
_ENDLESS = 1 << 40  # samples, more than are ever consumed


def decode_json(sample: Mapping[str, bytes]) -> Any:
    """Decode the JSON of a sample."""
    return json.loads(sample["json"])


def by_pillow(sample: Mapping[str, bytes]) -> Any:
    """Decode a JPEG with Pillow."""
    from PIL import Image

    return Image.open(io.BytesIO(sample["jpg"])).convert("RGB")


def by_torchvision(sample: Mapping[str, bytes]) -> Any:
    """Decode a JPEG with torchvision: uint8 (3, height, width)."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8), ImageReadMode.RGB)


def whole_by_pillow(sample: Mapping[str, bytes]) -> Any:
    """Decode a JPEG with Pillow: uint8 (3, height, width)."""
    from torchvision.transforms.v2 import functional

    return functional.pil_to_tensor(by_pillow(sample))


def crop_by_pillow(sample: Mapping[str, bytes]) -> Any:
    """Decode a JPEG with Pillow, and make a random crop: uint8 (3, 224, 224)."""
    from torchvision.transforms.v2 import functional

    return functional.pil_to_tensor(_crop()(by_pillow(sample)))


def crop_by_torchvision(sample: Mapping[str, bytes]) -> Any:
    """Decode a JPEG with torchvision, and make a random crop: uint8 (3, 224, 224)."""
    return _crop()(by_torchvision(sample))


@functools.cache
def _crop() -> Any:
    """Return the transform that crops and flips at random."""
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(SIDE, SCALE, antialias=True), v2.RandomHorizontalFlip()])


def unchanged(batch: Any) -> Any:
    """Return a batch unchanged."""
    return batch


def chunks(samples: Iterable[Any], size: int = 256) -> Iterator[list[Any]]:
    """Group samples to lists of `size`."""
    remaining = iter(samples)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk


def web_dataset(
    folder: Path, decode: Decode, collate: Collate, *, size: int, buffer: int = 0, rank: int = 0, ranks: int = 1,
    stateful: bool = False, **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """Yield batches of a webdataset pipeline. `options` are those of torch's DataLoader.

    If `stateful`, it runs in torchdata's StatefulDataLoader.
    """
    import webdataset as wds
    from torch.utils.data import DataLoader

    shards = sorted(str(path) for path in folder.glob("*.tar"))[rank::ranks]
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).repeat()
    dataset = (dataset.shuffle(buffer) if buffer else dataset).map(decode).batched(size, collation_fn=collate)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return iter(StatefulDataLoader(dataset, batch_size=None, collate_fn=unchanged, **options))
    return iter(DataLoader(dataset, batch_size=None, **options) if options.get("num_workers") else dataset)


def torch_loader(samples: Any, decode: Decode, collate: Collate | None, *, size: int, **options: Any) -> Iterator[Any]:
    """Yield batches of torch's DataLoader over a list of samples, or over `Tars`."""
    from torch.utils.data import DataLoader, RandomSampler

    dataset: Any = _Decoded(samples, decode)
    order = RandomSampler(dataset, replacement=True, num_samples=_ENDLESS)
    return iter(DataLoader(dataset, size, sampler=order, collate_fn=collate, **options))


class _Decoded:
    """Dataset of `decode(sample)` for each of the samples."""

    def __init__(self, samples: Any, decode: Decode) -> None:
        self._samples = samples
        self._decode = decode

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._samples[index])


class Tars:
    """Dataset of the first part of each sample in a folder of tars, read at the offsets of its `.tar.idx` files."""

    def __init__(self, folder: Path, part: str) -> None:
        self._part = part
        self._tars = sorted(str(path) for path in folder.glob("*.tar"))
        # by tar: the byte offset of each sample
        self._starts = [np.memmap(f"{tar}.idx", "<u8", "r")[:-1] for tar in self._tars]
        self._ends = np.cumsum([len(starts) for starts in self._starts])  # number of samples up to the end of each tar
        self._open: dict[int, int] = {}  # descriptors
        self._folder = folder

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, bytes]:
        shard = int(self._ends.searchsorted(index, "right"))
        starts = self._starts[shard]
        start = int(starts[index - self._ends[shard] + len(starts)])
        if shard not in self._open:
            self._open[shard] = os.open(self._tars[shard], os.O_RDONLY)
        # a tar header has 512 bytes, with the member's size as 12 octal digits at byte 124
        size = int(os.pread(self._open[shard], 12, start + 124).rstrip(b"\0 "), 8)
        return {self._part: os.pread(self._open[shard], size, start + 512)}

    def __reduce__(self) -> Any:
        return Tars, (self._folder, self._part)


def hf_datasets(folder: Path, *, buffer: int, rank: int = 0, ranks: int = 1) -> Any:
    """Stream rows of Parquet files through a shuffle buffer with HF datasets. No column needs decoding."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    datasets.disable_progress_bars()
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return split_dataset_by_node(rows, rank, ranks).repeat(None).shuffle(seed=1, buffer_size=buffer)


def hf_batches(
    folder: Path, collate: Collate, *, size: int, buffer: int, rank: int = 0, ranks: int = 1, **options: Any
) -> Iterator[Any]:
    """Yield batches of `hf_datasets` in torch's DataLoader. `collate` gets lists of rows."""
    from torch.utils.data import DataLoader

    rows = hf_datasets(folder, buffer=buffer, rank=rank, ranks=ranks)
    return iter(DataLoader(rows, size, collate_fn=collate, **options))


def litdata(folder: Path, collate: Collate, *, size: int, **options: Any) -> Iterator[Any]:
    """Yield batches of LitData's loader. Each rank reads all chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=size, collate_fn=collate, **options)
    while True:
        yield from loader


def litdata_parquet(folder: Path) -> Iterator[Any]:
    """Yield rows of Parquet files with LitData, without a shuffle buffer."""
    from litdata import StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    index_parquet_dataset(str(folder))
    rows = StreamingDataset(str(folder), item_loader=ParquetLoader(), shuffle=True)
    return itertools.chain.from_iterable(itertools.repeat(rows))


def grain_processes(
    folder: Path, part: str, decode: Decode, collate: Collate, *, size: int, workers: int
) -> Iterator[Any]:
    """Yield batches of Grain with worker processes. Arrays travel through its shared memory."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    samples = grain.MapDataset.source(Tars(folder, part)).shuffle(seed=1).repeat().map(decode)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    batches = samples.to_iter_dataset(reading).batch(size, batch_fn=collate)
    return iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)))


def grain_parquet(folder: Path, *, buffer: int) -> Iterator[Any]:
    """Yield shuffled rows of Parquet files with Grain, endlessly, from six files at a time."""
    import grain

    reading = grain.experimental
    files = grain.MapDataset.source(sorted(map(str, folder.glob("*.parquet"))))
    rows = reading.InterleaveIterDataset(files.map(lambda path: reading.ParquetIterDataset(path)), cycle_length=6)
    shuffled = (reading.WindowShuffleIterDataset(rows, window_size=buffer, seed=n) for n in itertools.count())
    return itertools.chain.from_iterable(map(iter, shuffled))


def mosaic(folder: Path) -> Iterator[Any]:
    """Yield the samples of MDS shards with Mosaic Streaming."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    yield from StreamingDataset(local=str(folder), shuffle=True, batch_size=16)


def spdl_threads(folder: Path, part: str, decode: Decode, collate: Collate, *, size: int, threads: int) -> Any:
    """Start a pipeline of spdl whose threads each build whole batches. Stop it after use."""
    from spdl.pipeline import PipelineBuilder

    tars = Tars(folder, part)

    def order() -> Iterator[list[int]]:
        for epoch in range(_ENDLESS):
            shuffled = np.random.default_rng(epoch).permutation(len(tars)).tolist()
            yield from (shuffled[i : i + size] for i in range(0, len(tars) - size, size))

    def build_batch(indices: list[int]) -> Any:
        return collate([decode(tars[index]) for index in indices])

    builder = PipelineBuilder().add_source(order()).pipe(build_batch, concurrency=threads).add_sink(4)
    pipeline = builder.build(num_threads=threads)
    pipeline.start()
    return pipeline


def spdl_frames(filters: Callable[[Any], str]) -> tuple[Decode, Collate]:
    """Return functions that decode an image and collate a batch with spdl.

    It uses FFmpeg, so pixels differ slightly from libjpeg's. Batches are NHWC.
    """
    import spdl.io as spdl

    def decode(sample: Mapping[str, bytes]) -> Any:
        packets = spdl.demux_image(sample["jpg"])
        return spdl.decode_packets(packets, filter_desc=f"{filters(packets)}format=rgb24")

    return decode, lambda frames: spdl.to_torch(spdl.convert_frames(frames))


def dali(folder: Path, size: int, *, crop: bool, threads: int) -> Iterator[Any]:
    """Yield batches of DALI on the CPU, NHWC. It decodes only the crop, and scales it linearly with antialias."""
    import torch
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    pipe = Pipeline(batch_size=size, num_threads=threads, device_id=None, seed=1)
    with pipe:
        shards = sorted(str(path) for path in folder.glob("*.tar"))
        jpegs = fn.readers.webdataset(paths=shards, ext=["jpg"], random_shuffle=True, initial_fill=64)
        if crop:
            cut = fn.decoders.image_random_crop(jpegs, random_area=SCALE, random_aspect_ratio=[3 / 4, 4 / 3])
            sized = fn.resize(cut, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
            pipe.set_outputs(fn.flip(sized, horizontal=fn.random.coin_flip()))
        else:
            pipe.set_outputs(fn.decoders.image(jpegs))
    pipe.build()
    while True:
        yield torch.utils.dlpack.from_dlpack(pipe.run()[0].as_tensor())


def energon(
    folder: Path, collate: Collate = list, *, size: int, buffer: int, workers: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Any]:
    """Yield batches of Energon, which also decodes the JSON."""
    from megatron import energon as library

    @library.stateless  # type: ignore[untyped-decorator]
    def cook(sample: Any) -> Any:
        return library.TextSample(**library.basic_sample_keys(sample), text=sample["json"])

    class Encoder(library.DefaultTaskEncoder):  # type: ignore[misc]
        cookers = [library.Cooker(cook)]  # noqa: RUF012

        @library.stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @library.stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Any]) -> Any:
            return collate(samples)

    logging.disable(logging.WARNING)
    config = library.WorkerConfig(rank=rank, world_size=ranks, num_workers=workers)
    dataset = library.get_train_dataset(
        folder, worker_config=config, batch_size=size, shuffle_buffer_size=buffer, max_samples_per_sequence=100,
        task_encoder=Encoder(),
    )  # fmt: skip
    return iter(library.get_savable_loader(dataset))


# The loaders below are those whose memory is compared. They yield batches of 256 records of JSON of 1 kB, with a
# shuffle buffer in each process that reads.

BATCH, BUFFER = 256, 1_000
COLLECT_AT = 8  # a process collects garbage with this batch, as happens sooner or later in a long run
_batch_numbers = itertools.count(1)  # numbers of the batches of this process


def collecting(batch: Any) -> Any:
    """Return a batch unchanged, as a collate function. Collects the worker's garbage once."""
    if next(_batch_numbers) == COLLECT_AT:
        gc.collect()
    return batch


def _torch(folder: Path, collate: Collate, *, size: int, buffer: int, rank: int, ranks: int, **options: Any) -> Any:
    return torch_loader(Tars(folder, "json"), decode_json, collate, size=size, **options)


def _web_dataset(folder: Path, collate: Collate, **settings: Any) -> Iterator[Any]:
    return web_dataset(folder, decode_json, collate, **settings)


def _energon(folder: Path, collate: Collate, **settings: Any) -> Iterator[Any]:
    settings = {name: value for name, value in settings.items() if name != "multiprocessing_context"}
    return energon(folder, collate, workers=settings.pop("num_workers"), **settings)


def _litdata(folder: Path, collate: Collate, *, buffer: int, rank: int, ranks: int, **settings: Any) -> Any:
    return litdata(folder, collate, **settings)


# the data set that each loader reads, and a function that yields its batches
LOADERS: dict[str, tuple[str, Callable[..., Iterator[Any]]]] = {
    "torch DataLoader": ("few-json", _torch),
    "webdataset": ("few-json", _web_dataset),
    "Energon": ("few-json", _energon),
    "HF datasets": ("few-parquet", hf_batches),
    "LitData": ("few-litdata", _litdata),
}


def batches(name: str, folder: str, *numbers: str) -> None:
    """Consume batches of one loader, print "ready", keep the last batch, and wait until stdin closes.

    Args:
        name: A key of `LOADERS` or of `ours.RUNS`.
        folder: The folder of its data.
        numbers: Workers, rank, ranks, number of batches, and start method.
    """
    import torch  # noqa: F401  every trainer has it

    *counts, method = numbers
    workers, rank, ranks, count = map(int, counts)
    if name in LOADERS:
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": method if workers else None}
        options |= {"size": BATCH, "buffer": BUFFER, "rank": rank, "ranks": ranks}
        _, open_batches = LOADERS[name]
        loader = open_batches(Path(folder), collecting, **options)
    else:
        import ours

        loader = ours.RUNS[name](Path(folder), workers, rank, ranks, method)
    for _ in range(count):
        last = next(loader)
    gc.collect()
    print("ready", flush=True)
    sys.stdin.read()
    del last
    os._exit(0)


# The decoders below return clips of 2 s with 8 frames per second of random videos at random times: uint8 (16, 3, 224,
# 224).

_read = functools.cache(Path.read_bytes)  # some decoders read from memory


def _times(duration_s: float, rng: random.Random) -> list[float]:
    """Draw the times of a clip's frames, in seconds."""
    start = rng.random() * (duration_s - LENGTH_S)
    return [start + n / FPS for n in range(round(LENGTH_S * FPS))]


def pyav(interpolation: str) -> Decoder:
    """Return a decoder by PyAV as in its documentation: seek, decode, and convert the frames that are needed."""
    import av

    def clip(path: Path, rng: random.Random) -> Any:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            assert stream.duration is not None and stream.time_base is not None
            times = _times(float(stream.duration * stream.time_base), rng)
            container.seek(int(times[0] / stream.time_base), stream=stream)
            frames: list[Any] = []
            last: Any = None  # the last frame that starts at or before the next time
            for frame in container.decode(stream):
                while len(frames) < len(times) and last is not None and frame.time > times[len(frames)]:
                    frames.append(_pixels(last, interpolation))
                if len(frames) == len(times):
                    break
                last = frame
            while len(frames) < len(times):
                frames.append(_pixels(last, interpolation))
        return np.ascontiguousarray(np.stack(frames).transpose(0, 3, 1, 2))

    return clip


def _pixels(frame: Any, interpolation: str) -> Any:
    """Resize a frame: uint8 (224, 224, 3)."""
    return frame.reformat(width=SIDE, height=SIDE, format="rgb24", interpolation=interpolation).to_ndarray()


def energon_clips() -> Decoder:
    """Return a decoder by Energon's AVDecoder, with one range per frame, which is faster than one for all frames."""
    from megatron.energon.av.av_decoder import AVDecoder

    warnings.simplefilter("ignore")

    def clip(path: Path, rng: random.Random) -> Any:
        decoder = AVDecoder(io.BytesIO(_read(path)))
        times = _times(decoder.get_metadata().video_duration, rng)
        frames, _ = decoder.get_video_clips([(time, time) for time in times], "seconds", (SIDE, SIDE))
        import torch

        return torch.cat(frames).contiguous()

    return clip


def torchcodec() -> Decoder:
    """Return a decoder by torchcodec, which resizes as it decodes."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    resize = Resize((SIDE, SIDE))

    def clip(path: Path, rng: random.Random) -> Any:
        decoder = VideoDecoder(_read(path), transforms=[resize], num_ffmpeg_threads=1)
        return decoder.get_frames_played_at(_times(decoder.metadata.duration_seconds, rng)).data.contiguous()

    return clip


DECODERS: dict[str, Callable[[], Decoder]] = {
    "PyAV": lambda: pyav("BILINEAR"),
    "PyAV, bicubic": lambda: pyav("BICUBIC"),
    "Energon": energon_clips,
    "torchcodec": torchcodec,
}


def clips(name: str, folder: str, seed: str) -> None:
    """Decode as many clips as each line of stdin says, and print that number."""
    paths, rng = sorted(Path(folder).glob("*.mp4")), random.Random(int(seed))
    try:
        clip = DECODERS[name]()
        frames = clip(paths[0], rng)
        assert tuple(frames.shape) == (round(LENGTH_S * FPS), 3, SIDE, SIDE), frames.shape
        print("ready", flush=True)
    except (ImportError, RuntimeError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return
    for line in sys.stdin:
        for _ in range(int(line)):
            clip(rng.choice(paths), rng)
        print(int(line), flush=True)


def pairs(folder: Path) -> Iterator[tuple[str, bytes, str]]:
    """Yield (key, image, caption) of each image and the caption beside it."""
    for path in sorted(folder.glob("*.jpg")):
        yield path.stem, path.read_bytes(), path.with_suffix(".txt").read_text()


def write_webdataset(source: Path, target: Path) -> None:
    """Write with webdataset's ShardWriter."""
    import webdataset

    target.mkdir()
    with webdataset.ShardWriter(str(target / "%06d.tar"), maxsize=1e9, verbose=0) as writer:
        for key, image, caption in pairs(source):
            writer.write({"__key__": key, "jpg": image, "txt": caption})


def _litdata_sample(path: str) -> dict[str, object]:
    return {"jpg": Path(path).read_bytes(), "txt": Path(path).with_suffix(".txt").read_text()}


def write_litdata(source: Path, target: Path) -> None:
    """Write with LitData's optimize."""
    from litdata import optimize

    files = [str(path) for path in sorted(source.glob("*.jpg"))]
    optimize(fn=_litdata_sample, inputs=files, output_dir=str(target), num_workers=1, chunk_bytes="64MB")


def write_mds(source: Path, target: Path) -> None:
    """Write with Mosaic's MDSWriter."""
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns={"key": "str", "jpg": "bytes", "txt": "str"}) as writer:
        for key, image, caption in pairs(source):
            writer.write({"key": key, "jpg": image, "txt": caption})


def write_hf(source: Path, target: Path) -> None:
    """Write with HF datasets' save_to_disk."""
    import datasets

    def rows() -> Iterator[dict[str, object]]:
        for key, image, caption in pairs(source):
            yield {"key": key, "image": image, "txt": caption}

    dataset = datasets.Dataset.from_generator(rows, cache_dir=str(target.with_name(target.name + ".cache")))
    dataset.save_to_disk(str(target))


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "webdataset": write_webdataset, "litdata": write_litdata, "mds": write_mds, "hf": write_hf,
}  # fmt: skip


def main(program: str, *arguments: str) -> None:
    """Run one of the programs of the module's docstring."""
    if program == "write":
        WRITERS[arguments[0]](Path(arguments[1]), Path(arguments[2]))
    else:
        programs: dict[str, Callable[..., None]] = {"batches": batches, "clips": clips}
        programs[program](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
