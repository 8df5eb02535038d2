"""Models of one's own: what ``--model`` can name, a row for each kind."""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from wdjax.checks import validate
from wdjax.cli import options, process
from wdjax.core import Classifier, Model
from wdjax.models import convert, saved
from wdjax.models.functional import functional

_LONGEST = 300

WARNING = (
    "--model PACKAGE.MODULE:BUILD imports and runs that Python code, with all that it may do: name "
    "code that you trust. Files are read, and nothing in them is run."
)
"""What ``--help`` says."""


class ModelKind(NamedTuple):
    """A kind of ``--model``."""

    written: str
    explained: str
    fits: Callable[[str], bool]
    load: Callable[[str, Path | None], Any]
    """From the text and ``--weights``: a model, or what one is made of."""
    weights: bool
    """Whether ``--weights`` may go with it."""


def load(text: str, weights: Path | None, x: np.ndarray) -> Classifier:
    """The model that ``--model`` names.

    Args:
      text: as written on the command line.
      weights: the path of ``--weights``, or None.
      x: ``[n, *shape]`` samples, the example by which a PyTorch module is exported.

    Raises:
      ValueError: no such file, module or attribute, code that raises, or no model.
    """
    kind = next((kind for kind in KINDS if kind.fits(text)), None)
    if kind is None:
        known = ", ".join(kind.written for kind in KINDS)
        more = (
            " A file of PyTorch holds weights: pass it as --weights, with --arch NAME or --model "
            "PACKAGE.MODULE:BUILD for the net."
        ) * text.endswith((".pt", ".pth", ".bin", ".ckpt"))
        raise ValueError(f"--model takes {known}, got {options.shown(text)}.{more}")
    if weights is not None and not kind.weights:
        raise ValueError(f"--weights {weights} would be ignored: {text} holds its own.")
    try:
        return _checked(text, kind.load(text, weights), x)
    except ImportError as error:  # Of a package that an extra brings.
        raise ValueError(f"--model {text}: {error}") from error


def runs_code(text: str) -> bool:
    """Whether ``--model`` names Python code, not a file."""
    kind = next((kind for kind in KINDS if kind.fits(text)), None)
    return kind is not None and kind.load is _built


def files(text: str) -> list[Path]:
    """The files that ``--model`` may read, or import from the current directory."""
    module, colon, _ = text.partition(":")
    if not colon:
        return [Path(text)]
    path = Path(*module.split("."))
    return [path.with_name(f"{path.name}.py"), path / "__init__.py"] if path.name else []


def _onnx(text: str, weights: Path | None) -> Classifier:
    return convert.load_onnx(text).model


def _huggingface(text: str, weights: Path | None) -> Classifier:
    return convert.load_huggingface(text, cast=True).model


def _saved(text: str, weights: Path | None) -> Classifier:
    if not Path(text).exists():
        raise ValueError(f"there is no {text}; name what python -m wdjax convert wrote.")
    try:
        return saved.load_model(text)
    except ValueError as error:
        if "is not a checkpoint" not in str(error):
            raise
        raise ValueError(
            f"{text} does not say its architecture: python -m wdjax convert did not write it. Name "
            f"the architecture instead: --arch NAME --weights {text}."
        ) from error


def _built(text: str, weights: Path | None) -> Any:
    """Imports a module from the current directory or the import path, and calls its function."""
    module, _, name = text.partition(":")
    names = [*module.split("."), *name.split(".")]
    if module.endswith(".py") or not all(part.isidentifier() for part in names):
        raise ValueError(
            "--model takes PACKAGE.MODULE:BUILD, the names by which Python imports them, such as "
            f"mynet:build for build() in mynet.py; got {options.shown(text)}."
        )
    with _told(f"{text}: importing {module}", module):
        found: Any = importlib.import_module(module)
    try:
        build = functools.reduce(getattr, name.split("."), found)
    except AttributeError:
        callables = [key for key, value in vars(found).items() if key[0] != "_" and callable(value)]
        raise ValueError(
            f"--model {text}: {module} ({found.__file__}) has no {name}; it has "
            f"{', '.join(callables[:8]) or 'no function'}."
        ) from None
    if isinstance(build, Model):
        return build
    given = _arguments(text, build, weights)
    with _told(f"{text}: calling it", ""):
        return build(**given)


def _arguments(text: str, build: Any, weights: Path | None) -> dict[str, Any]:
    """What the function is called with: nothing, or ``weights`` if it takes it."""
    if not callable(build):
        raise ValueError(f"--model {text} must be callable, got {options.shown(repr(build))}.")
    try:
        parameters = dict(inspect.signature(build).parameters)
    except (TypeError, ValueError):  # Of functions of C.
        parameters = {}
    many = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [
        one.name
        for one in parameters.values()
        if one.default is inspect.Parameter.empty and one.kind not in many
    ]
    if set(needed) - {"weights"}:
        raise ValueError(
            f"--model {text} must be callable without arguments, except weights; it needs "
            f"{', '.join(needed)}."
        )
    if "weights" in parameters:
        if weights is None and needed:
            raise ValueError(f"--model {text} takes weights: give --weights FILE.")
        return {} if weights is None else {"weights": str(weights)}
    if weights is not None:
        raise ValueError(f"--weights {weights} would be ignored: {text} takes no weights.")
    return {}


def _checked(text: str, model: Any, x: np.ndarray) -> Classifier:
    """A model of what was loaded: the model of a conversion, a function of a framework's module."""
    try:
        if _is_torch(model):
            model = _of_torch(model, x)
        if isinstance(model, convert.Converted):
            model = model.model
        if isinstance(model, nnx.Module):
            model = functional(model)
        validate.check_model(model)
    except ValueError as error:
        raise ValueError(f"--model {text}: {' '.join(str(error).split())}") from error
    return model


def _is_torch(model: Any) -> bool:
    return "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module)


def _of_torch(module: Any, x: np.ndarray) -> convert.Converted:
    """A PyTorch module, exported for samples ``x`` ``[n, *shape]``; images turn channels first."""
    if x.ndim != 4:
        return convert.from_torch(module, x[:1])
    try:
        return convert.from_torch(module, x[:1].transpose(0, 3, 1, 2))
    except ValueError:
        with contextlib.suppress(ValueError):  # The samples are channels first, which is said next.
            return convert.from_torch(module, x[:1])
        raise


@contextlib.contextmanager
def _told(what: str, wanted: str) -> Iterator[None]:
    """A context for code of others: in one line it says what failed there and where.

    ``wanted`` is the module that is being imported; empty for a call. The current directory is
    searched for modules first. What the code prints goes to stderr, since
    standard output is for results.
    """
    here = os.getcwd()
    if sys.path[:1] not in ([here], [""]):
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ModuleNotFoundError as error:
        if not f"{wanted}.".startswith(f"{error.name}."):
            raise ValueError(_said(what, error)) from error
        raise ValueError(
            f"--model: there is no module {error.name} in {here}, and none is installed."
        ) from None
    except SystemExit as error:
        if error.code == process.TERMINATED:
            raise
        raise ValueError(_said(what, error)) from error
    except Exception as error:
        raise ValueError(_said(what, error)) from error


def _said(what: str, error: BaseException) -> str:
    """An exception in one line, with the last place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename.startswith(os.getcwd())]
    last = [*frames, *user_frames][-1]
    where = f"{last.filename}, line {last.lineno}"
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    words = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    words = "".join(letter if letter.isprintable() else "?" for letter in words)
    return f"--model {what} failed in {where}: {words}"


KINDS = (
    ModelKind(
        "FILE.onnx", "an ONNX graph (needs the extra [onnx])",
        lambda text: text.endswith(".onnx"), _onnx, weights=False,
    ),
    ModelKind(
        "FOLDER", "an image classifier of Hugging Face, by its config.json",
        lambda text: (Path(text) / "config.json").is_file(), _huggingface, weights=False,
    ),
    ModelKind(
        "FILE.safetensors", "what python -m wdjax convert wrote, or its folder",
        lambda text: text.endswith(".safetensors") or Path(text).is_dir(), _saved, weights=False,
    ),
    ModelKind(
        "PACKAGE.MODULE:BUILD",
        "a Python callable without arguments, or with weights for the path of --weights, that "
        "returns a Model, any callable pytree, a Flax NNX or a PyTorch module; imported from the "
        "current directory or what is installed",
        lambda text: ":" in text, _built, weights=True,
    ),
)  # fmt: skip
"""The kinds of ``--model``; the first that fits is taken."""

HELP = "; ".join(f"{kind.written}: {kind.explained}" for kind in KINDS)
