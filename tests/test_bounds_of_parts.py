"""Bounds of operands in parts of a region, against points that gradients and chance find.

Where a function is at most 0, no such point may lie outside of its operands' ends, whatever the
leaf; in a subdomain no point at all.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Model
from wdjax.bounds import leaves, output_constraint, rebounded

BOX = (0.0, 1.0)


FUNCTIONS = {
    "tanh": (jnp.tanh, jnp.tanh),
    "gelu": (jax.nn.gelu, jax.nn.gelu),
    "mixed": (jax.nn.relu, jax.nn.sigmoid),
    "exp": (jax.nn.relu, lambda z: jnp.exp(0.3 * z) * jnp.sin(z)),
    "pooled": (jax.nn.relu, lambda z: jnp.repeat(z.reshape(len(z), -1, 2).max(axis=2), 2, axis=1)),
}
"""The nonlinear functions of a dense net; all other nets have ReLUs."""


def outputs(kind, params, x):
    return traced(kind, params, x)[-1]


def traced(kind, params, x):
    """The operands of both layers of nonlinear functions, flat, and the outputs."""
    kernel, layer, head = params
    early, late = FUNCTIONS.get(kind, (jax.nn.relu, jax.nn.relu))
    first = filtered(x, kernel, 1)
    second = filtered(early(first), layer, 2).reshape(len(x), -1)
    return first.reshape(len(x), -1), second, late(second) @ head


def filtered(x, kernel, stride):
    """A dense layer or a convolution."""
    if kernel.ndim == 2:
        return x.reshape(len(x), -1) @ kernel
    strides, names = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=names)


def drawn(rng, kind):
    shapes = {
        "dense": ((16, 12), (12, 10), (10, 3)),
        "conv": ((3, 3, 1, 2), (32, 10), (10, 3)),
        "strided": ((3, 3, 1, 2), (2, 2, 2, 3), (12, 3)),
    }
    params = [
        jnp.array(rng.normal(size=s) * 2 / math.sqrt(math.prod(s[:-1])), jnp.float32)
        for s in shapes.get(kind, shapes["dense"])
    ]
    return Model(applied(kind), tuple(params))


@functools.cache
def applied(kind):
    """One function for all nets of a kind, so that they share programs."""
    return functools.partial(outputs, kind)


def points_near(rng, model, x, y, rival, eps, norm):
    """Points of the ball, and of these after gradient steps towards the rival."""
    step = rng.normal(size=(2000, x[0].size))
    step *= eps / np.linalg.norm(step, norm, axis=1, keepdims=True)
    step *= rng.uniform(size=(len(step), 1)) ** 0.25
    start = jnp.clip(x + jnp.array(step.reshape(-1, *x.shape[1:]), jnp.float32), *BOX)
    slope = jax.jit(jax.grad(lambda z: jnp.sum(model(z)[:, y] - model(z)[:, rival])))
    moved = start
    for _ in range(10):
        move = (moved - 0.1 * eps * jnp.sign(slope(moved)) - x).reshape(len(start), -1)
        far = jnp.linalg.norm(move, norm, axis=1, keepdims=True)
        move = move * jnp.minimum(1.0, eps * (1 - 1e-5) / far)
        moved = jnp.clip(x + move.reshape(start.shape), *BOX)
    return jnp.concatenate([start, moved])


@pytest.mark.parametrize(("kind", "norm"), [*itertools.product(("dense", "conv"), (math.inf, 2))])
def test_ends_hold_wherever_the_function_is_at_most_zero(kind, norm):
    rng, inside, narrower = np.random.default_rng(0), 0, []
    eps = 0.15 if norm == math.inf else 0.5
    for _ in range(6):
        model = drawn(rng, kind)
        x = jnp.array(rng.uniform(0.2, 0.8, size=(1, 4, 4, 1)), jnp.float32)
        order = np.argsort(np.asarray(model(x))[0])
        y, rival = int(order[-1]), int(order[-2])
        problem = leaves.of_sample(x, jnp.array([y]), jnp.array([eps], "f4"), norm, BOX, 3)
        known = leaves.root(model, problem, norm)
        points = points_near(rng, model, x, y, rival, eps, norm)
        *operands, out = (np.asarray(part) for part in traced(kind, model.args[0], points))
        operand = np.concatenate(operands, axis=1)
        low = np.flatnonzero(out[:, y] <= out[:, rival])
        begun = known.begin(jnp.full(4, rival))
        signs = np.zeros(begun.signs.shape, np.int8)
        open_ = np.flatnonzero((begun.lower[0] < 0) & (begun.upper[0] > 0))
        for row, count in zip(signs[1:], (1, 2, 4)):
            chosen = rng.choice(open_, min(count, len(open_)), replace=False)
            source = operand[rng.choice(low)] if len(low) else rng.normal(size=operand.shape[1])
            row[chosen] = np.where(source[chosen] > 0, 1, -1)
        leaf, every = begun._replace(signs=jnp.array(signs)), np.ones(signs.shape, bool)
        for _ in range(3):
            lower, upper = output_constraint.tightened(
                model, problem, known, leaf, every, norm=norm
            )
            assert np.all(lower >= leaf.lower)
            assert np.all(upper <= leaf.upper)
            leaf = leaf._replace(lower=lower, upper=upper)
        for k, row in enumerate(signs):
            there = low[np.all(row * operand[low] >= 0, axis=1)]
            assert np.all(operand[there] >= lower[k])
            assert np.all(operand[there] <= upper[k])
            inside += len(there)
        found = np.asarray(upper - lower)[:, open_].clip(0)
        narrower.append(np.mean(found / np.asarray(begun.upper - begun.lower)[:, open_]))
    assert inside > 1000
    assert np.mean(narrower) < 0.95


def test_a_leaf_without_such_points_is_empty():
    """Where the function is positive by far its operands' ends cross, and nowhere else."""
    rng = np.random.default_rng(1)
    model = drawn(rng, "dense")
    x = jnp.array(rng.uniform(0.2, 0.8, size=(1, 4, 4, 1)), jnp.float32)
    order = np.argsort(np.asarray(model(x))[0])
    y, rival = int(order[-1]), int(order[-2])
    gap = float(model(x)[0, y] - model(x)[0, rival])
    crossed = {}
    for level in (-0.99 * gap, 1.01 * gap):
        problem = leaves.of_sample(x, jnp.array([y]), jnp.array([0.02], "f4"), math.inf, BOX, 3)
        rows = problem.rows._replace(b=jnp.full(3, level, jnp.float32))
        problem = problem._replace(rows=rows)
        known = leaves.root(model, problem, math.inf)
        leaf = known.begin(jnp.array([rival, rival]))
        every = np.ones(leaf.signs.shape, bool)
        for _ in range(4):
            lower, upper = output_constraint.tightened(
                model, problem, known, leaf, every, norm=math.inf
            )
            leaf = leaf._replace(lower=lower, upper=upper)
        crossed[level > 0] = bool(np.all(np.any(lower > upper, axis=1)))
    assert crossed == {False: True, True: False}


@pytest.mark.parametrize(
    ("kind", "norm"),
    [*itertools.product(("dense", "conv", "strided"), (math.inf, 2)), *((k, 2) for k in FUNCTIONS)],
)
def test_subdomains_hold_all_their_points(kind, norm):
    """Ends, bounds of all margins, and the operand to split: in ReLU nets one of the first layer
    that has any."""
    rng, inside, narrower = np.random.default_rng(2), 0, []
    eps = 0.15 if norm == math.inf else 0.5
    for _ in range(3 if kind in FUNCTIONS else 6):
        model = drawn(rng, kind)
        x = jnp.array(rng.uniform(0.2, 0.8, size=(1, 4, 4, 1)), jnp.float32)
        y = model(x).argmax(axis=-1)
        problem = leaves.of_sample(x, y, jnp.array([eps], "f4"), norm, BOX, 3)
        root, rows = leaves.root(model, problem, norm), np.delete(np.arange(3), int(y[0]))
        known = root.of_all()
        points = points_near(rng, model, x, int(y[0]), int(rows[0]), eps, norm)
        *operands, out = (np.asarray(part) for part in traced(kind, model.args[0], points))
        margin = out[:, y] - out[:, rows]
        layer = np.repeat((0, 1), [part.shape[1] for part in operands])
        operand = np.concatenate(operands, axis=1)
        lower, upper = (np.repeat(leaves.flat_of(m), 5, axis=0) for m in known[1:3])
        slack = np.asarray(leaves.flat_of(known.slack))[0]
        assert slack.size >= operand.shape[1]  # A product has the values of functions as operands.
        width, cuts = upper[0] - lower[0], np.full((2, *lower.shape), np.inf)
        for turn in range(6):
            these = rebounded.Subdomains(lower, upper)
            found = rebounded.bounds(model, problem, root, these, rows, norm=norm)
            assert np.all(found.lower >= lower)
            assert np.all(found.upper <= upper)
            lower, upper = np.array(found.lower), np.array(found.upper)
            for k in range(len(lower)):
                above, below = (cut[k, : operand.shape[1]] for cut in cuts)
                there = np.all((operand >= -above) & (operand <= below), axis=1)
                inside += np.sum(there)
                ends = lower[k, : operand.shape[1]], upper[k, : operand.shape[1]]
                assert np.all(operand[there] >= ends[0])
                assert np.all(operand[there] <= ends[1])
                assert np.all(margin[there] >= found.low[k])
                if not np.all(lower[k] <= upper[k]):
                    assert np.all(np.isinf(found.low[k]))
                    continue
                entry, point = int(found.entry[k]), float(found.point[k])
                if kind not in FUNCTIONS:
                    open_ = np.flatnonzero((lower[k] < -slack) & (upper[k] > slack))
                    if not len(open_):
                        assert entry == len(slack)
                        continue
                    assert entry in open_[layer[open_] == layer[open_].min()]
                    assert point == 0
                if entry >= operand.shape[1]:
                    continue
                side = (k + turn) % 2
                cuts[side, k, entry] = point if side else -point
                move = slack[entry] if side else -slack[entry]
                (upper if side else lower)[k, entry] = point + move
        second = np.flatnonzero(layer == 1)
        second = second[width[second] > 0]
        narrower.append(np.mean((upper - lower)[:, second].clip(0) / width[second]))
    assert inside > (3000 if kind in FUNCTIONS else 10000)
    assert np.mean(narrower) < 0.97
