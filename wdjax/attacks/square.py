"""Square attack: random search with squares of shrinking size, without gradients."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim
from wdjax.xla_cpu import drawn

_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Numbers of queries, out of 10,000, after which the squares' area is halved."""


class State(NamedTuple):
    x: Array
    loss: Array
    fallen: Array
    taken: Array
    """Queries so far."""
    keys: Array


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Square:
    r"""Square attack: a random square is changed, and kept if the loss has not fallen.

    For norm inf the search begins with stripes: columns of ``+-eps`` of random sign in every
    channel. A query adds ``+-2 eps`` to a square, with one sign for each channel, and projects. For
    norms 2 and 1 it begins with a grid of windows that contain bumps of alternating sign; a query
    moves the budget of one window, and the unused budget, into a bump in another window.

    The squares cover the share ``p`` of the image, which is halved after 10, 50, 200, 500, 1000,
    2000, 4000, 6000 and 8000 queries.

    Args:
      queries: forward passes.
      p: the first share of the image, in (0, 1].
      loss: ``(out, y) -> [n]``, to be increased.
      rescaled: scale the numbers of queries above, which are meant for 10,000, to ``queries``.

    Images are ``[h, w, c]``, of any shape; ``[h, w]`` is one channel and ``[d]`` one column.

    Raises:
      ValueError: fewer than one query, ``p`` outside (0, 1], inputs of more than three axes.

    Cost: ``queries`` forward passes a sample until it is misclassified.

    Differs: positions and signs are drawn for each sample, not for a batch, and squares reach the
      last row and column. A square larger than a side becomes a rectangle of the same area. Norm 1
      uses the scheme of norm 2 with l1 lengths.

    Source: Andriushchenko et al. [andriushchenko2020], Algorithms 1 to 3.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(Square(queries=50), model, x, y, eps=0.2, key=jax.random.key(0))
    >>> found.success.tolist(), found.gradients.tolist()
    ([True, False], [0, 0])
    """

    budget: ClassVar[Literal["sample"]] = "sample"
    random: ClassVar[bool] = True

    ball: Lp = setting(Lp())
    queries: int = setting(5000)
    p: float = setting(0.8)
    loss: Callable[[PyTree, Array], Array] = setting(losses.margin)
    rescaled: bool = setting(False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", validate.check_count("queries", self.queries))
        share = float(validate.check_number("p", self.p))
        if not 0 < share <= 1:
            raise ValueError(f"p must be a share of the image in (0, 1], got {self.p!r}.")
        object.__setattr__(self, "p", share)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(self._query, self.queries, self.finished),)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        assert keys is not None
        x, none = samples.x, jnp.zeros(len(samples.y), jnp.int32)
        if start is None:
            shape = _image(x.shape[1:])
            first = _stripes if self.ball.norm == math.inf else functools.partial(_grid, self.ball)
            noise = jax.vmap(lambda key: first(key, shape, x.dtype))(keys).reshape(x.shape)
            start = x + norms.spread(samples.radius, x) * noise
        point = self.ball.project(start, x, samples.radius)
        # The first query evaluates this point and keeps it.
        return State(point, jnp.full(len(x), -jnp.inf, x.dtype), none > 0, none, keys)

    def _query(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One query: a random change of a square, kept where the loss rises or the sample flips.

        The first query evaluates the start itself. Samples with a flip stay; points with outputs
        that are not finite are never kept.
        """
        tried, first = self._propose(samples, state), state.taken == 0
        tried = jnp.where(norms.spread(first, tried), state.x, tried)
        out, info = ascent.judge(victim, tried, samples.y)
        loss = validate.check_each("loss", self.loss(out, samples.y), len(samples.y))
        loss = loss.astype(state.loss.dtype)
        fallen = (info.value > 0) & ~info.fault
        better = ((loss > state.loss) | fallen) & ~info.fault
        asked = State(
            x=jnp.where(norms.spread(better, tried), tried, state.x),
            loss=jnp.where(better, loss, state.loss),
            fallen=fallen,
            taken=state.taken + 1,
            keys=state.keys,
        )
        return ascent.hold(state.fallen, state, asked), info

    def _propose(self, samples: Samples, state: State) -> Array:
        """``[n, *shape]``: the points after one random change of a square, in the ball.

        The square's size follows from the number of queries so far. For norms 1 and 2 its sides are
        odd and at least 3.
        """
        x, shape = samples.x, _image(samples.x.shape[1:])
        table = _sides(shape[:2], self.p, self.queries, self.rescaled)
        if self.ball.norm != math.inf:
            table = np.minimum(np.maximum(table // 2 * 2 + 1, 3), shape[:2])
        sides = jnp.asarray(table)[state.taken]
        keys = jax.vmap(jax.random.fold_in)(state.keys, 1 + state.taken)
        home, now = x.reshape(-1, *shape), state.x.reshape(-1, *shape)
        move = _flip if self.ball.norm == math.inf else functools.partial(_shift, self.ball)
        delta = jax.vmap(move)(keys, now - home, sides, samples.radius)
        return self.ball.project(x + delta.reshape(x.shape), x, samples.radius)

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.x, None

    def finished(self, state: State) -> Array:
        return state.fallen


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The sample's shape as (rows, columns, channels), 1 for those it lacks."""
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"Square needs samples [h, w, c], [h, w] or [d], got {list(shape)}.")
    height, width, channels = (*shape, 1, 1)[:3]
    return height, width, channels


def _sides(shape: tuple[int, int], p: float, queries: int, rescaled: bool) -> np.ndarray:
    """``[queries, 2]``: rows and columns of the square of every query.

    ``shape`` is the image's height and width, ``p`` the share of its area in the first square. The
    area is halved at fixed numbers of queries, which ``rescaled`` stretches from 10,000 to
    ``queries``.

    >>> _sides((32, 32), 0.8, 5000, False)[[1, 11, 4001]].tolist()
    [[29, 29], [20, 20], [3, 3]]
    """
    height, width = shape
    number = np.arange(queries) * (10_000 / queries if rescaled else 1)
    area = p * height * width / 2.0 ** np.searchsorted(_HALVINGS, number)
    side = np.maximum(np.round(np.sqrt(area)), 1)
    rows = np.where(side > width, np.round(area / width), side)
    columns = np.where(side > height, np.round(area / height), side)
    return np.stack([rows.clip(1, height), columns.clip(1, width)], axis=1).astype(np.int32)


def _stripes(key: Array, shape: tuple[int, int, int], dtype: jnp.dtype) -> Array:
    """``[h, w, c]``: vertical stripes, with one random sign for each column and channel."""
    signs = drawn(jax.random.rademacher, key, (1, *shape[1:]), dtype)
    return jnp.broadcast_to(signs, shape)


def _grid(ball: Lp, key: Array, shape: tuple[int, int, int], dtype: jnp.dtype) -> Array:
    """``[h, w, c]``: a grid of five by five bumps, each of a random sign in every channel.

    The sum of all bumps is scaled to length 1 in the ball's norm.
    """
    sides = np.maximum(np.array(shape[:2]) // 5, 1)
    rows, columns = (np.arange(n) for n in shape[:2])
    bump = _bump(jnp.asarray(rows % sides[0]), jnp.asarray(columns % sides[1]), sides, shape)
    signs = drawn(jax.random.rademacher, key, shape, dtype)
    signs = signs[rows // sides[0]][:, columns // sides[1]]
    noise = bump[..., None].astype(dtype) * signs
    return noise / norms.lp_norm(noise[None], ball.norm)


def _place(key: Array, sides: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Draws a random window of ``sides`` (rows, columns) inside the image.

    Returns the indices of all rows ``[h]`` and columns ``[w]`` relative to the window's top left
    corner, negative before it.
    """
    first, second = jax.random.split(key)
    top = jax.random.randint(first, (), 0, shape[0] - sides[0] + 1)
    left = jax.random.randint(second, (), 0, shape[1] - sides[1] + 1)
    return jnp.arange(shape[0]) - top, jnp.arange(shape[1]) - left


def _window(rows: Array, columns: Array, sides: Array) -> Array:
    """``[h, w, 1]``: whether a pixel is in the window, by its indices from the corner."""
    high, wide = ((at >= 0) & (at < side) for at, side in zip((rows, columns), sides))
    return (high[:, None] & wide[None])[..., None]


def _flip(key: Array, delta: Array, sides: Array, eps: Array) -> Array:
    """Adds ``+-2 eps``, of one sign a channel, to a random square of ``delta [h, w, c]``."""
    where, sign = jax.random.split(key)
    inside = _window(*_place(where, sides, delta.shape), sides)
    signs = jax.random.rademacher(sign, delta.shape[2:], delta.dtype)
    return delta + jnp.where(inside, 2 * eps * signs, 0.0)


def _shift(ball: Lp, key: Array, delta: Array, sides: Array, eps: Array) -> Array:
    """Moves the budget of one random window, and the unused budget, into a bump in another window.

    Args:
      ball: its norm is 1 or 2.
      key: of this query.
      delta: ``[h, w, c]``, the present perturbation.
      sides: ``[2]``, the windows' numbers of rows and columns.
      eps: the radius.

    Returns:
      ``[h, w, c]``, the next perturbation.
    """
    keys, power = jax.random.split(key, 4), ball.norm
    rows, columns = _place(keys[0], sides, delta.shape)
    inside = _window(rows, columns, sides)
    emptied = _window(*_place(keys[1], sides, delta.shape), sides)

    def spent(mask: Array) -> Array:
        return jnp.sum(jnp.where(mask, jnp.abs(delta) ** power, 0.0), axis=(0, 1))

    def unit(change: Array) -> Array:
        length = jnp.sum(jnp.abs(change) ** power, axis=(0, 1)) ** (1 / power)
        return change / jnp.where(length > 0, length, 1.0)

    unused = jnp.maximum(eps**power - jnp.sum(jnp.abs(delta) ** power), 0.0)
    budget = (spent(inside | emptied) + unused / delta.shape[2]) ** (1 / power)
    bump = _bump(rows, columns, sides, delta.shape)
    turned = _bump(columns, rows, sides[::-1], delta.shape[1::-1]).T
    bump = jnp.where(jax.random.bernoulli(keys[2]), turned, bump)[..., None]
    signs = jax.random.rademacher(keys[3], delta.shape[2:], delta.dtype)
    change = unit(jnp.where(inside, bump * signs, 0.0)) + unit(jnp.where(inside, delta, 0.0))
    rest = jnp.where(emptied, 0.0, delta)
    return jnp.where(inside, unit(change) * budget, rest)


def _bump(rows: Array, columns: Array, sides: Any, shape: tuple[int, ...]) -> Array:
    """``[h, w]``: two pyramids of opposite sign, side by side in a window.

    ``rows`` and ``columns`` are indices relative to the window's corner, ``sides`` its numbers of
    rows and columns, ``shape`` at least the image's height and width.
    """
    half = sides[1] // 2
    left = _pyramid(rows, columns, (sides[0], half), shape)
    right = _pyramid(rows, columns - half, (sides[0], sides[1] - half), shape)
    return jnp.where((columns < half)[None], left, -right)


def _pyramid(rows: Array, columns: Array, sides: Any, shape: tuple[int, ...]) -> Array:
    """``[h, w]``: concentric square rings, of value ``sum 1 / k^2`` at distance r.

    The distance is that from the middle; the sum is over k from r + 1 to half the longer side + 1.
    ``rows`` and ``columns`` are indices relative to the corner of the window of ``sides``. Pixels
    outside get the outermost ring's value, so that callers mask them.
    """
    reach = jnp.maximum(sides[0], sides[1]) // 2
    high, wide = jnp.abs(rows - sides[0] // 2), jnp.abs(columns - sides[1] // 2)
    ring = jnp.clip(jnp.maximum(high[:, None], wide), 0, reach)
    sums = np.cumsum([0.0, *(1 / np.arange(1, max(shape) + 2) ** 2)])
    table = jnp.asarray(sums, jnp.result_type(float))
    return table[reach + 1] - table[ring]
