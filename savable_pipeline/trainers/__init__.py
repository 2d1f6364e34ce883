"""The loader in the trainers that people have: one file a trainer, which alone imports that trainer's library.

    whole.py        `Whole`: what all of them stand on. The state of all ranks, at the batch that was trained on last
    checks.py       how far a trainer is ahead, who else moves the loader, what it evaluates on
    forms.py        a state as JSON, or as arrays, for checkpoints that hold nothing else
    rescue.py       a checkpoint that holds the lanes of one rank only
    hf.py           Hugging Face Trainer, and those that derive from it
    accelerate.py   Accelerate
    fabric.py       Lightning Fabric
    lightning.py    Lightning Trainer
    lightning_step.py   where it is in a step, its counts; signals that have it save wait for a step's end
    deepspeed.py    DeepSpeed
    composer.py     Composer
    torchtitan.py   torchtitan

    device.py             batches on a GPU, one ahead
    micro_batches.py      batches in parts
    context_parallel.py   packs cut for the ranks of context parallelism
    elastic.py            the state of ranks that are gone

torch.distributed.checkpoint and Megatron's iterators take a `SavableLoader` as it is.
"""
