"""The proved side of an audit: certified radii and upper bounds of the expected loss.

The default certificate and loss bound apply to programs of known primitives only. Where they refuse
a model, the audit goes on without them and keeps their reason.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import certify
from wdjax.balls import Lp
from wdjax.core import Array, Classifier
from wdjax.engine.tasks import Task
from wdjax.report.evidence import ORDERS, Numbers, Sandwich, ball_name

BATCH = 64
"""Default number of samples on the device at once."""

CROWN, LIPSCHITZ = "CROWN", "Lipschitz"
"""Names of the default certificate and of the default loss bound."""


class Certifier(Protocol):
    """``(model, x, y) -> [n]`` radii, in the audit's norm, within which no sample is misclassified.

    0 where nothing is certified, inf where the whole box is.
    """

    def __call__(self, model: Classifier, x: Array, y: Array, /) -> npt.ArrayLike: ...


class LossBound(Protocol):
    """Returns for ``eps`` ``[m]`` upper bounds ``[m]`` of the expected cross-entropy in a ball."""

    def __call__(
        self, model: Classifier, x: Array, y: Array, /, *, eps: Numbers, order: float
    ) -> npt.ArrayLike: ...


class Refused(NamedTuple):
    """Why a default certificate or bound does not apply to the model."""

    reason: str


class Setting(NamedTuple):
    """What all jobs of an audit share."""

    model: Classifier
    x: Any
    """``[n, *shape]``; in a part of the samples they may be a :class:`wdjax.data.Unread`."""
    y: Any
    ball: Lp
    eps_list: Numbers
    key: Array
    batch_size: int | None
    mesh: Mesh | None

    def take(self, rows: np.ndarray) -> tuple[Any, Any]:
        """Samples and labels of these numbers."""
        whole = len(rows) == len(self.y)
        return (self.x, self.y) if whole else (self.x[rows], self.y[rows])


Job = tuple[str, Callable[..., Any]]
"""A job's description and the job, ``task -> result``; for radii ``(rows, task) -> result``."""


def standard_certificates(
    ball: Lp, batch_size: int | None = None, mesh: Mesh | None = None
) -> dict[str, Certifier]:
    """The default certificates of an audit.

    Args:
      ball: norm and box.
      batch_size: samples on all devices at once.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are split over it.

    >>> list(standard_certificates(Lp(2)))
    ['CROWN']
    """
    batch = BATCH if batch_size is None else batch_size
    how: dict[str, Any] = {"box": ball.box, "batch_size": batch, "mesh": mesh}
    return {CROWN: functools.partial(certify.radius, norm=ball.norm, **how)}


def or_refused(work: Callable[..., Any]) -> Callable[..., Any]:
    """A job whose ``ValueError`` becomes its result, :class:`Refused`.

    For defaults only: model and samples have passed every check when they run, so that what they
    raise is about the program.
    """

    @functools.wraps(work)
    def tried(*given: Any) -> Any:
        try:
            return work(*given)
        except ValueError as error:
            return Refused(str(error))

    return tried


def constant(setting: Setting, task: Task) -> float:
    """The Lipschitz constant of the model's loss in the audit's norm."""
    ball, labels = setting.ball, np.unique(np.asarray(setting.y))
    like = np.zeros((len(labels), *setting.x.shape[1:]), setting.x.dtype)  # Their shape is all.
    return certify.lipschitz_constant(setting.model, like, labels, norm=ball.norm, box=ball.box)


def by_lipschitz(setting: Setting, constant: float | Refused) -> LossBound:
    """The default loss bound, by a Lipschitz constant that is computed once."""
    batch = BATCH if setting.batch_size is None else setting.batch_size

    def bound(
        model: Classifier, x: Array, y: Array, /, *, eps: Numbers, order: float
    ) -> npt.ArrayLike:
        if isinstance(constant, Refused):
            raise ValueError(constant.reason)
        return certify.wdro_bound(
            model,
            x,
            y,
            norm=setting.ball.norm,
            eps=eps,
            order=order,
            box=setting.ball.box,
            constant=constant,
            batch_size=batch,
        )

    return bound


def radii_jobs(setting: Setting, certificates: Mapping[str, Certifier]) -> Iterator[Job]:
    """One job for every certificate, with the radii of some samples as its result."""

    def radius(name: str, certificate: Certifier, rows: np.ndarray, task: Task) -> Numbers:
        x, y = setting.take(rows)
        found = np.asarray(certificate(setting.model, x, y), float)
        if found.shape != (len(y),) or not np.all(found >= 0):
            raise ValueError(
                f"the certificate {name!r} must return {len(y)} radii of at least 0, without NaN; "
                f"got shape {list(found.shape)}."
            )
        return found

    for name, certificate in certificates.items():
        yield f"radii by {name}", functools.partial(radius, name, certificate)


def loss_jobs(setting: Setting, bounds: Mapping[str, LossBound]) -> Iterator[Job]:
    """One job for every bound and order, with ``[m]`` bounds as its result."""
    model, x, y, eps_list = setting.model, setting.x, setting.y, setting.eps_list

    def bound(name: str, order: float, bound: LossBound, task: Task) -> Numbers:
        found = np.asarray(bound(model, x, y, eps=eps_list, order=order), float)
        if found.shape != eps_list.shape:
            raise ValueError(
                f"the loss bound {name!r} must return one number for each of {eps_list.size} "
                f"budgets, got shape {list(found.shape)}."
            )
        return found

    for name, one in bounds.items():
        for order in ORDERS:
            words = f"loss bound by {name}, {ball_name(order)}"
            yield words, functools.partial(bound, name, order, one)


def without_refused(found: Sandwich) -> Sandwich:
    """The sandwich with refusals, which jobs returned in place of numbers, as reasons by name."""
    radii: dict[str, Any] = found.certificates
    bounds: dict[str, Any] = found.loss_bounds
    no_radii = {name: r.reason for name, r in radii.items() if isinstance(r, Refused)}
    no_bounds = {
        name: one.reason
        for name, by_order in bounds.items()
        for one in reversed(by_order.values())
        if isinstance(one, Refused)
    }
    return found._replace(
        certificates={name: r for name, r in radii.items() if name not in no_radii},
        loss_bounds={name: by for name, by in bounds.items() if name not in no_bounds},
        refused_certificates=no_radii,
        refused_bounds=no_bounds,
    )
