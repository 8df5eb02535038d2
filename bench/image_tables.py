"""Tables 3, 4 and 6 of Hu et al. in shape, and Frank-Wolfe beside plain PyTorch.

    python bench/image_tables.py [--parts attack natural sizes peer] [--samples N]

``attack`` is Table 3: what step size and direction do to the attack with a growing radius on Wong's
net. ``natural`` and ``sizes`` are Tables 4 and 6: translations, rotations and blurs, and how far
they are. ``peer`` compares one radius of Frank-Wolfe without capacities against the same steps in
PyTorch, for pixels with mass only. All on one thread, process times.
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

import wdjax
from wdjax import convert, data, image

PIXELS = 784
KS = (5, 10, 20, 50, 100, 200, 500, 1000)
TABLE3 = {  # Direction, step in shares of the mass, and the row of the paper.
    "Wong et al.": ("linf", None, (100, 100, 100, 100, 94, 91, 83, 71)),
    "+ large step": ("linf", 0.04, (100, 96, 96, 94, 88, 69, 12, 0)),
    "+ l2 descent": ("l2", 0.06, (100, 90, 85, 68, 39, 8, 1, 1)),
}
MOVES = {
    "translation 5 %": lambda x: image.translate(x, 0.05),
    "translation 10 %": lambda x: image.translate(x, 0.10),
    "translation 20 %": lambda x: image.translate(x, 0.20),
    "rotation 5": lambda x: image.rotate(x, 5.0),
    "rotation 10": lambda x: image.rotate(x, 10.0),
    "rotation 20": lambda x: image.rotate(x, 20.0),
    "blur 3": lambda x: image.gaussian_blur(x, 3),
    "blur 5": lambda x: image.gaussian_blur(x, 5),
    "blur 7": lambda x: image.gaussian_blur(x, 7),
}
TABLE4 = {
    "mnist_vanilla": (97.8, 85.8, 48.3, 98.5, 97.7, 91.9, 98.6, 93.1, 62.4),
    "mnist_adv_training_wong": (91.2, 82.3, 49.3, 91.0, 88.7, 79.1, 88.0, 75.1, 58.4),
}
TABLE6 = {
    "l2": (5.2, 8.1, 10.3, 3.7, 5.4, 7.8, 3.2, 5.5, 6.5),
    "W1": (1.0, 2.2, 4.2, 0.5, 0.8, 1.5, 0.3, 1.0, 1.6),
}


def load(shared, net, n):
    x, y = data.load_npz(shared / "data" / "mnist_test_0_500.npz").take(n)
    return convert.load(shared / "data" / "weights" / f"{net}.pth", "wong_mnist").model, x, y


def attack(shared, n):
    model, x, y = load(shared, "mnist_adv_training_wong", n)
    mass = float(np.mean(x.sum(axis=(1, 2, 3))))
    for name, (direction, step, published) in TABLE3.items():
        step = 0.1 / mass if step is None else step  # A tenth of a pixel's range.
        found = wdjax.search(
            image.SinkhornPGD(
                steps=200, growing=True, direction=direction, step_size=step, iterations=50
            ),
            model,
            x,
            y,
        )
        radius = np.where(found.success, found.cost, np.inf) * PIXELS
        left = [100 * np.mean(np.asarray(found.correct) & (radius > k)) for k in KS]
        print(
            f"{name:<14}", " ".join(f"{k}: {a:.0f} ({b})" for k, a, b in zip(KS, left, published))
        )


def natural(shared, n):
    for net, published in TABLE4.items():
        model, x, y = load(shared, net, n)
        accurate = [
            100 * float(np.mean(jnp.argmax(model(move(x)), 1) == y)) for move in MOVES.values()
        ]
        rows = (f"{name} {a:.1f} ({b})" for name, a, b in zip(MOVES, accurate, published))
        print(f"{net}:", ", ".join(rows))


def sizes(shared, n):
    x, _ = data.load_npz(shared / "data" / "mnist_test_0_500.npz").take(n)
    for place, (name, move) in enumerate(MOVES.items()):
        moved = np.asarray(move(x), np.float64)
        far = np.sqrt(np.sum((moved - x) ** 2, axis=(1, 2, 3))).mean()
        scaled = (
            moved * x.sum(axis=(1, 2, 3), keepdims=True) / moved.sum(axis=(1, 2, 3), keepdims=True)
        )
        w1 = image.image_wasserstein_distance(x, scaled).mean()
        print(f"{name}: l2 {far:.1f} ({TABLE6['l2'][place]}), W1 {w1:.2f} ({TABLE6['W1'][place]})")


def peer(shared, n, k=50, steps=40, temperature=1e-3):
    """The same steps on both sides: no capacities, no momentum, the last iterate."""
    import torch

    torch.set_num_threads(1)
    model, x, y = load(shared, "mnist_vanilla", n)
    eps = k / PIXELS
    plain = image.FrankWolfe(steps=steps, sweeps=0, temperature=temperature, momentum=0.0)
    wdjax.search(plain, model, x, y, eps=eps)  # Compiles.
    net = torch_net(shared)
    ours, theirs = [], []
    for _ in range(3):
        began = time.process_time()
        found = jax.block_until_ready(wdjax.search(plain, model, x, y, eps=eps))
        ours.append(time.process_time() - began)
        began = time.process_time()
        flipped = torch_frank_wolfe(net, x, y, eps, steps, temperature)
        theirs.append(time.process_time() - began)
    robust = np.mean(found.correct & ~found.success)
    print(
        f"Frank-Wolfe, {steps} steps, k = {k}: {1e3 * min(ours) / n:.1f} ms an image, PyTorch "
        f"{1e3 * min(theirs) / n:.1f}: {min(theirs) / min(ours):.1f} times as long; robust "
        f"{robust:.2f}, PyTorch {1 - np.mean(flipped):.2f} (not repaired)"
    )


def torch_net(shared):
    import torch

    path = shared / "data" / "weights" / "mnist_vanilla.pth"
    (state,) = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    layers = torch.nn
    net = layers.Sequential(
        layers.Conv2d(1, 16, 4, stride=2, padding=1),
        layers.ReLU(),
        layers.Conv2d(16, 32, 4, stride=2, padding=1),
        layers.ReLU(),
        layers.Flatten(),
        layers.Linear(32 * 7 * 7, 100),
        layers.ReLU(),
        layers.Linear(100, 10),
    )
    net.load_state_dict(state)
    return net.eval()


def torch_frank_wolfe(net, x, y, eps, steps, temperature, reach=2):
    """Which images flip; ended images leave the batch, pixels without mass are left out."""
    import torch

    x = torch.tensor(np.asarray(x)[..., 0])
    y, alive = torch.tensor(np.asarray(y)).long(), torch.arange(len(x))
    flipped = torch.zeros(len(x), dtype=torch.bool)
    count = int((x > 0).flatten(1).sum(1).max())
    mass, sender = x.flatten(1).topk(count)
    moves = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 2)
    cost = moves.float().norm(dim=1)
    row, column = sender // 28, sender % 28
    to_row, to_column = row[..., None] + moves[:, 0], column[..., None] + moves[:, 1]
    valid = (to_row >= 0) & (to_row < 28) & (to_column >= 0) & (to_column < 28)
    target = (to_row.clamp(0, 27) * 28 + to_column.clamp(0, 27)).flatten(1)
    budget = mass.sum(1) * eps
    plan = torch.zeros(*sender.shape, len(cost))
    plan[..., len(cost) // 2] = mass
    for step in range(steps + 1):
        z = torch.zeros(len(alive), 784).scatter_add_(1, target, plan.flatten(1)).requires_grad_()
        logits = net(z.view(-1, 1, 28, 28))
        (gradient,) = torch.autograd.grad(
            torch.nn.functional.cross_entropy(logits, y[alive], reduction="sum"), z
        )
        fallen = logits.argmax(1) != y[alive]
        flipped[alive[fallen]] = True
        left = ~fallen
        if step == steps or not left.any():
            break
        alive, plan, target, valid = alive[left], plan[left], target[left], valid[left]
        mass, budget, gradient = mass[left], budget[left], gradient[left]
        gain = gradient / gradient.abs().amax(1, keepdim=True)
        gain = gain.gather(1, target).view_as(plan) / temperature
        gain[~valid] = -torch.inf
        low, high = torch.zeros(len(alive)), torch.full((len(alive),), 4 / temperature)
        for _ in range(20):
            price = (low + high) / 2
            vertex = mass[..., None] * torch.softmax(gain - price[:, None, None] * cost, -1)
            fits = (vertex * cost).sum((1, 2)) <= budget
            low, high = torch.where(fits, low, price), torch.where(fits, price, high)
        vertex = mass[..., None] * torch.softmax(gain - high[:, None, None] * cost, -1)
        plan = plan + 2 / (step + 2) * (vertex - plan)
    return flipped.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parts = {"attack": attack, "natural": natural, "sizes": sizes, "peer": peer}
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--samples", type=int, help="the first N; by part if left")
    given = parser.parse_args()
    usual = {"attack": 50, "natural": 500, "sizes": 20, "peer": 100}
    for name in given.parts:
        parts[name](given.shared, given.samples or usual[name])


if __name__ == "__main__":
    main()
