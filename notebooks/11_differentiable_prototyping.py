# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ideas that follow a gradient
#
# Certified radii, the expected loss under noise and the spending of a budget are functions that JAX
# differentiates. So a new defence may train on the certificate itself, and a new attack may learn
# its own step sizes: both are written here from scratch, and measured by what did not train them.

# %%
import dataclasses
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import wdjax
from wdjax import attacks, certify, data, losses, models, norms, nppr, testing, training, transport
from wdjax.nppr import distributions

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: shorter training, fewer samples.
print(jax.devices()[0], "with JAX", jax.__version__)

train, test = data.digits()
net = models.mlp((64, 16, 10), key=jax.random.key(0))
model = training.train(
    net,
    *train,
    key=jax.random.key(1),
    epochs=10 if FAST else 30,
    attack=attacks.PGD(steps=3, iterate="last"),
    eps=0.05,
).model
x, y = map(jnp.asarray, test.take(32))

# %% [markdown]
# ## Three gradients
#
# The certified radius by the model; the expected loss of NPPR under noise, too; and what a budget
# buys, by the budget: the knapsack is piecewise linear, and its slope is the price of one more
# flip. Each is compared with a difference quotient.

# %%
key = jax.random.key(2)
noise = distributions.ClippedGaussian(0.2)


def mean_radius(model, x, y):
    return jnp.mean(certify.radius(model, x, y, norm=np.inf, steps=8))


def noisy_loss(model):
    return nppr.expected_loss(model, noise, x, y, key=key, loss=losses.margin)


def bought(eps, far):
    """The share of all samples that a budget flips, in the ball of order 1."""
    return jnp.mean(transport.allocate(far, eps, 1))


def moved(t):
    """The model, its weights farther from 0 by ``t`` times their mean size."""
    return jax.tree.map(lambda w: w + t * jnp.sign(w) * jnp.abs(w).mean(), model)


far = certify.radius(model, x, y, norm=np.inf, steps=8)
questions = {
    "radius by the model": (lambda t: mean_radius(moved(t), x, y), 0.0, 1e-2),
    "NPPR's loss by the model": (lambda t: noisy_loss(moved(t)), 0.0, 1e-2),
    "bought by the budget": (lambda t: bought(t, far), 0.013, 1e-4),
}
slopes = {}
for name, (value, at, step) in questions.items():
    value = jax.jit(value)
    quotient = (value(at + step) - value(at - step)) / (2 * step)
    slopes[name] = float(jax.grad(value)(at)), float(quotient)
    print(f"{name:<25} gradient {slopes[name][0]:8.4f}, difference {slopes[name][1]:8.4f}")

# %% [markdown]
# ## A new attack
#
# PGD with momentum, whose steps shrink or grow from `first` to `last`. `GradientAttack` has ball,
# box, loss and the search; we write the step. The three numbers are leaves, so that they can be
# mapped, and changed without compilation. `check_attack` tries the contract that searches rely on.

# %%
steps = 5


def pace(first, last, taken):
    """The size of a step as a share of the radius: geometric from ``first`` to ``last``."""
    return first * (last / first) ** (taken / (steps - 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paced(attacks.GradientAttack):
    first: float | jax.Array = 0.5
    last: float | jax.Array = 0.5
    decay: float | jax.Array = 0.5

    def memory(self, samples):
        return jnp.zeros_like(samples.x), jnp.zeros(len(samples.x), samples.x.dtype)

    def step(self, samples, x, gradient, memory):
        momentum, taken = memory
        momentum = self.decay * momentum + norms.unit(gradient, 2)
        size = pace(self.first, self.last, taken) * samples.radius
        return self.ball.ascend(x, momentum, size), (momentum, taken + 1)


ball = wdjax.Lp(2)
paced = Paced(ball, steps=steps, loss=losses.margin)
clauses = ("protocol", "ball") if FAST else tuple(testing.CLAUSES)
testing.check_attack(paced, clauses=clauses)
print("holds:", ", ".join(clauses))

# %% [markdown]
# ## Bilevel: the attack learns its steps
#
# Inside, an attack climbs for five steps; outside, Adam climbs on the attack's numbers through
# these five steps. It learns on training digits. On test digits it is compared with the best of a
# grid of constant sizes, chosen with the same training digits, which is what people do by hand.

# %%
eps = 0.6
inner_x, inner_y = (jnp.asarray(part[: 64 if FAST else 256]) for part in train)
held_out = test.take(100 if FAST else 350)


def climbed(logs, model, x, y):
    """The mean margin after the attack's steps, unrolled, by the logarithms of its numbers."""
    numbers = jax.tree.map(jnp.exp, logs)
    point, momentum = x, jnp.zeros_like(x)
    for taken in range(steps):
        size = pace(numbers["first"], numbers["last"], taken)
        gradient = jax.grad(lambda p: losses.margin(model(p), y).sum())(point)
        momentum = numbers["decay"] * momentum + norms.unit(gradient, 2)
        point = ball.ascend(point, momentum, jnp.full(len(x), size * eps))
        point = ball.clip(ball.project(point, x, jnp.full(len(x), eps)))
    return jnp.mean(losses.margin(model(point), y))


outer = jax.jit(jax.value_and_grad(climbed))
constant = {
    f"{size:g}, decay {decay:g}": jax.tree.map(np.log, dict(first=size, last=size, decay=decay))
    for size in (0.1, 0.2, 0.3, 0.5, 0.8)
    for decay in (0.01, 0.5, 0.9)
}
grid = {name: float(outer(one, model, inner_x, inner_y)[0]) for name, one in constant.items()}
best = max(grid, key=grid.get)
logs = jax.tree.map(jnp.float32, constant[best])
adam = optax.adam(0.05)
state, course = adam.init(logs), []
for _ in range(20 if FAST else 150):
    value, slope = outer(logs, model, inner_x, inner_y)
    course.append(float(value))
    change, state = adam.update(jax.tree.map(jnp.negative, slope), state)
    logs = optax.apply_updates(logs, change)


def margin_after(logs):
    attack = dataclasses.replace(paced, **jax.tree.map(lambda log: float(np.exp(log)), logs))
    found = wdjax.run(attack, model, *held_out, eps=eps, skip_misclassified=False)
    return float(found.accuracy), float(losses.margin(model(found.x_adv), held_out.y).mean())


before, after = margin_after(constant[best]), margin_after(logs)
many = wdjax.run(
    attacks.PGD(ball, steps=100, loss=losses.margin), model, *held_out, eps=eps,
    skip_misclassified=False,
)  # fmt: skip
most = float(losses.margin(model(many.x_adv), held_out.y).mean())
print(f"constant {best}, the best of the grid: accuracy {before[0]:.3f}, margin {before[1]:.4f}")
learnt = ", ".join(f"{name} {np.exp(log):.2f}" for name, log in logs.items())
print(f"learnt {learnt}: accuracy {after[0]:.3f}, margin {after[1]:.4f}")
gained = (after[1] - before[1]) / (most - before[1])
print(f"100 steps of PGD reach {most:.4f}: learning closed {gained:.0%} of the gap")

# %% [markdown]
# ## A new defence
#
# What should not happen is that a small budget buys many flips. The radii bound what flips cost, so
# the knapsack over the radii is the certified error in `Omega_1`, the ball that moves samples by
# `eps` on average. It is minimised as it stands: through the knapsack, through the radii, into the
# weights. The control trains on for as long, on the loss alone.

# %%
budget = 0.02
descend = optax.adam(0.003)


def defended(weight):
    """The model after more training, on the loss and ``weight`` times the certified error."""

    @jax.jit
    def step(carry, rows):
        model, state = carry

        def aim(model):
            some_x, some_y = all_x[rows], all_y[rows]
            loss = jnp.mean(losses.cross_entropy(model(some_x), some_y))
            radii = certify.radius(model, some_x, some_y, norm=np.inf, steps=6)
            return loss + weight * bought(budget, radii)

        change, state = descend.update(jax.grad(aim)(model), state)
        return (optax.apply_updates(model, change), state), None

    drawn = jax.random.randint(jax.random.key(3), (20 if FAST else 300, 64), 0, len(train.x))
    carry = model, descend.init(model)
    for rows in drawn:
        carry, _ = step(carry, rows)
    return carry[0]


all_x, all_y = map(jnp.asarray, train)
budgets, curves, pgd = np.linspace(0, 0.06, 13), {}, attacks.PGD(steps=20)
held = test.take(64 if FAST else 350)
for name, weight in {"loss alone": 0.0, "loss and certified error": 3.0}.items():
    trained = defended(weight)
    radii = certify.radius(trained, *held, norm=np.inf)
    left = float(wdjax.run(pgd, trained, *held, eps=0.05).accuracy)
    curves[name] = certify.certified_accuracy(radii, budgets, 1)
    proved = np.interp(budget, budgets, curves[name])
    print(f"{name}: clean {curves[name][0]:.3f}, certified in Omega_1 {proved:.3f}, PGD {left:.3f}")

# %%
figure, (one, two) = plt.subplots(1, 2, figsize=(9, 3.5))
one.plot(course)
one.axhline(grid[best], ls="--", color="k", label=f"constant {best}")
one.set(xlabel="step of the outer loop", ylabel="margin after the attack", title="a learnt attack")
one.legend()
for name, curve in curves.items():
    two.plot(budgets, curve, label=name)
two.set(xlabel="eps, on average", ylabel="certified accuracy", title="a defence by its certificate")
two.legend()
plt.show()
