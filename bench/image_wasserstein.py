"""Bars of the image-Wasserstein room: strength, honesty and cost, on one thread.

    python bench/image_wasserstein.py [--parts strength radii certified honest cost]

Figures of time are process times without compilation. ``strength`` prints robust accuracy (%) on
the first 100 images beside its bar; ``radii`` our least radii beside the published ones;
``certified`` the radii of CROWN below the least that an attack needs, and those of the smoothed
classifier, which is another one; ``honest`` judges points by exact transport in float64; ``cost``
is time an image at one radius, and an iteration of the constrained Sinkhorn projection.
"""

import argparse
import os
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import certify, convert, data, image, smoothing
from wdjax.core import Samples
from wdjax.image import plan_attack, sinkhorn
from wdjax.smoothing import noise

STRENGTH = {
    "mnist_adv_training_wong": {5: 69, 10: 38, 20: 15, 50: 5, 100: 1, 200: 1},
    "mnist_vanilla": {50: 82, 100: 29, 200: 1},
    "mnist_linf_robust": {50: 89, 100: 76, 200: 50},
}
PIXELS = 784


def load(shared, net, n):
    x, y = data.load_npz(shared / "data" / "mnist_test_0_500.npz").take(n)
    return convert.load(shared / "data" / "weights" / f"{net}.pth", "wong_mnist").model, x, y


def timed(function):
    began = time.process_time()
    value = jax.block_until_ready(function())
    return value, time.process_time() - began


def robust(found):
    return round(100 * float(np.mean(found.correct & ~found.success)))


def strength(shared):
    for net, bars in STRENGTH.items():
        model, x, y = load(shared, net, 100)
        image.image_wasserstein(model, x, y, eps=min(bars) / PIXELS)  # Compiles.
        for k, bar in bars.items():
            eps = k / PIXELS
            found, seconds = timed(lambda: image.image_wasserstein(model, x, y, eps=eps))
            verdict = "ok" if robust(found) <= bar else "MISSED"
            print(
                f"{net:<26}k {k:>4}  robust {robust(found):>3} %  bar {bar:>3}  {verdict:<7}"
                f"cost/eps {float(found.cost.max()) / eps:.4f}  {seconds * 10:.0f} ms an image",
                flush=True,
            )


def radii(shared):
    published = np.genfromtxt(
        shared / "data" / "hu2020_radii_mnist_adv_training_wong_0_500.txt", names=True
    )["radius"][:200]
    model, x, y = load(shared, "mnist_adv_training_wong", 200)
    found = image.minimum_radius(model, x, y)
    found, seconds = timed(lambda: image.minimum_radius(model, x, y))
    radius = np.where(found.success, found.cost, np.inf)
    far = published > 0.05
    nearer = 100 * np.mean(radius[far] <= published[far])
    print(f"radii: at most the published one for {nearer:.1f} % of {far.sum()} images, bar 95")
    print(
        f"radii: median k {np.median(radius) * PIXELS:.2f}, bar 10; {seconds / 200:.3f} s, bar 0.3"
    )


def certified(shared, nets, n):
    """Medians over the images that the net classifies correctly, in pixels."""
    how = {"norm": image.ImageWasserstein(), "steps": 3, "batch_size": 10}
    flow = {"noise": noise.Flow(0.01), "key": jax.random.key(0), "n": 2000}
    for net in nets:
        model, x, y = load(shared, net, n)
        found, attacked = timed(lambda: image.minimum_radius(model, x, y))
        smooth, voted = timed(lambda: smoothing.certify(model, x, y, **flow))
        low, bounded = timed(lambda: certify.radius(model, x, y, **how))
        correct = np.asarray(found.correct)
        low = PIXELS * np.asarray(low)[correct]
        high = PIXELS * np.where(found.success, found.cost, np.inf)[correct]
        crossed = int(np.sum(low > high))
        print(
            f"{net}: {correct.sum()} of {n} correct, medians: CROWN k {np.median(low):.3f} (0 for "
            f"{np.sum(low == 0)}), attack {np.median(high):.2f} (inf for {np.isinf(high).sum()}); "
            f"at most {np.max(low / high):.3f} of it, crossed {crossed} "
            f"{'ok' if crossed == 0 else 'MISSED'}\n  smoothed, another classifier: "
            f"{smooth.correct.sum()} correct, k {PIXELS * np.median(smooth.radius[correct]):.2f}; "
            f"CPU s an image: CROWN {bounded / n:.2f}, attack {attacked / n:.2f}, smoothing "
            f"{voted / n:.2f}, with compilation",
            flush=True,
        )


def honest(shared, n, ks):
    model, x, y = load(shared, "mnist_vanilla", n)
    for name, attack in {
        "Frank-Wolfe": image.FrankWolfe(steps=30),
        "Sinkhorn, lam 1000": image.SinkhornPGD(steps=10),
        "Sinkhorn, lam 10000, step 0.5": image.SinkhornPGD(steps=10, lam=1e4, step_size=0.5),
    }.items():
        for k in ks:
            found = wdjax.search(attack, model, x, y, eps=k / PIXELS)
            far = image.image_wasserstein_distance(x, found.x_adv) / (k / PIXELS)
            mass = np.asarray(found.x_adv, float).sum(axis=(1, 2, 3)) / x.astype(float).sum(
                axis=(1, 2, 3)
            )
            inside = bool(np.all((found.x_adv >= 0) & (found.x_adv <= 1)))
            fair = far.max() <= 1 + 1e-4 and np.abs(mass - 1).max() <= 1e-6 and inside
            print(
                f"{name:<32}k {k:>5}  exact W1/eps max {far.max():.4f} mean {far.mean():.4f}  "
                f"mass {np.abs(mass - 1).max():.1e}  {'ok' if fair else 'MISSED'}",
                flush=True,
            )


def cost(shared):
    model, x, y = load(shared, "mnist_vanilla", 100)
    plain = image.FrankWolfe(steps=40, sweeps=0, temperature=1e-3, momentum=0.0)
    for name, attack, bar in (("plain", plain, 20), ("with caps", image.FrankWolfe(), 150)):
        _, first = timed(lambda: wdjax.search(attack, model, x, y, eps=50 / PIXELS))
        _, again = timed(lambda: wdjax.search(attack, model, x, y, eps=50 / PIXELS))
        print(f"Frank-Wolfe {name}: {again * 10:.1f} ms an image, bar {bar}; first {first:.1f} s")
    samples = Samples(jnp.asarray(x), jnp.asarray(y), jnp.full(len(x), 0.1), None)
    task = plan_attack.task(image.ImageWasserstein(), samples)
    push = jax.random.normal(jax.random.key(0), task.x.shape)
    w = task.x + 0.03 * jnp.sum(task.x, axis=(1, 2))[:, None, None] * push

    @jax.jit
    def project(task, w):
        start = sinkhorn.no_duals(task)
        return sinkhorn.project(task, w, 1e3, start, iterations=200, tolerance=0.0)

    _, first = timed(lambda: project(task, w))
    found, again = timed(lambda: project(task, w))
    each = again / (len(x) * int(found.rounds.max()))
    print(
        f"constrained Sinkhorn: {each * 1e3:.3f} ms an image and iteration, bar 0.2; {first:.1f} s"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parts = ["strength", "radii", "certified", "honest", "cost"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    nets = ["mnist_adv_training_wong", "mnist_laplace_smooth_0.01"]
    parser.add_argument("--nets", nargs="+", default=nets, help="that are certified")
    parser.add_argument("--samples", type=int, default=50, help="judged exactly")
    parser.add_argument("--k", nargs="+", type=float, default=[1, 5, 10, 20, 50, 200, 1000])
    given = parser.parse_args()
    if "strength" in given.parts:
        strength(given.shared)
    if "radii" in given.parts:
        radii(given.shared)
    if "certified" in given.parts:
        certified(given.shared, given.nets, 100)
    if "honest" in given.parts:
        honest(given.shared, given.samples, given.k)
    if "cost" in given.parts:
        cost(given.shared)


if __name__ == "__main__":
    main()
