"""What sources are called, and the fields that name files: `savable --help` says it, and imports nothing for it."""

from __future__ import annotations

WORDS = {
    "folder": "a folder of files",
    "jsonl": "JSONL",
    "json": "a JSON array",
    "csv": "a table (CSV or TSV)",
    "mds": "an MDS folder of Mosaic Streaming",
    "litdata": "a folder of LitData",
    "packed": "compressed tars",
    "tars": "tars",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "hf": "a folder that `save_to_disk` of HF datasets wrote",
    "hub": "a clone of a dataset of the HF hub, in Parquet",
}
FILE_FIELDS = ("image", "audio", "video", "file", "file_name")  # of records
