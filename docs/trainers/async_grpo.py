"""TRL's asynchronous GRPO on acknowledged rows: a rollout worker and a trainer, to be copied."""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOTrainer

import savable_pipeline as sp
from savable_pipeline.trainers.hf import begin, newest_whole, read_state


class Rollouts:
    """TRL's `RolloutWorkerProtocol`: prompts of a loader are in flight, and the loader hears what became of each.

    `generate(prompt, group, version)` is yours: the `RolloutSample`s of a prompt, with that group and version.
    """

    def __init__(self, loader: sp.SavableLoader, generate: Callable, in_flight: int) -> None:
        self.loader, self.generate = loader, generate
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.version, self.numbers, self.failed = 0, count(), None
        self.asking = threading.Lock()  # one thread at a time asks the loader for a batch, or for its state
        self.putting = threading.Lock()
        self.room, self.pool = threading.Semaphore(in_flight), ThreadPoolExecutor(in_flight)
        self.order = deque()  # the group of each sample, as they lie in the queue
        self.open = {}  # by group: its receipt, how many of its samples are not settled, whether one was trained
        self.stopped = threading.Event()

    def start(self) -> None:
        self.feeder = threading.Thread(target=self.guarded, args=(self.feed,), daemon=True)
        self.feeder.start()

    def feed(self) -> None:
        while not self.stopped.is_set():
            with self.asking:
                batch = next(self.loader)
            for prompt, receipt in zip(batch["prompt"], batch["receipts"], strict=True):
                if receipt[0] < 0:
                    continue  # trained before the checkpoint
                self.room.acquire()
                if self.stopped.is_set():
                    return
                self.pool.submit(self.guarded, self.roll_out, prompt, receipt[None], next(self.numbers))

    def roll_out(self, prompt, receipt, group: int) -> None:
        samples = self.generate(prompt, group, self.version)
        with self.putting:
            self.open[group] = [receipt, len(samples), False]
            self.order += [group] * len(samples)
            for sample in samples:
                self.rollout_buffer.put(sample)

    def settle(self, trained: Counter) -> None:
        """Those before the last of these that are not among them were left out by the trainer, as stale."""
        while trained.total():
            group = self.order.popleft()
            receipt, waiting, any_trained = self.open[group]
            any_trained |= trained[group] > 0
            trained[group] -= trained[group] > 0
            self.open[group] = [receipt, waiting - 1, any_trained]
            if waiting == 1:
                (self.loader.done if any_trained else self.loader.again)(receipt)
                del self.open[group]
                self.room.release()

    def guarded(self, work: Callable, *given) -> None:
        try:
            work(*given)
        except BaseException as error:
            self.failed = error

    def check_health(self, stale_after_s: float) -> None:
        if self.failed:
            raise RuntimeError("a rollout failed") from self.failed

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version

    def stop(self) -> None:
        self.stopped.set()
        self.room.release()
        self.feeder.join()
        self.pool.shutdown(cancel_futures=True)


class MicroBatches(set):
    """What TRL keeps of the groups that it has packed, with those of each micro-batch."""

    def __init__(self) -> None:
        self.packed = deque()

    def update(self, groups) -> None:
        self.packed.append(Counter(groups))
        super().update(self.packed[-1])


class Settle(TrainerCallback):
    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs) -> None:
        for _ in range(args.gradient_accumulation_steps):
            self.trainer.rollout_worker.settle(self.trainer._trained_groups.packed.popleft())  # noqa: SLF001


class SavableAsyncGRPOTrainer(AsyncGRPOTrainer):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.rollout_worker is not None:  # on rank 0
            self._trained_groups = MicroBatches()
            self.add_callback(Settle(self))

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        if _internal_call and self.rollout_worker is not None:  # first of all: a checkpoint that has the rest is whole
            with self.rollout_worker.asking:
                begin(Path(output_dir), self.rollout_worker.loader.state_dict())
        super().save_model(output_dir, _internal_call)

    def train(self, resume_from_checkpoint=None, **kwargs):
        found = resume_from_checkpoint
        if found is True:
            found = newest_whole(Path(self.args.output_dir))
        if found and self.rollout_worker is not None:
            self.rollout_worker.loader.load_state_dict(read_state(Path(found)))
        return super().train(str(found) if found else None, **kwargs)
