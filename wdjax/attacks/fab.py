"""The fast adaptive boundary attack (FAB): steps onto linearised boundaries, near the sample."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, loops, norms
from wdjax.attacks import ascent, hyperplane, linearised
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_PAST = 1e-3
"""How far past the estimated crossing to go, as a share of the segment, so that flips survive
rounding."""


class State(NamedTuple):
    x: Array
    flip: Array
    """The nearest misclassified point so far; ``distance`` ``[n]`` is its distance or inf."""
    distance: Array
    above: Array
    """The criterion at ``flip``; halved by the Illinois rule in the final search."""
    within: Array
    """The lower end of the bracket, the largest tried share of the way without a flip."""
    below: Array
    """The criterion at that share; halved by the Illinois rule in the final search."""
    limit: Array
    """A sample whose ``distance`` is at most this is finished."""
    taken: Array
    """Steps taken, over all runs."""
    targets: Array | None
    """``[n, T]``, target classes."""
    keys: Array | None


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class FAB:
    r"""FAB: a step to the nearest linearised boundary, averaged with the sample's own projection.

    With ``P`` the projection on the linearised boundary inside the box
    (:mod:`wdjax.attacks.hyperplane`), ``d_1 = P(x_k) - x_k`` and ``d_0 = P(x) - x``,

        x_{k+1} = (1 - a)(x_k + eta d_1) + a (x + eta d_0),  a = min(|d_1| / (|d_1| + |d_0|), 0.1),

    and a misclassified iterate, stored if it is the nearest so far, is pulled back to ``x +
    backward (x_{k+1} - x)``. After all runs a root search follows on the segment from the sample to
    the nearest flip: the next point is where the straight line through the criterion at the ends of
    the bracket crosses zero.

    Args:
      ball: norm and box.
      steps: gradient steps of one run.
      targets: 0 to follow the nearest of all boundaries; else the number of target classes, at most
        ``K - 1``, those of largest logit at the sample, each attacked in a run of its own.
      restarts: runs, for each target. The first begins at the sample or at ``start``, later ones at
        random points within half the smaller of the distance found and ``eps``. More than one make
        a key necessary.
      bounded: look only for points within ``eps`` and stop at the first: a fixed-budget attack.
      eta: overshoot, at least 1; may be traced.
      bias: the largest ``a``; may be traced.
      backward: the share of its perturbation that a misclassified iterate keeps; may be traced.
      final: points tried in the final search; 0 in the authors' code.

    Returns the nearest misclassified point of all runs, whatever its class.

    Raises:
      ValueError: a count below 1, a model without logits.

    Cost: a step takes 2 forward and 1 backward passes a sample, ``K - 1`` backward without targets;
    the final search ``final`` forward passes.

    Differs: the paper's final search is missing in the authors' code. In ours the criterion at the
    end of the bracket that was not replaced is halved (the Illinois rule): otherwise a curved
    criterion would put every new point on the same side.

    Source: Croce and Hein [fab2020], Algorithm 1; the targets are those of AutoAttack.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(FAB(steps=10), model, x, y)
    >>> [round(float(d), 1) for d in found.cost]
    [0.1, 0.4]
    """

    ball: Lp = setting(Lp())
    steps: int = setting(100)
    targets: int = setting(0)
    restarts: int = setting(1)
    bounded: bool = setting(False)
    eta: float | Array = 1.05
    bias: float | Array = 0.1
    backward: float | Array = 0.9
    final: int = setting(3)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("targets", 0), ("restarts", 1), ("final", 0)):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), least))

    @property
    def budget(self) -> Literal["sample", "none"]:
        return "sample" if self.bounded else "none"

    @property
    def random(self) -> bool:
        return self.restarts > 1

    @property
    def stages(self) -> tuple[Stage, ...]:
        runs = self.restarts * max(1, self.targets)
        return (
            Stage(self._step, runs * self.steps, self._over),
            Stage(self._homeward, self.final, self.finished),
        )

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        """The first state, with the sample and a misclassified start as ends of the bracket.

        ``distance``, ``above``, ``below`` and ``limit`` are ``[n]``; ``flip`` is ``[n, *shape]``.
        """
        ascent.need_logits("FAB", samples.out)
        x, y = samples.x, samples.y
        point = x if start is None else self.ball.clip(start)
        out = samples.out if start is None else victim.model(point)
        value = victim.criterion(out, y)
        there = value > 0
        length = norms.lp_norm(point - x, self.ball.norm)
        targets = ascent.top_rivals(samples.out, y, self.targets) if self.targets else None
        nowhere = jnp.full(len(y), -jnp.inf, x.dtype)
        return State(
            x=point,
            flip=point,
            distance=jnp.where(there, length, jnp.inf),
            above=value,
            within=jnp.zeros(len(y), x.dtype),
            below=victim.criterion(samples.out, y),
            limit=samples.radius if self.bounded else nowhere,
            taken=jnp.zeros(len(y), jnp.int32),
            targets=targets,
            keys=keys if self.random else None,
        )

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step of Algorithm 1, towards the nearest linearised boundary; tests the new point.

        A misclassified point replaces the nearest flip if it is nearer, and the next iterate is
        pulled back from it towards the sample by the factor ``backward``. With ``targets``, only
        the present target's boundary counts; otherwise the nearest one. Samples whose restart is
        complete begin the next.
        """
        home, y, norm = samples.x, samples.y, self.ball.norm
        if state.targets is None:
            rivals = ascent.all_rivals(samples.out, y)
        else:
            number = state.taken[:, None] // self.steps % state.targets.shape[1]
            rivals = jnp.take_along_axis(state.targets, number, axis=1)
        plane, _, info = linearised.planes(victim, samples, state.x, rivals, norm)
        moved = self._approach(home, state.x, plane)
        flipped, judged = ascent.flips(victim, samples, moved)
        flipped &= ~judged.fault
        length = norms.lp_norm(moved - home, norm)
        nearer = flipped & (length < state.distance)
        back = home + self.backward * (moved - home)
        stepped = state._replace(
            x=jnp.where(norms.spread(flipped, home), back, moved),
            flip=jnp.where(norms.spread(nearer, home), moved, state.flip),
            distance=jnp.where(nearer, length, state.distance),
            above=jnp.where(nearer, judged.value, state.above),
            taken=state.taken + 1,
        )
        spent = info._replace(forwards=info.forwards + 1, fault=info.fault | judged.fault)
        return ascent.hold(self._over(state), state, self._renew(samples, stepped)), spent

    def _approach(self, home: Array, x: Array, plane: linearised.Plane) -> Array:
        """``[n, *shape]``: the next point, a mean of two projections on a linearised boundary.

        ``home`` are the samples, ``x`` the present points, ``plane`` the boundary linearised at
        ``x``. One projection starts from ``x``, the other from ``home``; both steps are extended by
        ``eta``. The weight of the sample's projection is at most ``bias``.
        """
        n, norm = len(x), self.ball.norm
        away = jnp.sum((plane.normal * (home - x)).reshape(n, -1), axis=1)
        points = jnp.concatenate([x, home])
        gaps = jnp.concatenate([plane.gap, plane.gap + away])
        normals = jnp.concatenate([plane.normal, plane.normal])
        steps = hyperplane.project(points, normals, gaps, norm, self.ball.box) - points
        near, far = jnp.split(norms.lp_norm(steps, norm), 2)
        whole = jnp.where(near + far > 0, near + far, 1.0)
        share = norms.spread(jnp.minimum(near / whole, self.bias), x)
        ends = points + self.eta * steps
        return self.ball.clip((1 - share) * ends[:n] + share * ends[n:])

    def _homeward(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step of the final search, on the segment from the sample to the nearest flip.

        The next point is that of the regula falsi in its Illinois form, moved slightly towards the
        flip. A point that flips becomes the nearest flip; any other one becomes the bracket's lower
        end.
        """
        rise = state.above - state.below
        known = jnp.isfinite(state.distance) & jnp.isfinite(rise) & (rise > 0)
        crossing = jnp.where(known, -state.below / jnp.where(known, rise, 1.0), 1.0)
        share = state.within + (1 - state.within) * (crossing + _PAST).clip(0, 1)
        home = samples.x
        tried = self.ball.clip(home + norms.spread(share, home) * (state.flip - home))
        flipped, judged = ascent.flips(victim, samples, tried)
        length = norms.lp_norm(tried - home, self.ball.norm)
        missed = known & ~judged.fault & ~flipped
        nearer = known & ~judged.fault & flipped & (length < state.distance)
        moved = state._replace(
            flip=jnp.where(norms.spread(nearer, home), tried, state.flip),
            distance=jnp.where(nearer, length, state.distance),
            above=jnp.where(nearer, judged.value, state.above / 2),
            within=jnp.where(nearer, state.within / share, jnp.where(missed, share, state.within)),
            below=jnp.where(missed, judged.value, state.below / 2),
        )
        return ascent.hold(self.finished(state), state, moved), judged

    def _renew(self, samples: Samples, state: State) -> State:
        """Replaces ``x`` by the start of the next run, for samples that have just completed one.

        A run is ``steps`` steps towards one target (or towards all classes without targets). The
        first run of each target starts at the sample; those of later restarts at a random point
        around it, within half the distance of the nearest flip or half of eps, whichever is less
        (1/2 if neither is known). The nearest flip is kept.
        """
        ends, home = state.taken % self.steps == 0, samples.x
        aims = 1 if state.targets is None else state.targets.shape[1]
        again = state.taken // (aims * self.steps)

        def restarted() -> Array:
            point, keys = home, state.keys
            if keys is not None:
                reach = state.distance
                if samples.eps is not None:
                    reach = jnp.minimum(reach, samples.eps)
                reach = jnp.where(jnp.isfinite(reach), reach, 1.0) / 2
                noise = jax.vmap(self._draw)(jax.vmap(jax.random.fold_in)(keys, state.taken), home)
                reach = jnp.where(again > 0, reach, 0.0)
                point = self.ball.clip(home + norms.spread(reach, home) * noise)
            return jnp.where(norms.spread(ends, home), point, state.x)

        return state._replace(x=loops.cond(jnp.any(ends), restarted, lambda: state.x))

    def _draw(self, key: Array, like: Array) -> Array:
        """A random move of at most 1 in the ball's norm, in the shape of one sample."""
        return self.ball.noise(key, like.shape, like.dtype)

    def _over(self, state: State) -> Array:
        """``[n]``: whether all runs are completed or the nearest flip is within the limit."""
        aims = 1 if state.targets is None else state.targets.shape[1]
        return self.finished(state) | (state.taken >= self.restarts * aims * self.steps)

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        known = norms.spread(jnp.isfinite(state.distance), state.flip)
        return jnp.where(known, state.flip, samples.x), None

    def finished(self, state: State) -> Array:
        return state.distance <= state.limit
