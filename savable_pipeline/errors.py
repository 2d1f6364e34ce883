"""Errors that the library raises about data, states and workers.

Wrong settings raise `ValueError` instead.

SavableError
├── CheckpointMismatchError   an intact state of another run: other data, settings or stages
├── StateError                bytes that are not a state: damaged, cut short, or of another version
├── ShardError                a tar or an index that is missing or damaged
├── RemoteError               a server, a network disk or the local cache that still fails after all retries
├── EncodeError               an encoder raised or is not pure; with stage, shard, key and byte offset
└── WorkerError               a worker process died, or did not answer in time

ValueError
└── MediaError                bytes that are not audio, video or an image, or differ from their header
"""


class SavableError(Exception):
    """Base class of the library's errors about data, states and workers.

    Args:
        message: What was expected, what was found, where, and what to do.

    Example:
        >>> try:
        ...     sp.TarShardReader("shards/", sp.Lane(), split="test")
        ... except sp.SavableError as error:
        ...     print(type(error).__name__)
        ShardError
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class CheckpointMismatchError(SavableError):
    """Error for a state that a run with other data, settings or stages saved.

    Args:
        message: Lists each field that differs.

    Example:
        >>> reader = sp.TarShardReader("shards/", sp.Lane())
        >>> try:
        ...     sp.ShuffleBuffer(reader, size=10).restore_state(reader.save_state())
        ... except sp.CheckpointMismatchError as error:
        ...     print(str(error).split(":")[0])
        this is no state of ShuffleBuffer
    """


class StateError(SavableError):
    """Error for a state that is damaged, cut short, or of another version.

    Args:
        message: What is wrong, and what to do.

    Example:
        >>> try:
        ...     sp.merge_states([{"model": 0}])
        ... except errors.StateError as error:
        ...     print(str(error).split(":")[0])
        this is no state of a SavableLoader
    """


class ShardError(SavableError):
    """Error for a shard or index that is missing, damaged, or changed since indexing.

    Args:
        message: What is wrong, with which shard, and what to do.
        reason: A few words under which skipped samples are counted, such as "missing shard", or "no such path" if the
            path does not exist.

    Example:
        >>> _ = Path("broken.tar").write_bytes(b"this is not a tar")
        >>> try:
        ...     sp.TarShardReader("broken.tar", sp.Lane())
        ... except sp.ShardError as error:
        ...     print(error.reason)
        damaged shard
    """

    def __init__(self, message: str = "", *, reason: str = "damaged shard") -> None:
        super().__init__(message)
        self.reason = reason


class RemoteError(SavableError):
    """Error for a server, network disk or cache that still fails after all retries.

    It says nothing about the data, so no policy counts it as a data error.

    Args:
        message: What failed, and what to do.

    Example:
        >>> issubclass(errors.RemoteError, sp.SavableError)
        True
    """


class EncodeError(SavableError):
    """Error of a task encoder, which raised or returned two results for a sample.

    `__cause__` is the encoder's own error.

    Args:
        message: Names the stage, and the sample's shard, key and byte offset.

    Example:
        >>> class Broken(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["caption"]
        >>> try:
        ...     next(sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Broken()))
        ... except sp.EncodeError as error:
        ...     print(str(error).split(". ")[0])
        Broken.encode failed on sample 's000000' of 0.tar: KeyError: 'caption'
    """


class WorkerError(SavableError):
    """Error for worker processes that died or exceeded `timeout` too often.

    It also replaces an error of a class that this process cannot load, if a stage raised one in a worker. The loader's
    state is intact: save it, or continue.

    Args:
        message: What happened to which worker, and what to do.

    Example:
        >>> issubclass(sp.WorkerError, sp.SavableError)
        True
    """


class MediaError(ValueError):
    """Error for broken, truncated or unsupported media, or media unlike their header.

    It is a data error, as other errors that an encoder raises. `on_error` of `Encode` decides about it, and skipped
    samples are counted under its name.

    Args:
        message: The part, its sample and shard, and what is wrong.

    Example:
        >>> issubclass(errors.MediaError, ValueError)
        True
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
