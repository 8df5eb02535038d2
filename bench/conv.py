"""Every arrangement that wdjax.models.conv picks, against plain ``lax.conv``, on one CPU thread.

    python bench/conv.py [NAME ...]

Process time, medians; the two take turns. From the host XLA brings ``lax.conv`` and its gradients
into the canonical layout by itself; in a loop only the value is in it.
"""

import functools
import os
import statistics
import sys
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wdjax.models.conv import conv

KINDS = ("value, host and loop", "image gradient", "kernel gradient")
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
    "vit patches": (2, 224, 3, 384, 16, 16, 0, 1),
    "resnet-50 1x1": (4, 32, 256, 64, 1, 1, 0, 1),
}


def plain(x, kernel, stride, padding, groups):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((padding, padding),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def taken(call, args):
    began = time.process_time()
    jax.block_until_ready(call(*args))
    return 1e3 * (time.process_time() - began)


def programs(formulation, x, kernel, facts):
    """Value and both gradients, once from the host and once in a loop over two batches."""

    def value(x, out, kernel):
        del out
        return formulation(x, kernel, *facts)

    def image(x, out, kernel):
        return jax.vjp(lambda x: formulation(x, kernel, *facts), x)[1](out)[0]

    def weights(x, out, kernel):
        return jax.vjp(lambda kernel: formulation(x, kernel, *facts), kernel)[1](out)[0]

    def looped(function):
        return jax.jit(lambda *batches: lax.map(lambda batch: function(*batch, kernel), batches))

    for function in (value, image, weights):
        yield jax.jit(functools.partial(function, kernel=kernel)), 1
        yield looped(function), 2


def main():
    print(f"{'ms a batch: lax -> conv':<20}" + "".join(f"{kind:>40}" for kind in KINDS))
    for name, (n, side, inputs, outputs, size, *facts) in SHAPES.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        rng = np.random.default_rng(0)
        kernel = rng.normal(size=(size, size, inputs // facts[2], outputs)).astype(np.float32)
        x = rng.normal(size=(2, n, side, side, inputs)).astype(np.float32)
        out = jax.vmap(lambda x: plain(x, kernel, *facts))(x)
        x, out, kernel = map(jnp.asarray, (x, out, kernel))
        row = []
        for pair in zip(programs(plain, x, kernel, facts), programs(conv, x, kernel, facts)):
            runs = [(run, (x, out) if count > 1 else (x[0], out[0]), count) for run, count in pair]
            times = [[taken(run, args) / count for run, args, count in runs] for _ in range(5)]
            row.append("{:.2f} -> {:.2f}".format(*map(statistics.median, zip(*times[1:]))))
        cells = (f"{host:>20}{loop:>20}" for host, loop in zip(row[::2], row[1::2]))
        print(f"{name:<20}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
