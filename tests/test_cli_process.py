"""Commands as processes: streams that cannot be written, no home, signals from the first moment."""

import errno
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import wdjax
from wdjax.cli import console, main, process
from wdjax.files import persist
from wdjax.models import convert
from wdjax.report import audit

ROOT = Path(wdjax.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
PROGRAM = [sys.executable, "-m", "wdjax"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(16, 3))
    torch.save(net.state_dict(), folder / "café.pth")
    x = np.random.default_rng(0).uniform(0, 1, (6, 4, 4, 1)).astype(np.float32)
    y = np.array(convert.load(folder / "café.pth", "mlp").model(x)).argmax(-1)
    np.savez(folder / "x.npz", x=x, y=y)
    return folder


class Broken(io.StringIO):
    """A stream that takes some writes, and then fails as it is told."""

    encoding = "utf-8"

    def __init__(self, error, after=0):
        super().__init__()
        self._error, self._left = error, after

    def write(self, text):
        self._left -= bool(text)
        if text and self._left < 0:
            raise self._error
        return super().write(text)


def words(command, given, out):
    subject = ["--arch", "mlp", "--weights", str(given / "café.pth")]
    subject += ["--data", str(given / "x.npz"), "--norm", "linf", "--eps", "0.1"]
    own = {
        "attack": [*subject, "--attacks", "fgsm,pgd", "--json", str(out)],
        "certify": [*subject, "--method", "interval", "--steps", "1", "--json", str(out)],
        "convert": [str(given / "café.pth"), "--arch", "mlp", "--out", str(out)],
    }
    return [command, *own[command]]


@pytest.mark.parametrize("command", ["attack", "certify", "convert"])
def test_words_that_cannot_be_printed_cost_no_result(command, given, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    gone = BrokenPipeError(errno.EPIPE, "Broken pipe")
    closed = ValueError("I/O operation on closed file")
    streams = {"full": (full, 4), "gone": (gone, 141), "closed": (closed, 4), "none": (None, 4)}
    for name, (error, expected) in streams.items():
        for after in (0, 1) if error else (0,):
            out = tmp_path / f"{name}{after}.safetensors"
            err = io.StringIO()
            monkeypatch.setattr(sys, "stdout", Broken(error, after) if error else None)
            monkeypatch.setattr(sys, "stderr", err)
            code = main(words(command, given, out))
            monkeypatch.undo()
            assert out.exists(), (name, after)
            one_line = command == "certify" and after == 1
            assert code == (0 if one_line else expected), (name, after)
            assert ("cannot be written" in err.getvalue()) == (code == 4)
    # Nor does a broken stderr.
    monkeypatch.setattr(sys, "stderr", Broken(full))
    assert main([*words(command, given, tmp_path / "last.safetensors")]) == 0


def test_a_result_for_stdout_that_cannot_be_printed_is_told(given, tmp_path, monkeypatch, capsys):
    command = words("attack", given, "-")
    gone = BrokenPipeError(errno.EPIPE, "Broken pipe")
    for error, code in ((OSError(errno.ENOSPC, "full"), 4), (gone, 141)):
        monkeypatch.setattr(sys, "stdout", Broken(error))
        assert main(command) == code
        monkeypatch.undo()
    capsys.readouterr()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 6


def test_a_long_run_tells_a_log_how_far_it_is(given, tmp_path, monkeypatch):
    """A line at a time, so that a file that somebody follows shows them; none if it was quiet."""
    command = words("attack", given, tmp_path / "out.json")
    for seconds, extra in ((0.0, []), (60.0, []), (0.0, ["--quiet"])):
        monkeypatch.setattr(console, "LINE_SECONDS", seconds)
        monkeypatch.setattr(sys, "stderr", log := io.StringIO())
        assert main([*command, *extra]) == 0
        lines = [line for line in log.getvalue().split("\n") if line.startswith("pgd")]
        assert bool(lines) == (seconds == 0 and not extra)
        assert not any("\r" in line for line in lines)
        assert all(re.match(r"pgd: .*\d+/\d+ \[", line) for line in lines[1:])


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_steps_are_told_to_a_log_as_seldom_as_searches(seconds, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", seconds)
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with console.Console().steps("net", "begin") as show:
        for number in range(5):
            show(audit.Step(f"step {number}", number, 5))
    assert bool(log.getvalue()) == (seconds == 0)


def test_names_that_a_terminal_cannot_show_are_escaped(given, tmp_path, monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    monkeypatch.setattr(sys, "stderr", ascii_only)
    assert main(words("convert", given, tmp_path / "né.safetensors")) == 0
    assert main([*words("convert", given, tmp_path / "x"), "--arch", "résnet"]) == 2
    ascii_only.flush()
    said = ascii_only.buffer.getvalue()
    assert b"caf\\xe9.pth" in said
    assert (tmp_path / "né.safetensors").exists()


def test_streams_of_a_process(given, tmp_path):
    """A full disk, a reader that has gone, streams that were closed: as a shell has them."""
    program = f"{sys.executable} -m wdjax"
    out = tmp_path / "m.safetensors"
    made = f"{program} convert '{given}/café.pth' --arch mlp --out {out}"
    lines = [
        (f"{made} > /dev/full", 4, out),
        (f"PYTHONIOENCODING=ascii {made} > /dev/null", 0, out),
        (f"{made} >&- 2>&- <&-", 4, out),
        (f"{program} versions | true; exit ${{PIPESTATUS[0]}}", 141, None),
        (f"{program} --help | true; exit ${{PIPESTATUS[0]}}", 141, None),
    ]
    running = []
    for number, (line, _, _) in enumerate(lines):
        line = line.replace(str(out), str(tmp_path / f"{number}.safetensors"))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT}
        running.append(subprocess.Popen(["bash", "-c", line], **pipes))
    for number, (line, code, made) in enumerate(lines):
        _, said = running[number].communicate(timeout=300)
        assert running[number].returncode == code, (line, said)
        assert b"Traceback" not in said, (line, said)
        assert b"Exception ignored" not in said, (line, said)
        if made:
            assert persist.load_model(tmp_path / f"{number}.safetensors")


def test_without_a_home_nothing_is_kept(monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where nobody has that uid.
    assert process.cache_folder() is None
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with process.compilation_cache(True):
            assert jax.config.jax_compilation_cache_dir is None
        with process.compilation_cache(False):
            assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert main(["versions"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["jax"] == jax.__version__
    with pytest.raises(SystemExit) as ending:
        main(["--help"])
    assert ending.value.code == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_user_without_a_name_can_run_commands():
    bare = {k: v for k, v in ENVIRONMENT.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    # The interpreter may lie where other users have no access: it is loaded before.
    program = "from wdjax.cli import main; import os; os.setuid(54321); main(['audit', '--help'])"
    ended = subprocess.run([sys.executable, "-c", program], env=bare, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"by default in no folder" in ended.stdout


def test_importing_the_package_imports_nothing_heavy():
    heavy = "jax numpy scipy matplotlib flax"
    program = "import sys, wdjax.__main__, wdjax; "
    program += f"print([m for m in {heavy!r}.split() if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True)
    assert said.stdout == b"[]\n", said
    for name in wdjax.__all__:
        assert getattr(wdjax, name) is not None
    assert dir(wdjax) == sorted(wdjax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atacks'"):
        wdjax.atacks  # noqa: B018


def _hears(child, number):
    """Whether a process has a handler for a signal, as Linux tells."""
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_signal_while_it_starts_ends_a_command_at_once():
    """At moments from before the first import to after the last."""
    dice, running = random.Random(0), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Children are not deaf.
    for number in range(6):
        child = subprocess.Popen(
            [*PROGRAM, "versions"],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        while not _hears(child, signal.SIGTERM) and child.poll() is None:
            time.sleep(0.001)
        time.sleep(dice.choice((0.0, dice.uniform(0, 2))))
        child.send_signal((signal.SIGINT, signal.SIGTERM)[number % 2])
        running.append(child)
    signal.signal(signal.SIGINT, before)
    for number, child in enumerate(running):
        _, said = child.communicate(timeout=120)
        assert child.returncode in (0, (130, 143)[number % 2]), said
        assert said in (b"", (b"wdjax: interrupted\n", b"wdjax: terminated\n")[number % 2])
