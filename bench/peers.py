"""Attacks against those of adv-lib, torchattacks, foolbox and AutoAttack: one thread's seconds.

    python bench/peers.py [--nets mnist resnet2b] [--attacks fmn ...] [--norms 0 1 2 inf]
                          [--peers adv-lib ...] [--images 100] [--repeats 2] [--seed 0]

AutoAttack is its authors' code as packaged in pyautoattack.

Both sides attack the correctly classified of the first images, with the same weights and the same
steps, in turn in one process; the PyTorch net takes them in one batch, ours in its default ones. A
peer that is not installed, or fails, is named and left out. Ours goes on after success where the
peer does (``stop=False``), so that both spend the same passes; theirs are counted by hooks.

* ``ours``, ``theirs``: least process seconds of warm runs; ``x``: theirs over ours.
* ``x/pass``: the same for a pass, forward and backward ones alike.
* ``forward``, ``backward``: passes an image, ours and theirs.
* ``robust``: share of the images without a misclassified point within eps; ``median``: distance to
  one. Both are measured at the points of both by one function, with the PyTorch net in one batch,
  the very program by which the peers took their decisions: finite, inside the box, misclassified.
* ``compile``: our first call, less a warm one.
"""

import argparse
import functools
import math
import os
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytorch_wda
import torch

import wdjax
from wdjax import Lp, attacks, convert, data, ensembles, losses

torch.set_num_threads(1)

NETS = {
    "mnist": ("mnist_linf_robust.pth", "wong_mnist", "mnist_test_0_500", pytorch_wda.wong_mnist),
    "resnet2b": ("cifar10_resnet2b.pth", "resnet2b", "cifar10_test_0_100", pytorch_wda.ResNet2b),
}
EPS = {
    "mnist": {0: 10, 1: 4.0, 2: 1.0, math.inf: 0.1},
    "resnet2b": {0: 4, 1: 2.0, 2: 0.25, math.inf: 2 / 255},
}
ALL, ROUND = (1, 2, math.inf), (2, math.inf)
# Name: what makes ours from the ball and eps.
OURS = {
    "pgd": lambda ball, eps: attacks.PGD(ball, steps=40, random_start=True, step_size=eps / 16),
    "apgd-ce": lambda ball, eps: attacks.APGD(ball, stop=False),
    "apgd-dlr": lambda ball, eps: attacks.APGD(ball, loss=losses.dlr, stop=False),
    "apgd-t": lambda ball, eps: attacks.APGD(ball, targets=3, steps=50),
    "fab": lambda ball, eps: attacks.FAB(ball, steps=20),
    "fab-t": lambda ball, eps: attacks.FAB(ball, steps=50, targets=3),
    "square": lambda ball, eps: attacks.Square(ball, queries=1000),
    "deepfool": lambda ball, eps: attacks.DeepFool(ball),
    "cw": lambda ball, eps: attacks.CarliniWagner(ball, steps=40, rounds=5),
    "ddn": lambda ball, eps: attacks.DDN(ball),
    "fmn": lambda ball, eps: attacks.FMN(ball),
    "pdpgd": lambda ball, eps: attacks.PDPGD(ball, steps=100),
    "pdpgd-500": lambda ball, eps: attacks.PDPGD(ball),
    "alma": lambda ball, eps: attacks.ALMA(ball, steps=200),
    "tr": lambda ball, eps: attacks.TrustRegion(ball),
    "sigma-zero": lambda ball, eps: attacks.SigmaZero(ball),
    "autoattack": lambda ball, eps: functools.partial(ensembles.autoattack, ball=ball),
}


def adv_lib(net, norm, eps):
    """By attack, the norms that it knows and ``(x, y) -> points``."""
    from adv_lib import attacks as a

    first = {1: 0.5, 2: 0.1}.get(norm)
    apgd = {"eps": eps, "norm": norm}
    targeted = {"n_iter": 50, "num_targets": 3, **apgd}
    fab = {"n_iter": 50, "targeted_restarts": True, "restarts": 3}
    cw = {"initial_const": 0.1, "binary_search_steps": 5, "max_iterations": 40}
    alma = {"distance": f"l{norm:g}", "init_lr_distance": first, "α_rms": 0.99, "num_steps": 200}
    return {
        "pgd": ((math.inf,), lambda x, y: a.pgd_linf(net, x, y, eps, relative_step_size=1 / 16)),
        "apgd-ce": (ALL, lambda x, y: a.apgd(net, x, y, loss_function="ce", **apgd)),
        "apgd-dlr": (ALL, lambda x, y: a.apgd(net, x, y, loss_function="dlr", **apgd)),
        "apgd-t": (ALL, lambda x, y: a.apgd_targeted(net, x, y, **targeted)),
        "fab": (ALL, lambda x, y: a.fab(net, x, y, norm, n_iter=20)),
        "fab-t": (ALL, lambda x, y: a.fab(net, x, y, norm, **fab)),
        "deepfool": (ROUND, lambda x, y: a.df(net, x, y, steps=50, norm=norm)),
        "cw": ((2,), lambda x, y: a.carlini_wagner_l2(net, x, y, abort_early=False, **cw)),
        "ddn": ((2,), lambda x, y: a.ddn(net, x, y, levels=None)),
        "fmn": (ALL, lambda x, y: a.fmn(net, x, y, norm, steps=100)),
        "pdpgd": (ALL, lambda x, y: a.pdpgd(net, x, y, norm, num_steps=100)),
        "pdpgd-500": (ALL, lambda x, y: a.pdpgd(net, x, y, norm)),
        "alma": ((1, 2), lambda x, y: a.alma(net, x, y, **alma)),
        "tr": (ROUND, lambda x, y: a.tr(net, x, y, adaptive=True, p=norm)),
        "sigma-zero": ((0,), lambda x, y: a.sigma_zero(net, x, y)),
    }


def torchattacks(net, norm, eps):
    import torchattacks as a

    norms = {"norm": {1: "L1", 2: "L2", math.inf: "Linf"}[norm], "eps": eps}
    steps = {"eps": eps, "alpha": eps / 16, "steps": 40}
    targets = {"steps": 50, "n_classes": 4}
    return {
        "pgd": (ROUND, (a.PGD if norm == math.inf else a.PGDL2)(net, **steps)),
        "apgd-ce": (ROUND, a.APGD(net, steps=100, **norms)),
        "apgd-dlr": (ROUND, a.APGD(net, steps=100, loss="dlr", **norms)),
        "apgd-t": (ROUND, a.APGDT(net, **targets, **norms)),
        "fab": (ALL, a.FAB(net, steps=20, **norms)),
        "fab-t": (ALL, a.FAB(net, multi_targeted=True, **targets, **norms)),
        "square": (ROUND, a.Square(net, n_queries=1000, resc_schedule=False, **norms)),
        "deepfool": ((2,), a.DeepFool(net)),
    }


def foolbox(net, norm, eps):
    import foolbox as f

    model, a = f.PyTorchModel(net, bounds=(0, 1)), f.attacks
    descent = {1: a.L1PGD, 2: a.L2PGD, math.inf: a.LinfPGD}[norm](rel_stepsize=1 / 16, steps=40)
    fmn = {1: a.L1FMNAttack, 2: a.L2FMNAttack, math.inf: a.LInfFMNAttack}[norm](steps=100)
    deepfool = (a.L2DeepFoolAttack if norm == 2 else a.LinfDeepFoolAttack)(steps=50)
    cw = a.L2CarliniWagnerAttack(5, 40, initial_const=0.1, abort_early=False)
    return {
        "pgd": (ALL, lambda x, y: descent.run(model, x, y, epsilon=eps)),
        "deepfool": (ROUND, lambda x, y: deepfool.run(model, x, y)),
        "cw": ((2,), lambda x, y: cw.run(model, x, y)),
        "ddn": ((2,), lambda x, y: a.DDNAttack(steps=100).run(model, x, y)),
        "fmn": (ALL, lambda x, y: fmn.run(model, x, y)),
    }


def autoattack(net, norm, eps):
    import pyautoattack as a

    how = {"norm": {1: "L1", 2: "L2", math.inf: "Linf"}[norm], "eps": eps, "version": "standard"}
    return {
        "autoattack": (ALL, lambda x, y: a.AutoAttack(net, **how).run_standard_evaluation(x, y)[0])
    }


HEADS = (
    *[("ours", 7), ("theirs", 8), ("x", 7), ("x/pass", 7), ("forward", 15), ("backward", 15)],
    *[("robust", 15), ("median", 20), ("compile", 9)],
)
PEERS = {
    "adv-lib": adv_lib, "torchattacks": torchattacks, "foolbox": foolbox, "autoattack": autoattack
}  # fmt: skip


def load(shared, name, count):
    """Both nets and what both classify correctly, in both layouts."""
    file, arch, images, build = NETS[name]
    x, y = data.load_npz(shared / "data" / f"{images}.npz").take(count)
    path = shared / "data" / "weights" / file
    ours, net = convert.load(path, arch).model, pytorch_wda.load(build(), path).eval()
    there, labels = channels_first(x), torch.from_numpy(np.asarray(y, np.int64))
    right = (np.asarray(ours(jnp.asarray(x))).argmax(1) == y) & (
        net(there).argmax(1) == labels
    ).numpy()
    return ours, net, (jnp.asarray(x[right]), jnp.asarray(y[right])), (there[right], labels[right])


def channels_first(x):
    return torch.from_numpy(np.moveaxis(np.asarray(x), -1, 1).copy())


def measure(net, x, y, points, norm):
    """Distances to the points; inf where one is not finite, not in the box or not misclassified."""
    points = points.detach()
    with torch.no_grad():
        flipped = net(points).argmax(1) != y
    flat, moved = points.flatten(1), (points - x).flatten(1).double()
    fine = flat.isfinite().all(1) & (flat >= -1e-6).all(1) & (flat <= 1 + 1e-6).all(1)
    far = torch.linalg.vector_norm(moved, norm, dim=1)
    return torch.where(flipped & fine, far, torch.inf).numpy()


class Passes:
    """Counts the images that go forward and backward through a net while it is open."""

    def __init__(self, net):
        self.net, self.forward, self.backward = net, 0, 0

    def __enter__(self):
        self.hook = self.net.register_forward_hook(self.note)
        return self

    def note(self, _, __, out):
        self.forward += len(out)
        if out.requires_grad:
            out.register_hook(self.note_back)

    def note_back(self, gradient):
        self.backward += len(gradient)

    def __exit__(self, *_):
        self.hook.remove()


def timed(function):
    began = time.process_time()
    value = function()
    return value, time.process_time() - began


def duel(setting, nets, pictures, theirs, given):
    """Prints a line for every peer: they and we take turns."""
    (title, name, norm, eps), (ours, net), ((x, y), (there, labels)) = setting, nets, pictures
    attack, key = OURS[name](Lp(norm), eps), jax.random.key(given.seed)

    def own():
        search = attack if callable(attack) else functools.partial(wdjax.search, attack)
        return jax.block_until_ready(search(ours, x, y, eps=eps, key=key))

    def peer(function):
        torch.manual_seed(given.seed)
        return function(there.clone(), labels.clone())

    found, first = timed(own)
    far = measure(net, there, labels, channels_first(found.x_adv), norm)
    counts, points, seconds = {}, {}, {None: []}
    for library, function in theirs.items():
        try:
            with Passes(net) as passes:
                points[library], spent = timed(functools.partial(peer, function))
        except Exception as error:  # Some have settings in which they do not work.
            print(f"{title:<9}{name:<11}{norm:<4g} {library:<13} failed: {error!r}", flush=True)
            continue
        counts[library], seconds[library] = passes, [spent]
    for _ in range(given.repeats):
        seconds[None].append(timed(own)[1])
        for library in counts:
            seconds[library].append(timed(functools.partial(peer, theirs[library]))[1])
    mine, spent = min(seconds[None]), float(found.passes.sum())
    for library, passes in counts.items():
        their, n = min(seconds[library]), len(labels)
        other = measure(net, there, labels, points[library], norm)
        each = their / (passes.forward + passes.backward) / (mine / spent)
        print(
            f"{title:<9}{name:<11}{norm:<4g} {library:<13}{mine:>7.2f}{their:>8.2f}"
            f"{their / mine:>7.2f}{each:>7.2f}"
            f"{float(found.forwards.mean()):>8.0f}{passes.forward / n:>7.0f}"
            f"{float(found.gradients.mean()):>8.0f}{passes.backward / n:>7.0f}"
            f"{np.mean(far > eps * (1 + 1e-5)):>8.3f}{np.mean(other > eps * (1 + 1e-5)):>7.3f}"
            f"{np.median(far):>10.4g}{np.median(other):>10.4g}{first - mine:>9.1f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--attacks", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--norms", nargs="+", type=float, choices=(0, *ALL), default=(0, *ALL))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for library in list(given.peers):
        try:
            PEERS[library](torch.nn.Linear(1, 1).eval(), 2, 1.0)
        except ImportError as error:
            print(f"{library} is left out: {error}")
            given.peers.remove(library)
    heads = "".join(f"{head:>{wide}}" for head, wide in HEADS)
    print(f"{'net':<9}{'attack':<11}{'r':<4} {'peer':<13}{heads}")
    for net in given.nets:
        *nets, mine, yours = load(given.shared, net, given.images)
        for name in given.attacks:
            for norm in given.norms:
                eps, theirs = EPS[net][norm], {}
                for library in given.peers if norm else {"adv-lib"} & {*given.peers}:
                    norms, function = PEERS[library](nets[1], norm, eps).get(name, ((), None))
                    if norm in norms:
                        theirs[library] = function
                if theirs:
                    duel((net, name, norm, eps), nets, (mine, yours), theirs, given)
        jax.clear_caches()  # Programs of all attacks are more maps of memory than Linux allows.


if __name__ == "__main__":
    main()
