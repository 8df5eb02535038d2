"""What tests measure on one device, on eight, and in two processes of four; and such a process.

``python many_devices.py RANK PORT FOLDER [SIGNAL]`` is one of two processes. The second sends
itself the signal after a round of a search whose state is kept.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import wdjax
from wdjax import (
    Lp,
    Model,
    attacks,
    certify,
    ensembles,
    image,
    nppr,
    parallel,
    smoothing,
    training,
    transductive,
)
from wdjax.files import persist
from wdjax.nppr import distributions
from wdjax.smoothing import noise

if __name__ == "__main__":  # Before any array is made.
    RANK, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", 2, RANK, heartbeat_timeout_seconds=20)

KEY = jax.random.key(0)


def apply(params, x):
    return jax.nn.relu(x.reshape(len(x), -1) @ params[0]) @ params[1]


MODEL = Model(apply, [jax.random.normal(jax.random.key(i), (6, 6))[:, : 6 - 3 * i] for i in (0, 1)])
X = np.asarray(jax.random.uniform(jax.random.key(2), (11, 6)))
Y = np.asarray(jnp.argmax(MODEL(X), -1))
DEFENSE = transductive.Fixed(MODEL)
LONG = attacks.WPGD(steps=5)


def measured(x, y, mesh):
    """By name what each method says of samples ``[11, 6]``: trees of NumPy arrays."""
    how = {"eps": 0.3, "key": KEY, "mesh": mesh}
    pgd = attacks.PGD(Lp(2), steps=3, random_start=True)
    blur, balls = noise.Gaussian(0.25), distributions.UniformBall(0.6)
    votes = {"noise": blur, "n0": 10, "n": 100, "batch_size": 64}
    family = nppr.Family(mode="label", components=2, upsample="none")
    schedule = nppr.Schedule(steps=3, batch=8, draws=8)
    once = {"epochs": 1, "batch_size": 8, "attack": pgd, "optimizer": optax.sgd(0.1)}
    moved = image.FrankWolfe(image.ImageWasserstein(window=3), steps=2)
    game = transductive.gmsa_avg(pgd, iterations=2)
    played = {"memory": (), "size": 8, "draws": 1, **how}
    found = {
        "search": wdjax.search(pgd, MODEL, x, y, batch_size=8, only=np.arange(11) != 4, **how),
        "wpgd": wdjax.run(attacks.WPGD(steps=3), MODEL, x, y, eps=0.1, mesh=mesh, history=True),
        "fast": ensembles.fast(MODEL, x, y, passes=30, **how),
        "images": wdjax.search(moved, MODEL, x.reshape(-1, 2, 3, 1), y, eps=0.1, mesh=mesh),
        "crown": certify.margin_bounds(MODEL, x, y, norm=2, eps=0.1, batch_size=8, mesh=mesh),
        "bab": certify.certified(MODEL, x, y, norm=2, eps=0.1, method="bab", mesh=mesh),
        "smoothing": smoothing.certify(MODEL, x, y, key=KEY, mesh=mesh, **votes),
        "estimate": nppr.estimate(MODEL, balls, x, y, key=KEY, draws=40, mesh=mesh).survived,
        "fit": nppr.fit(MODEL, x, y, family=family, schedule=schedule, **how).history,
        "train": training.train(MODEL, x, y, **once, **how),
        "game": vars(transductive.play(DEFENSE, game, x[:8], y[:8], **played)),
    }
    return {name: jax.tree.map(np.asarray, tree) for name, tree in found.items()}


def kept(x, y, mesh, rank, path, fatal=None):
    """A search of which one process ends after a round; process 0 writes, and both resume."""
    if rank:
        persist.save = None
    how = {"eps": 0.1, "mesh": mesh, "checkpoint": path, "every": 0.0}
    told = []

    def leave(seen):
        if rank and fatal:
            os.kill(os.getpid(), signal.Signals[fatal])
        return rank

    wdjax.search(LONG, MODEL, x, y, callback=leave, **how)
    found = wdjax.search(LONG, MODEL, x, y, callback=told.append, **how)
    assert len(told) == 3  # Of six rounds: each of the signals and the callback came after one.
    with pytest.raises(ValueError, match="one file"):
        wdjax.search(LONG, MODEL, x, y, **how | {"checkpoint": path.parent})
    with pytest.raises(ValueError, match="given different arguments"):
        wdjax.search(LONG, MODEL, x, y, **how | {"eps": 0.1 + rank})
    game = transductive.gmsa_avg(attacks.PGD(steps=3), iterations=1)
    rules, others = {"memory": (), "size": 8, "key": KEY}, np.roll(y[:8], rank)
    with pytest.raises(ValueError, match="given different arguments"):
        transductive.play(DEFENSE, game, x[:8], others, eps=0.1, mesh=mesh, **rules)
    return jax.tree.map(np.asarray, found)


def main(rank, folder, *fatal):
    """Reads samples of its own, and writes what it measured of those of both."""
    x, y = parallel.joined((X[5 * rank : 5 + 6 * rank], Y[5 * rank : 5 + 6 * rank]))
    mesh = parallel.data_mesh()
    assert (mesh.size, jax.local_device_count()) == (8, 4)
    state = kept(x, y, mesh, rank, folder / "state.safetensors", *fatal)
    found = measured(x, y, mesh) | {"kept": state}
    odd = parallel.each(lambda device: lambda item: np.arange(item), 3, mesh)
    assert [len(one) for one in odd] == [0, 1, 2]
    np.savez(folder / f"{rank}.npz", *jax.tree.leaves(found))


if __name__ == "__main__":
    main(RANK, FOLDER, *sys.argv[4:])
