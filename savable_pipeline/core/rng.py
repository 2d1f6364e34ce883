"""`Rng`: random numbers of one encoder call, or of one named sequence of a lane.

It uses only our own arithmetic on SplitMix64 words and IEEE additions, multiplications, divisions and square roots. So
a seed gives the same numbers on every machine and with every release of a library. A call that draws nothing costs
nothing: even the key is computed at the first draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import index
from random import Random as PythonRandom
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.keyed_random import MASK, word

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_PARTS = Struct("<QQQ")
_KINDS = ("numpy", "torch", "python")  # kinds of derived generators; their keys are words -1, -2 and -3 of this one's


class Rng(msgspec.Struct, gc=False, eq=False):
    """Random numbers that depend on a key alone, on every machine: `sp.Rng(7)`.

    Each call of an encoder gets one, keyed by the run's seed and by the sample, pack or batch that the call builds. The
    words are those of SplitMix64 with the key `xxh3_64(parts, seed=base)`. `.numpy`, `.torch` and `.python` are
    generators of each kind with keys derived from this one. Their numbers may change with a release of their library.

    Attributes:
        parts: Three integers that, with the base, determine the key.
        draws: The number of words already drawn.
        counted: Whether this is a sequence of a lane, whose state saves only `draws`.

    Example:
        >>> rng = sp.Rng(7)
        >>> rng.integers(10), round(rng.random(), 3), rng.permutation(4)
        (9, 0.205, [1, 2, 3, 0])
        >>> sp.Rng(7).integers(10)  # the same key, the same numbers
        9
    """

    _base: int
    parts: tuple[int, int, int] = (0, 0, 0)
    draws: int = 0
    _key: int | None = None
    _generators: dict[str, Any] | None = None  # the derived generators that were used, by kind
    counted: bool = False

    def rekey(self, parts: tuple[int, int, int]) -> None:
        """Restart with another key.

        Args:
            parts: Three integers. The new key is derived from these and the base.
        """
        self.parts, self.draws, self._key, self._generators = parts, 0, None, None

    def restarted(self) -> Rng:
        """Return a new generator with the same key, before its first draw."""
        return Rng(self._base, self.parts)

    @property
    def key(self) -> int:
        """Return the 64-bit key of this generator."""
        if self._key is None:
            self._key = xxh3_64_intdigest(_PARTS.pack(*self.parts), self._base)
        return self._key

    def bits(self) -> int:
        """Draw 64 random bits, as an int."""
        drawn = word(self.key, self.draws)
        self.draws += 1
        return drawn

    def random(self) -> float:
        """Draw a float in [0, 1), a multiple of 2**-53."""
        return (self.bits() >> 11) * 2.0**-53

    def integers(self, n: int) -> int:
        """Draw an integer in [0, n), without bias.

        The algorithm is that of Lemire (Fast Random Integer Generation in an Interval, 2019).

        Args:
            n: The bound, 1 … 2**64.

        Raises:
            ValueError: `n` is out of this range.
        """
        n = index(n)  # NumPy's integers would overflow
        if not 0 < n <= 1 << 64:
            raise ValueError(f"integers(n) needs 1 ≤ n ≤ 2**64, not {n}")
        product = self.bits() * n
        if product & MASK < n:
            threshold = (1 << 64) % n
            while product & MASK < threshold:
                product = self.bits() * n
        return product >> 64

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Draw a uniformly distributed float.

        Args:
            low: The lower bound.
            high: The upper bound.
        """
        return low + (high - low) * self.random()

    def normal(self, mean: float = 0.0, std: float = 1.0) -> float:
        """Draw a normally distributed float, the quantile of a uniform draw.

        The algorithm is that of Wichura (Algorithm AS 241, 1988).

        Args:
            mean: The mean of the distribution.
            std: Its standard deviation.
        """
        return mean + std * _normal_quantile(((self.bits() >> 12) + 0.5) * 2.0**-52)

    def choice(self, items: Sequence[T]) -> T:
        """Draw one of the items, each with the same probability.

        Args:
            items: At least one item.

        Raises:
            ValueError: There are none.
        """
        return items[self.integers(len(items))]

    def permutation(self, n: int) -> list[int]:
        """Return the integers 0 … n-1 in random order.

        The algorithm is that of Fisher and Yates (Durstenfeld: Algorithm 235, 1964).

        Args:
            n: How many integers.
        """
        order = list(range(n))
        for i in range(n - 1, 0, -1):
            j = self.integers(i + 1)
            order[i], order[j] = order[j], order[i]
        return order

    @property
    def numpy(self) -> np.random.Generator:
        """A NumPy generator (Philox) keyed by this one, the same object at each access."""
        return self._derived("numpy", lambda key: np.random.Generator(np.random.Philox(key=key)))

    @property
    def torch(self) -> torch.Generator:
        """A torch CPU generator keyed by this one, the same object at each access."""
        import torch  # this takes seconds, and many encoders do not need it

        return self._derived("torch", lambda key: torch.Generator().manual_seed(key))

    @property
    def python(self) -> PythonRandom:
        """A `random.Random` keyed by this one, the same object at each access."""
        return self._derived("python", PythonRandom)

    def _derived(self, kind: str, make: Callable[[int], T]) -> T:
        """Return the derived generator of this kind, which `make` builds from its key at first use."""
        if self.counted:
            fix = "Draw from lane.rng(...), or seed a generator by its bits()"
            raise ValueError(f"lane.rng(...).{kind} cannot be saved. {fix}")
        generators = self._generators = self._generators or {}
        if kind not in generators:
            generators[kind] = make(word(self.key, -1 - _KINDS.index(kind)))
        return generators[kind]  # type: ignore[no-any-return]


def _log(x: float) -> float:
    """Return the natural logarithm for 0 < x < 1 as 2 artanh((x-1)/(x+1)).

    It uses only additions, multiplications and divisions, which are exact to the last bit on every machine.
    """
    exponent = 0  # the argument of this function is x · 2**exponent
    while x < 0.7:
        x, exponent = x * 2.0, exponent - 1
    ratio = (x - 1.0) / (x + 1.0)
    square, power, total = ratio * ratio, ratio, 0.0
    for odd in range(1, 40, 2):
        total += power / odd
        power *= square
    return 2.0 * total + exponent * 0.6931471805599453  # ln 2


def _polynomial(x: float, coefficients: tuple[float, ...]) -> float:
    """Evaluate a polynomial, with the coefficient of the highest power first."""
    return reduce(lambda total, coefficient: total * x + coefficient, coefficients, 0.0)


def _normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal, 0 < p < 1.

    The algorithm is PPND16 of Wichura (Algorithm AS 241, 1988).
    """
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _polynomial(r, _CENTRE[0]) / _polynomial(r, _CENTRE[1])
    r = math.sqrt(-_log(min(p, 1.0 - p)))
    x, (above, below) = (r - 1.6, _NEAR) if r <= 5.0 else (r - 5.0, _FAR)
    value = _polynomial(x, above) / _polynomial(x, below)
    return value if q > 0 else -value


# Coefficients of the numerator and the denominator: for p near 0.5, further from it, and near 0 or 1.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_NEAR = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)  # fmt: skip
