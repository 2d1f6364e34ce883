"""`skip(n)` is n calls of next: the same states and batches, and nothing is built that decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores.cached_samples import CachedFiles
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.pipeline import upstream
from tests.support.draws import scaled_examples
from tests.support.random_stacks import Joining, stack, stacks
from tests.support.shards import write_numbered_shards
from tests.support.toy_server import serving_a_machine
from tests.support.toy_stores import number_of

CALLS = Counter[str]()
COST = sp.attention_cost(hidden=1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("skipping")
    write_numbered_shards(folder, [60, 21, 99])
    return str(folder)


class Faulty(Joining):
    """The same items, some of which are skipped, or cannot be encoded; some packs are skipped."""

    def __init__(self, gap: int, *, fans_out: bool, all_fine: bool, known: bool) -> None:
        super().__init__(gap, fans_out=fans_out and not all_fine)
        self.one_to_one, self.known = all_fine, known

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = number_of(sample)
        if not self.one_to_one and number % 11 == 0:
            return sp.Skip("eleven")
        if not self.one_to_one and number % 13 == 0:
            raise ValueError("thirteen")
        return super().encode(sample, rng)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        pack = super().pack(items, rng)
        return sp.Skip("a pack") if not self.one_to_one and pack["drawn"] % 4 == 0 else pack


class FaultyTelling(Faulty):
    """The same, with known sizes; where one is known, encoding may fail, but does not skip."""

    def length_of(self, sample: sp.Sample) -> int | None:
        number = number_of(sample)
        return None if number % 11 == 0 or (self.fans_out and number % 5 == 0) else 1 + number % 9

    def images_of(self, sample: sp.Sample) -> int:
        return number_of(sample) % 3


faults = st.fixed_dictionaries(
    {"chosen": stacks, "all_fine": st.booleans(), "before": st.integers(0, 3), "skipped": st.integers(1, 6)}
)


DECLARED = {"branches": [(20, [])], "after": [], "by": "tokens", "fans_out": True, "size": 3, "last": "batch", "gap": 0}

LOST_PACKS = {
    "branches": [(3, []), (20, [("pack", ("function", 12))])],
    "after": [("filter", None), ("pack", ("best_fit", 25)), ("swap", None), ("shuffle", 5)],
    "fans_out": False,
}


OWN_LAST = {**DECLARED, "fans_out": False, "tells": True, "candidates": None, "own": True}


@scaled_examples(200, suite=25)
@example({"chosen": OWN_LAST, "all_fine": True, "before": 1, "skipped": 2})
@example({"chosen": {**DECLARED, "tells": True, "candidates": None}, "all_fine": False, "before": 1, "skipped": 24})
@example({"chosen": {**DECLARED, "tells": True, "candidates": 8}, "all_fine": False, "before": 0, "skipped": 24})
@example(
    {
        "chosen": {**DECLARED, **LOST_PACKS, "tells": True, "candidates": None},
        "all_fine": False,
        "before": 3,
        "skipped": 9,
    }
)
@given(case=faults)
def test_any_stack_continues_after_skipped_as_after_yielded_batches(shards: str, case: dict[str, Any]) -> None:
    chosen, all_fine = case["chosen"], case["all_fine"]
    kind = FaultyTelling if chosen["tells"] else Faulty
    encoder = kind(chosen["gap"], fans_out=chosen["fans_out"], all_fine=all_fine, known=chosen["tells"])
    on_error = "raise" if all_fine else "skip"

    def fresh() -> Any:
        return stack(shards, sp.Lane(1, 2, 7), chosen, encoder=encoder, on_error=on_error)

    plain, skipping = fresh(), fresh()
    for _ in range(case["before"]):
        assert digest(next(plain)) == digest(next(skipping))
    if case["before"] % 2:  # after a restore, nothing that is buffered was met by this lane
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(skipping.save_state()))
        plain, skipping = fresh(), fresh()
        plain.restore_state(state)
        skipping.restore_state(state)
    for _ in range(case["skipped"]):
        next(plain)
        skipping.lane.skips = True
        skipping.pass_over()
        skipping.lane.skips = False
        assert skipping.ref == plain.ref
        assert msgspec.msgpack.encode(skipping.save_state()) == msgspec.msgpack.encode(plain.save_state())
    for _ in range(4):
        assert digest(next(plain)) == digest(next(skipping))


def keeps_some(sample: sp.Sample, rng: sp.Rng) -> bool:
    """A filter of samples, which cannot decide on some."""
    number = number_of(sample)
    if number % 17 == 0:
        raise ValueError("seventeen")
    return bool((number + rng.integers(3)) % 3)


def filtered(shards: str, lane: sp.Lane, *, epochs: int | None) -> Any:
    """Samples that pass the filter."""
    return Filter(sp.TarShardReader(shards, lane, epochs=epochs), keeps_some, on_error="skip")


def unfiltered(shards: str, lane: sp.Lane, *, epochs: int | None) -> Any:
    """All samples."""
    return sp.TarShardReader(shards, lane, epochs=epochs)


def build(lane: sp.Lane, *, shards: str, case: dict[str, Any]) -> Any:
    """The stages of a lane of a random run."""
    chosen, all_fine = case["chosen"], case["all_fine"]
    kind = FaultyTelling if chosen["tells"] else Faulty
    encoder = kind(chosen["gap"], fans_out=chosen["fans_out"], all_fine=all_fine, known=chosen["tells"])
    read = partial(filtered if case["filters"] else unfiltered, epochs=case["epochs"])
    return stack(shards, lane, chosen, encoder=encoder, on_error="raise" if all_fine else "skip", read=read)


runs = st.fixed_dictionaries(
    {
        "chosen": stacks,
        "all_fine": st.booleans(),
        "filters": st.booleans(),
        "epochs": st.sampled_from([None, None, 1, 2]),
        "world": st.sampled_from([1, 1, 2]),
        "skipped": st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=3),
    }
)


def check_skips(shards: str, case: dict[str, Any], **settings: Any) -> None:
    """Compare a run that skips steps with one that takes them: each byte of all others, and the states after each."""
    pipeline = partial(build, shards=shards, case=case)
    world = 1 if case["epochs"] else case["world"]  # ranks of a finite run would have to communicate
    settings |= {"seed": 7, "lanes": 4, "ranks": (world - 1, world)}
    plain, skipping = (sp.SavableLoader(pipeline, **settings) for _ in "ab")
    with plain, skipping:
        for taken, skipped in [*case["skipped"], (3, 0)]:
            for _ in range(taken):
                assert outcome(skipping) == outcome(plain)
            if not (skipped and outcome(plain)):  # after the last batch, `next` ends, and `skip` starts the next epoch
                continue
            for _ in range(skipped - 1):
                next(plain, None)
            skipping.skip(skipped * world)
            assert skipping.state_dict() == plain.state_dict()


def outcome(loader: Any) -> str:
    """A digest of the next batch; "" at the end of an epoch."""
    try:
        batch = next(loader, None)
    except sp.SavableError as error:  # so much is skipped that a lane has no batch in a finite run
        assume("too few samples" not in str(error))
        raise
    return "" if batch is None else digest(batch)


OWN_FINITE = {"chosen": OWN_LAST, "all_fine": True, "filters": False, "epochs": 1, "world": 1, "skipped": [(1, 2)]}


@scaled_examples(200, suite=15)
@example(OWN_FINITE)
@given(case=runs)
def test_skip_of_a_loader_equals_as_many_calls_of_next(shards: str, case: dict[str, Any]) -> None:
    check_skips(shards, case)


@scaled_examples(20, suite=2)
@given(case=runs)
def test_workers_skip_as_many_batches_as_they_would_build(shards: str, case: dict[str, Any]) -> None:
    check_skips(shards, case, num_workers=2)


class Counting(sp.TaskEncoder):
    """Items of one to four tokens, and the number of calls by method."""

    global_rng = False
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        CALLS["encode"] += 1
        return [sample.json()["id"]] * (1 + sample.ref.index % 4)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        CALLS["pack"] += 1
        return [token for item in items for token in item]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        CALLS["batch"] += 1
        return items


class CountingSizes(Counting):
    """The same, with known sizes."""

    def length_of(self, sample: sp.Sample) -> int:
        CALLS["length_of"] += 1
        return 1 + sample.ref.index % 4


class SkippingPacks(CountingSizes):
    """The same, of which a pack may be skipped, for all the stages know."""

    one_to_one = False


def calls_of(pipeline: Any, slots: int, **settings: Any) -> Counter[str]:
    """The calls of a loader that skips so many slots; it then continues as one that was asked for them."""
    plain, skipping = (sp.SavableLoader(pipeline, seed=7, lanes=2, **settings) for _ in range(2))
    expected = [next(plain) for _ in range(slots + 6)][slots:]
    CALLS.clear()
    skipping.skip(slots)
    calls = Counter(CALLS)
    assert [next(skipping) for _ in range(6)] == expected
    assert skipping.state_dict() == plain.state_dict()
    return calls


def batched(samples: Any, encoder: sp.TaskEncoder) -> Any:
    return samples.encode(encoder).shuffle(5).batch(4)


def packed(samples: Any, encoder: sp.TaskEncoder) -> Any:
    return samples.encode(encoder).pack(max_length=9).shuffle(3).batch(2)


def balanced(samples: Any, encoder: sp.TaskEncoder) -> Any:
    return samples.encode(encoder).pack(max_length=9).balance(candidates=4, cost=COST).batch(2)


def in_buckets(samples: Any, encoder: sp.TaskEncoder) -> Any:
    return samples.encode(encoder).bucket([2, 4], size=3)


@pytest.mark.parametrize(
    ("build", "kind"),
    [(batched, Counting), (packed, CountingSizes), (balanced, CountingSizes), (in_buckets, CountingSizes)],
)
@pytest.mark.parametrize("epochs", [None, 1])
def test_skipping_encodes_and_reads_nothing_that_cannot_be_dropped(
    shards: str,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[..., Any],
    kind: type[sp.TaskEncoder],
    epochs: int | None,
) -> None:
    pipeline = build(sp.read(shards, epochs=epochs).shuffle(10), kind())
    skipping = sp.SavableLoader(pipeline, seed=7, lanes=2)
    with monkeypatch.context() as patched:
        patched.setattr(sp.Sample, "__getitem__", lambda sample, part: pytest.fail(f"{part} was read"))
        skipping.skip(6)
    assert set(calls_of(pipeline, 6)) <= {"length_of"}


def test_a_join_is_skipped_by_its_keys(shards: str) -> None:
    samples = sp.join(sp.read(shards, shuffle=False), {"other": f"{shards}/0000.tar"})
    assert not calls_of(batched(samples, Counting()), 6)


def test_restored_lane_checks_buffered_samples_against_another_join(shards: str) -> None:
    """What the first loader has in its buffer after `encode` may be lost by the join that is added."""
    plain = batched(sp.read(shards), Counting())
    joined = batched(sp.join(sp.read(shards), {"other": f"{shards}/0002.tar"}), Counting())
    first = sp.SavableLoader(plain, seed=7, lanes=2)
    next(first)
    after = []
    for skips in (False, True):
        loader = sp.SavableLoader(joined, seed=7, lanes=2)
        loader.load_state_dict(first.state_dict(), allow={"joins"})
        if skips:
            loader.skip(4)
        else:
            for _ in range(4):
                next(loader)
        after.append([*(next(loader) for _ in range(6)), loader.state_dict()])
    assert after[0] == after[1]


def test_skipped_packs_build_only_the_items_whose_lengths_are_needed(shards: str) -> None:
    pipeline = packed(sp.read(shards).shuffle(10), SkippingPacks())
    calls = calls_of(pipeline, 6)
    assert calls["pack"] and not calls["batch"]


def test_skipped_items_are_built_only_for_their_length(shards: str) -> None:
    pipeline = packed(sp.read(shards).shuffle(10), Counting())
    calls = calls_of(pipeline, 6)
    assert calls["encode"] and not calls["pack"] and not calls["batch"]


def test_pack_skipped_by_an_encoder_that_may_not_skip_is_an_error(shards: str) -> None:
    class Skips(Counting):
        def pack(self, items: list[Any], rng: sp.Rng) -> Any:
            return sp.Skip("never")

    stage = packed(sp.read(shards), Skips())(sp.Lane(seed=7))
    with pytest.raises(sp.EncodeError, match="one_to_one is set, but it returned Skip"):
        next(stage)


def test_users_stage_is_skipped_by_its_own_code(shards: str) -> None:
    class Pairs(custom.ItemStage):
        ref: Any = ()

        def __next__(self) -> Any:
            pair = [(item, self.source.ref) for _, item in zip(range(2), self.source, strict=False)]
            self.ref = tuple(ref for _, ref in pair)
            return [item for item, _ in pair]

        def fetch(self, ref: Any) -> Any:
            return [self.source.fetch(each) for each in ref]

    pipeline = sp.read(shards).encode(Counting()).then(Pairs).shuffle(4).batch(2)
    assert any(isinstance(stage, Pairs) for stage in upstream(pipeline(sp.Lane())))
    assert calls_of(pipeline, 6)["encode"]


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The rows of tars that are requested in advance, whenever they are then downloaded."""
    found = Counter[str]()
    for name in ("request", "prefetch"):
        requests = getattr(CachedFiles, name)

        def noted(store: Any, rows: Any, name: str = name, requests: Any = requests) -> None:
            found[name] += len(rows)
            requests(store, rows)

        monkeypatch.setattr(CachedFiles, name, noted)
    return found


@pytest.mark.parametrize("build", [batched, packed, balanced, in_buckets])
def test_skipping_requests_no_data_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: Counter[str], build: Callable[..., Any]
) -> None:
    with serving_a_machine(tmp_path, monkeypatch) as server:
        bucket = tmp_path / "www" / "bucket"
        write_numbered_shards(bucket, [60, 21, 99])
        assert len(sp.open_dataset(str(bucket))) == 180  # which indexes it
        kind = Counting if build is batched else CountingSizes
        pipeline = build(sp.read("s3://bucket/").shuffle(10), kind())
        expected = sp.SavableLoader(build(sp.read(str(bucket)).shuffle(10), kind()), seed=7, lanes=2)
        with sp.SavableLoader(pipeline, seed=7, lanes=2) as loader:
            loader.skip(16)
            assert not requested.total() and not server.sent(".tar")
            expected.skip(16)
            assert next(loader) == next(expected)
            assert server.sent(".tar") and (build is in_buckets or requested["request"])


def test_a_join_of_a_bucket_is_skipped_by_its_index_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: Counter[str]
) -> None:
    with serving_a_machine(tmp_path, monkeypatch):
        bucket = tmp_path / "www" / "bucket"
        write_numbered_shards(bucket, [60, 21])
        sp.open_dataset(str(bucket))
        samples = sp.join(sp.read("s3://bucket/", shuffle=False), {"other": "s3://bucket/0000.tar"})
        with sp.SavableLoader(batched(samples, Counting()), seed=7, lanes=2) as loader:
            loader.skip(16)
            assert not requested.total()
            next(loader)
            assert requested["request"]


class Ids(sp.TaskEncoder):
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return number_of(sample)

    def length(self, item: int) -> int:
        return 1

    def length_of(self, sample: sp.Sample) -> int:
        return 1

    def batch(self, items: list[int], rng: sp.Rng) -> Any:
        return items


@pytest.mark.parametrize("epochs", [1, None])  # a finite lane builds one batch more than is asked for
@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("batcher", [sp.Batcher, partial(custom.BucketBatcher, bounds=[9])])
def test_users_last_stage_gets_built_batches(shards: str, batcher: Any, skipped: int, epochs: int | None) -> None:
    class Last(custom.BatchStage):
        ref: Any = ()

        def __next__(self) -> Any:
            batch = next(self.source)
            self.ref = self.source.ref
            return batch

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return Last(batcher(sp.Encode(sp.TarShardReader(shards, lane, shuffle=False, epochs=epochs), Ids()), size=2))

    loader = sp.SavableLoader(pipeline, seed=7, lanes=1)
    loader.skip(skipped)
    assert [next(loader) for _ in range(3)] == [[2 * at, 2 * at + 1] for at in range(skipped, skipped + 3)]


@pytest.mark.parametrize(("build", "kind"), [(batched, Counting), (packed, CountingSizes), (balanced, CountingSizes)])
def test_resume_on_more_ranks_and_skips_build_only_what_is_yielded(
    shards: str, build: Callable[..., Any], kind: type[sp.TaskEncoder]
) -> None:
    pipeline = build(sp.read(shards).shuffle(10), kind())
    plain = sp.SavableLoader(pipeline, seed=7, lanes=4)
    expected = [next(plain) for _ in range(24)]
    two = [sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 2)) for rank in range(2)]
    assert [next(rank) for _ in range(2) for rank in two] == expected[:4]
    state = sp.merge_states([rank.state_dict() for rank in two])
    four = [sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 4)) for rank in range(4)]
    CALLS.clear()
    for rank in four:
        rank.load_state_dict(state)
        rank.skip(12)
    assert not set(CALLS) - {"length_of"}
    found = [next(rank) for _ in range(2) for rank in four]
    assert found == expected[16:24]
    items = sum(len(pack) if build is batched else sum(map(len, pack)) for pack in found)
    # each rank encodes its first 8 twice, and those that replace yielded ones in its buffer
    assert CALLS["encode"] <= items + 4 * (8 + 5) and CALLS["batch"] == 8
