"""Pictures as plain values for a template that writes SVG: lines over a run, and bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
_COLOURS = 6
_STEPS = (1, 2, 2.5, 5, 10)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark at an axis: its place in the picture, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line: its name, the class of its colour, and its points as SVG has them. `dashed`: what was expected."""

    name: str
    colour: str
    points: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines in a frame of `WIDTH` by `HEIGHT`."""

    lines: Sequence[Line]
    rows: Sequence[Tick]
    columns: Sequence[Tick]
    x_name: str
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a share of the whole, 0 to 1, with its number in words."""

    name: str
    share: float
    text: str


def picture(
    lines: Mapping[str, Points],
    x_name: str,
    *,
    expected: Mapping[str, Points] | None = None,
    most: float = 0.0,
    y_text: Callable[[float], str] = "{:.0%}".format,
) -> Picture | None:
    """Lines by name, and beside them what was expected of each; None if no line has two points.

    The y axis begins at 0 and goes up to `most`, or as far as a point does.
    """
    if not any(len(points) > 1 for points in lines.values()):
        return None
    expected = expected or {}
    everything = [point for points in [*lines.values(), *expected.values()] for point in points]
    xs = [x for x, _ in everything]
    low, high = min(xs), max(max(xs), min(xs) + 1e-9)
    rows = _ticks(0.0, max(most, *(y for _, y in everything), 1e-9))
    top = rows[-1]

    def placed(points: Points) -> str:
        return " ".join(f"{_across(x, low, high):.1f},{_up(y, top):.1f}" for x, y in points)

    drawn = []
    for number, (name, points) in enumerate(lines.items()):
        colour = f"c{number % _COLOURS}"
        if name in expected:
            drawn.append(Line(name, colour, placed(expected[name]), dashed=True))
        drawn.append(Line(name, colour, placed(points)))
    columns = [Tick(_across(x, low, high), f"{x:,.6g}") for x in _ticks(low, high) if low <= x <= high]
    return Picture(drawn, [Tick(_up(y, top), y_text(y)) for y in rows], columns, x_name)


def _across(x: float, low: float, high: float) -> float:
    return _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)


def _up(y: float, top: float) -> float:
    return HEIGHT - _BOTTOM - y / top * (HEIGHT - _TOP - _BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five, from `low` or below it to `high` or above it."""
    about = (high - low) / 4
    unit = 1.0
    while unit > about:
        unit /= 10
    while unit * 10 <= about:
        unit *= 10
    step = next(unit * factor for factor in _STEPS if unit * factor >= about)
    first = int(low // step)
    last = -int(-high // step)
    return [number * step for number in range(first, last + 1)]
