r"""Specifications: what outputs of a function must not happen.

As in VNN-LIB, a specification is a disjunction of conjunctions of linear inequalities: the output
``y`` is forbidden if all inequalities ``A y <= b`` of at least one of its members hold.
Inequalities are closed: a point that satisfies them with equality is a violation.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from wdjax.bounds import continuity, domain, interval, record
from wdjax.bounds.graph import flatten
from wdjax.checks import validate
from wdjax.core import Classifier
from wdjax.program import equations

Numbers = npt.NDArray[Any]
_LARGEST, _SMALLEST = 2.0**100, 2.0**-100
"""Coefficients beyond these would over- or underflow in float32 products."""


@dataclasses.dataclass(frozen=True, eq=False)
class Specification:
    """Members ``(A, b)``, each the forbidden set ``A y <= b`` of outputs ``y``, ``[K]``.

    Args:
      members: pairs of ``A``, ``[R, K]``, and ``b``, ``[R]``, finite numbers; R may differ.

    Source: this library's own.

    >>> never = Specification([([[1.0, -1.0]], [0.0])])  # y_0 - y_1 <= 0 must not happen.
    >>> never.violated([0.5, 0.5]), never.violated([1.0, 0.5])
    (True, False)
    """

    members: Sequence[tuple[ArrayLike, ArrayLike]]

    def __post_init__(self) -> None:
        pairs = tuple((_finite("A", a, 2), _finite("b", b, 1)) for a, b in self.members)
        if not pairs or any(
            not len(b) or a.shape != (len(b), pairs[0][0].shape[1]) for a, b in pairs
        ):
            shapes = [(list(a.shape), list(b.shape)) for a, b in pairs[:3]]
            raise ValueError(
                "a specification must have members (A [R, K], b [R]) with R >= 1 and one K, got "
                f"{len(pairs)} with shapes {shapes}."
            )
        object.__setattr__(self, "members", pairs)

    @property
    def outputs(self) -> int:
        """K, the number of outputs."""
        return int(np.shape(self.members[0][0])[1])

    @property
    def rows(self) -> tuple[Numbers, Numbers, Numbers]:
        """All inequalities ``[R, K]`` and ``[R]`` in float64, and the member of each, ``[R]``."""
        a, b = (np.concatenate([np.asarray(m[i]) for m in self.members]) for i in (0, 1))
        counts = [len(np.asarray(right)) for _, right in self.members]
        return a, b, np.repeat(np.arange(len(counts)), counts)

    def excess(self, y: ArrayLike) -> Numbers:
        """``[n]`` distances from the forbidden set: the least over members of ``max(A y - b)``.

        ``y`` is ``[n, K]``; NaN where an output is not finite. In float64, so rounded.
        """
        y = np.asarray(y, np.float64)
        a, b, member = self.rows
        known = np.isfinite(y).all(axis=1, keepdims=True)
        value = np.where(known, y, np.nan) @ a.T - b
        each = [value[:, member == m].max(axis=1) for m in range(len(self.members))]
        return np.min(each, axis=0)

    def violated(self, y: ArrayLike) -> bool:
        """Whether one output ``[K]`` is forbidden, decided in exact rational arithmetic."""
        row = np.asarray(y)
        if not np.all(np.isfinite(row)):
            return False
        exact = [Fraction(float(v)) for v in row]

        def holds(a: Numbers, b: float) -> bool:
            terms = (Fraction(float(w)) * v for w, v in zip(a, exact) if w)
            return sum(terms, Fraction(0)) <= Fraction(float(b))

        return any(
            all(holds(line, right) for line, right in zip(np.asarray(a), np.asarray(b)))
            for a, b in self.members
        )


def _finite(name: str, value: ArrayLike, rank: int) -> Numbers:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.full((), np.nan)
    size = np.abs(array)
    if array.ndim != rank or not np.all((size == 0) | (size >= _SMALLEST) & (size <= _LARGEST)):
        raise ValueError(
            f"{name} of a specification must be {rank}-dimensional numbers, each 0 or between "
            f"2^-100 and 2^100 in size, got {value!r:.80}."
        )
    return array


def label_wins(label: int, classes: int) -> Specification:
    """Forbids that another class reaches the logit of ``label``.

    Args:
      label: the class that must win, of ``0 .. classes - 1``.
      classes: K, at least 2.

    Raises:
      ValueError: fewer than two classes, or a label that is none of them.

    Source: this library's own.

    >>> label_wins(0, 3).violated([1.0, 0.0, 1.0])
    True
    """
    classes = validate.check_count("classes", classes, 2)
    if validate.check_count("label", label, 0) >= classes:
        raise ValueError(f"label must be one of the classes 0..{classes - 1}, got {label}.")
    unit = np.eye(classes)
    rivals = [k for k in range(classes) if k != label]
    return Specification([(unit[label : label + 1] - unit[k : k + 1], np.zeros(1)) for k in rivals])


def in_range(lower: ArrayLike, upper: ArrayLike) -> Specification:
    """Forbids that an output leaves ``(lower, upper)``, ``[K]`` each; infinite ends forbid nothing.

    The ends themselves are forbidden too, since inequalities are closed.

    Args:
      lower: ``[K]``, the least allowed outputs, -inf for none.
      upper: ``[K]``, the largest, above ``lower``; inf for none.

    Raises:
      ValueError: other shapes, ``lower`` not below ``upper``, or no finite end.

    Source: this library's own.

    >>> in_range([0.0], [1.0]).violated([0.5]), in_range([0.0], [1.0]).violated([1.0])
    (False, True)
    """
    low, high = np.atleast_1d(np.asarray(lower, float)), np.atleast_1d(np.asarray(upper, float))
    if low.shape != high.shape or low.ndim != 1 or not np.all(low < high):
        raise ValueError(
            f"lower and upper must be [K] with lower < upper, got {lower!r:.60} and {upper!r:.60}."
        )
    unit = np.eye(len(low))
    members = [(unit[k][None], low[k : k + 1]) for k in range(len(low)) if low[k] > -math.inf]
    members += [(-unit[k][None], -high[k : k + 1]) for k in range(len(low)) if high[k] < math.inf]
    if not members:
        raise ValueError("lower and upper are all infinite, so that nothing is forbidden.")
    return Specification(members)


def agree(
    f: Classifier, g: Classifier, delta: float, outputs: int
) -> tuple[Classifier, Specification]:
    """The function ``f - g`` and the specification that each output stays within ``delta`` of 0.

    Args:
      f: ``[n, *shape] -> [n, K]``.
      g: of the same shapes.
      delta: the largest difference, above 0; it is forbidden itself.
      outputs: K.

    Raises:
      ValueError: ``delta`` is not finite or not above 0.

    Source: this library's own.

    >>> function, never = agree(jnp.sin, jnp.tanh, 0.5, outputs=1)
    >>> never.violated(function(jnp.array([[0.1]]))[0])
    False
    """
    if not 0 < delta < math.inf:
        raise ValueError(f"delta must be a finite number above 0, got {delta!r}.")
    ends = np.full(outputs, float(delta))
    return jax.tree_util.Partial(_difference, leafless(f), leafless(g)), in_range(-ends, ends)


def _difference(f: Classifier, g: Classifier, x: jax.Array) -> jax.Array:
    return f(x) - g(x)


def monotone(
    f: Classifier,
    entry: Sequence[int],
    output: int = 0,
    *,
    slack: float = 1e-3,
    falls: bool = False,
) -> tuple[Classifier, Specification]:
    """The derivative of an output by an input entry, and the specification that bounds it below.

    The slope of ``output`` along ``entry`` must stay above ``-slack``, so that over a distance
    ``t`` the output falls by less than ``slack t``. Where the function has kinks, every slope of
    Clarke's generalised gradient is bounded. A ``custom_jvp`` is believed, unless gradients are
    stopped: then the program itself is differentiated. Where it is called, the slope raises a
    ValueError for a function that may jump, since no slope bounds a jump, and for one with a
    ``custom_vjp``.

    Args:
      f: ``[n, *shape] -> [n, K]``.
      entry: the index of an input entry in ``shape``.
      output: the index of an output.
      slack: at least 0; with 0 the function must grow strictly.
      falls: bounds ``-f`` instead, so that it must not grow.

    Raises:
      ValueError: ``slack`` is negative or not finite.

    Source: this library's own.

    >>> slope, never = monotone(lambda x: x**3, (0,))
    >>> float(slope(jnp.array([[2.0]]))[0, 0]), never.violated([0.0])
    (12.0, False)
    """
    if not 0 <= slack < math.inf:
        raise ValueError(f"slack must be a finite number of at least 0, got {slack!r}.")
    sign = -1.0 if falls else 1.0
    slope = jax.tree_util.Partial(_Slope(tuple(entry), output, sign), leafless(f))
    return slope, Specification([(np.ones((1, 1)), np.full(1, -float(slack)))])


@dataclasses.dataclass(frozen=True)
class _Slope:
    """The derivative of ``sign f[output]`` by one input entry, ``[n, *shape] -> [n, 1]``."""

    entry: tuple[int, ...]
    output: int
    sign: float

    def __call__(self, f: Classifier, x: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(f)(x)
        names = continuity.jumps(closed)
        record.see_through(*names)
        everywhere = jnp.full_like(x, jnp.inf)
        lost = interval.may_test_nan(flatten(closed), domain.box(-everywhere, everywhere))
        if not validate.traced(lost) and lost:
            names |= {"a test for NaN"}
        used = {eqn.primitive.name for eqn in equations(closed)}
        names |= {name for name in used if name.startswith("custom_vjp")}
        if names:
            raise ValueError(
                f"the function applies {', '.join(sorted(names))} to its input, so that its "
                "slope does not tell whether it is monotone."
            )
        along = jnp.zeros_like(x).at[(slice(None), *self.entry)].set(1.0)

        def plain(t: jax.Array) -> jax.Array:
            return domain.ends(interval.interpret(closed, [t])[0]).lower

        moved = jax.jvp(plain if "stop_gradient" in used else f, (x,), (along,))[1]
        moved = jnp.where(lost, jnp.nan, moved)
        return self.sign * moved[:, self.output : self.output + 1]


def leafless(f: Classifier) -> Classifier:
    """A plain function as a pytree without leaves; others as they are."""
    plain = callable(f) and hasattr(f, "__name__") and not isinstance(f, type)
    return jax.tree_util.Partial(f) if plain else f
