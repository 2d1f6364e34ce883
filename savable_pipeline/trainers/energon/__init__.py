"""Megatron-Energon's `TaskEncoder` and functions on our stages.

`savable_pipeline.energon` has the public names.

    methods.py   the methods of an encoder, called with our random numbers; which methods are rejected
    sources.py   the datasets that a path names, with readers, sample types and cookers; code that is not trusted
    encoder.py   `FromEnergon`: the encoder as an `sp.TaskEncoder`; a sample or batch rebuilt from its key
    stages.py    groups of batches, and batches that the encoder skips
    dataset.py   `get_train_dataset` and similar; a run of Energon, resumed at the same fraction of an epoch
    loader.py    `get_savable_loader`, and Energon's methods for states
"""
