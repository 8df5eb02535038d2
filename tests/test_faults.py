"""Every command, ended at any moment or with a write, an fsync or a print that fails.

Afterwards its result is whole, or absent, and the same command begun anew ends with an equal one.
The disk is looked at from where Python reaches it, so that every moment can be chosen; processes
that are really killed, at random ones, are those of ``bench/kills.py``.
"""

import errno
import functools
import io
import json
import os
import random
import shutil
import signal
import sys

import numpy as np
import pytest

from wdjax import ensembles, models
from wdjax.attacks import PGD
from wdjax.cli import audit_command as audit_command
from wdjax.cli import game_command as game_command
from wdjax.cli import main
from wdjax.image import FrankWolfe, NearestTransport, union
from wdjax.models import convert
from wdjax.report import audited, page
from wdjax.transductive import Fixed, digits, transfer
from wdjax.transductive.digits import DigitsCase, Row

CODES = {"interrupted": {0, 130}, "terminated": {0, 143}}
"""Exit codes; of a disk that fails 2, of a stream 4, and 0 where neither mattered."""
MOMENTS = {
    "fails": ("write", "fsync", "rename", "print", "late"),
    "full": ("any", "late"),
    "killed": ("write", "rename", "late", "late"),
    "interrupted": ("any",),
    "terminated": ("any",),
}
"""One operation fails; all do from then on; the process is gone; a signal comes: when in a command
one of these happens, or one of its last events."""
LATE = 12

SUBJECT = ["--arch", "mlp", "--weights", "{in}/mlp.pth", "--data", "{in}/x.npz"]
BALL = ["--norm", "linf", "--eps", "0.2"]
COMMANDS = {
    "attack": [
        "attack", *SUBJECT, *BALL, "--attacks", "fgsm,wda++", "--json", "{out}/a.json",
        "--points", "{out}/a.npz", "--plot", "{out}/a.png",
    ],
    "attack, to stdout": ["attack", *SUBJECT, *BALL, "--attacks", "fgsm", "--json", "-"],
    "image-attack": [
        "image-attack", *SUBJECT, "--k", "1,4", "--window", "3", "--json", "{out}/i.json",
        "--points", "{out}/i.npz", "--radii", "{out}/r.npz",
    ],
    "certify": [
        "certify", *SUBJECT, *BALL, "--batch-size", "3", "--steps", "2", "--json", "{out}/c.json",
        "--radii", "{out}/c.npz",
    ],
    "certify by slopes": [
        "certify", *SUBJECT, *BALL, "--method", "lipschitz", "--batch-size", "3",
        "--json", "{out}/l.json",
    ],
    "certify by votes": [
        "certify", *SUBJECT, "--norm", "l2", "--eps", "0.05", "--method", "smoothing",
        "--sigma", "0.1", "--votes", "300", "--json", "{out}/s.json", "--radii", "{out}/s.npz",
    ],
    "nppr": [
        "nppr", *SUBJECT, "--norm", "l2", "--eps", "0.3", "--steps", "3", "--draws", "32",
        "--latent", "4", "--components", "2", "--mode", "label", "--json", "{out}/n.json",
    ],
    "audit": ["audit", "--samples", "4", "--out", "{out}/audit"],
    "game": ["game", "--defense", "tiny", "--draws", "2", "--json", "{out}/g.json"],
    "convert": ["convert", "{in}/mlp.pth", "--arch", "mlp", "--out", "{out}/m.safetensors"],
}  # fmt: skip


def tiny(given):
    """A game of one turn against a net that does not adapt."""
    net = models.mlp((64, 10), key=given.key)
    return DigitsCase(lambda: Fixed(net), 0.1, None, 6, {"transfer": Row(transfer(PGD(steps=1)))})


@pytest.fixture(scope="module", autouse=True)
def small():
    """A small net, few radii, one game."""
    recipes = {
        "adversarial training": audit_command.Recipe(
            epochs=2, attack=PGD(steps=1, iterate="last"), eps=0.1
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_command, "RECIPES", recipes)
        patch.setattr(audit_command, "EPS_LIST", (0.0, 0.02))
        patch.setattr(audit_command, "SIZES", (64, 8, 10))
        patch.setattr(audited, "figures", lambda *of: {"drawn": b"drawn"})
        patch.setattr(page, "pictures", lambda *of: [page.Picture("title", "caption", "<svg/>")])
        patch.setattr(union, "members", lambda ball: ((FrankWolfe(ball, steps=2), 1.0),) * 2)
        patch.setattr(union, "NearestTransport", functools.partial(NearestTransport, steps=3))
        patch.setattr(ensembles, "fast", functools.partial(ensembles.fast, passes=12))
        patch.setitem(digits.CASES, "tiny", tiny)
        patch.setitem(game_command.FAMILIES, "tiny", ("tiny",))
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(16, 8))
    net.add_module("fc2", torch.nn.Linear(8, 3))
    torch.save(net.state_dict(), folder / "mlp.pth")
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (8, 4, 4, 1)).astype(np.float32)
    y = np.array(convert.load(folder / "mlp.pth", "mlp").model(x)).argmax(-1)
    np.savez(folder / "x.npz", x=x, y=y)
    return folder


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """What a process does to a folder and to its streams, one event after the other.

    At one of them, ``moment``, something happens; without one they are counted.
    """

    def __init__(self, folder, kind=None, moment=0):
        self.folder, self.kind, self.moment = str(folder), kind, moment
        self.log, self.gone = [], False
        self.out, self.err = io.StringIO(), io.StringIO()

    def event(self, what, half=lambda: None):
        """Whether to go on; ``half`` does half of the work."""
        if self.gone:
            return False
        self.log.append(what)
        late = len(self.log) > self.moment and self.kind == "full"
        if self.kind is None or (len(self.log) != self.moment and not late):
            return True
        if self.kind in ("fails", "full"):
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.kind == "killed":
            half()
            self.gone = True
            raise Killed
        signal.raise_signal(signal.SIGINT if self.kind == "interrupted" else signal.SIGTERM)
        return True

    def patch(self, patch):
        patch.setattr(sys, "stdout", Stream(self, self.out, "print"))
        patch.setattr(sys, "stderr", Stream(self, self.err, "complain"))
        patch.setattr(io, "open", self.opening(io.open))
        patch.setattr(os, "open", self.descriptor(os.open))
        for name, what in (("fsync", "fsync"), ("replace", "rename"), ("rename", "rename")):
            patch.setattr(os, name, self.counted(what, getattr(os, name)))
        for name in ("unlink", "remove", "mkdir", "rmdir", "truncate", "write"):
            patch.setattr(os, name, self.silent(getattr(os, name)))
        patch.setattr(shutil, "rmtree", self.silent(shutil.rmtree))

    def opening(self, really):
        def opened(file, mode="r", *args, **kwargs):
            if set(mode) & set("wax+") and str(file).startswith(self.folder):
                self.alive()
                return File(self, really(file, mode, *args, **kwargs))
            return really(file, mode, *args, **kwargs)

        return opened

    def descriptor(self, really):
        def opened(file, flags, *args, **kwargs):
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.alive()
            return really(file, flags, *args, **kwargs)

        return opened

    def alive(self):
        if self.gone:
            raise Killed

    def counted(self, what, really):
        def call(file, *args, **kwargs):
            own = what == "fsync" or str(file).startswith(self.folder)  # Not of caches of programs.
            return really(file, *args, **kwargs) if not own or self.event(what) else None

        return call

    def silent(self, really):
        return lambda *args, **kwargs: None if self.gone else really(*args, **kwargs)


class File:
    """A file that is written to; a write that fails may have written a part."""

    def __init__(self, disk, file):
        self._disk, self._file = disk, file

    def write(self, data):
        half = data[: len(data) // 2]
        on = self._disk.event("write", lambda: self._file.write(half))
        return self._file.write(data) if on else 0

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._file.close()


class Stream:
    encoding = "utf-8"

    def __init__(self, disk, text, what):
        self._disk, self._text, self._what = disk, text, what

    def write(self, data):
        return self._text.write(data) if not data or self._disk.event(self._what) else 0

    def isatty(self):
        return False  # No bars, whose number goes by the clock.

    def flush(self):
        pass


def run(words, folder, given, disk, *more):
    """The exit code of a command, None where the process was killed."""
    words = [word.format(**{"in": given, "out": folder}) for word in words]
    with pytest.MonkeyPatch.context() as patch:
        disk.patch(patch)
        try:
            return main([*words, *more])
        except Killed:
            return None


def kept(words, folder):
    """The options that make it resumable; what takes no time has none."""
    return [] if words[0] == "convert" else ["--checkpoint", str(folder / "kept"), "--every", "0"]


def timeless(content):
    """JSON without what another clock would tell."""
    if isinstance(content, dict):
        timed = {"cost_multiple"}
        return {k: timeless(v) for k, v in content.items() if "seconds" not in k and k not in timed}
    return [timeless(part) for part in content] if isinstance(content, list) else content


def results(folder, said):
    """Every file of a result, whole or else an error is raised, and standard output's JSON."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or name.startswith("kept") or path.name.startswith("."):
            continue
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tolist() for key in arrays.files}
        elif path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()))
        elif path.suffix == ".html":
            found[name] = path.read_text().endswith("</html>\n")
        else:
            found[name] = path.read_bytes()
    if said.startswith("{"):
        found["stdout"] = timeless(json.loads(said))
    return found


@pytest.fixture(scope="module", params=COMMANDS)
def undisturbed(request, given, tmp_path_factory):
    """A command, its result without a checkpoint, and how many events it takes with one."""
    words, folder = COMMANDS[request.param], tmp_path_factory.mktemp("undisturbed")
    plain = Disk(folder)
    assert run(words, folder, given, plain) == 0, plain.err.getvalue()
    expected = results(folder, plain.out.getvalue())
    whole = Disk(other := tmp_path_factory.mktemp("kept"))
    assert run(words, other, given, whole, *kept(words, other)) == 0, whole.err.getvalue()
    assert results(other, whole.out.getvalue()) == expected, "a checkpoint changes the result"
    return request.param, expected, whole.log


@pytest.mark.parametrize("kind", MOMENTS)
def test_a_result_is_whole_or_absent_and_comes_again(undisturbed, given, kind, tmp_path):
    name, expected, log = undisturbed
    words, dice = COMMANDS[name], random.Random(f"{name} {kind}")
    for number, what in enumerate(MOMENTS[kind]):
        moments = [i + 1 for i, seen in enumerate(log) if what in (seen, "any", "late")]
        if not moments:  # Nothing is printed by a command that is quiet.
            continue
        moment = dice.choice(moments[-LATE:] if what == "late" else moments)
        folder = tmp_path / str(number)
        folder.mkdir()
        told = f"{name}, {kind} at event {moment} of {len(log)}: {log[moment - 1]}"
        struck = Disk(folder, kind, moment)
        code = run(words, folder, given, struck, *kept(words, folder))
        assert code in (CODES.get(kind, {0, 2, 4}) if kind != "killed" else {None}), told
        assert what != "print" or code == 4, told
        found = results(folder, "")
        for file, content in found.items():
            assert content == expected[file], f"{told}: {file}"
        files = {file: content for file, content in expected.items() if file != "stdout"}
        if code in (0, 4) or any(file.endswith(".json") for file in found):
            assert found == files, told
        again = Disk(folder)
        assert run(words, folder, given, again, *kept(words, folder)) == 0, again.err.getvalue()
        assert results(folder, again.out.getvalue()) == expected, told
        assert not list(folder.rglob(".*.part")), told
