r"""Decides properties of any function on a box: does a specification's forbidden output occur?

An attack looks for a violation first; then bounds look for a proof, from the cheapest to the
tightest, and for violations on the way, until the time is over.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.bounds import inner_slopes, leaves, linear_outputs
from wdjax.certify import falsify, halving, in_turn, parts, signs
from wdjax.certify.falsify import Witness
from wdjax.certify.recorded import SplitRecord
from wdjax.certify.specification import Specification, leafless
from wdjax.checks import arguments, independence, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.precision import full_precision
from wdjax.proofs.recorder import CaseRecord

Numbers = npt.NDArray[Any]
Status = Literal["holds", "violated", "unknown"]
Ladder = Literal["auto", "interval", "crown", "alpha"]
LADDERS: tuple[Ladder, ...] = get_args(Ladder)
"""How a property is proved: by the bounds named, or by all and branch and bound after them."""

_FEW = 20
"""Largest number of inputs that are halved rather than rectifiers split."""
_LEAST = 4
_LARGEST = 2.0**100


class Verdict(NamedTuple):
    """Whether a forbidden output occurs in a box."""

    status: Status
    """It is proved that none does; one does, at ``witness``; or neither is known."""
    bound: float
    """A proved lower bound of the excess, the least over members of the largest ``A y - b``; above
    0 where the property holds, unless that is known from parts of the box only: then 0."""
    seconds: float
    """The time it took, with compilation."""
    leaves: int
    """Number of parts of the box, or of signs of rectifiers, that were bounded."""
    by: str
    """What decided it, or how the search ended: see the values of :data:`ENDINGS`."""
    witness: Numbers | None = None
    """``[*shape]``: a point of the box."""
    output: Numbers | None = None
    """``[K]``: the model's own output there."""


ENDINGS = {
    "attack": "a random point, a corner, or projected gradient steps violate it",
    "interval": "interval arithmetic",
    "crown": "linear bounds",
    "alpha": "linear bounds with optimised slopes",
    "inputs": "branch and bound over halved boxes",
    "signs": "branch and bound over the signs of ReLUs",
    "time": "the time is over",
    "memory": "the open parts exceed the memory",
    "bounds": "the method's bounds are not tight enough",
    "nothing to split": "no part that is left can be split",
}


class _Question(NamedTuple):
    """A property with its arrays."""

    model: Classifier
    spec: Specification
    box: tuple[Numbers, Numbers]
    """The floats of the model's dtype in the box, ``[*shape]`` each."""
    hull: tuple[Numbers, Numbers]
    """A box of floats that contains all real inputs."""
    rows: linear_outputs.Objectives
    forbidden: falsify.Forbidden
    proof: CaseRecord | None = None

    @property
    def free(self) -> int:
        """Number of inputs that vary."""
        return int(np.sum(self.hull[1] > self.hull[0]))


@full_precision
def property(
    model: Classifier,
    lower: AnyArray,
    upper: AnyArray,
    spec: Specification,
    *,
    method: Ladder = "auto",
    seconds: float = 60.0,
    key: Array | None = None,
    proof: CaseRecord | None = None,
) -> Verdict:
    r"""Decides whether ``model`` has a forbidden output for an input of the box.

    Args:
      model: any pytree callable ``[n, *shape] -> [n, K]``, which treats each row alone.
      lower: ``[*shape]``, the least value of each input.
      upper: ``[*shape]``, the largest value of each input; may equal ``lower``.
      spec: the forbidden outputs, such as :func:`label_wins` or :func:`in_range`.
      method: one of :data:`LADDERS`; all begin with an attack.
      seconds: when to end at the latest; compiling a program is not interrupted.
      key: of the attack's random points; by default the same in every call.
      proof: a case of a :class:`Proof`, of the file that ``model`` was read from, with the same box
        and specification; the verdict is written down in it. Parts of the box are closed only where
        the proof's checker agrees, which takes more parts. For the method "auto".

    Returns:
      A :class:`Verdict`.

    ``violated``: the model itself was evaluated at ``witness``, floats of its dtype that lie in the
    box bit for bit (nearest to it where an entry's range has no float), and the inequalities hold
    for its output in exact arithmetic, equality included. ``holds``: no input of the box, a float
    or not, has a forbidden output, neither in exact arithmetic nor by the float program in any
    order of summation.

    Raises:
      ValueError: ends with NaN or infinities, an empty box, other shapes, a primitive without a
        rule, rows that depend on each other, or a trace.

    Cost: some 300 passes at random points and 64 * 41 of projected gradient steps, then CROWN's for
    every part of the box; CROWN's first where the random points are far from a violation.

    Source: Zhang et al. [zhang2018] for the bounds, Wang et al. [wang2018] for halved boxes.

    >>> from wdjax.certify import label_wins, property
    >>> model = lambda x: jnp.stack([x[:, 0] * x[:, 1], 0.1 + 0 * x[:, 0]], axis=1)
    >>> property(model, np.full(2, 0.4), np.ones(2), label_wins(0, 2)).status
    'holds'
    >>> found = property(model, np.full(2, 0.2), np.ones(2), label_wins(0, 2))
    >>> found.status, bool(found.output[0] <= found.output[1])
    ('violated', True)
    """
    began = time.monotonic()
    question = _question(model, lower, upper, spec)
    validate.check_choice("method", method, LADDERS)
    _check_seconds(seconds)
    if proof is not None:
        _check_proof(proof, method, question)
        proof.trees, proof.point = [], None
        question = question._replace(proof=proof)
    key = jax.random.key(0) if key is None else key
    arguments.check(key=key)
    found = _decided(question, method, began + seconds, key)
    if proof is not None and found.witness is not None:
        proof.point = found.witness.reshape(-1).astype(float)
    return found._replace(seconds=time.monotonic() - began)


@full_precision
def properties(
    model: Classifier,
    lower: AnyArray,
    upper: AnyArray,
    spec: Specification | Sequence[Specification],
    *,
    method: Ladder = "auto",
    seconds: float = 60.0,
    key: Array | None = None,
) -> list[Verdict]:
    """:func:`property` for ``P`` boxes ``lower``, ``upper``, ``[P, *shape]``, of one model.

    Args:
      model: as in :func:`property`.
      lower: ``[P, *shape]``
      upper: ``[P, *shape]``
      spec: one for all boxes, or ``P``.
      method: as in :func:`property`.
      seconds: for each of them.
      key: as in :func:`property`.

    Returns:
      ``P`` verdicts. Programs are compiled once for specifications of about equal length.

    Raises:
      ValueError: as :func:`property`; other numbers of boxes and specifications.

    Source: as :func:`property`.

    >>> from wdjax.certify import in_range, properties
    >>> ends = np.array([[0.0], [1.0]]), np.array([[0.5], [2.0]])
    >>> [one.status for one in properties(jnp.sin, *ends, in_range([-1.0], [0.9]))]
    ['holds', 'violated']
    """
    if np.shape(lower) != np.shape(upper) or np.ndim(lower) < 2:
        raise ValueError(
            "lower and upper must be [P, *shape], a box for each property, got "
            f"{list(np.shape(lower))} and {list(np.shape(upper))}."
        )
    each = [spec] * len(lower) if isinstance(spec, Specification) else list(spec)
    if len(each) != len(lower):
        raise ValueError(f"spec must be one or {len(lower)}, one a box, got {len(each)}.")
    how: dict[str, Any] = {"method": method, "seconds": seconds, "key": key}
    return [property(model, low, high, one, **how) for low, high, one in zip(lower, upper, each)]


def _check_seconds(seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"seconds must be a number above 0, got {seconds!r}.")


def _check_proof(proof: CaseRecord, method: Ladder, question: _Question) -> None:
    if not isinstance(proof, CaseRecord) or method != "auto":
        raise ValueError(
            "proof must be one of the cases of a Proof, and method 'auto', got "
            f"{arguments.described(proof)} and {method!r}."
        )
    a, b, _ = question.spec.rows
    if proof.inputs != question.hull[0].size or not (
        np.array_equal(a, proof.case.a) and np.array_equal(b, proof.case.b)
    ):
        raise ValueError("proof must be of the same inputs and specification as the property.")


def _question(
    model: Classifier, lower: AnyArray, upper: AnyArray, spec: Specification
) -> _Question:
    """The checked property of the box ``[lower, upper]``, two arrays ``[*shape]``."""
    model = leafless(model)
    validate.check_model(model)
    host_only("certify.property", "certify.bound", model, lower, upper)
    if not isinstance(spec, Specification):
        raise ValueError(
            f"spec must be a Specification, got {arguments.described(spec)}; label_wins, in_range "
            "and Specification(members) make one."
        )
    ends = [_end(name, end) for name, end in (("lower", lower), ("upper", upper))]
    if ends[0].shape != ends[1].shape or not ends[0].ndim or not ends[0].size:
        raise ValueError(
            "lower and upper must have one shape [*shape], that of an input, got "
            f"{list(ends[0].shape)} and {list(ends[1].shape)}."
        )
    if np.any(empty := ends[0] > ends[1]):
        place = tuple(int(i) for i in np.argwhere(empty)[0])
        raise ValueError(
            f"the box is empty: lower {ends[0][place]:g} is above upper {ends[1][place]:g} at "
            f"{place}."
        )
    dtype = jnp.result_type(float) if ends[0].dtype == np.float64 else ends[0].dtype
    box = _inwards(ends[0], ends[1], dtype)
    hull = _rounded(ends[0], dtype, -np.inf), _rounded(ends[1], dtype, np.inf)
    _check_outputs(model, box, spec)
    a, b, _ = spec.rows
    size = max(_LEAST, 1 << (len(b) - 1).bit_length())
    more = size - len(b)
    rows = linear_outputs.objectives(np.pad(a, ((0, more), (0, 0))), np.pad(b, (0, more)), dtype)
    return _Question(model, spec, box, hull, rows, falsify.forbidden(spec, size, dtype))


def _end(name: str, end: AnyArray) -> Numbers:
    array = np.asarray(end)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be numbers [*shape], got {arguments.described(end)}.")
    array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
    if not np.all(np.abs(array) <= _LARGEST):
        place = tuple(int(i) for i in np.argwhere(~(np.abs(array) <= _LARGEST))[0])
        raise ValueError(
            f"{name} must be finite, and at most 2^100, got {array[place]} at {place}; give every "
            "input a range."
        )
    return array


def _rounded(given: Numbers, dtype: Any, direction: float) -> Numbers:
    """The nearest floats that are at most, or at least, the given numbers."""
    near = given.astype(dtype)
    past = near > given if direction < 0 else near < given
    return np.where(past, np.nextafter(near, near.dtype.type(direction)), near)


def _inwards(lower: Numbers, upper: Numbers, dtype: Any) -> tuple[Numbers, Numbers]:
    """The floats inside the box; where there is none, the float nearest to its lower end."""
    low, high = _rounded(lower, dtype, np.inf), _rounded(upper, dtype, -np.inf)
    none, nearest = low > high, lower.astype(dtype)
    return np.where(none, nearest, low), np.where(none, nearest, high)


def _check_outputs(model: Classifier, box: tuple[Numbers, Numbers], spec: Specification) -> None:
    x = np.stack([box[0], 0.5 * box[0] + 0.5 * box[1], box[1]])
    out = validate.shapes_of(model, x)
    fits = getattr(out, "shape", None) == (3, spec.outputs)
    if not fits or not jnp.issubdtype(out.dtype, jnp.floating):
        got = arguments.described(out) if hasattr(out, "shape") else type(out).__name__
        raise ValueError(
            f"the model must return floats [n, {spec.outputs}], as many as the specification has "
            f"coefficients, got {got} for n = 3."
        )
    independence.check(model, x)


def _decided(question: _Question, method: Ladder, until: float, key: Array) -> Verdict:
    """The verdict by the attack, and by all bounds of the method in turn.

    Where the attack is far from a violation the first bounds come before most of it. The question's
    box is two arrays ``[*shape]``; the bounds of its rows are ``[R]``.
    """
    model, spec, box = question.model, question.spec, question.box
    attack = falsify.drawn(model, spec, *box, len(question.rows.b), key)
    broken = falsify.witness(model, spec, *box, attack.points)
    if broken is not None:
        return _violated(broken, "attack", 0)
    halved = method == "auto" and question.free <= _FEW
    bounds: Any = "crown" if method == "auto" else method
    problem = leaves.of_box(*question.hull, question.rows)
    root, best = None, -np.inf
    for turn in ("bounds", "attack") if attack.far else ("attack", "bounds"):
        if time.monotonic() >= until:
            return Verdict("unknown", best, 0.0, 0 if root is None else 1, "time")
        if turn == "attack":
            broken = falsify.witness(model, spec, *box, attack.climb())
            if broken is not None:
                return _violated(broken, "attack", 0)
        elif not halved:
            root = leaves.root(model, problem, math.inf, bounds)
            best = float(np.min(_most(question, np.asarray(root.low))))
            if best > 0 and question.proof is None:
                return Verdict("holds", best, 0.0, 1, bounds)
    if root is None:
        return _inputs(question, -np.inf, 0, until)
    if method != "auto":
        return Verdict("unknown", best, 0.0, 1, "bounds")
    return _signs(question, problem, root, until)


def _signs(
    question: _Question, problem: leaves.RegionProblem, root: leaves.RootBounds, until: float
) -> Verdict:
    """The verdict by splits of ReLUs and by optimised slopes, from CROWN's bounds ``root``.

    Splits within CROWN's bounds are tried first: where a few suffice, the program that optimises
    slopes of all layers need not be compiled. What is left when no ReLU can be split, or when the
    open leaves fill the memory, is halved.
    """

    def check(points: Numbers) -> Witness | None:
        blank = np.repeat(points[:1], signs.width() - len(points), axis=0)
        points = np.concatenate([points, blank])
        return falsify.witness(question.model, question.spec, *question.box, points)

    low, count, record = np.asarray(root.low), 0, None
    if question.proof is None:
        given = signs.SignSearch(question.model, problem, math.inf, root, check)
        found = in_turn.first_turn(given, _open_rows(question, low), low, until)
        if found.ended in ("closed", "flipped") or time.monotonic() >= until:
            return _searched(question, found, until)
        low, count = found.low, found.leaves
    smooth = question.proof is not None and bool(root.others[0])
    if not smooth:
        root = leaves.root(question.model, problem, math.inf)
    low = np.maximum(low, np.asarray(root.low))
    best = float(np.min(_most(question, low)))
    if question.proof is not None:
        # Slopes for operands of smooth functions are not recorded: the checker takes its own.
        inner = {} if smooth else inner_slopes.of_region(question.model, problem, math.inf)
        record = SplitRecord(question.proof, root, jax.device_get(inner))
        # Nothing is known to the checker: every member is open.
        rows, root = np.unique(_best_rows(question, low)), record.root
    elif best > 0:
        return Verdict("holds", best, 0.0, 1 + count, "alpha")
    else:
        rows = _open_rows(question, low)
    found = in_turn.search(question.model, problem, math.inf, root, rows, low, until, check, record)
    return _searched(question, found._replace(leaves=count + found.leaves), until)


def _open_rows(question: _Question, low: Numbers) -> Numbers:
    """The best row of each member that the bounds ``[R]`` leave open."""
    return np.unique(_best_rows(question, low)[~(_most(question, low) > 0)])


def _best_rows(question: _Question, low: Numbers) -> Numbers:
    """For each member its row with the best of the bounds ``[R]``."""
    member = np.asarray(question.forbidden.member)
    return np.argmax(np.where(member, low, -np.inf), axis=1)[np.any(member, axis=1)]


def _searched(question: _Question, found: signs.Searched, until: float) -> Verdict:
    """The verdict after a search by signs."""
    if found.witness is not None:
        return _violated(found.witness, "signs", found.leaves)
    best = float(np.min(_most(question, np.asarray(found.low))))
    if found.ended == "closed":
        best = best if best > parts.PROVED else 0.0
        return Verdict("holds", best, 0.0, found.leaves, "signs")
    if found.ended in ("nothing to split", "memory") and time.monotonic() < until:
        return _inputs(question, best, found.leaves, until)
    return Verdict("unknown", best, 0.0, found.leaves, "time")


def _inputs(question: _Question, best: float, before: int, until: float) -> Verdict:
    """The verdict by halved boxes; ``best`` is a bound that is known, from ``before`` parts."""
    model, spec, member = question.model, question.spec, question.forbidden.member
    search = halving.Halving(model, spec, question.rows, member, question.box, question.proof)
    found = search.run(*question.hull, until)
    count = before + found.leaves
    if found.witness is not None:
        return _violated(found.witness, "inputs", count)
    if found.ended == "closed":
        return Verdict("holds", 0.0, 0.0, count, "inputs")
    return Verdict("unknown", max(best, found.low), 0.0, count, found.ended)


def _most(question: _Question, low: Numbers) -> Numbers:
    """For each member the best of the bounds ``[R]`` of its rows."""
    member = np.asarray(question.forbidden.member)
    return np.max(np.where(member, low, -np.inf), axis=1)[np.any(member, axis=1)]


def _violated(found: Witness, by: str, leaves: int) -> Verdict:
    return Verdict("violated", -np.inf, 0.0, leaves, by, found.x, found.y)
