"""A plain PyTorch step of NPPR's fit (joint mode) beside ours, on one thread.

    python bench/pytorch_nppr.py [--latent 32] [--steps 10]

The same sizes: 32 inputs, 32 samples each, 7 components, full covariance, a learnable linear map to
14 x 14 and bicubic interpolation, Adam. Process times, without compilation.
"""

import argparse
import os
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np
import torch

import wdjax
from wdjax import convert, data, models
from wdjax.nppr import Family, Schedule, objective

torch.set_num_threads(1)
INPUTS, DRAWS, COUNT, EPS = 32, 32, 7, 0.1


class Heads(torch.nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.latent = latent
        self.places = torch.tril_indices(latent, latent)
        self.shared = torch.nn.Linear(100, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.embedding = torch.nn.Embedding(10, 64)
        self.pi = torch.nn.Linear(64, COUNT)
        self.mean = torch.nn.Linear(256, COUNT * latent)
        self.factor = torch.nn.Linear(256, COUNT * self.places.shape[1])
        self.map = torch.nn.Linear(latent, 196, bias=False)

    def forward(self, features, y):
        hidden = torch.relu(self.norm(self.shared(features)))
        unit = torch.nn.functional.normalize(self.embedding(y), dim=1)
        packed = self.factor(hidden).view(-1, COUNT, self.places.shape[1])
        factor = torch.zeros(len(y), COUNT, self.latent, self.latent)
        factor[:, :, self.places[0], self.places[1]] = packed
        diagonal = torch.nn.functional.softplus(factor.diagonal(dim1=2, dim2=3)) + 1e-3
        factor = torch.tril(factor, -1) + torch.diag_embed(diagonal)
        mean = self.mean(hidden).view(-1, COUNT, self.latent)
        log = torch.log_softmax(self.pi(unit), dim=1)[:, None].expand(-1, DRAWS, -1)
        z = torch.nn.functional.gumbel_softmax(log, tau=0.5)
        xi = torch.randn(len(y), DRAWS, COUNT, self.latent)
        moved = torch.einsum("bkij,bmkj->bmki", factor, xi) + mean[:, None]
        latent = (z[..., None] * moved).sum(2).view(-1, self.latent)
        small = self.map(latent).view(-1, 1, 14, 14)
        full = torch.nn.functional.interpolate(small, (28, 28), mode="bicubic", antialias=True)
        return EPS * torch.tanh(full)


def theirs(weights, x, y, latent, steps):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 4, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 4, 2, 1),
        torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1568, 100), torch.nn.ReLU(),
        torch.nn.Linear(100, 10),
    )  # fmt: skip
    held = torch.load(weights, map_location="cpu", weights_only=True)
    net.load_state_dict(held["state_dict"][0])
    net.requires_grad_(False)
    heads = Heads(latent)
    adam = torch.optim.Adam(heads.parameters(), 5e-3)
    images = torch.tensor(np.asarray(x)).permute(0, 3, 1, 2)
    labels = torch.tensor(np.asarray(y)).long()
    own = labels.repeat_interleave(DRAWS)[:, None]

    def step():
        delta = heads(net[:-1](images), labels)
        points = (images.repeat_interleave(DRAWS, 0) + delta).clamp(0, 1)
        logits = net(points)
        true = logits.gather(1, own)
        rest = logits.scatter(1, own, -torch.inf).max(1, keepdim=True).values
        loss = torch.nn.functional.softplus(true - rest + 1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()

    step()
    began = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - began) / steps


def ours(weights, x, y, latent, steps):
    model = convert.load(weights, "wong_mnist").model
    family, schedule = Family(latent=latent), Schedule(steps=1000, loss="softplus")
    x, y = jnp.asarray(x), jnp.asarray(y)
    features = models.features(model)(x)
    given = objective.Data(model, x, y, features, None, schedule.settled(family))
    plan = objective.FitProgram(family, wdjax.Lp(), True)
    keys, radii = jax.random.split(jax.random.key(0), 1), jnp.array([EPS])
    state = objective.first_fit_states(family, x.shape[1:], 100, 10, 1000, keys, radii, {})
    jax.block_until_ready(objective.advance(plan, given, state, 0, 1))
    began = time.process_time()
    jax.block_until_ready(objective.advance(plan, given, state, 0, steps))
    return (time.process_time() - began) / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    words = parser.parse_args()
    x, y = data.load_npz(words.shared / "data" / "mnist_test_0_500.npz").take(INPUTS)
    weights = words.shared / "data" / "weights" / "mnist_vanilla.pth"
    plain = theirs(weights, x, y, words.latent, words.steps)
    mine = ours(weights, x, y, words.latent, words.steps)
    print(
        f"a step at L {words.latent}: PyTorch {1e3 * plain:.0f} ms, wdjax {1e3 * mine:.0f} ms, "
        f"ratio {plain / mine:.2f}"
    )


if __name__ == "__main__":
    main()
