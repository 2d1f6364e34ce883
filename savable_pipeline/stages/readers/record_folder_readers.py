"""`MdsReader` and `LitDataReader`: read samples in place from folders with an index.json; a record is a sample."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Unpack

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.file_hashes import known_hash
from savable_pipeline.data.stores.grouped_store import DECODED_BYTES, DecodedBlocks
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings


class RecordFolderReader(RecordReader):
    """Yields the records of a lane's share of a folder as samples; `kind` of a subclass is that of the folders."""

    kind: ClassVar[str]
    validate_hash: str | None = None

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lane: Lane,
        *,
        key: str | None = None,
        cache_bytes: int = DECODED_BYTES,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        self.files, self.key = os.fspath(folder), key
        blocks: DecodedBlocks[Any] = lane.shared(("decoded", cache_bytes), lambda: DecodedBlocks(cache_bytes))
        most = settings.get("unpacked_bytes", UNPACKED_BYTES)
        given: dict[str, Any] = {
            "key": key,
            "blocks": blocks,
            "unpacked_bytes": most,
            "validate_hash": self.validate_hash,
        }
        options = key, cache_bytes, self.validate_hash
        super().__init__(ReaderData.of_files(self.kind, self.files, lane, options, **given), lane, **settings)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, and the key."""
        return {**super().settings(), "key": self.key}


class MdsReader(RecordFolderReader):
    """Yields the samples of a lane's share of an MDS folder, in the order of `sp.TarShardReader`.

    Mosaic Streaming writes such folders: shards, plain or in gz, bz2 or zstd, and the index.json that names
    them. The parts of a sample are those that `savable convert` writes: `json` with the columns of texts, numbers and
    JSON, and one for each image, array and bytes: `jpg`, `png`, `npy`, or what the bytes begin like; a second one of a
    kind is `COLUMN.jpg`. A column of pickles is refused by its name.

    Args:
        folder: The folder with the index.json, or its URL (s3, gs, az, http, https, hf). For several see `sp.Blend`.
        lane: The lane of the pipeline.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        cache_bytes: The most bytes of unpacked shards, for all readers of a process with this value. A compressed shard
            is unpacked whole, and is one row group: see `custom.ParquetReader`.
        validate_hash: An algorithm of hashes in index.json, as Mosaic's readers take it: "sha1", "xxh64". Each shard is
            then read whole when it is first opened, and must have this hash. None: not read.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or a package that the compression needs is missing.
        ShardError: A file is damaged, missing or not what index.json says, or a column cannot be read.
        RemoteError: A server cannot be reached.

    Example:
        >>> import json, struct
        >>> data = b"".join(struct.pack("<I", len(text)) + text for text in (b"a cat", b"a dog"))
        >>> Path("mds").mkdir()
        >>> _ = Path("mds/shard.00000.mds").write_bytes(struct.pack("<4I", 2, 16, 25, 34) + data)
        >>> columns = {"column_names": ["caption"], "column_encodings": ["str"], "column_sizes": [None]}
        >>> file = {"basename": "shard.00000.mds", "bytes": 34}
        >>> index = {"shards": [{**columns, "format": "mds", "samples": 2, "raw_data": file}]}
        >>> _ = Path("mds/index.json").write_text(json.dumps(index))
        >>> sample = next(custom.MdsReader("mds", sp.Lane(), shuffle=False))
        >>> sample.key, sample.json()
        ('shard.00000.mds:0', {'caption': 'a cat'})
    """

    kind = "mds"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lane: Lane,
        *,
        key: str | None = None,
        cache_bytes: int = DECODED_BYTES,
        validate_hash: str | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        if validate_hash is not None and known_hash([validate_hash]) is None:
            raise ValueError(f"MdsReader: validate_hash is an algorithm of hashlib or xxhash, not {validate_hash!r}")
        self.validate_hash = validate_hash
        super().__init__(folder, lane, key=key, cache_bytes=cache_bytes, **settings)


class LitDataReader(RecordFolderReader):
    """Yields the items of a lane's share of a folder of LitData, in the order of `sp.TarShardReader`.

    LitData writes such folders: chunks, plain or with zstd by chunk, batch or sample, or with rows of Arrow in them,
    and the index.json that names them. The parts of a sample are those of `custom.MdsReader`: the values of an item are
    `json`, in their dicts and lists. A format of pickles is refused by its name, and so are encryption and other item
    loaders.

    Args:
        folder: The folder with the index.json, or its URL (s3, gs, az, http, https, hf). For several see `sp.Blend`.
        lane: The lane of the pipeline.
        key: The field with a sample's key. None: the key is `FILE:ROW`.
        cache_bytes: The most bytes of unpacked chunks and frames, for all readers of a process with this value. A
            compressed chunk or batch, or a chunk with rows of Arrow, is unpacked whole, and is one row group: see
            `custom.ParquetReader`.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or a package that the chunks need is missing.
        ShardError: A file is damaged, missing or not what index.json says, or a format cannot be read.
        RemoteError: A server cannot be reached.

    Example:
        >>> import json, struct
        >>> data = b"".join(struct.pack("<I", len(text)) + text for text in (b"a cat", b"a dog"))
        >>> Path("litdata").mkdir()
        >>> _ = Path("litdata/chunk-0-0.bin").write_bytes(struct.pack("<4I", 2, 16, 25, 34) + data)
        >>> config = {"data_format": ["str"], "data_spec": None}
        >>> index = {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 2}], "config": config}
        >>> _ = Path("litdata/index.json").write_text(json.dumps(index))
        >>> sample = next(custom.LitDataReader("litdata", sp.Lane(), shuffle=False))
        >>> sample.key, sample.json()
        ('chunk-0-0.bin:0', {'item': 'a cat'})
    """

    kind = "litdata"
