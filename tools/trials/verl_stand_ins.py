"""Replacements of the parts of verl that need GPUs: a model that records, generation that sleeps, idle replicas.

verl imports this module in each of its processes, after the module of the loader (VERL_USE_EXTERNAL_MODULES).
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from verl import DataProto
from verl.experimental.fully_async_policy import fully_async_rollouter, fully_async_trainer
from verl.experimental.one_step_off_policy import ray_trainer as one_step_off
from verl.experimental.separation import utils
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils import tensordict_utils as tu


class NoOp:
    """Object whose methods do nothing and may be awaited, such as a replica of the language model."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Done()


class Done:
    """Result of `NoOp`: false, and may be awaited."""

    def __await__(self) -> Any:
        yield from ()

    def __bool__(self) -> bool:
        return False


class Model(NoOp):
    """Worker group of the actor, whose weights are the numbers of the prompts of each update."""

    def __init__(self) -> None:
        self.updates: list[list[int]] = []

    def update_actor(self, batch: Any) -> Any:
        """Record the prompts of an update. The first token of a prompt is its number."""
        self.updates.append(sorted(set(batch["prompts"][:, 0].tolist())))
        return tu.get_tensordict({}, {"metrics": {"mfu": 0.0, "grad_norm": 0.0}})

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        """Write the weights to a folder."""
        Path(local_path).mkdir(parents=True, exist_ok=True)
        Path(local_path, "model.json").write_text(json.dumps(self.updates))

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        """Read the weights from a folder."""
        self.updates = json.loads(Path(local_path, "model.json").read_text())


async def generate(number: int) -> None:
    """Sleep for the time of a prompt. Most times are short, and some ten times as long."""
    await asyncio.sleep(min(2.0, 0.1 * random.Random(number).paretovariate(1.2)))


# The classes below are for `experimental/fully_async_policy` and `experimental/one_step_off_policy`.


class AgentLoops:
    """Replacement of verl's agent loops, which generate and reward responses."""

    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return prompts of one token, their number, with responses of one token."""
        numbers = torch.tensor(prompts.non_tensor_batch["index"].astype(int))[:, None]
        await generate(int(numbers.max()))
        ones = torch.ones_like(numbers)
        tensors = {"prompts": numbers, "responses": ones, "response_mask": ones, "rollout_log_probs": -ones.float()}
        tensors |= {"input_ids": torch.cat([numbers, ones], 1), "attention_mask": ones.repeat(1, 2)}
        tensors |= {"position_ids": torch.arange(2).repeat(len(prompts), 1)}
        tensors |= {"rm_scores": torch.arange(len(prompts))[:, None].float()}
        others = {name: np.zeros(len(prompts), dtype=object) for name in ("min_global_steps", "max_global_steps")}
        others |= {"multi_modal_inputs": np.array([{}] * len(prompts))}
        metrics = [{"generate_sequences": 0.1, "tool_calls": 0.0}] * len(prompts)
        meta = {"metrics": metrics, "reward_extra_keys": [], "timing": {}}
        return DataProto.from_dict(tensors, others, meta_info=meta)

    generate_sequences_single = generate_sequences


class Rollouter(fully_async_rollouter.FullyAsyncRollouter.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Rollouter of verl or of the loader's module, without a language model."""

    async def init_workers(self) -> None:
        """Create an idle replica."""
        self._init_async_objects()
        self.async_rollout_manager = AgentLoops()
        self.llm_server_manager = SimpleNamespace(get_active_server_count=lambda: 1, get_replicas=list)


class Trainer(fully_async_trainer.FullyAsyncTrainer.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Trainer of verl or of the loader's module, without workers."""

    async def init_workers(self) -> None:
        """Create the model that records prompts."""
        self.actor_wg = self.actor_rollout_wg = Model()

    async def _setup_checkpoint_manager(self) -> None:
        self.checkpoint_manager = NoOp()


class OneStepOff(one_step_off.OneStepOffRayTrainer):  # type: ignore[misc]
    """One-step-off trainer of verl or of the loader's module, without workers or a language model."""

    def init_workers(self) -> None:
        """Create the model that records prompts."""
        self.actor_wg = self.actor_rollout_wg = Model()
        self.checkpoint_manager, self.async_rollout_manager = NoOp(), AgentLoops()


fully_async_rollouter.FullyAsyncRollouter = ray.remote(num_cpus=10, max_concurrency=100)(Rollouter)
fully_async_trainer.FullyAsyncTrainer = ray.remote(num_cpus=10)(Trainer)
one_step_off.OneStepOffRayTrainer = OneStepOff
utils.create_role_worker_mapping = lambda config: ({Role.Actor: None}, None)


# The classes below are for version 1 (`trainer/ppo/v1`), which uses TransferQueue.


def without_gpus(trainer: type) -> type:
    """Return a subclass of a trainer of version 1 that needs no GPU.

    Instead of updating a model, it records the prompts that each update gets from the queue.
    """

    class CountingTrainer(trainer):  # type: ignore[misc]
        def _setup(self) -> None:
            self._init_tokenizer()
            self._init_dataloader()
            self._init_dump_executor()
            self.replay_buffer.poll_interval = 0.1
            self.actor_rollout_wg = Model()
            self.checkpoint_manager = self.llm_server_manager = self.teacher_model_manager = NoOp()
            self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
            self._load_checkpoint()

        def fit(self, agent_loop_manager: Any) -> None:
            super().fit(agent_loop_manager)
            tags = (tq.kv_list("train") or {}).get("train", {})
            keys = [key for key, tag in tags.items() if tag.get("is_prompt")]
            queued = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["index"])["index"] if keys else []
            Path(self.config.trainer.default_local_dir, "queued.json").write_text(
                json.dumps([int(each) for each in queued])
            )

        def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["index"])
            self.actor_rollout_wg.updates.append(sorted({int(each) for each in data["index"]}))
            return batch

        def _balance_batch(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

        _compute_old_log_prob = _compute_advantage = _balance_batch

        def _compute_metrics(self, *_: Any, **__: Any) -> None: ...

    return CountingTrainer


class AgentLoopWorker(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Agent loop worker of verl without a language model. It writes the prompts' states to the queue as usual."""

    def __init__(self, config: Any, *_: Any) -> None:
        self.config = config
        self.background_tasks: set[asyncio.Task[None]] = set()
        tq.init()

    async def _run_agent_loop(
        self, sampling: Any, *, trajectory: Any, session_id: int, uid: str, **prompt: Any
    ) -> None:
        number = int(prompt["index"])
        await generate(number)
        fields = tu.get_tensordict({"index": torch.tensor([number])})
        tags = [{"status": "success", "global_steps": trajectory["step"], "seq_len": 2}]
        await tq.async_kv_batch_put(keys=[f"{uid}_{session_id}_0"], fields=fields, tags=tags, partition_id="train")


TRAINER_REGISTRY.update({mode: without_gpus(trainer) for mode, trainer in TRAINER_REGISTRY.items()})
agent_loop_tq.AgentLoopWorkerTQ = ray.remote(AgentLoopWorker)
