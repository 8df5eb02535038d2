"""``python -m wdjax run``: models x data x threats x methods, in parts, and one table."""

import argparse
import collections
import datetime
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wdjax.cli import engines, job_file, options, printed, shards, subject
from wdjax.cli.console import Console
from wdjax.cli.job_file import Job
from wdjax.files import atomic
from wdjax.report import leaderboard, summary

_JOBS = options.Range(1, 1024, whole=True)
_RETRIES = options.Range(0, 100, whole=True)
_PAUSE = 0.05
"""Seconds between two looks at what runs."""

_EXAMPLES = """examples:
  python -m wdjax run jobs.toml --jobs 2
  python -m wdjax run jobs.toml --out night --json night.json --jobs 64 --cluster slurm

a file of jobs has tables of options, named as on the command line:
  shards = 4
  [models.wong]
  arch = "wong_mnist"
  weights = "mnist.pth"
  info = { link = "https://arxiv.org/abs/1711.00851", venue = "ICML 2018" }
  [data.mnist]
  data = "mnist.npz"
  samples = 1000
  [threats.Linf]
  norm = "linf"
  eps = "0.1"
  [methods.autoattack]
  command = "attack"
  attacks = "autoattack"
  [methods.crown]
  command = "certify"
  method = "crown"
  only = { threats = ["Linf"] }"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        parents=[common],
        help="attack and certify many models; one table",
        description="Does a command for every model, data, threat and method of a file: in parts, "
        "beside each other, and merged. Killed at any moment and begun again, it does what is "
        "left; a part that is damaged is named and done again.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="JOBS.toml", help="the jobs, as below")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--jobs",
        type=_JOBS,
        default=1,
        metavar="N",
        help="parts that are done beside each other (default %(default)s)",
    )
    how.add_argument(
        "--retries",
        type=_RETRIES,
        default=2,
        metavar="N",
        help="how often a part that fails is begun again (default %(default)s)",
    )
    how.add_argument(
        "--cluster",
        choices=engines.CLUSTERS,
        help="have them done by submitit (the extra [cluster]), with the settings of the file's "
        "table [cluster]; by default they are processes of this machine",
    )
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the folder of parts and results (default: the file's name without its suffix)",
    )
    out.add_argument(
        "--json",
        metavar="OUT",
        help="write the result to a file as JSON, or to stdout for -; if left, it is printed as a "
        "table",
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Does what is left of the jobs, and writes what they found."""
    out = Path(parsed.file.stem) if parsed.out is None else parsed.out
    jobs, settings = job_file.read(parsed.file, out)
    if parsed.json not in (None, "-"):
        atomic.check_writable(parsed.json)
    begin: engines.Engine = engines.Child
    if parsed.cluster is not None:
        begin = engines.cluster(parsed.cluster, out / "cluster", settings)
    with atomic.exclusive(out):
        faults = _JobQueue(jobs, begin, parsed, console).done()
    rows = [_row(job) for job in jobs if job.names not in faults]
    failed = [f"{' '.join(names)}: {text}" for names, text in faults.items()]
    times = {name: math.fsum(row[name] for row in rows) for name in ("seconds", "compile_seconds")}
    entries, several = _infos(jobs, rows)
    said = failed + several
    content = {**summary.head("run"), "data": parsed.file.name, "jobs": rows, "remarks": said}
    content |= times
    infos = {out / "model_info" / path: text for path, text in entries.items()}
    for path in infos:
        path.parent.mkdir(parents=True, exist_ok=True)
    infos[out / "report.html"] = leaderboard.leaderboard(content)
    subject.write(console, parsed.json, content, infos, lambda: table(content))
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(jobs)} jobs failed: {failed[0]}. The same command does what is "
            "left."
        )
    return 0


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["model", "data", "threat", "method", "n", "clean", "measure", "share", "of"]
    for row in content["jobs"]:
        of = row["shares_of"] or "all"
        for name, value in row["shares"].items():
            yield [*row["job"], row["n"], row["clean_accuracy"], name, value, of]


class _RunningPart(NamedTuple):
    """A part of a job that is done now, or for number 0 its merge."""

    job: Job
    number: int
    running: engines.Running
    began: float


class _JobQueue:
    """What is left of all jobs."""

    def __init__(
        self,
        jobs: Sequence[Job],
        begin: engines.Engine,
        parsed: argparse.Namespace,
        console: Console,
    ) -> None:
        self._begin, self._parsed, self._console = begin, parsed, console
        self._failed: dict[tuple[str, ...], str] = {}
        self._tries = collections.Counter[tuple[tuple[str, ...], int]]()
        self._busy: list[_RunningPart] = []
        self._todo: collections.deque[tuple[Job, int]] = collections.deque()
        self._left: dict[tuple[str, ...], set[int]] = {}
        """The parts of each job that are not there yet."""
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
            left = [number for number in range(1, job.parts + 1) if not self._has(job, number)]
            self._left[job.names] = {*left}
            # Parts that are there are merged anew: the merge compares them with model and samples,
            # which may be others by now, whatever the dates of their files.
            self._todo.extend((job, number) for number in left or [0])
        self._total = sum(job.parts for job in jobs)
        self._before = self._there()

    def done(self) -> dict[tuple[str, ...], str]:
        """Does everything; returns what is to be said of jobs that failed, by their names."""
        began = time.monotonic()
        try:
            while self._todo or self._busy:
                while self._todo and len(self._busy) < self._parsed.jobs:
                    job, number = self._todo.popleft()
                    words = job.said(number) + ["--no-cache"] * (not self._parsed.cache)
                    running = self._begin(words, _log(job, number))
                    self._busy.append(_RunningPart(job, number, running, time.monotonic()))
                time.sleep(_PAUSE)
                for part in [part for part in self._busy if part.running.done()]:
                    self._busy.remove(part)
                    self._end(part, began)
        finally:
            engines.stop(part.running for part in self._busy)
        return self._failed

    def _end(self, part: _RunningPart, began: float) -> None:
        """Notes how a part ended: it is merged after the last of its job, or begun again."""
        job, number, left = part.job, part.number, self._left[part.job.names]
        name = f"{' '.join(job.names)}, {f'part {number}/{job.parts}' if number else 'merge'}"
        fault = part.running.fault()
        if not fault and not (self._has(job, number) if number else _merged(job) is not None):
            fault = "it left no result"
        if fault:
            self._tries[job.names, number] += 1
            again = self._tries[job.names, number] <= self._parsed.retries
            said = f"{fault}: {_last(_log(job, number))}"
            self._console.warn(f"{name}: {said}{'; it is begun again' if again else ''}")
            if again:
                self._todo.append((job, number))
            else:
                self._failed[job.names] = f"{said} ({_log(job, number)})"
            return
        if number:
            left.discard(number)
            if not left:
                self._todo.appendleft((job, 0))
        now, there = time.monotonic(), self._there()
        seconds = (now - began) / max(1, there - self._before) * (self._total - there)
        self._console.say(
            f"{there}/{self._total} {name}: {_duration(now - part.began)}"
            + (f", about {_duration(seconds)} left" if seconds else "")
        )

    def _there(self) -> int:
        """The number of parts that are there."""
        return self._total - sum(map(len, self._left.values()))

    def _has(self, job: Job, number: int) -> bool:
        """Whether a part is there and whole; a damaged one is named and removed."""
        path = job.part(number)
        if not path.exists():
            return False
        shutil.rmtree(job.kept(number), ignore_errors=True)
        try:
            part = shards.ShardFile.read(path)
            part.content()
        except ValueError as error:
            self._console.warn(f"{path} is damaged, and is done again: {error}")
            path.unlink()
            return False
        said = part.facts["said"]
        if not job.made(said):
            raise ValueError(
                f"{path} is of other work, {' '.join(said)[:300]}: name another --out, or remove "
                f"{job.folder}."
            )
        return True


def _log(job: Job, number: int) -> Path:
    """The file of what a part, or the merge, prints."""
    return job.folder / (f"part-{number}.log" if number else "merge.log")


def _last(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else "it said nothing"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _merged(job: Job) -> dict[str, Any] | None:
    """The merged result; None if it is not there, or not whole."""
    try:
        found = json.loads(job.result.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("command") == job.words[0] else None


def _row(job: Job) -> dict[str, Any]:
    """What the JSON says of a job that was merged."""
    found = _merged(job)
    assert found is not None
    titles, *lines = job_file.COMMANDS[job.words[0]].table(found)
    attacks = found["attacks"] if job.words[0] == "attack" else {}
    column = next(column for column, title in enumerate(titles) if title in ("accuracy", "value"))
    return {
        "job": list(job.names),
        "command": job.words[0],
        "file": str(job.result),
        "n": found.get("measured_on", found["n"]),
        "clean_accuracy": found["clean_accuracy"],
        "shares": {line[0]: line[column] for line in lines if line[0] not in ("none", "clean")},
        "shares_of": found.get("shares_of"),
        "average": [n for n, own in attacks.items() if own.get("budget") == "average"],
        "norm": found.get("norm"),
        "eps": found.get("eps"),
        "remarks": [f"{name}: {text}" if name else text for name, text in printed.noted(found)],
        "seconds": found["seconds"],
        "compile_seconds": found["compile_seconds"],
    }


def _infos(
    jobs: Sequence[Job], rows: Sequence[dict[str, Any]]
) -> tuple[dict[Path, str], list[str]]:
    """RobustBench's ``model_info`` of every model, data and threat that AutoAttack attacked.

    Also says where several methods did with its defaults: the entry is of most samples.
    """
    known = {tuple(row["job"]): row for row in rows}
    measured: dict[Path, list[tuple[Job, dict[str, Any]]]] = {}
    for job in jobs:
        row = known.get(job.names, {"shares": {}})
        whole = job.words[0] == "attack" and job.parsed.kappa in (None, 1)
        if whole and "autoattack" in row["shares"]:
            model, data, threat, _ = job.names
            measured.setdefault(Path(data, threat, f"{model}.json"), []).append((job, row))
    found, said = dict[Path, str](), []
    for path, ran in measured.items():
        job, row = max(ran, key=lambda one: one[1]["n"])
        accuracies = row["clean_accuracy"], row["shares"]["autoattack"]
        values = job.names[1], job.eps, *(f"{100 * accuracy:.2f}" for accuracy in accuracies)
        info = {"name": job.names[0], **job.info, **dict(zip(job_file.MEASURED, values))}
        found[path] = json.dumps(info, indent=2) + "\n"
        if len(ran) > 1:
            methods = ", ".join(one.names[-1] for one, _ in ran)
            said.append(
                f"model_info/{path} is of {job.names[-1]}, {row['n']} samples: autoattack was run "
                f"by {methods}"
            )
    return found, said
