"""Public names, one a line, for type checkers, editors and `public_names`."""

from savable_pipeline.core.batch_memory import empty as empty
from savable_pipeline.core.batch_memory import stack as stack
from savable_pipeline.core.lane import Lane as Lane
from savable_pipeline.core.rng import Rng as Rng
from savable_pipeline.data.dataset.opening import open_dataset as open_dataset
from savable_pipeline.data.dataset.sample import Sample as Sample
from savable_pipeline.data.media.clips import Clips as Clips
from savable_pipeline.errors import CheckpointMismatchError as CheckpointMismatchError
from savable_pipeline.errors import EncodeError as EncodeError
from savable_pipeline.errors import SavableError as SavableError
from savable_pipeline.errors import ShardError as ShardError
from savable_pipeline.errors import WorkerError as WorkerError
from savable_pipeline.run.engine.worker_settings import Workers as Workers
from savable_pipeline.run.loader.ledger import Ledger as Ledger
from savable_pipeline.run.loader.ranks import Ranks as Ranks
from savable_pipeline.run.loader.savable_loader import SavableLoader as SavableLoader
from savable_pipeline.run.loader.settings import Acknowledge as Acknowledge
from savable_pipeline.run.loader.stateful_dataset import StatefulDataset as StatefulDataset
from savable_pipeline.run.nodes.node_workers import RayWorkers as RayWorkers
from savable_pipeline.run.nodes.node_workers import SocketWorkers as SocketWorkers
from savable_pipeline.run.state.state_dict import merge_states as merge_states
from savable_pipeline.stages.batcher import Batcher as Batcher
from savable_pipeline.stages.blending.blend import Blend as Blend
from savable_pipeline.stages.blending.schedule import Schedule as Schedule
from savable_pipeline.stages.cost import attention_cost as attention_cost
from savable_pipeline.stages.encode import Encode as Encode
from savable_pipeline.stages.packing.balance import Balance as Balance
from savable_pipeline.stages.packing.packer import OnlinePacker as OnlinePacker
from savable_pipeline.stages.pipeline_starts import blend as blend
from savable_pipeline.stages.pipeline_starts import join as join
from savable_pipeline.stages.pipeline_starts import mixture as mixture
from savable_pipeline.stages.pipeline_starts import read as read
from savable_pipeline.stages.pipeline_value import Pipeline as Pipeline
from savable_pipeline.stages.readers.readers import TarShardReader as TarShardReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer as ShuffleBuffer
from savable_pipeline.stages.task_encoder import Decoded as Decoded
from savable_pipeline.stages.task_encoder import Skip as Skip
from savable_pipeline.stages.task_encoder import TaskEncoder as TaskEncoder
from savable_pipeline.tools.convert.conversion import convert as convert
from savable_pipeline.tools.convert.shard_writer import ShardWriter as ShardWriter

__version__: str
