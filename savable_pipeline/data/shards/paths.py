"""Finds the local shards that a user names by a folder, a glob, a brace pattern, one file, or a list of these.

`a-{00..02}.tar`, `{x,y{1,2}}` and `{a..e..2}` mean what braceexpand says, and are bounded. Where a folder or a file is
no dataset, the error says what makes one of it. `HubAddress` is a dataset on Hugging Face's Hub, or what lies in it:
`hf://datasets/ORG/NAME[@REVISION][/PATH]`.
"""

from __future__ import annotations

import glob
import logging
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

from savable_pipeline.core.files import lacks_handles, read_regular, with_handles
from savable_pipeline.core.wording import clean_address, has_user
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

Shards: TypeAlias = str | os.PathLike[str] | Iterable["str | os.PathLike[str]"]
Unlistable: TypeAlias = Callable[["ShardError"], None]

LANCE = ".lance"
LANCE_CURE = (
    "write it as Parquet, "
    '`pyarrow.dataset.write_dataset(lance.dataset(FOLDER).scanner().to_reader(), NEW, format="parquet")`'
)
HUB = "hf://"
_ADDRESS = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FIXED = re.compile(r"(?<=^hf://datasets/)([^@]+)@[0-9a-f]{40}")
_BETWEEN = re.compile(r"::(?![^\[\]]*\])")  # but not in an address such as http://[::1]/
ALL = "."  # the name of the only shard where a folder is one
NOT_THERE = "no such path"  # the reason of an error
NO_SHARD = "no shard"  # of another
SCHEMES = ("s3", "gs", "az", "http", "https", "hf")  # of URLs that can be read
LARGEST_INDEX = 1 << 30  # bytes of an index.json, of another program
_LONGEST_PATH = 4096  # characters
_NUMBERS = re.compile(r"\{(-?\d{1,20})\d*\.\.(-?\d{1,20})\d*(?:\.\.(-?\d{1,20})\d*)?\}")
_MOST_NAMES = 1_000_000  # that one pattern may stand for
_MOST_CHARACTERS = 1 << 28  # of all of these
_MOST_BRACES = 1000
_READERS = {".tar": "sp.TarShardReader", ".parquet": "custom.ParquetReader", ".arrow": "custom.ArrowReader"}
_PARTS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".txt")


@dataclass(frozen=True, slots=True)
class ShardKind:
    """The files that are shards of one kind: how their names end, and those beside them that cannot be read in place.

    `refused` are the endings of the latter, `compressed` what one and several of them are called, `cure` what to do.
    """

    suffixes: tuple[str, ...]
    refused: tuple[str, ...] = ()
    compressed: tuple[str, str] = ("", "")
    cure: str = ""
    left_out: Callable[[str], bool] = lambda name: False  # of the names in a folder, those that are no data
    listing: str = ""  # a file in the folder that names them
    listed: Callable[[bytes], list[tuple[str, ...]]] = lambda listing: []  # the names that each may have; ValueError

    def names(self, folder: str, listing: bytes) -> list[tuple[str, ...]]:
        """The names that each file may have which a `listing` names. Raises `ShardError` if it cannot be read."""
        try:
            return self.listed(listing)
        except ValueError as error:
            raise ShardError(f"{folder}/{self.listing}: {error}") from error

    def names_in(self, folder: str, listing: bytes, is_there: Callable[[str], bool], missing_too: bool) -> list[str]:
        """Those of them that are there, sorted: of the names that each may have, the first that `is_there`.

        Raises `ShardError` also for a file that is not there, unless `missing_too`.
        """
        found = set()
        for names in self.names(folder, listing):
            written = max(names, key=len)  # compressed, where the others are what was unpacked
            name = next((name for name in names if is_inside(name) and is_there(name)), written)
            if not is_inside(name) or (name in found) or not (missing_too or is_there(name)):
                fault = "twice" if name in found else "and not there; copy the whole folder"
                raise ShardError(f"{folder}/{name}: named by {self.listing}, {fault}", reason="missing shard")
            found.add(name)
        return sorted(found)

    @property
    def endings(self) -> tuple[str, ...]:
        """How names end, of files that can be read and of those that cannot."""
        return (*self.suffixes, *self.refused)


TAR_FILES = ShardKind(
    (".tar",),
    (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"),
    ("a compressed tar", "compressed tars"),
    "Run `savable convert`",
)


def raise_it(error: ShardError) -> None:
    """Raises the error: what `find_shards` does about a folder that cannot be listed unless it is told otherwise."""
    raise error


def as_names(shards: Shards) -> str | tuple[str, ...]:
    """What a user gave as plain strings, which can be compared."""
    one = isinstance(shards, str | os.PathLike)
    return os.fspath(shards) if one else tuple(os.fspath(spec) for spec in shards)  # type: ignore[arg-type,union-attr]


def find_shards(
    shards: Shards,
    kind: ShardKind = TAR_FILES,
    *,
    missing_too: bool = False,
    unlistable: Callable[[ShardError], None] = raise_it,
    visited: Callable[[str], None] = lambda folder: None,
) -> tuple[Path, list[str]]:
    """The root of the dataset and the names of its shards relative to it, sorted.

    The root is the given folder, or the deepest folder that holds all the shards. Raises `ShardError` if there is no
    shard, if one is named twice, and if a named file does not exist unless `missing_too`. `unlistable` is called with
    the error of each folder that cannot be listed, `visited` with each folder below a given one, relative to it.
    """
    specs = spelled_out(shards)
    if not specs:
        raise ShardError("the list of shards is empty")
    if kind.listing:
        return _listed_below(specs, kind, missing_too)
    if kind.suffixes == (ALL,):
        return Path(specs[0]).absolute(), [ALL]
    if len(specs) == 1 and Path(specs[0]).is_dir():
        root = Path(specs[0]).absolute()  # a relative one would change its meaning with the working folder
        return root, with_handles(partial(_files_below, root, kind, unlistable, visited))
    paths = [path for spec in specs for path in _expand(spec, kind, missing_too, unlistable)]
    if kind is TAR_FILES and len(paths) == 1 and (instead := instead_of_file(paths[0])):
        raise ShardError(f"{paths[0]}: not a tar. {instead}", reason=NO_SHARD)
    if len(set(paths)) < len(paths):
        twice = Counter(paths).most_common(1)[0][0]
        raise ShardError(f"{twice}: the same shard is named twice")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return root, sorted(path.relative_to(root).as_posix() for path in paths)


def _listed_below(specs: list[str], kind: ShardKind, missing_too: bool) -> tuple[Path, list[str]]:
    root = Path(specs[0]).absolute()
    try:
        listing = read_regular(root / kind.listing, LARGEST_INDEX) if len(specs) == 1 else b""
    except OSError as error:
        raise ShardError(
            f"{root / kind.listing}: {error.strerror}. Name the one folder that has it", reason=NOT_THERE
        ) from error
    if len(specs) > 1:
        raise ShardError(f"{root} and {len(specs) - 1} more: read each folder with {kind.listing} by itself")
    return root, kind.names_in(str(root), listing, partial(_is_file, root), missing_too)


def _is_file(root: Path, name: str) -> bool:
    return os.path.isfile(root / name)  # noqa: PTH113  # that of a Path raises for a name that is too long


def spelled_out(shards: Shards) -> list[str]:
    """Each path or URL by itself: `a::b` parted, `~`, `$VAR` and `file://` replaced where no file is named so.

    Raises `ShardError` for what only other loaders read, and says what to write instead.
    """
    specs = [os.fspath(spec) for spec in ([shards] if isinstance(shards, str | os.PathLike) else shards)]
    parts = [part for spec in specs for part in ([spec] if _is_there(spec) else _BETWEEN.split(spec))]
    return [_spelled_out(part) for part in parts]


def is_remote(shards: Shards) -> bool:
    """Whether these are URLs. Raises `ShardError` for a mixture with files, and for an unsupported URL."""
    specs = spelled_out(shards)
    remote = [spec for spec in specs if "://" in spec]
    if remote and len(remote) < len(specs):
        raise ShardError(f"{clean_address(remote[0])}: mixed with local shards. Read remote and local ones separately")
    for spec in remote:
        if spec.split("://")[0] not in SCHEMES:
            raise ShardError(f"{clean_address(spec)}: unsupported URL. Use one of {', '.join(SCHEMES)}")
        if has_user(spec):
            raise ShardError(
                f"{clean_address(spec)}: a user or password in a URL would appear in logs. Use environment variables"
            )
        if "?" in spec and spec.startswith("http"):
            raise ShardError(f"{clean_address(spec)}: a URL with a query is of one object. Pass a plain address")
    return bool(remote)


def _spelled_out(spec: str) -> str:
    if _is_there(spec):
        return spec
    if spec.startswith("pipe:"):
        instead = _instead_of_pipe(spec)
        raise ShardError(clean_address(f"{spec}: pipe: cannot be read at an offset. Write {instead} instead"))
    if is_hub(spec):
        HubAddress.of(spec)
    spec = os.path.expandvars(spec)
    if spec.startswith("file:"):
        return _path_of_url(spec)
    return os.path.expanduser(spec)  # noqa: PTH111  # a Path would lose a slash at the end and those of a URL


def _is_there(spec: str) -> bool:
    return "\0" not in spec and len(spec) < _LONGEST_PATH and os.path.lexists(spec)


def _path_of_url(spec: str) -> str:
    """The path of `file:///a`, `file://localhost/a` or `file:a`."""
    address = spec.removeprefix("file:")
    if address.startswith("//"):
        host, slash, path = address[2:].partition("/")
        if host not in ("", "localhost"):
            raise ShardError(f"{spec}: names a file of the machine {host!r}. Start local paths with file:///")
        address = slash + path
    return unquote(address)


def _instead_of_pipe(spec: str) -> str:
    url = re.search(r"\b(?:s3|gs|az|https?)://[^\s'\"|;]+", spec)
    return url[0] if url else "the paths of the tars, or their URL"


def _expand(spec: str, kind: ShardKind, missing_too: bool, unlistable: Callable[[ShardError], None]) -> list[Path]:
    if "://" in spec:
        url = clean_address(spec)
        raise ShardError(f"{url}: expected files, not a URL. Index remote shards by `savable index {url}`")
    paths: list[Path] = []
    for pattern in expand_braces(spec):
        path = Path(pattern).absolute()
        if path.is_dir():
            paths += [path / name for name in with_handles(partial(_files_below, path, kind, unlistable))]
        elif glob.has_magic(pattern) and not path.exists():
            matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
            if not matches:
                raise ShardError(f"{pattern}: no file matches", reason=NOT_THERE)
            paths += [Path(match).absolute() for match in matches]
        elif path.is_file() or (missing_too and path.name.endswith(kind.suffixes)):
            paths.append(path)
        else:
            here = "" if path == Path(pattern) else f" (current folder: {Path.cwd()})"
            why = "The environment has no such variable" if "$" in pattern else "Check the path"
            if "$" not in pattern and kind is TAR_FILES and not path.suffix:
                why += into_folder(pattern)
            raise ShardError(f"{pattern}: no such file or folder{here}. {why}", reason=NOT_THERE)
    for path in paths:
        if path.name.endswith(kind.refused):
            raise ShardError(f"{path}: {kind.compressed[0]} cannot be read at an offset. {kind.cure}")
    return paths


def is_inside(name: str) -> bool:
    """Whether a relative name stays inside the folder that it is relative to."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _files_below(
    root: Path,
    kind: ShardKind,
    unlistable: Callable[[ShardError], None],
    visited: Callable[[str], None] = lambda folder: None,
) -> list[str]:
    names = []
    compressed = []
    lance = ""  # a folder of files of Lance
    for folder, folders, files in os.walk(root, onerror=lambda error: unlistable(_unlistable(error))):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(folder).relative_to(root)
        visited(here.as_posix())
        for name in folders:
            if (root / here / name).is_symlink():
                log.warning("%s: a link to a folder is skipped. Name it as well to read it", here / name)
        wanted = [name for name in files if name.endswith(kind.suffixes) and name[0] != "." and not kind.left_out(name)]
        prefix = "" if here == Path() else f"{here.as_posix()}/"
        names += [prefix + name for name in wanted]
        compressed += [name for name in files if name.endswith(kind.refused)]
        lance = lance or (folder if any(name.endswith(LANCE) for name in files) else "")
    if not names:
        instead = f", but {len(compressed)} {kind.compressed[1]}. {kind.cure}" if compressed else ""
        if lance:
            instead += f". {lance} is of Lance, which is not read here: {LANCE_CURE}"
        instead = instead or instead_of_folder(root) or (into_folder(root) if kind is TAR_FILES else "")
        raise ShardError(
            f"{root}: no {' or '.join(kind.suffixes)} file in this folder or below it{instead}", reason=NO_SHARD
        )
    if compressed:
        log.warning("%s: %d %s are skipped. %s", root, len(compressed), kind.compressed[1], kind.cure)
    return sorted(names)


def _unlistable(error: OSError) -> ShardError:
    if lacks_handles(error):
        raise error
    return ShardError(
        f"{error.filename}: {error.strerror}: this folder cannot be listed. Permit it, or move it elsewhere",
        reason="unlistable folder",
    )


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern stands for, the last braces counting fastest; braces that do not pair are text.

    Raises `ShardError` if there are too many of them.
    """
    if "{" not in pattern:
        return [pattern]
    numbers = sum(abs(int(last) - int(first)) + 1 for first, last, _ in _NUMBERS.findall(pattern))
    flat = [] if re.search(r"\{[^{}]*\{", pattern) else re.findall(r"\{[^{}]*\}", pattern)
    numbers = max(numbers, math.prod(map(_names_in, flat)))
    names, characters = [], 0
    if numbers <= _MOST_NAMES and pattern.count("{") <= _MOST_BRACES:  # all numbers of a range are made at once
        try:
            for name in braceexpand(pattern, escape=False):
                names.append(name)
                characters += len(name)
                if len(names) > _MOST_NAMES or characters > _MOST_CHARACTERS:
                    break
            else:
                return names
        except UnbalancedBracesError:
            return [pattern]
        except RecursionError:
            pass
    raise ShardError(f"{pattern[:200]}: the braces mean more than {_MOST_NAMES:,} names, or too long ones")


def _names_in(braces: str) -> int:
    """How many names braces stand for that have no others in them; of letters, one at least."""
    found = _NUMBERS.fullmatch(braces)
    if found is None:
        return braces.count(",") + 1
    first, last, step = (int(number or 1) for number in found.groups())
    return abs(last - first) // max(1, abs(step)) + 1


def instead_of_folder(folder: Path) -> str:
    """How a folder without shards of the wanted kind becomes a dataset, or is one; "" for an empty one."""
    holds_files = False
    for _, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            holds_files = True
            reader = _READERS.get(os.path.splitext(name)[1])  # noqa: PTH122  # a Path per name is slow
            if reader is not None:
                return f". {name} is there: read it by {reader}"
    return f". Convert its files by `savable convert {shlex.quote(str(folder))} DST`" if holds_files else ""


def into_folder(folder: str | Path) -> str:
    """The command that fills a folder for tars, which is empty or missing."""
    return f"\nTo write shards there: `savable convert SRC {shlex.quote(str(folder))}`"


def instead_of_file(path: Path) -> str:
    """The command that makes tars of the folder of a picture or a text; "" for any other file."""
    if path.name.lower().endswith(_PARTS):
        return f"Convert its folder by `savable convert {shlex.quote(str(path.parent))} DST`"
    return ""


class HubAddress(NamedTuple):
    """What an address of the Hub names: `path` is empty for the whole dataset."""

    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> HubAddress:
        """The parts of an address. Raises `ShardError` for one that names no dataset."""
        found = _ADDRESS.fullmatch(url)
        if found is None:
            raise ShardError(
                f"{url}: not a dataset of the Hub. Write hf://datasets/ORG/NAME, with @REVISION and /PATH if needed"
            )
        return cls(found["repo"], unquote(found["revision"] or "main"), (found["path"] or "").strip("/"))

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is a commit: what is there never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def dataset(self) -> str:
        """The address of the whole dataset at the revision."""
        return f"{HUB}datasets/{self.repo}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that copies it to a disk."""
        only = f" --include '{self.path}/*'" if self.path else ""
        name = self.repo.rpartition("/")[2]
        return f"hf download {self.repo} --repo-type dataset --revision {self.revision}{only} --local-dir {name}"

    def at(self, commit: str) -> str:
        """The same address with a commit in place of a branch or a tag."""
        return f"{HUB}datasets/{self.repo}@{commit}{'/' if self.path else ''}{self.path}"

    def below(self, name: str) -> str:
        """The path in the dataset of a name relative to this address."""
        return f"{self.path}/{name}" if self.path else name


def is_hub(url: str) -> bool:
    """Whether this is an address of the Hub."""
    return url.startswith(HUB)


def without_commit(address: str) -> str:
    """An address of the Hub without its commit, any other as it is: what caches files of all commits together."""
    return _FIXED.sub(r"\1", address)


def commits_of(addresses: Mapping[str, str]) -> dict[str, bytes]:
    """The commits among the addresses of a state, by what was named: the reverse of `addresses_of`."""
    return {name: HubAddress.of(at).revision.encode() for name, at in addresses.items() if is_hub(name)}


def addresses_of(pinned: Mapping[str, bytes]) -> dict[str, str]:
    """Where the datasets of the Hub lie that a run has pinned, by what was named: a state keeps it."""
    return {name: HubAddress.of(name).at(commit.decode()) for name, commit in pinned.items() if is_hub(name)}
