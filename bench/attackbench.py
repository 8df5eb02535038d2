"""Nearest flips at equal passes: `wda_star` against adv-lib, foolbox and torchattacks, by image.

    python bench/attackbench.py [--settings mnist-l1 ...] [--queries 200 1000] [--images 100]
                                [--seed 0] [--losses] [--out FOLDER]

Every rival takes at most so many forward plus backward passes an image: what a step of it costs is
counted by hooks beforehand. `wda_star` is asked twice, with passes that samples share (`shared`, so
many in the mean) and with as many for each sample at most (`each`). Points of all are measured by
one function, with the PyTorch net. Brendel-Bethge begins at the nearest image of another class.

* ``opt``: AttackBench's local optimality, 1 where no image has a nearer flip by anybody: any row of
  this table, or the envelope of `data/envelopes` if there is one.
* ``union``: that of the best rival of each image, with the whole budget for each rival.
* ``>1.01``, ``>1.05``: images of which the best rival's flip is nearer by such a factor.
* ``ahead``: images of which ours is nearer by a factor of 1.01.

With ``--losses`` the images on which ours is farther by a factor of 1.01 follow, each with the
factor and the nearest rival. The last line counts the settings in which ours is above the union.
Distances of every row go to ``FOLDER/SETTING-Q.npz``.
"""

import argparse
import math
from pathlib import Path

import jax
import numpy as np
import optimality
import peers
import pytorch_wda
import torch

from wdjax import Lp, data, ensembles, metrics

MAKE = {
    "mlp": lambda: pytorch_wda.mlp(784, 128, 64, 10),
    "trades": pytorch_wda.trades_smallcnn,
    "resnet2b": pytorch_wda.ResNet2b,
}
ENVELOPES = {
    "resnet2b-linf": "resnet2b_linf",
    "resnet2b-l1": "resnet2b_l1",
    "mnist-linf": "mnistlinf_linf",
    "mnist-l2": "mnistlinf_l2",
    "mnist-l1": "mnistlinf_l1",
    "trades-linf": "trades_linf",
}
"""The nearest flips that anybody has found before."""


def rivals(net, norm, starts):
    """By name ``(x, y, steps) -> points``: all minimum-norm attacks of the norm."""
    import foolbox
    import torchattacks
    from adv_lib import attacks as adv
    from foolbox import attacks as fool

    model = foolbox.PyTorchModel(net, bounds=(0, 1))
    first = {1: 0.5, 2: 0.1}.get(norm)
    name = {1: "L1", 2: "L2", math.inf: "Linf"}[norm]
    boundary = {1: fool.L1BrendelBethgeAttack, 2: fool.L2BrendelBethgeAttack,
                math.inf: fool.LinfinityBrendelBethgeAttack}[norm]  # fmt: skip
    found = {
        "fmn adv-lib": lambda x, y, n: adv.fmn(net, x, y, norm, steps=n),
        "pdpgd adv-lib": lambda x, y, n: adv.pdpgd(net, x, y, norm, num_steps=n),
        "fab adv-lib": lambda x, y, n: adv.fab(net, x, y, norm, n_iter=n),
        "fab-t adv-lib": lambda x, y, n: adv.fab(
            net, x, y, norm, n_iter=n, targeted_restarts=True, restarts=3
        ),
        "brendel-bethge foolbox": lambda x, y, n: boundary(steps=n).run(
            model, x, y, starting_points=starts(x, y)
        ),
    }
    if norm < math.inf:
        found["alma adv-lib"] = lambda x, y, n: adv.alma(
            net, x, y, distance=name.lower(), init_lr_distance=first, α_rms=0.99, num_steps=n
        )
    if norm > 1:
        found["fab-t torchattacks"] = lambda x, y, n: torchattacks.FAB(
            net, norm=name, eps=1e9, steps=n, multi_targeted=True, n_classes=4
        )(x, y)
        found["tr adv-lib"] = lambda x, y, n: adv.tr(net, x, y, iter=n, adaptive=True, p=norm)
        found["deepfool adv-lib"] = lambda x, y, n: adv.df(net, x, y, steps=n, norm=norm)
    if norm == 1:
        found["ead foolbox"] = lambda x, y, n: fool.EADAttack(
            steps=n, initial_stepsize=0.1, decision_rule="L1", abort_early=False
        ).run(model, x, y)
    if norm == 2:
        found["ddn adv-lib"] = lambda x, y, n: adv.ddn(net, x, y, steps=n, levels=None)
        found["cw foolbox"] = lambda x, y, n: fool.L2CarliniWagnerAttack(
            steps=n, initial_const=0.1, abort_early=False
        ).run(model, x, y)
    return found


def affordable(net, attack, x, y, queries):
    """The number of steps that so many passes an image pay for, by the passes of two short runs.

    None where they do not pay for one step.
    """
    spent = []
    for steps in (4, 8):
        with peers.Passes(net) as passes:
            attack(x.clone(), y.clone(), steps)
        spent.append((passes.forward + passes.backward) / len(y))
    each = max((spent[1] - spent[0]) / 4, 1.0)
    steps = int((queries - spent[0]) / each + 4)
    return steps if steps > 0 else None


def others(net, x, y):
    """The function that gives for images their nearest of ``x`` with another prediction ``y``."""

    def nearest(points, labels):
        far = torch.cdist(points.flatten(1), x.flatten(1))
        far[labels[:, None] == y[None]] = torch.inf
        return x[far.argmin(1)]

    return nearest


def stranger(net, attack, x, y, queries, norm, seed):
    """Distances of a rival's points and its passes an image; None where it cannot begin."""
    torch.manual_seed(seed)
    steps = affordable(net, attack, x[:2], y[:2], queries)
    while steps:
        torch.manual_seed(seed)
        with peers.Passes(net) as passes:
            points = attack(x.clone(), y.clone(), steps)
        spent = (passes.forward + passes.backward) / len(y)
        if spent <= queries:
            return peers.measure(net, x, y, points, norm), spent
        steps = int(steps * min(queries / spent, 1 - 1 / steps))
    return None


def ours(model, net, x, y, there, labels, norm, queries, seed, most):
    found = ensembles.wda_star(
        model, x, y, key=jax.random.key(seed), ball=Lp(norm), passes=queries, most=most,
        diagnose=False,
    )  # fmt: skip
    points = peers.channels_first(found.x_adv)
    return peers.measure(net, there, labels, points, norm), float(found.passes.mean())


def load(shared, net, n):
    """Both nets, the images that both classify correctly in both layouts, and their numbers."""
    file, _, images = optimality.FILES[net]
    model, x, y = optimality.load(shared, net, n)
    build = MAKE.get(net, pytorch_wda.wong_mnist)
    other = pytorch_wda.load(build(), shared / "data" / "weights" / file)
    there, labels = peers.channels_first(x), torch.from_numpy(np.asarray(y, np.int64))
    right = np.asarray(model(x).argmax(1) == y) & (other(there).argmax(1) == labels).numpy()
    whole = peers.channels_first(data.load_npz(shared / "data" / f"{images}.npz").x)
    starts = others(other, whole, other(whole).argmax(1))
    kept = np.flatnonzero(right)
    return model, other, (x[kept], y[kept]), (there[kept], labels[kept]), starts, kept


def compare(setting, given):
    """Prints the rows of one setting; returns by number of passes what ours is above the union."""
    title, _, norm = setting.partition("-")
    norm = optimality.NORMS[norm]
    model, net, (x, y), (there, labels), starts, kept = load(given.shared, title, given.images)
    known, above = envelope(given.shared, setting)[kept], {}
    for queries in given.queries:
        ask = model, net, x, y, there, labels, norm, queries, given.seed
        mine = {"wda_star, shared": ours(*ask, None), "wda_star, each": ours(*ask, queries)}
        theirs = {
            name: stranger(net, attack, there, labels, queries, norm, given.seed)
            for name, attack in rivals(net, norm, starts).items()
        }
        theirs = {name: row for name, row in theirs.items() if row is not None}
        far = np.array([row[0] for row in theirs.values()])
        union, winners = far.min(axis=0), np.array(list(theirs))[far.argmin(axis=0)]
        best = np.min([known, union, *(row[0] for row in mine.values())], axis=0)
        rows = mine | theirs | {"union of rivals": (union, math.nan)}
        above[f"{setting} {queries}"] = [
            optimal(row[0], best) - optimal(union, best) for row in mine.values()
        ]
        for name, (far, spent) in rows.items():
            cells = f"{optimal(far, best):>8.3f}{np.mean(far):>10.4g}{spent:>8.0f}"
            over = np.where(far > union, far / np.maximum(union, 1e-12), 1.0)
            counts = [(over > 1.01).sum(), (over > 1.05).sum(), (far * 1.01 < union).sum()]
            against = "".join(f"{count:>10}" for count in counts if name in mine)
            print(f"{setting:<14}{queries:>5}  {name:<24}{len(far):>4}{cells}{against}", flush=True)
            lost = np.flatnonzero(over > 1.01)
            if given.losses and name in mine and len(lost):
                texts = [f"{kept[i]} {over[i]:.3g} {winners[i].split()[0]}" for i in lost]
                print(f"    farther: {', '.join(texts)}", flush=True)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            found = {name: row[0] for name, row in rows.items()}
            np.savez(given.out / f"{setting}-{queries}.npz", image=kept, best=best, **found)
    jax.clear_caches()  # Programs of all settings are more maps of memory than Linux allows.
    return above


def optimal(far, best):
    return float(metrics.optimality(far, best))


def envelope(shared, setting):
    """``[500]``: the nearest flips that anybody found before, inf where nobody looked."""
    known = np.full(500, np.inf)
    if setting in ENVELOPES:
        file = shared / "data" / "envelopes" / f"envelope_{ENVELOPES[setting]}.npz"
        found = np.load(file)["d"]
        known[: len(found)] = found
    return known


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    known = [f"{net}-{norm}" for net in optimality.FILES for norm in optimality.NORMS]
    parser.add_argument("--settings", nargs="+", choices=known, default=known)
    parser.add_argument("--queries", nargs="+", type=int, default=[200, 1000])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    heads = "".join(
        f"{head:>{wide}}"
        for head, wide in (
            ("n", 4), ("opt", 8), ("mean", 10), ("passes", 8), (">1.01", 10), (">1.05", 10),
            ("ahead", 10),
        )
    )  # fmt: skip
    print(f"{'setting':<14}{'Q':>5}  {'attack':<24}{heads}", flush=True)
    above = {}
    for setting in given.settings:
        above |= compare(setting, given)
    for place, word in enumerate(("shared", "each")):
        behind = [
            f"{name} by {-gain[place]:.3f}" for name, gain in above.items() if gain[place] < 0
        ]
        ahead = f"{len(above) - len(behind)} of {len(above)}"
        print(f"{word}: above the union in {ahead}; behind: {', '.join(behind) or 'nowhere'}")


if __name__ == "__main__":
    main()
