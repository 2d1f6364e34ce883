"""Integrations of the loader with common trainers, one file per trainer.

Only that file imports the trainer's library.

    trainer_loader.py   `TrainerLoader`, which all of them use: the state of all ranks after the batch trained on last
    forms.py            a state as JSON, for checkpoints that can only store JSON
    hf.py               Hugging Face Trainer, and classes derived from it
    accelerate.py       Accelerate
    fabric.py           Lightning Fabric
    lightning.py        Lightning Trainer
    deepspeed.py        DeepSpeed
    composer.py         Composer
    torchtitan.py       torchtitan

    device.py             batches on a GPU, one ahead
    micro_batches.py      batches in parts
    loss_scale.py         one weight for every target of all ranks
    model_inputs.py       batches as a causal model of transformers takes them
    context_parallel.py   packs split over the ranks of context parallelism
    elastic.py            the state of ranks that have died

torch.distributed.checkpoint and Megatron's iterators take a `SavableLoader` as it is.
"""
