"""WDA on one thread: against plain PyTorch, and against the bare passes that it reports.

    python bench/attacks.py [--shared DIR] [--nets resnet2b wong_mnist ...] [--repeats 5]

Both peers attack the first 100 images with equal settings (l_inf, 20 steps, probe 10, all nine
rivals, last iterate) and must reach the same robust accuracy. The figures are process times.
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
import pytorch_wda
import torch

import wdjax
from wdjax import attacks, convert, data

NETS = {
    "resnet2b": ("cifar10_resnet2b.pth", "resnet2b", pytorch_wda.ResNet2b, 2 / 255),
    "wong_mnist": ("mnist_linf_robust.pth", "wong_mnist", pytorch_wda.wong_mnist, 0.1),
    "trades_smallcnn": (
        "mnist_trades_smallcnn.pt",
        "trades_smallcnn",
        pytorch_wda.trades_smallcnn,
        0.3,
    ),
    "mlp 784-128-64-10": (
        "mnist_fc_3layer.pth",
        "mlp",
        lambda: pytorch_wda.mlp(784, 128, 64, 10),
        0.05,
    ),
    "mlp 784-5x100-10": (
        "mnist_6_100_nat.pth",
        "mlp",
        lambda: pytorch_wda.mlp(784, *[100] * 5, 10),
        0.02,
    ),
}


def timed(function):
    began = time.process_time()
    value = function()
    return value, time.process_time() - began


@jax.jit
def forward(model, x):
    return model(x)


@jax.jit
def gradients(model, x, y):
    """One forward and nine backward passes, as a probing step needs them; unrolled like there."""
    logits, pullback = jax.vjp(model, x)
    rows = [(y + j) % 10 for j in range(1, 10)]
    return [pullback(jax.nn.one_hot(r, 10) - jax.nn.one_hot(y, 10))[0] for r in rows], logits


@jax.jit
def gradient(model, x, y):
    logits, pullback = jax.vjp(model, x)
    return pullback(jax.nn.one_hot((y + 1) % 10, 10) - jax.nn.one_hot(y, 10))[0], logits


def bare(model, x, y, result, size=32):
    """The passes that an attack reports, in full batches, and nothing else."""
    spent = np.asarray(result.info.gradients)
    probes, follows = (spent == 9).sum(), (spent == 1).sum()
    assert 9 * probes + follows == spent.sum()
    some, labels = x[:size], y[:size]
    rivals = jnp.concatenate([some] * 9)
    for _ in range(round(probes / size)):
        jax.block_until_ready(gradients(model, some, labels))
        jax.block_until_ready(forward(model, rivals))
    for _ in range(round(follows / size)):
        jax.block_until_ready(gradient(model, some, labels))
    for _ in range(round((len(x) + (spent.sum(0) > 0).sum()) / size)):
        jax.block_until_ready(forward(model, some))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'net':<20}{'acc':>6}{'peer':>6}{'wdjax s':>9}{'torch s':>9}{'x torch':>9}{'/ bare':>8}"
    )
    for name in arguments.nets:
        file, arch, module, eps = NETS[name]
        weights = arguments.shared / "data" / "weights" / file
        sets = "cifar10_test_0_100" if arch == "resnet2b" else "mnist_test_0_500"
        x, y = data.load_npz(arguments.shared / "data" / f"{sets}.npz").take(100)
        x, y = jnp.asarray(x), jnp.asarray(y)
        model, attack = convert.load(weights, arch).model, attacks.wda()
        peer = pytorch_wda.load(module(), weights)
        x_peer = torch.from_numpy(np.moveaxis(np.asarray(x), -1, 1).copy())
        y_peer = torch.from_numpy(np.asarray(y, np.int64).copy())

        def ours(model=model, attack=attack, x=x, y=y, eps=eps):
            return jax.block_until_ready(wdjax.run(attack, model, x, y, eps=eps))

        def theirs(peer=peer, x=x_peer, y=y_peer, eps=eps):
            x = pytorch_wda.wda(peer, x, y, eps=eps, step_size=0.6375 * eps)
            with torch.no_grad():
                return float((peer(x).argmax(1) == y).float().mean())

        bare(model, x, y, ours())
        rows = []
        for _ in range(arguments.repeats):
            result, mine = timed(ours)
            accuracy, torch_time = timed(theirs)
            _, passes = timed(lambda result=result: bare(model, x, y, result))
            rows.append((mine, torch_time, torch_time / mine, mine / passes))
        mine, torch_time, faster, over = np.median(rows, axis=0)
        print(
            f"{name:<20}{float(result.accuracy):>6.2f}{accuracy:>6.2f}{mine:>9.3f}{torch_time:>9.3f}"
            f"{faster:>9.2f}{over:>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
