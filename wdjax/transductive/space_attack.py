"""Attacks on model spaces: transfer, PGD-skip, FPA and GMSA are settings of one class."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from wdjax import distinct
from wdjax.attacks import PGD
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack
from wdjax.transductive.bank import Bank
from wdjax.transductive.objectives import Objective, OutputLoss, unaware


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceAttack:
    r"""An attack on the models that a defence may adapt to: transfer, PGD-skip, FPA and GMSA.

    In iteration ``i = 0 .. iterations - 1`` all models so far are attacked together; then the
    defence is simulated on the points found, and its model joins the bank. The set of points on
    which the simulated model errs most is submitted. :func:`transfer`, :func:`pgd_skip`,
    :func:`fpa`, :func:`gmsa_avg` and :func:`gmsa_min` are settings of this class.

    Args:
      inner: the search, with a fixed budget, whose field ``loss`` is replaced. Its points are those
        of largest objective, never clean ones.
      loss: ``(out, y) -> [n]`` of one model, to be increased.
      reduce: how the losses of many models are combined, see :class:`Objective`.
      temperature: of ``reduce="softmin"``.
      iterations: ``T + 1``.
      begin: the first model: ``"static"``, that before the first round; ``"current"``, that before
        this round, as far as the attacker knows it.
      legs: consecutive searches, each from the previous one's points: ``"one"``, or ``"models"``
        for as many as there are models, as in the definition of GMSA-MIN.
      restarts: searches from random points, or from the samples if ``random_start`` is False.
      rivals: number of target classes; one more search for the margin to each.
      judge: the loss that chooses the best point of these searches; by default ``loss``.
      random_start: see ``restarts``.
      simulations: simulations of the defence on a set, with different keys; all models join the
        bank, for an expectation over randomness. ``reduce="last"`` is then the mean over so many
        newest models.
      batch_size: inputs attacked at once; by default all of a round.
      select: which set is submitted: that of most ``"errors"``, with ties decided by mean loss, or
        that of largest mean ``"loss"``.
      keep: ``"largest"`` loss, or ``"first"``: for every sample the first misclassified point, or
        the clean one if there is none. AutoAttack keeps such points, which is why they do not
        transfer.
      retain: in later iterations, keep the points of the first iteration wherever their present
        objective is larger: the attack on the bank is then never weaker than that on the first
        model.
      clean_fallback: submit clean samples if no simulation errs. For parity with the authors' code
        of RMC and DENT only: it understates the attack.
      points: ``[n, *shape]``, submitted as they are: see :func:`given`.
      search: finds such points on the static model, before the game: see :func:`transfer`.

    Raises:
      ValueError: unknown options, counts out of range, an inner attack without a loss or with
        another budget.

    Cost: iteration i takes the inner attack's passes times ``restarts + rivals`` times the number
      of models in the bank, and times that number again for ``legs="models"``.

    Differs: a tie between sets is decided by loss, not by order. Clean samples are submitted only
      with ``keep="first"`` or ``clean_fallback``. ``retain`` is not in the paper.

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
    points: Any = None
    search: Any = setting(None)

    def __post_init__(self) -> None:
        """Checks the settings, each alone and with the inner attack."""
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
            return  # JAX rebuilds the dataclass with placeholders as leaves.
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
        """The objective that is raised; for ``"last"`` a mean over the newest models only."""
        reduce = "mean" if self.reduce == "last" else self.reduce
        return Objective(self.loss, reduce, self.temperature)

    def first(self, bank: Bank) -> Array | int:
        """The index of the first model that is attacked."""
        return jnp.maximum(bank.filled - self.simulations, 0) if self.reduce == "last" else 0

    @property
    def capacity(self) -> int:
        """Number of models that the bank must hold."""
        return 1 + self.simulations * self.iterations

    @property
    def runs(self) -> int:
        """Number of searches in a leg."""
        return self.restarts + self.rivals


def transfer(inner: Any, ball: Lp | None = None, **settings: Any) -> SpaceAttack:
    """Transfer attacks: on the model before the first round, once.

    Args:
      inner: an attack with a radius and a loss, such as PGD. Or any other search, which is then
        done once, before the game: an attack such as ``CarliniWagner()``, or a function
        ``(model, x, y, *, eps, key, ball)`` such as ``ensembles.autoattack``, which returns a
        :class:`~wdjax.core.Found` or points ``[n, *shape]``. Of a search those flips are submitted
        that lie within ``eps``, and other samples as they are, as AutoAttack leaves them.
      ball: of a function: what bounds its points; by default linf in the box [0, 1].
      **settings: further fields of :class:`SpaceAttack`.

    Raises:
      ValueError: what is no search, what :class:`SpaceAttack` refuses, or a ball for an attack,
        which has its own.

    Source: Chen et al. [chen2022].

    >>> transfer(PGD()).iterations
    1
    >>> brighter = transfer(lambda model, x, y, *, eps, key, ball: jnp.clip(x + eps, 0, 1))
    >>> brighter.search is not None
    True
    """
    inner_ball = getattr(inner, "ball", None)
    if isinstance(inner, type) or not (callable(inner) or hasattr(inner, "stages")):
        raise ValueError(f"inner must be an attack or a function that searches, got {inner!r}.")
    if inner_ball is not None and ball is not None:
        raise ValueError(f"ball is for functions: {inner!r} has its own.")
    if inner_ball is None or getattr(inner, "budget", "") != "sample" or not hasattr(inner, "loss"):
        settings |= {"search": inner, "inner": PGD(inner_ball or ball or Lp(), steps=1)}
        return SpaceAttack(iterations=1, begin="static", **settings)
    return SpaceAttack(inner=inner, iterations=1, begin="static", **settings)


def given(points: AnyArray, ball: Lp = Lp(), **settings: Any) -> SpaceAttack:
    """Points that were computed elsewhere, or corruptions: submitted as they are.

    Args:
      points: ``[n, *shape]``, in the order of the game's inputs. The game refuses points beyond
        its ``eps`` in the ball.
      ball: by which their distance is measured.
      **settings: further fields of :class:`SpaceAttack`.

    Raises:
      ValueError: points that are not finite, or what :class:`SpaceAttack` refuses.

    Source: Chen et al. [chen2022], Figure 1.

    >>> given(jnp.ones((2, 4))).points.shape
    (2, 4)
    """
    arguments.check(x=points)
    inner = PGD(ball, steps=1)
    return SpaceAttack(inner=inner, iterations=1, begin="static", points=points, **settings)


def pgd_skip(inner: Attack, **settings: Any) -> SpaceAttack:
    """PGD-skip: every round attacks the model of the previous round, as far as it is known.

    The published attack sees the defender's state: ``play(..., leak="state")``.

    Args:
      inner: an attack with a radius, on all models at once.
      **settings: further fields of :class:`SpaceAttack`.

    Source: Wu et al. [rmc2020] by way of Chen et al. [chen2022], example 1.

    >>> pgd_skip(PGD()).begin
    'current'
    """
    return SpaceAttack(inner=inner, iterations=1, **settings)


def fpa(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """The fixed point attack: every iteration attacks the newest model only.

    Args:
      inner: an attack with a radius, on all models at once.
      iterations: simulated adaptations.
      **settings: further fields of :class:`SpaceAttack`.

    Source: Chen et al. [chen2022], Algorithm 1.

    >>> fpa(PGD()).reduce
    'last'
    """
    return SpaceAttack(inner=inner, iterations=iterations, reduce="last", **settings)


def gmsa_avg(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """Greedy model space attack on the mean of the losses.

    Args:
      inner: an attack with a radius, on all models at once.
      iterations: simulated adaptations.
      **settings: further fields of :class:`SpaceAttack`.

    Source: Chen et al. [chen2022], Algorithm 2.

    >>> gmsa_avg(PGD()).reduce
    'mean'
    """
    return SpaceAttack(inner=inner, iterations=iterations, **settings)


def gmsa_min(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """Greedy model space attack on the minimum of the losses, with as many legs as models.

    With ``legs="one"`` it costs as much as :func:`gmsa_avg`.

    Args:
      inner: an attack with a radius, on all models at once.
      iterations: simulated adaptations.
      **settings: further fields of :class:`SpaceAttack`.

    Source: Chen et al. [chen2022], Algorithm 2 and A.1.3.

    >>> gmsa_min(PGD()).legs, gmsa_min(PGD(), legs="one").legs
    ('models', 'one')
    """
    settings = {"legs": "models"} | settings
    return SpaceAttack(inner=inner, iterations=iterations, reduce="min", **settings)
