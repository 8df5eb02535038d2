r"""Interval arithmetic on the program of any JAX function: sound bounds of what it can return.

The program is ``jax.make_jaxpr`` of the function, so a model needs no list of layers, and the
program of a *gradient* is bounded by the same code: ``select(z > 0, g, 0)`` with ``z`` of either
sign becomes the hull of ``g`` and 0, which is the interval Jacobian of FastLip and of Clarke.

A value is kept as an affine image of independent boxes, its *roots*, as long as the program is
affine; a nonlinear operation makes a new root. An affine operation ``T`` maps centre and radius to
``T c`` and ``|T| r``. Where a value is small, or its root is an l_1 or l_2 ball, the rows of the
composed map are formed, and their norms give tighter bounds than step by step.

Rounding: every operation widens its result by a bound on the rounding of floats, ``gamma_k |T|
(|c| + r)`` for sums of ``k`` terms in any order, so the interval holds what exact arithmetic
returns on the given parameters *and* what the float program returns, for every input in the box.
Elementary functions are trusted to 16 units in the last place.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from wdjax import norms

Array = jax.Array

_PULLED = 256
"""Values of at most this size are bounded by the rows of their composed affine map."""
_PUSHED = 256
"""Basis vectors pushed through an affine map at once."""
_ULPS = 16


@dataclass(eq=False)
class Root:
    """A box ``center -+ half``, perhaps cut by an l_r ball, whose points are independent."""

    center: Array
    half: Array
    ball: tuple[Array, Array, float] | None = None
    """``(ball's centre - center, radius, r)``."""
    lipschitz: Array | None = None
    """Lipschitz constant of the root as a function of the program's input, l_r to l_r."""


@dataclass(eq=False)
class Chain:
    """A linear map of a root's deviation, and the map of absolute values that dominates it."""

    apply: Callable[[Array], Array]
    absolute: Callable[[Array], Array]


@dataclass(eq=False)
class Interval:
    """Reals in ``center -+ radius``: an affine image of roots."""

    center: Array
    radius: Array
    magnitude: Array
    """``|T| |root| + |offset|``, what rounding errors are relative to."""
    terms: dict[Root, Chain]
    mixes: int = 0
    """Affine operations since the roots that add several entries of one root."""
    rounds: int = 0
    """Roundings since the roots along the longest path."""
    origin: tuple | None = None
    """Where a maximum comes from, so that a comparison with its operands is decided exactly."""
    known: norms.Bounds | None = field(default=None, repr=False)


@dataclass(eq=False)
class Ternary:
    """Booleans that are true where ``lower``, false where not ``upper``, open elsewhere."""

    lower: Array
    upper: Array
    origin: tuple | None = None


@dataclass(eq=False)
class Context:
    """What one pass over a program asks for, and what it noticed."""

    norm: float | None = None
    """Propagate Lipschitz constants in this norm."""
    jumps: set[str] = field(default_factory=set)
    """Discontinuous primitives met on the way: no derivative bounds such a program."""


def bound(fn: Callable[[Array], Any], lower: Array, upper: Array, *, ball=None) -> norms.Bounds:
    """Bounds on every output of ``fn`` over the box ``[lower, upper]``.

    Args:
      fn: a JAX function of one float array. Its program may hold affine operations, maxima,
        pooling, comparisons, selections, products, and the usual elementary functions; nested
        ``jit`` and custom derivatives are looked into.
      lower: floats of any shape, may be ``-inf``.
      upper: floats of the same shape, may be ``inf``.
      ball: None, or ``(centre, radius, norm)`` with norm 1 or 2: the inputs are also in this ball
        (its norm over the whole array).

    Returns:
      ``Bounds(lower, upper)`` with the structure of ``fn``'s output.

    Raises:
      ValueError: an operation that has no rule is applied to an input-dependent value.

    Cost: about three evaluations of ``fn``; with a ball, its first affine layer is applied to every
      basis vector.

    >>> low, high = bound(lambda x: jnp.maximum(x[0] - x[1], 0.0), jnp.zeros(2), jnp.ones(2))
    >>> float(low), round(float(high), 4)
    (0.0, 1.0)
    """
    lower, upper = jnp.asarray(lower), jnp.asarray(upper)
    if lower.shape != upper.shape or not jnp.issubdtype(lower.dtype, jnp.floating):
        raise ValueError(
            f"lower and upper must be floats of one shape, got {lower.dtype}{list(lower.shape)} "
            f"and {upper.dtype}{list(upper.shape)}."
        )
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(lower)
    outputs = interpret(closed, [box(lower, upper, ball)], Context())
    tree = jax.tree.structure(shape)
    ends = [_ends(value) for value in outputs]
    return norms.Bounds(*(tree.unflatten([end[side] for end in ends]) for side in (0, 1)))


def box(lower, upper, ball=None, lipschitz=None) -> Interval:
    """The input of a program: a box, cut by an l_1 or l_2 ball."""
    value = fresh(lower, upper, lipschitz)
    if ball is not None:
        center, radius, norm = ball
        (root,) = value.terms
        root.ball = (center - root.center, jnp.asarray(radius, lower.dtype), norm)
    return value


def interpret(closed, args, context: Context) -> list:
    """Runs a closed jaxpr on exact arrays and intervals; what touches no interval stays exact."""
    return _interpret(closed.jaxpr, closed.consts, args, context)


def _interpret(jaxpr, consts, args, context):
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(atom):
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], context)))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn, args, context):
    name = eqn.primitive.name
    if name in _CALLS:
        inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        return _interpret(
            getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args, context
        )
    if name in _IDENTITIES:
        return args
    if not any(isinstance(a, Interval | Ternary) for a in args):
        return _exact(eqn, args)
    rule = _RULES.get(name)
    if rule is None:
        raise ValueError(
            f"no interval rule for the primitive {name!r}, which the program applies to a value "
            "that depends on the input; rewrite the model without it, or certify it another way."
        )
    if name in _JUMPS:
        context.jumps.add(name)
    out = rule(eqn, args, context)
    return out if isinstance(out, list) else [out]


def _exact(eqn, args):
    params = eqn.params
    if "precision" in params:
        params = {**params, "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind(eqn, args):
    (out,) = _exact(eqn, args)
    return out


def _gamma(terms, dtype):
    """Relative error of a sum of this many products: twice over, for centre and model."""
    return 1.01 * (terms + 4) * float(jnp.finfo(dtype).eps)


def _tiny(dtype):
    return float(jnp.finfo(dtype).tiny)


def fresh(lower, upper, lipschitz=None, origin=None) -> Interval:
    """A new root with these ends. Ends that are not finite, NaN included, become infinite."""
    lower = jnp.where(jnp.isnan(lower), -jnp.inf, lower)
    upper = jnp.where(jnp.isnan(upper), jnp.inf, upper)
    middle = 0.5 * lower + 0.5 * upper
    finite = jnp.isfinite(middle)
    center = jnp.where(finite, middle, 0.0)
    half = jnp.maximum(upper - center, center - lower) * (1 + _gamma(0, lower.dtype))
    half = jnp.where(finite, half, jnp.inf)
    root = Root(center, half, lipschitz=lipschitz)
    chain = Chain(lambda t: t, lambda t: t)
    known = norms.Bounds(lower, upper)
    return Interval(center, half, jnp.abs(center) + half, {root: chain}, origin=origin, known=known)


def ends(value) -> norms.Bounds:
    """``Bounds`` of an interval, a ternary or an exact array."""
    return norms.Bounds(*_ends(value))


def _ends(value):
    if isinstance(value, Ternary):
        return value.lower, value.upper
    if not isinstance(value, Interval):
        return value, value
    if value.known is None:
        slack = _gamma(0, value.center.dtype) * (jnp.abs(value.center) + value.radius)
        lower, upper = value.center - value.radius - slack, value.center + value.radius + slack
        for center, radius in _refined(value):
            lower = jnp.fmax(lower, center - radius)
            upper = jnp.fmin(upper, center + radius)
        value.known = norms.Bounds(lower, upper)
    return value.known


# Rows of the composed affine map.


def _refined(value):
    """Further (centre, radius) of the value, from the rows of its map."""
    balls = [root for root in value.terms if root.ball is not None]
    pulled = value.center.size <= _PULLED and (balls or value.mixes > 1)
    if pulled:
        return [_from_rows(value, None), *(_from_rows(value, root) for root in balls)]
    if balls and len(value.terms) == 1:
        return [_from_columns(value, balls[0])]
    return []


def _rounding(value):
    return 2 * _gamma(2 * value.rounds, value.center.dtype) * value.magnitude


def rows(chain, root, shape):
    """The matrix of a linear map as ``[outputs, inputs]``, pulled back from its outputs."""
    zeros = jnp.zeros(root.half.shape, root.half.dtype)
    out, pull = jax.vjp(chain, zeros)
    basis = jnp.eye(math.prod(shape), dtype=out.dtype).reshape(-1, *shape)
    return jax.vmap(lambda t: pull(t)[0])(basis).reshape(basis.shape[0], -1)


def row_norms(chain: Chain, root, shape, norm, mixes, rounds):
    """Upper bounds on the norms of the rows."""
    size = norms.lp_norm(rows(chain.apply, root, shape), norm)
    slack = _gamma(2 * rounds + root.half.size, size.dtype)
    if mixes > 1:
        return size + slack * norms.lp_norm(rows(chain.absolute, root, shape), norm)
    return size * (1 + slack)


def _from_rows(value, cut):
    """Bounds by the box of every root, but by the ball of the root ``cut``."""
    shape = value.center.shape
    center, radius = value.center, _rounding(value)
    for root, chain in value.terms.items():
        if root is cut:
            offset, eps, norm = root.ball
            size = row_norms(chain, root, shape, norms.dual(norm), value.mixes, value.rounds)
            center = center + chain.apply(offset)
            radius = radius + eps * size.reshape(shape)
        else:
            reach = jnp.abs(rows(chain.apply, root, shape)) * root.half.reshape(-1)
            reach = jnp.sum(reach, axis=-1) * (1 + _gamma(root.half.size, reach.dtype))
            radius = radius + reach.reshape(shape)
    return center, jnp.where(jnp.isnan(radius), jnp.inf, radius)


def _from_columns(value, root):
    """Bounds by the ball of the only root, pushing its basis through the map in chunks."""
    chain = value.terms[root]
    offset, eps, norm = root.ball
    slack = _gamma(2 * value.rounds + root.half.size, value.center.dtype)
    size = _column_norms(chain.apply, root, norm)
    if value.mixes > 1:
        size = size + slack * _column_norms(chain.absolute, root, norm)
    else:
        size = size * (1 + slack)
    return value.center + chain.apply(offset), eps * size + _rounding(value)


def _column_norms(linear, root, norm):
    shape, count = root.half.shape, root.half.size
    width = min(count, _PUSHED)

    def push(total, start):
        index = start + jnp.arange(width)
        basis = (index[:, None] == jnp.arange(count)).astype(root.half.dtype)
        columns = jax.vmap(linear)(basis.reshape(width, *shape))
        if norm == 2:
            return total + jnp.sum(columns**2, axis=0), None
        return jnp.maximum(total, jnp.max(jnp.abs(columns), axis=0)), None

    out = jax.eval_shape(linear, jax.ShapeDtypeStruct(shape, root.half.dtype))
    start = jnp.zeros(out.shape, out.dtype)
    total, _ = lax.scan(push, start, jnp.arange(0, count, width))
    return jnp.sqrt(total) if norm == 2 else total


# Lipschitz constants, l_r to l_r, from the input to a value.


def lipschitz(value, norm):
    """A Lipschitz constant of a value as a function of the input, both in the l_r norm."""
    if not isinstance(value, Interval):
        return jnp.zeros(())
    slack = 1 + _gamma(value.magnitude.size + 2 * value.rounds, value.center.dtype)
    parts = [
        slack * _operator_norm(chain, root, value, norm) * root.lipschitz
        for root, chain in value.terms.items()
    ]
    return functools.reduce(jnp.add, parts)


_MATERIALISED = 2**22


def _operator_norm(chain, root, value, norm):
    ones = jnp.ones(root.half.shape, root.half.dtype)
    row_sums, pull = jax.vjp(chain.absolute, ones)
    row_sum = jnp.max(row_sums)
    column_sum = jnp.max(pull(jnp.ones_like(row_sums))[0])
    if norm == math.inf:
        return row_sum
    if norm == 1:
        return column_sum
    size = jnp.sqrt(row_sum * column_sum)
    small = min(ones.size, row_sums.size) <= 1024 and ones.size * row_sums.size <= _MATERIALISED
    if value.mixes and small:
        matrix = rows(chain.apply, root, row_sums.shape)
        upper = norms.operator_norm(matrix, 2).upper
        # A composed map rounds relative to its map of absolute values, whose norm size bounds.
        composed = _gamma(2 * value.rounds, size.dtype) * size if value.mixes > 1 else 0.0
        size = jnp.fmin(size, upper + composed)
    return size


def _stretch(args, factor, context):
    """The constant of a nonlinear function: ``factor`` times the sum of its operands'."""
    if context.norm is None:
        return None
    total = functools.reduce(jnp.add, (lipschitz(a, context.norm) for a in args))
    scaled = total * factor
    return jnp.where(jnp.isnan(scaled), jnp.inf, scaled)


# Affine rules.


def _compose(outer, inner):
    return lambda t: outer(inner(t))


def _affine(center, inputs, magnitude, terms, origin=None):
    """The image of intervals under maps that add.

    ``inputs`` holds ``(interval, linear map, map of absolute values)``; ``terms`` counts the
    products added up in an output.
    """
    dtype = center.dtype
    error = _gamma(terms, dtype) if terms else 0.0
    radius = jnp.zeros_like(center)
    merged: dict[Root, Chain] = {}
    shared = False
    for value, apply, absolute in inputs:
        reach = value.radius
        if error:
            reach = reach + error * (jnp.abs(value.center) + reach)
        radius = radius + absolute(reach)
        for root, chain in value.terms.items():
            new = Chain(_compose(apply, chain.apply), _compose(absolute, chain.absolute))
            if root in merged:
                shared = True
                new = Chain(
                    _both(merged[root].apply, new.apply), _both(merged[root].absolute, new.absolute)
                )
            merged[root] = new
    if error:
        radius = radius + error * jnp.abs(center) + _tiny(dtype) * terms
    values = [value for value, _, _ in inputs]
    return Interval(
        center,
        jnp.where(jnp.isnan(radius), jnp.inf, radius),
        jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude),
        merged,
        mixes=max(v.mixes for v in values) + (terms > 1) + shared,
        rounds=max(v.rounds for v in values) + (terms and terms + 1),
        origin=origin,
    )


def _both(first, second):
    return lambda t: first(t) + second(t)


def _additive(positions=None, terms=lambda eqn: 0, absolute: Any = None):
    """A rule for what is jointly linear in the operands at ``positions`` (all by default)."""

    def rule(eqn, args, context):
        del context
        places = range(len(args)) if positions is None else positions
        if any(not isinstance(a, Interval) and not _is_exact(a) for a in args):
            return _structural(eqn, args)
        if any(isinstance(a, Interval) and i not in places for i, a in enumerate(args)):
            raise ValueError(
                f"the primitive {eqn.primitive.name!r} is certified only where its indices do not "
                "depend on the input."
            )

        def run(values, positive):
            return absolute(*values) if positive and absolute else _bind(eqn, values)

        def part(place, positive):
            def linear(t):
                values = [
                    a if i not in places else t if i == place else jnp.zeros_like(_middle(a))
                    for i, a in enumerate(args)
                ]
                return run(values, positive)

            return linear

        center = _bind(eqn, [_middle(a) for a in args])
        sizes = [_size(a) if i in places else a for i, a in enumerate(args)]
        inputs = [
            (a, part(i, False), part(i, True))
            for i, a in enumerate(args)
            if isinstance(a, Interval)
        ]
        origin = inputs[0][0].origin if eqn.primitive.name in _KEEP_ORIGIN else None
        return _affine(center, inputs, run(sizes, True), terms(eqn), origin)

    return rule


def _parted(eqn, args, context):
    """One value cut into several."""
    del context
    (value,) = args
    if isinstance(value, Ternary):
        return [Ternary(*ends_) for ends_ in zip(*(_exact(eqn, [end]) for end in _ends(value)))]
    parts = []
    for k in range(len(eqn.outvars)):

        def cut(t, k=k):
            return _exact(eqn, [t])[k]

        parts.append(_affine(cut(value.center), [(value, cut, cut)], cut(value.magnitude), 0))
    return parts


def _is_exact(value):
    return not isinstance(value, Interval | Ternary)


def _middle(value):
    return value.center if isinstance(value, Interval) else value


def _size(value):
    return value.magnitude if isinstance(value, Interval) else jnp.abs(value)


def _structural(eqn, args):
    """What only moves entries, on booleans."""
    if any(isinstance(a, Interval) for a in args):
        raise ValueError(
            f"{eqn.primitive.name!r} mixes booleans and floats that depend on the input."
        )
    lower = _bind(eqn, [a.lower if isinstance(a, Ternary) else a for a in args])
    upper = _bind(eqn, [a.upper if isinstance(a, Ternary) else a for a in args])
    return Ternary(lower, upper)


def _bilinear(terms):
    """A rule for what is linear in either operand."""

    def rule(eqn, args, context):
        left, right = args
        count = terms(eqn)
        if isinstance(left, Interval) and isinstance(right, Interval):
            return _product_of_intervals(eqn, left, right, count, context)
        value, exact = (left, right) if isinstance(left, Interval) else (right, left)

        def ordered(t, factor):
            return _bind(eqn, [t, factor] if value is left else [factor, t])

        def apply(t):
            return ordered(t, exact)

        def absolute(t):
            return ordered(t, jnp.abs(exact))

        inputs = [(value, apply, absolute)]
        return _affine(apply(value.center), inputs, absolute(value.magnitude), count)

    return rule


def _product_of_intervals(eqn, left, right, terms, context):
    """``c_a c_b -+ (|c_a| r_b + r_a |c_b| + r_a r_b)`` for contractions."""
    elementwise = eqn.primitive.name == "mul"
    constant = _product_constant(left, right, elementwise, context.norm)
    if elementwise:
        return fresh(*_corners(_ends(left), _ends(right)), constant)
    (la, ua), (lb, ub) = _ends(left), _ends(right)
    ca, cb = 0.5 * (la + ua), 0.5 * (lb + ub)
    error = _gamma(terms, la.dtype)
    ra = jnp.maximum(ua - ca, ca - la) * (1 + error) + error * jnp.abs(ca)
    rb = jnp.maximum(ub - cb, cb - lb) * (1 + error) + error * jnp.abs(cb)
    center = _bind(eqn, [ca, cb])
    radius = _bind(eqn, [jnp.abs(ca) + ra, rb]) + _bind(eqn, [ra, jnp.abs(cb)])
    radius = radius * (1 + error) + error * jnp.abs(center) + _tiny(la.dtype) * terms
    return fresh(center - radius, center + radius, constant)


def _product_constant(left, right, elementwise, norm):
    """``|A| Lip(B) + |B| Lip(A)``: for contractions with Frobenius norms, or sums of entries."""
    if norm is None:
        return None
    measure = math.inf if elementwise else 2 if norm == 2 else 1
    size = [norms.lp_norm(_largest_size(v)[None], measure)[0] for v in (left, right)]
    total = size[0] * lipschitz(right, norm) + size[1] * lipschitz(left, norm)
    slack = _gamma(left.center.size + right.center.size, total.dtype)
    return jnp.where(jnp.isnan(total), jnp.inf, total) * (1 + slack)


def _largest_size(value):
    return jnp.maximum(*map(jnp.abs, _ends(value)))


def _times(a, b):
    """A product with ``0 * inf = 0``, as intervals want it; NaN operands stay NaN."""
    product = a * b
    return jnp.where(jnp.isnan(product) & ~jnp.isnan(a) & ~jnp.isnan(b), 0.0, product)


def _corners(a, b):
    products = [_times(x, y) for x, y in itertools.product(a, b)]
    return _widen(
        functools.reduce(jnp.minimum, products), functools.reduce(jnp.maximum, products), 2
    )


def _widen(lower, upper, ulps=_ULPS):
    """Outward by a few units in the last place; 0 stays 0."""
    unit = ulps * float(jnp.finfo(lower.dtype).eps)
    return lower - unit * jnp.abs(lower), upper + unit * jnp.abs(upper)


# Nonlinear rules.


def _increasing(slope=None, jump=False):
    """A rule for elementwise functions that grow in every operand."""

    def rule(eqn, args, context):
        pairs = [_ends(a) for a in args]
        lower, upper = (_bind(eqn, [pair[side] for pair in pairs]) for side in (0, 1))
        if slope is None:
            constant = jnp.full((), jnp.inf, lower.dtype) if jump else 1.0
        else:
            lower, upper = _widen(lower, upper)
            constant = jnp.max(slope(*pairs[0]))
        return fresh(lower, upper, _stretch(args, constant, context))

    return rule


def _decreasing(slope):
    def rule(eqn, args, context):
        lower, upper = _ends(args[0])
        pair = _widen(_bind(eqn, [upper]), _bind(eqn, [lower]))
        return fresh(*pair, _stretch(args, jnp.max(slope(lower, upper)), context))

    return rule


def _largest(eqn, args, context):
    """The elementwise maximum; it remembers its operands."""
    pairs = [_ends(a) for a in args]
    lower, upper = (jnp.maximum(pairs[0][side], pairs[1][side]) for side in (0, 1))
    out = fresh(lower, upper, _stretch(args, 1.0, context))
    out.origin = ("max", args)
    return out


def _reduced(eqn, args, context):
    lower, upper = (_bind(eqn, [end]) for end in _ends(args[0]))
    out = fresh(lower, upper, _stretch(args, 1.0, context))
    out.origin = (eqn.primitive.name, args[0], tuple(eqn.params["axes"]))
    return out


def _pooled(eqn, args, context):
    """Maximum over windows; an entry is in ``ceil(window / stride)`` windows a dimension."""
    lower, upper = (_bind(eqn, [end]) for end in _ends(args[0]))
    params = eqn.params
    windows = zip(params["window_dimensions"], params["window_strides"])
    seen = math.prod(-(-size // stride) for size, stride in windows)
    power = 1.0 if context.norm is None else 1.0 / context.norm
    return fresh(lower, upper, _stretch(args, seen**power, context))


def _absolute(eqn, args, context):
    lower, upper = _ends(args[0])
    smallest = jnp.maximum(jnp.maximum(lower, -upper), 0.0)
    return fresh(smallest, jnp.maximum(-lower, upper), _stretch(args, 1.0, context))


def _power(eqn, args, context):
    exponent = eqn.params["y"] if eqn.primitive.name == "integer_pow" else 2
    lower, upper = _ends(args[0])
    if exponent < 0:
        positive = lower > 0
        inside = positive | (upper < 0)
        low, high = jnp.where(inside, lower, 1.0), jnp.where(inside, upper, 1.0)
        one, two = low**exponent, high**exponent
        one, two = _widen(jnp.minimum(one, two), jnp.maximum(one, two))
        infinite = jnp.full_like(lower, jnp.inf)
        return fresh(
            jnp.where(inside, one, -infinite),
            jnp.where(inside, two, infinite),
            _stretch(args, jnp.inf, context),
        )
    one, two = lower**exponent, upper**exponent
    if exponent % 2 == 0:
        least = jnp.where((lower <= 0) & (upper >= 0), 0.0, jnp.minimum(one, two))
        one, two = least, jnp.maximum(one, two)
    size = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    slope = jnp.max(exponent * size ** (exponent - 1)) if exponent else 0.0
    return fresh(*_widen(one, two), _stretch(args, slope, context))


def _sign(eqn, args, context):
    """``[-1, 1]`` wherever 0 is possible, as the derivative of the absolute value wants it."""
    lower, upper = _ends(args[0])
    low, high = jnp.where(lower > 0, 1.0, -1.0), jnp.where(upper < 0, -1.0, 1.0)
    return fresh(
        low.astype(lower.dtype), high.astype(lower.dtype), _stretch(args, jnp.inf, context)
    )


def _wave(eqn, args, context):
    one = jnp.ones_like(_ends(args[0])[0])
    return fresh(-one, one, _stretch(args, 1.0, context))


def _quotient(eqn, args, context):
    left, right = args
    if not isinstance(right, Interval):
        inputs = [
            (left, lambda t: _bind(eqn, [t, right]), lambda t: _bind(eqn, [t, jnp.abs(right)]))
        ]
        center = _bind(eqn, [left.center, right])
        return _affine(center, inputs, inputs[0][2](left.magnitude), 1)
    lower, upper = _ends(right)
    inside = (lower > 0) | (upper < 0)
    low, high = jnp.where(inside, lower, 1.0), jnp.where(inside, upper, 1.0)
    inverse = _widen(1 / high, 1 / low, 2)
    one, two = _corners(_ends(left), inverse)
    constant = None
    if context.norm is not None:
        size = jnp.max(jnp.maximum(*map(jnp.abs, inverse)))
        top = jnp.max(_largest_size(left))
        constant = size * lipschitz(left, context.norm)
        constant = constant + top * size**2 * lipschitz(right, context.norm)
        constant = jnp.where(jnp.all(inside) & ~jnp.isnan(constant), constant, jnp.inf)
        constant = constant * (1 + _gamma(8, constant.dtype))
    return fresh(jnp.where(inside, one, -jnp.inf), jnp.where(inside, two, jnp.inf), constant)


def _clamp(eqn, args, context):
    (low, _), (lower, upper), (_, high) = (_ends(a) for a in args)
    if not all(_is_exact(a) for a in (args[0], args[2])):
        raise ValueError("clamp is certified only between bounds that do not depend on the input.")
    ends_ = [jnp.minimum(jnp.maximum(end, low), high) for end in (lower, upper)]
    return fresh(*ends_, _stretch([args[1]], 1.0, context))


# Comparisons and selections.


def _order(flip):
    """``<``, ``<=``, ``>`` and ``>=``; a comparison at equality is open, as Clarke's masks want."""

    def rule(eqn, args, context):
        del context
        (la, ua), (lb, ub) = (_ends(a) for a in (args[::-1] if flip else args))
        return Ternary(ua < lb, la <= ub)

    return rule


def _equal(eqn, args, context):
    """Never surely true, ties being kinks, but for a value and itself (the test for NaN)."""
    del context
    left, right = args
    if left is right:
        shape = _ends(left)[0].shape
        return Ternary(jnp.ones(shape, bool), jnp.ones(shape, bool))
    for value, top in ((left, right), (right, left)):
        decided = _attains(value, top)
        if decided is not None:
            return decided
    if isinstance(left, Ternary) or isinstance(right, Ternary):
        raise ValueError("booleans that depend on the input are not compared; use & and |.")
    (la, ua), (lb, ub) = _ends(left), _ends(right)
    meet = (la <= ub) & (lb <= ua)
    return Ternary(jnp.zeros_like(meet), meet)


def _attains(value, top):
    """Whether ``value`` attains the maximum ``top`` that was taken over it; None if it was not."""
    if not isinstance(value, Interval) or not isinstance(top, Interval) or top.origin is None:
        return None
    lower, upper = _ends(value)
    name, source, *rest = top.origin
    if name == "max" and any(operand is value for operand in source):
        others = [operand for operand in source if operand is not value]
        if not others:
            return Ternary(jnp.ones(lower.shape, bool), jnp.ones(lower.shape, bool))
        low, high = _ends(others[0])
        return Ternary(lower > high, upper >= low)
    if name in ("reduce_max", "reduce_min") and source is value:
        (axes,) = rest
        if name == "reduce_min":
            lower, upper = -upper, -lower
        first = jnp.max(upper, axis=axes, keepdims=True)
        is_first = upper == first
        lone = is_first & (jnp.sum(is_first, axis=axes, keepdims=True) == 1)
        second = jnp.max(jnp.where(is_first, -jnp.inf, upper), axis=axes, keepdims=True)
        rival = jnp.where(lone, second, first)
        attained = lower > rival
        return Ternary(
            attained, upper >= jnp.max(lower, axis=axes, keepdims=True), ("location", axes)
        )
    return None


def _unequal(eqn, args, context):
    same = _equal(eqn, args, context)
    return Ternary(~same.upper, ~same.lower)


def _logical(eqn, args, context):
    del context
    if any(isinstance(a, Interval) for a in args):
        raise ValueError(f"the primitive {eqn.primitive.name!r} is certified on booleans only.")
    name = eqn.primitive.name
    if name == "not":
        return Ternary(~args[0].upper, ~args[0].lower)
    (la, ua), (lb, ub) = (_ends(a) for a in args)
    if name == "xor":
        surely = (la & ~ub) | (lb & ~ua)
        maybe = (ua & ~lb) | (ub & ~la)
        return Ternary(surely, maybe)
    return Ternary(_bind(eqn, [la, lb]), _bind(eqn, [ua, ub]))


def _select(eqn, args, context):
    pick, *cases = args
    if _is_exact(pick):
        return _additive(range(1, len(args)))(eqn, args, context)
    if isinstance(pick, Interval) or len(cases) != 2:
        raise ValueError("select_n is certified for a boolean predicate and two cases only.")
    (l0, u0), (l1, u1) = (_ends(case) for case in cases)
    if l0.dtype == bool:
        # (pick & one) | (~pick & zero), and both agree wherever pick is open.
        lower = jnp.where(pick.lower, l1, jnp.where(pick.upper, l0 & l1, l0))
        return Ternary(lower, jnp.where(pick.lower, u1, jnp.where(pick.upper, u0 | u1, u0)))
    if not jnp.issubdtype(l0.dtype, jnp.floating):
        raise ValueError("an integer that depends on the input cannot be certified.")
    surely, maybe = (jnp.broadcast_to(end, l0.shape) for end in (pick.lower, pick.upper))
    lower = jnp.where(surely, l1, jnp.where(maybe, jnp.minimum(l0, l1), l0))
    upper = jnp.where(surely, u1, jnp.where(maybe, jnp.maximum(u0, u1), u0))
    return fresh(lower, upper, _piecewise(cases, context.norm))


def _piecewise(cases, norm):
    """Of a continuous function whose every entry is one of two: the norm of both stacked."""
    if norm is None:
        return None
    zero, one = (lipschitz(case, norm) for case in cases)
    if norm == math.inf:
        return jnp.maximum(zero, one)
    return zero + one if norm == 1 else jnp.sqrt(zero**2 + one**2) * (1 + _gamma(4, zero.dtype))


def _convert(eqn, args, context):
    (value,) = args
    dtype = eqn.params["new_dtype"]
    if isinstance(value, Ternary):
        if dtype == jnp.bool_:
            return value
        if jnp.issubdtype(dtype, jnp.floating):
            return fresh(
                value.lower.astype(dtype),
                value.upper.astype(dtype),
                origin=value.origin,
                lipschitz=_unbounded(context, dtype),
            )
    elif jnp.issubdtype(dtype, jnp.floating):
        narrower = jnp.finfo(dtype).eps > jnp.finfo(value.center.dtype).eps
        return _additive(terms=lambda _: int(narrower))(eqn, args, context)
    raise ValueError(
        f"a value that depends on the input is converted to {jnp.dtype(dtype).name}; only floats "
        "can be certified."
    )


def _unbounded(context, dtype):
    return None if context.norm is None else jnp.full((), jnp.inf, dtype)


def _sum(eqn, args, context):
    """A sum of entries; how many entries attain a maximum is at least one."""
    (value,) = args
    axes = tuple(eqn.params["axes"])
    if isinstance(value, Interval) and value.origin == ("location", axes):
        lower, upper = (jnp.sum(end, axis=axes) for end in _ends(value))
        return fresh(jnp.maximum(lower, 1.0), upper, _stretch(args, jnp.inf, context))
    return _additive(terms=_summed)(eqn, args, context)


def _summed(eqn):
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])


def _contracted(eqn):
    (left, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in left)


def _convolved(eqn):
    kernel = eqn.invars[1].aval.shape
    return max(math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]], 1)


def _unpool(eqn, args, context):
    """The gradient of max pooling: a window's cotangent goes where its largest entry may be."""
    source, operand = args
    if not isinstance(operand, Interval):
        return _additive([0], lambda e: math.prod(e.params["window_dimensions"]))(
            eqn, args, context
        )
    window, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    padding = eqn.params["padding"]
    lower, upper = _ends(operand)
    shape = lower.shape
    low_g, high_g = _ends(source)
    outs = low_g.shape
    padded = [size + sum(pads) for size, pads in zip(shape, padding)]

    def patches(x):
        x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), [(*pads, 0) for pads in padding])
        for offset in itertools.product(*map(range, window)):
            ends_ = [o + (n - 1) * s + 1 for o, n, s in zip(offset, outs, strides)]
            yield lax.slice(x, offset, ends_, strides)

    def back(patch, offset):
        config = []
        for o, n, s, size in zip(offset, outs, strides, padded):
            config.append((o, size - o - (n - 1) * s - 1, s - 1))
        out = lax.pad(patch, jnp.zeros((), patch.dtype), config)
        return lax.slice(out, [p[0] for p in padding], [p[0] + n for p, n in zip(padding, shape)])

    lows, highs = jnp.stack(list(patches(lower))), jnp.stack(list(patches(upper)))
    best = jnp.max(lows, axis=0)
    total_low, total_high = jnp.zeros_like(lower), jnp.zeros_like(lower)
    for index, offset in enumerate(itertools.product(*map(range, window))):
        rivals = jnp.delete(highs, index, axis=0, assume_unique_indices=True)
        surely = lows[index] > jnp.max(rivals, axis=0, initial=-jnp.inf)
        maybe = highs[index] >= best
        part_low = jnp.where(surely, low_g, jnp.where(maybe, jnp.minimum(low_g, 0.0), 0.0))
        part_high = jnp.where(surely, high_g, jnp.where(maybe, jnp.maximum(high_g, 0.0), 0.0))
        total_low, total_high = (
            total_low + back(part_low, offset),
            total_high + back(part_high, offset),
        )
    # Overlapping windows add up; every partial sum is at most the sum of the magnitudes.
    overlap = math.prod(-(-w // s) for w, s in zip(window, strides))
    if overlap == 1:
        return fresh(total_low, total_high, _unbounded(context, lower.dtype))
    size = jnp.maximum(jnp.max(jnp.abs(low_g)), jnp.max(jnp.abs(high_g)))
    slack = _gamma(overlap, lower.dtype) * overlap * size
    return fresh(total_low - slack, total_high + slack, _unbounded(context, lower.dtype))


def _scan(eqn, args, context):
    """A loop of known length, unrolled."""
    params = eqn.params
    consts, carries = params["num_consts"], params["num_carry"]
    fixed, carry, series = args[:consts], args[consts : consts + carries], args[consts + carries :]
    if any(isinstance(s, Interval | Ternary) for s in series):
        raise ValueError("scan is certified over series that do not depend on the input only.")
    order = range(params["length"])
    stacked = []
    for i in reversed(order) if params["reverse"] else order:
        inputs = [*fixed, *carry, *(s[i] for s in series)]
        out = _interpret(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs, context)
        carry = out[:carries]
        stacked.append(out[carries:])
    if any(isinstance(v, Interval | Ternary) for row in stacked for v in row):
        raise ValueError("scan is certified where only its carry depends on the input.")
    if params["reverse"]:
        stacked.reverse()
    return [*carry, *(jnp.stack(column) for column in zip(*stacked))]


_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
_IDENTITIES = {"stop_gradient", "optimization_barrier", "sharding_constraint", "copy", "copy_p"}
_KEEP_ORIGIN = {"reshape", "broadcast_in_dim", "expand_dims", "squeeze"}
_JUMPS = {"floor", "ceil", "round", "sign"}


def _one(lower, upper):
    del upper
    return jnp.ones_like(lower)


_RULES: dict[str, Callable] = {
    **dict.fromkeys(
        (
            "reshape",
            "broadcast_in_dim",
            "squeeze",
            "expand_dims",
            "transpose",
            "slice",
            "rev",
            "concatenate",
            "stack",
            "pad",
        ),
        _additive(),
    ),
    **dict.fromkeys(("split", "unstack"), _parted),
    **dict.fromkeys(("dynamic_slice", "gather"), _additive([0])),
    "dynamic_update_slice": _additive([0, 1]),
    "scatter-add": _additive([0, 2], lambda eqn: math.prod(eqn.invars[2].aval.shape)),
    "neg": _additive(absolute=lambda t: t),
    **dict.fromkeys(("add", "add_any"), _additive(terms=lambda _: 1)),
    "sub": _additive(terms=lambda _: 1, absolute=jnp.add),
    "reduce_sum": _sum,
    "cumsum": _additive(terms=lambda eqn: eqn.invars[0].aval.shape[eqn.params["axis"]]),
    "reduce_window_sum": _additive(terms=lambda eqn: math.prod(eqn.params["window_dimensions"])),
    "convert_element_type": _convert,
    "mul": _bilinear(lambda _: 1),
    "div": _quotient,
    "dot_general": _bilinear(_contracted),
    "conv_general_dilated": _bilinear(_convolved),
    "max": _largest,
    "min": _increasing(),
    "reduce_max": _reduced,
    "reduce_min": _reduced,
    "reduce_window_max": _pooled,
    "select_and_scatter_add": _unpool,
    "clamp": _clamp,
    "abs": _absolute,
    "integer_pow": _power,
    "square": _power,
    "exp": _increasing(lambda low, high: jnp.exp(high)),
    "exp2": _increasing(lambda low, high: jnp.exp2(high)),
    "expm1": _increasing(lambda low, high: jnp.exp(high)),
    "log": _increasing(lambda low, high: jnp.where(low > 0, 1 / low, jnp.inf)),
    "log1p": _increasing(lambda low, high: jnp.where(low > -1, 1 / (1 + low), jnp.inf)),
    "sqrt": _increasing(lambda low, high: jnp.where(low > 0, 0.5 / jnp.sqrt(low), jnp.inf)),
    "tanh": _increasing(_one),
    "logistic": _increasing(lambda low, high: jnp.full_like(low, 0.25)),
    "erf": _increasing(lambda low, high: jnp.full_like(low, 1.1283792)),
    "atan": _increasing(_one),
    "rsqrt": _decreasing(lambda low, high: jnp.where(low > 0, 0.5 * low**-1.5, jnp.inf)),
    "erfc": _decreasing(lambda low, high: jnp.full_like(low, 1.1283792)),
    **dict.fromkeys(("sin", "cos"), _wave),
    **dict.fromkeys(("floor", "ceil", "round"), _increasing(jump=True)),
    "sign": _sign,
    **dict.fromkeys(("lt", "le"), _order(flip=False)),
    **dict.fromkeys(("gt", "ge"), _order(flip=True)),
    **dict.fromkeys(("eq",), _equal),
    **dict.fromkeys(("ne",), _unequal),
    **dict.fromkeys(("and", "or", "not", "xor"), _logical),
    **dict.fromkeys(("reduce_and", "reduce_or"), lambda eqn, args, context: _structural(eqn, args)),
    "select_n": _select,
    "scan": _scan,
}
