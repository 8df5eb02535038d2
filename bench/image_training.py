"""Section 6 of Hu et al. on digits: training in the image-Wasserstein ball with growing radii.

    python bench/image_training.py [--epochs N] [--train N] [--test N]

Three nets: trained on clean images, against Frank-Wolfe, and against projected ascent with a price
of the plan's total variance (A.5). The radius grows from 0.1 to 10 pixels a unit of mass, on an
exponential schedule; beyond 2.8 all of a window is in reach. Of each the accuracy is told, that
within radii of k pixels by the union of all attacks, and on translated, rotated and blurred images
(Table 4). One thread, process times.
"""

import argparse
import os
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"

import jax
import numpy as np

import wdjax.training
from wdjax import data, image, models
from wdjax.cli.image_attack_command import MOVES

KS = (1, 2, 5, 10)
BALL = image.ImageWasserstein(5)
NETS = {
    "standard": None,
    "Frank-Wolfe": image.FrankWolfe(BALL, steps=10, sweeps=0),
    "total variance 0.1": image.DualProjection(BALL, steps=10, smoothness=0.1),
}


def accuracy(net, x, y):
    return 100 * float(np.mean(np.asarray(net(x)).argmax(-1) == y))


def trained(attack, train, epochs):
    net = models.norm_cnn((8, 8, 1), key=jax.random.key(0))
    how = {"key": jax.random.key(1), "epochs": epochs, "batch_size": 128}
    if attack is not None:
        how |= {"attack": attack, "eps": np.geomspace(0.1, 10, epochs)}
    return wdjax.training.train(net, *train, **how).model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--train", type=int, default=1280)
    parser.add_argument("--test", type=int, default=200)
    given = parser.parse_args()
    train, (x, y) = data.digits().train.take(given.train), data.digits().test.take(given.test)
    for name, attack in NETS.items():
        began = time.process_time()
        net = trained(attack, train, given.epochs)
        spent = time.process_time() - began
        left = []
        for k in KS:
            found = image.image_wasserstein(net, x, y, eps=k / 64, ball=BALL)
            left.append(f"{k}: {100 * np.mean(found.correct & ~found.success):.1f}")
        moved = [f"{word} {accuracy(net, move(x), y):.1f}" for word, move in MOVES.items()]
        print(f"{name}: {accuracy(net, x, y):.1f} clean, {spent:.0f} s of training", flush=True)
        print("  within k pixels", ", ".join(left), flush=True)
        print(" ", ", ".join(moved), flush=True)


if __name__ == "__main__":
    main()
