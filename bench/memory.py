"""Memory of a long search: random search of many steps on many samples, peak resident size.

    python bench/memory.py [--samples 10000] [--steps 5000] [--batch-size 2048]

Totals are kept for every sample, histories are not, so the peak does not depend on the steps.
"""

import argparse
import dataclasses
import resource
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import Lp, models
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.core import Stage


class State(NamedTuple):
    x: jax.Array
    value: jax.Array
    key: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomSearch:
    """Tries a random corner of the ball in a random quarter of the pixels; keeps what is better."""

    budget, random = "sample", True
    ball: Lp = setting(Lp())
    steps: int = setting(5000)

    @property
    def stages(self):
        return (Stage(self.attempt, self.steps),)

    def init(self, victim, samples, start, keys):
        return State(samples.x, victim.criterion(samples.out, samples.y), keys)

    def attempt(self, victim, samples, state):
        def corner(key, x, eps):
            where, sign = jax.random.split(key)
            some = jax.random.bernoulli(where, 0.25, x.shape)
            return jnp.where(some, eps * jax.random.rademacher(sign, x.shape, x.dtype), jnp.nan)

        keys = jax.vmap(jax.random.split)(state.key)
        drawn = jax.vmap(corner)(keys[:, 0], samples.x, samples.eps)
        tried = jnp.where(jnp.isnan(drawn), state.x, self.ball.clip(samples.x + drawn))
        info = ascent.judge(victim, tried, samples.y)[1]
        better = info.value > state.value
        x = jnp.where(better.reshape(-1, 1, 1, 1), tried, state.x)
        return State(x, jnp.where(better, info.value, state.value), keys[:, 1]), info

    def point(self, samples, state):
        return self.ball.project(state.x, samples.x, samples.radius), None

    def finished(self, state):
        return state.value > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(given.samples, 8, 8, 1)).astype(np.float32)
    model = models.mlp((64, 16, 10), key=jax.random.key(0))
    y = np.argmax(model(x), axis=-1)
    began = time.perf_counter()
    attack = RandomSearch(steps=given.steps)
    result = wdjax.run(
        attack, model, x, y, eps=0.02, key=jax.random.key(1), batch_size=given.batch_size
    )
    accuracy = float(result.accuracy)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = time.perf_counter() - began
    print(
        f"{given.samples} samples, {given.steps} steps: accuracy {accuracy:.4f}, "
        f"{int(result.forwards.sum())} forward passes, {seconds:.0f} s, peak {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
