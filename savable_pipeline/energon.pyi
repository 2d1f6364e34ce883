"""Public names, one a line, for type checkers, editors and `public_names`."""

from megatron.energon import WorkerConfig as WorkerConfig

from savable_pipeline.trainers.energon.dataset import AtShare as AtShare
from savable_pipeline.trainers.energon.dataset import EnergonDataset as EnergonDataset
from savable_pipeline.trainers.energon.dataset import LimitDataset as LimitDataset
from savable_pipeline.trainers.energon.dataset import RepeatDataset as RepeatDataset
from savable_pipeline.trainers.energon.dataset import begin_at_share as begin_at_share
from savable_pipeline.trainers.energon.dataset import get_train_dataset as get_train_dataset
from savable_pipeline.trainers.energon.dataset import get_val_dataset as get_val_dataset
from savable_pipeline.trainers.energon.dataset import get_val_datasets as get_val_datasets
from savable_pipeline.trainers.energon.encoder import FromEnergon as FromEnergon
from savable_pipeline.trainers.energon.loader import EnergonLoader as EnergonLoader
from savable_pipeline.trainers.energon.loader import get_loader as get_loader
from savable_pipeline.trainers.energon.loader import get_savable_loader as get_savable_loader
