"""Tasks: what they return comes back as it was, once, and to nobody else."""

import math

import jax
import numpy as np
import pytest

import wdjax
from wdjax import attacks
from wdjax.engine import tasks
from wdjax.engine.tasks import Tasks
from wdjax.report import audit

fast = pytest.mark.fast
HOSTILE = 30
"""Places of a file that are damaged."""


def never(task):
    raise AssertionError("a task was done twice")


def same(one, other):
    """Equal, of the same types, dtypes and shapes; a tuple may have come back as a list."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    return type(one) is type(other) and (one == other or (one != one and other != other))


VALUES = {
    "numbers": [1, -(2**70), 0.1, math.inf, math.nan, -0.0, True, None, "", "é\udce9\n"],
    "nested": {"a": [], "b": {"": [[1, [2.5]], {}]}, "list": ["list", "array", ["bytes"]]},
    "arrays": {
        dtype: np.array([[0, 1, 1000]]).astype(dtype)
        for dtype in [
            "bool",
            "int8",
            "int64",
            "uint64",
            "float16",
            "float32",
            "float64",
            "complex64",
        ]
    },
    "64 bits": [np.array([2**62 + 1]), np.array([1 + 2**-50, np.nan]), np.array(0.1)],
    "shapes": [np.zeros((0, 3)), np.zeros(()), np.arange(24.0).reshape(2, 3, 4)[:, ::2]],
    "bytes": {"png": b"\x89PNG\x00", "none": b""},
    "long": {"svg": "<svg>" * 10**6, "rows": list(range(10**5))},
}


@fast
@pytest.mark.parametrize("name", VALUES)
def test_what_a_task_returns_comes_back(name, tmp_path):
    first = Tasks(tmp_path / "kept").do(name, lambda task: VALUES[name])
    again = Tasks(tmp_path / "kept").do(name, never)
    assert same(VALUES[name], first.value)
    assert same(first.value, again.value)
    assert first.spent == again.spent


def test_types_come_back_where_they_are_told(tmp_path):
    model = wdjax.Model(lambda w, x: x @ w, np.array([[1.0, -1.0], [-1.0, 1.0]], np.float32))
    x, y = np.array([[0.6, 0.4], [0.9, 0.1]], np.float32), np.array([0, 0])
    found = wdjax.run(attacks.WDAPlusPlus(), model, x, y, eps=0.1)
    step = audit.Step("words", 1, 2)
    for _ in range(2):
        work = Tasks(tmp_path / "k")
        value = work.do("a", lambda task: [found, step], wdjax.Result, audit.Step).value
        assert value[1] == step
        assert same(vars(value[0]), jax.tree.map(np.asarray, vars(found)))
    for bad in ({1: 2}, object(), {"a": {2}}):
        with pytest.raises(TypeError):
            Tasks(tmp_path / "k").do("bad", lambda task, bad=bad: bad)


@fast
def test_names_that_look_alike_are_other_tasks(tmp_path):
    names = ["a b", "a-b", "a/b", "../a", "a" * 300, "a" * 299 + "b", "é", "è", "", "."]
    names += ["a", "a.done", "a.safetensors"]

    work = Tasks(tmp_path / "kept")
    for number, name in enumerate(names):
        assert work.do(name, lambda task, number=number: number).value == number
    again = Tasks(tmp_path / "kept")
    assert [again.do(name, never).value for name in names] == list(range(len(names)))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@fast
def test_a_folder_belongs_to_one_piece_of_work(tmp_path):
    Tasks(tmp_path / "kept", identity=b"one", about={"eps": 0.1}).do("a", lambda task: 1)
    with pytest.raises(ValueError, match=r"eps was 0\.1 and is 0\.2"):
        Tasks(tmp_path / "kept", identity=b"two", about={"eps": 0.2})
    assert Tasks(tmp_path / "kept", identity=b"one", about={"eps": 0.1}).do("a", never).value == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for place in ("mine", "file", "file/below"):
        with pytest.raises(ValueError, match=r"choose another|name a folder"):
            Tasks(tmp_path / place)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "kept"
    # What a process that was killed at once left is in nobody's way.
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".tasks.safetensors.0123456789abcdef.part").write_text("half")
    Tasks(tmp_path / "begun")


@fast
def test_what_is_damaged_is_refused(tmp_path):
    Tasks(tmp_path / "kept").do("a", lambda task: {"x": np.arange(50.0)})
    (file,) = (tmp_path / "kept").glob("a.done*")
    whole = file.read_bytes()
    for place in np.linspace(0, len(whole) - 1, HOSTILE).astype(int):
        for bad in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            file.write_bytes(bad)
            with pytest.raises(ValueError, match=r"damaged|not a checkpoint|\.done"):
                Tasks(tmp_path / "kept").do("a", never)
    file.write_bytes(whole)
    assert Tasks(tmp_path / "kept").do("a", never).value["x"][-1] == 49


@fast
def test_what_is_spent_adds_up_over_processes(tmp_path):
    now = [0.0]

    def interrupted(task):
        hear = task.heard(lambda progress: None)
        now[0] += 2
        hear(1)  # Noted.
        now[0] += 3
        raise KeyboardInterrupt  # Noted as well.

    def killed(task):
        now[0] += 4
        task.heard(lambda progress: None)(1)
        now[0] += 100
        raise SystemExit

    def ended(task):
        now[0] += 1
        return task.spent["seconds"]

    def begun():
        now[0] += 50  # Of other work.
        return Tasks(tmp_path / "kept", every=0.0, clock=lambda: {"seconds": now[0]})

    with pytest.raises(KeyboardInterrupt):
        begun().do("a", interrupted)
    work, note = begun(), tasks.Task.note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.Task, "note", lambda task: now[0] < 200 and note(task))
        with pytest.raises(SystemExit):
            work.do("a", killed)
    done = begun().do("a", ended)
    assert done.spent == {"seconds": 10.0}
    assert done.value == 10.0
    assert begun().do("a", never) == done
    assert not list((tmp_path / "kept").glob("*.spent.json"))


@fast
def test_tasks_within_tasks_keep_their_own(tmp_path):
    def outer(task):
        inner = Tasks(task.saving(parts=True)["checkpoint"])
        return inner.do("part", lambda part: tried.append("part") or 1).value + fails()

    def failing():
        raise OSError("the disk is full")

    tried, fails = [], failing
    with pytest.raises(OSError, match="full"):
        Tasks(tmp_path / "kept").do("whole", outer)
    fails = lambda: 1  # noqa: E731
    assert Tasks(tmp_path / "kept").do("whole", outer).value == 2
    assert tried == ["part"]
    assert sorted(p.name for p in (tmp_path / "kept").iterdir() if p.suffix) == [
        "tasks.safetensors",
        "whole.done.safetensors",
    ]
