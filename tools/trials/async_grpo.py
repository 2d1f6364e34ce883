"""Kill and resume TRL's `AsyncGRPOTrainer` on acknowledged rows. No prompt may be lost, or be trained on twice.

    python tools/trials/async_grpo.py [--kills 5]       needs trl

The worker and the trainer are those of docs/trainers/async_grpo.py. The trainer's loop, queue, staleness, packing, loss
and checkpoints are TRL's own. A model of a few thousand weights replaces vLLM: it generates in threads, from a copy of
the weights that TRL sends, with heavy-tailed waits. torch's attention replaces the FlashAttention kernel, which needs a
GPU.

A run is killed by SIGKILL at random moments, and resumes from its newest checkpoint each time. A saved model has
trained on a prompt if the optimizer has stepped on it before the checkpoint, as the tokens of the loss show. In the
end, it must have trained once on each prompt that the loader has yielded, or the state must have the prompt as in
flight.

The table also shows what would happen if TRL resumed from the same checkpoints by its own position, which is the first
prompt that was not packed yet.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import savable_pipeline as sp  # noqa: E402
from savable_pipeline import custom  # noqa: E402
from tests.support.shards import write_numbered_shards  # noqa: E402
from tests.trainers.drive import causal_model  # noqa: E402

PROMPTS, COMPLETIONS, IN_FLIGHT, STEPS, SAVE_EVERY = 300, 4, 24, 120, 7


class Numbers(sp.TaskEncoder):
    """Encoder of prompts whose text is the number of the sample."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> str:
        return f"{sample.json()['id']} "

    def batch(self, items: list[str], rng: sp.Rng) -> dict[str, list[str]]:
        return {"prompt": items}


def pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    """Build a lane of batches of four prompts."""
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Numbers()), size=4)


def make_loader(folder: Path, **settings: Any) -> sp.SavableLoader:
    """Open a loader over the shards in `folder`."""
    return sp.SavableLoader(partial(pipeline, str(folder / "shards")), seed=7, lanes=4, **settings)


class Policy:
    """Copy of the model that generates. TRL sends it new weights by `WeightTransferProtocol`."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.lock = threading.Lock()
        self.prompts: dict[int, int] = {}  # by group

    def send_weights(self, iterator: Any) -> None:
        """Load the weights that TRL sends as (name, value)."""
        with self.lock:
            own = dict(self.model.named_parameters())
            for name, value in iterator:
                own[name].data.copy_(value)

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def generate(self, prompt: str, group: int, version: int) -> list[Any]:
        """Generate completions of four tokens for a prompt, with rewards and advantages."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.prompts[group] = int(prompt)
        time.sleep(min(0.15, 0.01 * random.Random(prompt).paretovariate(1.1)))
        ids = self.tokenizer(prompt)["input_ids"]
        with self.lock, torch.no_grad():
            tokens = torch.tensor([ids] * COMPLETIONS)
            scores = []
            for _ in range(4):
                logp = self.model(input_ids=tokens).logits[:, -1].log_softmax(-1)
                drawn = torch.multinomial(logp.exp(), 1)
                scores.append(logp.gather(1, drawn))
                tokens = torch.cat([tokens, drawn], dim=1)
        rewards = (tokens[:, len(ids) :] % 5).sum(1).float()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mask = np.array([0] * len(ids) + [1] * 4)
        old = np.concatenate([np.zeros((COMPLETIONS, len(ids))), torch.cat(scores, 1).numpy()], axis=1)
        return [
            RolloutSample([], [], row, mask, old[i].astype(np.float32), float(advantages[i]), version, group, {})
            for i, row in enumerate(tokens.numpy())
        ]


class Attention:
    """Replacement of the FlashAttention kernel by torch's attention, with the interface that TRL calls."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> torch.Tensor:
        outputs = []
        for q0, q1, k0, k1 in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
            queries, keys, values = (each.transpose(0, 1) for each in (q[q0:q1], k[k0:k1], v[k0:k1]))
            mask = torch.ones(int(q1 - q0), int(k1 - k0), dtype=torch.bool).tril(int(k1 - k0) - int(q1 - q0))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            outputs.append(
                sdpa(queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
            )
        return torch.cat(outputs)


def train(folder: Path) -> None:
    """Train from the newest complete checkpoint on."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, packing

    page = runpy.run_path(str(ROOT / "docs/trainers/async_grpo.py"))
    Savable: Any = page["SavableAsyncGRPOTrainer"]
    packing._flash_attn = lambda: Attention  # noqa: SLF001
    torch.cuda.get_device_name = lambda *_: "none"  # TRL looks up its speed, to log the utilization
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, tokenizer = causal_model()
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    policy = Policy(model.eval(), tokenizer)
    checkpoint = newest(folder)
    trained_prompts = json.loads((checkpoint / "prompts.json").read_text())["trained"] if checkpoint else []
    pending_prompts: list[int] = []  # prompts of the step that is being computed

    class Trainer(Savable):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # a micro-batch has the completions of one prompt, each after that prompt, such as "17 "
            tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
            pending_prompts.append(int("".join(tokens).split(" ")[0]))
            return super().compute_loss(model, inputs, *args, **kwargs)

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            if _internal_call:
                ahead = [policy.prompts[group] for packed in self._trained_groups.packed for group in packed]
                Path(output_dir, "prompts.json").write_text(json.dumps({"trained": trained_prompts, "ahead": ahead}))

    class RecordTrainedPrompts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trained_prompts.extend(pending_prompts)
            pending_prompts.clear()

    loader = make_loader(folder, acknowledge=True)
    worker = page["Rollouts"](loader, policy.generate, IN_FLIGHT)
    quiet = {"report_to": [], "disable_tqdm": True, "bf16": False, "use_cpu": True, "logging_strategy": "no"}
    rows = {"per_device_train_batch_size": COMPLETIONS, "gradient_accumulation_steps": 2, "token_budget": -1}
    settings = {"max_steps": STEPS, "save_steps": SAVE_EVERY, "max_staleness": 12, "learning_rate": 1e-2}
    arguments = AsyncGRPOConfig(str(folder / "run"), num_generations=COMPLETIONS, **settings, **rows, **quiet)
    trainer = Trainer(
        str(folder / "model"),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=policy,
        callbacks=[RecordTrainedPrompts()],
    )
    trainer.train(resume_from_checkpoint=bool(checkpoint))
    acknowledged = {name: n for name, n in loader.stats().items() if name.startswith("acknowledged/")}
    print(f"since the last resume: {acknowledged}")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    complete = [path.parent for path in folder.glob("run/checkpoint-*/trainer_state.json")]
    return sorted(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, if any."""
    return next(reversed(checkpoints(folder)), None)


def train_and_kill(folder: Path) -> int:
    """Train in a process, kill it at a random moment after it has saved, and return the step of the checkpoint."""
    before = newest(folder)
    process = subprocess.Popen([sys.executable, __file__, "--train", str(folder)], stdout=subprocess.DEVNULL, stderr=2)
    while newest(folder) == before and process.poll() is None:
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    return int(newest(folder).name.removeprefix("checkpoint-"))  # type: ignore[union-attr]


def in_flight(folder: Path, state: dict[str, Any]) -> list[int]:
    """Return the prompts that are in flight in a state. A loader that resumes from it repeats them first."""
    prompts: list[int] = []
    with make_loader(folder, acknowledge=True) as loader:
        loader.load_state_dict(state)
        # A receipt is (slot, row), or (-1, -1) for a prompt that was acknowledged before the save.
        while (batch := next(loader))["receipts"][:, 0].max() < state["slot"]:
            prompts += [int(p) for p, (slot, _) in zip(batch["prompt"], batch["receipts"], strict=True) if slot >= 0]
    return prompts


def check(folder: Path, checkpoint: Path) -> tuple[int, int, int, int, int]:
    """Count prompts of a checkpoint.

    Returns:
        The numbers of prompts in flight, lost, and trained on twice. Then those that TRL's own position would train on
        twice, and lose.
    """
    from savable_pipeline.trainers.hf import read_state

    state = read_state(checkpoint)
    record = json.loads((checkpoint / "prompts.json").read_text())
    with make_loader(folder) as plain:
        yielded = [int(prompt) for _ in range(state["slot"]) for prompt in next(plain)["prompt"]]
    waiting = in_flight(folder, state)
    accounted, expected = Counter(record["trained"]) + Counter(waiting), Counter(yielded)
    lost, twice = (expected - accounted).total(), (accounted - expected).total()
    packed = {*record["trained"], *record["ahead"]}
    first_unpacked = next(i for i, prompt in enumerate(yielded) if prompt not in packed)
    twice_by_position = len(set(yielded[first_unpacked:]) & set(record["trained"]))
    return len(waiting), lost, twice, twice_by_position, len(set(yielded[:first_unpacked]) - set(record["trained"]))


def main() -> None:
    """Run the trial, and print a table of its checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    with tempfile.TemporaryDirectory(prefix="async_grpo_") as name:
        folder = Path(name)
        write_numbered_shards(folder / "shards", [PROMPTS // 2, PROMPTS // 2])
        print(f"killed after checkpoints {[train_and_kill(folder) for _ in range(options.kills)]}", flush=True)
        subprocess.run([sys.executable, __file__, "--train", str(folder)], check=True)
        rows = [(path.name, *check(folder, path)) for path in checkpoints(folder)]
    print("| checkpoint | in flight | lost | twice | by TRL's position: twice | lost |\n|---|---|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(map(str, row)), "|")
    sys.exit(any(lost or twice for _, _, lost, twice, _, _ in rows) or rows[-1][0] != f"checkpoint-{STEPS}")


if __name__ == "__main__":
    main()
