"""The bars of smoothed classifiers, and whether they were met.

    python bench/smoothing.py [coverage] [votes] [wasserstein] [sandwich] [images] [throughput]

`coverage`: 1,000 simulated samples of every test. `votes`: a sequential test against the fixed
number of Cohen et al., on digits and MNIST. `wasserstein`: radii of the net of Levine and Feizi.
`sandwich`: certified against attacked on digits, l2 and l1. `images`: the same for that net and the
1-Wasserstein distance of images. `throughput`: a WRN-28-10 with random weights against its bare
forward passes. Times are those of the process, on one core. Weights and images are those of
../shared.
"""

import functools
import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA's flags leave it two threads.

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wdjax import Lp, attacks, convert, data, ensembles, image, models, smoothing, training
from wdjax.models import zoo
from wdjax.smoothing import binomial, noise, votes

SHARED = Path(__file__).parents[2] / "shared"
CASES, LOOKS = 1000, (32, 64, 100, 200, 400, 700, 1000)
SIGMAS = (0.12, 0.25, 0.5)
PIXELS = 784
BUDGETS = (50, 100, 200, 300, 400, 600)


def said(what, met):
    print(f"{what}: {'met' if met else 'MISSED'}", flush=True)


def timed(function, *args, **kwargs):
    began = time.process_time()
    out = function(*args, **kwargs)
    return out, time.process_time() - began


def mnist(n):
    model = convert.load(SHARED / "data/weights/mnist_laplace_smooth_0.01.pth", "wong_mnist").model
    return model, *data.load_npz(SHARED / "data/mnist_test_0_500.npz").take(n)


@functools.cache
def digits(noise_):
    train, test = data.digits()
    net = models.mlp((64, 64, 64, 10), key=jax.random.key(0))
    how = {"key": jax.random.key(1), "noise": noise_, "epochs": 60}
    return training.train(net, *train, **how).model, *test.take(100)


def coverage():
    rng, worst = np.random.default_rng(0), {}
    for alpha in (0.05, 0.001):
        for p in (0.3, 0.5, 0.9, 0.99, 0.999):
            counts = np.cumsum(rng.random((CASES, LOOKS[-1])) < p, axis=1)
            last, n = counts[:, -1], LOOKS[-1]
            bounds = {
                "clopper-pearson": [binomial.lower(last, n, alpha)],
                "randomized": [binomial.randomized_lower(last, n, alpha, rng.random(CASES))],
                "sequential": [
                    binomial.sequential_lower(counts[:, m - 1], m, n, alpha) for m in LOOKS
                ],
            }
            for name, found in bounds.items():
                missed = float(np.mean(np.max(found, axis=0) > p))
                worst[name, alpha] = max(worst.get((name, alpha), 0.0), missed)
    for (name, alpha), missed in worst.items():
        most = alpha + 3 * np.sqrt(alpha * (1 - alpha) / CASES)  # Three standard deviations.
        said(f"{name}: wrong in {missed:.4f} of cases at worst, bar {alpha}", missed <= most)


def votes_needed():
    settings = {f"digits l2 {s}": (*digits(noise.Gaussian(s)), noise.Gaussian(s), s, 100_000)
                for s in SIGMAS}  # fmt: skip
    settings["mnist flow 0.01"] = (*mnist(25), noise.Flow(0.01), 10 / PIXELS, 100_000)
    for name, (model, x, y, own, unit, n) in settings.items():
        how = {"noise": own, "key": jax.random.key(7), "n": n}
        fixed, spent = timed(smoothing.certify, model, x, y, **how)
        for eps in (0.0, 0.5 * unit, unit, 1.5 * unit):
            quick, less = timed(smoothing.certify, model, x, y, eps=eps, **how)
            share = quick.votes.mean() / fixed.votes.mean()
            abstained = quick.abstained.mean(), fixed.abstained.mean()
            open_ = np.mean(quick.radius < eps), np.mean(fixed.radius < eps)
            what = (
                f"{name}, eps {eps:.4f}: {quick.votes.mean():.0f} votes of {fixed.votes.mean():.0f}"
                f" ({share:.3f}, bar .2), abstained {abstained[0]:.2f} of {abstained[1]:.2f}, not "
                f"certified {open_[0]:.2f} of {open_[1]:.2f}, {less:.1f} of {spent:.1f} s"
            )
            said(what, share <= 0.2 and abstained[0] <= abstained[1] and open_[0] <= open_[1])


def wasserstein():
    model, x, y = mnist(50)
    own = noise.Flow(0.01)
    how = {"noise": own, "key": jax.random.key(0), "alpha": 0.05}
    smoothing.certify(model, x, y, n0=1, n=1, **how)  # Compiles.
    for name, more in {"fixed": {"n0": 1000}, "sequential": {"eps": 19.0 / PIXELS}}.items():
        found, spent = timed(smoothing.certify, model, x, y, n=10_000, **how, **more)
        accuracy, median = found.correct.mean(), PIXELS * np.median(found.radius)
        published = -np.log(1 / np.maximum(found.lower, 0.5) - 1) * 0.01 / 4 * PIXELS
        what = (
            f"{name}: accuracy {accuracy:.2f} (bar 1), median k {median:.2f} (bar 19), by the "
            f"paper's radius {np.median(published):.2f}, {found.votes.mean():.0f} votes, "
            f"{spent / len(y):.3f} CPU s an image (bar .2)"
        )
        if name == "sequential":
            said(what, accuracy == 1 and median >= 19 and spent / len(y) <= 0.2)
        else:
            print(what, flush=True)


def sandwich():
    balls = {"l2": (Lp(2), noise.Gaussian, attacks.DDN), "l1": (Lp(1), noise.Laplace, attacks.FMN)}
    for name, (ball, family, attack) in balls.items():
        for sigma in SIGMAS:
            own = family(sigma)
            model, x, y = digits(own)
            found = smoothing.certify(model, x, y, noise=own, key=jax.random.key(2), n=10_000)
            moved = ensembles.smoothed(
                attack(ball), model, x, y, noise=own, key=jax.random.key(3), count=64
            )
            cost = np.where(moved.success, moved.cost, np.inf)
            crossed = int(np.sum(cost < found.radius))
            what = (
                f"digits {name} {sigma}: accuracy {found.correct.mean():.2f}, average radius "
                f"{found.average_radius:.3f}, median certified {np.median(found.radius):.3f}, "
                f"attacked {np.median(cost):.3f}, {crossed} crossings"
            )
            said(what, crossed == 0)


def images():
    """Every image at every radius: none may fall within the radius that is certified."""
    model, x, y = mnist(20)
    own, nearest = noise.Flow(0.01), np.full(len(y), np.inf)
    found = smoothing.certify(model, x, y, noise=own, key=jax.random.key(0), n=10_000)
    for number, k in enumerate(BUDGETS):
        how = {"noise": own, "key": jax.random.key(number + 1), "count": 16}
        moved, spent = timed(
            ensembles.smoothed,
            image.FrankWolfe(steps=30),
            model,
            x,
            y,
            eps=k / PIXELS,
            only=np.isinf(nearest),
            alpha=0.001 / len(BUDGETS),
            **how,
        )
        nearest = np.where(moved.success, np.minimum(nearest, moved.cost), nearest)
        print(f"k {k}: {np.isinf(nearest).mean():.2f} robust, {spent / len(y):.2f} CPU s an image")
    crossed, gap = int(np.sum(nearest < found.radius)), np.median(nearest / found.radius)
    what = (
        f"mnist flow: certified k {PIXELS * np.median(found.radius):.1f}, attacked "
        f"{PIXELS * np.median(nearest):.0f} (median; {np.isfinite(nearest).sum()} of {len(y)} "
        f"fallen), {gap:.1f} times as far, {crossed} crossings"
    )
    said(what, crossed == 0)


def throughput(passes=64, size=16):
    net = zoo.build("wide_resnet", {"depth": 28, "width": 10}, rngs=nnx.Rngs(0))
    net.eval()
    model = models.functional(net)
    x = np.random.default_rng(0).uniform(0, 1, (4, 32, 32, 3)).astype(np.float32)
    bare, batch = jax.jit(lambda model, x: model(x)), jnp.asarray(np.resize(x, (size, 32, 32, 3)))
    asked = votes.poll(model, noise.Gaussian(0.25), jnp.asarray(x), None, jax.random.key(0), 10,
                       size, None)  # fmt: skip
    rows, numbers = np.arange(passes) % 4, np.arange(passes)
    bare(model, batch).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    votes.count(asked, rows[:size], numbers[:size])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ratios = []
    for _ in range(3):
        least = timed(
            lambda: [bare(model, batch).block_until_ready() for _ in range(passes // size)]
        )
        ratios.append(timed(votes.count, asked, rows, numbers)[1] / least[1])
    what = (
        f"WRN-28-10 on {jax.devices()[0]}: {least[1] / passes:.3f} CPU s a pass, a vote takes "
        f"{np.median(ratios):.3f} of it (bar 1.1), memory {before:.0f} MB bare, {after:.0f} MB"
    )
    said(what, np.median(ratios) <= 1.1)


if __name__ == "__main__":
    parts = {
        "coverage": coverage,
        "votes": votes_needed,
        "wasserstein": wasserstein,
        "sandwich": sandwich,
        "images": images,
        "throughput": throughput,
    }
    unknown = set(sys.argv[1:]) - set(parts)
    if unknown:
        sys.exit(f"there is no {', '.join(sorted(unknown))}; choose among {', '.join(parts)}")
    for name in sys.argv[1:] or parts:
        parts[name]()
