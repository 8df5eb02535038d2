"""Attacks on one thread: against another version of wdjax, plain PyTorch, and their bare passes.

    python bench/attacks.py [--base DIR] [--nets resnet2b wong_mnist ...] [--attacks wda pgd ...]

Every attack runs on the first 100 images with equal settings (l_inf; WDA: 20 steps, probe 10, all
nine rivals, last iterate), the peers in turn in one run, and the figures are process times.

* ``--base DIR``: a checkout of commit 2621030, the version before searches went in rounds, say from
  ``git worktree add DIR 2621030``; it runs in a process of its own that answers in turn.
* ``x torch``: PyTorch's time over ours, for WDA.
* ``/ bare``: our time over that of the gradients and forward passes that the attack reports.
* ``jit / host``: time a gradient inside ``jit(run)``, over that of the host's path.
* ``compile``: process time of an attack's first call, in a process that does nothing else, so that
  what attacks and nets share is compiled once. It is the same for the other version.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import attacks, convert, data

NETS = {
    "resnet2b": ("cifar10_resnet2b.pth", "resnet2b", 2 / 255),
    "wong_mnist": ("mnist_linf_robust.pth", "wong_mnist", 0.1),
    "trades_smallcnn": ("mnist_trades_smallcnn.pt", "trades_smallcnn", 0.3),
    "mlp": ("mnist_fc_3layer.pth", "mlp", 0.05),
}
NAMES = ("wda", "wda++", "pgd")
NEW = hasattr(wdjax, "Lp")


def make(name):
    if NEW:
        return {"wda": attacks.WDA, "wda++": attacks.WDAPlusPlus, "pgd": attacks.PGD}[name]()
    return {"wda": attacks.wda, "wda++": attacks.wda_plus_plus, "pgd": attacks.pgd}[name]()


def load(shared, net):
    file, arch, eps = NETS[net]
    images = "cifar10_test_0_100" if arch == "resnet2b" else "mnist_test_0_500"
    x, y = data.load_npz(shared / "data" / f"{images}.npz").take(100)
    model = convert.load(shared / "data" / "weights" / file, arch).model
    return model, jnp.asarray(x), jnp.asarray(y), eps


def timed(function):
    began = time.process_time()
    value = jax.block_until_ready(function())
    return value, time.process_time() - began


def answer(shared):
    """A version's side: a line ``net attack`` in, process seconds and accuracy out."""
    for line in sys.stdin:
        net, name = line.split()
        model, x, y, eps = load(shared, net)
        attack = make(name)
        result, seconds = timed(lambda: wdjax.run(attack, model, x, y, eps=eps))
        print(f"{seconds} {float(result.accuracy)}", flush=True)


class Peer:
    """A version of wdjax in a process of its own."""

    def __init__(self, base, shared):
        command = [sys.executable, __file__, "--answer", "--shared", str(shared.absolute())]
        environment = os.environ | {"PYTHONPATH": str(base)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, net, name):
        print(net, name, file=self.process.stdin, flush=True)
        return tuple(map(float, self.process.stdout.readline().split()))


@jax.jit
def forward(model, x):
    return model(x)


@jax.jit
def gradients(model, x, y):
    """One forward and nine backward passes, as a probing step needs them."""
    logits, pullback = jax.vjp(model, x)
    rows = jnp.stack([(y + j) % 10 for j in range(1, 10)])
    return jax.vmap(lambda r: pullback(jax.nn.one_hot(r, 10) - jax.nn.one_hot(y, 10)))(rows), logits


@jax.jit
def gradient(model, x, y):
    logits, pullback = jax.vjp(model, x)
    return pullback(jax.nn.one_hot((y + 1) % 10, 10) - jax.nn.one_hot(y, 10))[0], logits


def bare(model, x, y, history, size=20):
    """The passes of a WDA history in full batches, and nothing else."""
    spent = np.asarray(history.gradients)
    probes, follows = (spent == 9).sum(), (spent == 1).sum()
    some, labels = x[:size], y[:size]
    rivals = jnp.concatenate([some] * 9)
    for _ in range(round(probes / size)):
        jax.block_until_ready(gradients(model, some, labels))
        jax.block_until_ready(forward(model, rivals))
    for _ in range(round(follows / size)):
        jax.block_until_ready(gradient(model, some, labels))
    for _ in range(round((len(x) + (spent.sum(0) > 0).sum()) / size)):
        jax.block_until_ready(forward(model, some))


def torch_wda(shared, net, x, y, eps):
    """A function that attacks with plain PyTorch and tells its accuracy; None without PyTorch."""
    try:
        import pytorch_wda
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    module = {"mlp": lambda: pytorch_wda.mlp(784, 128, 64, 10), "resnet2b": pytorch_wda.ResNet2b}
    built = module.get(net, getattr(pytorch_wda, net, None))()
    peer = pytorch_wda.load(built, shared / "data" / "weights" / NETS[net][0])
    images = torch.from_numpy(np.moveaxis(np.asarray(x), -1, 1).copy())
    labels = torch.from_numpy(np.asarray(y, np.int64).copy())

    def attack():
        moved = pytorch_wda.wda(peer, images, labels, eps=eps, step_size=0.6375 * eps)
        with torch.no_grad():
            return float((peer(moved).argmax(1) == labels).float().mean())

    return attack


def measure(shared, net, name, twin, peer, repeats):
    model, x, y, eps = load(shared, net)
    attack = make(name)

    def ours():
        return wdjax.run(attack, model, x, y, eps=eps)

    result, _ = timed(ours)
    history = wdjax.run(attack, model, x, y, eps=eps, history=True).history
    traced = jax.jit(lambda model, x: wdjax.run(attack, model, x, y, eps=eps))
    inside, _ = timed(lambda: traced(model, x))
    theirs = torch_wda(shared, net, x, y, eps) if name == "wda" else None
    first, first_base = twin.ask(net, name)[0], peer.ask(net, name)[0] if peer else np.nan
    rows = []
    for _ in range(repeats):
        _, own = timed(ours)
        base = peer.ask(net, name)[0] if peer else np.nan
        _, passes = timed(lambda: bare(model, x, y, history)) if name == "wda" else (0, np.nan)
        _, torch_time = timed(theirs) if theirs else (0, np.nan)
        _, looped = timed(lambda: traced(model, x))
        each = looped / inside.gradients.sum() / (own / result.gradients.sum())
        rows.append((own, own / base, torch_time / own, own / passes, float(each)))
    middle = np.median(np.array(rows, float), axis=0)
    cells = "".join(f"{value:>11.3f}" for value in middle)
    print(
        f"{net:<16}{name:<6}{float(result.accuracy):>7.4f}{cells}{first:>9.1f}{first_base:>9.1f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--attacks", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answer(given.shared)
        return
    twin = Peer(Path(wdjax.__file__).parents[1], given.shared)
    peer = Peer(given.base.absolute(), given.shared) if given.base else None
    heads = ("seconds", "/ base", "x torch", "/ bare", "jit/host")
    titles = "".join(f"{head:>11}" for head in heads)
    print(f"{'net':<16}{'attack':<6}{'acc':>7}{titles}{'compile':>9}{'of base':>9}")
    for net in given.nets:
        for name in given.attacks:
            measure(given.shared, net, name, twin, peer, given.repeats)


if __name__ == "__main__":
    main()
