"""The adaptive Wasserstein distributional attack (WDA++), Algorithm 2 of Le et al. [le2025]."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, norms
from wdjax.attacks import ascent, rivals
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim


class State(NamedTuple):
    rivals: Array
    """``[n, m]``: the classes of largest logit at the sample."""
    before: Array
    """The last point before the flip, ``[n, *shape]``."""
    after: Array
    """The current point; once the walk is over, the flip that ended it."""
    flipped: Array
    """Whether ``after`` is misclassified, ``[n]``."""
    arrived: Array
    """Whether the walk is over: ``after`` is a flip by more than rounding, ``[n]``."""
    low: Array
    high: Array
    """``low`` and ``high`` bracket the flip, as shares of the last segment."""
    near: Array
    far: Array
    """``near`` and ``far`` bracket a flip, as shares of the way from the sample."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class WDAPlusPlus:
    r"""WDA++: walk every sample to its nearest flip; the budget is spent on the cheapest flips.

    The walk takes WDA's probing steps towards the ``rivals`` largest classes without projection on
    a ball, stops at the first flip beyond rounding and bisects the last segment. The budget
    ``eps^p`` then buys mass ``1 / kappa_i`` at the price given by the distance ``d_i``, cheapest
    first, the last one in part (:func:`wdjax.transport.spend`): the exact optimum for these
    distances.

    Args:
      ball: norm and box; the paper has no box.
      steps: maximum number of steps, the paper's ``maxiter``.
      bisections: halvings of the last segment, the paper's ``srchiter``.
      ray_bisections: further halvings, of the way from the sample to the flip; each can only
        shorten the distance. 0 is the paper's algorithm.
      rivals: classes tried at every step, those of largest logit at the sample; by default the
        paper's ``topK``: 5 of up to ten classes, 10 of up to a hundred, 20 of more.
      step_size: may be traced; by default that of WDA if an ``eps`` is given, else the paper's
        absolute step (0.02 for norm inf, 0.2 for norm 2). For norm 1, which the paper leaves out,
        always 0.8.
      overshoot: how far beyond the boundary to go, as a share of the distance; with 0.01 every flip
        survives float32 rounding on other machines.

    ``cost`` in the result is ``d_i``; it is meaningful where ``success`` is True.

    Raises:
      ValueError: a count below 1 (halvings: 0), a model without logits.

    Cost: 1 + m forward and m backward passes a step until the sample flips, 1 forward a bisection.
    Inside a trace all samples take as many steps as the slowest.

    Differs: the bisection along the ray is not in the paper. The allocation handles distances of 0
    and infinity (the paper's formula for infinity is 0 times infinity).

    Source: Le et al. [le2025], Algorithm 2 and Appendix E.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> result = wdjax.run(WDAPlusPlus(), model, x, y, eps=0.1)
    >>> [round(float(d), 2) for d in result.cost], [round(float(w), 2) for w in result.weight]
    ([0.1, 0.4], [1.0, 0.25])
    """

    budget: ClassVar[Literal["none"]] = "none"
    random: ClassVar[bool] = False

    ball: Lp = setting(Lp())
    steps: int = setting(20)
    bisections: int = setting(10)
    ray_bisections: int = setting(15)
    rivals: int | None = setting(None)
    step_size: float | Array | None = None
    overshoot: float | Array = 0.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("bisections", 0), ("ray_bisections", 0), ("rivals", 1)):
            if name != "rivals" or self.rivals is not None:
                count = validate.check_count(name, getattr(self, name), least)
                object.__setattr__(self, name, count)

    def tried(self, classes: int) -> int:
        """How many rivals a step tries for a model of ``classes`` classes."""
        return min(self.rivals or rivals.top(classes), classes - 1)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(self._walk, self.steps, self.finished),
            Stage(self._bisect, self.bisections, self._lost),
            Stage(self._pull_back, self.ray_bisections, self._lost),
        )

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        ascent.need_logits("WDA++", samples.out)
        x, y = samples.x, samples.y
        first = x if start is None else self.ball.clip(start)
        out = samples.out if start is None else victim.model(first)
        zero, one = jnp.zeros(len(y), x.dtype), jnp.ones(len(y), x.dtype)
        read = ascent.read(victim.criterion, samples, out)
        flipped = read.value > 0
        arrived = flipped if start is None else read.lasts
        chosen = ascent.top_rivals(samples.out, y, self.tried(samples.out.shape[-1]))
        return State(chosen, x, first, flipped, arrived, low=zero, high=one, near=zero, far=one)

    def _walk(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One probing step for samples that have not arrived.

        The last two points of the walk, ``before`` and ``after``, ``[n, *shape]``, move on; they
        enclose the boundary once ``arrived``, ``[n]``.
        """
        size = self.step_size
        if size is None:
            # l1 steps are absolute. With other norms eps scales them, but no distance depends on
            # eps, so no gradient passes through it.
            scale = None if self.ball.norm == 1 else samples.eps
            size = jax.lax.stop_gradient(ascent.default_step(self.ball, scale))

        def advance(x: Array, gradient: Array) -> Array:
            return self.ball.clip(self.ball.ascend(x, gradient, size))

        move, _, info = ascent.best_move(
            victim, state.after, samples.y, lambda logits: state.rivals, advance
        )
        read = ascent.read(victim.criterion, samples, move.logits)
        still = norms.spread(~state.arrived, state.after)
        walked = state._replace(
            before=jnp.where(still, state.after, state.before),
            after=jnp.where(still, move.x, state.after),
            flipped=jnp.where(state.arrived, state.flipped, read.value > 0),
            arrived=state.arrived | read.lasts,
        )
        return walked, info

    def _bisect(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One bisection step between the last correctly classified point and the flip after it."""
        middle = (state.low + state.high) / 2
        point = _blend(state.before, state.after, middle)
        flipped, info = ascent.flips(victim, samples, point)
        low, high = _halve(state.flipped, state.low, state.high, middle, flipped)
        return state._replace(low=low, high=high), info

    def _pull_back(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One bisection step between the sample and the flip found, along the straight line."""
        middle = (state.near + state.far) / 2
        point = _blend(samples.x, _flip(state), middle)
        flipped, info = ascent.flips(victim, samples, point)
        near, far = _halve(state.flipped, state.near, state.far, middle, flipped)
        return state._replace(near=near, far=far), info

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        x = samples.x
        flip = _blend(x, _flip(state), state.far * (1 + self.overshoot))
        return self.ball.clip(jnp.where(norms.spread(state.flipped, x), flip, x)), None

    def finished(self, state: State) -> Array:
        return state.arrived

    def _lost(self, state: State) -> Array:
        """``[n]``: whether the sample has no flip, so that there is nothing to bisect."""
        return ~state.flipped


def _blend(start: Array, end: Array, share: Array) -> Array:
    """The points at the share ``[n]`` of the way from start to end; exactly ``end`` at share 1."""
    share = norms.spread(share, start)
    return jnp.where(share == 1, end, start + share * (end - start))


def _flip(state: State) -> Array:
    """``[n, *shape]``: the flip nearest to the boundary on the walk's last segment."""
    return _blend(state.before, state.after, state.high)


def _halve(
    wanted: Array, low: Array, high: Array, middle: Array, flipped: Array
) -> tuple[Array, Array]:
    """The bracket ``(low, high)`` of a bisection after the point at ``middle`` was tested.

    Where ``flipped``, ``middle`` becomes the new ``high``, elsewhere the new ``low``. All are
    ``[n]``; samples where ``wanted`` is False keep their bracket.
    """
    low = jnp.where(wanted & ~flipped, middle, low)
    return low, jnp.where(wanted & flipped, middle, high)
