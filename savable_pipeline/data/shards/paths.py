"""Finds the local shards that a user names by folders, globs, braces or paths.

`a-{00..02}.tar`, `{x,y{1,2}}` and `{a..e..2}` mean what braceexpand says, and are bounded. `HubAddress` is a dataset
on Hugging Face's Hub, or a folder or file in it: `hf://datasets/ORG/NAME[@REVISION][/PATH]`.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast
from urllib.parse import unquote

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

from savable_pipeline.core.files import lacks_handles, regular_file, with_handles
from savable_pipeline.core.wording import clean_address, has_user
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

Shards: TypeAlias = str | os.PathLike[str] | Iterable["str | os.PathLike[str]"]
Unlistable: TypeAlias = Callable[["ShardError"], None]

LANCE = ".lance"
LANCE_FIX = (
    "write it as Parquet, "
    '`pyarrow.dataset.write_dataset(lance.dataset(FOLDER).scanner().to_reader(), NEW, format="parquet")`'
)
HUB = "hf://"
_ADDRESS = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMMIT_IN_ADDRESS = re.compile(r"(?<=^hf://datasets/)([^@]+)@[0-9a-f]{40}")
_LITERAL_URL = re.compile(r"(?:s3|gs|az|https?)://(?!.*(?:\$|::))")  # a URL without variables and separators
_SEPARATOR = re.compile(r"::(?![^\[\]]*\])")  # a separator, unless it is in an address such as http://[::1]/
# hidden names of desktops, archives, a NAS and Spark
_TOOL_NAMES = ("Thumbs.db", "desktop.ini", "__MACOSX", "@eaDir", "_temporary")
_LEFTOVERS = ("cache-", "tmp")  # prefixes of .arrow files that HF `datasets` leaves in folders
ALL = "."  # name of the only shard if a folder is one shard
TARS_END = ".tar"
PACKED_FIX = "Unpack it, or run `savable convert`"
PACKED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")  # lower-case suffixes of compressed tars
NO_SUCH_PATH = "no such path"  # reason of an error
NO_SHARD = "no shard"  # reason of an error
URL_SCHEMES = ("s3", "gs", "az", "http", "https", "hf")  # schemes of supported URLs
LARGEST_INDEX = 1 << 30  # bytes of another program's index.json
_LONGEST_PATH = 4096  # in characters
_NUMBERS = re.compile(r"\{(-?\d{1,20})\d*\.\.(-?\d{1,20})\d*(?:\.\.(-?\d{1,20})\d*)?\}")
_MOST_NAMES = 1_000_000  # most names that one pattern may expand to
_MOST_CHARACTERS = 1 << 28  # most characters of all of these names
_MOST_BRACES = 1000


def raise_error(error: ShardError) -> None:
    """Raise `error`: the default handler for a folder that cannot be listed."""
    raise error


def as_names(shards: Shards) -> str | tuple[str, ...]:
    """Return a user's paths as plain strings, which can be compared.

    Raises TypeError for something else, and ValueError for an empty path, as of an environment variable that is unset.
    """
    many = isinstance(shards, Iterable) and not isinstance(shards, str | bytes | os.PathLike)
    specs: list[Any] = [*cast(Iterable[Any], shards)] if many else [shards]
    for spec in specs:
        if not isinstance(spec, str | os.PathLike):
            raise TypeError(f"the data must be a path, a URL, a list of these or a store, not {spec!r}")
        if not os.fspath(spec):
            raise ValueError('the path of the data is empty. Write "." for the current folder')
    return tuple(os.fspath(spec) for spec in specs) if many else os.fspath(specs[0])


@dataclass(frozen=True, slots=True)
class ListedFiles:
    """Local files that a user names.

    `names` are relative to `root`, sorted, without hidden ones. With `whole` they are all files below a folder.
    Otherwise they were named by paths, globs and braces, and may be missing. `exact` has those that were named by a
    path. `chosen` has those of the recognized format, or is None before the recognition. `complete` says that no file
    is missing. `folders` are the visited folders, `unlistable` the errors of others, and `started_ns` is the monotonic
    time at the start of the listing.
    """

    root: Path
    names: list[str]
    whole: bool = False
    exact: frozenset[str] = frozenset()
    chosen: list[str] | None = None
    complete: bool = False
    folders: list[str] = field(default_factory=list)
    unlistable: list[ShardError] = field(default_factory=list)
    started_ns: int = 0

    def heads(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the first bytes of readable files, by name.

        At most `max_bytes[name]` are read of each.
        """
        found = {}
        for name, limit in max_bytes.items():
            with contextlib.suppress(OSError), with_handles(partial(self._open, name)) as file:
                found[name] = file.read(head_size(f"{self.root}/{name}", os.fstat(file.fileno()).st_size, limit))
        return found

    def sizes_of(self, names: Iterable[str]) -> Iterator[int]:
        """Yield the size of each existing file, in bytes."""
        return (path.stat().st_size for path in map(self.root.joinpath, names) if path.exists())

    def _open(self, name: str) -> BinaryIO:
        return open(self.root / name, "rb", opener=regular_file)

    def below_deepest(self, names: list[str]) -> ListedFiles:
        """Return some of the files, relative to the deepest folder that has them.

        If these are all files below a folder (`whole`), they stay relative to `root`.
        """
        folder = "" if self.whole or not names else os.path.commonpath([os.path.dirname(f"/{name}") for name in names])  # noqa: PTH120
        start = len(folder.strip("/")) + bool(folder.strip("/"))
        exact = frozenset(name[start:] for name in self.exact.intersection(names))
        return replace(self, root=self.root / folder.strip("/"), names=[name[start:] for name in names], exact=exact)


def head_size(path: str, size: int, max_bytes: int) -> int:
    """Return how many bytes of a file of this size to read, at most `max_bytes`.

    For an index that another program wrote, `max_bytes` is `LARGEST_INDEX`. Such an index must be read whole. Raises
    `ShardError` if it is larger.
    """
    if size > max_bytes >= LARGEST_INDEX:
        raise ShardError(f"{path}: {size:,} bytes, but an index has at most {max_bytes:,}. Split it, or pass format=")
    return min(size, max_bytes)


def list_files(files: Shards) -> ListedFiles:
    """List the files that a user names.

    The user names a folder with its subfolders, globs, braces, paths, or a list of these. The root is that folder, or
    the deepest one that has all files. Raises `ShardError` for an empty list, and for a file that is named twice.
    """
    specs = expand_specs(files)
    if not specs:
        raise ShardError("the list of shards is empty")
    if len(specs) == 1 and Path(specs[0]).is_dir():
        return with_handles(partial(_listed_below, Path(specs[0]).absolute()))
    unlistable: list[ShardError] = []
    found = [each for spec in specs for each in _expanded(spec, unlistable)]
    is_exact = dict(found)
    if len(is_exact) < len(found):
        [(repeated, _)] = Counter(path for path, _ in found).most_common(1)
        raise ShardError(f"{repeated}: the same shard is named twice. Name it once")
    root = os.path.commonpath([os.path.dirname(path) for path in is_exact])  # noqa: PTH120
    name_start = len(root) + (root != "/")  # where the name relative to the root starts in a path
    exact_names = frozenset(path[name_start:] for path, is_named in is_exact.items() if is_named)
    names = sorted(path[name_start:] for path in is_exact)
    return ListedFiles(Path(root), names, exact=exact_names, unlistable=unlistable)


def _listed_below(root: Path) -> ListedFiles:
    """List a folder. A relative path becomes absolute, so that it survives a change of the working folder."""
    found = ListedFiles(root, [], whole=True, started_ns=time.monotonic_ns())
    for folder, folders, files in os.walk(root, onerror=lambda e: found.unlistable.append(_unlistable_error(e))):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        below = os.path.relpath(folder, root)
        found.folders.append(below)
        prefix = "" if below == "." else f"{below}/"
        for name in folders:
            if os.path.islink(f"{folder}/{name}"):  # noqa: PTH114  # a Path for each folder is slow
                log.warning("%s: a link to a folder is skipped. Name it as well to read it", f"{prefix}{name}")
        found.names.extend([prefix + name for name in files if not is_hidden(name)])
    found.names.sort()
    return found


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden, or of a file of a desktop or a tool.

    `.hoodie` is not, because it shows that a folder is a table of Apache Hudi.
    """
    return (
        (name.startswith(".") and name != ".hoodie")
        or name in _TOOL_NAMES
        or (name.startswith(_LEFTOVERS) and name.endswith(".arrow"))
    )


def is_hidden_path(name: str) -> bool:
    """Return whether a file or one of its folders is hidden."""
    return any(map(is_hidden, name.split("/")))


def expand_specs(shards: Shards) -> list[str]:
    """Return each path or URL separately, without abbreviations.

    `a::b` is split, and `~`, `$VAR` and `file://` are replaced. Raises `ShardError` for syntax that only other loaders
    support, and names the alternative.
    """
    names = as_names(shards)
    specs = [names] if isinstance(names, str) else names
    return [part for spec in specs for part in ([spec] if _LITERAL_URL.match(spec) else _split_spec(spec))]


def _split_spec(spec: str) -> list[str]:
    return [_expand_spec(part) for part in ([spec] if _exists(spec) else _SEPARATOR.split(spec))]


def is_remote(shards: Shards) -> bool:
    """Return whether these shards are named by URLs.

    Raises `ShardError` for a mixture with files, and for an unsupported URL.
    """
    specs = expand_specs(shards)
    remote = [spec for spec in specs if "://" in spec]
    if remote and len(remote) < len(specs):
        raise ShardError(f"{clean_address(remote[0])}: mixed with local shards. Read remote and local ones separately")
    for spec in remote:
        if spec.split("://")[0] not in URL_SCHEMES:
            raise ShardError(f"{clean_address(spec)}: unsupported URL. Use one of {', '.join(URL_SCHEMES)}")
        if has_user(spec):
            raise ShardError(
                f"{clean_address(spec)}: a user or password in a URL would appear in logs. Use environment variables"
            )
        if "?" in spec and spec.startswith("http"):
            raise ShardError(f"{clean_address(spec)}: a URL with a query is of one object. Pass a plain address")
    return bool(remote)


def _expand_spec(spec: str) -> str:
    if _exists(spec):
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


def _exists(spec: str) -> bool:
    return "\0" not in spec and len(spec) < _LONGEST_PATH and os.path.lexists(spec)


def _path_of_url(spec: str) -> str:
    """Return the path of `file:///a`, `file://localhost/a` or `file:a`."""
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


def _expanded(spec: str, unlistable: list[ShardError]) -> Iterator[tuple[str, bool]]:
    """Yield the absolute paths of a name, glob or braces, and whether the user named the path itself.

    For a folder, these are the files below it.
    """
    if "://" in spec:
        url = clean_address(spec)
        raise ShardError(f"{url}: expected files, not a URL. Index remote shards by `savable index {url}`")
    for pattern in expand_braces(spec):
        path = os.path.abspath(pattern)  # noqa: PTH100  # a Path for each of a million names is slow
        if os.path.isdir(path):  # noqa: PTH112
            below = with_handles(partial(_listed_below, Path(path)))
            unlistable += below.unlistable
            yield from ((f"{path}/{name}", False) for name in below.names)
        elif glob.has_magic(pattern) and not os.path.exists(path):  # noqa: PTH110
            yield from ((match, False) for match in _matching(pattern, unlistable))
        else:
            yield path, True


def _matching(pattern: str, unlistable: list[ShardError]) -> list[str]:
    """Return the absolute paths of files that match a glob, or else those in the folders that match it.

    Hidden files and folders only match if the glob names a hidden one. Raises `ShardError` for no match.
    """
    parts = os.path.abspath(pattern).split("/")  # noqa: PTH100
    first_magic = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    wants_hidden = any(map(is_hidden, parts[first_magic:]))
    found = {os.path.abspath(match) for match in glob.glob(pattern, recursive=True)}  # noqa: PTH100, PTH207
    matches = sorted(each for each in found if wants_hidden or not any(map(is_hidden, each.split("/")[first_magic:])))
    if not matches:
        raise ShardError(f"{pattern}: no file matches. Check the pattern", reason=NO_SUCH_PATH)
    if files := [each for each in matches if not os.path.isdir(each)]:  # noqa: PTH112
        return files
    below = [with_handles(partial(_listed_below, Path(each))) for each in matches]
    unlistable += [error for each in below for error in each.unlistable]
    return sorted({f"{each.root}/{name}" for each in below for name in each.names})


def missing_error(path: Path) -> ShardError:
    """Return the error for a named file that does not exist."""
    current = f" (current folder: {Path.cwd()})" if path.is_relative_to(Path.cwd()) else ""
    why = "The environment has no such variable" if "$" in str(path) else "Check the path"
    return ShardError(f"{path}: no such file or folder{current}. {why}", reason=NO_SUCH_PATH)


def is_inside(name: str) -> bool:
    """Return whether a relative name stays inside the folder that it is relative to."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _unlistable_error(error: OSError) -> ShardError:
    if lacks_handles(error):
        raise error
    return ShardError(
        f"{error.filename}: {error.strerror}: this folder cannot be listed. Permit it, or move it elsewhere",
        reason="unlistable folder",
    )


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern, with the last braces varying fastest.

    Unpaired braces are text. Raises `ShardError` for too many names.
    """
    if "{" not in pattern:
        return [pattern]
    count = sum(abs(int(last) - int(first)) + 1 for first, last, _ in _NUMBERS.findall(pattern))
    flat = [] if re.search(r"\{[^{}]*\{", pattern) else re.findall(r"\{[^{}]*\}", pattern)
    count = max(count, math.prod(map(_count_names, flat)))
    names, characters = [], 0
    # braceexpand builds all numbers of a range at once, so check first
    if count <= _MOST_NAMES and pattern.count("{") <= _MOST_BRACES:
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


def _count_names(braces: str) -> int:
    """Return the number of names that braces without nested ones stand for, or 1 for a range of letters."""
    if (found := _NUMBERS.fullmatch(braces)) is None:
        return braces.count(",") + 1
    first, last, step = (int(number or 1) for number in found.groups())
    return abs(last - first) // max(1, abs(step)) + 1


class HubAddress(NamedTuple):
    """Parts of an address of the Hub. `path` is "" for the whole dataset."""

    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> HubAddress:
        """Split an address. Raises `ShardError` if it names no dataset."""
        if (found := _ADDRESS.fullmatch(url)) is None:
            raise ShardError(
                f"{url}: not a dataset of the Hub. Write hf://datasets/ORG/NAME, with @REVISION and /PATH if needed"
            )
        return cls(found["repo"], unquote(found["revision"] or "main"), (found["path"] or "").strip("/"))

    @property
    def is_fixed(self) -> bool:
        """Return whether the revision is a commit, whose content never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def dataset(self) -> str:
        """Return the address of the whole dataset at the revision."""
        return f"{HUB}datasets/{self.repo}@{self.revision}"

    @property
    def download(self) -> str:
        """Return the shell command that downloads the dataset, or the folder `path` of it."""
        only = f" --include '{self.path}/*'" if self.path else ""
        name = self.repo.rpartition("/")[2]
        return f"hf download {self.repo} --repo-type dataset --revision {self.revision}{only} --local-dir {name}"

    def at(self, commit: str) -> str:
        """Return the address with this commit as its revision."""
        return f"{HUB}datasets/{self.repo}@{commit}{'/' if self.path else ''}{self.path}"

    def below(self, name: str) -> str:
        """Return the path in the dataset of a name relative to this address."""
        return f"{self.path}/{name}" if self.path else name


def is_hub(url: str) -> bool:
    """Return whether this is an address of the Hub."""
    return url.startswith(HUB)


def without_commit(address: str) -> str:
    """Return an address of the Hub without its commit, and any other unchanged.

    Caches use the result as the common name of all commits.
    """
    return _COMMIT_IN_ADDRESS.sub(r"\1", address)


def commits_of(addresses: Mapping[str, str]) -> dict[str, bytes]:
    """Return the commits in the addresses of a state, by the named address.

    This reverses `addresses_of`.
    """
    return {name: HubAddress.of(pinned).revision.encode() for name, pinned in addresses.items() if is_hub(name)}


def addresses_of(pinned: Mapping[str, bytes]) -> dict[str, str]:
    """Return the addresses of pinned datasets of the Hub, with commits, for a state.

    The keys are the addresses that the user named.
    """
    return {name: HubAddress.of(name).at(commit.decode()) for name, commit in pinned.items() if is_hub(name)}
