"""The errors that the library raises about data, states and workers; wrong settings raise `ValueError`.

SavableError
├── CheckpointMismatchError   a whole state, but of another run: other data, settings or stages
├── StateError                bytes that are not a state: damaged, cut short, or of another version
├── ShardError                a tar or an index that cannot be read as what it should be
├── RemoteError               a server or the cache before it failed for so long that we gave up
├── EncodeError               an encoder raised, or is not pure; says stage, shard, key and offset
└── WorkerError               a worker process died, or did not answer in time
"""


class SavableError(Exception):
    """Base of every error that this library raises about data, states and workers."""


class CheckpointMismatchError(SavableError):
    """The state was saved by a run whose data or settings differ; the message lists each field."""


class StateError(SavableError):
    """The bytes are not a state that this version can read."""


class ShardError(SavableError):
    """A shard or its index is missing, damaged, or not what the index says; `reason` says in few words which."""

    def __init__(self, message: str = "", *, reason: str = "damaged shard") -> None:
        super().__init__(message)
        self.reason = reason


class RemoteError(SavableError):
    """A server that holds shards, or the cache before it, failed for so long that we gave up; no fault of the data."""


class EncodeError(SavableError):
    """A task encoder raised, or gave two results for one sample; the message says where, `__cause__` is its error."""


class WorkerError(SavableError):
    """A worker process ended or stopped answering."""
