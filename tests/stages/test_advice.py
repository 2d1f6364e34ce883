"""Settings are checked where they are written, and a wrong name or option says what to write."""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from tests.support.shards import write_tar


def number(sample: sp.Sample) -> Any:
    return sample.json()["id"]


def samples() -> Any:
    return sp.read("no/such/folder")  # which a check of settings does not open


def items() -> Any:
    return samples().map(number)


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: samples().shuffle(0), ValueError, "ShuffleBuffer: size must be at least 1, not 0"),
    (lambda: items().shuffle("9"), TypeError, "ShuffleBuffer: size must be an int, not '9'"),
    (lambda: samples().batch("4"), TypeError, "Batcher: size must be an int, not '4'"),
    (lambda: items().batch(0), ValueError, "Batcher: size must be at least 1, not 0"),
    (lambda: items().pack(0), ValueError, "max_length must be at least 1, not 0"),
    (lambda: items().pack(8, policy="bestfit"), ValueError, r"policy must be one of .*\. Did you mean best_fit\?"),
    (lambda: items().pack(8, too_long="drop"), ValueError, "too_long must be one of skip, truncate, split"),
    (lambda: items().balance(0, cost=max), ValueError, "candidates must be at least 1, not 0"),
    (lambda: items().balance(4, cost=3), ValueError, "cost must be a function"),
    (lambda: items().bucket((8, 4), size=2), ValueError, "bounds must be positive lengths in ascending order"),
    (lambda: items().bucket((4, 8), size=0), ValueError, "size must be at least 1, not 0"),
    (lambda: samples().map(number, on_error="drop"), ValueError, "on_error='drop'. Pass 'raise', 'skip' or a function"),
    (lambda: samples().map(number, max_errors=1.5), ValueError, "max_errors must be"),
    (lambda: samples().map(number, check=2.0), ValueError, "check must be a fraction"),
    (
        lambda: samples().filter(number, on_error="drop"),
        ValueError,
        "on_error='drop'. Pass 'raise', 'skip' or a function",
    ),
    (lambda: samples().shuffle(True), TypeError, "size must be an int, not True"),
    (lambda: samples().map(number).batch(True), TypeError, "size must be an int, not True"),
    (lambda: sp.read("x", split=3), TypeError, "split must be a str, not 3"),
    (lambda: sp.read("x", epochs=0), ValueError, "epochs must be above 0"),
    (lambda: sp.read("x", block_size=0), ValueError, "block_size must be at least 1, not 0"),
    (lambda: sp.mixture("x", stride=0), ValueError, "stride must be at least 1, not 0"),
    (lambda: sp.blend({"a": samples()}, weights={"b": 1}), ValueError, "no source for 'b'. The sources are a"),
    (lambda: sp.blend({"a": samples(), "b": samples()}, weights={"a": 1}), ValueError, "but b has none"),
    (lambda: sp.blend({"a": samples()}, weights={"a": "x"}), ValueError, "the weight of 'a' must be a number"),
    (lambda: sp.blend({"a": samples()}, weights={"a": 1}, by="token"), ValueError, r"Did you mean tokens\?"),
    (lambda: sp.join(samples(), {}), ValueError, "stores is empty"),
    (lambda: sp.join(samples(), {"a": "x"}, missing="empy"), ValueError, r"Did you mean empty\?"),
]


@pytest.mark.parametrize(("write", "error", "message"), WRONG, ids=lambda value: value if type(value) is str else "")
def test_a_wrong_setting_is_an_error_at_its_line(
    write: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write()


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda: samples().shuffel(5), AttributeError, r"has no attribute 'shuffel'\. Did you mean \.shuffle\?"),
        (lambda: samples().decode("pil"), AttributeError, r"'decode'\. Build the item in the function of \.map"),
        (lambda: items().repeat(), AttributeError, r"'repeat'\. Pass epochs= to sp\.read"),
        (lambda: items().pakc(5), AttributeError, r"Did you mean \.pack\?"),
        (lambda: samples().batch(4).map(number), AttributeError, r"\.map does not take batches\. Put it before"),
        (lambda: sp.SavableLoder, AttributeError, r"Did you mean SavableLoader\?"),
        (lambda: sp.read("x", epcohs=2), TypeError, r"read has no option 'epcohs'\. Did you mean epochs\?"),
        (lambda: sp.read("x", batch_size=4), TypeError, r"Use \.batch\(4\)"),
    ],
)
def test_misspelled_step_or_option_is_an_error_that_suggests_the_right_one(
    write: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, r"SavableLoader has no option 'batch_size'\. Use \.batch\(4\) at the end of the pipeline"),
        ({"shuffle": True}, r"Use sp\.read\(path, shuffle=True\) and \.shuffle\(size\)"),
        ({"drop_last": True}, r"Use \.batch\(size, drop_last=True\)"),
        ({"sampler": [1]}, r"Use subset= or exclude= of sp\.read"),
        ({"collate_fn": list}, r"`batch\(self, items, rng\)`"),
        ({"prefetch_factor": 4}, r"Use workers=sp\.Workers\(prefetch=4\)"),
        ({"lane": 4}, r"Did you mean lanes\?"),
    ],
)
def test_an_option_of_another_loader_says_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sp.SavableLoader(samples().batch(4), seed=0, **options)


def test_advice_does_not_change_signatures() -> None:
    assert list(inspect.signature(sp.SavableLoader).parameters)[:3] == ["pipeline", "seed", "lanes"]
    assert "epochs" in inspect.signature(sp.read).parameters


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_traceback_of_an_error_has_the_users_frames_and_one_of_ours(tmp_path: Path, num_workers: int) -> None:
    write_tar(tmp_path / "0.tar", [("0160.json", b"{}")])
    loader = sp.SavableLoader(sp.read(tmp_path).map(number).batch(1), seed=0, lanes=1, num_workers=num_workers)
    with loader, pytest.raises(sp.EncodeError) as caught:
        next(loader)
    ours = [frame for frame in traceback.extract_tb(caught.tb) if "savable_pipeline/" in frame.filename]
    assert [frame.name for frame in ours] == ["__next__"] and "#" not in (ours[0].line or "#")
    first, details = str(caught.value).split("\n")
    assert first == (
        "number failed on sample '0160' of 0.tar: KeyError: 'id'. Return sp.Skip(...) or pass on_error=\"skip\"."
    )
    assert details.startswith("  stage Encode, byte offset 0, ref (") and len(first) <= 200


@pytest.mark.parametrize(
    "use", [lambda p: next(sp.SavableLoader(p, seed=0)), lambda p: p.take(1), lambda p: next(iter(p))]
)
def test_a_wrong_path_has_a_short_traceback(use: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(sp.ShardError, match="no such") as caught:
        use(sp.read(tmp_path / "nothing").batch(1))
    ours = [frame.name for frame in traceback.extract_tb(caught.tb) if "savable_pipeline/" in frame.filename]
    assert ours in (["__next__"], ["take", "__iter__"], ["__iter__"])


def test_error_in_a_pipeline_function_shows_its_line(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.json", b"{}")])

    def pipeline(lane: sp.Lane) -> Any:
        return sp.Batcher(sp.TarShardReader(tmp_path, lane), size=0)

    with pytest.raises(ValueError, match="size must be at least 1") as caught:
        next(sp.SavableLoader(pipeline, seed=0, lanes=1))
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names[1:3] == ["__next__", "pipeline"]
