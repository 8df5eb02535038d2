"""What float programs err by, measured against higher precision, and what the rules trust.

Every primitive with a rule is in one of the tables below: a rule without a measurement fails.
"""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OLDER
from jax import lax
from scipy import special

from wdjax.bounds import activation, interval, record, relax
from wdjax.bounds.primitives import TABLE
from wdjax.lipschitz import neurons
from wdjax.precision import float64

mp = pytest.importorskip("mpmath")

long = np.longdouble
needs_long = pytest.mark.skipif(
    np.finfo(long).eps > 1e-18, reason="NumPy has no longdouble that is longer than float64 here"
)


def by_mpmath(name, most=40.0, domain=(-np.inf, np.inf)):
    """A function that NumPy has not in longdouble: to 30 digits, as a longdouble.

    It is constant from ``most`` on, and NaN where it is not looked at: outside of ``domain``.
    """

    def one(z):
        if not domain[0] < z < domain[1]:
            return long(np.nan)
        value = getattr(mp, name)(mp.mpf(min(max(float(z), -most), most)))
        high = float(value)
        return long(high) + long(float(value - high))

    return np.vectorize(one, otypes=[long])


FUNCTIONS = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": by_mpmath("erf"),
    "erfc": by_mpmath("erfc"),
    "erf_inv": by_mpmath("erfinv", 1.0),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda z: 1 / (1 + np.exp(-z)),
    "rsqrt": lambda z: 1 / np.sqrt(z),
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "digamma": by_mpmath("digamma", 1e30, (0, 1e30)),
    "lgamma": by_mpmath("loggamma", 1e30, (0, 1e30)),
}
"""Of one number, with the exact function."""
ABSENT = {"one_minus_square"} - set(dir(lax))
"""Primitives that this version of JAX lacks."""
if not ABSENT:
    FUNCTIONS["one_minus_square"] = lambda z: (1 - z) * (1 + z)
SPECIAL = {
    "erf": "erf", "erfc": "erfc", "erf_inv": "erfinv", "digamma": "digamma", "lgamma": "gammaln",
}  # fmt: skip
"""Of which SciPy has the float64."""
ABSOLUTE = {"digamma", "lgamma"}
"""Whose error is relative to the value plus 1, above 0 only."""
POWERS = {"pow": (0.5, 2.5, -1.5, 1 / 3, 20.7, -300.3), "integer_pow": (2, 3, 5, 8, 41, -1, -3)}
BASIC = {
    "add": lambda a, b: a + b, "add_any": lambda a, b: a + b, "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "square": lambda a, b: a * a,
}  # fmt: skip
"""Rounded once."""
EXACT = {
    "rem": np.fmod, "scatter-max": lambda a, b: max(a.max(), 0),
    "scatter-min": lambda a, b: min(a.min(), 0),
    "neg": lambda a, b: -a, "abs": lambda a, b: abs(a), "max": np.maximum, "min": np.minimum,
    "floor": lambda a, b: np.floor(a), "ceil": lambda a, b: np.ceil(a),
    "sign": lambda a, b: np.sign(a), "clamp": lambda a, b: np.clip(a, -0.5, 0.5),
    "round": lambda a, b: np.trunc(a + np.copysign(0.5, a)),
    "sort": lambda a, b: np.sort(a), "cummax": lambda a, b: np.maximum.accumulate(a),
    "cummin": lambda a, b: np.minimum.accumulate(a), "reduce_max": lambda a, b: a.max(),
    "reduce_min": lambda a, b: a.min(), "reduce_window_max": lambda a, b: np.maximum(a[1:], a[:-1]),
    "reduce_window_min": lambda a, b: np.minimum(a[1:], a[:-1]),
    "select_n": lambda a, b: np.where(a > b, b, a),
}  # fmt: skip
"""Not rounded."""
SUMS = {
    "reduce_sum": lambda a, b: a.sum(), "cumsum": lambda a, b: np.cumsum(a),
    "reduce_window_sum": lambda a, b: a[1:] + a[:-1], "scatter-add": lambda a, b: a.sum(),
    "dot_general": lambda a, b: a @ b, "conv_general_dilated": lambda a, b: a @ b,
}  # fmt: skip
"""Rounded as often as they add up; relative to the sum of magnitudes."""
PRODUCTS = {"reduce_prod": np.prod, "cumprod": np.cumprod, "scatter-mul": np.prod}
MOVES = {
    "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev", "concatenate", "stack", "pad",
    "broadcast_in_dim", "scatter", "tile", "split", "unstack", "dynamic_slice", "gather",
    "dynamic_update_slice", "select_and_scatter_add",
}  # fmt: skip
"""Which move entries; the last adds up what overlaps, and is charged for it."""
DECISIONS = {
    "is_finite", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "xor", "reduce_and",
    "reduce_or", "argmax", "argmin",
}  # fmt: skip
"""Whose results are booleans or places."""
OTHERS = {"convert_element_type", "reduce_precision", "cumlogsumexp", "elementwise", "atan2"}
"""Rounded by what they convert to; charged with its length; a program of the others; below."""
LENGTHS = (None, 1, 3, 17, 4099)
"""Of vectors, whose ends run through other code; None for a scalar."""


def test_every_rule_is_measured():
    tables = [FUNCTIONS, POWERS, BASIC, EXACT, SUMS, PRODUCTS, MOVES, DECISIONS, OTHERS]
    names = list(itertools.chain(*tables))
    assert sorted(names) == sorted(set(names)), "in two tables"
    missing = sorted((set(TABLE) ^ set(names)) - ABSENT)
    assert not missing, f"{missing}: measure what has a rule, and say here how"


def points(dtype, rng, n=2000):
    """From the whole domain: bit patterns, and where functions change."""
    whole = np.uint32 if dtype == np.float32 else np.uint64
    wide = 110 if dtype == np.float32 else 760
    parts = [
        rng.integers(0, np.iinfo(whole).max, 2 * n, whole, endpoint=True).view(dtype),
        *(rng.uniform(-reach, reach, n) for reach in (0.5, 1, 12, wide)),
        rng.choice([-1, 1], n) * 10 ** rng.uniform(-4, 2, n),
        rng.choice([-1, 1], n) * (1 + 1e-3 * rng.normal(size=n)),
        *(np.linspace(*ends, n) for ends in ((-0.42, -0.38), (5, 10), (19, 28), (9e-4, 1.1e-3))),
    ]
    found = np.concatenate([part.astype(dtype) for part in parts])
    return found[np.isfinite(found) & (np.abs(found) >= np.finfo(dtype).tiny)]


def worst(out, true, size, dtype):
    """The largest error in units in the last place, but for what is below the smallest float."""
    info = jnp.finfo(dtype)
    known = np.isfinite(true) & (np.abs(true) < (1 - 8 * float(info.eps)) * float(info.max))
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.maximum(np.abs(out - true) - 2 * float(info.tiny), 0)
        found = np.where(apart == 0, 0, apart / (size * float(info.eps)))
    assert np.all(np.isfinite(found[known])), "not finite where the exact value is"
    return float(np.max(found, where=known, initial=0.0))


def run(fn, z, n):
    """In vectors of a length, or as scalars, compiled and not."""
    if n == 4099 or len(z) < 60:
        size = min(n or len(z), len(z))
        fitted = z[: len(z) // size * size].reshape(-1, size)
        return fitted.ravel(), np.concatenate([np.asarray(jax.jit(fn)(row)) for row in fitted])
    step = n or 1
    z = z[: 24 * step]
    how = [jax.jit(fn), fn]
    rows = z if n is None else z.reshape(-1, step)
    return z, np.concatenate([np.ravel(how[k % 2](row)) for k, row in enumerate(rows)])


def sized(name, z, true, out):
    """The exact values where they are certified, and what the error is relative to."""
    size = np.maximum(np.abs(true), np.abs(out))
    if name not in ABSOLUTE:
        return true, size
    return np.where(z > 0, true, np.nan), size + 1


def measured(name, dtype, fn, exact):
    rng, found = np.random.default_rng(0), 0.0
    for n in LENGTHS:
        z, out = run(fn, rng.permutation(points(dtype, rng)), n)
        with np.errstate(all="ignore"):
            keep = slice(None) if not isinstance(exact, np.vectorize) else slice(None, 2500)
            if dtype == np.float32:
                precise = getattr(special, SPECIAL[name]) if name in SPECIAL else exact
                true = precise(z.astype(np.float64))
            else:
                true = exact(z[keep].astype(long))
        z, out = z[: len(true)], out[: len(true)].astype(true.dtype)
        found = max(found, worst(out, *sized(name, z, true, out), dtype))
    return found


def allowed(error, least=record.LEAST):
    """What may be measured: on accelerators up to the least that is charged, with its safety."""
    return error if jax.default_backend() == "cpu" else max(error, least / record.SAFETY)


@needs_long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_err_by_what_was_measured(name):
    fn, exact = getattr(lax, name), FUNCTIONS[name]
    assert measured(name, np.float32, fn, exact) <= allowed(TABLE[name].error[0])
    with float64():
        assert measured(name, np.float64, fn, exact) <= allowed(TABLE[name].error[1])


def test_a_row_that_was_copied_is_caught():
    found = measured("erf_inv", np.float32, lax.erf_inv, special.erfinv)
    assert found > 40 > record.SAFETY * TABLE["erf"].error[0]


SHORT = (jnp.float16, jnp.bfloat16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_short_floats_err_by_what_was_measured(name):
    exact = getattr(special, SPECIAL[name]) if name in SPECIAL else FUNCTIONS[name]
    for dtype in SHORT:
        z = np.arange(2**16, dtype=np.uint16).view(dtype)
        z = z[np.isfinite(z) & (np.abs(z.astype(float)) >= float(jnp.finfo(dtype).tiny))]
        out = np.asarray(jax.jit(getattr(lax, name))(z)).astype(float)
        with np.errstate(all="ignore"):
            true = exact(z.astype(float))
        found = worst(out, *sized(name, z.astype(float), true, out), dtype)
        assert found <= allowed(TABLE[name].error[2], record.SHORT), (dtype, found)


@needs_long
@pytest.mark.parametrize("dtype", [np.float32, np.float64, *SHORT], ids=lambda d: np.dtype(d).name)
def test_angles_err_by_what_was_measured(dtype):
    rng, column = np.random.default_rng(0), {4: 0, 8: 1}.get(np.dtype(dtype).itemsize, 2)

    def check(y, x):
        out = np.asarray(jax.jit(lax.atan2)(y, x)).astype(long)
        true = np.arctan2(y.astype(long), x.astype(long))
        found = worst(out, true, np.maximum(np.abs(true), np.abs(out)), dtype)
        least = record.SHORT if dtype in SHORT else record.LEAST
        assert found <= allowed(TABLE["atan2"].error[column], least), found

    with float64() if dtype == np.float64 else jax.disable_jit(False):
        for reach in (1, 1e-3, 1e3):
            check(*((s * rng.uniform(-1, 1, 20_000)).astype(dtype) for s in (1, reach)))
        if dtype not in SHORT:
            z = points(dtype, rng)
            check(rng.permutation(z), z)


@needs_long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_of_known_bases_err_by_what_was_measured(dtype):
    def check():
        y = np.random.default_rng(0).uniform(-80, 80, 4000).astype(dtype)
        for base in (2.0, 0.3, 1.001, 1e-3, 17.0):
            with np.errstate(all="ignore"):
                true = long(dtype(base)) ** y.astype(long)
            out = np.asarray(jax.jit(lax.pow)(dtype(base), y)).astype(long)
            known = (true > np.finfo(dtype).tiny) & (true < 0.99 * np.finfo(dtype).max)
            assert worst(out[known], true[known], true[known], dtype) <= allowed(0.6), base

    with float64() if dtype == np.float64 else jax.disable_jit(False):
        check()


@needs_long
@pytest.mark.parametrize("name", POWERS)
def test_powers_err_by_what_is_trusted(name):
    def check(dtype):
        z = points(dtype, np.random.default_rng(0), 500)
        z = np.abs(z) if name == "pow" else z
        for exponent in POWERS[name]:
            y = dtype(exponent) if name == "pow" else exponent
            with np.errstate(all="ignore"):
                true = z.astype(long) ** long(y)
                size = np.abs(z.astype(long)) ** abs(long(y))
            known = (size > np.finfo(dtype).tiny) & (size < 0.99 * np.finfo(dtype).max)
            out = np.asarray(jax.jit(lambda t, y=y: getattr(lax, name)(t, y))(z)).astype(long)
            found = worst(out[known], true[known], np.abs(true[known]), dtype)
            assert found <= allowed(0.6 if name == "pow" else 0.5 * abs(exponent)), exponent

    check(np.float32)
    with float64():
        check(np.float64)


def pairs(dtype, rng, n):
    return [rng.uniform(-1, 1, n).astype(dtype) for _ in "ab"]


def evaluated(name, a, b):
    """The primitive on two vectors."""
    shape = (1, len(a), 1)
    special_cases = {
        "add_any": lambda: lax.add(a, b),
        "sort": lambda: lax.sort(a),
        "clamp": lambda: lax.clamp(jnp.asarray(-0.5, a.dtype), a, jnp.asarray(0.5, a.dtype)),
        "reduce_max": lambda: jnp.max(a),
        "reduce_min": lambda: jnp.min(a),
        "reduce_window_max": lambda: lax.reduce_window(
            a, -jnp.inf, lax.max, (2,), (1,), "VALID"
        ),
        "reduce_window_min": lambda: lax.reduce_window(a, jnp.inf, lax.min, (2,), (1,), "VALID"),
        "select_n": lambda: lax.select_n(a > b, a, b),
        "reduce_sum": lambda: lax.reduce(a, a.dtype.type(0), lax.add, (0,)),
        "reduce_window_sum": lambda: lax.reduce_window(
            a, a.dtype.type(0), lax.add, (2,), (1,), "VALID"
        ),
        "scatter-add": lambda: jnp.zeros(1, a.dtype).at[jnp.zeros(len(a), int)].add(a)[0],
        "scatter-max": lambda: jnp.zeros(1, a.dtype).at[jnp.zeros(len(a), int)].max(a)[0],
        "scatter-min": lambda: jnp.zeros(1, a.dtype).at[jnp.zeros(len(a), int)].min(a)[0],
        "scatter-mul": lambda: jnp.ones(1, a.dtype).at[jnp.zeros(len(a), int)].multiply(a)[0],
        "dot_general": lambda: jnp.dot(a, b, precision=lax.Precision.HIGHEST),
        "conv_general_dilated": lambda: lax.conv_general_dilated(
            a.reshape(shape), b.reshape(len(a), 1, 1), (1,), "VALID",
            dimension_numbers=("NWC", "WIO", "NWC"), precision=lax.Precision.HIGHEST,
        ).reshape(()),
        "reduce_prod": lambda: jnp.prod(a),
        "cumprod": lambda: lax.cumprod(a),
    }  # fmt: skip
    if name in special_cases:
        return special_cases[name]()
    fn = getattr(lax, name)
    return fn(a, b) if name in ("add", "sub", "mul", "div", "max", "min", "rem") else fn(a)


ARITHMETIC = [*BASIC, *EXACT, *SUMS, *PRODUCTS]


@needs_long
@pytest.mark.parametrize("dtype", [np.float32, np.float64, *SHORT], ids=lambda d: np.dtype(d).name)
def test_arithmetic_rounds_as_often_as_it_is_charged(dtype):
    """All of it in one program for each length. Affine maps are charged four units, or one of short
    floats; a GPU's division errs by up to two, or one."""
    rng, short = np.random.default_rng(0), dtype in SHORT
    once = 0.501 if jax.default_backend() == "cpu" else 1.0 if short else 2.0

    def check(n):
        a, b = pairs(dtype, rng, n)
        outs = jax.jit(lambda a, b: {name: evaluated(name, a, b) for name in ARITHMETIC})(a, b)
        for name, table in ((k, t) for t in (BASIC, EXACT, SUMS, PRODUCTS) for k in t):
            out, wide = np.asarray(outs[name]).astype(long), (a.astype(long), b.astype(long))
            if name in PRODUCTS:
                true, rounded = table[name](wide[0]), n / 2
                size = np.abs(true)
            else:
                true = table[name](*wide)
                size = np.abs(true) if name not in SUMS else table[name](*map(np.abs, wide))
                rounded = 0 if name in EXACT else once if name in BASIC else max(n / 2, once)
                if short and name in ("dot_general", "conv_general_dilated"):
                    rounded = once + n * 2.0**-13  # Products are added up in float32.
            assert worst(out, true, size, dtype) <= rounded, (name, n)

    with float64() if dtype == np.float64 else jax.disable_jit(False):
        for n in (2, 3, 17, 1025):
            check(n)


@needs_long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_and_lines_hold_what_is_exact(name):
    """Also of float64, where functions that are in terms of others err by hundreds of units."""

    def check(dtype):
        rng = np.random.default_rng(1)
        z = rng.permutation(points(dtype, rng, 400))[:1500]
        with np.errstate(all="ignore"):
            true = FUNCTIONS[name](z.astype(long))
        known = np.isfinite(true) & (np.abs(true) < 0.99 * np.finfo(dtype).max)
        z, true = z[known], true[known]
        closed = jax.make_jaxpr(getattr(lax, name))(z)
        low, high = jax.jit(lambda t: tuple(interval.over(closed, t, t)))(z)
        assert np.all((np.asarray(low) <= true) & (true <= np.asarray(high)))
        rule = TABLE[name].lines
        if rule is None:
            return
        reach = (10.0 ** rng.uniform(-4, 1, len(z))).astype(dtype)
        lower, upper = np.maximum(z - reach, -1e4), np.minimum(z + reach, 1e4)
        real = (lower < upper) & ((lower > 0) | (name not in ("log", "sqrt", "rsqrt")))
        lower, upper = lower[real][None], upper[real][None]
        lines = rule(closed.eqns[0], [(jnp.asarray(lower), jnp.asarray(upper))], [True])
        assert lines is not None
        (view,) = lines.views
        steep, level = (
            [np.asarray(t).astype(long) for t in pair]
            for pair in ((view.low, view.up), (lines.low, lines.up))
        )
        for share in np.linspace(0, 1, 9):
            at = np.clip(lower + share * (upper - lower), lower, upper).astype(dtype).astype(long)
            with np.errstate(all="ignore"):
                value = FUNCTIONS[name](at)
                below, above = (s * at + c for s, c in zip(steep, level))
            fine = np.isfinite(value)
            assert not np.any((below > value) & fine)
            assert not np.any((above < value) & fine)

    check(np.float32)
    with float64():
        check(np.float64)


@pytest.mark.parametrize("exponent", [2, 6, 40, -2, -7])
def test_lines_of_powers_hold_what_is_exact(exponent):
    rng = np.random.default_rng(2)
    lower = rng.uniform(0.3, 1.5, (1, 300)).astype(np.float32)
    upper = lower + (10.0 ** rng.uniform(-7, 0, lower.shape)).astype(np.float32)
    eqn = jax.make_jaxpr(lambda z: lax.integer_pow(z, exponent))(lower).eqns[0]
    lines = relax.power(eqn, [(jnp.asarray(lower), jnp.asarray(upper))], [True])
    assert lines is not None
    (view,) = lines.views
    for share in np.linspace(0, 1, 9):
        at = np.clip(lower + share * (upper - lower), lower, upper).astype(np.float32)
        exact, out = at.astype(np.float64) ** exponent, np.asarray(lax.integer_pow(at, exponent))
        for value in (exact, out):
            assert np.all(np.float64(view.low) * at + np.float64(lines.low) <= value)
            assert np.all(np.float64(view.up) * at + np.float64(lines.up) >= value)


COMPOSED = {
    "softplus": (jax.nn.softplus, lambda z: mp.log1p(mp.exp(z))),
    "silu": (jax.nn.silu, lambda z: z / (1 + mp.exp(-z))),
    "gelu": (
        lambda z: jax.nn.gelu(z, approximate=False),
        lambda z: z / 2 * mp.erfc(-z / mp.sqrt(2)),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_lines_of_activations_hold_what_is_exact_in_float64(name):
    fn, exact = COMPOSED[name]
    rng = np.random.default_rng(3)
    center, reach = rng.uniform(-6, 6, (1, 24)), 10 ** rng.uniform(-9, 0.5, (1, 24))
    with float64():
        closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((), jnp.float64))
        eqn = jax.make_jaxpr(lambda z: activation.primitive.bind(z, jaxpr=closed))(center).eqns[0]
        ends = jnp.asarray(center - reach), jnp.asarray(center + reach)
        lines = activation.lines(eqn, [ends], [True])
        (view,) = lines.views
        parts = [np.asarray(t)[0] for t in (*ends, view.low, view.up, lines.low, lines.up)]
    for lower, upper, below, above, low, up in zip(*(map(float, part) for part in parts)):
        for share in (0, 0.25, 0.5, 0.8, 1):
            at = mp.mpf(min(max(lower + share * (upper - lower), lower), upper))
            with mp.workdps(40):
                assert below * at + mp.mpf(low) <= exact(at) <= above * at + mp.mpf(up)


def test_ends_of_derivatives_are_those_of_the_table():
    exact = {
        "gelu": [(lambda z: z * mp.ncdf(z), (-1.5, 1.5))],
        "silu": [(lambda z: z / (1 + mp.exp(-z)), (-2.4, 2.4))],
    }
    rows = [row for row in neurons._ACTIVATIONS if row[2] > 1]
    tanh = lambda z: z / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (z + 0.044715 * z**3)))  # noqa: E731
    functions = [exact["gelu"][0][0], tanh, exact["silu"][0][0]]
    assert len(rows) == len(functions)
    for (_, least, most), fn in zip(rows, functions):
        turns = [mp.findroot(lambda z, f=fn: mp.diff(f, z, 2), start) for start in (-1.6, 1.6)]
        ends = sorted(mp.diff(fn, turn) for turn in turns)
        assert least <= ends[0]
        assert most >= ends[1]


@pytest.mark.parametrize("emitters", ["true", "false"][: 1 + OLDER])
def test_measurements_hold_under_the_compilers_own_flags(emitters):
    """The other tests of this file run under those of conftest, which optimise nothing.

    Leaves of branch and bound are compiled with the older emitter of fusions.
    """
    flags = (
        "--xla_backend_optimization_level=3 --xla_cpu_parallel_codegen_split_count=32"
        + f" --xla_cpu_use_fusion_emitters={emitters}" * OLDER
    )
    chosen = "by_what or as_often or hold_what_is_exact and not activations"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, __file__, "-k", chosen],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
