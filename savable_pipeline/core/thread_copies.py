"""`thread_copy`: a copy of a user's function or encoder for one worker thread.

    partial(f, x), object.f, encoder.x     x and the object are bound, so they are copied
    closure, default, global of f          f only refers to them, so they are shared, or an error if they are unsafe

The same holds for the contents of lists, tuples, sets and dicts, for functions that f refers to, and for functions of
its module that f calls. Everything else is shared.
"""

from __future__ import annotations

import contextlib
import copy
import dis
from collections.abc import Iterator
from functools import cache, partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
# The name of a value, the value, and whether a copy of the object copies it too.
ReachedValues: TypeAlias = Iterator[tuple[str, Any, bool]]

_UNSAFE = {  # names of classes with the first part of their module's name, because importing them would be slow
    *("tokenizers.Tokenizer", "transformers.PreTrainedTokenizerBase", "transformers.ProcessorMixin"),
    *("sentencepiece.SentencePieceProcessor", "random.Random", "torch.Generator"),
    *("numpy.Generator", "numpy.RandomState", "numpy.BitGenerator"),
    *("_io._IOBase", "sqlite3.Connection", "sqlite3.Cursor", "_ctypes._CData", "ctypes.CDLL"),
}
_PLAIN = {bool, int, float, str, bytes, type(None)}  # types that threads can share


def thread_copy(value: T) -> T:
    """Copy a function or an encoder.

    Raises ValueError if it cannot be copied, or shares an object that is not thread-safe.
    """
    label = _name_of(value)
    for name, unsafe in _unsafely_shared(_bound_values(value, label), set()):
        raise ValueError(
            f"worker threads cannot share {name}, a {type(unsafe).__name__}. Bind it by functools.partial, to a method "
            "or in an encoder, or pass start_method='fork'"
        )
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ValueError(
            f"{label} cannot be copied for a worker thread ({type(error).__name__}: {error}). Set thread_safe = True "
            "in its class, or build it in the thread: .encode(make)"
        ) from error


def _unsafely_shared(reached: ReachedValues, visited: set[tuple[int, bool]]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that threads would share but must not.

    `visited` has the ids of the values visited so far, each with whether it is copied.
    """
    for name, value, copied in reached:
        if type(value) in _PLAIN or (id(value), copied) in visited:
            continue
        visited.add((id(value), copied))
        kind: type = type(value)
        unsafe = _unsafe_class(kind)
        if unsafe and (not copied or unsafe == "ctypes.CDLL"):  # copies share a loaded library
            yield name, value
        elif not unsafe:
            yield from _unsafely_shared(_reached_by(value, name, copied), visited)


@cache
def _unsafe_class(kind: type) -> str:
    """Return the name of the class in `_UNSAFE` from which a class derives, or ""."""
    names = (f"{each.__module__.partition('.')[0]}.{each.__qualname__}" for each in kind.__mro__)
    return next((name for name in names if name in _UNSAFE), "")


def _reached_by(value: Any, name: str, copied: bool) -> ReachedValues:
    """Yield the values that a value contains, binds or refers to, without containers inside a container."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        members = list(value.values() if isinstance(value, dict) else value)
        yield from ((name, each, copied) for each in members if not isinstance(each, list | tuple | set | dict))
    elif isinstance(value, FunctionType):
        yield from ((f"{each!r} of {value.__qualname__}", found, False) for each, found in _references(value))
    elif isinstance(value, MethodType):
        yield from ((name, each, copied) for each in (value.__self__, value.__func__))
    elif isinstance(value, BuiltinMethodType):
        yield name, value.__self__, False  # `deepcopy` returns a builtin method itself, not a copy
    elif isinstance(value, partial):
        yield from ((name, each, copied) for each in (value.func, *value.args, *value.keywords.values()))
    elif copied and callable(value):
        yield from _bound_values(value, name)


def _bound_values(value: Any, name: str) -> ReachedValues:
    """Yield the attributes of an object and of its classes, or what a function binds and refers to."""
    if isinstance(value, FunctionType | MethodType | BuiltinMethodType | partial):
        yield from _reached_by(value, name, True)
        return
    yield from ((f"{each!r} of {name}", found, True) for each, found in list(getattr(value, "__dict__", {}).items()))
    for kind in type(value).__mro__:
        for each, found in list(vars(kind).items()):
            function = getattr(found, "__func__", getattr(found, "fget", found))
            yield f"{each!r} of {kind.__qualname__}", function, False


def _references(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a function refers to: its closure, its defaults and its globals."""
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # raised if the variable has no value yet
            yield name, cell.cell_contents
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _globals(code):
        value = function.__globals__.get(name)
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            yield name, value


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the names of globals in a function and in those defined in it."""
    yield from dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _name_of(value: Any) -> str:
    """Return the name of a function, which may be inside a `partial` or a `.map(f)`, or of an object's class."""
    while (inner := getattr(value, "func", getattr(value, "function", None))) is not None:
        value = inner
    return str(getattr(value, "__qualname__", type(value).__qualname__))
