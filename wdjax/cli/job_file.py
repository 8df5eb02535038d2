"""A file of jobs, in TOML: models x data x threats x methods, each some options of a command."""

import argparse
import contextlib
import functools
import io
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wdjax.cli import (
    attack_command,
    certify_command,
    image_attack_command,
    nppr_command,
    options,
    own_model,
)

COMMANDS: dict[str, Any] = {
    "attack": attack_command,
    "certify": certify_command,
    "image-attack": image_attack_command,
    "nppr": nppr_command,
}
"""What a method can be: the commands that take ``--shard``."""
_KINDS = ("models", "data", "threats", "methods")
_BESIDES = {"models": ("info",), "methods": ("command", "shards")}
"""Keys that are no options of the command."""
MEASURED = ("dataset", "eps", "clean_acc", "autoattack_acc")
"""What a run says of a model in the words of RobustBench's ``model_info``."""
_NAME = re.compile(r"[A-Za-z0-9_+=-][A-Za-z0-9_+=.-]{0,99}")
_OPTION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_OURS = ("json", "checkpoint", "shard", "points", "plot", "radii")
"""Places and parts, which the run itself says."""
_MOST = 1 << 20
"""Largest size of a file of jobs, in bytes."""


class Job(NamedTuple):
    """One model, data, threat and method: a command, in parts that are merged."""

    names: tuple[str, ...]
    """Of the model, the data, the threat and the method."""
    words: tuple[str, ...]
    """The command with its options, but for paths and parts."""
    parsed: argparse.Namespace
    parts: int
    """Their number."""
    folder: Path
    eps: str
    """The budget as it was written."""
    info: Mapping[str, Any]
    """What is known of the model besides."""

    @property
    def result(self) -> Path:
        """The merged JSON."""
        return self.folder / "result.json"

    def part(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"result.json.{number}-of-{self.parts}.safetensors"

    def kept(self, number: int) -> Path:
        """The folder of a part's checkpoint."""
        return self.folder / f"part-{number}"

    def said(self, number: int) -> list[str]:
        """The command line of a part, or for 0 the one that merges them.

        Of a part's, ``--json`` is the first word that is not the job's own.
        """
        if number:
            paths = [f"--json={self.result}", f"--checkpoint={self.kept(number)}"]
            return [*self.words, *paths, f"--shard={number}/{self.parts}", "--quiet"]
        parts = [str(self.part(one)) for one in range(1, self.parts + 1)]
        code = self.parsed.model
        trusted = [] if code is None or not own_model.runs_code(code) else [f"--model={code}"]
        return ["merge", *parts, f"--json={self.result}", *trusted, "--quiet"]

    def made(self, said: Iterable[str]) -> bool:
        """Whether these are the words of a part of it, wherever that was written."""
        return (*itertools.takewhile(lambda word: not word.startswith("--json="), said),) == (
            self.words
        )


def read(path: Path, out: Path) -> tuple[list[Job], dict[str, Any]]:
    """The jobs of a file, and the settings of its cluster; nothing is done yet.

    Args:
      path: the file.
      out: the folder of the results.

    Raises:
      ValueError: no such file; a key, a name or a value that it cannot have; options that their
        command refuses; a file that is not there.
    """
    if not path.is_file() or path.stat().st_size > _MOST:
        raise ValueError(f"{path} must be a file of jobs of at most {_MOST >> 20} MB, in TOML.")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no TOML: {_line(error)}.") from None
    try:
        _check(content)
        jobs = [*_jobs(content, out)]
        if not jobs:
            raise ValueError("every model, data, threat and method is excluded by an only.")
        for job in jobs:
            with _about(job.names):
                _check_files(job)
        for job in jobs:
            with _about(job.names):
                _check_words(job)
    except ValueError as error:
        raise ValueError(f"{path}: {_line(error)}") from None
    return jobs, content.get("cluster", {})


def _line(error: Exception) -> str:
    """What an error says, in one line of characters that can be printed."""
    text = " ".join(str(error).split())
    return "".join(one if one.isprintable() else "?" for one in text)[:600]


def _check(content: dict[str, Any]) -> None:
    """Raises unless there are tables of the right names."""
    known = (*_KINDS, "shards", "cluster")
    for key, value in content.items():
        if key not in known:
            raise ValueError(f"unknown key {options.shown(key)}; there are {', '.join(known)}.")
        if key != "shards" and not isinstance(value, dict):
            raise ValueError(f"{key} must be a table, got {options.shown(str(value))}.")
    for kind in _KINDS:
        if not content.get(kind):
            raise ValueError(f"a table [{kind}.NAME] is needed.")
    entries = (
        (f"{kind}.{name}", name, entry) for kind in _KINDS for name, entry in content[kind].items()
    )
    for where, name, entry in entries:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{options.shown(where)}: of the name a folder is made: take letters, digits and "
                "any of _ + = - ."
            )
        if not isinstance(entry, dict):
            raise ValueError(f"{where} must be a table, got {options.shown(str(entry))}.")
        for other, names in _taken(entry, "only", dict, {}).items():
            there = content[other] if other in _KINDS else {}
            if not isinstance(names, list) or any(one not in [*there] for one in names):
                raise ValueError(
                    f"{where}.only must list names of {', '.join(_KINDS)}, got "
                    f"{options.shown(f'{other} = {names}')}."
                )


def _jobs(content: dict[str, Any], out: Path) -> Iterator[Job]:
    """A job of every model, data, threat and method that go together."""
    for chosen in itertools.product(*(content[kind].items() for kind in _KINDS)):
        chosen_names = dict(zip(_KINDS, (name for name, _ in chosen)))
        bounds = [entry.get("only", {}) for _, entry in chosen]
        if all(chosen_names[kind] in only[kind] for only in bounds for kind in only):
            with _about(chosen_names.values()):
                yield _job(
                    tuple(chosen_names.values()), [dict(entry) for _, entry in chosen], content, out
                )


@contextlib.contextmanager
def _about(names: Iterable[str]) -> Iterator[None]:
    """A context whose errors say which job they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"job {' '.join(names)}: {error}") from error


def _job(names: tuple[str, ...], tables: Any, content: dict[str, Any], out: Path) -> Job:
    """The job of these tables, whose options its command has parsed."""
    model, _, _, method = tables
    info = _taken(model, "info", dict, {})
    for key, value in info.items():
        if key in MEASURED or not isinstance(value, str | int):
            raise ValueError(
                f"info says {options.shown(f'{key} = {value}')}: it takes texts, whole numbers, "
                f"true and false, and {', '.join(MEASURED)} are measured."
            )
    command = _taken(method, "command", str)
    parts = _taken(method, "shards", int, _taken(content, "shards", int, 1))
    if command not in COMMANDS or not 1 <= parts < 10**6:
        raise ValueError(
            f"command must be one of {', '.join(COMMANDS)}, and shards from 1 to 999999; got "
            f"{options.shown(command)} and {parts}."
        )
    given: dict[str, Any] = {}
    items = ((kind, *item) for kind, table in zip(_KINDS, tables) for item in table.items())
    for kind, key, value in items:
        if key in ("only", *_BESIDES.get(kind, ())):
            continue
        if key in given:
            raise ValueError(f"{key} is said twice, as {given[key]} and {value}.")
        given[key] = value
    words = [command, *(word for item in given.items() for word in _words(*item))]
    parsed = parse(words)
    for name in _OURS:
        if getattr(parsed, name, None) is not None:
            raise ValueError(f"--{name} is what the run says: leave it out.")
    folder = out.joinpath(*names)
    return Job(names, tuple(words), parsed, parts, folder, str(given.get("eps", "")), info)


def _taken(table: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A value of a table; raises if it is missing or of another type."""
    value = table.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = {dict: "a table", str: "text", int: "a whole number"}[kind]
        got = "nothing" if value is None else options.shown(str(value))
        raise ValueError(f"{key} must be {what}, got {got}.")
    return value


def _words(key: str, value: Any) -> list[str]:
    """An option of a command."""
    if not _OPTION.fullmatch(key):
        raise ValueError(f"{options.shown(key)} is no option's name.")
    if isinstance(value, bool):
        return [f"--{key}"] * value
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"{key} must be text, a number, true or false, got {options.shown(str(value))}."
        )
    return [f"--{key}={value}"]


def parse(words: list[str]) -> argparse.Namespace:
    """A command's options; raises a ValueError of what its parser would print."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return _parser().parse_args(words)
    except SystemExit:
        raise ValueError(said.getvalue().strip() or "it asks for help.") from None


def _check_words(job: Job) -> None:
    """Raises if the command refuses the options, or the folder cannot be written.

    The paths are not those of its parts: what a kill left of them is not the file's fault.
    """
    parsed = parse([*job.words, f"--json={job.folder / 'check'}", f"--shard=1/{job.parts}"])
    parsed.every = None
    COMMANDS[job.words[0]].check(parsed)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from wdjax import cli

    return cli.parser()


def _check_files(job: Job) -> None:
    """Raises unless the files of a job are there."""
    model, weights = job.parsed.model, job.parsed.weights
    file = None if model is None or own_model.runs_code(model) else Path(model)
    for option, path in (("model", file), ("weights", weights), ("data", job.parsed.data)):
        if path is not None and not path.exists():
            raise ValueError(f"there is no {path}, its --{option}.")
    if job.parsed.arch is not None and weights is None:
        raise ValueError("arch needs the checkpoint, weights.")
