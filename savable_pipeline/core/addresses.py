"""`clean_address`: an address as it may be printed, logged or written: without passwords, tokens and signatures."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_USER = re.compile(r"(?<=://)[^/\s?#]*@")
_QUERY = re.compile(r"(?P<kept>https?://[^\s?#'\"]*|\w+://[^\s?#'\"]*(?=\?[^\s'\"]*=))\?[^\s'\"]*")


def clean_address(text: str) -> str:
    """The text without the user and password, and without the query, of each URL in it.

    A `?` in the URL of a bucket is one of a glob, unless a `=` follows.

    >>> from savable_pipeline.core.addresses import clean_address
    >>> clean_address("https://me:secret@host/a.tar?token=5: no such object")
    'https://host/a.tar?…'
    """
    return _QUERY.sub(r"\g<kept>?…", _USER.sub("", text))


def has_user(url: str) -> bool:
    """Whether a URL has a user or a password in it."""
    return "@" in urlsplit(url).netloc
