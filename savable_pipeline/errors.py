"""The errors that the library raises about data, states and workers. Wrong settings raise `ValueError` instead.

SavableError
├── CheckpointMismatchError   an intact state of another run: other data, settings or stages
├── StateError                bytes that are not a state: damaged, cut short, or of another version
├── ShardError                a tar or an index that is missing or damaged
├── RemoteError               a server, a network disk, or the cache here, still failed after all retries
├── EncodeError               an encoder raised, or is not pure; with stage, shard, key and byte offset
└── WorkerError               a worker process died, or did not answer in time

ValueError
└── MediaError                bytes that are no audio, video or image, or not what their header says
"""


class SavableError(Exception):
    """Base of every error that this library raises about data, states and workers.

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
    """The state was saved by a run with other data, settings or stages.

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
    """The bytes or the dict are no state that this release can read: damaged, cut short, or of another version.

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
    """A shard or its index is missing, damaged, or changed since it was indexed.

    Args:
        message: What is wrong, with which shard, and what to do.
        reason: What is wrong in a few words, such as "missing shard" or, where the given path does not exist, "no such
            path"; skipped samples are counted under it.

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
    """A server or network disk with shards, or the cache here, still failed after all retries; no fault of the data.

    Args:
        message: What failed, and what to do.

    Example:
        >>> issubclass(errors.RemoteError, sp.SavableError)
        True
    """


class EncodeError(SavableError):
    """A method of a task encoder raised, or `encode` returned two results for one sample.

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
    """Worker processes died or exceeded `timeout` too often, or a stage raised an error of a foreign class in one.

    The loader's state is whole: save it, or continue.

    Args:
        message: What happened to which worker, and what to do.

    Example:
        >>> issubclass(sp.WorkerError, sp.SavableError)
        True
    """


class MediaError(ValueError):
    """Media that are broken, cut short, of a format that is not read, or not what their header says.

    A fault of the data, as other errors that an encoder raises: `on_error` of `Encode` is asked, and samples that are
    skipped are counted under its name.

    Args:
        message: The part, its sample and shard, and what is wrong.

    Example:
        >>> issubclass(errors.MediaError, ValueError)
        True
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
