"""Why `run` loops on the host on a CPU: one convolutional gradient step, looped in three ways.

    python bench/loop.py [--steps 5]

Wall time of `steps` input gradients of a small convolutional net on 64 images of 32x32: one jitted
step advanced from the host, the same steps in one `lax.scan`, and a scan that is fully unrolled.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from jax import lax

WIDTH, BATCH = 32, 64


def net(kernels, x):
    for kernel in kernels:
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return jnp.mean(x, axis=(1, 2))


def step(kernels, x):
    gradient = jax.grad(lambda x: net(kernels, x).sum())(x)
    return x + 0.01 * jnp.sign(gradient)


def median_time(function, repeats=5):
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(3, 3, inputs, WIDTH) for inputs in (3, WIDTH, WIDTH)]
    kernels = [0.1 * jax.random.normal(k, shape) for k, shape in zip(keys, shapes)]
    x = jax.random.uniform(keys[3], (BATCH, 32, 32, 3))
    jitted = jax.jit(step)

    def scanned(unroll):
        def loop(kernels, x):
            def body(x, _):
                return step(kernels, x), None

            return lax.scan(body, x, length=steps, unroll=unroll)[0]

        return jax.jit(loop)

    def hosted():
        moved = x
        for _ in range(steps):
            moved = jitted(kernels, moved)
        return moved

    in_loop, unrolled = scanned(1), scanned(steps)
    host = median_time(hosted)
    print(f"jax {jax.__version__}, {jax.default_backend()}, {steps} steps")
    print(f"host loop  {host * 1e3:8.1f} ms")
    for name, loop in (("one scan", in_loop), ("unrolled", unrolled)):
        taken = median_time(lambda: loop(kernels, x))
        print(f"{name:<10} {taken * 1e3:8.1f} ms, {taken / host:.2f} x the host loop")


if __name__ == "__main__":
    main()
