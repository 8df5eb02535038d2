r"""Smoothed classifiers: certificates of any model by the votes of noisy copies of a sample.

The smoothed classifier returns the class that the model gives to ``x + noise`` most often. Votes
bound the probability of a class from below, at level ``1 - alpha`` a sample, and the noise
(:mod:`wdjax.smoothing.noise`) turns that into a radius. The certified model includes a rounding of
noisy samples to a grid, so that certificates hold for floats.
"""

from collections.abc import Callable
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import identity, parallel
from wdjax.balls import Lp
from wdjax.bounds.region import Box
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import TRACES, host_only
from wdjax.core import AnyArray, Array, Model, Progress
from wdjax.engine import batching, loop
from wdjax.precision import full_precision
from wdjax.smoothing import binomial, looks, votes
from wdjax.smoothing.grid import Noise
from wdjax.smoothing.looks import ABSTAIN, SmoothedCertificate, Test

_TWIN = f"smoothing.soft, {TRACES}"
_PROBABILITIES = np.array([0.51, 0.6, 0.9, 0.999])
"""The noise's radii at these probabilities are part of the identity of a checkpoint."""


@full_precision
def certify(
    model: Callable[[Array], Array],
    x: AnyArray,
    y: AnyArray,
    *,
    noise: Noise,
    key: Array,
    eps: npt.ArrayLike | None = None,
    n0: int = 100,
    n: int = 100_000,
    alpha: float = 0.001,
    test: Test | None = None,
    box: Box = (0.0, 1.0),
    index: Any = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
    callback: Callable[[Progress], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
) -> SmoothedCertificate:
    r"""Radii within which a smoothed classifier returns the label, at level ``1 - alpha`` a sample.

    The protocol of Cohen et al.: ``n0`` votes choose a class, up to ``n`` others bound its
    probability from below, and where the bound is at most 1/2 the classifier abstains.

    If radii ``eps`` are given, a sequential test stops for a sample as soon as each of them (and
    the radius 0) is certified, refuted, or can no longer be certified by the remaining votes.
    Mostly that takes a small part of ``n``.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, which treats each sample alone.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      noise: of :mod:`wdjax.smoothing.noise`.
      key: a typed ``jax.random.key``; the noise depends only on it, the sample's index and the
        vote's number.
      eps: radii to decide on, a number or an array of them; None for the largest radii that ``n``
        votes certify.
      n0: number of votes that choose the class; 0 to certify the label itself.
      n: largest number of further votes.
      alpha: the probability that a sample's certificate is wrong.
      test: with ``n`` votes ``"clopper-pearson"``, as published, or ``"randomized"``, which is a
        little tighter; or ``"sequential"``, the default if ``eps`` is given.
      box: ``(low, high)`` of the samples, or None; noisy samples may leave it.
      index: ``[n]`` integers, the samples' indices in a larger data set.
      batch_size: number of votes on the device at once; by default as memory and speed suggest.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; votes are split over it.
      callback: called with the progress, in votes. If it returns a true value, the work ends and
        the bounds so far are returned, 0 for samples without one.
      checkpoint: a folder to save the work to and to resume it from.
      every: least number of seconds between two saves of the checkpoint.

    Returns:
      A :class:`SmoothedCertificate`.

    Raises:
      ValueError: bad samples, counts or levels, a model that depends on the rest of its batch, a
        sequential test without ``eps``, samples that the noise does not accept, a key that is not
        of the default kind, a TPU (its float64 is not exact enough), or a trace.

    Cost: up to ``n0 + n`` forward passes a sample; memory for one batch.

    Differs: noisy samples are rounded to the grid ``noise.step``, which is part of the classifier,
      and bounds are lowered by ``noise.error``. The paper lacks ``eps`` and the last two tests.

    Source: Cohen et al. [cohen2019], CERTIFY; Voracek [voracek2024] for sequential tests.

    >>> from wdjax.smoothing.noise import Gaussian
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])  # .141 and .566 from a flip
    >>> how = {"noise": Gaussian(0.25), "key": jax.random.key(0), "n": 5000}
    >>> found = certify(model, x, y, **how)
    >>> [bool(0.11 < found.radius[0] < 0.142), bool(0.5 < found.radius[1] < 0.566)]
    [True, True]
    >>> quick = certify(model, x, y, eps=0.05, **how)
    >>> (quick.radius >= 0.05).tolist(), bool(quick.votes.max() < 1000)
    ([True, True], True)
    """
    arguments.check("eps", model=model, x=x, y=y, noise=noise, eps=eps, key=key)
    _check_given(model, noise, key, x, y)
    plan = looks.plan(eps, noise, n0, n, alpha, test)
    x, y = validate.check_samples(model, x, y, box)
    error = noise.error(x)
    for text in cautions(x, noise=noise, n=n, alpha=alpha, eps=eps, test=test, box=box):
        arguments.warn(text)
    asked = _ask(model, noise, x, index, key, batch_size, mesh)
    work = looks.Work(asked, plan, np.asarray(y), error)
    mark = b""
    if checkpoint is not None:
        settings = [n0, n, alpha, looks.TESTS.index(plan.test), *(box or ())]
        said = plan.levels, plan.radius(_PROBABILITIES), error, np.array(settings)
        given = noise, model, x, y, key, asked.sample_index, said
        mark = identity.digest(votes.programs(asked), *given)
    names = type(noise).__name__, plan.test
    state = loop.carry(
        work.begin(),
        work.turn,
        work.finished,
        report=None if callback is None else lambda state: callback(work.progress(state)),
        checkpoint=checkpoint,
        every=every,
        identity=mark,
        about={"noise": names[0], "test": names[1], "n0": n0, "n": n, "alpha": alpha, "eps": eps},
        mesh=mesh,
    )
    return work.result(state)


def cautions(
    x: AnyArray,
    *,
    noise: Noise,
    n: int,
    alpha: float,
    eps: npt.ArrayLike | None = None,
    test: Test | None = None,
    box: Box = (0.0, 1.0),
) -> list[str]:
    """The warnings of :func:`certify`: radii beyond the box, or that no votes could certify.

    Args:
      x: ``[n, *shape]`` samples.
      noise: of :mod:`wdjax.smoothing.noise`.
      n: number of votes.
      alpha: the probability that a sample's certificate is wrong.
      eps: the requested radii.
      test: as in :func:`certify`.
      box: ``(low, high)`` of the samples, or None.

    Returns:
      Sentences; an empty list if all can be certified.

    Raises:
      ValueError: ``x`` is no array, ``noise`` no noise, or ``eps`` no number.

    Source: this library's own.

    >>> from wdjax.smoothing.noise import Gaussian
    >>> cautions(np.ones((1, 2)), noise=Gaussian(0.25), n=9, alpha=0.001)[0]
    'nothing can be certified: 9 votes at alpha=0.001 show no majority even if all agree; raise n.'
    """
    arguments.check("eps", x=x, noise=noise, eps=eps)
    host_only("smoothing.cautions", _TWIN, x, noise, eps)
    test = test or ("clopper-pearson" if eps is None else "sequential")
    asked = looks.plan(eps if test == "sequential" else None, noise, 0, n, alpha, test)
    ball: Any = noise if noise.norm is None else Lp(noise.norm, box)
    far = None if eps is None else arguments.too_far(ball, np.shape(x)[1:], eps)
    lost = looks.outlook(asked, noise, noise.error(x), eps)
    return [text for text in (far, lost) if text is not None]


@full_precision
def predict(
    model: Callable[[Array], Array],
    x: AnyArray,
    *,
    noise: Noise,
    key: Array,
    n: int = 1000,
    alpha: float = 0.001,
    index: Any = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
) -> npt.NDArray[np.int32]:
    r"""The smoothed classifier's class, wrong with probability at most ``alpha``, or ABSTAIN.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` finite floats.
      noise: of :mod:`wdjax.smoothing.noise`.
      key: a typed ``jax.random.key``.
      n: number of votes for each sample.
      alpha: the probability that a sample's prediction is not the most probable class.
      index: ``[n]`` integers, the samples' indices in a larger data set.
      batch_size: number of votes on the device at once.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`.

    Returns:
      ``[n]`` classes, or :data:`ABSTAIN`.

    Raises:
      ValueError: bad samples, counts or levels.

    Cost: ``n`` forward passes a sample.

    Source: Cohen et al. [cohen2019], PREDICT.

    >>> from wdjax.smoothing.noise import Gaussian
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x = jnp.array([[0.6, 0.4], [0.5, 0.5]])  # The second lies on the boundary.
    >>> predict(model, x, noise=Gaussian(0.25), key=jax.random.key(0)).tolist()
    [0, -1]
    """
    arguments.check(model=model, x=x, noise=noise, key=key)
    if binomial.rank_test(validate.check_count("n", n), 0) > binomial.check_level(alpha):
        arguments.warn(f"every prediction abstains: {n} votes at alpha={alpha:g} show no majority "
                       "even if all agree; raise n.")  # fmt: skip
    how: dict[str, Any] = {"index": index, "batch_size": batch_size, "mesh": mesh}
    return decide(tally(model, x, noise=noise, key=key, n=n, **how), alpha)


@full_precision
def tally(
    model: Callable[[Array], Array],
    x: AnyArray,
    *,
    noise: Noise,
    key: Array,
    n: int,
    only: npt.NDArray[np.bool_] | None = None,
    index: Any = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
) -> npt.NDArray[np.int64]:
    """Counts ``n`` votes of every sample, as :func:`predict` does.

    Args:
      model, x, noise, key, n, index, batch_size, mesh: as in :func:`predict`.
      only: ``[n]`` booleans, the samples to take votes for; the others have none.

    Returns:
      ``[n, K + 1]`` counts; the last column counts logits that are not finite.

    Raises:
      ValueError: a bad model, samples, noise or key, ``n`` below 1, or a mask of another
        length.

    Source: Cohen et al. [cohen2019].
    """
    arguments.check(model=model, x=x, noise=noise, key=key)
    _check_given(model, noise, key, x)
    count = validate.check_count("n", n)
    x, _ = validate.check_samples(model, x, np.zeros(len(x), np.int32), None)
    chosen = validate.check_mask("only", only, len(x))
    active = np.arange(len(x)) if chosen is None else np.flatnonzero(chosen)
    noise.error(x)
    asked = _ask(model, noise, x, index, key, batch_size, mesh)
    total = np.zeros((len(x), asked.classes + 1), np.int64)
    for first in range(0, len(active) * count, votes.at_once(asked)):
        pairs = np.arange(first, min(first + votes.at_once(asked), len(active) * count))
        total += votes.count(asked, active[pairs // count], pairs % count)
    return total


def decide(counts: npt.NDArray[Any], alpha: float) -> npt.NDArray[np.int32]:
    """The class counted most, if it is the most probable one at level ``1 - alpha``.

    Args:
      counts: ``[n, K + 1]`` from :func:`tally`.
      alpha: the probability that a class is wrong.

    Returns:
      ``[n]`` classes, or :data:`ABSTAIN`.

    Source: Cohen et al. [cohen2019], PREDICT; Hung and Fithian [hung2019].

    >>> decide(np.array([[90, 10, 0], [52, 48, 0], [0, 0, 100]]), 0.001).tolist()
    [0, -1, -1]
    """
    ranked = np.sort(counts, axis=1)
    sure = binomial.rank_test(ranked[:, -1], ranked[:, -2]) <= alpha
    first = np.argmax(counts, axis=1)
    sure &= first < counts.shape[1] - 1  # Abstains if most votes had logits that are not finite.
    return np.where(sure, first, ABSTAIN).astype(np.int32)


@full_precision
def soft(
    model: Callable[[Array], Array], x: AnyArray, *, noise: Noise, key: Array, count: int = 32
) -> Model:
    r"""A differentiable approximation of the smoothed classifier, for attacks.

    The logits are ``log mean_j softmax(model(x + e_j))`` with the same ``count`` noises for every
    sample and every call, so that it is a deterministic model for any attack. Flips should be
    confirmed under fresh noise, as :func:`wdjax.ensembles.smoothed` does.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats; only their shape and type matter.
      noise: of :mod:`wdjax.smoothing.noise`.
      key: a typed ``jax.random.key`` for the noise.
      count: number of noises.

    Returns:
      A ``Model`` that returns ``[n, K]`` log-probabilities.

    Raises:
      ValueError: a bad model, samples, noise or key, or ``count`` below 1.

    Cost: time and memory of ``count`` passes of the model, in one batch.

    Source: Salman et al. [salman2019], with the noise held fixed.

    >>> from wdjax.smoothing.noise import Gaussian
    >>> model = Model(lambda w, x: x @ w, jnp.array([[9.0, -9.0], [-9.0, 9.0]]))
    >>> x = jnp.array([[0.6, 0.4]])
    >>> soft(model, x, noise=Gaussian(0.25), key=jax.random.key(0))(x).shape
    (1, 2)
    """
    arguments.check(model=model, x=x, noise=noise, key=key)
    validate.shapes_of(model, x)
    keys = jax.random.split(key, validate.check_count("count", count))
    patterns = jax.vmap(lambda part: noise.pattern(part, x.shape[1:], x.dtype))(keys)
    return Model(_soft, {"model": model, "noise": noise, "patterns": patterns})


def _soft(params: dict[str, Any], x: Array) -> Array:
    """``[n, K]``: log of the mean softmax over the noisy copies, made with fixed noise patterns.

    ``params`` has the model, the noise, and its ``patterns`` ``[count, *shape]``, the same for all
    samples.
    """
    scales = jax.vmap(lambda image: params["noise"].scale(image) * jnp.ones_like(image))(x)
    moved = x[None] + scales[None] * params["patterns"][:, None]
    logits = params["model"](moved.reshape(-1, *x.shape[1:]))
    said = jax.nn.log_softmax(logits.reshape(len(moved), len(x), -1))
    return jax.nn.logsumexp(said, axis=0) - jnp.log(float(len(moved)))


def _check_given(model: Any, noise: Any, key: Any, *samples: Any) -> None:
    """Raises inside a trace, and for keys whose random numbers depend on the batch.

    Only JAX's default keys (threefry) give a vote the same noise in every batch.
    """
    host_only("the count of votes", _TWIN, model, noise, key, samples)
    if "threefry" not in str(jax.random.key_impl(key)):
        raise ValueError(
            "pass key=jax.random.key(seed), of the default kind: with others, the noise of a vote "
            f"would depend on its batch. Got {key!r}."
        )


def _ask(
    model: Callable[[Array], Array],
    noise: Noise,
    x: Array,
    index: Any,
    key: Array,
    batch_size: int | None,
    mesh: Mesh | None,
) -> votes.VotePoll:
    """The arguments of a vote, checked and put on the devices, for :mod:`wdjax.smoothing.votes`.

    ``x`` is ``[n, *shape]``, ``index`` is ``[n]`` or None, ``key`` one random key. ``batch_size``
    None is four times the default of a search on each device, since no gradient is kept.
    """
    if batch_size is None:
        devices = parallel.mesh_size(mesh)
        # Four times the batch of a search, since no gradient has to be kept.
        batch_size = 4 * devices * batching.default(batching.traced(model, x))
    size = validate.check_count("batch_size", batch_size)
    classes = int(jax.eval_shape(model, x[:1]).shape[-1])
    return votes.poll(model, noise, x, index, key, classes, size, mesh)
