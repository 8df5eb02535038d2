"""Wasserstein distributional attack (WDA), Algorithm 1 of Le et al. [le2025]."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp

from wdjax import distinct, losses
from wdjax.attacks import ascent, rivals
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_FEW = 10
"""Up to so many classes every rival is tried, as in Algorithm 1."""


class State(NamedTuple):
    x: Array
    rival: Array
    best: ascent.Best | None


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class WDA:
    r"""Wasserstein distributional attack: tries a step towards every rival and follows the best.

    Each probing step takes, for every rival class j, a dual-norm step ``x + step_size M_r(g_j)``
    along ``g_j = grad (z_j - z_y)``, projects it on the ball around the sample, and keeps the
    candidate of largest margin; the later steps follow the last winner. With
    ``1 / kappa`` of its mass there, which gives a distribution (equation 11) in the Wasserstein
    ball of order p, by Corollary C.2.

    Args:
      ball: norm and box; the paper has no box.
      steps: all steps, the paper's ``maxiter``.
      probe: how many of them try every rival; ``1 <= probe <= steps``.
      rivals: try only this many classes, those of largest logit at the point; by default all rivals
        of up to ten classes, 10 of up to a hundred, 20 of more (the paper's ``topK``).
      iterate: ``"last"`` as in the paper, or ``"best"``, the iterate of largest criterion. By
        default the last, but the best for norm 1, which the paper leaves out: there the last
        iterate is weaker than PGD with equally many gradients.
      step_size: may be traced; by default the paper's share of the radius, 0.6375 for norm inf and
        0.4 for norm 2.

    Raises:
      ValueError: ``probe`` outside ``1 .. steps``, another iterate, a model without logits.

    Cost: with m rivals, a probing step takes 1 + m forward and m backward passes (one forward
      serves
    all gradients), a later step 1 + 1; memory for a few copies of the batch, whatever m is.

    Differs: the candidates of later steps are not evaluated and the iterate after the last is not
    computed, since the paper's algorithm discards them. The box is that of real images. For
    ``kappa > 1`` the default step grows with the radius; the paper keeps it. Algorithm 1 tries
    every rival; beyond ten classes the default is that of Appendix E.

    Source: Le et al. [le2025], Algorithm 1 and equation 11.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.8, 0.2]]), jnp.array([0])
    >>> point = wdjax.run(WDA(), model, x, y, eps=0.2)
    >>> mixed = wdjax.run(WDA(), model, x, y, eps=0.2, kappa=2.0)  # twice as far, half the mass
    >>> float(point.accuracy), float(mixed.accuracy)
    (1.0, 0.5)
    """

    budget: ClassVar[Literal["sample"]] = "sample"
    random: ClassVar[bool] = False

    ball: Lp = setting(Lp())
    steps: int = setting(20)
    probe: int = setting(10)
    rivals: int | None = setting(None)
    iterate: str | None = setting(None)
    step_size: float | Array | None = None

    def __post_init__(self) -> None:
        probe = validate.check_count("probe", self.probe)
        object.__setattr__(self, "probe", probe)
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        if self.steps < probe:
            raise ValueError(
                f"steps must be at least probe, the steps that try every rival, got steps="
                f"{self.steps} and probe={probe}; pass a smaller probe too, such as "
                f"WDA(steps={self.steps}, probe={(self.steps + 1) // 2})."
            )
        iterate = (
            ("best" if self.ball.norm == 1 else "last") if self.iterate is None else self.iterate
        )
        object.__setattr__(self, "iterate", iterate)
        validate.check_choice("iterate", iterate, ("best", "last"))
        if self.rivals is not None:
            object.__setattr__(self, "rivals", validate.check_count("rivals", self.rivals))

    def tried(self, classes: int) -> int:
        """How many rivals a probing step tries for a model of ``classes`` classes."""
        usual = rivals.top(classes) if classes > _FEW else classes
        return min(usual if self.rivals is None else self.rivals, classes - 1)

    @property
    def stages(self) -> tuple[Stage, ...]:
        last = (Stage(self._compare, 1),) if self.iterate == "best" else ()
        return (
            Stage(self._probe, self.probe, cycles=True),
            Stage(self._follow, self.steps - self.probe, cycles=True),
            *last,
        )

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        ascent.need_logits("WDA", samples.out)
        x = samples.x if start is None else self.ball.project(start, samples.x, samples.radius)
        return State(x, samples.y, ascent.no_best(x, self.iterate == "best"))

    def _advance(self, samples: Samples, x: Array, gradient: Array) -> Array:
        """``[n, *shape]``: ``x`` after one step along the gradient, projected on the ball."""
        size = self.step_size
        if size is None:
            size = ascent.default_step(self.ball, samples.eps)
        return self.ball.project(self.ball.ascend(x, gradient, size), samples.x, samples.radius)

    def _probe(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One probing step: tries a step towards each rival, keeps the candidate of largest margin.

        The winner's class becomes the sample's rival for the steps that follow.
        """

        def choose(logits: Array) -> Array:
            count = self.tried(logits.shape[-1])
            if count == logits.shape[-1] - 1:
                return ascent.all_rivals(logits, samples.y)
            return ascent.top_rivals(logits, samples.y, count)

        def advance(x: Array, gradient: Array) -> Array:
            return self._advance(samples, x, gradient)

        move, logits, info = ascent.best_move(victim, state.x, samples.y, choose, advance)
        best = ascent.keep_best(state.best, state.x, info.value, logits)
        return State(move.x, move.rival, best), info

    def _follow(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step up the margin of the rival that won the last probing step."""

        def margin(logits: Array, y: Array) -> Array:
            return losses.targeted_margin(logits, y, state.rival)

        seen = ascent.slope(victim, state.x, samples.y, margin)
        info = ascent.note(victim, samples.y, seen)
        moved = self._advance(samples, state.x, seen.gradient)
        best = ascent.keep_best(state.best, state.x, info.value, seen.out)
        return State(moved, state.rival, best), info

    def _compare(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The last stage if the best iterate counts: tests the last point, moves to the best."""
        out, info = ascent.judge(victim, state.x, samples.y)
        best = ascent.keep_best(state.best, state.x, info.value, out)
        assert best is not None
        return State(best.x, state.rival, best), info

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.x, None

    def finished(self, state: State) -> Array:
        return jnp.zeros(len(state.x), bool)
