"""Kill and resume verl's trainers, with the loader of docs/trainers/savable_verl.py or with their own.

    python tools/trials/verl_loader.py [--kills 2] [--runs 1] [--epochs 1] [--loader ours|verl] [MODE …]

It needs an environment with `pip install verl TransferQueue torch torchvision uvicorn fastapi` and this package, but
neither a GPU nor vLLM. These parts of verl run:

- its commands, configuration and Ray actors
- in `fully_async` and `one_step_off`: the rollouter, message queue and trainers, with advantages, saves and loads
- in `sync` and `colocate_async` (version 1): the trainer's loop with saves and loads, the replay buffer, TransferQueue
  and the agent loop workers

`verl_stand_ins.py` replaces the rest. Generation sleeps, sometimes ten times as long. The model's weights are the
numbers of the prompts that it was trained on, so a checkpoint says on which.

All processes of a run are killed by SIGKILL at a random moment after a checkpoint. `sync` and `one_step_off` must train
on the same prompts as an uninterrupted run, step by step. In the other modes, the order is that in which rollouts end:
each prompt that the loader yielded must be trained on once or still be in the queue.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 240  # an update has 8; `fully_async` trains on all of them, the other modes on 20 updates

COMMON = """data.train_files=[{0}/prompts.parquet] data.val_files=[{0}/prompts.parquet] data.shuffle=False
data.filter_overlong_prompts=False data.dataloader_num_workers=0 trainer.default_local_dir={1} trainer.logger=[console]
trainer.val_before_train=False trainer.device=cpu trainer.total_epochs={3} actor_rollout_ref.rollout.n=2
actor_rollout_ref.model.path={0}/model actor_rollout_ref.actor.ppo_mini_batch_size=8 algorithm.adv_estimator=grpo
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.name=vllm
ray_kwargs.ray_init.num_cpus=24 +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.address=local"""
FULLY_ASYNC = """data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.hybrid_engine=False trainer.save_freq=1
rollout.total_rollout_steps=null rollout.n_gpus_per_node=1 trainer.balance_batch=False
async_training.staleness_threshold=1 async_training.trigger_parameter_sync_step=2"""
ONE_STEP_OFF = """data.train_batch_size=8 trainer.total_training_steps=20 trainer.save_freq=2
trainer.balance_batch=False actor_rollout_ref.hybrid_engine=False rollout.n_gpus_per_node=1
hydra.searchpath=[pkg://verl.trainer.config]"""
VERSION_1 = """trainer.v1.trainer_mode={2} data.train_batch_size=8 trainer.total_training_steps=20 trainer.save_freq=2
actor_rollout_ref.rollout.agent.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1"""
COMMANDS = {
    "fully_async": ("experimental.fully_async_policy.fully_async_main", FULLY_ASYNC),
    "one_step_off": ("experimental.one_step_off_policy.main_ppo", ONE_STEP_OFF),
}
# In these modes the prompts have the loader's order. The others train on the rollouts that end first.
IN_ORDER = ("sync", "one_step_off")


def write_inputs(folder: Path) -> None:
    """Write prompts in verl's format, a tokenizer, and the module of the documentation page."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"number {number}"}],
            "data_source": "numbers",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    words = Tokenizer(models.WordLevel({"?": 0, "": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="", eos_token="").save_pretrained(folder / "model")
    Qwen2Config(architectures=["Qwen2ForCausalLM"], hidden_size=8).save_pretrained(folder / "model")
    shutil.copy(ROOT / "docs/trainers/savable_verl.py", folder)


def run_verl(folder: Path, run: Path, mode: str, loader: str, epochs: int, kill_after: float | None) -> None:
    """Run verl's command. Kill it `kill_after` seconds after its next checkpoint, unless it is None."""
    module, mode_settings = COMMANDS.get(mode, ("trainer.main_ppo", VERSION_1))
    settings = f"{COMMON} {mode_settings}".format(folder, run, mode, epochs)
    modules = "savable_verl,verl_stand_ins" if loader == "ours" else "verl_stand_ins"
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
    paths = os.pathsep.join(map(str, (folder, Path(__file__).parent)))
    environment = {**os.environ, **ray, "VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": paths}
    latest = run / "latest_checkpointed_iteration.txt"  # verl writes the iteration of the newest checkpoint to it
    before = latest.read_text() if latest.exists() else ""
    with (folder / f"{run.name}.log").open("a") as log:
        command = [sys.executable, "-m", f"verl.{module}", *settings.split()]
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    if kill_after is not None:
        while process.poll() is None and not (latest.exists() and latest.read_text() not in ("", before)):
            time.sleep(0.05)
        time.sleep(kill_after)
        if process.poll() is None:
            processes = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for running in processes:
                running.kill()
            psutil.wait_procs(processes, timeout=60)
            process.wait()
            return
    if process.wait():
        sys.exit(f"verl ended with {process.returncode}:\n{log_end(folder, run)}")


def log_end(folder: Path, run: Path) -> str:
    """Return the last lines of verl's output."""
    return "\n".join((folder / f"{run.name}.log").read_text().splitlines()[-40:])


def trained_prompts(run: Path) -> list[list[int]]:
    """Return the prompts that the newest saved model was trained on, one list for each update of its weights."""
    step = (run / "latest_checkpointed_iteration.txt").read_text()
    updates: list[list[int]] = json.loads((run / f"global_step_{step}/actor/model.json").read_text())
    return updates


def prompt_order(folder: Path, loader: str) -> list[int]:
    """Return the prompts in the order of the loader."""
    if loader == "verl":
        return list(range(PROMPTS))  # data.shuffle=False
    sys.path.insert(0, str(folder))
    config = SimpleNamespace(data=SimpleNamespace(train_files=[str(folder / "prompts.parquet")]))
    with import_module("savable_verl").make_loader(config, size=1, epochs=1) as prompts:
        return [int(batch["index"][0]) for batch in prompts]


def judge(folder: Path, run: Path, mode: str, order: list[int], epochs: int) -> tuple[str, bool]:
    """Describe on which prompts the last model was trained, and return whether that is right."""
    counts = Counter(itertools.chain(*trained_prompts(run)))
    if mode == "fully_async":  # this mode trains to the end of the epochs
        expected = Counter(order * epochs)
    else:  # all that the loader has yielded, without those in the queue
        queued = json.loads((run / "queued.json").read_text()) if mode == "colocate_async" else []
        reached = 1 + max(map(order.index, {*counts, *queued}))
        expected = Counter(order[:reached]) - Counter(queued)
    lost, more = (expected - counts).total(), (counts - expected).total()
    result = f"{expected.total()} prompts to train on, {lost} lost, {more} trained on once more"
    if mode not in IN_ORDER:
        return result, not lost and not more
    exact = trained_prompts(run) == trained_prompts(folder / f"{mode}-uninterrupted")
    return f"{result}, {'exact' if exact else 'DIFFERS'}", exact


def main() -> None:
    """Run each mode with kills to its end, and print on which prompts its model was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=["sync", "colocate_async", "one_step_off", "fully_async"])
    parser.add_argument("--loader", choices=("ours", "verl"), default="ours")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        order = prompt_order(folder, options.loader)
        for mode in {*IN_ORDER} & {*options.modes}:
            run_verl(folder, folder / f"{mode}-uninterrupted", mode, options.loader, options.epochs, None)
        for mode, number in itertools.product(options.modes, range(options.runs)):
            run, rng = folder / f"{mode}{number}", random.Random(number)
            for _ in range(options.kills):
                run_verl(folder, run, mode, options.loader, options.epochs, 2 * rng.random())
            run_verl(folder, run, mode, options.loader, options.epochs, None)
            result, is_right = judge(folder, run, mode, order, options.epochs)
            print(f"{mode}, {options.loader}: {options.kills} kills, {result}", flush=True)
            failed |= not is_right
    sys.exit(failed)


if __name__ == "__main__":
    main()
