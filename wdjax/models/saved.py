"""Models on disk: parameters and their architecture, saved by :mod:`wdjax.files.persist`.

Users import these names from there.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from wdjax.core import Model, PyTree
from wdjax.files import persist
from wdjax.models import zoo
from wdjax.models.functional import functional
from wdjax.models.pytorch import faults_of

_Path = str | PathLike[str]


def save_model(path: _Path, model: Model, architecture: Mapping[str, Any]) -> None:
    """Saves a model and its architecture, for :func:`load_model`.

    Args:
      path: a folder, or a file that ends in ``.safetensors``; an older checkpoint is replaced.
      model: of an architecture of :mod:`wdjax.models`.
      architecture: ``family``, ``options`` and ``normalize`` as for
        :func:`wdjax.models.zoo.build`; the report of a conversion contains it.

    Raises:
      ValueError: the parameters are not those of the architecture, or not finite.

    >>> import tempfile
    >>> import jax
    >>> from wdjax import models
    >>> model = models.mlp((4, 3, 2), key=jax.random.key(0))
    >>> known = {"family": "mlp", "options": {"sizes": [4, 3, 2]}, "normalize": None}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/net.safetensors", model, known)
    ...     load_model(f"{folder}/net.safetensors")(np.ones((1, 4), np.float32)).shape
    (1, 2)
    """
    expected = _build(architecture)
    if expected.func != model.func:
        raise ValueError(f"the model is {model.func!r}, the architecture {expected.func!r}.")
    persist.check_alike(model.args[0], expected.args[0])
    _check_parameters(model.args[0], "the model")
    persist.save(path, model.args[0], {"architecture": dict(architecture)})


def load_model(path: _Path) -> Model:
    """Loads a model saved by :func:`save_model`, as strictly as a conversion.

    Args:
      path: the ``.safetensors`` file or the folder.

    Returns:
      The model, bit for bit.

    Raises:
      ValueError: :func:`save_model` did not write it; or a tensor is missing, unknown, damaged, of
        another shape or dtype, not finite, or a negative variance.

    >>> import tempfile
    >>> import jax
    >>> from wdjax import models
    >>> model = models.mlp((4, 3, 2), key=jax.random.key(0))
    >>> known = {"family": "mlp", "options": {"sizes": [4, 3, 2]}, "normalize": None}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/net.safetensors", model, known)
    ...     load_model(f"{folder}/net.safetensors")(np.ones((1, 4), np.float32)).shape
    (1, 2)
    """
    settings = persist.manifest(path)["settings"]
    if not isinstance(settings.get("architecture"), dict):
        raise ValueError(f"{path} is a checkpoint, but of no model: save_model did not write it.")
    expected = _build(settings["architecture"])
    params = persist.restore(path, expected.args[0])
    _check_parameters(params, str(path))
    return Model(expected.func, params)


def _build(architecture: Mapping[str, Any]) -> Model:
    """The model of an architecture, untrained; raises for a malformed description."""
    family, options, normalize = map(architecture.get, ("family", "options", "normalize"))
    if not isinstance(family, str) or not isinstance(options, Mapping):
        raise ValueError(f"an architecture has family, options, normalize; got {architecture!r}.")
    return functional(zoo.build(family, options, "" if normalize is None else normalize))


def _check_parameters(params: PyTree, where: str) -> None:
    """Raises if parameters are not finite or a variance is negative; ``where`` names them."""
    faults = []
    for name, leaf in persist.named(params).items():
        variance = name.rpartition(".")[2] == "var"
        faults += faults_of(name, np.asarray(leaf), leaf.shape, variance=variance)
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults[:8])}.")
