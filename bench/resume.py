"""Kills AutoAttack at random moments and lets it go on, until it ends.

    python bench/resume.py [KILLS]

The moments are spread over the whole attack. What it ends with must be what it finds undisturbed,
to the bit.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from wdjax import data, ensembles, models


def attack(folder):
    """What is killed: it saves after every round, and what it found in the end."""
    model = models.mlp((64, 32, 10), key=jax.random.key(0))
    x = data.digits().test.x[:40]
    y = np.argmax(model(x), axis=-1)
    print("begins", flush=True)
    found = ensembles.autoattack(
        model, x, y, eps=0.03, key=jax.random.key(1), checkpoint=folder / "state", every=0.0
    )
    np.savez(folder / "found.npz", *jax.tree.leaves(found))


def begun(folder, cache):
    """A process that attacks, after its imports."""
    child = subprocess.Popen(
        [sys.executable, __file__, "attack", str(folder)],
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
    )
    child.stdout.readline()
    return child


def undisturbed(folder, cache):
    """Seconds that the attack takes."""
    folder.mkdir()
    began = time.monotonic()
    if begun(folder, cache).wait():
        raise RuntimeError("the attack failed")
    return time.monotonic() - began


def main(kills):
    dice = random.Random(2)
    with tempfile.TemporaryDirectory() as name:
        cache, whole, cut = (Path(name) / part for part in ("cache", "whole", "cut"))
        undisturbed(Path(name) / "first", cache)
        spent = undisturbed(whole, cache)  # With its programs in the cache.
        cut.mkdir()
        for kill in range(kills):
            child = begun(cut, cache)
            time.sleep(dice.uniform(0, 2 * spent / kills))
            child.kill()
            members = (path.name.split(".")[0] for path in (cut / "state").glob("*"))
            reached = max(members, default="nothing")
            ended = " (it had ended)" if child.wait() == 0 else ""
            print(f"kill {kill + 1}: {reached}{ended}", flush=True)
        if begun(cut, cache).wait():
            raise RuntimeError("the attack failed after it was killed")
        ours, theirs = np.load(cut / "found.npz"), np.load(whole / "found.npz")
        for leaf in theirs.files:
            np.testing.assert_array_equal(ours[leaf], theirs[leaf])
        print(f"AutoAttack, {spent:.0f} s, after {kills} kills: the same to the bit")


if __name__ == "__main__":
    if sys.argv[1:2] == ["attack"]:
        attack(Path(sys.argv[2]))
    else:
        main(*map(int, sys.argv[1:] or ["10"]))
