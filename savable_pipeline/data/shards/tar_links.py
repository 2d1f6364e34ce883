"""Links in a tar: GNU tar writes the second name of a file as one. They are no parts, as to webdataset.

a.jpg │ a.txt │ b.jpg │ b.txt → a.txt │ c.jpg → a.jpg      a: jpg, txt; b: jpg
"""

from __future__ import annotations

from collections.abc import Iterable

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.tar_index import TarIndex


def links_warning(address: str, count: int, first: str) -> str:
    """What to say of so many links in a dataset; `first` is the place and name of one."""
    return (
        f"{address}: {counted(count, 'member is a link', 'members are links')} to other files of their tar, such as "
        f"{first}: these are no parts of samples, here as in webdataset and Energon; pack the files again with "
        "`tar --hard-dereference`, and `--dereference` for symbolic links, which writes the bytes that they lead to"
    )


def links_told(address: str, index: TarIndex, numbers: Iterable[int]) -> str:
    """What to say of the links in these shards of an index, as far as it counts them; empty without any."""
    found = [(number, index.links[number]) for number in numbers if number in index.links] if index.links else []
    if not found:
        return ""
    number, first = found[0]
    return links_warning(
        address, sum(links.count for _, links in found), f"{first.first} in {index.shards.names[number]}"
    )
