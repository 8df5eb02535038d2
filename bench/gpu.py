"""What an accelerator takes: robust accuracy of a WRN-28-10 on CIFAR-sized images, and CROWN.

    python bench/gpu.py [--samples 10000] [--weights cifar10.pth --data cifar10.npz]
        [--methods fast,autoattack] [--peak 67] [--pytorch 500] [--quick]

Each method searches in float32, in TF32 and in bfloat16; points are confirmed in float32, and
``confirmed`` are the flips that hold there. ``share`` is that of ``--peak``, in TFLOP/s (of the
precision that is run; none by default), by XLA's own count of a gradient's operations. Without
weights the net is random and the images are noise: the times are those of real ones as far as as
many samples survive. Seconds include compilation once, ``again`` do not. ``--pytorch N`` compares
40 steps of PGD on N images, none of which flips, with those of PyTorch on a net of the same
weights. ``--quick`` is a small net on any machine, to see that it works.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import wdjax
from wdjax import Lp, Model, attacks, certify, convert, ensembles, losses, models
from wdjax.models import zoo

KEY, EPS = jax.random.key(0), 8 / 255
STEPS, BATCH = 40, 500  # Of the comparison with PyTorch.


def halved(given, x):
    """The model with parameters, images and activations in bfloat16; logits in float32."""
    model, kind = given, jnp.bfloat16
    small = jax.tree.map(lambda p: p.astype(kind) if p.dtype == jnp.float32 else p, model)
    return small(x.astype(kind)).astype(jnp.float32)


def precisions(model):
    """By name: the model, and the precision of its matrix products."""
    return {
        "float32": (model, "float32"),
        "tf32": (model, "tensorfloat32"),
        "bfloat16": (Model(halved, model), "bfloat16"),
    }


def setting(parsed):
    """The model, images ``[n, 32, 32, 3]`` and labels."""
    n = 16 if parsed.quick else parsed.samples
    if parsed.weights:
        model, _ = convert.load_robustbench(parsed.name, "cifar10", "Linf", parsed.weights)
    elif parsed.quick:
        model = models.mlp((3072, 16, 10), key=KEY)
    else:
        wide = zoo.build("wide_resnet", {"depth": 28, "width": 10}, rngs=nnx.Rngs(0))
        model = models.functional(wide)
    if parsed.data:
        with np.load(parsed.data) as data:
            return model, data["x"][:n].astype(np.float32), data["y"][:n]
    x = np.asarray(jax.random.uniform(KEY, (n, 32, 32, 3)))
    forward = jax.jit(model)
    size = min(n, 100)
    y = [np.asarray(jnp.argmax(forward(x[i : i + size]), -1)) for i in range(0, n, size)]
    return model, x, np.concatenate(y)


def operations(model, x, y):
    """XLA's count of the operations of one sample's gradient."""

    def loss(x, y):
        return jnp.sum(losses.cross_entropy(model(x), y))

    some = min(len(x), 16)
    counted = jax.jit(jax.grad(loss)).lower(x[:some], y[:some]).compile().cost_analysis()
    return counted.get("flops", 0.0) / some


def attacked(name, model, x, y, precision):
    """What the ensemble found, and its seconds."""
    began = time.perf_counter()
    with jax.default_matmul_precision(precision):
        found = getattr(ensembles, name)(model, x, y, ball=Lp(), eps=EPS, key=KEY, diagnose=False)
    found = getattr(found, "found", found)
    jax.block_until_ready(found.x_adv)
    return found, time.perf_counter() - began


def confirmed(model, found, y):
    """The share of all flips that are flips in float32 too."""
    flips = np.flatnonzero(found.success & found.correct)
    judge, held = jax.jit(model), 0
    with jax.default_matmul_precision("highest"):
        for part in np.array_split(flips, max(1, -(-len(flips) // 100))):
            held += int(np.sum(np.argmax(judge(found.x_adv[part]), -1) != y[part]))
    return held / max(1, len(flips))


def searches(parsed, model, x, y):
    print("method      precision   seconds   again   robust   confirmed   TFLOP/s   share")
    each = operations(model, x, y)
    for name in parsed.methods.split(","):
        for kind, (own, precision) in precisions(model).items():
            _, first = attacked(name, own, x, y, precision)
            found, again = attacked(name, own, x, y, precision)
            left = float(np.mean(found.correct & ~found.success))
            passes = float(np.sum(found.gradients)) + float(np.sum(found.forwards)) / 3
            rate = each * passes / again / 1e12
            share = f"{rate / parsed.peak:.2f}" if parsed.peak else "-"
            holds = confirmed(model, found, y)
            print(
                f"{name:10}  {kind:9}  {first:8.1f}  {again:6.1f}   {left:.4f}   {holds:9.4f}"
                f"   {rate:7.2f}   {share}"
            )


def descent(net, x, y, eps):
    """PGD in linf, as PyTorch's libraries write it, on one batch."""
    import torch

    at = x.clone()
    for _ in range(STEPS):
        at.requires_grad_()
        loss = torch.nn.functional.cross_entropy(net(at), y)
        (gradient,) = torch.autograd.grad(loss, at)
        with torch.no_grad():
            at = x + (at + eps / 4 * gradient.sign() - x).clamp(-eps, eps)
            at = at.clamp(0, 1)
    return at


def against_pytorch(parsed):
    """Prints both seconds of the same gradients; eps is so small that no sample is finished."""
    import torch
    import torch_reference
    from zoo import state

    entry, n, eps = zoo.entry("Wang2020Improving", "cifar10", "Linf"), parsed.pytorch, 1e-6
    place = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: torch.tensor(value, dtype=torch.float32) for name, value in state(entry)}
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(weights, file.name)
        model, _ = convert.load_robustbench(entry.name, "cifar10", "Linf", file.name)
    weights = {name: value.to(place) for name, value in weights.items()}
    x = np.asarray(jax.random.uniform(KEY, (n, 32, 32, 3)))
    y = np.asarray(jnp.argmax(jax.jit(model)(x[:1]), -1)).repeat(n)

    def net(x):
        return torch_reference.wide_resnet(weights, x)

    def ours(own, precision):
        with jax.default_matmul_precision(precision):
            attack = attacks.PGD(steps=STEPS)
            how = {"eps": eps, "batch_size": min(n, BATCH), "key": KEY, "diagnose": False}
            found = wdjax.search(attack, own, x, y, **how)
        jax.block_until_ready(found.x_adv)

    def theirs(net, precision):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        half = torch.autocast(place, torch.bfloat16) if precision == "bfloat16" else None
        with half or contextlib.nullcontext():
            for begin in range(0, n, BATCH):
                part = torch.tensor(x[begin : begin + BATCH].transpose(0, 3, 1, 2)).to(place)
                part = part.contiguous(memory_format=torch.channels_last)
                there = torch.tensor(y[begin : begin + BATCH]).long().to(place)
                descent(net, part, there, eps).cpu()

    def seconds(function, *given):
        times = []
        for _ in range(2):
            began = time.perf_counter()
            function(*given)
            times.append(time.perf_counter() - began)
        return "{:8.1f} {:8.2f}".format(*times)

    print("PGD         precision      first    again", flush=True)
    for kind, (own, precision) in precisions(model).items():
        print(f"wdjax       {kind:9} {seconds(ours, own, precision)}", flush=True)
        for name, victim in {"eager": net, "compiled": torch.compile(net)}.items():
            print(f"{name:11} {kind:9} {seconds(theirs, victim, kind)}", flush=True)


def crown(parsed):
    quick = models.mlp((784, 16, 10), key=KEY)
    model = quick if parsed.quick else models.trades_smallcnn(key=KEY)
    n = 4 if parsed.quick else 100
    x = jax.random.uniform(KEY, (n, 28, 28, 1))
    y = jnp.argmax(model(x), -1)
    for _ in range(2):
        began = time.perf_counter()
        low = certify.margin_bounds(model, x, y, norm=jnp.inf, eps=0.01)
        jax.block_until_ready(low)
    seconds = time.perf_counter() - began
    name = "an MLP" if parsed.quick else "trades_smallcnn"
    print(f"CROWN on {name}: {1e3 * seconds / n:.1f} ms a sample")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--weights", type=Path, help="of --name, from RobustBench")
    parser.add_argument("--name", default="Wang2020Improving")
    parser.add_argument("--data", type=Path, help=".npz with x in [0, 1] and y")
    parser.add_argument("--methods", default="fast,autoattack", help="or '' for none")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device")
    parser.add_argument("--pytorch", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="a small net and 16 images")
    parsed = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if parsed.methods:
        searches(parsed, *setting(parsed))
    if parsed.pytorch:
        against_pytorch(parsed)
    crown(parsed)


if __name__ == "__main__":
    main()
