"""Words of the command line made by chance: exit 2, one line that says why, and nothing done.

The commands and their options are read off the parsers, so that a new one is tried without being
named here. The seconds in ``WDJAX_FUZZ`` are shared with ``test_fuzz``.
"""

import argparse
import contextlib
import io
import signal
import time

import hostile_files
import numpy as np
import pytest
from test_fuzz import LEAST, SECONDS

from wdjax.cli import main, parser

SHARE = 0.15

WORDS = [
    "nan", "inf", "-inf", "-1", "0", "1e999", "1e-400", "1e39", "1e12", "0x10", "1_0", "1.5", "٣",
    "１", "", " ", "1/0", "0/0", "1/3/4", "1e400/1e400", "99999999999999999999", "9" * 5000,
    "-" + "9" * 30, "a" * 10_000, "a\x1b[2J", "\ud800", "None", "true", "[" * 5000, "{}",
    "sizes=" + "[" * 5000, "sizes=[4,1e99]", "=", "a=b=c", ",", ",,1", "1,1", "..", "/", "--", "%s",
    "%(default)s", "@file", "*", "\\", "'", "8/255", "7", "linf", "crown", "pgd",
]  # fmt: skip


def commands():
    """The parsers of the commands by their names."""
    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: inner for name, inner in found.choices.items() if name != "versions"}


def takes_a_word(action):
    return bool(action.option_strings) and action.nargs is None


def numeric(action):
    """Whether an option takes a number, by its words or by what it accepts."""
    if not takes_a_word(action) or action.choices or action.type is None:
        return False
    try:
        return isinstance(action.type("1"), int | float)
    except Exception:
        return False


def spoilt(name, folder):
    """Words that are right, but for a place that cannot be written or files that are not there."""
    there, absent = folder / "file", folder / "absent"
    there.touch()
    if name == "convert":
        return [str(absent), "--arch", "mlp", "--out", str(folder / "model.safetensors")]
    if name == "run":
        return [str(absent)]
    values = {"weights": absent, "data": absent, "arch": "mlp", "norm": "linf", "eps": "0.1"}
    values |= {"json": there / "below.json", "out": there / "below", "eps_list": "0.1"}
    return required(commands()[name], values)


def required(inner, values):
    """The options that a command asks for, or that say what it reads or writes, with values."""
    words = []
    for action in inner._actions:
        named = action.required or action.dest in ("out", "json", "arch", "weights", "eps_list")
        if takes_a_word(action) and named and action.dest in values:
            words += [action.option_strings[-1], str(values[action.dest])]
    return words


class TooLongError(Exception):
    pass


def late(number, frame):
    raise TooLongError


def outcome(words):
    """The exit code, and what was printed and said."""
    out, said = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            try:
                code = main(words)
            except SystemExit as ending:
                code = ending.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, out.getvalue(), said.getvalue()


def judged(words, codes=(2,)):
    """What is wrong with what a command did, or nothing."""
    found = []
    cost = hostile_files.attempt(lambda: found.append(outcome(words)))
    if cost["kind"] != "loaded":
        return f"{cost['kind']}: {cost['said'][:200]}"
    code, out, said = found[0]
    if code not in codes:
        return f"exit {code}"
    lines = [line for line in said.splitlines() if line.startswith("wdjax")]
    if code == 2 and (len(lines) != 1 or not said.splitlines()[-1].startswith("wdjax") or out):
        return f"said {said[-300:]!r}, printed {out[:100]!r}"
    if "Traceback" in said or cost["mb"] > 500:
        return f"{cost['mb']} MB, {said[-300:]!r}"
    return ""


def told(words):
    return " ".join(word if len(word) < 60 else f"{word[:30]}...({len(word)})" for word in words)


def test_words_by_chance(tmp_path, monkeypatch):
    """Any options, with any values."""
    monkeypatch.chdir(tmp_path)
    until, seed, wrong = time.monotonic() + SECONDS * SHARE / 2, 0, {}
    names = commands()
    while seed < 5 * LEAST or time.monotonic() < until:
        rng = np.random.default_rng(seed)
        name = list(names)[rng.integers(len(names))]
        words = [name, *spoilt(name, tmp_path)]
        actions = [action for action in names[name]._actions if takes_a_word(action)]
        for _ in range(rng.integers(1, 4)):
            action, word = actions[rng.integers(len(actions))], WORDS[rng.integers(len(WORDS))]
            if action.dest in ("json", "out"):
                continue  # Which would make the words right.
            option = action.option_strings[-1]
            how = rng.integers(6)
            more = {0: [option], 1: [word], 2: [f"{option}={word}"], 3: [option[:-1], word]}
            words += more.get(how, [option, word])
        fault = judged(words)
        if fault:
            wrong.setdefault(fault[:60], told(words))
        seed += 1
    assert wrong == {}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in written} <= {"file"}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A small net as PyTorch would save it, and two images."""
    folder, rng = tmp_path_factory.mktemp("given"), np.random.default_rng(0)
    shapes = {"fc1.weight": (3, 4), "fc1.bias": (3,)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    (folder / "net.pt").write_bytes(hostile_files.zipped(*hostile_files.state_dict(shapes, values)))
    np.savez(folder / "x.npz", x=rng.random((2, 2, 2, 1)).astype(np.float32), y=np.array([0, 2]))
    return folder


PIECES = [
    "pgd", "wda++", "fast", "apgd-t", "gmsa-avg", "nope", "(", ")", "((", ",", "=", "steps", "loss",
    "passes", "widths", "restarts", "iterations", "1", "-1", "nan", "1e999", "9" * 60, "0x1",
    "2/255", "none", "true", "margin", "__import__('os')", "lambda: 0", "*", "**", "'", '"', "\\",
    "#", "\n", "\0", "\x1b[2J", "\ud800", "٣", "steps=3", "(steps=3)", "(3,2,1)", "[" * 90,
    "(" * 90, " ", "é",
]  # fmt: skip


def test_lists_of_attacks_by_chance(tmp_path, monkeypatch):
    """Any pieces of names and settings in a row, where the files to attack are not there."""
    monkeypatch.chdir(tmp_path)
    names = {name: inner for name, inner in commands().items() if "attacks" in dests(inner)}
    assert names.keys() == {"attack", "game"}
    wrong = {}
    for seed in range(3 * LEAST):
        rng = np.random.default_rng(seed)
        text = "".join(rng.choice(PIECES, rng.integers(1, 9)))
        if rng.integers(4) == 0:
            text = f"pgd({text})"
        name = list(names)[rng.integers(2)]
        fault = judged([name, *spoilt(name, tmp_path), f"--attacks={text}"])
        if fault:
            wrong.setdefault(fault[:60], ascii(text))
    assert wrong == {}


EXTREMES = ["-1", "0", "nan", "inf", "1e-39", "1e-400", "1e39", "1e12", "1" + "0" * 23, "9" * 5000]


def test_numbers_have_ranges(given, tmp_path, monkeypatch):
    """Of commands that could work: an extreme number is refused, or harmless."""
    monkeypatch.chdir(tmp_path)
    values = {"weights": given / "net.pt", "data": given / "x.npz", "arch": "mlp", "norm": "linf"}
    values |= {"eps": "0.1", "json": tmp_path / "out.json"}
    values |= {"out": tmp_path / "audit", "eps_list": "0.1"}
    works = {name: inner for name, inner in commands().items() if "weights" in dests(inner)}
    less = {"attacks": "fgsm", "steps": "1", "draws": "2", "k": "1", "components": "1"}
    tries = [
        (name, action, word)
        for name, inner in works.items()
        for action in inner._actions
        if name != "convert" and numeric(action)
        for word in EXTREMES
    ]
    np.random.default_rng(0).shuffle(tries)
    until, wrong = time.monotonic() + SECONDS * SHARE / 2, {}
    for number, (name, action, word) in enumerate(tries):
        if number >= LEAST and time.monotonic() > until:
            break
        words = [name, *required(works[name], values), "--quiet"]
        for dest in dests(works[name]) & less.keys() - {action.dest}:
            words += [f"--{dest}", less[dest]]
        words += [f"{action.option_strings[-1]}={word}"]
        fault = judged(words, (0, 2))
        if fault:
            wrong.setdefault(f"{name} {action.dest} {fault[:60]}", told(words[-1:]))
    assert wrong == {}


def dests(inner):
    return {action.dest for action in inner._actions}
