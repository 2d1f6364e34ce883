"""Versions and sources that must be the same on a trainer's machine and on a node.

Otherwise a lane could build other batches on the node. So the node compares them before the first batch. Each
requirement is a name and a text: a version, the processor, or a hash of the source of a user's module that the pipeline
uses. Collecting them imports none of the user's code.
"""

from __future__ import annotations

import hashlib
import pickletools
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.run.state.fingerprint import LIBRARIES

Requirements: TypeAlias = dict[str, str]

MAIN_MODULE = "module __main__"
_NONE = "none"
_ROOT = Path(__file__).resolve().parents[2]
_DECODER = "simplejpeg"  # decodes instead of Pillow if it is installed, so both machines must have it, or neither
_CPU_FEATURES = {"sse4_1", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "amx_tile", "asimd", "sve"}


def requirements_of(pickled: bytes, main: dict[str, Any]) -> Requirements:
    """Return what must be the same on a node that runs a job, as a text for each name.

    `pickled` is the job. `main` describes its main module, as multiprocessing does.
    """
    builds = {name: _build(name) for name in LIBRARIES}
    versions = {**_releases(), **{name: each for name, each in builds.items() if each != _NONE or name == _DECODER}}
    modules = [name for name in _user_modules(pickled) if name not in ("__main__", "__mp_main__")]
    files = {f"module {name}": _source(name) for name in modules}
    if file := _main_file(main):
        files[MAIN_MODULE] = Path(file)
    return {**versions, **{name: _hash_of(file) for name, file in files.items()}}


def unmet_requirements(requirements: Requirements, main: dict[str, Any], allow: Iterable[str]) -> list[str]:
    """Return a text for each requirement that this machine does not meet.

    Requirements whose names are in `allow` are ignored.
    """
    releases = _releases()
    unmet = []
    for name, value in requirements.items():
        if name == MAIN_MODULE:
            own = _hash_of(Path(_main_file(main)))
        elif name.startswith("module "):
            own = _hash_of(_source(name.removeprefix("module ")))
        else:
            own = releases[name] if name in releases else _build(name)
        if own != value and name not in set(allow):
            unmet.append(f"{name}: {own} there, {value} here")
    return unmet


@cache
def _releases() -> Requirements:
    """Return the versions of this library and of Python, and the processor."""
    return {
        "savable_pipeline": f"{_build('savable_pipeline')} ({_hash_of(_ROOT)}, ORDER {ORDER}, STATE {STATE})",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "processor": f"{platform.machine()} {' '.join(sorted(_CPU_FEATURES & _cpu_flags()))}".strip(),
    }


def _cpu_flags() -> set[str]:
    """Return the features of the processor, if /proc/cpuinfo lists them."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(errors="replace") if file.exists() else ""
    return set(re.findall(r"\w+", " ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)[:1])))


@cache
def _build(name: str) -> str:
    """Return the version of a library, with a hash of the list of its compiled files, or "none"."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return _NONE
    files = re.findall(r"^.*\.(?:so|pyd|dylib)[\d.]*,.*$", found.read_text("RECORD") or "", re.MULTILINE)
    return found.version + (f" (build {_digest(chr(10).join(sorted(files)).encode())})" if files else "")


def _digest(raw: bytes) -> str:
    """Return the first 12 digits of a hash."""
    return hashlib.sha256(raw).hexdigest()[:12]


def _hash_of(path: Path | None) -> str:
    """Return the hash of a source file, or of all source files below a folder."""
    if path is None or not path.exists():
        return "no such file" if path is None else f"no file {path}"
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names = (f"{file.relative_to(path)} {_digest(file.read_bytes())}\n" for file in files)
    return f"source {_digest(''.join(names).encode())}"


def _source(name: str) -> Path | None:
    """Return the file that `import name` would run here, without running it."""
    path: Any = None
    spec = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _main_file(main: dict[str, Any]) -> str:
    """Return the path of the main module's file, or "". `main` describes the module, as multiprocessing does."""
    if name := main.get("init_main_from_name"):
        return str(_source(name) or "")
    return str(main.get("init_main_from_path", ""))


def _user_modules(pickled: bytes) -> list[str]:
    """Return the names of the user's modules that a pickle uses, directly or through other such modules.

    Only modules imported in this process count.
    """
    found: set[str] = set()
    pending = sorted(_named_modules(pickled))
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        if name in found or module is None or not _is_user_module(module):
            continue
        found.add(name)
        pending += [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)]  # its packages
        for value in list(vars(module).values()):
            used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(used, str):
                pending.append(used)
    return sorted(found)


def _named_modules(pickled: bytes) -> set[str]:
    """Return the names of imported modules that a pickle has as strings, such as those of its classes."""
    texts = {arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)}
    return {word for text in texts for word in text.split(" ")[:1] if word in sys.modules}


def _is_user_module(module: ModuleType) -> bool:
    """Return whether a module has Python source that is neither installed nor part of this library."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(each) for each in (*_installed(), _ROOT)) and "site-packages" not in path.parts


@cache
def _installed() -> list[Path]:
    """Return the folders of the standard library and of installed packages."""
    return [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
