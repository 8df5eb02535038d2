"""Exact transport against POT's network simplex, in process seconds.

    python bench/transport.py [--sizes 100 300 1000] [--sides 8 16 28] [--repeats 2]

`wasserstein`: the distance of a moved empirical distribution, of which every sample sends a share
of its mass to a point nearby, by `wdjax.transport.wasserstein` (n points against 2 n) and by
`ot.emd2` on the same costs. `image`: the cost of moving one image into another, pixel by pixel, by
`wdjax.image.image_wasserstein_distance` and by `ot.emd2`. `gap` is the difference of the two
distances, relative to theirs.
"""

import argparse
import functools
import os
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import numpy as np
import ot

from wdjax import image, transport


def timed(function):
    began = time.process_time()
    value = function()
    return float(value), time.process_time() - began


def moved(n, rng):
    """Samples of one label, of which each sends a random share of its mass to a nearby point."""
    x = rng.uniform(size=(n, 50))
    far = np.clip(x + rng.normal(scale=0.3, size=x.shape), 0, 1)
    return transport.AdversarialDistribution(x, far, np.zeros(n, int), rng.uniform(0.2, 1, n))


def theirs_of(distribution):
    x, far, _, weight = distribution
    atoms = np.concatenate([x, far])
    mass = np.concatenate([1 - weight, weight])
    return ot.emd2(np.full(len(x), 1 / len(x)), mass / len(x), ot.dist(x, atoms, "euclidean"))


def pictures(side, rng):
    """Two images of equal mass, ``[side, side, 1]``."""
    first, second = rng.uniform(size=(2, side, side, 1)) ** 3
    return first, second * first.sum() / second.sum()


def ours_of_pictures(first, second):
    return image.image_wasserstein_distance(first[None], second[None])[0]


def theirs_of_pictures(first, second):
    side = len(first)
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 2, indexing="ij"), -1).reshape(-1, 2)
    mass = first.sum()
    costs = ot.dist(grid.astype(float), metric="euclidean")
    return ot.emd2(first.ravel() / mass, second.ravel() / mass, costs, numItermax=10**7)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 300, 1000])
    parser.add_argument("--sides", nargs="+", type=int, default=[8, 16, 28])
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    print(f"{'what':<12}{'size':>6}{'ours':>9}{'theirs':>9}{'x':>7}{'gap':>10}")
    for kind, sizes in (("wasserstein", given.sizes), ("image", given.sides)):
        for size in sizes:
            rng = np.random.default_rng(size)
            if kind == "wasserstein":
                case = moved(size, rng)
                ours = functools.partial(transport.wasserstein, case, norm=2, order=1)
                theirs = functools.partial(theirs_of, case)
            else:
                pair = pictures(size, rng)
                ours = functools.partial(ours_of_pictures, *pair)
                theirs = functools.partial(theirs_of_pictures, *pair)
            turns = [(timed(ours), timed(theirs)) for _ in range(given.repeats)]
            (found, _), (known, _) = turns[0]
            mine, their = (min(turn[k][1] for turn in turns) for k in (0, 1))
            gap = abs(found - known) / known
            print(f"{kind:<12}{size:>6}{mine:>9.3f}{their:>9.3f}{their / mine:>7.2f}{gap:>10.1e}")


if __name__ == "__main__":
    main()
