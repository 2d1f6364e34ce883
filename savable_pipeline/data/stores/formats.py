"""All formats that are read in place. A new one is a file, and its name here.

Where several could be meant, `recognizer.recognize` asks those with markers first, in this order.
"""

from __future__ import annotations

from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.stores.arrow import ARROW
from savable_pipeline.data.stores.csv_table import CSV
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.data.stores.jsonl import JSONL
from savable_pipeline.data.stores.kaldi import KALDI
from savable_pipeline.data.stores.lerobot import LEROBOT
from savable_pipeline.data.stores.parquet import PARQUET
from savable_pipeline.data.stores.record_kinds import LITDATA, MDS
from savable_pipeline.data.stores.shar import SHAR
from savable_pipeline.data.stores.table_store import JSON
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.data.stores.token_store import TOKENS

FORMATS = (TARS, MDS, LITDATA, LEROBOT, PARQUET, ARROW, JSONL, CSV, JSON, TOKENS, SHAR, KALDI, FOLDER)


def format_named(name: str) -> Format:
    """Return the format of this name. Raises ValueError for none."""
    found = next((form for form in FORMATS if form.name == name), None)
    if found is None:
        raise ValueError(f"no format {name!r}. Use one of {', '.join(form.name for form in FORMATS)}")
    return found
