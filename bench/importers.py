"""Imported networks beside PyTorch, and beside our own architectures with the same weights.

    python bench/importers.py [NAME ...]

torchvision's networks with random weights: parameters; the largest error of logits and of input
gradients, relative to the largest, and PyTorch's own error of the gradient, against float64: where
rounding moves an input of a ReLU across 0 both are large; seconds for logits and gradient, and
PyTorch's. For those that
``wdjax.models`` has too: seconds of an attack on both, in turn, and their ratio. Needs torch,
torchvision, onnx and onnxscript.
"""

import copy
import os
import statistics
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchvision
from flax import nnx

import wdjax
from wdjax import convert
from wdjax.models import functional, zoo

NETS = {
    "resnet18": (224, ("torchvision_resnet", {"blocks": (2, 2, 2, 2)})),
    "mobilenet_v3_small": (224, None),
    "convnext_tiny": (224, ("convnext", {"depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)})),
    "vit_b_16": (224, ("vit", {"width": 768, "depth": 12, "heads": 12})),
    "swin_t": (224, None),
    "efficientnet_b0": (224, None),
    "densenet121": (224, None),
}
"""Side of the images, and the family and options of our own architecture."""
BATCH, ROUNDS, STEPS = 2, 5, 4


def seconds(call):
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def by_turns(*calls):
    """The least time of each of several calls, after one that is not counted."""
    for call in calls:
        call()
    times = [[seconds(call) for call in calls] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*times)], times


def relative(ours, theirs):
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


def shaken(net):
    """Random numbers for what would be constant or nearly 0 at first."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in net.state_dict().items():
        if name.endswith("running_mean"):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        elif name.endswith(("running_var",)):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        elif name.endswith("layer_scale"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        elif name.endswith(("head.weight", "heads.head.weight", "class_token")):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return net.eval()


def measured(name):
    side, twin = NETS[name]
    torch.manual_seed(0)
    net = shaken(getattr(torchvision.models, name)(weights=None))
    model, report = convert.from_torch(net, torch.rand(1, 3, side, side))
    x = torch.rand(BATCH, 3, side, side, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(BATCH, 1000, generator=torch.Generator().manual_seed(2))

    def theirs(net=net, kind=torch.float32):
        images = x.to(kind, copy=True).requires_grad_()
        logits = net(images)
        (logits * weights.to(kind)).sum().backward()
        return logits.detach().numpy(), images.grad.numpy()

    @jax.jit
    def ours(model, x):
        logits, back = jax.vjp(model, x)
        return logits, back(jnp.asarray(weights.numpy()))[0]

    images = jnp.asarray(x.numpy().transpose(0, 2, 3, 1))
    (logits, gradient), (want, slope) = ours(model, images), theirs()
    exact = theirs(copy.deepcopy(net).double(), torch.float64)[1]
    times, _ = by_turns(lambda: ours(model, images), theirs)
    row = [
        name, f"{report.parameters:,}", f"{relative(logits, want):.1e}",
        f"{relative(gradient.transpose(0, 3, 1, 2), slope):.1e}", f"{relative(slope, exact):.1e}",
        f"{times[0]:.3f}", f"{times[1]:.3f}",
    ]  # fmt: skip
    return row + (attacked(model, images, *twin) if twin else ["", "", ""])


def attacked(model, images, family, options):
    """Seconds of an attack on the imported model, on our architecture, and the median ratio."""
    module = zoo.build(family, zoo.options_of(family, options), "", rngs=nnx.Rngs(0))
    own = functional(module)
    attack = wdjax.attacks.PGD(steps=STEPS)

    def call(model):
        labels = jnp.argmax(model(images), axis=1)
        return wdjax.search(attack, model, images, labels, eps=1 / 255, key=jax.random.key(0)).cost

    times, rounds = by_turns(lambda: call(model), lambda: call(own))
    ratio = statistics.median(first / second for first, second in rounds)
    return [f"{times[0]:.3f}", f"{times[1]:.3f}", f"{ratio:.2f}"]


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    head = [
        "net",
        "parameters",
        "logits",
        "gradient",
        "torch's own",
        "s",
        "s, torch",
        "attack",
        "twin",
        "ratio",
    ]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name in sys.argv[1:] or NETS:
        print("| " + " | ".join(measured(name)) + " |", flush=True)


if __name__ == "__main__":
    main()
