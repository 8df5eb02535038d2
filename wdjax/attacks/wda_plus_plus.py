"""The adaptive Wasserstein distributional attack (WDA++), Algorithm 2 of Le et al."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses, norms, transport
from wdjax.attacks import ascent
from wdjax.core import Attack, Stage

_ULPS = 64


class State(NamedTuple):
    rivals: jax.Array
    """``[n, m]``: the classes of largest logit at the sample."""
    before: jax.Array
    """The last point before the flip."""
    after: jax.Array
    """The current point; once flipped, the first misclassified one."""
    flipped: jax.Array
    low: jax.Array
    high: jax.Array
    """The flip lies between these shares of the last segment."""
    near: jax.Array
    far: jax.Array
    """A flip lies between these shares of the way from the sample."""


@functools.lru_cache(maxsize=256)
def wda_plus_plus(
    *,
    norm=math.inf,
    order=1,
    steps: int = 20,
    bisections: int = 10,
    ray_bisections: int = 15,
    rivals: int = 5,
    box: tuple[float, float] | None = (0.0, 1.0),
) -> Attack:
    r"""WDA++: walk every sample to its nearest flip, then spend the budget on the cheapest flips.

    The walk takes WDA's probing steps towards the ``rivals`` largest classes without projecting on
    a ball, stops at the first flip and bisects the last segment. The distances ``d_i`` found buy
    mass ``1 / kappa_i`` in order of price until ``eps^p`` is spent, the last one in part
    (:func:`wdjax.transport.allocate`): the exact optimum for these distances.

    Args:
      norm: ground norm r: 1, 2 or inf.
      order: Wasserstein order p: 1, 2 or inf.
      steps: longest walk, the paper's ``maxiter``.
      bisections: halvings of the last segment, the paper's ``srchiter``.
      ray_bisections: halvings, after that, of the way from the sample to the flip; each can only
        shorten the distance. 0 is the paper's algorithm.
      rivals: classes tried at every step, the paper's ``topK`` (5 for CIFAR-10, 10 for CIFAR-100,
        20 for ImageNet).
      box: ``(low, high)`` of valid inputs, or None as in the paper.

    Returns:
      An :class:`~wdjax.core.Attack` with the knobs ``step_size`` (default: that of WDA) and
      ``overshoot`` (default 0): how far beyond the boundary to go, as a share of the distance; 0.01
      keeps every flip through float32 rounding elsewhere. ``cost`` in the result is ``d_i``, and
      ``success`` tells where it is a distance at all.

    Raises:
      ValueError: another norm or order, a count below 1.

    Cost: 1 + m forward and m backward passes a step until the sample flips, 1 forward a bisection.
    Inside a trace a sample that has flipped waits for the last one.

    Differs: the bisection along the ray is not in the paper. A distance of 0 or infinity is handled
    by the allocation (the paper's line for the latter is 0 times infinity).

    Source: Le et al., Algorithm 2 and Appendix E.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> result = wdjax.run(wda_plus_plus(), model, x, y, eps=0.1)
    >>> [round(float(d), 2) for d in result.cost], [round(float(w), 2) for w in result.weight]
    ([0.1, 0.4], [1.0, 0.25])
    """
    norms.check_norm(norm)
    ascent.check_order(order)
    ascent.check_count("steps", steps)
    ascent.check_count("bisections", bisections, least=0)
    ascent.check_count("ray_bisections", ray_bisections, least=0)
    ascent.check_count("rivals", rivals)
    ascent.check_box(box)

    def clip(x):
        return x if box is None else jnp.clip(x, *box)

    def init(model, x, y, logits, keys, **knobs):
        chosen = ascent.top_rivals(logits, y, rivals)
        wrong = jnp.argmax(logits, axis=-1) != y
        zero, one = jnp.zeros(len(y), x.dtype), jnp.ones(len(y), x.dtype)
        return State(chosen, x, x, wrong, low=zero, high=one, near=zero, far=one)

    def walk(model, x, y, state, *, eps, step_size=None, overshoot):
        size = ascent.default_step(eps, norm, step_size)
        logits, move, count = ascent.best_move(
            model,
            state.after,
            y,
            lambda logits: state.rivals,
            lambda x, gradient: clip(norms.ascend(x, gradient, size, norm, box)),
        )
        still = norms.spread(~state.flipped, x)
        walked = state._replace(
            before=jnp.where(still, state.after, state.before),
            after=jnp.where(still, move.x, state.after),
            flipped=state.flipped | (jnp.argmax(move.logits, axis=-1) != y),
        )
        margin = losses.margin(logits, y)
        return walked, ascent.info(margin, gradients=count, forwards=1 + count)

    def bisect(model, x, y, state, *, eps, step_size=None, overshoot):
        middle = (state.low + state.high) / 2
        flipped, info = _judge(model, y, _blend(state.before, state.after, middle))
        low, high = _halve(state.low, state.high, middle, flipped)
        return state._replace(low=low, high=high), info

    def pull_back(model, x, y, state, *, eps, step_size=None, overshoot):
        middle = (state.near + state.far) / 2
        flipped, info = _judge(model, y, _blend(x, found(state), middle))
        near, far = _halve(state.near, state.far, middle, flipped)
        return state._replace(near=near, far=far), info

    def found(state):
        return _blend(state.before, state.after, state.high)

    def point(x, state, *, eps, step_size=None, overshoot):
        flip = _blend(x, found(state), state.far * (1 + overshoot))
        return clip(jnp.where(norms.spread(state.flipped, x), flip, x))

    def weigh(cost, success, *, eps, **knobs):
        return transport.allocate(jnp.where(success, cost, jnp.inf), eps, order)

    return Attack(
        name="wda++",
        init=init,
        stages=(
            Stage(walk, steps, lambda state: state.flipped),
            Stage(bisect, bisections),
            Stage(pull_back, ray_bisections),
        ),
        point=point,
        norm=norm,
        order=order,
        box=box,
        knobs=(("step_size", None), ("overshoot", 0.0)),
        reach=_anywhere,
        weigh=weigh,
        converged=lambda state: state.flipped,
    )


def _blend(start, end, share):
    """The point at the given share of the way, per sample; ``end`` itself at share 1."""
    share = norms.spread(share, start)
    return jnp.where(share == 1, end, start + share * (end - start))


def _judge(model, y, x):
    """Whether ``x`` is misclassified beyond rounding, and the step's info: one forward pass.

    Halvings end within floats of the boundary; the slack keeps them on its far side in another
    batch, where the same logits round differently.
    """
    logits = model(x)
    margin = losses.margin(logits, y)
    slack = _ULPS * jnp.finfo(logits.dtype).eps * jnp.max(jnp.abs(logits), axis=-1)
    return margin > slack, ascent.info(margin, gradients=0, forwards=1)


def _halve(low, high, middle, flipped):
    return jnp.where(flipped, low, middle), jnp.where(flipped, middle, high)


def _anywhere(*, eps, **knobs):
    """A single point may go anywhere: the budget binds the whole distribution."""
    return jnp.full_like(eps, jnp.inf)
