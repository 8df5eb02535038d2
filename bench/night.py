"""A night's run on one machine: every sample of a file attacked in parts, killed on the way.

    python bench/night.py JOBS.toml [--kills 2] [--jobs 2] [--first 500] [--out night]

The file of jobs is done by one command, ``python -m wdjax run``. All of its processes are killed at
random moments and the same command is begun again; what it needed in all, the most memory that its
processes held together (pages that they share count for each), and its accuracies are printed. Then
the first samples are attacked alone, by the same jobs, to compare with.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def resident(session):
    """Bytes in memory of all processes of a session."""
    said = subprocess.run(["ps", "-o", "rss=", "-s", str(session)], capture_output=True, text=True)
    return 1024 * sum(map(int, said.stdout.split()))


def once(words, log, until):
    """Runs a command for at most so many seconds, then kills it with its processes.

    Returns its exit code, None if it was killed, its seconds and the most bytes that it held.
    """
    began, most = time.monotonic(), 0
    child = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        while child.poll() is None:
            most = max(most, resident(child.pid))
            if time.monotonic() - began > until:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return None, time.monotonic() - began, most
            time.sleep(0.5)
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return child.returncode, time.monotonic() - began, most


def night(jobs, out, parsed, moments):
    """Does the jobs, killed after each of the moments; returns the content of the JSON."""
    words = [sys.executable, "-m", "wdjax", "run", jobs, "--out", out, "--json", out / "night.json"]
    out.mkdir(parents=True, exist_ok=True)
    spent, held = [], []
    with (out / "night.log").open("a") as log:
        for until in (*moments, float("inf")):
            code, seconds, most = once([*words, "--jobs", str(parsed.jobs)], log, until)
            spent.append(seconds)
            held.append(most)
            parts = len([*out.rglob("*-of-*.safetensors")])
            ended = "killed" if code is None else f"exit {code}"
            print(f"{ended} after {seconds:.0f} s: {parts} parts are there; "
                  f"at most {most / 1e9:.2f} GB", flush=True)  # fmt: skip
            if code is not None:
                break
    if code != 0:
        raise SystemExit(f"the run failed; {out / 'night.log'} says why")
    print(f"in all {sum(spent):.0f} s, at most {max(held) / 1e9:.2f} GB", flush=True)
    return json.loads((out / "night.json").read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--earliest", type=float, default=60, help="seconds before a kill")
    parser.add_argument("--latest", type=float, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("night"))
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    dice = random.Random(parsed.seed)
    moments = [dice.uniform(parsed.earliest, parsed.latest) for _ in range(parsed.kills)]
    whole = night(parsed.file, parsed.out, parsed, moments)
    few = parsed.out / "first.toml"
    text = re.sub(r"(?m)^samples *=.*\n", "", parsed.file.read_text())
    few.write_text(re.sub(r"(?m)^data *=", f"samples = {parsed.first}\ndata =", text))
    alone = night(few, parsed.out / "first", parsed, ())
    for row, other in zip(whole["jobs"], alone["jobs"], strict=True):
        print(" ".join(row["job"]))
        pairs = {"clean": (row["clean_accuracy"], other["clean_accuracy"])}
        pairs |= {name: (share, other["shares"][name]) for name, share in row["shares"].items()}
        for name, (share, first) in pairs.items():
            print(f"  {name}: {share:.4f} of {row['n']}, {first:.4f} of the first {other['n']}")


if __name__ == "__main__":
    main()
