"""Certificates against random programs, and against violations that were planted in random nets.

    python bench/soundness.py [programs=FIRST:LAST] [planted=COUNT]

`programs`: random JAX programs of five inputs, one for each seed, of functions of one value and
operations of two, with eight draws of weights and inputs each. Their margins are bounded in one of
three norms at eight radii by CROWN, in every fourth program also by intervals, in every eighth by
optimised slopes; gradient steps from 192 points look for a smaller margin. A bound above a margin
that was found, or that is NaN, is broken. A program that is refused counts as such, and a bound
that is not finite as open. Most of the time is compilation, ten to twenty seconds a program on one
core: `taskset -c N` and several ranges share out the usual 0:250, which is 2,000 models.

`planted`: so many random nets of each of eight kinds. The least margin that gradient steps find in
a ball is shifted to between -1e-6 and -1e-3, so that the ball is violated by little and nearly
nowhere. No method may verify it, and no bound at .8 of its radius may lie above what gradient
steps find there. The searches of branch and bound run alone as well, and no attack ends them. For
each kind: how often .8 of the radius was verified, which shows that the bounds are not idle.

Ends with status 1 if a bound was broken.
"""

import functools
import math
import sys
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wdjax import Model, certify
from wdjax.bounds import leaves
from wdjax.certify import in_turn, parts, subdomains
from wdjax.certify import signs as sign_search

NORMS = (1, 2, math.inf)
RADII = np.array([0, 1e-6, 1e-4, 3e-3, 0.02, 0.07, 0.2, 0.5], np.float32)
METHODS = "crown", "interval", "alpha"
DRAWS = 8
WIDTH = 5


UNARY = {
    "relu": jax.nn.relu,
    "leaky relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu of tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "hard swish": jax.nn.hard_swish,
    "hard tanh": jax.nn.hard_tanh,
    "relu6": jax.nn.relu6,
    "softplus": jax.nn.softplus,
    "soft sign": jax.nn.soft_sign,
    "sigmoid": jax.nn.sigmoid,
    "log sigmoid": jax.nn.log_sigmoid,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": lambda z: jnp.cos(3 * z),
    "arctan": jnp.arctan,
    "arcsinh": jnp.arcsinh,
    "sinh": lambda z: jnp.sinh(jnp.clip(z, -2, 2)),
    "exp": lambda z: jnp.exp(jnp.minimum(z, 2.0)),
    "exp2": lambda z: jnp.exp2(-jnp.abs(z)),
    "expm1": lambda z: jnp.expm1(jnp.minimum(z, 1.0)),
    "log": lambda z: jnp.log(1.5 + jnp.sin(z)),
    "log1p": lambda z: jnp.log1p(z**2),
    "sqrt": lambda z: jnp.sqrt(1 + z**2),
    "root near 0": lambda z: jnp.sqrt(jnp.abs(z)),
    "rsqrt": lambda z: lax.rsqrt(0.5 + z**2),
    "cbrt": jnp.cbrt,
    "square": jnp.square,
    "cube": lambda z: z**3,
    "absolute": jnp.abs,
    "erf": lax.erf,
    "erfc": lambda z: lax.erfc(2 * z),
    "erf_inv": lambda z: lax.erf_inv(0.8 * jnp.tanh(z)),
    "lgamma": lambda z: lax.lgamma(2 + jnp.tanh(z)),
    "reciprocal": lambda z: 1 / (1.2 + jnp.cos(z)),
    "sign": jnp.sign,
    "floor": lambda z: jnp.floor(2 * z),
    "round": lambda z: jnp.round(2 * z),
    "remainder": lambda z: jnp.mod(z, 0.7),
    "where": lambda z: jnp.where(z > 0.1, 2 * z, z - 0.3),
    "clip": lambda z: jnp.clip(z, -0.5, 0.8),
    "sort": lambda z: jnp.sort(z, axis=1),
    "top_k": lambda z: lax.top_k(z, WIDTH)[0],
    "running sums": lambda z: jnp.cumsum(z, axis=1),
    "running products": lambda z: jnp.cumprod(jnp.clip(z, -1.5, 1.5), axis=1),
    "running maxima": lambda z: lax.cummax(z, axis=1),
    "softmax": lambda z: jax.nn.softmax(z, axis=1),
    "logsumexp": lambda z: z - jax.nn.logsumexp(z, axis=1, keepdims=True),
    "layer norm": lambda z: jax.nn.standardize(z, axis=1, epsilon=1e-2),
    "unit length": lambda z: z / (0.1 + jnp.linalg.norm(z, axis=1, keepdims=True)),
    "windows' maxima": lambda z: lax.reduce_window(z, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
}
BINARY = {
    "+": jnp.add,
    "-": jnp.subtract,
    "*": jnp.multiply,
    "/": lambda a, b: a / (0.7 + b**2),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "atan2": lambda a, b: jnp.arctan2(a, b),
    "power": lambda a, b: (1.5 + jnp.tanh(a)) ** jnp.clip(b, -2, 2),
    "logaddexp": jnp.logaddexp,
    "chosen": lambda a, b: jnp.where(a > b, a, 0.5 * b),
    "outer": lambda a, b: jnp.einsum("ni,nj->nij", a, b).reshape(len(a), -1)[:, ::WIDTH],
    "attended": lambda a, b: (
        jax.nn.softmax(a[:, :, None] * b[:, None], axis=2) @ b[:, :, None]
    ).reshape(len(a), -1),
}


def program(seed):
    """Draws models ``[n, 5] -> [n, 3]`` of one random program; and the names of its functions."""
    rng = np.random.default_rng(seed)
    steps, names, count = [], [], 1
    for _ in range(rng.integers(1, 4)):
        binary = rng.random() < 0.35
        table = BINARY if binary else UNARY
        name = str(rng.choice(list(table)))
        which = rng.integers(max(count - 2, 0), count, size=2)
        mix = [rng.random() < 0.7 for _ in which]
        steps.append((table[name], which[: 1 + binary], mix))
        names.append(name)
        count += 1

    def apply(p, x):
        values, (weights, last) = [2 * x - 1], p
        for (fn, which, mix), w in zip(steps, weights):
            args = [values[i] @ w[k] if mix[k] else values[i] for k, i in enumerate(which)]
            values.append(fn(*args))
        return values[-1] @ last[0] + 0.3 * values[len(values) // 2] @ last[1]

    def drawn():
        scale = rng.choice([0.5, 1.0, 2.0]) / WIDTH**0.5
        weights = scale * rng.normal(size=(len(steps), 2, WIDTH, WIDTH))
        return Model(apply, (jnp.float32(weights), jnp.float32(rng.normal(size=(2, WIDTH, 3)))))

    return drawn, rng, names


def inside(x, points, eps, norm):
    """The points, ``[n, d]``, drawn into the box and a slightly smaller ball."""
    step = jnp.clip(points, 0, 1) - x
    if norm == math.inf:
        return x + jnp.clip(step, -eps, eps) * (1 - 1e-5)
    length = jnp.linalg.norm(step, ord=norm, axis=-1, keepdims=True)
    return x + step * jnp.minimum(1.0, (1 - 1e-5) * eps / jnp.maximum(length, 1e-30))


@functools.partial(jax.jit, static_argnames=("norm", "starts", "steps"))
def least(model, x, y, eps, key, *, norm, starts=192, steps=25):
    """The least margins of label ``y`` that gradient steps find in balls around ``x``, ``[d]``.

    For ``E`` radii and the K classes, inf for the label: ``[E, K]``, and the points ``[E, K, d]``.
    """
    (classes,) = model(x[None]).shape[1:]
    kind, key = jax.random.split(key)
    corner = jax.random.choice(kind, jnp.array([-1.0, 0.0, 1.0]), (starts, len(x)))
    within = jax.random.uniform(key, corner.shape, minval=-1, maxval=1)
    begun = jnp.where(jnp.arange(starts)[:, None] % 2 == 0, corner, within).at[0].set(0.0)

    def one(eps, rival):
        def total(points):
            z = model(points)
            margins = z[:, y] - z[:, rival]
            return margins.sum(), margins

        def step(i, carry):
            now, low, at = carry
            (_, found), slope = jax.value_and_grad(total, has_aux=True)(now)
            better = found < low
            slope = jnp.where(jnp.isfinite(slope), slope, 0.0)
            if norm == math.inf:
                slope = jnp.sign(slope)
            else:
                size = jnp.linalg.norm(slope, axis=-1, keepdims=True)
                slope = slope / jnp.maximum(size, 1e-30)
            following = inside(x, now - eps * 0.5 ** (i / 4) * slope, eps, norm)
            return (
                following,
                jnp.where(better, found, low),
                jnp.where(better[:, None], now, at),
            )

        length = jnp.linalg.norm(begun, ord=norm, axis=-1, keepdims=True)
        first = inside(x, x + eps * begun / jnp.maximum(length, 1e-9), eps, norm)
        _, low, at = lax.fori_loop(0, steps, step, (first, jnp.full(starts, jnp.inf), first))
        best = jnp.argmin(low)
        return jnp.where(rival == y, jnp.inf, low[best]), at[best]

    return jax.vmap(lambda e: jax.vmap(lambda k: one(e, k))(jnp.arange(classes)))(eps)


def nearest(model, x, y, norm, key):
    """The least margins ``[E, K]`` at points whose distance is measured again, in float64."""
    found, points = (np.asarray(t) for t in least(model, x, y, RADII, key, norm=norm))
    away = np.linalg.norm(np.asarray(points, float) - x, ord=norm, axis=-1)
    return np.where(away <= RADII[:, None], found, np.inf)


def judged(model, x, y, norm, method, found, case):
    """Counts of what a method says of the model's margins at all radii."""
    count, rivals = Counter(), np.arange(found.shape[1]) != y
    batch = np.repeat(x[None], len(RADII), axis=0), np.full(len(RADII), y)
    try:
        low = certify.margin_bounds(model, *batch, norm=norm, eps=RADII, method=method)
    except ValueError as error:
        return Counter({f"refused: {str(error)[:60]}": 1})
    low = np.asarray(low)
    count["margins"] = int(rivals.sum()) * len(RADII)
    count["open"] = int(np.sum(~np.isfinite(low[:, rivals])))
    count["verified"] = int(np.sum(low[:, rivals] > 0))
    broken = ~(low <= found) & rivals
    if np.any(broken):
        count["broken"] = 1
        print(f"BROKEN: {case}: {low[broken]} above {found[broken]}", flush=True)
    return count


def programs(first, last):
    """Bounds every program by every method; whether none was broken."""
    count = Counter()
    for seed in range(first, last):
        drawn, rng, names = program(seed)
        for draw in range(DRAWS):
            model = drawn()
            x = rng.uniform(0.05, 0.95, WIDTH).astype(np.float32)
            z = np.asarray(model(x[None])[0])
            if not np.all(np.isfinite(z)):
                count["not finite"] += 1
                continue
            y, norm = int(np.argmax(z)), NORMS[seed % 3]
            found = nearest(model, x, y, norm, jax.random.key(DRAWS * seed + draw))
            for method in METHODS[: 1 + (seed % 4 == 0) + (seed % 8 == 0)]:
                case = f"seed {seed}, {method}, l{norm}, {names}"
                count += judged(model, x, y, norm, method, found, case)
            count["models"] += 1
        count["programs"] += 1
        if seed % 20 == 19:
            print(dict(count), flush=True)
            jax.clear_caches()
    print(dict(count), flush=True)
    return not count["broken"]


def dense(p, x, function):
    for w, b in zip(p["w"][:-1], p["b"][:-1]):
        x = function(x @ w + b)
    return x @ p["w"][-1] + p["b"][-1]


def convolutional(p, x, pooled):
    x = x.reshape(-1, 4, 4, 1)
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(lax.conv_general_dilated(x, p["conv"], (1, 1), "SAME", dimension_numbers=dims))
    if pooled:
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    return x @ p["head"][: x.shape[1]]


def residual(p, x):
    for w, b in zip(p["w"][:-1], p["b"][:-1]):
        x = x + jax.nn.relu(x @ w[:, :8]) @ w[:, 8:].T + b[:1]
    return x @ p["w"][-1][:16] + p["b"][-1]


def attention(p, x):
    x = x.reshape(len(x), 4, 4)
    q, k, v = (x @ w for w in p["heads"])
    x = x + jax.nn.softmax(jnp.einsum("nid,njd->nij", q, k), axis=-1) @ v
    return jnp.tanh(x.reshape(len(x), -1)) @ p["head"][:16]


KINDS = {
    "dense": functools.partial(dense, function=jax.nn.relu),
    "convolutions": functools.partial(convolutional, pooled=False),
    "max pooling": functools.partial(convolutional, pooled=True),
    "residual": residual,
    "sigmoid": functools.partial(dense, function=jax.nn.sigmoid),
    "tanh": functools.partial(dense, function=lambda z: jnp.tanh(2 * z)),
    "gelu": functools.partial(dense, function=jax.nn.gelu),
    "attention": attention,
}
INPUTS = 16


def shifted(kind, p, x):
    """Two logits: that of a net, shifted, and 0."""
    score = KINDS[kind](p["net"], x).reshape(len(x)) + p["shift"]
    return jnp.stack([score, jnp.zeros_like(score)], axis=1)


SHIFTED = {kind: functools.partial(shifted, kind) for kind in KINDS}  # Compiled once each.


def random_net(rng):
    def w(*shape):
        fan = math.prod(shape[:-1]) or 1
        return jnp.asarray(rng.normal(size=shape) * 1.7 / fan**0.5, jnp.float32)

    return {
        "w": [w(16, 16), w(16, 16), w(16, 1)],
        "b": [0.3 * w(1, 16)[0], 0.3 * w(1, 16)[0], jnp.zeros(1)],
        "conv": w(3, 3, 1, 4),
        "head": w(64, 1),
        "heads": [w(4, 4), w(4, 4), w(4, 4)],
    }


def searches(model, x, eps, seconds):
    """The bounds of the margin by each of branch and bound's searches, which no point ends."""
    problem = leaves.of_sample(x[None], np.zeros(1, int), np.array([eps]), math.inf, (0.0, 1.0), 2)
    root, low = leaves.root(model, problem, math.inf), np.array([np.inf, -1e6])
    low[1] = max(low[1], float(root.low[1]))
    rows = np.array([1])

    def alone(build):
        given = sign_search.SignSearch(model, problem, math.inf, root, lambda points: None)
        return build(given).run(time.monotonic() + seconds).low[1]

    yield "subdomains", alone(lambda given: subdomains.SubdomainSearch(given, rows, low))
    if root.lower:
        yield "parts", alone(lambda given: parts.PartSearch(given, 1, low))
    until = time.monotonic() + seconds
    found = in_turn.search(model, problem, math.inf, root, rows, low, until, lambda points: None)
    yield "in turn", found.low[1]


def bounds(model, x, eps, norm):
    """``(method, lower bound of the margin)`` by every method."""
    methods = {1: ("crown", "alpha"), 2: ("crown", "sdp-crown", "alpha"), math.inf: certify.METHODS}
    for method in methods[norm]:
        if method != "sdp-crown" or norm == 2:
            yield (
                method,
                certify.margin_bounds(
                    model, x[None], np.zeros(1, int), norm=norm, eps=eps, method=method, seconds=0.5
                )[0, 1],
            )
    if norm == math.inf:
        yield from searches(model, x, eps, 0.4)


def planted(count):
    """Plants a violation in so many nets of each kind; whether no method verified one."""
    broken = 0
    for kind in KINDS:
        verified, rng = Counter(), np.random.default_rng(len(kind))
        for trial in range(count):
            net, norm = random_net(rng), (math.inf, math.inf, 2, 1)[trial % 4]
            x = rng.uniform(0.2, 0.8, INPUTS).astype(np.float32)
            eps = {math.inf: 0.04, 2: 0.1, 1: 0.3}[norm] * rng.uniform(0.5, 1.5)
            find = functools.partial(least, x=x, y=0, norm=norm, steps=60)
            key, shift = jax.random.key(trial), np.float32(0)
            model = Model(SHIFTED[kind], {"net": net, "shift": shift})
            low, at = find(model, eps=np.float32([eps]), key=key)
            depth = np.float32(10 ** rng.uniform(-6, -3))
            violation = float(low[0, 1])
            while violation >= 0:  # The shift is rounded.
                shift = shift - np.float32(violation) - depth
                model = Model(SHIFTED[kind], {"net": net, "shift": shift})
                violation = float(model(at[0, 1][None])[0, 0])
            near = float(find(model, eps=np.float32([0.8 * eps]), key=key)[0][0, 1])
            for method, bound in bounds(model, x, eps, norm):
                if not bound <= violation:
                    broken += 1
                    print(f"BROKEN: {kind} {trial}, {method}, l{norm}: {bound} over {violation}")
            for method, bound in bounds(model, x, 0.8 * eps, norm):
                verified[method] += int(bound > 0)
                if not bound <= near:
                    broken += 1
                    print(f"BROKEN: {kind} {trial}, {method}, l{norm}, .8: {bound} above {near}")
            radius = certify.radius(model, x[None], np.zeros(1, int), norm=norm)[0]
            away = np.linalg.norm(np.asarray(at[0, 1], float) - x, ord=norm)
            if not radius < away:
                broken += 1
                print(f"BROKEN: {kind} {trial}, radius, l{norm}: {radius} reaches {away}")
        print(f"{kind}: {count} nets, verified at .8: {dict(verified)}", flush=True)
        jax.clear_caches()
    print(f"planted: {count * len(KINDS)} nets, {broken} broken")
    return not broken


def main():
    given = dict(word.split("=") for word in sys.argv[1:]) or {"programs": "0:100", "planted": "4"}
    # On accelerators the margins are those of float32, as the bounds are.
    jax.config.update("jax_default_matmul_precision", "highest")
    held = []
    if "programs" in given:
        held.append(programs(*map(int, given["programs"].split(":"))))
    if "planted" in given:
        held.append(planted(int(given["planted"])))
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
