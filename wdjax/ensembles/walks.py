"""The searches of which :func:`wdjax.ensembles.wda_star` and :func:`wdjax.ensembles.fast` are made,
and the schedule of the former for a number of passes."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wdjax.attacks.pdpgd import PDPGD
from wdjax.attacks.slp import SLP
from wdjax.attacks.walk import Walk
from wdjax.balls import Lp
from wdjax.core import Found
from wdjax.engine import driver
from wdjax.ensembles.question import Question

_LEAST = 21
"""Passes of the shortest schedule."""
_PILOTS = 70
"""Minimum number of passes at which several first walks are compared."""
_LOOK, _SHORT = 4, 12
"""Steps of the look from the sample, and of the walks that follow it or end the search."""
_MANY = (150, 300, 1500)
"""Numbers of passes from which on walks are 30 steps long, all kinds are tried, and walks are 40
steps long."""
_BROAD = 0.375, 0.265, 0.225
"""For few samples the shares of the steps of walks from the sample, from a random point of the box,
and from where the nearer of both flips came. The rest are small steps at the end."""
_SPARSE = (30, 100)
"""Steps of the opening for norm 1, at least and at most."""
_SLOW = 66
"""Maximum number of steps of the walk that follows it."""
_FEW = 200
"""Minimum number of passes for which norm 1 has a schedule of its own."""
_BOTH = 450
"""Minimum number of passes that pay for both openings of norm 1 on every sample."""
_PAIR = 14, 2
"""Steps and classes of the walk from the sample in norm 2 where passes are few."""
_AIMS = 3
"""Classes that a walk from the sample aims at if passes are many or the first steps flip most."""
_BRISK = 12, 25
"""Steps of walks to that many classes for norm 1, where passes are few and where they are many."""
_AROUND = 10
"""Steps of the two walks from around the sample that follow them where passes are few."""
_BRIEF = 13
"""Steps of the brief walks from random points before a walk from the nearest of their flips. After
fewer steps they are too far away to tell which of them comes near a good flip."""
_STARTS = 3, 6
"""Number of these brief walks, where passes or samples are few and where both are many."""
_LINEAR = 20, 8
"""Norm 1 ends with one step of sequential linear programming for so many passes, and at most so
many steps."""


class Kind(NamedTuple):
    """A search, and where it starts."""

    attack: Walk | PDPGD | SLP
    start: str
    """``"sample"``, ``"around"`` the sample at the scale of the best distance, or ``"best"``."""
    where: str = "all"
    """Of ``Itinerary.always`` and ``last`` a kind is made for samples that it suits: ``"near"``, if
    their nearest flip came from a walk that began at the sample; ``"far"``, if not; ``"found"``, if
    there is a flip; ``"lost"``, if there is none."""
    brief: int = 0
    """The number of brief walks from random points that come first: it starts at the nearest of
    their flips."""

    @property
    def passes(self) -> int:
        """Maximum number of forward and backward passes of one sample."""
        targets = self.attack.targets if isinstance(self.attack, Walk) else 0
        ranking = 6 if targets else 0
        own = ranking + max(1, targets) * (2 * self.attack.steps + 1) + 2
        return own + self.brief * (2 * _BRIEF + 3)

    @property
    def first(self) -> Walk:
        """One of its brief walks."""
        return Walk(self.attack.ball, steps=_BRIEF, far=True, haste=1.0)

    @property
    def near(self) -> bool:
        """Whether it walks from the sample itself, not from a random point around it."""
        walks = isinstance(self.attack, Walk) and not self.attack.far and not self.brief
        return walks and self.start == "sample"

    def follow(self, ask: Question, number: int, found: Found | None, only: np.ndarray) -> Found:
        """Search ``number`` of an ensemble, on the samples of ``only``, from where the kind starts.

        ``"best"`` starts at the nearest flips of ``found``; ``"around"`` starts near the sample, at
        the scale of those flips' distances; a kind with brief walks at the nearest of their flips;
        otherwise, or if ``found`` is None, the search starts at the sample. Scale 0 means none, and
        needs no program of its own.
        """
        scale = np.zeros(len(ask.y), np.float32)
        if found is not None and self.start == "around":
            scale = _scale(found)
        start = found.x_adv if found is not None and self.start == "best" else None
        flips: list[Found] = []
        for brief in range(self.brief):
            flips.append(ask.search(number + brief, self.first, eps=0 * scale, only=only))
            start = driver.best_of(*flips).x_adv
        last = ask.search(number + self.brief, self.attack, eps=scale, start=start, only=only)
        return driver.best_of(*flips, last)


def distances(found: Found) -> np.ndarray:
    """``[n]``: distances of the nearest flips in float64, inf where there is none."""
    return np.where(found.success, np.asarray(found.cost, np.float64), np.inf)


def _scale(found: Found) -> np.ndarray:
    """``[n]``: the distance of each sample's nearest flip; without one the median, or 0."""
    distance = distances(found)
    known = distance[np.isfinite(distance) & (distance > 0)]
    typical = float(np.median(known)) if len(known) else 0.0
    return np.where(np.isfinite(distance), distance, typical).astype(found.cost.dtype)


class Itinerary(NamedTuple):
    """What :func:`wdjax.ensembles.wda_star` does, in this order."""

    firsts: list[Kind]
    """Candidates for the opening: the best on the trial samples opens the others."""
    look: list[Kind]
    """A short walk from samples that no opening walked from, and one where it comes near."""
    always: list[Kind]
    """Searches of all samples that they suit."""
    lost: list[Kind]
    """Searches of the samples without a flip, in place of what others take from theirs; kinds of
    ``last`` that suit ``"lost"`` samples are made as far as the passes go."""
    more: list[Kind]
    """Searches made where they pay; walks from the sample only where such a walk came nearest,
    and those with brief walks only where none did."""
    last: list[Kind]
    """Searches of every sample whose distance matters, as far as the passes go."""
    several: Kind | None = None
    """What opens in place of the first of ``firsts`` if that is best on most trial samples."""
    probe: Kind | None = None
    """The search before all others: first steps of every sample."""
    easy: "Itinerary | None" = None
    """What is done instead if the steps of the probe flip more than half of the samples."""


def schedule(ball: Lp, passes: int, most: int | None = None, few: bool = False) -> Itinerary:
    """Which searches are made with a mean of ``passes``.

    ``few``: whether there are too few samples for trials. Raises if ``most``, the limit of one
    sample, is below ``passes``.
    """
    if most is not None and most < passes:
        raise ValueError(f"most must be at least passes={passes}, the mean, got {most}.")
    if passes < _LEAST:
        raise ValueError(f"wda_star needs at least {_LEAST} passes an image, got {passes}.")
    first = min(25, (passes - 3) // 2 if passes < _PILOTS else passes // 3 - 4)
    later = 20 if passes < _MANY[0] else 30 if passes < _MANY[2] else 40
    far = Kind(Walk(ball, steps=first, far=True, haste=1.0), "sample")
    # From the sample, following the linearised margin is better where the ball has corners.
    aimed = Walk(ball, steps=first, targets=1, haste=1.0 if ball.norm == 2 else 0.0)
    near = Kind(aimed, "sample")
    if ball.norm == 2 and passes >= _MANY[0]:
        steps, targets = (first, _AIMS) if passes >= _MANY[1] else _PAIR
        near = Kind(replace(aimed, steps=steps, targets=targets), "sample")
    held = Walk(ball, far=True, haste=0.5, step_size=1.1, shrink=0.25, width=1.3)
    bold = Walk(ball, far=True, haste=1.0, step_size=2.0, shrink=0.35, width=2.3)
    more = [Kind(replace(walk, steps=later), "around") for walk in (held, bold)]
    if passes < _PILOTS and ball.norm == 1:
        return _hasty(ball, passes)
    if passes < _PILOTS:
        return Itinerary([far], [], [], [], more, [])
    ends = _ends(ball, passes) if ball.norm == 1 else []
    firsts = [far, Kind(replace(held, steps=first), "around"), near]
    if passes < _MANY[0]:
        return Itinerary(firsts, [], [], [], more[:1], ends)
    short = replace(aimed, steps=_SHORT)
    look = [Kind(replace(aimed, steps=_LOOK, targets=0), "sample"), Kind(short, "sample")]
    polish = Kind(Walk(ball, steps=later, step_size=0.2), "best")
    last = [Kind(Walk(ball, steps=_SHORT, step_size=0.1, shrink=0.1), "best")]
    starts, steps = (_STARTS[0], 20) if few or passes < _MANY[1] else (_STARTS[1], later)
    several = Kind(Walk(ball, steps=steps, haste=aimed.haste), "sample", brief=starts)
    if passes < _MANY[1]:
        more.append(Kind(replace(short, targets=2), "sample"))
        if few and not (ball.norm == 1 and passes >= _FEW):
            return _broad(passes, aimed, bold, more, ends)
    else:
        wide = Walk(ball, steps=later, far=True, targets=2, width=1.5)
        patient = Walk(ball, steps=2 * later, far=True)
        more += [Kind(wide, "around"), Kind(patient, "sample"), polish]
    if ball.norm == 1 and passes >= _FEW:
        return _sparse(ball, passes, more, ends)
    if ball.norm == 1:
        return Itinerary(firsts, look, [], [], more, [*last, *ends])
    if passes >= _MANY[1]:
        more = [several, *more]
    return Itinerary([far, near], look, [], [], more, last, several=several)


def _ends(ball: Lp, passes: int) -> list[Kind]:
    """The last search for norm 1, which makes flips sparser than walks do in as many passes."""
    every, most = _LINEAR
    return [Kind(SLP(ball, steps=min(most, passes // every)), "best")]


def _hasty(ball: Lp, passes: int) -> Itinerary:
    """The schedule for norm 1 if passes are few.

    Few steps from a random point end 5 to 50 times farther away than as many from the sample, but
    those find no flip where gradients are tiny. Trial samples, one in six, take both. Samples
    without a flip take a third as many steps from a random point, and others end with two of linear
    programming, as far as the passes go.
    """
    steps = (3 * passes // 4 - 3) // 2
    near = Walk(ball, steps=steps, haste=1.0)
    far = replace(near, far=True)
    lost = Kind(replace(far, steps=steps // 3 + 1), "sample", "lost")
    end = Kind(SLP(ball, steps=2), "best", "found")
    return Itinerary([Kind(far, "sample"), Kind(near, "sample")], [], [], [], [], [lost, end])


def _broad(passes: int, aimed: Walk, bold: Walk, more: list[Kind], ends: list[Kind]) -> Itinerary:
    """The schedule for few samples: each takes walks of several kinds; what they leave is shared.

    So few tell too little about each other: with trials that choose one kind for all, other attacks
    were nearer on half as many images again.
    """
    kinds = [
        Kind(replace(aimed, targets=0), "sample"),
        Kind(Walk(aimed.ball, far=True, haste=1.0), "sample"),
        Kind(aimed, "sample", "near"),
        Kind(bold, "around", "far"),
        Kind(Walk(aimed.ball, step_size=0.1, shrink=0.1), "best", "found"),
    ]
    # A sample takes one of the third and fourth; the third costs more.
    fixed = sum(kind.passes - 2 * kind.attack.steps for kind in kinds if kind.where != "far")
    total = (passes - fixed - _cost(ends)) // 2
    first, free, again = (int(share * total) for share in _BROAD)
    steps = first, free, again, again, total - first - free - again
    each = [
        kind._replace(attack=replace(kind.attack, steps=count)) for kind, count in zip(kinds, steps)
    ]
    return Itinerary(each[:1], [], each[1:], [], more, ends)


def _sparse(ball: Lp, passes: int, more: list[Kind], ends: list[Kind]) -> Itinerary:
    """The schedule for norm 1.

    Walks from random points end at points that change many pixels. The proximal map finds the few
    pixels that matter, often at a long distance, which a long walk in small steps then shortens.
    Below 450 passes this is done only if the first steps from the sample flip at most half of the
    samples: gradients there are small. Otherwise walks to several classes are better.
    """
    first = Kind(PDPGD(ball, steps=min(_SPARSE[1], max(_SPARSE[0], passes // 12))), "sample")
    probe = Kind(Walk(ball, steps=_LOOK), "sample") if passes < _BOTH else None
    left = passes - _cost(ends) - (probe.passes + 2 if probe else 0)
    steps = min(_SLOW, (left - first.passes - 3) // 2)
    slow = Walk(ball, steps=steps, haste=1.0, step_size=0.3, shrink=0.2)
    polish = Kind(slow, "best", "found")
    far = Kind(replace(slow, far=True, haste=0.0, shrink=0.4), "sample")
    third = steps // 3
    free = Walk(ball, steps=third, far=True, haste=1.0)
    lost = [Kind(replace(slow, steps=steps - third - 1), "sample"), Kind(free, "sample")]
    walk = Walk(ball, steps=_BRISK[0], targets=_AIMS, haste=1.0, step_size=0.7)
    if probe:
        shared = more if passes >= _MANY[1] else []
        brisk = Kind(walk, "sample")
        around = [Kind(replace(kind.attack, steps=_AROUND), "around", "found") for kind in more[:2]]
        left -= brisk.passes + _cost(around)
        end = Kind(replace(slow, steps=(left - 3) // 2, step_size=1.0, shrink=0.3), "best", "found")
        easy = Itinerary([brisk], [], [*around, end], lost[1:], shared, ends)
        return Itinerary([first], [], [polish], lost, shared, ends, probe=probe, easy=easy)
    left -= first.passes + polish.passes
    longest = ((left - 8) // _AIMS - 1) // 2
    several = Kind(replace(walk, steps=min(_BRISK[1], longest)), "sample")
    return Itinerary([first], [], [polish, several], [polish], [far, polish, *more], ends)


def _cost(kinds: list[Kind]) -> int:
    """The passes of one sample that takes all of these."""
    return sum(kind.passes for kind in kinds)
