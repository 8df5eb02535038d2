"""Minimum-norm attacks step by step: NumPy transcriptions of the papers, gradients by PyTorch."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, attacks


def network(seed=0):
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(seed)
    first, second = generator.normal(size=(8, 16)) / 2, generator.normal(size=(16, 4)) / 2
    model = wdjax.Model(
        lambda w, x: jnp.tanh(x @ w[0]) @ w[1],
        (jnp.asarray(first, jnp.float32), jnp.asarray(second, jnp.float32)),
    )

    def peer(x):
        return torch.tanh(x @ torch.tensor(first)) @ torch.tensor(second)

    x = generator.uniform(size=(10, 8)).astype(np.float32)
    return torch, model, peer, x, np.asarray(jnp.argmax(model(x), -1))


def slope(torch, peer, point, y, loss):
    """Gradient and margin of one point in float64."""
    point = torch.tensor(point[None], requires_grad=True)
    logits = peer(point)
    others = logits[0][torch.arange(logits.shape[1]) != y]
    margin = others.max() - logits[0, y]
    goal = margin
    if loss == "ce":
        goal = torch.nn.functional.cross_entropy(logits, torch.tensor([int(y)]))
    goal.backward()
    return point.grad[0].numpy(), float(margin.detach())


def fall(start, end, step, steps):
    return end + (start - end) * (1 + np.cos(np.pi * step / steps)) / 2


def test_ddn_step_by_step():
    torch, model, peer, x, y = network()
    found = wdjax.search(attacks.DDN(steps=25, radius=0.3, step_size=0.5), model, x, y)
    for i, (clean, label) in enumerate(zip(x.astype(float), y)):
        delta, radius, best = np.zeros(8), 0.3, np.inf
        for step in range(26):
            gradient, margin = slope(torch, peer, clean + delta, label, "ce")
            if margin > 0:
                best = min(best, np.linalg.norm(delta))
            radius *= 0.95 if margin > 0 else 1.05
            delta = delta + fall(0.5, 0.005, step, 25) * gradient / np.linalg.norm(gradient)
            delta = np.clip(clean + radius * delta / np.linalg.norm(delta), 0, 1) - clean
        cost = float(found.cost[i]) if found.success[i] else np.inf
        np.testing.assert_allclose(cost, best, rtol=2e-3)


@pytest.mark.parametrize("norm", [2, np.inf])
def test_fmn_step_by_step(norm):
    torch, model, peer, x, y = network()
    found = wdjax.search(attacks.FMN(Lp(norm), steps=25, step_size=0.5), model, x, y)
    order = {2: 2, np.inf: 1}[norm]
    for i, (clean, label) in enumerate(zip(x.astype(float), y)):
        delta, radius, best = np.zeros(8), np.inf, np.inf
        for step in range(26):
            gradient, margin = slope(torch, peer, clean + delta, label, "margin")
            size, known = np.linalg.norm(delta, norm), np.isfinite(best)
            share = fall(0.05, 0.001, step, 25)
            if margin > 0:
                best = min(best, size)
                radius = min(radius * (1 - share), best)
            elif known:
                radius *= 1 + share
            else:
                radius = (size + abs(margin) / np.linalg.norm(gradient, order)) * (1 + 1e-4)
            delta = delta + fall(0.5, 0.005, step, 25) * gradient / np.linalg.norm(gradient)
            if norm == 2:
                delta *= min(1, radius / np.linalg.norm(delta))
            delta = np.clip(clean + np.clip(delta, -radius, radius), 0, 1) - clean
        cost = float(found.cost[i]) if found.success[i] else np.inf
        np.testing.assert_allclose(cost, best, rtol=5e-3)


def test_pdpgd_step_by_step():
    torch, model, peer, x, y = network()
    steps = 40
    found = wdjax.search(attacks.PDPGD(Lp(1), steps=steps, dual_step=0.02), model, x, y)
    for i, (clean, label) in enumerate(zip(x.astype(float), y)):
        delta, best, share = np.zeros(8), np.inf, 0.01 / 1.01
        mean, square, log = np.zeros(8), np.zeros(8), -math.log(0.01)
        unit = abs(slope(torch, peer, clean, label, "margin")[1]) / 5
        for step in range(steps + 1):
            gradient, margin = slope(torch, peer, clean + delta, label, "margin")
            if margin > 0:
                best = min(best, np.abs(delta).sum())
            gradient = gradient / (1 + math.exp(margin / unit))
            if step == 0:
                steep = np.abs(gradient).max()
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            metric = np.sqrt(square / (1 - 0.999 ** (step + 1))) + 1e-8
            size = 0.1 * 0.01 ** (step / steps)
            z = delta + size * mean / (1 - 0.9 ** (step + 1)) / metric
            z = np.clip(clean + z, 0, 1) - clean
            u, weight = z, size * steep * share / (1 - share) / metric.max()
            for _ in range(5):
                u = u - metric / metric.max() * (u - z)
                u = np.sign(u) * np.maximum(np.abs(u) - weight, 0)
                u = np.clip(clean + u, 0, 1) - clean
            delta = u
            pace = 0.02 * math.sqrt(500 / steps) * (1 - 0.9 * step / steps)
            log = np.clip(log + (-pace if margin > 0 else pace), -math.log(1e6), math.log(1e6))
            share = 0.9 * share + 0.1 / (1 + math.exp(log))
        cost = float(found.cost[i]) if found.success[i] else np.inf
        np.testing.assert_allclose(cost, best, rtol=2e-3)


@pytest.mark.parametrize("norm", [1, 2])
def test_alma_step_by_step(norm):
    """DLR and its slope by PyTorch, the penalty's slope by differences."""
    torch, model, peer, x, y = network()
    steps, first, costs, exact = 60, 0.1, [], []
    found = wdjax.search(attacks.ALMA(Lp(norm), steps=steps, first=first), model, x, y)

    def constraint(point, label):
        point = torch.tensor(point[None], requires_grad=True)
        logits = peer(point)[0]
        top, others = torch.sort(logits).values, logits[torch.arange(4) != label]
        ratio = (logits[label] - others.max()) / (top[-1] - top[-3])
        ratio.backward()
        return float(ratio.detach()), point.grad[0].numpy()

    def penalty(c, rho, mu):
        above = mu * c + mu * rho * c**2 + rho**2 * c**3 / 6
        return above if c >= 0 else mu * c / (1 - max(rho, 1) * c)

    def rise(c, rho, mu):
        return (penalty(c + 1e-6, rho, mu) - penalty(c - 1e-6, rho, mu)) / 2e-6

    for i, (clean, label) in enumerate(zip(x.astype(float), y)):
        delta, mu, rho, best, since, flipped = np.zeros(8), 1.0, 1.0, np.inf, steps, False
        squares, momentum, before, rate = np.ones(8), np.zeros(8), np.inf, None
        for step in range(steps + 1):
            c, gradient = constraint(clean + delta, label)
            length = np.linalg.norm(delta, norm)
            if c < 0:
                best, since, flipped = min(best, length), min(since, step), True
            if (step + 1) % 10 == 0:
                rho *= 1.2 if not flipped and c > 0.95 * before else 1.0
                before, flipped = c, False
            if step > 0:
                mu = np.clip(0.9 * mu + 0.1 * rise(c, rho, mu), 1e-6, 1e12)
            away = np.sign(delta) if norm == 1 else delta / max(length, 1e-30)
            gradient = rise(c, rho, mu) * gradient + away
            squares = 0.99 * squares + 0.01 * gradient**2
            scaled = gradient / np.sqrt(squares)
            momentum = 0.9 * momentum + scaled
            if rate is None:
                rate = first / np.linalg.norm(scaled, norm)
            pace = rate * 0.01 ** (max(step - since, 0) / max(steps - since, 1))
            delta = np.clip(clean + delta - pace * momentum, 0, 1) - clean
        costs.append(float(found.cost[i]) if found.success[i] else np.inf)
        exact.append(best)
    # In l1 a coordinate at 0 goes either way by rounding.
    np.testing.assert_allclose(costs, exact, rtol=2e-2)
    known = np.isfinite(exact)
    assert known.sum() > 6
    assert np.median(np.abs(np.array(costs)[known] / np.array(exact)[known] - 1)) < 1e-4


@pytest.mark.parametrize("norm", [2, np.inf])
def test_deepfool_step_by_step(norm):
    torch, model, peer, x, y = network()
    found = wdjax.search(attacks.DeepFool(Lp(norm), overshoot=0.05), model, x, y)
    order, turns = {2: 2, np.inf: 1}[norm], []
    for i, (clean, label) in enumerate(zip(x.astype(float), y)):
        path = [clean]
        while peer(torch.tensor(path[-1])).argmax() == label and len(path) <= 50:
            moves = []
            for rival in set(range(4)) - {int(label)}:
                point = torch.tensor(path[-1], requires_grad=True)
                out = peer(point)
                (out[rival] - out[label]).backward()
                gap = (out[label] - out[rival]).item() + 1e-4
                steep = point.grad.norm(order).item()
                way = point.grad / steep if norm == 2 else point.grad.sign()
                moves.append((gap / steep, gap / steep * way.numpy()))
            path.append(np.clip(path[-1] + 1.05 * min(moves, key=lambda move: move[0])[1], 0, 1))
        flipped = bool(peer(torch.tensor(path[-1])).argmax() != label)
        assert bool(found.success[i]) == flipped
        if flipped:
            turns.append(len(path) - 1)
            length = np.linalg.norm(path[-1] - clean, norm)
            np.testing.assert_allclose(found.cost[i], length, rtol=1e-3)
    assert max(turns) > 1, "one step each tells nothing of how steps add up"
