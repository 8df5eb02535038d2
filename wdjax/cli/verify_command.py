"""``python -m wdjax verify``: decides properties of ONNX nets, in the formats of VNN-COMP."""

import argparse
import collections
import contextlib
import csv
import functools
import importlib.util
import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from wdjax import certify, identity
from wdjax.cli import options, process, subject, workers
from wdjax.cli.console import Console
from wdjax.engine import tasks
from wdjax.files import onnx_file, vnnlib_file
from wdjax.models import convert
from wdjax.proofs.recorder import CaseRecord
from wdjax.report import summary

_SECONDS = 60.0
_SPENT = "seconds", "compile_seconds"
_JOBS = options.Range(1, 1024, whole=True)
_MOST = 1 << 24
"""Largest size of a list of instances, in bytes."""

_COLUMNS = "onnx", "vnnlib", "seconds", "benchmark"
_ALIKE = {"timeout_s": "seconds", "timeout": "seconds"}
"""Other names of columns of a list of instances."""

_DTYPES = {"tensor(double)": np.float64, "tensor(float16)": np.float16}
"""Inputs that onnxruntime takes, but for float32."""

_EXAMPLES = """examples:
  python -m wdjax verify net.onnx property.vnnlib --seconds 60
  python -m wdjax verify net.onnx property.vnnlib.gz --json verdict.json
  python -m wdjax verify --instances instances.csv --jobs 2 --json verdicts.json \\
      --checkpoint kept

the list has rows "net.onnx,property.vnnlib,seconds" as in VNN-COMP, or a first row that names the
columns onnx, vnnlib, and, where there are such, seconds (or timeout_s, timeout) and benchmark, a
folder; files are looked for beside the list"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "verify",
        parents=[common],
        help="decide properties of an ONNX net, as in VNN-COMP",
        description="Decides whether an input of a box gives an output that must not happen: "
        "prints unsat if it is proved that none does; sat, and such an input with its output; "
        "timeout; or unknown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is verified")
    what.add_argument("onnx", nargs="?", type=Path, metavar="NET.onnx", help="the net")
    what.add_argument("vnnlib", nargs="?", type=Path, metavar="SPEC.vnnlib", help="the property")
    what.add_argument(
        "--instances", type=Path, metavar="LIST.csv", help="a list of nets and properties instead"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--seconds",
        type=options.SECONDS,
        metavar="S",
        help=f"when to end a search at the latest (default {_SECONDS:g}, or the list's); compiling "
        "a program is not interrupted",
    )
    how.add_argument("--seed", type=options.SEED, default=0, help="of the attack (default 0)")
    how.add_argument(
        "--jobs",
        type=_JOBS,
        default=1,
        metavar="N",
        help="processes that work on a list beside each other (default %(default)s)",
    )
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", metavar="OUT", help="a file, or - for stdout")
    out.add_argument(
        "--proof",
        metavar="DIR",
        help="a folder for proofs of verdicts, NET-SPEC.npz, which check-proof checks; the search "
        "takes longer",
    )
    subject.declare_checkpoint(out)
    parser.set_defaults(command=run)


class Instance(NamedTuple):
    """One net and property."""

    onnx: str
    vnnlib: str
    seconds: float
    seed: int
    proofs: str
    """A folder for proofs, or none."""
    folder: str = ""
    """Of the list; none for a single instance."""
    benchmark: str = ""
    """A folder in it, or none."""

    @property
    def net(self) -> Path:
        """The file of the net."""
        return Path(self.folder, self.benchmark, self.onnx)

    @property
    def specification(self) -> Path:
        """The file of the property."""
        return Path(self.folder, self.benchmark, self.vnnlib)

    @property
    def proof(self) -> Path:
        """The file of a proof."""
        files = (
            Path(name.removesuffix(".gz")).with_suffix("") for name in (self.onnx, self.vnnlib)
        )
        names = (str(file).replace("/", "_") if self.folder else file.name for file in files)
        return Path(self.proofs, "-".join(names) + ".npz")


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Verifies, writes, and prints the verdicts."""
    listed = parsed.instances is not None
    if listed == (parsed.onnx is not None) or (parsed.onnx is None) != (parsed.vnnlib is None):
        raise ValueError(
            "name a net and a property, NET.onnx SPEC.vnnlib, or --instances LIST.csv."
        )
    if not listed and parsed.jobs > 1:
        raise ValueError(f"--jobs {parsed.jobs} would be ignored: it is for --instances LIST.csv.")
    subject.check_paths(parsed)
    todo = list(_listed(parsed)) if listed else [_single(parsed)]
    if parsed.proof:
        _refuse_one_proof_of_two(todo)
    kept = parsed.checkpoint is not None
    work = subject.command_tasks(parsed, todo, _digests(todo) if kept else {})
    verdicts = _all(todo, work, parsed, console)
    if parsed.json is not None:
        counts = collections.Counter(verdict["result"] for verdict in verdicts)
        content = {
            **summary.head("verify"),
            "data": str(parsed.instances or parsed.vnnlib),
            "seed": parsed.seed,
            "results": dict(sorted(counts.items())),
            "instances": verdicts,
            "remarks": [],
            **{name: sum(one[name] for one in verdicts) for name in _SPENT},
        }
        subject.write(console, parsed.json, content)
    if not listed:
        console.say(_told(verdicts[0]))
        for remark in verdicts[0].get("remarks", ()):
            console.warn(f"wdjax: {remark}")
        return 0
    for name, count in sorted(collections.Counter(v["result"] for v in verdicts).items()):
        console.say(f"{name}: {count} of {len(verdicts)}")
    return 0


def _single(parsed: argparse.Namespace) -> Instance:
    seconds = parsed.seconds or _SECONDS
    return Instance(str(parsed.onnx), str(parsed.vnnlib), seconds, parsed.seed, parsed.proof or "")


def _digests(todo: list[Instance]) -> dict[str, bytes]:
    """A digest of each file that is there; of a net with the tensors that other files store."""
    paths = {one.specification: False for one in todo}
    paths |= {one.net: True for one in todo}
    found: dict[str, bytes] = {}
    for path, net in paths.items():
        if path.is_file():
            parts: list[Any] = [np.frombuffer(path.read_bytes(), np.uint8)]
            if net:
                with contextlib.suppress(ValueError, OSError):  # Its verdict says what is wrong.
                    parts.append(onnx_file.read(path))
            found[str(path)] = identity.digest(parts)
    return found


def _refuse_one_proof_of_two(todo: list[Instance]) -> None:
    """Raises if a proof would replace one of other files."""
    seen: dict[Path, Instance] = {}
    for one in todo:
        other = seen.setdefault(one.proof, one)
        if (other.net, other.specification) != (one.net, one.specification):
            raise ValueError(
                f"{one.proof} would be the proof of both {other.onnx} with {other.vnnlib} and "
                f"{one.onnx} with {one.vnnlib}: rename a file, or verify them in two lists."
            )


def _listed(parsed: argparse.Namespace) -> Iterator[Instance]:
    """The instances of a list; a limit of seconds may only be lowered by ``--seconds``."""
    path = parsed.instances
    if not path.is_file() or path.stat().st_size > _MOST:
        raise ValueError(f"{path} must be a list of instances, a file of at most {_MOST >> 20} MB.")
    try:
        rows = [row for row in csv.reader(io.StringIO(path.read_text("utf-8-sig"))) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no list of instances: {error}.") from None
    names = ["onnx", "vnnlib", "seconds"]
    if rows and {"onnx", "vnnlib"} <= {cell.strip() for cell in rows[0]}:
        names = _columns(path, rows.pop(0))
    if not rows:
        raise ValueError(f"{path} has no instances.")
    for number, row in enumerate(rows, 1):
        if any(row[len(names) :]):
            raise ValueError(
                f"instance {number} of {path} has more cells than {', '.join(names)}, got "
                f"{options.shown(','.join(row))}: name all columns in a first row."
            )
        cells = dict(zip(names, (cell.strip() for cell in row)))
        if not cells.get("onnx") or not cells.get("vnnlib"):
            raise ValueError(
                f"instance {number} of {path} must name a net and a property, got "
                f"{options.shown(','.join(row))}."
            )
        seconds = parsed.seconds or math.inf
        if limit := cells.get("seconds"):
            try:
                seconds = min(seconds, options.SECONDS(limit))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"the seconds of instance {number} of {path} {error}.") from None
        seconds = seconds if seconds < math.inf else _SECONDS
        benchmark = cells.get("benchmark", "")
        proofs = str(Path(parsed.proof, benchmark)) if parsed.proof else ""
        files, beside = (cells["onnx"], cells["vnnlib"]), str(path.parent)
        yield Instance(*files, seconds, parsed.seed, proofs, beside, benchmark)


def _columns(path: Path, titles: list[str]) -> list[str]:
    """The names of a list's columns; raises for one that is unknown or there twice."""
    names = [_ALIKE.get(title.strip(), title.strip()) for title in titles]
    for name, title in zip(names, titles):
        if name not in _COLUMNS or names.count(name) > 1:
            raise ValueError(
                f"{path} has the column {options.shown(title)}: there are {', '.join(_COLUMNS)}, "
                f"each once, and for seconds {' or '.join(_ALIKE)}."
            )
    return names


def _all(
    todo: list[Instance], work: tasks.Tasks, parsed: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """The verdicts of all instances, each kept as soon as it is known."""
    names = [f"{number} {one.onnx} {one.vnnlib}" for number, one in enumerate(todo, 1)]
    found: dict[int, dict[str, Any]] = {}

    def keep(item: int, decide: Any) -> None:
        found[item] = _with_its_proof(work.do(names[item], decide).value)
        if len(todo) > 1:
            row = found[item]
            console.say(
                f"{item + 1}/{len(todo)} {row['onnx']} {row['vnnlib']}: {row['result']}, "
                f"{row['seconds']:.2f} s"
            )

    if parsed.jobs == 1:
        for item, one in enumerate(todo):
            keep(item, lambda task, one=one: decided(one))
    else:
        done = [item for item in range(len(todo)) if work.has(names[item])]
        for item in done:
            keep(item, None)
        left = [item for item in range(len(todo)) if item not in found]
        decide = functools.partial(_cached, parsed.cache)
        rows, said = [todo[item] for item in left], [f"instance {names[item]}" for item in left]
        for item, verdict in workers.mapped(decide, rows, parsed.jobs, said):
            keep(left[item], lambda task, verdict=verdict: verdict)
    return [found[item] for item in range(len(todo))]


def _with_its_proof(row: dict[str, Any]) -> dict[str, Any]:
    """A verdict without its proof, if that was removed since."""
    if row.get("proof") is None or Path(row["proof"]).exists():
        return row
    said = f"{_NO_PROOF}{row['proof']} was removed; without --checkpoint it is made again"
    return row | {"proof": None, "remarks": [*row.get("remarks", ()), said]}


def _cached(cache: bool, one: Instance) -> dict[str, Any]:
    """:func:`decided` in a process of its own."""
    with process.compilation_cache(cache):
        return decided(one)


def decided(one: Instance) -> dict[str, Any]:
    """The verdict of one instance, as JSON.

    A bad file raises in a single instance; in a list (``folder`` is set) it is the result "error".
    """
    row: dict[str, Any] = {"onnx": one.onnx, "vnnlib": one.vnnlib, "seconds_limit": one.seconds}
    if one.benchmark:
        row["benchmark"] = one.benchmark
    before = _clock()()
    try:
        row |= _searched(one, time.monotonic())
    except (ValueError, OSError) as error:
        if not one.folder:
            raise
        row |= {"result": "error", "error": str(error)}
    after = _clock()()
    seconds, compiling = (after[name] - before[name] for name in _SPENT)
    return row | {"seconds": seconds, "compile_seconds": min(compiling, seconds)}


@functools.cache
def _clock() -> process.Clock:
    """The one clock of this process."""
    return process.Clock()


def _searched(one: Instance, began: float) -> dict[str, Any]:
    """The verdict over all boxes of a property: sat as soon as one is, unsat if all are."""
    path = one.net
    model, shape = _loaded(str(path), path.stat().st_mtime_ns)
    cases = vnnlib_file.read(one.specification)
    proof, missing = _proof(one)
    records = [None] * len(cases) if proof is None else proof.cases
    found: list[certify.Verdict] = []
    for case, record in zip(cases, records):
        if len(case.lower) != math.prod(shape):
            raise ValueError(
                f"{one.vnnlib} has {len(case.lower)} inputs, and {one.onnx} takes {list(shape)}."
            )
        verdict, witness = _settled(one, began, model, path, case, shape, record)
        found.append(verdict)
        if witness is not None:
            break
    told: dict[str, Any] = {
        "leaves": sum(verdict.leaves for verdict in found),
        "by": found[-1].by,
    }
    open_ = [verdict for verdict in found if verdict.status != "holds"]
    if one.proofs and (witness is not None or not open_):
        told |= _saved(one, proof, missing)
    if witness is not None:
        remarks = told.pop("remarks", []) + witness.pop("remarks")
        return told | {"result": "sat"} | witness | ({"remarks": remarks} if remarks else {})
    if not open_:
        return told | {"result": "unsat"}
    bound = min(verdict.bound for verdict in open_)
    over = any(verdict.by in ("time", _ONLY_OURS) for verdict in open_)
    ended = {"result": "timeout" if over else "unknown", "by": open_[0].by}
    return told | ended | {"bound": summary.number(bound)}


def _proof(one: Instance) -> tuple[certify.Proof | None, str]:
    """The proof that is to be filled, or None and why there is none."""
    if not one.proofs:
        return None, ""
    try:
        return certify.Proof(one.net, one.specification), ""
    except ValueError as error:
        return None, str(error)


def _saved(one: Instance, proof: certify.Proof | None, missing: str) -> dict[str, Any]:
    """Where the proof is, or why it is not."""
    if proof is None:
        return {"proof": None, "remarks": [_NO_PROOF + missing]}
    try:
        proof.save(one.proof)
    except ValueError as error:
        return {"proof": None, "remarks": [_NO_PROOF + str(error)]}
    return {"proof": str(one.proof)}


_NO_PROOF = "there is no proof of it: "
_ONLY_OURS = "time: points were forbidden by our float program, not by onnxruntime's"


def _settled(
    one: Instance,
    began: float,
    model: Any,
    path: Path,
    case: vnnlib_file.BoxCase,
    shape: tuple[int, ...],
    record: CaseRecord | None,
) -> tuple[certify.Verdict, dict[str, Any] | None]:
    """The verdict on one box, and the replayed witness of a violation.

    A point whose output onnxruntime does not find forbidden, since it rounds otherwise, is no sat:
    the search goes on from other random points until the time is over.
    """
    spec, seed = certify.Specification(case.members), one.seed
    box = case.lower.reshape(shape), case.upper.reshape(shape)
    while True:
        left = max(one.seconds - (time.monotonic() - began), 1e-3)
        key = jax.random.key(seed)
        found = certify.property(model, *box, spec, seconds=left, key=key, proof=record)
        if found.status != "violated":
            return found, None
        witness = _replayed(path, spec, found)
        if witness is not None:
            return found, witness
        if time.monotonic() - began >= one.seconds:
            return found._replace(status="unknown", by=_ONLY_OURS), None
        seed += 1


@functools.lru_cache(maxsize=4)
def _loaded(path: str, changed: int) -> tuple[Any, tuple[int, ...]]:
    """The model of a file, its inputs in the file's order, and one input's shape."""
    found = convert.load_onnx(path, layout="NCHW")
    return found.model, tuple(found.input_shape)


def _replayed(
    path: Path, spec: certify.Specification, found: certify.Verdict
) -> dict[str, Any] | None:
    """The witness with its output, by onnxruntime where that is installed; None if that output is
    not forbidden."""
    assert found.witness is not None
    assert found.output is not None
    y: npt.NDArray[Any] = found.output
    remark = "onnxruntime is not installed"
    if importlib.util.find_spec("onnxruntime") is not None:
        try:
            y, remark = _by_runtime(path, found.witness), ""
        except Exception as error:  # Its errors have no class in common.
            remark = f"onnxruntime does not run it: {options.shown(str(error))}"
    if not remark and not spec.violated(y):
        return None
    x = found.witness.reshape(-1)
    return {
        "replayed": not remark,
        "witness": {"x": [float(v) for v in x], "y": [float(v) for v in y]},
        "remarks": [f"the witness was not replayed: {remark}"] if remark else [],
    }


def _by_runtime(path: Path, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The output of one input, as often as the file takes samples, in the file's dtype."""
    import onnxruntime

    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), quiet, providers=["CPUExecutionProvider"])
    feed = session.get_inputs()[0]
    count = feed.shape[0] if isinstance(feed.shape[0], int) else 1
    rows = np.repeat(x[None].astype(_DTYPES.get(feed.type, np.float32)), count, axis=0)
    out: npt.NDArray[Any] = session.run(None, {feed.name: rows})[0]
    return out.reshape(count, -1)[0]


def _told(verdict: dict[str, Any]) -> str:
    """The verdict in VNN-COMP's format."""
    if "witness" not in verdict:
        return str(verdict["result"])
    rows = [
        f"({kind}_{i} {value!r})"
        for kind, values in (("X", verdict["witness"]["x"]), ("Y", verdict["witness"]["y"]))
        for i, value in enumerate(values)
    ]
    return f"{verdict['result']}\n({chr(10).join(rows)})"
