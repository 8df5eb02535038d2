"""Eight virtual CPU devices, a compilation cache, and the shared real data where it is present."""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

collect_ignore = ["torch_reference.py", "hostile_files.py"]  # No tests; PyTorch may be absent.
SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images, weights and fixtures; tests that want it skip without it."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"{SHARED} is absent: real data and weights are not part of the package")
    return SHARED


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def _release_programs():
    """Compiled programs of a finished module are memory that the next one needs."""
    yield
    jax.clear_caches()
