"""The bars of Lipschitz constants on exact fixtures and published nets, and whether they were met.

    python bench/lipschitz.py [theory] [local] [global] [batch] [conv] [training]

`theory`: all constants of eight small nets against exact values. `local`: constants of margins on
balls, against published bounds. `global`: over all of space. `batch`: 500 images in one call.
`conv`: convolutional and residual nets, against interval Jacobians and sampled ones. `training`:
what training through Lipschitz constants certifies beside adversarial and certified training.
Weights, images and fixtures are those of ../shared; seconds are of this process.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import Lp, attacks, certify, convert, data, lipschitz, models, training

SHARED = Path(__file__).parents[2] / "shared"
NORMS = {"1": 1, "2": 2, "inf": math.inf}
RADII = (0.01, 0.05, 0.1)
# Of image 0, and how it is bounded here.
LOCAL = {
    "mnist_2_20": ("bab", (19.36, 20.14, 20.72)),
    "mnist_fc_3layer": ("sdp", (485.0, 790.0, 852.0)),
    "mnist_6_100_nat": ("sdp", (346.27, 4715.2, 4916.1)),
}
# L_margin for r = inf, and the spectral norm.
GLOBAL = {
    "mnist_2_20": ("bab", 32.354, 1.8175),
    "mnist_fc_3layer": ("sdp", 909.86, 30.742),
    "mnist_6_100_nat": ("sdp", 5843.6, 190.28),
}
CONV = {
    "mnist_linf_robust": ("wong_mnist", "mnist_test_0_500", {math.inf: 0.1, 2: 1.0}),
    "cifar10_resnet2b": ("resnet2b", "cifar10_test_0_100", {math.inf: 2 / 255, 2: 0.25}),
}


def said(what, value, bar):
    print(f"{what}: {value:.6g} (bar {bar:.6g}) {'met' if value <= bar else 'MISSED'}", flush=True)


def load(weights, arch, images, n):
    model = convert.load(SHARED / f"data/weights/{weights}.pth", arch).model
    x, y = data.load_npz(SHARED / f"data/{images}.npz")
    return model, x[:n].reshape(n, -1) if arch == "mlp" else x[:n], y[:n]


def theory():
    began, worst = time.process_time(), 0.0
    for path in sorted((SHARED / "fixtures/relu").glob("*.npz")):
        own, known = np.load(path), json.loads(path.with_suffix(".json").read_text())
        count = sum(key.startswith("W") for key in own)
        weights = [own[f"W{i + 1}"] for i in range(count)]
        net = lipschitz.relu_chain(weights, [own[f"b{i + 1}"] for i in range(count)])
        ends = own["box_center"] - own["box_radius"], own["box_center"] + own["box_radius"]
        cells, inside = lipschitz.activation_cells(net), lipschitz.activation_cells(net, ends)
        counts = (
            (len(cells.masks), known["global"]["masks"]),
            (
                len(inside.masks),
                known["box"]["masks"],
            ),
        )
        errors = []
        for label, norm in NORMS.items():
            found = lipschitz.theory(net, own["X"], own["y"], norm, cells)
            box, whole = lipschitz.upper_constants(inside, norm), known["global"]
            pairs = (
                (found.upper, whole[f"L_{label}"]),
                (found.upper_margin, whole[f"Lmargin_lab_{label}"]),
                (found.lower_all, whole[f"l_{label}"]),
                (found.lower, whole[f"l_lab_{label}"]),
                (found.lower_samples, whole[f"lN_{label}"]),
                (box.paper, known["box"][f"L_{label}"]),
                (box.margin, known["box"][f"Lmargin_{label}"]),
            )
            errors += [abs(a - b) / max(abs(b), 1e-3) for a, b in pairs]
        worst = max(worst, *errors)
        print(path.stem, "masks", counts, f"largest error {max(errors):.1e}", flush=True)
        assert all(a == b for a, b in counts)
    said("largest relative error", worst, 1e-6)
    said("seconds of the eight nets", time.process_time() - began, 60)


def local():
    for name, (method, bars) in LOCAL.items():
        model, x, y = load(name, "mlp", "mnist_test_0_500", 5)
        for eps, bar in zip(RADII, bars):
            began = time.process_time()
            how = {"norm": math.inf, "eps": eps, "box": None, "method": method}
            found = lipschitz.local_lipschitz(model, x, y, **how).max(axis=1)
            mean = np.exp(np.mean(np.log(found)))
            said(f"{name} {eps} by {method}, image 0", found[0], bar)
            seconds = time.process_time() - began
            print(f"  geometric mean of five {mean:.6g}, {seconds:.1f} s, compilation included")


def whole():
    for name, (method, margin, spectral) in GLOBAL.items():
        model, x, _ = load(name, "mlp", "mnist_test_0_500", 1)
        found = lipschitz.global_lipschitz(model, x, norm=math.inf, method=method, steps=300)
        said(f"{name} over all of space, linf, by {method}", found.max(), margin + 5e-4)
        said(f"{name} spectral norm", lipschitz.jacobian_norm(model, x, steps=300), spectral)


def batch():
    model, x, y = load("mnist_fc_3layer", "mlp", "mnist_test_0_500", 500)
    how = {"norm": math.inf, "eps": 0.05, "box": None, "steps": 20}
    lipschitz.local_lipschitz(model, x[:64], y[:64], **how)
    began = time.process_time()
    found = lipschitz.local_lipschitz(model, x, y, **how).max(axis=1)
    said("500 images of fc_3layer at .05, s an image", (time.process_time() - began) / 500, 0.38)
    said("  image 0", found[0], 1951.1)


def conv():
    for name, (arch, images, balls) in CONV.items():
        model, x, y = load(name, arch, images, 1)
        for norm, eps in balls.items():
            # Quadratic constraints of thousands of neurons take minutes a step of their own.
            method = "sdp" if (arch, norm) == ("wong_mnist", math.inf) else "zonotope"
            how = {"norm": norm, "eps": eps}
            found = lipschitz.local_lipschitz(model, x, y, method=method, **how).max()
            low, high = (jnp.clip(x[0] + s * eps, 0, 1) for s in (-1, 1))
            wide = certify.interval_jacobian(model, low, high, norm=norm, labels=y[:1]).max()
            said(f"{name} {norm} {eps:.4g} by {method}", found, 0.5 * float(wide))
            said(
                "  ten thousand sampled Jacobians",
                sampled(model, x[0], int(y[0]), norm, eps),
                found,
            )


def sampled(model, x, y, norm, eps, count=10_000):
    """The largest dual norm of a margin's gradient at random points of the ball in the box."""
    key = jax.random.key(0)

    @jax.jit
    def size(key):
        if norm == math.inf:
            move = jnp.sign(jax.random.normal(key, x.shape)) * eps
            move = move * jnp.where(
                jax.random.bernoulli(key), 1.0, jax.random.uniform(key, x.shape)
            )
        else:
            move = jax.random.normal(key, x.shape)
            move = move * eps / jnp.linalg.norm(move)
        pull = jax.vjp(lambda t: model(t[None])[0], jnp.clip(x + move, 0, 1))[1]
        rows = jnp.eye(10) - jax.nn.one_hot(y, 10)
        slopes = jax.vmap(pull)(rows)[0].reshape(10, -1)
        return jnp.max(jnp.linalg.norm(slopes, 1 if norm == math.inf else 2, axis=1))

    return float(jnp.max(jax.lax.map(size, jax.random.split(key, count), batch_size=20)))


def trained(widths=(64, 200, 200, 10)):
    fit, test = data.digits()
    x, y = test.take(100)
    net = models.mlp(widths, key=jax.random.key(0))
    for norm, eps in ((2, 0.5), (math.inf, 0.1)):
        against = {"attack": attacks.PGD(Lp(norm), steps=7), "eps": eps}
        ways = {
            "plain": {},
            "adversarial": against,
            "by intervals": {"certificate": certify.CertifiedTraining(norm=norm), "eps": eps},
            "by Lipschitz constants": {
                "certificate": lipschitz.LipschitzTraining(norm=norm),
                "eps": eps,
            },
        }
        for name, how in ways.items():
            began = time.process_time()
            model = training.train(net, *fit, key=jax.random.key(1), epochs=40, **how).model
            seconds = time.process_time() - began
            proved = certify.verify(model, x, y, norm=norm, eps=eps, method="crown")
            steep = {"norm": norm, "eps": eps, "method": "zonotope"}
            constant = np.median(lipschitz.local_lipschitz(model, x[:10], y[:10], **steep).max(1))
            print(
                f"digits {widths} l{norm} {eps} trained {name}: clean {proved.correct.mean():.2f}, "
                f"verified {proved.verified.mean():.2f}, median constant {constant:.1f}, "
                f"{seconds:.1f} s",
                flush=True,
            )


def main():
    parts = {
        "theory": theory,
        "local": local,
        "global": whole,
        "batch": batch,
        "conv": conv,
        "training": trained,
    }
    chosen = sys.argv[1:] or list(parts)
    unknown = set(chosen) - set(parts)
    if unknown:
        raise SystemExit(f"parts are {', '.join(parts)}, got {', '.join(sorted(unknown))}.")
    for name in chosen:
        parts[name]()


if __name__ == "__main__":
    main()
