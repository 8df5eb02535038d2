"""WRN-28-10 at full width: conversion time and memory, and speed against PyTorch on one thread.

python bench/zoo.py [--images N] [--repeats R]
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import convert
from wdjax.models import zoo
from wdjax.models.pytorch import slots

MODELS = ("Rony2019Decoupling", "Wang2023Better_WRN-28-10")


def peak():
    """Peak resident memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def state(entry):
    """Names and random values of the entry's PyTorch weights."""
    rng = np.random.default_rng(0)
    for name, slot in slots(zoo.build(entry.family, entry.options)).items():
        scale = np.prod(slot.shape[1:]) ** -0.5 if len(slot.shape) > 1 else 0.1
        value = rng.normal(size=slot.shape) * scale
        yield name, (value if name.endswith(("bias", "mean")) or value.ndim > 1 else 1 + value / 9)


def best(call, repeats):
    """The least process time of a call, in seconds."""
    times = []
    call()
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--convert", metavar="FILE", help="only convert, and report the memory")
    parser.add_argument("--model", default=MODELS[0])
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    if args.convert:
        base, start = peak(), time.perf_counter()
        model, _ = convert.load_robustbench(args.model, "cifar10", "L2", args.convert)
        jax.block_until_ready(model)
        size = Path(args.convert).stat().st_size / 2**20
        grown = peak() - base
        print(
            f"conversion {time.perf_counter() - start:.2f} s, {grown:.0f} MiB for {size:.0f} MiB:"
            f" {grown / size:.2f} x the file"
        )
        return
    import torch

    torch.set_num_threads(1)
    for name in MODELS:
        entry = zoo.entry(name, "cifar10", "L2")
        tensors = {key: torch.tensor(value, dtype=torch.float32) for key, value in state(entry)}
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(tensors, file.name)
            os.system(f"{sys.executable} {__file__} --convert {file.name} --model {name}")
            model, _ = convert.load_robustbench(name, "cifar10", "L2", file.name)
        compare(entry, model, tensors, args)


def compare(entry, model, tensors, args):
    """Prints how long a forward pass and an input gradient take here and in PyTorch."""
    import torch
    import torch_reference

    x = np.random.default_rng(0).uniform(size=(args.images, 32, 32, 3)).astype(np.float32)
    layer = zoo.normalization(entry.normalize)
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (layer.mean, layer.std))
    nchw = torch.tensor(x.transpose(0, 3, 1, 2)).contiguous()
    reference = getattr(torch_reference, entry.family)

    def torch_forward():
        with torch.no_grad():
            return reference(tensors, (nchw - mean) / std)

    def torch_gradient():
        leaf = nchw.clone().requires_grad_()
        return torch.autograd.grad(reference(tensors, (leaf - mean) / std).sum(), leaf)[0]

    forward = jax.jit(lambda model, x: model(x))
    gradient = jax.jit(jax.grad(lambda x, model: jnp.sum(model(x))))
    error = np.abs(np.asarray(forward(model, x)) - torch_forward().numpy()).max()
    print(f"{entry.name}: logits differ by {error:.1e}")
    pairs = {
        "forward": (lambda: jax.block_until_ready(forward(model, x)), torch_forward),
        "gradient": (lambda: jax.block_until_ready(gradient(x, model)), torch_gradient),
    }
    for name, (ours, theirs) in pairs.items():
        mine, other = best(ours, args.repeats), best(theirs, args.repeats)
        print(f"  {name} wdjax {mine:.2f} s, PyTorch {other:.2f} s: {other / mine:.2f} x")


if __name__ == "__main__":
    main()
