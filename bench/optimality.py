"""Minimum-norm attacks against the nearest flips known, and the bars of `fast` and `wda_star`.

    python bench/optimality.py [--settings resnet2b-linf ...] [--attacks fmn ...] [--queries 200]
    python bench/optimality.py --bars
    python bench/optimality.py --losses [--settings trades-linf ...] [--counts 20 30 100]

The first prints AttackBench's optimality of every attack at every number of queries (forward plus
backward passes of one image), with the accuracy that the knapsack makes of the distances; the
second the accuracies and passes that this library promises, and whether they were met. Envelopes
and d_max are those of `data/envelopes`, frozen; `beaten` counts images of which a nearer flip was
found.

The third searches all images with `wda_star`, so many samples at a time, and with WDA++, DDN, FMN,
PDPGD and Walk, each with the same number of backward passes an image, and lists the images on which
`wda_star` is farther than the nearest of these. For comparison the rows `50%` and `90%` are those
of these attacks themselves: the nearest of all of them, each with that share of the passes.
"""

import argparse
import functools
import math
import os
import time
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import Lp, attacks, convert, data, ensembles, metrics, transport

FILES = {
    "resnet2b": ("cifar10_resnet2b.pth", "resnet2b", "cifar10_test_0_100"),
    "mnist": ("mnist_linf_robust.pth", "wong_mnist", "mnist_test_0_500"),
    "trades": ("mnist_trades_smallcnn.pt", "trades_smallcnn", "mnist_test_0_500"),
    "wong": ("mnist_adv_training_wong.pth", "wong_mnist", "mnist_test_0_500"),
    "vanilla": ("mnist_vanilla.pth", "wong_mnist", "mnist_test_0_500"),
    "mlp": ("mnist_fc_3layer.pth", "mlp", "mnist_test_0_500"),
}
# Name: net, norm, images, the budget of the knapsack, envelope.
SETTINGS = {
    "resnet2b-linf": ("resnet2b", math.inf, 100, 2 / 255, "resnet2b_linf"),
    "mnist-linf": ("mnist", math.inf, 100, 0.1, "mnistlinf_linf"),
    "mnist-l2": ("mnist", 2, 100, 1.0, "mnistlinf_l2"),
    "trades-linf": ("trades", math.inf, 60, 0.3, "trades_linf"),
    "resnet2b-l1": ("resnet2b", 1, 100, 1.0, "resnet2b_l1"),
    "mnist-l1": ("mnist", 1, 100, 2.0, "mnistlinf_l1"),
}
ALL = (1, 2, math.inf)
# Name: norms, and what makes the attack from a ball and its steps.
SINGLE = {
    "walk": (ALL, lambda ball, steps: attacks.Walk(ball, steps=steps)),
    "far walk": (ALL, lambda ball, steps: attacks.Walk(ball, steps=steps, far=True)),
    "hasty walk": (ALL, lambda ball, steps: attacks.Walk(ball, steps=steps, far=True, haste=1.0)),
    "ddn": ((2,), lambda ball, steps: attacks.DDN(ball, steps=steps)),
    "fmn": (ALL, lambda ball, steps: attacks.FMN(ball, steps=steps)),
    "pdpgd": (ALL, lambda ball, steps: attacks.PDPGD(ball, steps=steps)),
    "alma": ((1, 2), lambda ball, steps: attacks.ALMA(ball, steps=steps)),
    "cw": ((2,), lambda ball, steps: attacks.CarliniWagner(ball, steps=steps // 5, rounds=5)),
    "tr": ((2, math.inf), lambda ball, steps: attacks.TrustRegion(ball, steps=steps)),
    "deepfool": (ALL, lambda ball, steps: attacks.DeepFool(ball, steps=max(1, steps // 5))),
    "fab": (ALL, lambda ball, steps: attacks.FAB(ball, steps=max(1, 2 * steps // 11))),
    "fab-t": (ALL, lambda ball, steps: attacks.FAB(ball, steps=max(1, 2 * steps // 9), targets=3)),
    "wda++": (ALL, lambda ball, steps: attacks.WDAPlusPlus(ball)),
}
BISECTED = {
    "bisected pgd": functools.partial(attacks.PGD, loss=wdjax.losses.margin),
    "bisected apgd": functools.partial(attacks.APGD, loss=wdjax.losses.dlr_or_margin),
}
RIVALS = ("wda++", "ddn", "fmn", "pdpgd", "walk")
NORMS = {"l1": 1, "l2": 2, "linf": math.inf}
NAMES = (*SINGLE, *BISECTED, "wda-star")
ALLOWED = {"resnet2b-linf": 2 / 255, "mnist-linf": 0.1, "mnist-l2": 2.0, "trades-linf": 0.3}
# Setting: accuracy of `fast`, and backward passes an image until it is reached.
FAST = {
    "resnet2b-linf": (0.60, 6),
    "mnist-linf": (0.96, 9),
    "mnist-l2": (0.02, 17),
    "trades-linf": (0.92, 50.6),
}
# Setting, budget: backward passes an image and the accuracies over Omega_1 and Omega_2.
STAR = [
    ("resnet2b-linf", 2 / 255, 50, (0.183, 0.329)),
    ("resnet2b-linf", 2 / 255, 200, (0.1788, 0.3248)),
    ("mnist-linf", 0.1, 50, (0.296, 0.479)),
    ("mnist-linf", 0.1, 200, (0.2819, 0.4627)),
    ("mnist-l2", 1.0, 50, (0.19, 0.31)),
    ("mnist-l2", 1.0, 200, (0.1259, 0.2292)),
    ("mnist-l2", 2.0, 25, (0.0, 0.0)),
    ("trades-linf", 0.3, 50, (0.086, 0.160)),
    ("trades-linf", 0.3, 200, (0.0775, 0.1462)),
    ("trades-linf", 0.3, 500, (0.075, 0.142)),
    ("resnet2b-l1", 1.0, 500, (0.178, 0.307)),
    ("mnist-l1", 2.0, 500, (0.284, 0.415)),
]
# Setting: optimality of wda_star at 200, 1000 and 2000 queries.
OPTIMALITY = {
    "resnet2b-linf": (0.996, 0.998, 0.998),
    "mnist-linf": (0.96, 0.995, 1.0),
    "mnist-l2": (0.93, 1.04, 1.06),
    "trades-linf": (0.79, 0.965, 0.978),
}


@functools.cache
def load(shared, net, n):
    file, arch, images = FILES[net]
    x, y = data.load_npz(shared / "data" / f"{images}.npz").take(n)
    model = convert.load(shared / "data" / "weights" / file, arch).model
    return model, jnp.asarray(x), jnp.asarray(y)


def seek(name, model, x, y, norm, queries, seed):
    """The named attack, with settings for so many queries; None where the norm is not for it."""
    ball, key = Lp(norm), jax.random.key(seed)
    if name == "wda-star":
        return ensembles.wda_star(model, x, y, key=key, ball=ball, passes=queries)
    if name in BISECTED:
        attack = BISECTED[name](ball, steps=max(1, queries // 20 - 2))
        first = {1: 4.0, 2: 1.0, math.inf: 0.1}[norm]
        return ensembles.bisect(attack, model, x, y, eps=first, key=key)
    norms, make = SINGLE[name]
    if norm not in norms:
        return None
    return wdjax.search(make(ball, (queries - 3) // 2), model, x, y, key=key)


def omega(distance, eps):
    """Accuracy over Omega_1 and Omega_2."""
    return tuple(float(1 - transport.allocate(distance, eps, p).mean()) for p in (1, 2))


def tabulate(shared, given):
    heads = ("optimality", "Omega_1", "Omega_2", "forward", "backward", "most", "beaten", "sec")
    titles = "".join(f"{head:>11}" for head in heads)
    print(f"{'setting':<15}{'attack':<14}{'Q':>6}{titles}", flush=True)
    for setting in given.settings:
        net, norm, n, eps, file = SETTINGS[setting]
        model, x, y = load(shared, net, n)
        best = np.load(shared / "data" / "envelopes" / f"envelope_{file}.npz")["d"]
        for name in given.attacks:
            for queries in given.queries:
                began = time.process_time()
                found = seek(name, model, x, y, norm, queries, given.seed)
                if found is None:
                    continue
                distance = np.asarray(metrics.flip_distance(found), float)
                cells = (
                    float(metrics.optimality(distance, best)),
                    *omega(distance, eps),
                    float(found.forwards.mean()),
                    float(found.gradients.mean()),
                    int(found.passes.max()),
                    int((distance < best * (1 - 1e-4)).sum()),
                    time.process_time() - began,
                )
                row = "".join(f"{cell:>11.4g}" for cell in cells)
                print(f"{setting:<15}{name:<14}{queries:>6}{row}", flush=True)


def losses(shared, given):
    """Images on which `wda_star` loses to one of its rivals at equal backward passes."""
    heads = ("samples", "images", "over 1.01", "over 1.05", "worst", "mean", "rivals", "backward")
    print(f"{'setting':<15}" + "".join(f"{head:>13}" for head in heads), flush=True)
    for setting in given.settings:
        net, _, norm = setting.partition("-")
        norm, backward = NORMS[norm], given.backward
        model, x, y = load(shared, net, given.images)
        rivals = of_rivals(model, x, y, norm, backward, given.seed)
        least = np.min(list(rivals.values()), axis=0)
        names = np.array(list(rivals))[np.argmin(list(rivals.values()), axis=0)]

        def row(head, ours, spent):
            lost = np.where(ours > least, ours / np.where(least > 0, least, 1.0), 1.0)
            cells = (lost > 1.01).sum(), (lost > 1.05).sum(), lost.max(), ours.mean(), least.mean()
            cells = "".join(f"{cell:>13.5g}" for cell in (len(x), *cells, spent))
            print(f"{setting:<15}{head:>13}{cells}", flush=True)
            return np.flatnonzero(lost > 1.01)

        for count in given.counts:
            ours, spent = in_parts(model, x, y, norm, backward, count, given.seed)
            for image in row(count, ours, spent):
                print(f"    image {image}: {ours[image]:.5g}, {names[image]} {least[image]:.5g}")
        for share in (0.5, 0.9):
            steps = round(share * backward)
            shorter = of_rivals(model, x, y, norm, steps, given.seed)
            row(f"{share:.0%}", np.min(list(shorter.values()), axis=0), steps * len(shorter))


def of_rivals(model, x, y, norm, backward, seed):
    """Distances of each rival with so many backward passes, by name."""
    return {
        name: nearest(seek(name, model, x, y, norm, 2 * backward + 3, seed))
        for name in RIVALS
        if norm in SINGLE[name][0]
    }


def in_parts(model, x, y, norm, backward, count, seed):
    """Distances of `wda_star` for so many samples at a time, and its mean backward passes."""
    parts = [np.arange(len(x))[start : start + count] for start in range(0, len(x), count)]
    found = [
        ensembles.wda_star(
            model, x[part], y[part], key=jax.random.key(seed), ball=Lp(norm),
            passes=2 * backward, index=part,
        )
        for part in parts
    ]  # fmt: skip
    spent = np.concatenate([np.asarray(one.gradients) for one in found])
    return np.concatenate([nearest(one) for one in found]), spent.mean()


def nearest(found):
    return np.asarray(metrics.flip_distance(found), float)


def verdict(met):
    return "met" if met else "MISSED"


def bars(shared, given):
    key = jax.random.key(given.seed)
    for setting, (accuracy, passes) in FAST.items():
        if setting not in given.settings:
            continue
        net, norm = SETTINGS[setting][:2]
        model, x, y = load(shared, net, 100)
        account = ensembles.fast(model, x, y, eps=ALLOWED[setting], key=key, ball=Lp(norm))
        last, reached = account.legs[-1], account.reached
        met = last.accuracy <= accuracy + 1e-6 and reached.gradients <= passes
        met &= max(last.forwards, last.gradients) <= 150
        print(
            f"fast {setting:<15} {last.accuracy:.3f} (bar {accuracy}) reached after "
            f"{reached.gradients:.1f} backward (bar {passes}) and {reached.forwards:.1f} forward; "
            f"whole {last.gradients:.1f} and {last.forwards:.1f} (bar 150): {verdict(met)}",
            flush=True,
        )
    for setting, eps, backward, wanted in STAR:
        if setting not in given.settings:
            continue
        net, norm, n = SETTINGS[setting][:3]
        model, x, y = load(shared, net, n)
        for order, bar in zip((1, 2), wanted):
            found = ensembles.wda_star(
                model, x, y, key=key, ball=Lp(norm), eps=eps, order=order, passes=2 * backward
            )
            value = float(wdjax.spend(found, eps=eps, order=order).accuracy)
            spent = float(found.gradients.mean())
            met = value <= bar + 1e-6 and spent <= backward
            print(
                f"wda-star {setting:<15} eps {eps:.4g} order {order}: {value:.4f} (bar {bar}) at "
                f"{spent:.1f} backward (bar {backward}): {verdict(met)}",
                flush=True,
            )
        jax.clear_caches()  # Programs of all settings are more maps of memory than Linux allows.
    for setting, wanted in OPTIMALITY.items():
        if setting not in given.settings:
            continue
        net, norm, n, _, file = SETTINGS[setting]
        model, x, y = load(shared, net, n)
        best = np.load(shared / "data" / "envelopes" / f"envelope_{file}.npz")["d"]
        for queries, bar in zip((200, 1000, 2000), wanted):
            found = ensembles.wda_star(model, x, y, key=key, ball=Lp(norm), passes=queries)
            value = float(metrics.optimality(metrics.flip_distance(found), best))
            print(
                f"optimality {setting:<15} Q {queries}: {value:.4f} (bar {bar}) at "
                f"{float(found.passes.mean()):.0f} passes, {int(found.passes.max())} at most: "
                f"{verdict(value >= bar)}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    known = [f"{net}-{norm}" for net in FILES for norm in NORMS]
    parser.add_argument("--settings", nargs="+", choices=known, default=list(SETTINGS))
    parser.add_argument("--attacks", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--queries", nargs="+", type=int, default=[200, 1000, 2000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bars", action="store_true")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--counts", nargs="+", type=int, default=[20, 30, 100])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--backward", type=int, default=100)
    given = parser.parse_args()
    if given.losses:
        return losses(given.shared, given)
    if unknown := set(given.settings) - SETTINGS.keys():
        parser.error(f"no nearest flips are known for {', '.join(sorted(unknown))}; see --losses")
    (bars if given.bars else tabulate)(given.shared, given)


if __name__ == "__main__":
    main()
