"""The bars of certificates on published and trained nets, and whether they were met.

    python bench/certificates.py [cost] [branch] [growth] [training]

`cost`: CROWN, and with optimised slopes, on batches of 100: samples verified, process seconds an
image when warm (the median of three) and to compile (the first call without a warm one), peak
memory; each net in a process of its own, on one core. `cost=NAME` runs one of them.
`branch`: samples verified by branch and bound in 10 seconds each, beside CROWN and what an attack
leaves. `growth`: the growth-profile bound between the exact programs of small nets and E_N + L eps,
and on a net of MNIST. `training`: certified against adversarial training on digits, three seeds.
Weights, images and fixtures are those of ../shared.
"""

import functools
import json
import math
import os
import resource
import subprocess
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

from wdjax import Lp, Model, attacks, certify, convert, data, losses, models, run, training

SHARED = Path(__file__).parents[2] / "shared"
NETS = {
    "2_20": ("mnist_2_20", "mlp", "mnist_test_0_500"),
    "fc_3layer": ("mnist_fc_3layer", "mlp", "mnist_test_0_500"),
    "6_100": ("mnist_6_100_nat", "mlp", "mnist_test_0_500"),
    "mnist": ("mnist_linf_robust", "wong_mnist", "mnist_test_0_500"),
    "resnet2b": ("cifar10_resnet2b", "resnet2b", "cifar10_test_0_100"),
}
# Radius, which images, how many are to be verified.
BRANCH = {
    "resnet2b": (2 / 255, (1, 21), 11),
    "fc_3layer": (0.05, (0, 20), 5),
    "6_100": (0.02, (0, 20), 10),
}
# Net, norm, radius, method; bars: how many of 100 are verified, process seconds an image and to
# compile; peak memory may be 1 GB, 1.6 with slopes. One image is a tie.
COST = {
    "2_20": ("2_20", math.inf, 0.05, "crown", 79, math.inf, 5),
    "fc_3layer": ("fc_3layer", math.inf, 0.01, "crown", 95, 5e-4, 5),
    "6_100": ("6_100", math.inf, 0.01, "crown", 93, 2e-3, 5),
    "mnist": ("mnist", math.inf, 0.1, "crown", 96, 6e-3, 5),
    "mnist_near": ("mnist", math.inf, 0.05, "crown", 98, 6e-3, 5),
    "resnet2b": ("resnet2b", math.inf, 2 / 255, "crown", 23, 0.09, 12),
    "resnet2b_near": ("resnet2b", math.inf, 1 / 255, "crown", 63, 0.06, 12),
    "fc_3layer_l2": ("fc_3layer", 2, 0.3, "crown", 69, math.inf, math.inf),
    "mnist_l2": ("mnist", 2, 0.1, "crown", 98, math.inf, math.inf),
    "fc_3layer_slopes": ("fc_3layer", math.inf, 0.02, "alpha", 88, math.inf, 30),
    "6_100_slopes": ("6_100", math.inf, 0.02, "alpha", 50, 0.02, 30),
    "mnist_slopes": ("mnist", math.inf, 0.13, "alpha", 59, 0.04, 30),
    "resnet2b_slopes": ("resnet2b", math.inf, 2 / 255, "alpha", 23, 0.5, 30),
}
BUDGETS = np.array([0.001, 0.1, 1, 5, 50])
# (WDRO - E_N) / eps of the margin loss at these budgets: exact linear programs over all of space,
# on the first five samples.
SLOPES = {
    ("a_n2_h8_K2", 1): (3.2243, 3.2243, 3.2243, 3.2243, 3.2243),
    ("a_n2_h8_K2", math.inf): (3.7505, 3.7505, 3.7505, 3.7505, 3.7505),
    ("b_n2_h16_K3", 1): (1.1082, 1.1082, 1.1082, 0.9147, 0.8439),
    ("b_n2_h16_K3", math.inf): (1.5392, 1.5352, 1.3344, 1.1582, 1.1106),
    ("c_n2_h8x8_K3", 1): (2.4715, 2.4715, 2.4715, 2.4715, 2.4715),
    ("c_n2_h8x8_K3", math.inf): (3.5735, 3.5735, 3.5735, 3.5735, 3.5735),
    ("d_n2_h6x6x6_K4", 1): (3.0791, 2.9346, 1.8000, 0.5394, 0.0539),
    ("d_n2_h6x6x6_K4", math.inf): (3.9350, 3.3514, 2.4514, 0.5394, 0.0539),
    ("o_n2_h8_K3_nobias", 1): (2.4933, 2.4933, 2.1620, 1.6166, 1.3888),
    ("o_n2_h8_K3_nobias", math.inf): (4.3576, 4.3576, 2.9877, 2.6992, 2.6343),
}


def load(weights, arch, images, these):
    model = convert.load(SHARED / f"data/weights/{weights}.pth", arch).model
    x, y = data.load_npz(SHARED / f"data/{images}.npz")
    x, y = x[slice(*these)], y[slice(*these)]
    return model, x.reshape(len(x), -1) if arch == "mlp" else x, y


def said(what, met):
    print(f"{what}: {'met' if met else 'MISSED'}", flush=True)


def cost():
    for name in COST:
        subprocess.run([sys.executable, __file__, f"cost={name}"], check=True)


def cost_of(name):
    net, norm, eps, method, *bars = COST[name]
    model, x, y = load(*NETS[net], (0, 100))
    how = {"norm": norm, "eps": eps, "method": method, "batch_size": len(y)}
    times = []
    for _ in range(4):
        began = time.process_time()
        held = np.asarray(certify.certified(model, x, y, **how))
        times.append(time.process_time() - began)
    warm = float(np.median(times[1:]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found, bars = (warm / len(y), times[0] - warm, peak), (*bars, 1 if method == "crown" else 1.6)
    units = zip(("s an image", "s to compile", "GB"), found, bars[1:])
    costs = ", ".join(f"{spent:.5f} {unit} (bar {bar})" for unit, spent, bar in units)
    met = held.sum() >= bars[0] and all(spent <= bar for spent, bar in zip(found, bars[1:]))
    said(f"{name} l{norm} {eps:.4f} {method}: verified {held.sum()} (bar {bars[0]}), {costs}", met)


def branch():
    for name, (eps, these, bar) in BRANCH.items():
        model, x, y = load(*NETS[name], these)
        how = {"norm": math.inf, "eps": eps}
        plain = np.asarray(certify.certified(model, x, y, **how))
        attacked = run(attacks.PGD(Lp(math.inf), steps=60), model, x, y, eps=eps)
        left = np.asarray(attacked.correct & ~attacked.success)
        began = time.perf_counter()
        found = certify.verify(model, x, y, method="bab", seconds=10, steps=0, **how)
        spent = time.perf_counter() - began
        assert not np.any(found.verified & ~left), "a verified sample was flipped"
        count = int(found.verified.sum())
        what = f"{name} {eps:.4f}: CROWN {plain.sum()}, branch and bound {count} of {len(y)}"
        said(f"{what} in {spent:.0f} s, attack {left.sum()}, bar {bar}", count >= bar)


def layered(layers, x):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]


def growth():
    closed = []
    for (name, norm), slopes in SLOPES.items():
        net = dict(np.load(SHARED / f"fixtures/relu/{name}.npz"))
        depth = len(json.loads((SHARED / f"fixtures/relu/{name}.json").read_text())["hidden"]) + 1
        layers = [(net[f"W{i}"].T, net[f"b{i}"]) for i in range(1, depth + 1)]
        model = Model(layered, jax.tree.map(lambda t: jnp.asarray(t, jnp.float32), layers))
        x, y = jnp.array(net["X"][:5], jnp.float32), jnp.array(net["y"][:5])
        how = {"norm": norm, "eps": BUDGETS, "order": 1, "loss": losses.margin, "box": None}
        clean = float(np.mean(losses.margin(model(x), y)))
        exact = clean + BUDGETS * np.array(slopes)
        straight = certify.wdro_bound(model, x, y, **how)
        grown = certify.growth_bound(model, x, y, **how)
        inside = np.all((grown >= exact - 6e-5 * BUDGETS) & (grown <= straight + 1e-6))
        share = (straight - grown) / (straight - exact)
        closed += [*share]
        said(f"{name} l{norm}: of the gap closed {np.round(share, 2)}, between", inside)
    said(f"median of the gap closed {np.median(closed):.2f}, bar 0.5", np.median(closed) >= 0.5)
    model, x, y = load(*NETS["mnist"], (0, 100))
    how = {"norm": math.inf, "eps": 0.05}
    constant = certify.lipschitz_constant(model, x, y, norm=math.inf)
    clean = losses.cross_entropy(model(x), y)
    straight = float(np.mean(clean)) + constant * 0.05
    for order in (1, 2):
        grown = certify.growth_bound(model, x, y, order=order, constant=constant, **how)
        found = run(attacks.WDAPlusPlus(Lp(math.inf)), model, x, y, eps=0.05, order=order)
        moved = losses.cross_entropy(model(found.x_adv), y)
        attacked = float(np.mean((1 - found.weight) * clean + found.weight * moved))
        what = f"mnist_linf_robust .05, order {order}: attacked {attacked:.3f}, grown {grown:.3f}"
        said(f"{what}, E_N + L eps {straight:.1f}", attacked <= grown <= 0.5 * straight)


def train():
    train, test = data.digits()
    for seed in range(3):
        net, key = (
            models.mlp((64, 200, 200, 10), key=jax.random.key(seed)),
            jax.random.key(9 + seed),
        )
        pgd = attacks.PGD(steps=5, iterate="last")
        rows = []
        for kwargs in (
            {"attack": pgd, "eps": 0.1},
            {"certificate": certify.CertifiedTraining(), "eps": 0.12, "epochs": 150},
        ):
            began = time.perf_counter()
            model = training.train(net, *train, key=key, **kwargs).model
            spent = time.perf_counter() - began
            how = {"norm": math.inf, "eps": 0.1, "method": "auto", "batch_size": 400}
            held = certify.certified(model, *test, **how)
            right = np.argmax(model(test.x), axis=-1) == test.y
            rows.append((float(np.mean(held)), float(np.mean(right)), spent))
        (held, right, _), (more, clean, spent) = rows
        what = f"seed {seed}: verified {held:.3f} -> {more:.3f}, clean {right:.3f} -> {clean:.3f}"
        met = more >= held + 0.15 and clean >= right - 0.05 and spent < 60
        said(f"{what}, {spent:.0f} s", met)


if __name__ == "__main__":
    parts = {"cost": cost, "branch": branch, "growth": growth, "training": train}
    parts.update({f"cost={name}": functools.partial(cost_of, name) for name in COST})
    unknown = set(sys.argv[1:]) - set(parts)
    if unknown:
        sys.exit(f"there is no {', '.join(sorted(unknown))}; choose among {', '.join(parts)}")
    for name in sys.argv[1:] or ("cost", "branch", "growth", "training"):
        parts[name]()
