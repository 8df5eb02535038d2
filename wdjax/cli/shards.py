"""Work that is split between processes: ``--shard I/N`` does a part of it, ``merge`` joins them.

A command's tasks are of two kinds. Those that treat every sample alone are split by rows. Those
that decide by all samples together are dealt out whole, to one part after another. A part is a
file of what its tasks returned. To merge is to run the command again with these results in place
of its tasks, so that what couples samples (budgets, rates, intervals) is computed from all of them.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from wdjax import identity
from wdjax.cli import options, subject
from wdjax.cli.console import Console
from wdjax.core import Certificate, Classifier, Found
from wdjax.engine import batching, tasks
from wdjax.files import atomic, persist
from wdjax.nppr.estimate import Estimate
from wdjax.report import summary
from wdjax.report.proved import Refused
from wdjax.smoothing import SmoothedCertificate
from wdjax.transductive import GameReport

T = TypeVar("T")

_SCHEMA = "wdjax.shard/2"
_ELSEWHERE = (
    "named by the command are not those of {}: run merge where the parts were made, with the same "
    "files."
)
_TYPES = (Found, Certificate, SmoothedCertificate, Estimate, GameReport, Refused)
"""What tasks return that is no plain JSON."""


def declare(group: Any) -> None:
    """Adds the option that makes a command do a part of its work."""
    group.add_argument(
        "--shard",
        type=options.Shard.of,
        metavar="I/N",
        help="do part I of N only, and write it beside the JSON of --json FILE, as "
        "FILE.I-of-N.safetensors; python -m wdjax merge joins the parts",
    )


class ShardFile(NamedTuple):
    """A part's file, whose facts have been read and checked."""

    path: Path
    shard: options.Shard
    facts: dict[str, Any]
    """``samples``, the number of rows of all parts; ``said``, the words of the command; ``data``, a
    digest of the samples ``span``, from and to; ``labels``, one of all labels; and what must be the
    same in all parts: ``settings`` by name, ``model``."""

    @classmethod
    def read(cls, path: Path) -> "ShardFile":
        """Raises if the file is no part, or damaged."""
        facts = persist.manifest(path)["settings"]
        try:
            number, count, samples = (*map(int, facts["shard"]), int(facts["samples"]))
            fits = facts["schema"] == _SCHEMA and 1 <= number <= count <= samples
            words = [*map(str, facts["said"])]
            fits &= all(isinstance(facts[name], str) for name in ("model", "data", "labels"))
            start, stop = map(int, facts["span"])
            fits &= 0 <= start < stop and isinstance(facts["settings"], dict) and bool(words)
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"{path} is no part of a command: --shard did not write it ({_SCHEMA})."
            )
        return cls(path, options.Shard(number, count), facts)

    def content(self) -> dict[str, Any]:
        """What its tasks returned and spent, ``value`` and ``spent``, by name."""
        found = tasks.kept(self.path, _TYPES).value
        parts = found.values() if isinstance(found, dict) else [None]
        if not all(isinstance(part, dict) and {*part} == {"value", "spent"} for part in parts):
            raise ValueError(f"{self.path} is no part of a command: it holds something else.")
        return found

    def check_like(self, first: "ShardFile") -> None:
        """Raises if the two are parts of different work; says of each what it is."""
        for name, now in self.facts["settings"].items():
            before = first.facts["settings"].get(name)
            if now != before:
                raise ValueError(
                    f"{self.path} does not belong to {first.path}: {name} is {now} there and "
                    f"{before} here."
                )
        if self.facts["model"] != first.facts["model"]:
            raise ValueError(f"{self.path} is about another model than {first.path}.")
        divisions = {(part.shard.count, part.facts["samples"]) for part in (self, first)}
        if len(divisions) > 1:
            raise ValueError(
                f"{self.path} is part {self.shard} and {first.path} part {first.shard}: parts of "
                "different divisions may overlap. Merge those of one."
            )


class ShardFiles:
    """All parts of a command that are merged.

    Args:
      paths: their files.
      partial: whether some may be missing.

    Raises:
      ValueError: a file that is no part; parts of different work; one that is there twice; or one
        that is missing, unless ``partial``.
    """

    def __init__(self, paths: Sequence[Path], partial: bool) -> None:
        parts = sorted((ShardFile.read(path) for path in paths), key=lambda part: part.shard.number)
        self.first = parts[0]
        for before, part in zip([self.first, *parts], parts):
            part.check_like(self.first)
            if part is not before and part.shard == before.shard:
                raise ValueError(f"{before.path} and {part.path} are both part {part.shard}.")
        count = self.first.shard.count
        missing = sorted({*range(1, count + 1)} - {part.shard.number for part in parts})
        if missing and not partial:
            raise ValueError(
                f"{'part' if len(missing) == 1 else 'parts'} {', '.join(map(str, missing))} of "
                f"{count} {'is' if len(missing) == 1 else 'are'} missing: name all files, or say "
                "--partial to merge what is there."
            )
        self.missing, self._parts = missing, parts
        self._rows = [part.shard.rows(part.facts["samples"]) for part in parts]
        self._content = {part.path: part.content() for part in parts}

    def check(self, samples: subject.Subject) -> None:
        """Raises if the parts are not about this model and these samples."""
        model, x, y = samples
        if subject.fingerprint(model, x) != self.first.facts["model"]:
            raise ValueError(f"the model {_ELSEWHERE.format(self.first.path)}")

        @functools.cache
        def digest(start: int, stop: int) -> str:
            return summary.sha256(x[start:stop], y[start:stop])

        labels = summary.sha256(y)
        other = [
            part.path
            for part in self._parts
            if digest(*part.facts["span"]) != part.facts["data"] or labels != part.facts["labels"]
        ]
        if len(other) == len(self._parts):
            raise ValueError(f"the samples {_ELSEWHERE.format(self.first.path)}")
        for path in other:
            like = next(part.path for part in self._parts if part.path not in other)
            raise ValueError(f"{path} is about other samples than {like}.")

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the samples that the parts hold."""
        return np.concatenate([np.asarray(rows) for rows in self._rows])

    def take(self, name: str, split: bool) -> tasks.Done[Any] | None:
        """What a task returned in all parts.

        None for one that needs all samples, if parts are missing: it is about more than the rest.
        """
        if self.missing and not split:
            return None
        found = [
            (path, content[name]) for path, content in self._content.items() if name in content
        ]
        if split and len(found) < len(self._content):
            lacking = next(path for path, content in self._content.items() if name not in content)
            raise ValueError(f"{lacking} lacks {name!r}, which {self.first.path} has or needs.")
        if not found:
            raise ValueError(f"no part has {name!r}: were they all asked for the same?")
        done = [tasks.Done(content["value"], content["spent"]) for _, content in found]
        return _together(done, [*map(len, self._rows)]) if split else done[0]


def _together(done: Sequence[tasks.Done[Any]], lengths: Sequence[int]) -> tasks.Done[Any]:
    """What pieces of ``lengths`` samples returned and spent, as one."""
    spent = {clock: subject.total(done, clock) for clock in done[0].spent}
    return tasks.Done(joined([one.value for one in done], lengths), spent)


def joined(values: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Results of parts of the samples as one: arrays and lists with a row a sample are joined.

    Remarks are collected, each once.

    Args:
      values: of one type, from the parts in order.
      lengths: the numbers of samples of the parts.

    Raises:
      ValueError: something without rows that differs between the parts.

    >>> joined([{"a": np.ones(1), "by": "x"}, {"a": np.zeros(2), "by": "x"}], [1, 2])
    {'a': array([1., 0., 0.]), 'by': 'x'}
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError(f"the parts differ in {first!r} and {values[-1]!r}; were all run alike?")
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        parts = {n: joined([getattr(value, n) for value in values], lengths) for n in names}
        return dataclasses.replace(first, **parts)
    if hasattr(first, "_asdict"):
        return type(first)(**joined([value._asdict() for value in values], lengths))
    if isinstance(first, dict):
        parts = {name: [value[name] for value in values] for name in first}
        return {
            name: [*dict.fromkeys(itertools.chain(*found))]
            if name == "remarks"
            else joined(found, lengths)
            for name, found in parts.items()
        }
    if isinstance(first, np.ndarray) and first.ndim:
        if [*map(len, values)] != [*lengths]:
            raise ValueError(f"parts of {lengths} samples hold {[*map(len, values)]} rows.")
        return np.concatenate(values)
    if isinstance(first, list | tuple) and [*map(len, values)] == [*lengths]:
        return [entry for value in values for entry in value]
    if any(value != first for value in values):
        raise ValueError(f"the parts differ in {first!r} and {values[-1]!r}; were all run alike?")
    return first


class ShardedWork:
    """A command's tasks: all of them, those of one part, or what was kept of them."""

    def __init__(
        self,
        parsed: argparse.Namespace,
        work: tasks.Tasks,
        samples: subject.Subject,
        n: int,
        span: range,
    ) -> None:
        self._parsed, self._tasks, self._subject = parsed, work, samples
        self._samples, self._span = n, span
        self.shard: options.Shard | None = parsed.shard
        self.parts: ShardFiles | None = getattr(parsed, "parts", None)
        self._done: dict[str, tasks.Done[Any]] = {}
        self._dealt = 0
        self.left_out: list[str] = []
        """Remarks on tasks that need all samples, of which parts are missing."""

    @property
    def part(self) -> bool:
        """Whether the work is that of one part."""
        return self.shard is not None

    @property
    def split(self) -> bool:
        """Whether it is that of one part, or of parts that are merged."""
        return self.part or self.parts is not None

    @property
    def own(self) -> slice:
        """The samples that this process has looked at: all, but in a part."""
        return slice(self._span.start, self._span.stop)

    @property
    def coverage(self) -> dict[str, Any]:
        """What the JSON of an incomplete merge says besides; nothing for other results."""
        if self.parts is None or not self.parts.missing:
            return {}
        covered, of = len(self.parts.rows), self.parts.first.facts["samples"]
        return {"coverage": {"n": covered, "of": of, "missing_parts": self.parts.missing}}

    def rows(
        self, name: str, work: Callable[[np.ndarray, tasks.Task], T], size: int | None = None
    ) -> tasks.Done[T]:
        """A task that treats every sample alone.

        Args:
          name: as of :meth:`wdjax.engine.tasks.Tasks.do`.
          work: ``(rows, task) -> result`` for the samples of these numbers.
          size: of pieces that are tasks of their own, so that each is done once; None for one.
        """
        if self.parts is not None:
            found = self.parts.take(name, split=True)
            assert found is not None
            self._done[name] = found
            return found
        indices = range(self._samples) if self.shard is None else self.shard.rows(self._samples)
        rows = np.arange(indices.start, indices.stop)
        if size is None:
            return self._kept(name, lambda task: work(rows, task))
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        done = [
            self._tasks.do(f"{name} from {piece[0]}", functools.partial(work, piece), *_TYPES)
            for piece in pieces
        ]
        self._done[name] = _together(done, [*map(len, pieces)])
        return self._done[name]

    def whole(
        self,
        name: str,
        work: Callable[[tasks.Task], T],
        why: Callable[[str], None] | None = None,
        *,
        labels_only: bool = False,
    ) -> tasks.Done[T] | None:
        """A task that decides by all samples together: one part does it, for the others it is None.

        Args:
          name: as of :meth:`wdjax.engine.tasks.Tasks.do`.
          work: ``task -> result``.
          why: gets a sentence on the part that does it.
          labels_only: whether it depends on the labels alone, so that no samples need be read.
        """
        if self.parts is not None:
            found = self.parts.take(name, split=False)
            if found is None:
                self.left_out.append(
                    f"{name} is left out: it needs all samples, and parts are missing"
                )
            else:
                self._done[name] = found
            return found
        if self.shard is not None:
            turn, self._dealt = self._dealt % self.shard.count + 1, self._dealt + 1
            if why is not None:
                why(f"{name} needs all samples at once: part {turn} of {self.shard.count} does it")
            if turn != self.shard.number:
                return None
            # Kept for these samples alone: the checkpoint is known by those of this part.
            if labels_only:
                return self._kept(name, work, f"{name} of {summary.sha256(self._subject.y)}")
            self._span = range(len(self._subject.y))
            return self._kept(name, work, f"{name} of {self._digest()}")
        return self._kept(name, work)

    def after(self, name: str, work: Callable[[tasks.Task], T], *types: type) -> tasks.Done[T]:
        """A task on what others returned, which is done when all parts are there.

        Args:
          name: as of :meth:`wdjax.engine.tasks.Tasks.do`.
          work: ``task -> result``.
          *types: what the result may contain.
        """
        self._done[name] = self._tasks.do(name, work, *types)
        return self._done[name]

    @property
    def spent(self) -> dict[str, float]:
        """The seconds of all tasks, and how many of them were compilation."""
        return subject.spent(self._done.values())

    def _kept(self, name: str, work: Callable[[tasks.Task], T], kept: str = "") -> tasks.Done[T]:
        self._done[name] = self._tasks.do(kept or name, work, *_TYPES)
        return self._done[name]

    def _digest(self) -> str:
        """The digest of the samples that results depend on."""
        _, x, y = self._subject
        return summary.sha256(x[self.own], y[self.own])

    def batch(self, model: Classifier, x: np.ndarray) -> int | None:
        """``--batch-size``; of a part, the size that all samples would have, for equal rounding."""
        if self.shard is None:
            return subject.batch(self._parsed, len(x))
        least = len(x) // self.shard.count
        size = self._parsed.batch_size
        if size is None:
            size = batching.even(len(x), batching.default(batching.traced(model, x)))
        return min(size, max(1, least)) if size > least else size

    def write(self, console: Console) -> int:
        """Writes the part, which ends its process's work."""
        assert self.shard is not None
        model, x, _ = self._subject
        facts = {
            "schema": _SCHEMA,
            "shard": [self.shard.number, self.shard.count],
            "samples": self._samples,
            "settings": _settings(self._parsed),
            "said": self._parsed.said,
            "model": subject.fingerprint(model, x),
            "data": self._digest(),
            "labels": summary.sha256(self._subject.y),
            "span": [self._span.start, self._span.stop],
        }
        value = {name: done._asdict() for name, done in self._done.items()}
        path = _place(self._parsed)
        tasks.keep(path, tasks.Done(value, {}), facts)
        console.say(f"part {self.shard} is in {path}; merge all parts when they are there")
        return 0


def sharded_work(
    parsed: argparse.Namespace, samples: subject.Subject | None = None, n: int | None = None
) -> tuple[ShardedWork, subject.Subject]:
    """The command's work, and the samples that it is about: all, but for an incomplete merge.

    Args:
      parsed: the options.
      samples: the model and all samples; by default those of the options, which are read here. A
        part then reads its own rows alone, unless it does a task that needs all.
      n: number of rows that are split, by default of the samples.

    Raises:
      ValueError: more parts than rows; or parts that are about another model or other samples.
    """
    shard: options.Shard | None = parsed.shard
    parts: ShardFiles | None = getattr(parsed, "parts", None)
    alone = samples is None and shard is not None
    samples = subject.load(parsed, unread=alone) if samples is None else samples
    model, x, y = samples
    n = len(y) if n is None else n
    if shard is not None and shard.count > n:
        raise ValueError(f"--shard {shard}: there are {n} samples for {shard.count}.")
    if parts is not None:
        parts.check(samples)
        if settings := _changed(parts.first.facts["settings"], _settings(parsed)):
            raise ValueError(f"{parts.first.path} was made with other settings: {settings}.")
        if parts.missing:
            samples = subject.Subject(model, x[parts.rows], y[parts.rows])
            n = len(parts.rows)
    span = shard.rows(n) if shard is not None and alone else range(len(samples.y))
    own = slice(span.start, span.stop)
    work = subject.command_tasks(parsed, x[own], y[own], np.int64(n), model=model)
    return ShardedWork(parsed, work, samples, n, span), samples


def check(parsed: argparse.Namespace) -> None:
    """Raises, before any work, if a part could not be written."""
    if parsed.shard is None:
        return
    if parsed.json in (None, "-"):
        raise ValueError(
            f"--shard {parsed.shard} is written beside the JSON: name it, --json FILE."
        )
    persist.check_writable(_place(parsed))
    atomic.check_writable(_place(parsed))


def _place(parsed: argparse.Namespace) -> Path:
    """The part's file."""
    shard = parsed.shard
    return Path(f"{parsed.json}.{shard.number}-of-{shard.count}.safetensors")


def _settings(parsed: argparse.Namespace) -> dict[str, str]:
    """What must be the same in all parts, besides the model and the samples, in words."""
    words = subject.compared(parsed)
    versions = words.pop("versions")
    return {name: identity.words(value) for name, value in (words | versions).items()}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings that differ, in words."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)
