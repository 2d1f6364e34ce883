"""The encoders of chains: what functions may give, what a saved state says of them, and the clips of films."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.stages.mapped_function import MappedFunction
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import MakeShards
from tests.support.media_files import video_bytes
from tests.support.shards import write_tar
from tests.support.toy_stores import number_of


def scaled(sample: sp.Sample, rng: sp.Rng, *, by: int = 2) -> dict[str, Any]:
    return {"n": number_of(sample) * by, "noise": torch.rand(2), "drawn": rng.random()}


def other(sample: sp.Sample) -> dict[str, Any]:
    return {"n": number_of(sample), "noise": torch.zeros(2), "drawn": 0.0}


def parts(sample: sp.Sample) -> Iterator[int]:
    for part in range(number_of(sample) % 4):
        yield 10 * number_of(sample) + part


def test_mapped_function_may_return_a_dict_a_generator_or_a_skip(make_shards: MakeShards) -> None:
    def even(sample: sp.Sample) -> Any:
        return sp.Skip("odd") if number_of(sample) % 2 else number_of(sample)

    read = sp.read(str(make_shards([6])), shuffle=False)
    assert list(read.map(parts)) == [10, 20, 21, 30, 31, 32, 50]
    assert list(read.map(even)) == [0, 2, 4]
    batch = read.map(scaled).batch(4).take(1)[0]
    assert batch["n"].tolist() == [0, 2, 4, 6] and batch["noise"].shape == (4, 2)


@pytest.mark.parametrize("function", [parts, partial(scaled, by=3)])
def test_mapped_function_resumes_exactly_with_its_random_numbers(make_shards: MakeShards, function: Any) -> None:
    chain = sp.read(str(make_shards([40, 9]))).shuffle(6).map(function).batch(3)
    assert assert_exact_resume(chain, lanes=4, steps=10, chains=1, after=2) > 10


def test_a_state_of_another_function_or_other_bound_arguments_is_rejected(make_shards: MakeShards) -> None:
    read = sp.read(str(make_shards([40])))

    def loader(function: Any) -> sp.SavableLoader:
        return sp.SavableLoader(read.map(function).batch(2), seed=0, lanes=2)

    state = loader(partial(scaled, by=3)).state_dict()
    loader(partial(scaled, by=3)).load_state_dict(state)
    for function, named in [(partial(scaled, by=4), r"function\.by"), (other, r"encoder\.function"), (scaled, "by")]:
        with pytest.raises(sp.CheckpointMismatchError, match=named):
            loader(function).load_state_dict(state)


def test_lambda_is_not_compared_and_the_loader_warns(make_shards: MakeShards, caplog: pytest.LogCaptureFixture) -> None:
    read = sp.read(str(make_shards([40])))
    one = sp.SavableLoader(read.map(lambda sample: number_of(sample)).batch(2), seed=0, lanes=2)
    two = sp.SavableLoader(read.map(lambda sample: -number_of(sample)).batch(2), seed=0, lanes=2)
    two.load_state_dict(one.state_dict())
    assert caplog.text.count("Lambdas are not compared on resume") == 2
    assert next(two).max() <= 0


@pytest.mark.parametrize("where", ["map", "filter"])
def test_a_lambda_cannot_go_to_spawned_workers_and_the_error_says_what_to_do(
    make_shards: MakeShards, where: str
) -> None:
    read = sp.read(str(make_shards([4])))
    chain = read.map(lambda sample: 1) if where == "map" else read.filter(lambda sample: True).map(number_of)
    with pytest.raises(ValueError, match=r"Define a function with def at the top of a module"):
        sp.SavableLoader(chain.batch(1), seed=0, num_workers=1, workers=sp.Workers(start_method="spawn"))


class Large(sp.Decoded):
    def __init__(self) -> None:
        self.table = bytes(65 << 20)


def test_a_large_encoder_sent_to_spawned_workers_is_a_warning_with_the_fix(
    make_shards: MakeShards, caplog: pytest.LogCaptureFixture
) -> None:
    read = sp.read(str(make_shards([4])))
    settings: Any = {"seed": 0, "lanes": 2, "num_workers": 1, "workers": sp.Workers(start_method="spawn")}
    sp.SavableLoader(read.encode(Large()).batch(1), **settings).close()
    assert "68.2 MB" in caplog.text and ".encode(make)" in caplog.text
    caplog.clear()
    sp.SavableLoader(read.encode(made).batch(1), **settings).close()
    assert ".encode(make)" not in caplog.text


def made() -> sp.TaskEncoder:
    return Large()


@pytest.fixture
def films(tmp_path: Path) -> sp.Pipeline:
    film = video_bytes(24, fps=12, size=(32, 24), gop=6, audio="aac")
    write_tar(tmp_path / "films/0.tar", [(f"film{number}.mp4", film) for number in range(6)])
    return sp.read(str(tmp_path / "films"), shuffle=False)


def test_video_yields_an_item_for_each_of_its_clips(films: sp.SamplePipeline) -> None:
    clips = sp.Clips(length_s=0.5, fps=6, stride_s=0.5)
    own = films.clips(clips, audio=True).take(4)
    [sample] = films.take(1)
    frames = [clip.frames for clip in clips.of(sample.video(), sp.Rng(0))]
    assert [item["start_s"] for item in own] == [0.0, 0.5, 1.0, 1.5]
    assert all(np.array_equal(item["frames"], expected) for item, expected in zip(own, frames, strict=True))
    assert own[0]["audio"].shape == (1, round(0.5 * sample.audio().rate))
    batch = films.clips(clips).batch(4).take(1)[0]
    assert batch["frames"].shape == (4, 3, 3, 24, 32) and "audio" not in batch
    with pytest.raises(ValueError, match="needs video= or audio="):
        films.clips(clips, video=False)


def test_random_clips_resume_exactly_in_the_middle_of_a_video(films: sp.SamplePipeline) -> None:
    chain = films.clips(sp.Clips(length_s=0.5, fps=6, count=3)).batch(2)
    assert assert_exact_resume(chain, lanes=2, steps=6, chains=1, after=1) > 6


def mapped(shards: Path, function: Any, **settings: Any) -> sp.Encode:
    samples = sp.TarShardReader(shards, sp.Lane(), shuffle=False, epochs=1)
    return sp.Encode(samples, MappedFunction(".map", function), **settings)


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_flaky_error_in_a_series_is_handled_once_and_no_sample_is_called_again(
    make_shards: MakeShards, on_error: Any
) -> None:
    """Sample 40 fails at its first call only."""
    called: list[int] = []

    def flaky(sample: sp.Sample) -> int:
        called.append(number_of(sample))
        if called[-1] == 40 and called.count(40) == 1:
            raise ValueError("the first time")
        return called[-1]

    stage = mapped(make_shards([90]), flaky, on_error=on_error)
    assert len(stage.take(32)) == 32  # with it, the type of items is known, and samples are mapped as series
    called.clear()
    if on_error == "skip":
        items = [element.value for _ in range(3) for element in stage.take(32)]
        assert stage.counts["skipped/ValueError"] == 1
        assert items == [*range(32, 40), *range(41, 90)] and called == [*range(32, 90)]
    else:
        with pytest.raises(sp.EncodeError, match=r"flaky failed on sample .*: ValueError: the first time"):
            stage.take(32)
        assert called == [*range(32, 41)]
        assert [element.value for _ in range(3) for element in stage.take(32)] == [*range(32, 90)]


def test_a_stage_with_an_error_in_a_series_is_freed_at_once(make_shards: MakeShards) -> None:
    def failing(sample: sp.Sample) -> int:
        return 1 // abs(number_of(sample) - 40)

    stage = mapped(make_shards([90]), failing, on_error="skip")
    assert sum(len(stage.take(32)) for _ in range(4)) == 89
    freed = weakref.ref(stage)
    gc.disable()
    try:
        del stage
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("special", [sp.Skip("odd"), None, "text"])
def test_a_result_of_another_type_in_a_series_is_used_without_another_call(
    make_shards: MakeShards, special: Any
) -> None:
    called: list[int] = []

    def mostly_numbers(sample: sp.Sample) -> Any:
        called.append(number_of(sample))
        return special if called[-1] in (40, 45) else called[-1]

    stage = mapped(make_shards([64]), mostly_numbers, on_error="skip")
    taken = [element.value for element in stage.take(32)]
    called.clear()
    taken += [element.value for _ in range(3) for element in stage.take(32)]
    expected = [special if number in (40, 45) and special == "text" else number for number in range(64)]
    assert taken == [number for number in expected if special == "text" or number not in (40, 45)]
    again = range(41, 64) if special is None else ()  # None is an error, after which samples are encoded one by one
    assert called == [*range(32, 64), *again]


def test_an_iterator_in_a_series_keeps_the_results_before_it(make_shards: MakeShards) -> None:
    called: list[int] = []

    def sometimes_two(sample: sp.Sample) -> Any:
        number = number_of(sample)
        called.append(number)
        return iter([number, -number]) if number == 40 else number

    stage = mapped(make_shards([64]), sometimes_two)
    assert [element.value for element in stage.take(32)] == [*range(32)]
    called.clear()
    assert [element.value for _ in range(3) for element in stage.take(32)] == [*range(32, 41), -40, *range(41, 64)]
    assert called == [*range(32, 64), *range(41, 64)], "those after the iterator again"
