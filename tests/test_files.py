"""Files are whole or absent, also after SIGKILL."""

import os
import signal
import subprocess
import sys
import time

import pytest

from wdjax import files

WRITER = """
import sys
from wdjax import files
print("ready", flush=True)
number = 0
while True:
    files.write(sys.argv[1], bytes([number % 256]) * 3_000_000)
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
    files.write(path, "old")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"


def test_links_are_followed_and_devices_left(tmp_path):
    files.write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    files.check_writable("/dev/null")
    files.write("/dev/null", "gone")
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize("name", ["folder", "file/below"])
def test_places_that_cannot_be_written_are_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=r"is a folder|cannot be written"):
        files.check_writable(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
