"""The table of defences that adapt, and its bars.

    python bench/transductive.py [table] [memory] [compilations] [--seeds 0,1] [--json FILE]

`table`: `python -m wdjax game` for all defences, and every bar beside its number; with a FILE that
is there, its games are taken from it. `memory`: the set gradient with 2 to 20 models, and its time.
`compilations`: of a game of ten rounds. Times are those of the process, on one thread.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, models, transductive
from wdjax.attacks import PGD
from wdjax.cli import main as wdjax_main
from wdjax.transductive.attacker import compiled_move

ADAPTIVE = ("fpa", "gmsa-avg", "gmsa-min", "pgd-skip")
MODELS = (2, 5, 10, 20)


def said(what, met):
    print(f"{what}: {'met' if met else 'MISSED'}", flush=True)


def table(seeds, file):
    """Plays what is not in the file, then judges."""
    if file is None or not file.exists():
        began, busy = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            file = file or Path(folder) / "table.json"
            if wdjax_main(["game", "--seeds", seeds, "--json", str(file)]):
                raise SystemExit("the command failed")
            content = json.loads(file.read_text())
        minutes = (time.perf_counter() - began) / 60
        spent = (time.process_time() - busy) / 60
        what = f"the table took {spent:.1f} CPU minutes on one thread, {minutes:.1f} by the clock"
        said(f"{what} (bar 15)", spent < 15)
    else:
        content = json.loads(file.read_text())
    for entry in content["results"]:
        rows = {name: own["one_shot"]["value"] * 100 for name, own in entry["attacks"].items()}
        JUDGES[entry["defense"]](f"{entry['defense']} seed {entry['seed']}", entry, rows)


def dann(name, entry, rows):
    least = min(rows["transfer"], rows["fpa"])
    what = f"{name}: GMSA-AVG {rows['gmsa-avg']:.1f} <= min(transfer, FPA) {least:.1f} - 15"
    said(what, rows["gmsa-avg"] <= least - 15)


def rmc(gap):
    def judge(name, entry, rows):
        least = min(rows[attack] for attack in ADAPTIVE)
        what = f"{name}: best adaptive {least:.1f} <= transfer {rows['transfer']:.1f} - {gap}"
        said(what, least <= rows["transfer"] - gap)

    return judge


def first_falls(name, rows):
    what = f"{name}: first falls {rows['transfer-first-fall']:.1f} >= {rows['transfer']:.1f} + 10"
    said(what, rows["transfer-first-fall"] >= rows["transfer"] + 10)


def dent(name, entry, rows):
    static = entry["attacks"]["transfer"]["static_accuracy"]["value"] * 100
    gap = rows["transfer"] - static
    said(f"{name}: natural {rows['transfer']:.1f} within 3 of static {static:.1f}", abs(gap) <= 3)
    what = f"{name}: sorted {rows['transfer-sorted']:.1f} <= static {static:.1f} - 3"
    said(what, rows["transfer-sorted"] <= static - 3)
    print(f"{name}: first falls {rows['transfer-first-fall']:.1f}, no bar", flush=True)


def tadv(name, entry, rows):
    static = entry["attacks"]["transfer"]["static_accuracy"]["value"] * 100
    private = {row: value for row, value in rows.items() if row != "seed-leaked"}
    least = min(private.values())
    said(f"{name}: every attack {least:.1f} >= static PGD {static:.1f}", least >= static)
    what = f"{name}: GMSA-AVG {rows['gmsa-avg']:.1f} <= transfer {rows['transfer']:.1f} + 1"
    said(what, rows["gmsa-avg"] <= rows["transfer"] + 1)
    said(f"{name}: leaked {rows['seed-leaked']:.1f} < private", rows["seed-leaked"] < least)
    first_falls(name, rows)


def urejectron(name, entry, rows):
    errs = {row: own["rejection"]["0.05"] for row, own in entry["attacks"].items()}
    plain, joint = (100 * errs[row]["err"] for row in ("transfer", "joint"))
    said(f"{name}: plain PGD errs {plain:.1f} % (bar < 2)", plain < 2)
    what = (
        f"{name}: joint {joint:.1f} % at {100 * errs['joint']['rejected']:.1f} % refused (bar 10)"
    )
    said(what, joint >= 10 and errs["joint"]["rejected"] <= 0.05)


JUDGES = {
    "rmc-standard": rmc(40),
    "rmc-adversarial": rmc(15),
    "dann": dann,
    "dent": dent,
    "tadv": tadv,
    "urejectron": urejectron,
    "purify": lambda *_: None,
}


def memory(*_):
    """Of the gradient of a set of 128 inputs, in a bank as large as it is full."""
    net = models.mlp((784, 128, 128, 10), key=jax.random.key(0))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0, 1, (128, 784)), jnp.float32)
    y, needs = jnp.zeros(128, jnp.int32), {}
    for reduce in ("mean", "min"):
        objective = transductive.Objective(losses.cross_entropy, reduce)

        @jax.jit
        def pull(bank, x, objective=objective):
            victim = transductive.victim(transductive.Fixed(net), (), bank)
            return jax.grad(lambda x: objective(victim(x), y).sum())(x)

        for count in MODELS:
            bank = transductive.empty_bank(net, count)
            for number in range(count):
                bank = transductive.add_model(bank, models.mlp((784, 128, 128, 10),
                                                          key=jax.random.key(number)))  # fmt: skip
            temporary = pull.lower(bank, x).compile().memory_analysis().temp_size_in_bytes
            pull(bank, x).block_until_ready()
            began = time.process_time()
            for _ in range(20):
                pull(bank, x).block_until_ready()
            spent = (time.process_time() - began) / 20
            needs[reduce, count] = temporary
            outputs = count * 128 * 10 * 4
            print(
                f"{reduce} of {count} models: {temporary / 1e6:.2f} MB temporary, of which what "
                f"they say is {outputs / 1e6:.2f} MB a copy; {1e3 * spent:.1f} ms", flush=True,
            )  # fmt: skip
        growth = needs[reduce, 20] - needs[reduce, 2]
        hidden = 18 * 128 * 256 * 4  # What reverse mode through all at once would keep.
        what = (
            f"{reduce}: {growth / 1e6:.2f} MB more for 18 more models, of which activations would"
        )
        said(f"{what} be {hidden / 1e6:.2f} MB a copy", growth < hidden / 2)


def compilations(*_):
    """A game of ten rounds compiles in its first, and attacks are one program for all banks."""
    net = models.mlp((16, 32, 4), key=jax.random.key(0))
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (40, 16)).astype(np.float32)
    y = np.asarray(net(x)).argmax(1)
    rounds = []

    def count(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            rounds[-1] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    before = compiled_move.programs()
    attack = transductive.gmsa_avg(PGD(steps=10), 10)

    def look(state):
        if int(state.iteration) == 0:
            rounds.append(0)

    rounds.append(0)
    transductive.play(
        transductive.Purify(net), attack, x, y, memory=(), eps=0.1, key=jax.random.key(0), size=4,
        callback=look,
    )  # fmt: skip
    programs = compiled_move.programs() - before
    print(f"compilations in each round, and after: {rounds}")
    said(f"{programs} program of the attack for ten rounds of ten iterations", programs == 1)
    said("nothing is compiled after the first round", sum(rounds[1:-1]) == 0)


if __name__ == "__main__":
    parts = {"table": table, "memory": memory, "compilations": compilations}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    unknown = set(parsed.parts) - set(parts)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose among {', '.join(parts)}")
    for part in parsed.parts or parts:
        parts[part](parsed.seeds, parsed.json)
