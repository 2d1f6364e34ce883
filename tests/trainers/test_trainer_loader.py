"""The state of all ranks after the batch that was trained on last; what skips batches beside it is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.errors import StateError
from savable_pipeline.run.loader import run
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers import trainer_loader
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.support.signals import SignalAt, count_until_interrupt
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_faults import packed_numbers
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

PIPELINES = {"endless": toy_pipeline, "counted": counted_pipeline, "packed": partial(toy_pipeline, epochs=1)}


@pytest.fixture
def make(request: pytest.FixtureRequest, make_shards: Any) -> Any:
    """Return a function that builds a loader: endless, or finite with a length (36 batches, default) or none (24)."""
    pipeline = partial(PIPELINES[getattr(request, "param", "counted")], str(make_shards([36, 36])))
    return lambda **settings: sp.SavableLoader(pipeline, seed=3, lanes=6, **settings)


def of_kinds(*cases: tuple[str, int]) -> pytest.MarkDecorator:
    """Run a test on each kind of loader, and each number of batches that the trainer fetches ahead."""
    return pytest.mark.parametrize(("make", "ahead"), cases, indirect=["make"])


class Trainer:
    """Trainer that fetches `ahead` batches beyond the current one, as Lightning does, and saves after each."""

    def __init__(self, loader: sp.SavableLoader, ahead: int, trained: int = 0) -> None:
        self.trained = trained
        self.ahead = ahead
        self.batches = TrainerLoader(loader, trained=lambda: self.trained, most_ahead=ahead)

    def an_epoch(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the hash of each batch, and the state that is saved after training on it."""
        fetched: list[Any] = []
        for batch in self.batches:
            fetched.append(batch)
            if len(fetched) > self.ahead:
                yield self.train(fetched.pop(0))
        while fetched:
            yield self.train(fetched.pop(0))

    def train(self, batch: Any) -> tuple[str, dict[str, Any]]:
        self.trained += 1
        return digest(batch), self.batches.state_dict()

    def steps(self, n: int) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        while len(found) < n:
            found += islice(self.an_epoch(), n - len(found))
        return found


@of_kinds(("endless", 2), ("counted", 0), ("counted", 1), ("packed", 1))
def test_state_is_after_the_last_trained_batch_at_every_step_and_epoch_end(make: Any, ahead: int) -> None:
    expected = [batch for batch, _ in Trainer(make(), 0).steps(45)]
    steps = Trainer(make(), ahead).steps(40)
    assert [batch for batch, _ in steps] == expected[:40]
    for step in (11, 22, 23, 24, 34, 35, 36):
        again = Trainer(make(), ahead, trained=step + 1)
        again.batches.load_state_dict(through_a_file(steps[step][1]))
        assert [batch for batch, _ in again.steps(3)] == expected[step + 1 : step + 4], step


def test_state_saved_before_training_on_the_last_batch_repeats_it(make: Any) -> None:
    loader = make()
    trainer = Trainer(loader, ahead=1)
    *_, last = trainer.batches  # the trainer has seen the end, and trained on nothing yet
    trainer.trained += 35
    state = trainer.batches.state_dict()
    assert (state["epoch"], state["slot"]) == (0, 35)
    loader.load_state_dict(state)
    assert next_hashes(loader, 1) == [digest(last)]


def test_fetched_unused_batches_are_repeated_in_the_next_iteration(make: Any) -> None:
    expected = next_hashes(make(), 8)
    trainer = Trainer(make(), ahead=1)
    found = [batch for batch, _ in trainer.steps(3)]
    assert trainer.batches.ahead == 1
    iter(trainer.batches)  # thrown away, as by who looks whether it can be iterated
    assert found + [batch for batch, _ in trainer.steps(5)] == expected


def test_batches_skipped_by_the_trainer_are_detected(make: Any) -> None:
    trainer = Trainer(make(), ahead=0)
    trainer.steps(4)
    state = trainer.batches.state_dict()
    resumed = Trainer(make(), ahead=0, trained=4)
    resumed.batches.load_state_dict(state)
    batches = iter(resumed.batches)
    next_hashes(batches, 4)  # the skip
    with pytest.raises(sp.SavableError, match=r"used 1 of 5 batches .* Turn off its own skipping"):
        resumed.train(next(batches))


def test_training_on_more_batches_than_yielded_is_detected(make: Any) -> None:
    trainer = Trainer(make(), ahead=0)
    trainer.steps(2)
    trainer.trained += 1
    with pytest.raises(sp.SavableError, match="used 3 of 2 batches"):
        trainer.batches.check()


@pytest.mark.parametrize("how", ["restored", "skipped", "taken"])
def test_loader_moved_by_other_code_is_detected(make: Any, how: str) -> None:
    loader = make()
    before = loader.state_dict()
    trainer = Trainer(loader, ahead=1)
    trainer.steps(2)
    {
        "restored": lambda: loader.load_state_dict(before),
        "skipped": lambda: loader.skip(2),
        "taken": lambda: next(loader),
    }[how]()
    for act in (trainer.batches.state_dict, lambda: next(iter(trainer.batches)), lambda: trainer.batches.skip(1)):
        with pytest.raises(sp.SavableError, match="something else moved the loader"):
            act()


@of_kinds(("endless", 1), ("counted", 0), ("counted", 2), ("packed", 1))
def test_skip_applies_after_the_fetched_batches(make: Any, ahead: int) -> None:
    slots = next_hashes(make(), 20)
    expected = slots[: 3 + ahead] + slots[5 + ahead : 16]
    trainer = Trainer(make(), ahead=ahead)
    steps, found = trainer.an_epoch(), []
    for step in range(10):
        if step == 3:
            trainer.batches.skip(2)
            found.append((expected[2], trainer.batches.state_dict()))  # before anything else is trained on
        found.append(next(steps))
    assert [batch for batch, _ in found[:3] + found[4:]] == expected[:10]
    for done, (_, state) in enumerate(found[3:7], start=3):
        again = Trainer(make(), ahead=ahead, trained=done)
        again.batches.load_state_dict(through_a_file(state))
        assert [batch for batch, _ in again.steps(4)] == expected[done : done + 4], done


def test_skip_stays_if_fetched_batches_are_repeated(make: Any) -> None:
    slots = next_hashes(make(), 9)
    trainer = Trainer(make(), ahead=1)
    trainer.steps(3)
    trainer.batches.skip(1)
    trainer.batches.skip(1)
    assert [batch for batch, _ in trainer.steps(4)] == [slots[3], *slots[6:9]]


def test_skip_without_fetched_batches_equals_the_loaders(make: Any) -> None:
    loader, other = make(), make()
    batches = TrainerLoader(loader)
    for one in (batches, other):
        one.skip(2)
    assert loader.state_dict() == other.state_dict() == batches.state_dict()
    with pytest.raises(ValueError, match="skip takes a multiple of the 1 ranks, not -1"):
        batches.skip(-1)


def test_skip_at_the_end_of_an_epoch_does_not_reach_the_next(make: Any) -> None:
    loader = make()
    slots = [digest(batch) for _ in range(2) for batch in loader]
    for given in (34, 35, 36):
        trainer = Trainer(make(), ahead=1)
        steps = trainer.an_epoch()
        found = [next(steps)[0] for _ in range(given - 1)]
        assert found == slots[: given - 1] and trainer.batches.ahead == 1
        trainer.batches.skip(5)
        assert [batch for batch, _ in steps] == slots[given - 1 : given]
        assert [batch for batch, _ in trainer.steps(2)] == slots[36:38]


def test_bare_loader_rejects_a_state_with_a_pending_skip(make: Any) -> None:
    trainer = Trainer(make(), ahead=1)
    trainer.steps(3)
    trainer.batches.skip(2)
    state = trainer.batches.state_dict()
    with pytest.raises(sp.CheckpointMismatchError, match="2 slots to skip, from slot 4 of epoch 0"):
        make().load_state_dict(state)
    for damaged in (b"[", b'[["a", 1, 2]]', 7):
        with pytest.raises(StateError, match="to_skip"):
            TrainerLoader(make()).load_state_dict({**state, "to_skip": damaged})


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("counts", [True, False])
def test_batch_whose_move_to_the_device_fails_is_repeated(make: Any, ahead: int, counts: bool) -> None:
    expected, failures = next_hashes(make(), 12), iter([False, False, False, True, True, False, True])

    def to_device(batch: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("out of memory")
        return batch

    trained, fetched, found = 0, [], []
    batches = TrainerLoader(
        make(), trained=(lambda: trained) if counts else None, most_ahead=ahead, to_device=to_device
    )
    steps = iter(batches)
    while len(found) < 8:
        try:
            fetched.append(digest(next(steps)))
        except RuntimeError:
            slot = len(found) if counts else len(found) + len(fetched)
            assert batches.state_dict()["slot"] == slot
            continue
        if len(fetched) > ahead:
            found.append(fetched.pop(0))
            trained += 1
    assert found == expected[:8] and next(failures, None) is None


def test_batches_are_moved_to_the_device_and_the_rest_is_the_loaders(make: Any) -> None:
    with make() as loader:
        batches = TrainerLoader(loader, to_device=lambda batch: ("moved", batch))
        assert next(iter(batches))[0] == "moved"
        assert (len(batches), batches.epoch) == (36, 0)
        batches.close()
    assert batches.state_dict() == loader.state_dict()


def test_interrupted_evaluation_restarts(make: Any) -> None:
    batches = TrainerLoader(make(tail="pad", on_iter="restart"))
    expected = next_hashes(batches, 3)
    assert next_hashes(batches, 1) + next_hashes(batches, 3) + next_hashes(batches, 3) == [
        expected[0],
        *expected,
        *expected,
    ]


@pytest.mark.parametrize("make", ["endless"], indirect=True)
def test_endless_loader_has_no_length_and_is_truthy(make: Any) -> None:
    batches = TrainerLoader(make())
    assert batches
    with pytest.raises(TypeError, match="length"):
        len(batches)


def test_state_of_one_rank_alone_is_rejected_on_save(make: Any) -> None:
    batches = TrainerLoader(make(ranks=(0, 2)))
    with pytest.raises(ValueError, match=r"gathering needs torch\.distributed"):
        batches.state_dict()


def test_asking_for_a_dataset_is_an_error_that_names_skipping(make: Any) -> None:
    batches = TrainerLoader(make())
    with pytest.raises(AttributeError, match="Do not skip batches"):
        _ = batches.dataset
    assert not hasattr(batches, "dataset")


def test_only_a_loader_is_accepted() -> None:
    with pytest.raises(TypeError, match="a SavableLoader, not list"):
        TrainerLoader([])  # type: ignore[arg-type]


class Accumulates(Trainer):
    """Trainer whose optimizer steps on every third batch. It counts a batch before it trains on it."""

    def __init__(self, loader: sp.SavableLoader, ahead: int, done: int = 0) -> None:
        self.begun = self.trained = done
        self.ahead = ahead
        self.batches = TrainerLoader(loader, trained=lambda: self.trained, begun=lambda: self.begun, most_ahead=ahead)

    def moments(self) -> Iterator[tuple[int, str | None, dict[str, Any]]]:
        """What the optimizer has stepped on, the batch that was trained on, and the state: at each moment of a step."""
        while True:
            batches, fetched = iter(self.batches), deque[Any]()
            while fetched.extend(islice(batches, self.ahead + 1 - len(fetched))) or fetched:
                yield self.trained, None, self.batches.state_dict()
                self.begun += 1
                yield self.trained, None, self.batches.state_dict()
                if self.begun % 3 == 0:
                    self.trained = self.begun
                yield self.trained, digest(fetched.popleft()), self.batches.state_dict()


@of_kinds(("endless", 0), ("counted", 1), ("packed", 1))
def test_state_during_a_step_is_after_the_last_optimizer_step(make: Any, ahead: int) -> None:
    expected = [batch for batch, _ in Trainer(make(), 0).steps(18)]
    moments = list(islice(Accumulates(make(), ahead).moments(), 36))
    assert [batch for _, batch, _ in moments if batch] == expected[:12]
    for done, _, state in moments[::5]:
        again = Accumulates(make(), ahead, done)
        again.batches.load_state_dict(through_a_file(state))
        assert [batch for _, batch, _ in islice(again.moments(), 9) if batch] == expected[done : done + 3]


def test_interrupted_step_is_repeated_from_its_first_batch(make: Any) -> None:
    expected = [batch for batch, _ in Trainer(make(), 0).steps(12)]
    for broken_off in range(9, 18):
        trainer = Accumulates(make(), 1)
        for _ in islice(trainer.moments(), broken_off):
            pass
        done = trainer.trained
        trainer.begun = trainer.trained  # counted again
        found = [batch for _, batch, _ in islice(trainer.moments(), 9) if batch]
        assert found == expected[done : done + 3], broken_off


@pytest.mark.parametrize("ahead", [0, 1])
def test_one_more_batch_may_be_in_transit_until_it_is_started(make: Any, ahead: int) -> None:
    trainer = Trainer(make(), ahead)
    batches = iter(trainer.batches)
    for _ in range(ahead + 1):
        next(batches)
    assert trainer.batches.state_dict()["slot"] == 0  # it is in training, or will be
    trainer.trained = 1
    trainer.batches.check()
    next(batches)
    next(batches)
    with pytest.raises(sp.SavableError, match="Turn off its own skipping"):
        trainer.batches.state_dict()
    skipped_one = Trainer(make(), ahead)
    next_hashes(iter(skipped_one.batches), ahead + 2)
    skipped_one.trained = 1
    with pytest.raises(sp.SavableError, match="Turn off its own skipping"):
        skipped_one.batches.check()


def test_another_trainer_continues_after_the_firsts_batches(make: Any) -> None:
    slots = next_hashes(make(), 12)
    loader = make()
    first = Trainer(loader, ahead=1)
    assert [batch for batch, _ in first.steps(3)] == slots[:3]
    first.batches.skip(2)  # behind the fourth, which is fetched
    other = Trainer(loader, ahead=1)
    other.batches.continue_from(first.batches)
    assert [batch for batch, _ in other.steps(4)] == [slots[3], *slots[6:9]]


@pytest.mark.parametrize("counts", [False, True])
def test_ctrl_c_at_any_bytecode_of_a_step_loses_no_batch_and_training_continues(make_shards: Any, counts: bool) -> None:
    def loader() -> sp.SavableLoader:
        return sp.SavableLoader(partial(packed_numbers, shards), seed=3, lanes=6)

    shards = str(make_shards([36, 36]))
    begun, straight = [0], loader()
    batches = TrainerLoader(loader(), to_device=copy)  # as what moves a batch to a device
    if counts:
        batches = TrainerLoader(loader(), trained=lambda: begun[0], most_ahead=0)
    for at in range(1, 100_000):
        signal = SignalAt(at, [trainer_loader, run])
        count = count_until_interrupt(steps := iter(batches), 1, signal)
        begun[0] += count
        assert batches.state_dict()["slot"] == straight.state_dict()["slot"] + count, at
        for _ in range(count):
            next(straight)
        assert digest(next(steps)) == digest(next(straight)), at
        begun[0] += 1
        assert batches.state_dict()["slot"] == straight.state_dict()["slot"], at
        if signal.left > 0:
            break
    assert at > 100
