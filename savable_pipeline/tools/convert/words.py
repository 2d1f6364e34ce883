"""Kinds of sources in words, for `savable --help`, which imports only this file."""

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
