"""Bounds over narrow intervals, by programs that are compiled as users compile them.

Two fusions computed a slope over a narrow interval with other roundings, a percent apart, and the
bounds were above the margins at the samples themselves.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import Model, certify


def normalised(p, x):
    h = x @ p[0] + p[1]
    h = (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-5)
    return h @ p[2] + p[3]


def squared(p, x):
    h = x @ p[0] + p[1]
    c = h - h.mean(1, keepdims=True)
    return (c / (jnp.square(h - h.mean(1, keepdims=True)).mean(1, keepdims=True) + 1)) @ p[2] + p[3]


def check(apply, method):
    rng = np.random.default_rng(2)
    weights = [rng.standard_normal(shape) for shape in ((2, 5), (5,), (5, 3))]
    model = Model(apply, [jnp.asarray(w, jnp.float32) for w in (*weights, np.zeros(3))])
    x = (rng.random((64, 2)) * 0.8 + 0.1).astype(np.float32)
    logits = np.asarray(model(x), float)
    y = logits.argmax(1)
    margins, rivals = logits[np.arange(64), y][:, None] - logits, np.arange(3) != y[:, None]

    def bounds(eps):
        return certify.margin_bounds(model, x, y, norm=math.inf, eps=eps, method=method)

    for eps in (0.0, 1e-6, 1e-5):
        low, many = np.asarray(bounds(eps)), np.asarray(jax.vmap(bounds)(jnp.full(2, eps)))
        assert np.all((low <= margins)[rivals]), (apply.__name__, method, eps)
        assert np.all((many <= margins)[:, rivals]), (apply.__name__, method, eps, "vmap")
        assert np.mean((margins - low)[rivals]) < 1e-3 + 100 * eps


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")  # Of the margins as of the bounds.
    for method in ("crown", "auto"):
        for apply in (normalised, squared):
            check(apply, method)
    print("all hold")
