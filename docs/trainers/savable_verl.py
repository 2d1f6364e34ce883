"""Loaders in the place of verl's, in three of its trainers, to be copied."""

from typing import Any

import ray
import torch
from verl.experimental.fully_async_policy import fully_async_rollouter, fully_async_trainer
from verl.experimental.one_step_off_policy import ray_trainer as one_step_off
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn

import savable_pipeline as sp


class Prompts(sp.TaskEncoder):
    """A row of verl's Parquet files, with the fields that its own dataset gives."""

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        row = {name: sample.json(name) for name in ("reward_model", "extra_info")}
        row |= {"raw_prompt": sample.json("prompt"), "data_source": sample.text("data_source")}
        row |= {"index": row["extra_info"]["index"], "tools_kwargs": {}, "interaction_kwargs": {}}
        return row | {"dummy_tensor": torch.zeros(1, dtype=torch.uint8)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return collate_fn(items)


def make_loader(config: Any, *, size: int, epochs: int | None, acknowledge: bool = False) -> sp.SavableLoader:
    samples = sp.read(config.data.train_files, epochs=epochs, block_size=1)
    pipeline = samples.encode(Prompts()).batch(size)
    return sp.SavableLoader(pipeline, seed=7, lanes=1, num_workers=1, ranks=(0, 1), acknowledge=acknowledge)


# verl.trainer.main_ppo, in each trainer_mode

own_init = PPOTrainer._init_dataloader  # noqa: SLF001


def _init_dataloader(self: PPOTrainer) -> None:
    own_init(self)  # its datasets, for the number of steps, and its loader, never asked
    size = self.config.data.get("gen_batch_size") or self.config.data.train_batch_size
    self.train_dataloader = make_loader(self.config, size=size, epochs=None)


PPOTrainer._init_dataloader = _init_dataloader  # noqa: SLF001


# verl.experimental.fully_async_policy.fully_async_main


class Rollouter(fully_async_rollouter.FullyAsyncRollouter.__ray_metadata__.modified_class):
    def _create_dataloader(self, *datasets: Any) -> None:
        super()._create_dataloader(*datasets)
        self.train_dataloader = make_loader(self.config, size=1, epochs=1, acknowledge=True)
        self.receipts: dict[str, torch.Tensor] = {}

    async def _process_single_sample_streaming(self, rollout_sample: Any) -> None:
        receipts = rollout_sample.full_batch.batch.pop("receipts")
        self.receipts[f"uid_{rollout_sample.sample_id}"] = receipts[:1]
        await super()._process_single_sample_streaming(rollout_sample)

    def done(self, uids: list[str]) -> None:
        self.train_dataloader.acknowledge(torch.cat([self.receipts.pop(uid) for uid in uids]))


class Trainer(fully_async_trainer.FullyAsyncTrainer.__ray_metadata__.modified_class):
    def _fit_update_actor(self, batch: Any) -> Any:
        batch = super()._fit_update_actor(batch)
        ray.get(self.rollouter.done.remote(sorted(set(batch.non_tensor_batch["uid"]))))
        return batch


# verl.experimental.one_step_off_policy.main_ppo


class OneStepOff(one_step_off.OneStepOffRayTrainer):
    def _create_dataloader(self, *datasets: Any) -> None:
        super()._create_dataloader(*datasets)
        size = self.config.data.train_batch_size
        self.train_dataloader = make_loader(self.config, size=size, epochs=1, acknowledge=True)

    def _fit_update_actor(self, batch: Any) -> Any:
        batch = super()._fit_update_actor(batch)
        self.train_dataloader.acknowledge(batch.batch["receipts"].unique(dim=0))
        return batch


fully_async_rollouter.FullyAsyncRollouter = ray.remote(num_cpus=10, max_concurrency=100)(Rollouter)
fully_async_trainer.FullyAsyncTrainer = ray.remote(num_cpus=10)(Trainer)
one_step_off.OneStepOffRayTrainer = OneStepOff
