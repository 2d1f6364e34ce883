"""The promise with videos and sounds: clips as fan-outs, cut at every step, with other workers, ranks and dead ones."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.media.video import Video
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import assert_exact_resume
from tests.support.draws import scaled_examples
from tests.support.processes import workers
from tests.support.streams import through_a_file
from tests.support.toy_clips import ClipsEncoder, clips_of, clips_pipeline, write_media_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_media_shards(tmp_path_factory.mktemp("media"), [12, 3, 9]))


@pytest.mark.parametrize(
    "how",
    [
        {"pack": True},
        {"pack": False, "positions": "stride", "buffered": None, "samples": 1},
        {"pack": False, "align": "keyframe", "epochs": 1},
    ],
)
def test_every_interruption_and_chain_of_resumes_over_clips_is_exact(folder: str, how: dict[str, Any]) -> None:
    pipeline = partial(clips_pipeline, folder, **how)
    assert assert_exact_resume(pipeline, seed=5, lanes=2, steps=5, world_sizes=(1, 2), chains=1, after=1) > 5


def test_clips_with_other_workers_and_a_killed_one_are_exact(folder: str) -> None:
    pipeline = partial(clips_pipeline, folder)
    with sp.SavableLoader(pipeline, seed=5, lanes=4) as loader:
        expected = [digest(next(loader)) for _ in range(10)]
    state, found = None, []
    for num_workers in (2, 1):
        with sp.SavableLoader(pipeline, seed=5, lanes=4, num_workers=num_workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += [digest(next(loader)) for _ in range(2)]
            os.kill(workers(loader)[0], signal.SIGKILL)
            found += [digest(next(loader)) for _ in range(3)]
            state = through_a_file(loader.state_dict())
    assert found == expected


def test_epoch_has_each_clip_once_and_counts_the_damaged_video(folder: str) -> None:
    stage = clips_pipeline(folder, sp.Lane(seed=3), positions="stride", epochs=1)
    found = sorted(clip for batch in stage for clip in clips_of(batch))
    starts: dict[int, list[float]] = {}
    for number, start, frames in found:
        starts.setdefault(number, []).append(start)
        if number % 7 != 6 and frames:
            assert frames == [int(12 * (start + n / 6) + 1e-2) for n in range(3)]
    strides = {0: 6, 1: 3, 2: 3, 3: 4}  # of 2.5, 1.67, 1.5 and 2 s; the last kind is cut short
    for number in range(24):
        if number % 11 == 10 or number % 5 == 4:
            continue
        expected = 1 if number % 7 == 6 else strides[number % 5]
        assert len(starts[number]) == expected, number
    encode: Any = stage
    while not isinstance(encode, sp.Encode):
        encode = encode.source
    assert encode.counts["skipped/MediaError"] == 4
    assert encode.counts["skipped/every eleventh"] == 2


def test_resume_within_a_sample_decodes_the_remaining_clips(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[str, float]] = []
    frames = Video.frames

    def noted(self: Video, times_s: Any, **how: Any) -> Any:
        decoded.append((self.name, times_s[0]))
        return frames(self, times_s, **how)

    monkeypatch.setattr(Video, "frames", noted)
    pipeline = partial(clips_pipeline, folder, buffered=None, pack=False, size=1)
    with sp.SavableLoader(pipeline, seed=2, lanes=1) as loader:
        states = [loader.state_dict()]
        for _ in range(12):
            next(loader)
            states.append(through_a_file(loader.state_dict()))
    begun = 0
    for state in states:
        decoded.clear()
        with sp.SavableLoader(pipeline, seed=2, lanes=1) as loader:
            loader.load_state_dict(state)
            (item,) = next(loader)["items"]
            (sample,) = loader.trace().samples
        if item["clip"].frames is not None:
            assert [time for name, time in decoded if sample.key in name] == [item["start"]]
            begun += sample.ref.part > 0
    assert begun > 3


class Blocked(ClipsEncoder):
    """A file that does not answer any more, once it is half read."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        if sample.key != "s0003":
            return sample.key
        file = sample.open("mp4")
        return self.clips.one(Video(_Blocking(file), "s0003"), rng)


class _Blocking:
    """Reads the header, and then for a minute."""

    def __init__(self, file: Any) -> None:
        self.seek, self.tell, self._file, self._reads = file.seek, file.tell, file, 0

    def read(self, size: int) -> Any:
        self._reads += 1
        if self._reads > 1:
            time.sleep(60)
        return self._file.read(size)


def test_hung_decoder_is_reported_with_shard_and_key_after_the_timeout(folder: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        reader = sp.TarShardReader(folder, lane, shuffle=False)
        return sp.Batcher(sp.Encode(reader, Blocked(count=1)), size=2)

    with sp.SavableLoader(
        pipeline, seed=0, lanes=1, num_workers=1, workers=sp.Workers(prefetch=1, timeout=0.5)
    ) as loader:
        assert next(loader)["items"] == ["s0000", "s0001"]
        told = r"gave no batch in 0\.5 s and was killed.*in Encode, .*0\.tar.*'s0003'"
        with pytest.raises(sp.WorkerError, match=told) as caught:
            next(loader)
    assert re.search(r"line \d+ in read\n", str(caught.value))


pipelines = st.fixed_dictionaries(
    {
        "positions": st.sampled_from(["count", "stride"]),
        "align": st.sampled_from(["exact", "keyframe"]),
        "samples": st.sampled_from([1, 3, 20]),
        "buffered": st.sampled_from([None, 1, 6, 40]),
        "max_buffer_bytes": st.sampled_from([0, 10_000, 1 << 30]),
        "pack": st.booleans(),
        "size": st.integers(1, 3),
        "epochs": st.sampled_from([None, 1, 2]),
    }
)


@pytest.mark.landing
@scaled_examples(4, shrink=False)
@given(chosen=pipelines, seed=st.integers(0, 2**63), sizes=st.lists(st.integers(4, 20), min_size=1, max_size=3))
def test_random_pipelines_over_clips_are_exact(
    chosen: dict[str, Any], seed: int, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_media_shards(tmp_path_factory.mktemp("media"), sizes)
    pipeline = partial(clips_pipeline, str(folder), **chosen)
    assert_exact_resume(
        pipeline, seed=seed, lanes=4, steps=12, workers=(0, 1, 2), world_sizes=(1, 2), chains=2, after=2
    )
