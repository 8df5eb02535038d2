"""One step of an attack or of training, looped in two ways: from the host and in one ``lax.scan``.

    python bench/loop.py [--steps 5] [NAME ...]

Process time on one thread, in milliseconds a step, medians; the two ways take turns. The first net
holds plain ``lax.conv_general_dilated``, whose gradients XLA's CPU compiler runs slowly in loops;
the others are the project's own, of :func:`wdjax.models.conv.conv`.
"""

import argparse
import os
import statistics
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
from jax import lax

from wdjax import Model, losses, models

BATCH, REPEATS = 100, 9


def plain(kernels, x):
    for kernel in kernels:
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return jnp.mean(x, axis=(1, 2))


def nets(key):
    """Name: model and the shape of an image."""
    shapes = ((3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 16, 10))
    kernels = [0.2 * jax.random.normal(key, shape) for shape in shapes]
    return {
        "plain": (Model(plain, kernels), (16, 16, 3)),
        "resnet2b": (models.resnet2b(key=key), (32, 32, 3)),
        "wong_mnist": (models.wong_mnist(key=key), (28, 28, 1)),
        "trades_smallcnn": (models.trades_smallcnn(key=key), (28, 28, 1)),
    }


def loss(model, x):
    return jnp.sum(losses.cross_entropy(model(x), jnp.arange(BATCH) % 10))


def attacked(state):
    model, x = state
    return model, x + 0.01 * jnp.sign(jax.grad(loss, 1)(model, x))


def trained(state):
    model, x = state
    return jax.tree.map(lambda p, g: p - 1e-5 * g, model, jax.grad(loss)(model, x)), x


def taken(function, state):
    began = time.process_time()
    jax.block_until_ready(function(state))
    return time.process_time() - began


def compared(step, state, steps):
    """Milliseconds a step from the host and in a loop."""
    jitted = jax.jit(step)
    looped = jax.jit(lambda s: lax.scan(lambda s, _: (step(s), None), s, length=steps)[0])

    def hosted(state):
        for _ in range(steps):
            state = jitted(state)
        return state

    ways = hosted, looped
    rows = [[taken(way, state) for way in ways] for _ in range(REPEATS + 1)][1:]
    return [1e3 / steps * statistics.median(column) for column in zip(*rows)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    key = jax.random.key(0)
    for name, (model, shape) in nets(key).items():
        if options.names and name not in options.names:
            continue
        x = jax.random.uniform(key, (BATCH, *shape))
        for step in (attacked, trained):
            host, loop = compared(step, (model, x), options.steps)
            print(
                f"{name:<15} {step.__name__:<8} host {host:7.2f} ms, loop {loop:7.2f} ms,"
                f" {loop / host:5.2f} x",
                flush=True,
            )


if __name__ == "__main__":
    main()
