"""TRL's `AsyncGRPOTrainer` on acknowledged rows, killed and resumed: is a prompt lost, or trained twice?

    python tools/trials/async_grpo.py [--kills 5]       needs trl

The worker and the trainer are those of docs/trainers/async_grpo.py. The trainer's loop, queue, staleness, packing, loss
and checkpoints are TRL's own. Stand-ins: a model of a few thousand weights, which also generates (in threads, from a
copy of the weights that TRL sends), with waits of a heavy tail, in the place of vLLM; and torch's attention in the
place of the FlashAttention kernel, which needs a GPU.

A run is killed by SIGKILL at random moments, and each time goes on from its newest checkpoint. A prompt counts as seen
by a saved model when the optimizer has stepped on it before that checkpoint: read off the tokens that the loss was
computed of. At the end each prompt that the loader has given must have been seen once, or stand in the state as in
flight. Beside it, what TRL's own bookkeeping would make of the same checkpoints: it goes on from the first prompt that
was not packed yet.
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

PROMPTS, COMPLETIONS, IN_FLIGHT, STEPS, SAVED_EVERY = 300, 4, 24, 120, 7


class Numbers(sp.TaskEncoder):
    """Prompts that say which they are."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> str:
        return f"{sample.json()['id']} "

    def batch(self, items: list[str], rng: sp.Rng) -> dict[str, list[str]]:
        return {"prompt": items}


def pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Numbers()), size=4)


def make_loader(folder: Path, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(pipeline, str(folder / "shards")), seed=7, lanes=4, **settings)


class Policy:
    """A copy of the model, which TRL sends its weights to (`WeightTransferProtocol`), and which generates."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.lock = threading.Lock()
        self.prompts: dict[int, int] = {}  # by group

    def send_weights(self, iterator: Any) -> None:
        with self.lock:
            own = dict(self.model.named_parameters())
            for name, value in iterator:
                own[name].data.copy_(value)

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def generate(self, prompt: str, group: int, version: int) -> list[Any]:
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
    """What TRL asks of the FlashAttention kernel, by torch: each run of queries sees the keys of its own path."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> torch.Tensor:
        found = []
        for q0, q1, k0, k1 in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
            queries, keys, values = (each.transpose(0, 1) for each in (q[q0:q1], k[k0:k1], v[k0:k1]))
            mask = torch.ones(int(q1 - q0), int(k1 - k0), dtype=torch.bool).tril(int(k1 - k0) - int(q1 - q0))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            found.append(
                sdpa(queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
            )
        return torch.cat(found)


def train(folder: Path) -> None:
    """One leg: from the newest whole checkpoint on."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, packing

    page = runpy.run_path(str(ROOT / "docs/trainers/async_grpo.py"))
    Savable: Any = page["SavableAsyncGRPOTrainer"]
    packing._flash_attn = lambda: Attention  # noqa: SLF001
    torch.cuda.get_device_name = lambda *_: "none"  # whose speed TRL looks up, to log a share of it
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, tokenizer = causal_model()
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    policy = Policy(model.eval(), tokenizer)
    checkpoint = newest(folder)
    trained_prompts = json.loads((checkpoint / "prompts.json").read_text())["trained"] if checkpoint else []
    under_way: list[int] = []

    class Trainer(Savable):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())  # a group is a micro-batch
            under_way.append(int("".join(tokens).split(" ")[0]))
            return super().compute_loss(model, inputs, *args, **kwargs)

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            if _internal_call:
                ahead = [policy.prompts[group] for packed in self._trained_groups.packed for group in packed]
                Path(output_dir, "prompts.json").write_text(json.dumps({"trained": trained_prompts, "ahead": ahead}))

    class RecordTrainedPrompts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trained_prompts.extend(under_way)
            under_way.clear()

    loader = make_loader(folder, acknowledge=True)
    worker = page["Rollouts"](loader, policy.generate, IN_FLIGHT)
    quiet = {"report_to": [], "disable_tqdm": True, "bf16": False, "use_cpu": True, "logging_strategy": "no"}
    rows = {"per_device_train_batch_size": COMPLETIONS, "gradient_accumulation_steps": 2, "token_budget": -1}
    settings = {"max_steps": STEPS, "save_steps": SAVED_EVERY, "max_staleness": 12, "learning_rate": 1e-2}
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
    print(f"the last leg: {acknowledged}")


def checkpoints(folder: Path) -> list[Path]:
    """Those that are whole, in their order."""
    whole = [path.parent for path in folder.glob("run/checkpoint-*/trainer_state.json")]
    return sorted(whole, key=lambda path: int(path.name.split("-")[1]))


def newest(folder: Path) -> Path | None:
    return next(reversed(checkpoints(folder)), None)


def killed(folder: Path) -> int:
    """Start a leg, kill it at a random moment after it has saved; the step of the newest checkpoint."""
    before = newest(folder)
    leg = subprocess.Popen([sys.executable, __file__, "--leg", str(folder)], stdout=subprocess.DEVNULL, stderr=2)
    while newest(folder) == before and leg.poll() is None:
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1))
    leg.send_signal(signal.SIGKILL)
    leg.wait()
    return int(newest(folder).name.split("-")[1])  # type: ignore[union-attr]


def in_flight(folder: Path, state: dict[str, Any]) -> list[int]:
    """The prompts that a state holds as in flight."""
    found: list[int] = []
    with make_loader(folder, acknowledge=True) as loader:
        loader.load_state_dict(state)
        while (batch := next(loader))["receipts"][:, 0].max() < state["slot"]:
            found += [int(p) for p, (slot, _) in zip(batch["prompt"], batch["receipts"], strict=True) if slot >= 0]
    return found


def check(folder: Path, checkpoint: Path) -> tuple[int, int, int, int, int]:
    """Prompts in flight, lost and trained twice; what TRL's own position would train twice, and lose."""
    from savable_pipeline.trainers.hf import read_state

    state = read_state(checkpoint)
    record = json.loads((checkpoint / "prompts.json").read_text())
    with make_loader(folder) as plain:
        yielded = [int(prompt) for _ in range(state["slot"]) for prompt in next(plain)["prompt"]]
    waiting = in_flight(folder, state)
    found, expected = Counter(record["trained"]) + Counter(waiting), Counter(yielded)
    lost, twice = (expected - found).total(), (found - expected).total()
    packed = {*record["trained"], *record["ahead"]}
    first = next(i for i, prompt in enumerate(yielded) if prompt not in packed)
    again = len(set(yielded[first:]) & set(record["trained"]))
    return len(waiting), lost, twice, again, len(set(yielded[:first]) - set(record["trained"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--leg", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.leg is not None:
        train(options.leg)
        return
    with tempfile.TemporaryDirectory(prefix="async_grpo_") as name:
        folder = Path(name)
        write_numbered_shards(folder / "shards", [PROMPTS // 2, PROMPTS // 2])
        print(f"killed behind checkpoints {[killed(folder) for _ in range(options.kills)]}", flush=True)
        subprocess.run([sys.executable, __file__, "--leg", str(folder)], check=True)
        rows = [(path.name, *check(folder, path)) for path in checkpoints(folder)]
    print("| checkpoint | in flight | lost | twice | by TRL's position: twice | lost |\n|---|---|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(map(str, row)), "|")
    sys.exit(any(lost or twice for _, _, lost, twice, _, _ in rows) or rows[-1][0] != f"checkpoint-{STEPS}")


if __name__ == "__main__":
    main()
