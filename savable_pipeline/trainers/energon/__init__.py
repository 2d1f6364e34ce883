"""Megatron-Energon's `TaskEncoder` and its functions on our stages; `savable_pipeline.energon` has the public names.

methods.py   which methods an encoder has, called with our random numbers; what cannot be
sources.py   the datasets that a path names, with readers, sample types and cookers; code that is not trusted
encoder.py   `FromEnergon`: the encoder as an `sp.TaskEncoder`; a sample or a batch made again from its key
stages.py    groups of batches, and batches that the encoder skips
dataset.py   `get_train_dataset` and its kind; a run of Energon's, continued at the same share of an epoch
loader.py    `get_savable_loader`, and Energon's methods for states
"""
