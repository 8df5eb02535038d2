"""Files are whole or absent, also after SIGKILL, and one task's alone where it asks for that."""

import errno
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wdjax.files import atomic

ALONE = f"import sys; sys.path.append({os.path.dirname(atomic.__file__)!r}); import atomic"
"""Without what else the package imports, which takes seconds."""

WRITER = f"""
{ALONE}
print("ready", flush=True)
number = 0
while True:
    atomic.write(sys.argv[1], bytes([number % 256]) * 3_000_000)
    number += 1
"""


def test_a_killed_writer_leaves_the_old_or_the_new_file(tmp_path):
    path = tmp_path / "report.html"
    path.write_bytes(b"\xff" * 3_000_000)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout.readline() == b"ready\n"
        while True:
            whole = path.read_bytes()
            assert len(whole) == 3_000_000
            assert len(set(whole)) == 1
            if whole[0] in range(5, 255):
                break
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    for _ in range(3):
        whole = path.read_bytes()
        assert len(whole) == 3_000_000
        assert len(set(whole)) == 1
        time.sleep(0.01)


def test_what_fails_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    atomic.write(path, "old")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*report.json"):
        atomic.write(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"


def test_a_set_of_files_is_of_one_run(tmp_path, monkeypatch):
    """Where the last does not fit, none is replaced; else they are replaced in order."""
    names, order = ("figure.png", "report.html", "report.json"), []
    atomic.write_all({tmp_path / name: "old" for name in names})
    written = Path.write_bytes

    def small(path, data):
        if names[0] in path.name and data == b"new":
            raise OSError(28, "No space left on device")
        return written(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", small)
        with pytest.raises(OSError, match="No space"):
            atomic.write_all({tmp_path / name: "new" for name in names})
    assert {path.name for path in tmp_path.iterdir()} == {*names}
    assert {path.read_text() for path in tmp_path.iterdir()} == {"old"}
    renamed = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda path, to: (order.append(Path(to).name), renamed(path, to))
    )
    atomic.write_all({tmp_path / name: "new" for name in names})
    assert tuple(order) == names
    assert {path.read_text() for path in tmp_path.iterdir()} == {"new"}


def test_links_are_followed_and_devices_left(tmp_path):
    atomic.write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    atomic.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    atomic.check_writable("/dev/null")
    atomic.write("/dev/null", "gone")
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize("name", ["folder", "file/below"])
def test_places_that_cannot_be_written_are_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=r"is a folder|cannot be written"):
        atomic.check_writable(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


def started(program, *words):
    """A process of its own, once it has said a word."""
    command = [sys.executable, "-c", program, *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_what_killed_writers_left_goes_with_the_next_writing(tmp_path):
    path, dice, left = tmp_path / "report.html", random.Random(0), 0
    for _ in range(8):
        with started(WRITER, path) as writer:
            time.sleep(dice.uniform(0, 0.05))
            writer.kill()
        left = max(left, len([*tmp_path.glob(".report.html.*")]))
    assert left >= 1
    atomic.write(path, "whole")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


SLOW = f"""
{ALONE}
with atomic.replacing(sys.argv[1]) as new:
    new.write_text("half")
    print("ready", flush=True)
    sys.stdin.readline()
    new.write_text("of the slow one")
"""


def test_what_a_living_process_writes_is_left(tmp_path):
    path = tmp_path / "report.json"
    with started(SLOW, path) as slow:
        atomic.write(path, "of the fast one")
        assert path.read_text() == "of the fast one"
        assert len([*tmp_path.iterdir()]) == 2
        slow.communicate(b"go on\n")
    assert slow.returncode == 0
    assert path.read_text() == "of the slow one"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path):
    path, wrong = tmp_path / "report.json", []

    def work(letter):
        try:
            for _ in range(20):
                atomic.write(path, letter * 300_000)
                assert len(set(path.read_text())) == 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(path.read_text()) == 300_000
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_partial_file_that_is_made_anew_is_not_swept(tmp_path, monkeypatch):
    """Another process replaces it between the moments when it is opened and locked."""
    left, lock = tmp_path / ".note.txt.0123456789abcdef.part", atomic._lock
    left.write_text("of a process that was killed")

    def late(number):
        left.unlink()
        left.write_text("new")
        return lock(number)

    monkeypatch.setattr(atomic, "_lock", late)
    atomic._sweep(tmp_path / "note.txt")
    assert left.read_text() == "new"


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "note.txt"
    path.write_text("old")
    (tmp_path / ".note.txt.0123456789abcdef.part").write_text("of a process that was killed")
    (tmp_path / ".note.txt.backup.part").write_text("somebody's own")

    def fail():
        with atomic.replacing(path) as new:
            new.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"note.txt", ".note.txt.backup.part"}


def test_long_names_and_circular_links(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("n" * 255, "é" * 127, "loop"):
        atomic.check_writable(tmp_path / name)
        atomic.write(tmp_path / name, "whole")
        assert (tmp_path / name).read_text() == "whole"
    assert len([*tmp_path.iterdir()]) == 3


HOLDER = f"""
{ALONE}
with atomic.exclusive(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    path = tmp_path / "run"
    (tmp_path / "link").symlink_to("run")
    with started(HOLDER, path) as holder:
        named = rf"run is in use by process {holder.pid} on {socket.gethostname()} since 2"
        for name in ("run", "link"):
            with pytest.raises(ValueError, match=named), atomic.exclusive(tmp_path / name):
                pass
        with atomic.exclusive(tmp_path / "another"):
            assert atomic.held(tmp_path / "another")
            assert not atomic.held(path)
        holder.kill()
    assert (tmp_path / ".run.lock").exists()
    with atomic.exclusive(path):
        with pytest.raises(ValueError, match=f"process {os.getpid()} on"), atomic.exclusive(path):
            pass
        assert atomic.held(path)
    assert {file.name for file in tmp_path.iterdir()} == {"link"}


FORKED = f"""
{ALONE}
import os
with atomic.exclusive(sys.argv[1]):
    child = os.fork()
    if child:
        sys.exit(os.waitpid(child, 0)[1])
    try:
        assert not atomic.held(sys.argv[1])
        with atomic.exclusive(sys.argv[1]):
            pass
    except ValueError as error:
        os._exit(0 if f"process {{os.getppid()}} on" in str(error) else 1)
    os._exit(1)
"""


def test_threads_and_forks_do_not_hold_what_their_parent_holds(tmp_path):
    path, found = tmp_path / "run", []

    def ask():
        try:
            with atomic.exclusive(path):
                found.append("held")
        except ValueError as error:
            found.append(str(error))

    with atomic.exclusive(path):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert f"process {os.getpid()} on" in found[0]
    ask()
    assert found[1:] == ["held"]
    subprocess.run([sys.executable, "-c", FORKED, path], check=True)


@pytest.mark.parametrize("name", ["process 17 on another host", ""])
def test_a_holder_that_has_not_yet_written_its_name(tmp_path, name):
    """It is waited for; a holder that never writes one is another process."""
    with (tmp_path / ".run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = threading.Timer(0.2, lambda: print(name, end="", file=lock, flush=True))
        writer.start()
        told = f"in use by {name or 'another process'};"
        with pytest.raises(ValueError, match=told), atomic.exclusive(tmp_path / "run"):
            pass
        writer.join()


def test_one_of_many_threads_holds(tmp_path):
    """However often locks are taken, given back and removed."""
    inside, most, taken = [], [], []

    def work():
        for _ in range(200):
            try:
                with atomic.exclusive(tmp_path / "run"):
                    inside.append(1)
                    most.append(len(inside))
                    taken.append(1)
                    inside.pop()
            except ValueError:
                pass

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(taken) >= 50
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is of Linux")
def test_a_device_that_cannot_be_written_is_named_not_the_file_beside_it(tmp_path):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        atomic.write_all({Path("/dev/full"): "new", tmp_path / "result.json": "new"})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_locks_is_said_to_be_one(tmp_path, monkeypatch):
    def none(number, how):
        raise OSError(errno.ENOLCK, "No locks available")

    left = tmp_path / ".report.json.0123456789abcdef.part"
    left.write_text("perhaps of a living process")
    monkeypatch.setattr(fcntl, "flock", none)
    atomic.write(tmp_path / "report.json", "whole")
    assert left.exists()
    with (
        pytest.warns(RuntimeWarning, match="has no locks"),
        atomic.exclusive(tmp_path / "run"),
    ):
        assert atomic.held(tmp_path / "run")
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", left.name}
