"""Every formulation that wdjax.models.conv picks, against plain ``lax.conv``, on one CPU thread.

python bench/conv.py [NAME ...]
"""

import os
import sys
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.models.conv import conv

# images, side, channels in and out, kernel, stride, padding, groups
SHAPES = {
    "resnet2b stem": (100, 32, 3, 8, 3, 2, 1, 1),
    "resnet2b 16x16": (100, 16, 8, 16, 3, 2, 1, 1),
    "resnet2b 8x8": (100, 8, 16, 16, 3, 1, 1, 1),
    "resnet2b shortcut": (100, 16, 8, 16, 1, 2, 0, 1),
    "wong_mnist conv1": (100, 28, 1, 16, 4, 2, 1, 1),
    "wong_mnist conv2": (100, 14, 16, 32, 4, 2, 1, 1),
    "trades conv1": (100, 28, 1, 32, 3, 1, 0, 1),
    "trades conv2": (100, 26, 32, 32, 3, 1, 0, 1),
    "trades conv3": (100, 12, 32, 64, 3, 1, 0, 1),
    "trades conv4": (100, 10, 64, 64, 3, 1, 0, 1),
    "wrn-28-10 32x32": (8, 32, 160, 160, 3, 1, 1, 1),
    "wrn-28-10 16x16": (8, 16, 320, 320, 3, 1, 1, 1),
    "wrn-28-10 8x8": (8, 8, 640, 640, 3, 1, 1, 1),
    "convnext depthwise": (2, 56, 128, 128, 7, 1, 3, 128),
    "swin patches": (2, 224, 3, 128, 4, 4, 0, 1),
}


def plain(x, kernel, stride, padding, groups):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((padding, padding),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def best(call, *args):
    """The least process time of ten calls, in milliseconds."""
    jax.block_until_ready(call(*args))
    times = []
    for _ in range(10):
        start = time.process_time()
        jax.block_until_ready(call(*args))
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def timed(formulation, x, kernel, *facts):
    def loss(x, kernel):
        return jnp.sum(formulation(x, kernel, *facts) ** 2)

    forward = jax.jit(lambda x, kernel: formulation(x, kernel, *facts))
    return best(forward, x, kernel), best(jax.jit(jax.grad(loss)), x, kernel)


for name, (n, side, inputs, outputs, size, *facts) in SHAPES.items():
    if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
        continue
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, side, side, inputs)).astype(np.float32)
    kernel = rng.normal(size=(size, size, inputs // facts[2], outputs)).astype(np.float32)
    lax, ours = timed(plain, x, kernel, *facts), timed(conv, x, kernel, *facts)
    print(
        f"{name:<20} forward {lax[0]:7.2f} -> {ours[0]:7.2f} ms,"
        f" gradient {lax[1]:7.2f} -> {ours[1]:7.2f} ms",
        flush=True,
    )
