"""The table trainer × case: how each case is tried, and which a trainer leaves out."""

from __future__ import annotations

from functools import partial

from tests.trainers.best import keeps_the_best
from tests.trainers.cases import (
    Plan,
    dp_by_tp,
    ends_of_epochs,
    epochs_on_other_ranks,
    last_batch,
    one_rank,
    other_ranks,
    shared,
    shared_epochs,
    three_epochs,
    two_ranks,
)

CASES: dict[str, Plan] = {
    "kill, 0 workers": partial(one_rank, workers=0),
    "kill, 2 workers": partial(one_rank, workers=2),
    "accumulate 2": partial(one_rank, accumulate=2),
    "2 ranks": two_ranks,
    "dp 2 × tp 2": dp_by_tp,
    "shared by 2": partial(shared, before=(4, 2), after=(4, 2)),
    "shared by 2 → not": partial(shared, before=(4, 2), after=(2, 1)),
    "not → shared by 2": partial(shared, before=(1, 1), after=(4, 2)),
    "shared by 2, 3 epochs": shared_epochs,
    "2 → 1 ranks": partial(other_ranks, before=2, after=1),
    "1 → 2 ranks": partial(other_ranks, before=1, after=2),
    "best of 2 ranks": partial(keeps_the_best, before=2, after=2),
    "best, 2 → 1 ranks": partial(keeps_the_best, before=2, after=1),
    "best, 1 → 2 ranks": partial(keeps_the_best, before=1, after=2),
    "last batch, length": partial(last_batch, kind="counted"),
    "last batch, no length": partial(last_batch, kind="packed"),
    "3 epochs, length": partial(three_epochs, kind="counted"),
    "3 epochs, no length": partial(three_epochs, kind="packed"),
    "3 epochs, 2 → 1 ranks": partial(epochs_on_other_ranks, before=2, after=1),
    "3 epochs, 1 → 2 ranks": partial(epochs_on_other_ranks, before=1, after=2),
    "validation": partial(three_epochs, kind="counted", validate=True),
    "ends: default": partial(ends_of_epochs, checkpoints="default"),
    "ends: no length": partial(ends_of_epochs, checkpoints="default", kind="packed"),
    "ends: save_last": partial(ends_of_epochs, checkpoints="save_last"),
    "ends: monitor": partial(ends_of_epochs, checkpoints="monitor"),
    "ends: validating": partial(ends_of_epochs, checkpoints="monitor", ended_by="kill in a validation"),
    "ends: max_epochs": partial(ends_of_epochs, checkpoints="default", ended_by="max_epochs"),
    "ends: last, max_epochs": partial(ends_of_epochs, checkpoints="save_last", kind="packed", ended_by="max_epochs"),
}
_OWN_LOOP = {"accumulate 2", "validation"}  # the page's loop has neither
_ONE_PASS = {case for case in CASES if case.startswith("last batch") or "3 epochs" in case}
LEFT_OUT = {
    "torch": _OWN_LOOP,
    "fsdp2": _OWN_LOOP,
    "fabric": _OWN_LOOP,
    "accelerate": {"validation"},
    "deepspeed": {"validation"},
} | {
    "torchtitan": _OWN_LOOP | _ONE_PASS,
    "composer": {"accumulate 2"},  # it cuts a batch into micro-batches, and takes no two for a step
    "megatron": _OWN_LOOP | _ONE_PASS,
}
_BEST = {case for case in CASES if case.startswith("best")}  # an option of Hugging Face's
for _trainer in ("hf", "trl"):
    LEFT_OUT[_trainer] = {"dp 2 × tp 2"}
LEFT_OUT["grpo"] = {"dp 2 × tp 2", "validation"} | _BEST  # its batches are lists, which have no place for `valid`
for _trainer in ("torch", "fsdp2", "accelerate", "fabric", "lightning", "deepspeed", "torchtitan", "composer"):
    LEFT_OUT[_trainer] = LEFT_OUT.get(_trainer, set()) | {"dp 2 × tp 2"} | _BEST
LEFT_OUT["megatron"] |= _BEST
_ENDS = {case for case in CASES if case.startswith("ends")}  # Lightning saves and loads them in a way of its own
for _trainer in LEFT_OUT.keys() - {"lightning"}:
    LEFT_OUT[_trainer] = LEFT_OUT[_trainer] | _ENDS
