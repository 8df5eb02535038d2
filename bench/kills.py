"""Kills a process that saves without pause, at random moments, and looks at what it left.

    python bench/kills.py [MOMENTS] [AUDITS] [COMMANDS] [STARTS] [RUNS]

The process converts a checkpoint to a safetensors file and to an Orbax folder, and trains with a
checkpoint, over and over, each in place of the last. After every SIGKILL all three must be whole if
they were saved once, and the training no older than what had been reported. Then the audit is made
anew in the folder of an old one, and killed, every other time while it writes: every file must be
whole. Then every command with a checkpoint is ended by SIGKILL, SIGTERM or SIGINT again and again,
and begun anew until it ends by itself: its result must be absent or whole at any time, and in the
end equal to that of a command that nobody disturbed. Then commands are ended while they start.
Last, a run of 3 models in 4 parts each is killed with all of its processes: in the end every result
must equal that of an undisturbed run; and a part that is damaged must be named, and done again.
"""

import json
import os
import random
import shutil
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
import safetensors.numpy

from wdjax import convert, data, models, training
from wdjax.files import persist

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


SUBJECT = ["--arch", "mlp", "--weights", "{}/mlp.safetensors", "--data", "{}/digits.npz"]
LINF, L2 = ["--norm", "linf", "--eps", "0.05"], ["--norm", "l2", "--eps", "0.2"]
VOTES = ["--method", "smoothing", "--sigma", "0.2", "--votes", "9999"]
COMMANDS = {
    "attack": [*SUBJECT, *LINF, "--attacks", "wda,wda++,a3,wda-star"],
    "image-attack": [*SUBJECT, "--k", "1,3", "--window", "3", "--radii", "{}/radii.npz"],
    "certify": [*SUBJECT, *LINF, "--method", "alpha", "--batch-size", "8"],
    "certify by slopes": [*SUBJECT, *LINF, "--method", "lipschitz", "--batch-size", "8"],
    "certify by votes": [
        *SUBJECT,
        *L2,
        "--method",
        "smoothing",
        "--sigma",
        "0.2",
        "--votes",
        "9999",
    ],
    "nppr": [*SUBJECT, *LINF, "--steps", "200", "--draws", "200", "--mode", "label,independent"],
    "audit": ["--samples", "10"],
    "game": ["--defense", "urejectron", "--samples", "30", "--iterations", "2"],
}
ENDINGS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def given(folder):
    """A small net and digits, as files."""
    rng = np.random.default_rng(0)
    sizes = {"fc1": (32, 64), "fc2": (10, 32)}
    tensors = {f"{n}.weight": rng.normal(0, s[1] ** -0.5, s) for n, s in sizes.items()}
    tensors |= {f"{n}.bias": np.zeros(s[0]) for n, s in sizes.items()}
    tensors = {name: part.astype(np.float32) for name, part in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "mlp.safetensors")
    x = data.digits().test.x[:24]
    net = convert.load(folder / "mlp.safetensors", "mlp").model
    np.savez(folder / "digits.npz", x=x, y=np.argmax(net(x), axis=-1))


def begun(name, folder, *more):
    """A command that works in a folder."""
    out = ["--out", "{}"] if name == "audit" else ["--json", "{}/report.json"]
    words = [word.format(folder) for word in [*COMMANDS[name], *out]]
    command = [sys.executable, "-m", "wdjax", name.split()[0], *words, *more]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Children are not deaf.
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    return child


def result(folder):
    """The JSON without what clocks tell, and the radii; None where there is none yet."""
    if not (folder / "report.json").exists():
        return None
    radii = folder / "radii.npz"
    found = {k: v.tolist() for k, v in np.load(radii).items()} if radii.exists() else {}
    return timeless(json.loads((folder / "report.json").read_text())), found


def timeless(content):
    if isinstance(content, dict):
        kept = {k: v for k, v in content.items() if "seconds" not in k and k != "cost_multiple"}
        return {k: timeless(v) for k, v in kept.items()}
    return [timeless(part) for part in content] if isinstance(content, list) else content


def commands(moments):
    dice = random.Random(3)
    for name in COMMANDS:
        with tempfile.TemporaryDirectory() as place:
            whole, cut = Path(place) / "whole", Path(place) / "cut"
            for folder in (whole, cut):
                folder.mkdir()
                given(folder)
            for _ in range(2):  # With its programs in the cache, the second time.
                began = time.monotonic()
                if begun(name, whole).wait():
                    raise RuntimeError(f"{name} failed")
            spent, expected, code, ends = time.monotonic() - began, result(whole), None, []
            while code != 0:
                child = begun(name, cut, "--checkpoint", str(cut / "kept"), "--every", "0.2")
                if len(ends) < moments:
                    time.sleep(dice.uniform(0.1, 1) * spent)
                    ends.append(dice.choice(ENDINGS))
                    child.send_signal(ends[-1])
                said, code = child.communicate()[1], child.returncode
                if code not in (0, 130, 143, *(-number for number in ENDINGS)):
                    raise AssertionError(f"{name}: {code}, {said.decode()}")
                if b"Traceback" in said or result(cut) not in (None, expected):
                    raise AssertionError(f"{name}: {said.decode()}")
            if result(cut) != expected:
                raise AssertionError(f"{name} ended otherwise than undisturbed")
            say(f"{name}, {spent:.0f} s: equal after {len(ends)} endings")


def starts(moments):
    """Ends commands between their first import and their last, and looks at what they say."""
    dice, seen = random.Random(4), {}
    for moment in range(moments):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        child = subprocess.Popen(
            [sys.executable, "-m", "wdjax", "versions"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        signal.signal(signal.SIGINT, before)
        time.sleep(dice.uniform(0, 3))
        child.send_signal(ENDINGS[1 + moment % 2])
        said = child.communicate()[1].decode()
        # In its first hundredths of a second Python itself has no handlers, or its own.
        known = said in ("", "wdjax: interrupted\n", "wdjax: terminated\n")
        end = child.returncode, "a line at most" if known else said.splitlines()[-1]
        seen[end] = seen.get(end, 0) + 1
    for (code, words), count in seen.items():
        say(f"{count} starts ended with {code}: {words}")


JOBS = """
[data.digits]
data = "digits.npz"
[threats.Linf]
norm = "linf"
eps = 0.05
[methods.attacks]
command = "attack"
attacks = "pgd(steps=20, restarts=2, random_start=true), wda(steps=20)"
batch-size = 4
every = 0.2
"""


def run_given(folder, count, parts):
    """A file of jobs with so many models, each in so many parts."""
    given(folder)
    rng, text = np.random.default_rng(1), f"shards = {parts}\n{JOBS}"
    for number in range(count):
        tensors = dict(safetensors.numpy.load_file(folder / "mlp.safetensors"))
        tensors["fc1.weight"] = tensors["fc1.weight"] + rng.normal(0, 0.01, (32, 64)).astype("f4")
        safetensors.numpy.save_file(tensors, folder / f"{number}.safetensors")
        text += f'[models.mlp{number}]\narch = "mlp"\nweights = "{number}.safetensors"\n'
    (folder / "jobs.toml").write_text(text)


def kill_run(folder, dice, most, longest):
    """Kills a run and all that it began, at most so often, until it ends; how often, its words.

    No part may have been left damaged.
    """
    words = ["run", "jobs.toml", "--out", "out", "--json", "results.json", "--jobs", "2"]
    ends = 0
    while True:
        with (folder / "log").open("w+") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "wdjax", *words],
                cwd=folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                child.wait(dice.uniform(0, longest) if ends < most else None)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                ends += 1
        said = (folder / "log").read_text()
        if child.returncode not in (0, -signal.SIGKILL) or "Traceback" in said:
            raise AssertionError(said)
        if child.returncode == 0:
            return ends, said
        if "damaged" in said:
            raise AssertionError(f"a kill left a part damaged: {said}")
        say(f"kill {ends}: {len([*(folder / 'out').rglob('*.safetensors')])} files are there")


def run_results(folder):
    """The merged results, and the table's JSON, without what clocks tell."""
    files = [folder / "results.json", *sorted((folder / "out").rglob("result.json"))]
    return {str(path.relative_to(folder)): timeless(json.loads(path.read_text())) for path in files}


def spoil(folder, dice):
    """Changes a byte of a part, and lets the run go on: the part must be named and done again."""
    path = dice.choice(sorted((folder / "out").rglob("*.safetensors")))
    before = bytearray(path.read_bytes())
    before[dice.randrange(len(before))] ^= 1 << dice.randrange(8)
    path.write_bytes(before)
    _, said = kill_run(folder, dice, 0, 0)
    if f"{path.relative_to(folder)} is damaged" not in said or path.read_bytes() == before:
        raise AssertionError(f"{path} was damaged, and nobody said so: {said}")


def runs(moments):
    dice, ends = random.Random(5), 0
    with tempfile.TemporaryDirectory() as place:
        whole, cut = Path(place) / "whole", Path(place) / "cut"
        for folder in (whole, cut):
            folder.mkdir()
            run_given(folder, 3, 4)
        began = time.monotonic()
        kill_run(whole, dice, 0, 0)
        longest = max(10, (time.monotonic() - began) / 4)
        expected = run_results(whole)
        while ends < moments:
            shutil.rmtree(cut / "out", ignore_errors=True)
            more, _ = kill_run(cut, dice, moments - ends, longest)
            ends += more
            for state in ("killed", "spoilt"):
                if run_results(cut) != expected:
                    raise AssertionError(f"a {state} run ended otherwise than undisturbed")
                if state == "killed":
                    spoil(cut, dice)
            say(f"run: {len(expected)} results equal after {more} kills and a damaged part")


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
    counts = [*map(int, sys.argv[1:])]
    parts = (main, audits, commands, starts, runs)
    parts = zip(parts, [*counts, *(50, 10, 5, 40, 30)[len(counts) :]])
    for part, count in parts:
        if count:
            part(count)
