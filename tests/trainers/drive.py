"""Runs the script of a trainer's page, with a model that writes down its batches: `python -m tests.trainers.drive`.

The arguments are cases as JSON. Each is run in processes forked from this one, so that all trainers are imported once:
the cases of one trainer one after the other, the trainers at the same time. The processes of a case with several ranks
have the environment that torchrun sets. For an argument that names a file of tests, pytest runs these in a child.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import string
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import savable_pipeline as sp
from tests.support.toy_training import LANES, Noisy, Notes, Prompts, Recorder, Tokens, ToyPipeline

LEARNING_RATE = 0.05
PAGES = Path(__file__).parents[2] / "docs" / "trainers"


@dataclass(frozen=True)
class Case:
    """One run of one trainer in `folder`, which has `shards/`. Its checkpoints and logs are in `folder/run`."""

    trainer: str
    folder: str
    run: str  # the folder of its checkpoints
    log: str  # the name of its log
    kind: str = "endless"
    workers: int = 2
    batches: int = 12  # of each rank, in all
    ranks: int = 1  # processes
    peers: int = 1  # processes in a row of one data-parallel rank, which share its batches
    epochs: int = 1000  # of a finite pipeline
    save_every: int = 4  # batches
    accumulate: int = 1
    kill_at: int | None = None  # batches of this process
    resume: bool = False
    validate: bool = False
    best: bool = False  # evaluates with each checkpoint, keeps the best one and loads it at the end
    checkpoints: str = "steps"  # what has Lightning save: "steps", "default", "save_last" or "monitor"
    kill_evaluating: int | None = None  # batches of evaluations of this process

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def is_killed(self) -> bool:
        return self.kill_at is not None or self.kill_evaluating is not None

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, or -1 if its epochs determine the end."""
        return -1 if self.epochs < 1000 else self.batches // self.accumulate

    def log_of(self, rank: int) -> Path:
        return Path(self.folder, f"{self.log}-{rank}.jsonl")

    @property
    def loaded(self) -> Path:
        """The folder of the model that was loaded at the end, if `best` is set."""
        return Path(self.folder, f"{self.log}-loaded")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def model_of(case: Case) -> Recorder:
    """Return the model, with dropout if the trainer's checkpoints have the state of torch's generator."""
    torch.manual_seed(1)
    dropout = 0.2 if case.trainer == "accelerate" else 0.0
    return Recorder(case.log_of(rank()), kill_at=case.kill_at, dropout=dropout)


def pipeline_for(trainer: str, folder: str | Path, kind: str, *, shuffle: bool = True) -> ToyPipeline:
    encoder = {"trl": Tokens, "grpo": Prompts}.get(trainer, Noisy)
    return ToyPipeline(str(Path(folder, "shards")), kind, shuffle=shuffle, encoder=encoder)


def sharing(case: Case, mesh: Any = None) -> dict[str, Any]:
    """Return the setting of a loader for processes that share batches, or {} if those of the case do not."""
    if case.peers == 1 or ranks() == 1:
        return {}
    mesh = mesh or init_device_mesh("cpu", (ranks() // case.peers, case.peers), mesh_dim_names=("dp", "tp"))
    return {"ranks": sp.Ranks.of(mesh, share=mesh.mesh_dim_names[-1])}


def make_loader(case: Case, mesh: Any = None, **given: Any) -> sp.SavableLoader:
    pipeline = pipeline_for(case.trainer, case.folder, case.kind)
    given |= sharing(case, mesh)
    return sp.SavableLoader(pipeline, seed=7, lanes=LANES, num_workers=case.workers, **given)


def make_evaluation(case: Case) -> sp.SavableLoader:
    pipeline = pipeline_for(case.trainer, case.folder, "counted", shuffle=False)
    return sp.SavableLoader(pipeline, seed=7, lanes=LANES, tail="pad", on_iter="restart", **sharing(case))


def script_of(trainer: str) -> str:
    """Return the script of a trainer, from its page or beside it."""
    title = {"fsdp2": "train_torch.py", "trl": "train_sft.py"}.get(trainer, f"train_{trainer}.py")
    if (beside := PAGES / title).exists():
        return beside.read_text()
    pages = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    (found,) = re.findall(rf'^```python title="{title}"\n(.*?)^```$', pages, re.DOTALL | re.MULTILINE)
    return str(found)


def run_torch(case: Case) -> dict[str, Any]:
    import torch.distributed as dist

    model: Any = model_of(case)
    if ranks() > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    return _loop_names(case, model)


def run_fsdp2(case: Case) -> dict[str, Any]:
    """Run the script of torch's page with a model whose parameters are sharded over the ranks."""
    return _loop_names(case, _sharded_model(case))


def _sharded_model(case: Case) -> torch.nn.Module:
    """Return the model with FSDP2 over all ranks, also over one, so that the keys of checkpoints are equal."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    _announce_one_rank()
    dist.init_process_group("gloo")
    model = model_of(case)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks(),)))
    return model


def _loop_names(case: Case, model: Any) -> dict[str, Any]:
    """Return the names of a page that has a training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return {
        "run": Path(case.folder, case.run),
        "steps": case.batches,
        "save_every": case.save_every,
        "make_model": lambda: (model, optimizer),
        "make_loader": partial(make_loader, case),
    }


def run_accelerate(case: Case) -> dict[str, Any]:
    settings = {"cpu": True, "gradient_accumulation_steps": case.accumulate}
    return {**_loop_names(case, model_of(case)), "settings": settings}


def run_fabric(case: Case) -> dict[str, Any]:
    settings = {"accelerator": "cpu", "devices": ranks(), "strategy": "ddp" if ranks() > 1 else "auto"}
    return {**_loop_names(case, model_of(case)), "settings": settings}


def _announce_one_rank() -> None:
    """Set the environment that torchrun sets for several ranks."""
    if ranks() == 1:
        one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run_deepspeed(case: Case) -> dict[str, Any]:
    import deepspeed.comm

    _announce_one_rank()
    deepspeed.comm.init_distributed("gloo", verbose=False)
    settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": case.accumulate}
    return {**_loop_names(case, model_of(case)), "settings": settings}


def run_torchtitan(case: Case) -> dict[str, Any]:
    return {
        **_loop_names(case, _sharded_model(case)),
        "base": case.folder,
        "make_loader": lambda *, ranks, **_: make_loader(case, ranks=ranks),
        "convert": lambda batch: ({"input": batch["x"]}, batch["label"]),
        "settings": {"enable": True, "interval": case.save_every, "folder": case.run, "async_mode": "disabled"},
    }


def run_composer(case: Case) -> dict[str, Any]:
    from composer.models import ComposerModel

    _announce_one_rank()
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks()), "NODE_RANK": "0"}
    torch.manual_seed(1)
    recorder = Recorder(case.log_of(rank()), kill_at=case.kill_at, dropout=0.0)
    run = Path(case.folder, case.run)

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.recorder = recorder

        def forward(self, batch: Any) -> Any:
            return self.recorder(**batch)

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return self.recorder(**batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            pass

    model = Model()
    return {
        "run": run,
        "device": "cpu",
        "make_model": lambda: (model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)),
        "make_loader": partial(make_loader, case),
        "make_evaluation": partial(make_evaluation, case),
        "settings": {
            "max_duration": f"{case.epochs}ep" if case.kind == "counted" else f"{case.batches}ba",
            "eval_interval": "1ep" if case.validate else 0,
            "eval_subset_num_batches": 3,
            "save_folder": str(run),
            "save_filename": "ba{batch}.pt",
            "save_latest_filename": None,
            "save_interval": f"{case.save_every}ba",
            "save_overwrite": True,
            "device": "cpu",
            "precision": "fp32",
            "progress_bar": False,
            "seed": 1,
        },
    }


def run_megatron(case: Case) -> dict[str, Any]:
    """Run on four ranks: two data-parallel ranks with two tensor-parallel peers each."""
    import torch.distributed as dist

    _announce_one_rank()
    dist.init_process_group("gloo")
    peers = 2 if ranks() == 4 else 1
    mesh = init_device_mesh("cpu", (ranks() // peers, peers), mesh_dim_names=("dp", "tp"))
    model: Any = model_of(case)
    if ranks() > 1:
        # Its buckets stay as they were made, as those of Megatron's own DDP do: otherwise torch makes them again behind
        # the first step of a process, and sums over four ranks of a resumed run may be rounded otherwise in that step.
        model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return {
        **_loop_names(case, model),
        "make_loader": lambda group: make_loader(case, mesh, ranks=group),
        "begin": lambda: (mesh.get_group("dp"), mesh.get_local_rank("tp")),
    }


def run_hf(case: Case) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Recorder(case.log_of(rank()), kill_at=case.kill_at)
    run = Path(case.folder, case.run)
    run.mkdir(exist_ok=True)
    os.chdir(run)
    settings: dict[str, Any] = {
        "max_steps": case.batches // case.accumulate if case.kind == "packed" else case.steps,
        "num_train_epochs": case.epochs,
        "save_steps": case.save_every // case.accumulate,
        "gradient_accumulation_steps": case.accumulate,
        "learning_rate": LEARNING_RATE,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 1,
        "save_total_limit": 2,
    }
    if ranks() > 1:
        settings["ddp_backend"] = "gloo"
    evaluates = case.validate or case.best
    if evaluates:
        settings |= {"eval_strategy": "steps", "eval_steps": case.save_every, "load_best_model_at_end": True}
    if case.best:
        # the worst of the model that learns, the best of the one that cannot: an early one, to be remembered
        settings |= {"metric_for_best_model": "loss", "greater_is_better": case.trainer == "hf"}
    return {
        "make_model": lambda: _hf_model(model),
        "settings": settings,
        "make_loader": partial(make_loader, case),
        "make_evaluation": lambda: make_evaluation(case) if evaluates else None,
    }


def _hf_model(model: Recorder) -> torch.nn.Module:
    class Model(torch.nn.Module):
        """Gives its loss as the Trainer wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.recorder = model

        def forward(self, x: Any, label: Any, valid: Any = None) -> dict[str, Any]:
            return {"loss": self.recorder(x, label)}

    return Model()


def run_grpo(case: Case) -> dict[str, Any]:
    """Run with the names of the Trainer, and log the batch that it generates from and each loss."""
    from trl import GRPOTrainer

    from savable_pipeline.trainers.hf import SavableDataMixin

    notes = Notes(case.log_of(rank()), kill_at=case.kill_at)

    class SavableGRPOTrainer(SavableDataMixin, GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            self.given = generation_batch
            return super()._prepare_inputs(generation_batch)

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            notes.before(model.training)
            loss = super().compute_loss(model, *args, **kwargs)
            notes.after(self.given, loss, model.training)
            return loss

    names = run_hf(case)
    generates = {"bf16": False, "max_completion_length": 8}
    return {
        **names,
        "make_model": causal_model,
        "settings": {**names["settings"], **generates},
        "rows": {"per_device_train_batch_size": 8 // case.accumulate, "num_generations": Prompts.generations},
        "SavableGRPOTrainer": SavableGRPOTrainer,
    }


def run_trl(case: Case) -> dict[str, Any]:
    """Run with the names of the Trainer, and a causal language model."""
    names = run_hf(case)
    model, tokenizer = causal_model()
    notes = Notes(case.log_of(rank()), kill_at=case.kill_at)

    def note(model: Any, _: Any, given: dict[str, Any], outputs: Any) -> None:
        batch = {name: given[name] for name in ("input_ids", "labels", "attention_mask")}
        notes.after(batch, -outputs.log_probs.sum(), model.training)

    model.register_forward_pre_hook(lambda model, _: notes.before(model.training))
    model.register_forward_hook(note, with_kwargs=True)
    return {**names, "make_model": lambda: (model, tokenizer), "settings": {**names["settings"], "bf16": False}}


def causal_model() -> tuple[Any, Any]:
    """Return a model of 64 words with dropout, and their tokenizer. A word is a number or a letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = "0123456789.- " + string.ascii_letters[:49]
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<eos>", *letters))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=128, attention_dropout=0.2, **size)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return LlamaForCausalLM(config), tokenizer


def run_lightning(case: Case) -> dict[str, Any]:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from savable_pipeline.trainers.fabric import shared_sizes
    from savable_pipeline.trainers.trainer_loader import check_peers

    torch.manual_seed(1)
    recorder = Recorder(case.log_of(rank()), kill_at=case.kill_at)
    recorder.notes.kill_evaluating = case.kill_evaluating
    run = Path(case.folder, case.run)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.recorder = recorder

        def training_step(self, batch: Any, index: int) -> Any:
            return self.recorder(**batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("score", self.recorder(**batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

        def configure_model(self) -> None:
            if case.peers > 1:
                fully_shard(self.recorder, mesh=self.device_mesh["data_parallel"])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["random"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.random = checkpoint["random"]

        def on_train_start(self) -> None:
            if hasattr(self, "random"):
                torch.set_rng_state(self.random)

    every = max(1, case.save_every // case.accumulate)
    savers: dict[str, dict[str, Any]] = {
        "steps": {"filename": "{step}", "every_n_train_steps": every, "save_top_k": -1},
        "default": {},
        "save_last": {"save_last": True},
        "monitor": {"monitor": "score", "save_top_k": -1},
    }
    strategy: Any = "ddp" if ranks() > 1 else "auto"
    if case.peers > 1:
        strategy = ModelParallelStrategy(ranks() // case.peers, case.peers, save_distributed_checkpoint=False)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks(),
        "strategy": strategy,
        "callbacks": [ModelCheckpoint(run, **savers[case.checkpoints])],
        "max_steps": case.steps,
        "max_epochs": case.epochs if case.epochs < 1000 else -1,
        "accumulate_grad_batches": case.accumulate,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 3 if case.validate else 0,
    }
    module = Module()

    def loader() -> sp.SavableLoader:
        if case.peers == 1:
            return make_loader(case)
        sizes = shared_sizes(module.trainer.strategy)
        assert sizes == {"tensor_parallel": case.peers}
        try:
            check_peers(make_loader(replace(case, peers=1), ranks=(0, 3)), ranks(), sizes, "model.device_mesh")
        except ValueError as error:
            assert "processes of tensor_parallel need the same batches" in str(error)
            return make_loader(case, module.device_mesh)
        raise AssertionError("a loader of more ranks than are data-parallel was accepted")

    names = {
        "run": run,
        "make_model": lambda: module,
        "settings": settings,
        "make_loader": loader,
        "make_evaluation": partial(make_evaluation, case) if case.validate else None,
    }
    if case.checkpoints != "steps":  # whose names the page does not know

        def newest() -> Path | None:
            return max(run.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)

        names["newest"] = newest
    return names


NAMES = {
    "torch": run_torch,
    "fsdp2": run_fsdp2,
    "accelerate": run_accelerate,
    "deepspeed": run_deepspeed,
    "torchtitan": run_torchtitan,
    "composer": run_composer,
    "megatron": run_megatron,
    "fabric": run_fabric,
    "hf": run_hf,
    "trl": run_trl,
    "grpo": run_grpo,
    "lightning": run_lightning,
}


def run(case: Case) -> None:
    """Run the script's `main` with names of the case instead of those of the page, on one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    Path(case.folder, case.run).mkdir(exist_ok=True)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(script_of(case.trainer), f"train_{case.trainer}.py", "exec"), names)
    names |= NAMES[case.trainer](case)
    trainer = names["main"]()
    if case.best:
        trainer.save_model(str(case.loaded))


def preload(trainer: str) -> None:
    """Import what the page's script and torch's optimizers import, which takes seconds."""
    importlib.import_module("torch._dynamo")
    imports = [line for line in script_of(trainer).splitlines() if line.startswith(("import ", "from "))]
    exec("\n".join(imports), {})


def child(work: Callable[[], None]) -> int:
    """Fork a process that does this work, and return its id. It exits with 0 after success."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_on_ranks(case: Case) -> None:
    """Run a case on its ranks. Raise SystemExit if one fails, unless it was to be killed, and was."""
    from tests.support.forked_ranks import fork_ranks

    os.environ |= {"TORCHELASTIC_RUN_ID": "forked", "GROUP_RANK": "0"}
    codes = fork_ranks(partial(run, case), case.ranks)
    if (-9 not in codes) if case.is_killed else any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def run_all(cases: list[Case]) -> None:
    """Run the cases of one trainer in children. Raise SystemExit at the end if one fails that is not to be killed."""

    def ends_well(case: Case) -> bool:
        if case.ranks > 1:
            return ended(child(partial(run_on_ranks, case))) == 0
        return ended(child(partial(run, case))) == (-9 if case.is_killed else 0)

    if failed := [case for case in cases if not ends_well(case)]:
        raise SystemExit("\n".join(f"ended badly: {case.text}" for case in failed))


def run_tests(file: str) -> None:
    import pytest

    if status := pytest.main(["-q", "-p", "no:cacheprovider", "--disable-warnings", file]):
        raise SystemExit(int(status))


def main(cases: list[Case], tests: list[str]) -> None:
    trainers = list(dict.fromkeys(case.trainer for case in cases))
    for trainer in trainers:
        preload(trainer)
    work = {trainer: partial(run_all, [case for case in cases if case.trainer == trainer]) for trainer in trainers}
    children = {name: child(do) for name, do in {**work, **{file: partial(run_tests, file) for file in tests}}.items()}
    failed = [name for name, pid in children.items() if ended(pid)]
    if failed:
        raise SystemExit(f"{', '.join(failed)}: see above")


if __name__ == "__main__":
    main(
        [Case(**json.loads(text)) for text in sys.argv[1:] if text.startswith("{")],
        [file for file in sys.argv[1:] if not file.startswith("{")],
    )
