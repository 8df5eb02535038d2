"""Wasserstein distributional attack (WDA), Algorithm 1 of Le et al."""

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
    rival: jax.Array
    best: ascent.Best | None


@functools.lru_cache(maxsize=256)
def wda(
    *,
    norm=math.inf,
    order=1,
    steps: int = 20,
    probe: int = 10,
    rivals: int | None = None,
    iterate: str = "last",
    box: tuple[float, float] | None = (0.0, 1.0),
) -> Attack:
    r"""Wasserstein distributional attack: every sample sends ``1 / kappa`` of its mass away.

    Each probing step takes, for every rival class j, a dual-norm step ``x + step_size M_r(g_j)``
    along ``g_j = grad (z_j - z_y)``, projects it on the ball of radius ``kappa^(1/p) eps`` around
    the sample, and keeps the candidate of largest margin; the later steps follow the last winner.
    By Corollary C.2 the distribution (equation 11) lies in the Wasserstein ball of order p.

    Args:
      norm: ground norm r: 1, 2 or inf.
      order: Wasserstein order p: 1, 2 or inf (then ``kappa`` does not enlarge the radius).
      steps: all steps, the paper's ``maxiter``.
      probe: how many of them try every rival; ``1 <= probe <= steps``.
      rivals: try only this many classes, those of largest logit at the sample; all by default.
      iterate: ``"last"`` as in the paper, or ``"best"``, the iterate of largest margin.
      box: ``(low, high)`` of valid inputs, or None as in the paper.

    Returns:
      An :class:`~wdjax.core.Attack` with the knobs ``kappa`` (default 1, a point-wise attack) and
      ``step_size`` (default the paper's share of ``eps``: 0.6375 for inf, 0.4 for 2 and 1).

    Raises:
      ValueError: another norm or order, ``probe`` outside ``1 .. steps``.

    Cost: with m rivals, 1 + m forward and m backward passes a probing step (one forward serves all
    gradients) and 1 + 1 a later step; memory for m copies of the batch, at most 10 at once.

    Differs: the candidates of later steps are not evaluated and the iterate after the last is not
    computed, since the paper's algorithm throws them away. The box is the one of real images.

    Source: Le et al., Algorithm 1 and equation 11.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.8, 0.2]]), jnp.array([0])
    >>> point = wdjax.run(wda(), model, x, y, eps=0.2)
    >>> mixed = wdjax.run(wda(), model, x, y, eps=0.2, kappa=2.0)  # twice as far, half the mass
    >>> float(point.accuracy), float(mixed.accuracy)
    (1.0, 0.5)
    """
    norms.check_norm(norm)
    ascent.check_order(order)
    ascent.check_count("probe", probe)
    ascent.check_count("steps", steps, least=probe)
    ascent.check_iterate(iterate)
    ascent.check_box(box)
    if rivals is not None:
        ascent.check_count("rivals", rivals)

    def reach(*, eps, kappa, step_size=None):
        return eps * kappa ** (1 / order)

    def init(model, x, y, logits, keys, *, eps, kappa, step_size=None):
        return State(x, y, ascent.no_best(x, iterate))

    def advance(x, gradient, center, eps, kappa, step_size):
        size = ascent.default_step(eps, norm, step_size)
        moved = norms.ascend(x, gradient, size, norm, box)
        return norms.retract(moved, center, reach(eps=eps, kappa=kappa), norm, box)

    def choose(y, logits):
        count = logits.shape[-1] - 1 if rivals is None else rivals
        some = count < logits.shape[-1] - 1
        return ascent.top_rivals(logits, y, count) if some else ascent.all_rivals(logits, y)

    def try_all(model, x, y, state, *, eps, kappa, step_size=None):
        move_on = functools.partial(advance, center=x, eps=eps, kappa=kappa, step_size=step_size)
        logits, move, count = ascent.best_move(
            model, state.x, y, functools.partial(choose, y), move_on
        )
        margin = losses.margin(logits, y)
        info = ascent.info(margin, gradients=count, forwards=1 + count)
        return State(move.x, move.rival, ascent.keep_best(state.best, state.x, margin)), info

    def follow(model, x, y, state, *, eps, kappa, step_size=None):
        logits, gradient = ascent.margin_gradient(model, state.x, y, state.rival)
        margin = losses.margin(logits, y)
        moved = advance(state.x, gradient, x, eps, kappa, step_size)
        info = ascent.info(margin, gradients=1, forwards=1)
        return State(moved, state.rival, ascent.keep_best(state.best, state.x, margin)), info

    def compare(model, x, y, state, *, eps, kappa, step_size=None):
        margin = losses.margin(model(state.x), y)
        best = ascent.keep_best(state.best, state.x, margin)
        info = ascent.info(margin, gradients=0, forwards=1)
        return State(best.x, state.rival, best), info

    def weigh(cost, success, *, eps, kappa, step_size=None):
        return jnp.full_like(cost, 1 / kappa)

    last = [Stage(compare, 1)] if iterate == "best" else []
    return Attack(
        name="wda",
        init=init,
        stages=(Stage(try_all, probe), Stage(follow, steps - probe), *last),
        point=lambda x, state, **knobs: state.x,
        norm=norm,
        order=order,
        box=box,
        knobs=(("kappa", 1.0), ("step_size", None)),
        reach=reach,
        weigh=weigh,
    )
