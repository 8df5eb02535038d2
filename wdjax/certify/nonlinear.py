"""Rules for functions of every entry and for maxima: each makes a new root."""

import math

import jax.numpy as jnp

from wdjax.certify.domain import (
    Interval,
    corners,
    ends,
    fresh,
    gamma,
    is_exact,
    largest_size,
    lipschitz,
    stretch,
    widen,
)
from wdjax.certify.linear import affine, bind


def increasing(slope=None, jump=False):
    """A rule for elementwise functions that grow in every operand."""

    def rule(eqn, args, context):
        pairs = [ends(a) for a in args]
        lower, upper = (bind(eqn, [pair[side] for pair in pairs]) for side in (0, 1))
        if slope is None:
            constant = jnp.full((), jnp.inf, lower.dtype) if jump else 1.0
        else:
            lower, upper = widen(lower, upper)
            constant = jnp.max(slope(*pairs[0]))
        return fresh(lower, upper, stretch(args, constant, context))

    return rule


def decreasing(slope):
    def rule(eqn, args, context):
        lower, upper = ends(args[0])
        least, most = widen(bind(eqn, [upper]), bind(eqn, [lower]))
        return fresh(least, most, stretch(args, jnp.max(slope(lower, upper)), context))

    return rule


def largest(eqn, args, context):
    """The elementwise maximum; it remembers its operands."""
    pairs = [ends(a) for a in args]
    lower, upper = (jnp.maximum(pairs[0][side], pairs[1][side]) for side in (0, 1))
    out = fresh(lower, upper, stretch(args, 1.0, context))
    out.origin = ("max", args)
    return out


def reduced(eqn, args, context):
    lower, upper = (bind(eqn, [end]) for end in ends(args[0]))
    out = fresh(lower, upper, stretch(args, 1.0, context))
    out.origin = (eqn.primitive.name, args[0], tuple(eqn.params["axes"]))
    return out


def pooled(eqn, args, context):
    """Maximum over windows; an entry is in ``ceil(window / stride)`` windows a dimension."""
    lower, upper = (bind(eqn, [end]) for end in ends(args[0]))
    params = eqn.params
    windows = zip(params["window_dimensions"], params["window_strides"])
    seen = math.prod(-(-size // stride) for size, stride in windows)
    power = 1.0 if context.norm is None else 1.0 / context.norm
    return fresh(lower, upper, stretch(args, seen**power, context))


def absolute(eqn, args, context):
    lower, upper = ends(args[0])
    smallest = jnp.maximum(jnp.maximum(lower, -upper), 0.0)
    return fresh(smallest, jnp.maximum(-lower, upper), stretch(args, 1.0, context))


def power(eqn, args, context):
    exponent = eqn.params["y"] if eqn.primitive.name == "integer_pow" else 2
    lower, upper = ends(args[0])
    if exponent < 0:
        positive = lower > 0
        inside = positive | (upper < 0)
        low, high = jnp.where(inside, lower, 1.0), jnp.where(inside, upper, 1.0)
        one, two = low**exponent, high**exponent
        one, two = widen(jnp.minimum(one, two), jnp.maximum(one, two))
        infinite = jnp.full_like(lower, jnp.inf)
        return fresh(
            jnp.where(inside, one, -infinite),
            jnp.where(inside, two, infinite),
            stretch(args, jnp.inf, context),
        )
    one, two = lower**exponent, upper**exponent
    if exponent % 2 == 0:
        least = jnp.where((lower <= 0) & (upper >= 0), 0.0, jnp.minimum(one, two))
        one, two = least, jnp.maximum(one, two)
    size = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    slope = jnp.max(exponent * size ** (exponent - 1)) if exponent else 0.0
    one, two = widen(one, two)
    return fresh(one, two, stretch(args, slope, context))


def sign(eqn, args, context):
    """``[-1, 1]`` wherever 0 is possible, as the derivative of the absolute value wants it."""
    lower, upper = ends(args[0])
    low, high = jnp.where(lower > 0, 1.0, -1.0), jnp.where(upper < 0, -1.0, 1.0)
    return fresh(low.astype(lower.dtype), high.astype(lower.dtype), stretch(args, jnp.inf, context))


def wave(eqn, args, context):
    one = jnp.ones_like(ends(args[0])[0])
    return fresh(-one, one, stretch(args, 1.0, context))


def quotient(eqn, args, context):
    left, right = args
    if not isinstance(right, Interval):
        inputs = [(left, lambda t: bind(eqn, [t, right]), lambda t: bind(eqn, [t, jnp.abs(right)]))]
        center = bind(eqn, [left.center, right])
        return affine(center, inputs, inputs[0][2](left.magnitude), 1)
    lower, upper = ends(right)
    inside = (lower > 0) | (upper < 0)
    low, high = jnp.where(inside, lower, 1.0), jnp.where(inside, upper, 1.0)
    inverse = widen(1 / high, 1 / low, 2)
    one, two = corners(ends(left), inverse)
    constant = None
    if context.norm is not None:
        size = jnp.max(jnp.maximum(*map(jnp.abs, inverse)))
        top = jnp.max(largest_size(left))
        constant = size * lipschitz(left, context.norm)
        constant = constant + top * size**2 * lipschitz(right, context.norm)
        constant = jnp.where(jnp.all(inside) & ~jnp.isnan(constant), constant, jnp.inf)
        constant = constant * (1 + gamma(8, constant.dtype))
    return fresh(jnp.where(inside, one, -jnp.inf), jnp.where(inside, two, jnp.inf), constant)


def clamp(eqn, args, context):
    (low, _), (lower, upper), (_, high) = (ends(a) for a in args)
    if not all(is_exact(a) for a in (args[0], args[2])):
        raise ValueError("clamp is certified only between bounds that do not depend on the input.")
    lower, upper = (jnp.minimum(jnp.maximum(end, low), high) for end in (lower, upper))
    return fresh(lower, upper, stretch([args[1]], 1.0, context))


def one_everywhere(lower, upper):
    del upper
    return jnp.ones_like(lower)


def root_slope(lower, upper):
    del upper
    return jnp.where(lower > 0, 0.5 / jnp.sqrt(lower), jnp.inf)
