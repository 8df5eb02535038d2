"""Projected gradient descent and its one-step form, FGSM."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses, norms
from wdjax.attacks import ascent
from wdjax.core import Attack, Stage


class State(NamedTuple):
    x: jax.Array
    best: ascent.Best | None


@functools.lru_cache(maxsize=256)
def pgd(
    *,
    norm=math.inf,
    steps: int = 40,
    loss=losses.cross_entropy,
    random_start: bool = False,
    iterate: str = "best",
    box: tuple[float, float] | None = (0.0, 1.0),
) -> Attack:
    r"""Projected gradient ascent ``x <- P(x + step_size * M_r(grad loss))`` on a per-sample loss.

    Args:
      norm: ground norm r of the ball: 1, 2 or inf.
      steps: gradient steps.
      loss: ``(logits [n, K], y [n]) -> [n]``, to be increased; see :mod:`wdjax.losses`.
      random_start: start uniformly in the ball instead of at the sample; makes a key necessary.
      iterate: ``"best"`` returns the iterate of largest margin, ``"last"`` the last one.
      box: ``(low, high)`` of valid inputs, or None.

    Returns:
      An :class:`~wdjax.core.Attack` with the knob ``step_size`` (default ``2.5 eps / steps``, for
      norm 1 ``eps / 4``, and ``eps`` for one step).

    Raises:
      ValueError: another norm, fewer than one step, another iterate.

    Cost: per step 1 forward and 1 backward pass a sample; 1 more forward for ``"best"``.

    Differs: feasibility by clipping the ball's projection to the box, as all implementations do;
    for norms 1 and 2 that is not the Euclidean projection on the intersection.

    Source: Madry et al. (2018); the projection is equation 2 of Le et al.

    >>> pgd(norm=2, steps=5) is pgd(norm=2, steps=5)  # equal settings share one compiled program
    True
    """
    norms.check_norm(norm)
    ascent.check_count("steps", steps)
    ascent.check_iterate(iterate)
    ascent.check_box(box)

    def init(model, x, y, logits, keys, *, eps, step_size=None):
        start = x
        if random_start:
            noise = jax.vmap(lambda key: _uniform_in_ball(key, x[0].size, norm, x.dtype))(keys)
            start = norms.retract(x + eps * noise.reshape(x.shape), x, eps, norm, box)
        return State(start, ascent.no_best(start, iterate))

    def step(model, x, y, state, *, eps, step_size=None):
        default = eps if steps == 1 else eps / 4 if norm == 1 else 2.5 * eps / steps
        size = default if step_size is None else step_size

        def total(point):
            logits = model(point)
            return jnp.sum(loss(logits, y)), logits

        gradient, logits = jax.grad(total, has_aux=True)(state.x)
        margin = losses.margin(logits, y)
        moved = norms.ascend(state.x, gradient, size, norm, box)
        moved = norms.retract(moved, x, eps, norm, box)
        info = ascent.info(margin, gradients=1, forwards=1)
        return State(moved, ascent.keep_best(state.best, state.x, margin)), info

    def compare(model, x, y, state, *, eps, step_size=None):
        margin = losses.margin(model(state.x), y)
        best = ascent.keep_best(state.best, state.x, margin)
        info = ascent.info(margin, gradients=0, forwards=1)
        return State(best.x, best), info

    return Attack(
        name="pgd" if steps > 1 else "fgsm",
        init=init,
        stages=(Stage(step, steps), *([Stage(compare, 1)] if iterate == "best" else [])),
        point=lambda x, state, **knobs: state.x,
        norm=norm,
        box=box,
        knobs=(("step_size", None),),
        random=random_start,
    )


def fgsm(*, norm=math.inf, loss=losses.cross_entropy, box=(0.0, 1.0)) -> Attack:
    """The fast gradient (sign) method: one step of length ``eps``, :func:`pgd` with one step.

    Args:
      norm: ground norm r of the ball: 1, 2 or inf.
      loss: ``(logits [n, K], y [n]) -> [n]``, to be increased.
      box: ``(low, high)`` of valid inputs, or None.

    Returns:
      An :class:`~wdjax.core.Attack`.

    Cost: 1 forward and 1 backward pass a sample.

    Source: Goodfellow et al. (2015).

    >>> fgsm().name
    'fgsm'
    """
    return pgd(norm=norm, steps=1, loss=loss, iterate="last", box=box)


def _uniform_in_ball(key, dimension, norm, dtype):
    if norm == math.inf:
        return jax.random.uniform(key, (dimension,), dtype, -1.0, 1.0)
    return jax.random.ball(key, dimension, p=norm, dtype=dtype)
