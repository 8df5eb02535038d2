"""Eight virtual CPU devices, a compilation cache, and the shared real data where it is present.

Most of the tests' time is compilation of programs that run for milliseconds. So the compiler does
not optimise here, fuses loops the older way and hands LLVM each program in one piece: a third of
the time. Every program is cached, since most are small and many modules, workers and subprocesses
use the same ones. ``XLA_FLAGS`` of the environment win.

With ``WDJAX_AS_USERS`` in the environment the compiler has its defaults, as it has for users. Their
fusions round otherwise: a fault of certificates over narrow intervals was seen there only.
"""

import ctypes
import gc
import os
import sys
from importlib import metadata
from pathlib import Path

OLDER = [*map(int, metadata.version("jaxlib").split(".")[:2])] < [0, 11]
"""Whether jaxlib knows the flag of the fusion emitters; others end the process."""
FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
FAST += "--xla_cpu_use_fusion_emitters=false " * OLDER
os.environ["XLA_FLAGS"] = (
    FAST * ("WDJAX_AS_USERS" not in os.environ)
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
# What tests themselves compute is compared with what the library does, in float32 on any device.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest

# Tracing makes many objects that live; to look at them all took a twentieth of the time.
gc.set_threshold(20_000, 50, 100)

collect_ignore = ["torch_reference.py", "hostile_files.py", "many_devices.py"]  # No tests.
SHARED = Path(__file__).parents[2] / "shared"
SLOW = Path(__file__).with_name("slow.txt")
LONG = "many_devices", "loops", "notebooks", "run", "certify_ulps", "json", "own_attack"
"""Files with few slow tests of half a minute or more. They begin first: last, they would leave
a worker idle for minutes."""


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images, weights and fixtures; tests that want it skip without it."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"{SHARED} is absent: real data and weights are not part of the package")
    return SHARED


@pytest.fixture
def eight_devices():
    """For tests that name more devices than a machine with one accelerator has."""
    if jax.device_count() < 8:
        pytest.skip(f"wants 8 devices; {jax.default_backend()} has {jax.device_count()}")


def pytest_addoption(parser):
    parser.addoption(
        "--shared-must-run",
        action="store_true",
        help="where ../shared is, fail every test that wants it and is skipped",
    )


def pytest_collection_modifyitems(config, items):
    """Marks what ``slow.txt`` names: a file and a test, with or without its parameters."""
    named = set(SLOW.read_text("utf-8").splitlines())
    for item in items:
        place = f"{item.path.name}::{item.name}"
        if {place, place.partition("[")[0]} & named:
            item.add_marker("slow")
    if "not slow" not in config.getoption("markexpr"):
        items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    wants = "shared" in getattr(item, "fixturenames", ())
    report.wants_shared = wants
    must = item.config.getoption("shared_must_run") and (SHARED / "data").is_dir()
    if must and wants and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{SHARED} is there, but {item.nodeid} was skipped: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(getattr(report, "wants_shared", False) for report in skipped)
    if count and not (SHARED / "data").is_dir():
        terminalreporter.write_line(
            f"{count} tests of real data and weights were skipped: {SHARED} is not there."
        )


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def _release_programs():
    """Compiled programs of a finished module are memory that the next one needs.

    The C library keeps freed memory unless it is told to return it: half of a worker's.
    """
    yield
    jax.clear_caches()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
