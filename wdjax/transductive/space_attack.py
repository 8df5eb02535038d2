"""Attacks on model spaces: transfer, PGD-skip, FPA and GMSA are settings of one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from wdjax.attacks import PGD
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Attack
from wdjax.transductive.bank import Bank
from wdjax.transductive.objectives import Objective, OutputLoss, unaware


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceAttack:
    r"""An attack on the models that a defence would have: transfer, PGD-skip, FPA and GMSA in one.

    In iteration ``i = 0 .. iterations - 1`` the models so far are attacked together, the defence is
    simulated on what was found, and its model joins the bank. The set on which the simulated model
    errs most is submitted. :func:`transfer`, :func:`pgd_skip`, :func:`fpa`, :func:`gmsa_avg` and
    :func:`gmsa_min` are settings of it.

    Args:
      inner: the search, fixed-budget, with a field ``loss`` that is replaced; its points are those
        of largest objective, never clean ones.
      loss: ``(out, y) -> [n]`` of one model, to be increased.
      reduce: how the losses of many models become one, see :class:`Objective`.
      temperature: of ``reduce="softmin"``.
      iterations: ``T + 1``.
      begin: ``"static"``: F_0 is the model before the first round; ``"current"``: that of this
        round, as far as the attacker knows.
      legs: searches one after the other, each from the last one's points: ``"one"``, or
        ``"models"`` for as many as there are models, as GMSA-MIN is defined.
      restarts: searches from random points, or from the samples where ``random_start`` is False.
      rivals: further searches, towards the margin of each of so many other classes.
      judge: the loss by which the best of all these is taken; by default ``loss``.
      random_start: see ``restarts``.
      simulations: how often the defence is simulated on a set, under keys of its own; all models
        join the bank, which is expectation over its randomness. ``reduce="last"`` is the mean over
        the newest so many.
      batch_size: inputs that are attacked at once; by default all of a round.
      select: which set is submitted: that of most ``"errors"``, with the mean loss as a tie-break,
        or of most ``"loss"``.
      keep: ``"largest"`` loss; or ``"first"``: of every sample the first point that is
        misclassified, and the clean one if there is none. That is how AutoAttack's points come
        about, and why they do not transfer.
      retain: in later iterations, keep the points of the first wherever the present objective is
        larger there: what attacks the bank is never behind what attacks F_0.
      clean_fallback: submit clean samples where no simulation errs. For parity with the authors'
        code of RMC and DENT only: it understates the attack.

    Raises:
      ValueError: unknown words, counts out of range, an inner attack that has no loss or another
        budget.

    Cost: iteration i takes the inner attack's passes times ``restarts + rivals``, times the models
      in the bank, times as many again for ``legs="models"``.

    Differs: a tie between sets is decided by loss, not by order. No sample is returned clean but
      for ``keep="first"`` and ``clean_fallback``. ``retain`` is not in the paper.

    Source: Chen et al. [chen2022], Algorithms 1 and 2.

    >>> SpaceAttack(inner=PGD(steps=5)) == SpaceAttack(inner=PGD(steps=5))
    True
    """

    inner: Attack = dataclasses.field(default_factory=PGD)
    loss: OutputLoss = setting(unaware)
    reduce: str = setting("mean")
    temperature: float = setting(1.0)
    iterations: int = setting(10)
    begin: str = setting("current")
    legs: str = setting("one")
    restarts: int = setting(1)
    rivals: int = setting(0)
    judge: OutputLoss | None = setting(None)
    random_start: bool = setting(True)
    simulations: int = setting(1)
    batch_size: int | None = setting(None)
    select: str = setting("errors")
    keep: str = setting("largest")
    retain: bool = setting(True)
    clean_fallback: bool = setting(False)

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("restarts", 1), ("rivals", 0), ("simulations", 1)):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), least))
        if self.batch_size is not None:
            validate.check_count("batch_size", self.batch_size)
        validate.check_choice("begin", self.begin, ("static", "current"))
        validate.check_choice("legs", self.legs, ("one", "models"))
        validate.check_choice("select", self.select, ("errors", "loss"))
        validate.check_choice("keep", self.keep, ("largest", "first"))
        self.objective  # noqa: B018  Checks the reduction.
        if not hasattr(self.inner, "budget"):
            return  # A tree operation rebuilds the dataclass around something else.
        if self.inner.budget != "sample" or not hasattr(self.inner, "loss"):
            raise ValueError(
                "inner must look inside a ball of every sample and have a loss, such as PGD or "
                f"APGD; got {self.inner!r}."
            )
        if self.random_start and not hasattr(self.inner.ball, "noise"):
            raise ValueError(
                f"the ball {self.inner.ball!r} has no random points; pass random_start=False."
            )
        if getattr(self.inner, "targets", 0):
            raise ValueError("targets of the inner attack are for single models: set rivals.")

    @property
    def objective(self) -> Objective:
        """What is raised over the models that are asked; the newest alone for ``"last"``."""
        reduce = "mean" if self.reduce == "last" else self.reduce
        return Objective(self.loss, reduce, self.temperature)

    def first(self, bank: Bank) -> Array | int:
        """The first model that is asked."""
        return jnp.maximum(bank.filled - self.simulations, 0) if self.reduce == "last" else 0

    @property
    def capacity(self) -> int:
        """Models that the bank must hold."""
        return 1 + self.simulations * self.iterations

    @property
    def runs(self) -> int:
        """Searches a leg."""
        return self.restarts + self.rivals


def transfer(inner: Attack, **settings: Any) -> SpaceAttack:
    """Transfer PGD: the model before the first round is attacked, once.

    >>> transfer(PGD()).iterations
    1
    """
    return SpaceAttack(inner=inner, iterations=1, begin="static", **settings)


def pgd_skip(inner: Attack, **settings: Any) -> SpaceAttack:
    """PGD-skip: every round attacks the model of the round before, as far as it is known.

    As published it sees the defender's state: ``play(..., leak="state")``.

    Source: Wu et al. [rmc2020] by way of Chen et al. [chen2022], example 1.

    >>> pgd_skip(PGD()).begin
    'current'
    """
    return SpaceAttack(inner=inner, iterations=1, **settings)


def fpa(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """The fixed point attack: in every iteration the newest model alone is attacked.

    Source: Chen et al. [chen2022], Algorithm 1.

    >>> fpa(PGD()).reduce
    'last'
    """
    return SpaceAttack(inner=inner, iterations=iterations, reduce="last", **settings)


def gmsa_avg(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """Greedy model space attack on the mean of the losses.

    Source: Chen et al. [chen2022], Algorithm 2.

    >>> gmsa_avg(PGD()).reduce
    'mean'
    """
    return SpaceAttack(inner=inner, iterations=iterations, **settings)


def gmsa_min(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """Greedy model space attack on the least of the losses, with as many legs as models.

    ``legs="one"`` spends what :func:`gmsa_avg` spends.

    Source: Chen et al. [chen2022], Algorithm 2 and A.1.3.

    >>> gmsa_min(PGD()).legs, gmsa_min(PGD(), legs="one").legs
    ('models', 'one')
    """
    settings = {"legs": "models"} | settings
    return SpaceAttack(inner=inner, iterations=iterations, reduce="min", **settings)
