"""Kills a process that saves without pause, at random moments, and looks at what it left.

    python bench/kills.py [MOMENTS] [AUDITS]

The process converts a checkpoint to a safetensors file and to an Orbax folder, and trains with a
checkpoint, over and over, each in place of the last. After every SIGKILL all three must be whole if
they were saved once, and the training no older than what had been reported. Then the audit is made
anew in the folder of an old one, and killed, every other time while it writes: every file must be
whole.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import convert, models, persist, training

SIZES = (64, 512, 512, 10)
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); import kills; kills.work(sys.argv[2])"


def source():
    """The model that is converted, and its tensors under PyTorch's names."""
    rng, module = np.random.default_rng(0), models.MLP(SIZES)
    tensors = {
        name: rng.normal(size=slot.shape).astype(np.float32)
        for name, slot in convert.slots(module).items()
    }
    architecture = {"family": "mlp", "options": {"sizes": SIZES}, "normalize": ""}
    return convert.from_state_dict(module, tensors, architecture=architecture)


def start():
    """The training's first state, which its checkpoint must resemble."""
    model = models.mlp((4, 300, 2), key=jax.random.key(0))
    return training.start(model, optax.sgd(0.0), 100_000)


def work(folder):
    """What is killed: saves everything in turn, and says what is safe."""
    folder, made = Path(folder), source()
    x, y = jnp.linspace(0, 1, 32).reshape(8, 4), jnp.arange(8) % 2

    def between(state):
        say(f"train {int(state.epoch)}")
        for name in ("model.safetensors", "model"):
            persist.save_model(folder / name, made.model, made.report.architecture)
            say(name)

    training.train(
        start().model, x, y, key=jax.random.key(0), epochs=100_000, batch_size=8,
        optimizer=optax.sgd(0.0), checkpoint=folder / "train", callback=between,
    )  # fmt: skip


def say(text):
    print(text, flush=True)


def one(folder, wait):
    """Starts, waits for the first full turn and then a while, kills; what had been reported."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(folder)]
    with (folder / "log").open("w+") as log:
        child = subprocess.Popen(command, stdout=log, env=os.environ)
        began = time.monotonic()
        while not (folder / "log").read_text().endswith("model\n"):
            if child.poll() is not None or time.monotonic() - began > 300:
                raise RuntimeError("the process saves nothing")
            time.sleep(0.005)
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.wait()
    return (folder / "log").read_text().split("\n")[:-1]


def check(folder, said, expected):
    """All that was saved once is there and whole; raises otherwise."""
    for name in ("model.safetensors", "model"):
        restored = persist.load_model(folder / name)
        for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    mark = np.zeros(32, np.uint8)
    _, state = persist.restore(folder / "train", (mark, start()))
    epochs = [int(line.split()[1]) for line in said if line.startswith("train")]
    if int(state.epoch) < max(epochs):
        raise AssertionError(f"epoch {int(state.epoch)} after {max(epochs)} was reported")
    return int(state.epoch)


AUDIT = [sys.executable, "-m", "wdjax", "audit", "--quiet", "--samples", "20", "--out"]
ENDS = {".png": b"IEND\xaeB`\x82", ".html": b"</html>", ".json": b"}"}


def kill_audit(folder, wait, writes):
    """Kills an audit after a while: since its start, or since it replaced its first file."""
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    child = subprocess.Popen([*AUDIT, folder], stdout=subprocess.DEVNULL)
    while writes and child.poll() is None:
        if any(path.stat().st_mtime_ns != when for path, when in before.items()):
            break
        time.sleep(0.001)
    time.sleep(wait)
    child.send_signal(signal.SIGKILL)
    child.wait()
    replaced = sum(path.stat().st_mtime_ns != when for path, when in before.items())
    for path in before:
        if not path.read_bytes().rstrip().endswith(ENDS[path.suffix]):
            raise AssertionError(f"{path} is not whole")
    json.loads((folder / "report.json").read_text())
    for path in set(folder.iterdir()) - set(before):
        if not path.name.startswith("."):
            raise AssertionError(f"{path} is no file of an audit")
        path.unlink()
    return replaced


def audits(moments):
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        subprocess.run([*AUDIT, folder], check=True, stdout=subprocess.DEVNULL)
        spent = time.monotonic() - began
        for moment in range(moments):
            writes = moment % 2 == 0
            replaced = kill_audit(folder, dice.uniform(0, 0.02 if writes else spent), writes)
            say(f"audit {moment + 1}: whole; {replaced} of {len(list(folder.iterdir()))} replaced")


def main(moments):
    expected, dice = source().model, random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for moment in range(moments):
            said = one(folder, dice.uniform(0, 0.6))
            epoch = check(folder, said, expected)
            left = sorted(path.name for path in folder.iterdir())
            say(f"{moment + 1}: whole; epoch {epoch}; there: {', '.join(left)}")


if __name__ == "__main__":
    given = [*map(int, sys.argv[1:])]
    for part, count in zip((main, audits), [*given, *(50, 10)[len(given) :]]):
        if count:
            part(count)
