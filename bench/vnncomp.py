"""Properties of VNN-COMP 2021 beside their known verdicts and the published times.

    python bench/vnncomp.py [--sets acasxu mnistfc ...] [--tools 2] [--json FILE]

Runs `python -m wdjax verify --instances` on the properties of `../shared/data/vnn`, each within the
competition's time limit, and prints a row for each net family and known verdict (`unsat`: the
property holds): how many there are, how many were decided, the median and the longest seconds of
these, and the median seconds of VeriNet (on CPUs) and alpha-beta-CROWN (on a GPU), with the number
that they decided. Our seconds include compilation, but one process runs them all; theirs include
the start of the program. Every property that was not decided is named below its row, and with
`WRONG` where the verdict contradicts the known one.

`--tools N` leaves out what fewer than N of the competition's tools decided. With `--json` the
verdicts are written to a file; if it exists already, they are read from it instead.
"""

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared"
SURE = {"sat", "unsat"}


def instances(folder, sets, tools):
    """The rows of the competition's list that so many tools decided, with paths."""
    with (folder / "instances.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["benchmark"] in sets]
    for row in rows:
        for name in ("onnx", "vnnlib"):
            row[name] = str(folder / row["benchmark"] / row[name])
    return [row for row in rows if int(row["tools_that_decided"]) >= tools]


def verified(rows, into):
    """Runs the command on the rows, which takes up to an hour, and writes its JSON."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as listed:
        given = [(row["onnx"], row["vnnlib"], row["timeout_s"]) for row in rows]
        csv.writer(listed).writerows(given)
        listed.flush()
        command = "-m", "wdjax", "verify", "--instances", listed.name, "--json", into
        subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)


def family(row):
    """Properties of ACAS Xu are one family, those of other sets one for each net."""
    return row["benchmark"] if row["benchmark"] == "acasxu" else Path(row["onnx"]).stem


def median(published):
    """Of the seconds in ``verdict:seconds``."""
    seconds = [float(one.split(":")[1]) for one in published if one.split(":")[0] in SURE]
    return f"{statistics.median(seconds):10.1f} ({len(seconds):2})" if seconds else " " * 15


def tabulate(rows):
    heads = "family", "known", "number", "decided", "median", "longest", "VeriNet", "a-b-CROWN"
    print(("{:<27}{:<8}" + "{:>8}" * 4 + "{:>15}" * 2).format(*heads))
    rows = sorted(rows, key=lambda row: (row["benchmark"], family(row), row["verdict"]))
    for (name, known), group in itertools.groupby(rows, lambda row: (family(row), row["verdict"])):
        group = list(group)
        done = [row["found"]["seconds"] for row in group if row["found"]["result"] in SURE]
        typical, most = (statistics.median(done), max(done)) if done else (float("nan"),) * 2
        line = f"{name:<27}{known:<8}{len(group):>8}{len(done):>8}{typical:>8.2f}{most:>8.1f}"
        tools = "verinet_cpu", "alpha_beta_crown_gpu"
        print(line, *(median([row[tool] for row in group]) for tool in tools), sep="")
        for row in group:
            result, seconds = (row["found"][key] for key in ("result", "seconds"))
            if result != known.rstrip("?"):
                word = "WRONG" if {result, known} == SURE else ""
                print(f"    {Path(row['vnnlib']).stem}: {result}, {seconds:.0f} s {word}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sets = "acasxu", "mnistfc", "oval21", "eran", "verivital"
    parser.add_argument("--sets", nargs="+", choices=sets, default=sets)
    parser.add_argument("--tools", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shared", type=Path, default=SHARED)
    given = parser.parse_args()
    rows = instances(given.shared / "data/vnn", given.sets, given.tools)
    with tempfile.TemporaryDirectory() as folder:
        into = given.json or Path(folder) / "found.json"
        if not into.exists():
            verified(rows, into)
        found = json.loads(into.read_text())["instances"]
    found = {(one["onnx"], one["vnnlib"]): one for one in found}
    rows = [row | {"found": found[row["onnx"], row["vnnlib"]]} for row in rows]
    tabulate(rows)
    sys.exit(any({row["found"]["result"], row["verdict"]} == SURE for row in rows))


if __name__ == "__main__":
    main()
