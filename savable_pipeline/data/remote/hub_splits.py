"""`check_one_split`: a folder of the Hub is read as one dataset only where it is one.

Its splits and configurations are those that the card says (`configs:` at the top of README.md), or else those that the
names of files tell, as HF `datasets` reads them:

    data/train-00000-of-00002.parquet    split train
    test/a.jsonl, corpus_test.jsonl      split test
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.shards.hub_address import HubAddress
from savable_pipeline.data.shards.yaml_limits import load_yaml
from savable_pipeline.errors import ShardError

_NUMBERED = re.compile(r"(.*/)?([\w.]+)-\d{5}-of-\d{5}[^/]*")
_WORDS = "train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_WORD = re.compile(rf"(?:.*[/._ -]|.*\d|)({_WORDS})(?=[/._ \d-]|$)")
_CARD = re.compile(rb"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
_SHOWN = 12


def check_one_split(root: str, names: Iterable[str], suffix: str, session: Session) -> None:
    """Raises `ShardError` for files of several splits below an address of the Hub, with the names to choose from."""
    whole = not HubAddress.of(root).path
    found = _of_card(session.call("card", root), suffix) if whole else {}
    found = found or _of_names(names, suffix)
    if len(found) > 1:
        shown = ", ".join(f"{pattern} ({name})" for name, pattern in list(found.items())[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ShardError(
            f"{root}: {len(found)} splits or configurations lie there, which are not one dataset: name the files of "
            f"one behind this address, /{shown}{more}; or a list of several"
        )


def _of_names(names: Iterable[str], suffix: str) -> dict[str, str]:
    """A glob for each split that these names tell, if they tell several."""
    found: dict[str, str] = {}
    for name in names:
        numbered, word = _NUMBERED.fullmatch(name), _WORD.match(name)
        if numbered:
            found.setdefault(numbered[2], f"{numbered[1] or ''}{numbered[2]}-*{suffix}")
        elif word:
            begin, rest = name[: word.start(1)], name[word.end(1) :]
            folder = begin.rpartition("/")[0] + "/" if "/" in begin else ""
            glob = f"{begin}{word[1]}/**/*{suffix}" if rest.startswith("/") else f"{folder}*{word[1]}*{suffix}"
            found.setdefault(word[1], glob)
    return found if len(found) > 1 else {}


def _of_card(card: bytes, suffix: str) -> dict[str, str]:
    """The same for each split of each configuration of a card; empty for a card that says nothing of them."""
    head = _CARD.match(card)
    try:
        configs: Any = load_yaml(head[1]).get("configs") if head else None
        found = {
            name: pattern if pattern.endswith(suffix) else _ended(pattern, suffix)
            for config in configs or ()
            for name, pattern in _splits(config)
        }
    except (ValueError, AttributeError, TypeError, LookupError):  # written by anybody: then names tell
        return {}
    return found


def _splits(config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    name, files = config["config_name"], config.get("data_files", f"{config.get('data_dir', '.')}/**")
    for each in files if isinstance(files, list) else [files]:
        split, path = (each["split"], each["path"]) if isinstance(each, dict) else ("train", each)
        yield f"{name}: {split}", path if isinstance(path, str) else path[0]


def _ended(pattern: str, suffix: str) -> str:
    return f"{pattern}/*{suffix}" if pattern.endswith("**") else f"{pattern.rstrip('*')}*{suffix}"
