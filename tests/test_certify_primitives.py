"""Every record of a primitive against its float program: ends, lines, and what kind it is of."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.extend.core.primitives as known_to_jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify
from wdjax.bounds import activation, interval, record
from wdjax.bounds.domain import ends, fresh
from wdjax.bounds.graph import flatten
from wdjax.bounds.primitives import TABLE
from wdjax.checks.axis_rules import ELEMENTWISE
from wdjax.models.conv import conv
from wdjax.precision import float64
from wdjax.xla_cpu import WINOGRAD_CHANNELS

ROOT = Path(__file__).parents[1]
PICK = np.array([True, False, True, True, False, True])
WINDOW = {"window_dimensions": (3,), "window_strides": (2,), "padding": [(1, 1)]}
DOMAIN = {
    "acos": (-0.9, 0.9), "acosh": (1.2, 3), "asin": (-0.9, 0.9), "atanh": (-0.9, 0.9),
    "digamma": (0.1, 3), "erf_inv": (-0.9, 0.9), "lgamma": (0.1, 3), "log": (0.1, 3),
    "log1p": (-0.8, 3), "pow": (0.1, 3), "rsqrt": (0.1, 3), "sqrt": (0.1, 3), "tan": (-1.4, 1.4),
}  # fmt: skip
"""Where a function is defined; elsewhere (-2, 2)."""


def pooled(x, kind=lax.max, start=-np.inf):
    return lax.reduce_window(x, x.dtype.type(start), kind, **WINDOW)


def at(x, places):
    return jnp.asarray(x).at[jnp.array(places)]


ENTRYWISE = ("add", "sub", "mul", "div", "max", "min", "rem", "atan2")
EXAMPLES = {
    "add_any": lambda x, c: jax.linear_transpose(lambda t: (t, t), c)((x, c))[0],
    "integer_pow": lambda x, c: lax.integer_pow(x, 4),
    "pow": lambda x, c: lax.pow(x, c),
    "clamp": lambda x, c: lax.clamp(-abs(c), x, abs(c)),
    "reshape": lambda x, c: x.reshape(2, 3),
    "squeeze": lambda x, c: lax.squeeze(x.reshape(6, 1), [1]),
    "transpose": lambda x, c: x.reshape(2, 3).T,
    "slice": lambda x, c: x[1:5:2],
    "rev": lambda x, c: lax.rev(x, [0]),
    "concatenate": lambda x, c: jnp.concatenate([x, c]),
    "pad": lambda x, c: lax.pad(x, jnp.zeros((), x.dtype), [(1, 2, 1)]),
    "dynamic_slice": lambda x, c: lax.dynamic_slice(x, [jnp.argmax(c) % 3], [2]),
    "dynamic_update_slice": lambda x, c: lax.dynamic_update_slice(x, c[:2], [jnp.argmax(c) % 3]),
    "split": lambda x, c: lax.split(x, [2, 4])[1],
    "broadcast_in_dim": lambda x, c: jnp.broadcast_to(x, (4, 6)),
    "gather": lambda x, c: x[jnp.array([3, 3, 0, 5])],
    "scatter": lambda x, c: at(x, [4, 3, 1]).set(c[:3]),
    "scatter-add": lambda x, c: at(c, [4, 4, 1]).add(x[:3]),
    "scatter-max": lambda x, c: at(c, [4, 4, 1]).max(x[:3]),
    "scatter-min": lambda x, c: at(x, [4, 4, 1]).min(c[:3]),
    "scatter-mul": lambda x, c: at(x, [4, 4, 1]).multiply(c[:3]),
    "reduce_sum": lambda x, c: jnp.sum(x, keepdims=False),
    "cumsum": lambda x, c: lax.cumsum(x),
    "reduce_window_sum": lambda x, c: pooled(x, lax.add, 0),
    "select_and_scatter_add": lambda x, c: jax.vjp(pooled, c)[1](x[:3])[0],
    "dot_general": lambda x, c: x @ jnp.outer(c, c),
    "conv_general_dilated": lambda x, c: jnp.convolve(x, c[:3]),
    "convert_element_type": lambda x, c: x.astype(
        jnp.bfloat16 if x.dtype != jnp.bfloat16 else jnp.float16
    ),
    "reduce_max": lambda x, c: jnp.max(x.reshape(2, 3), axis=1),
    "reduce_min": lambda x, c: jnp.min(x.reshape(2, 3), axis=1),
    "reduce_window_max": lambda x, c: pooled(x),
    "reduce_window_min": lambda x, c: pooled(x, lax.min, np.inf),
    "sort": lambda x, c: lax.sort(x),
    "argmax": lambda x, c: jnp.argmax(x.reshape(2, 3), axis=1),
    "argmin": lambda x, c: jnp.argmin(x.reshape(2, 3), axis=1),
    "reduce_precision": lambda x, c: lax.reduce_precision(x, 5, 3),
    "reduce_prod": lambda x, c: jnp.prod(x),
    "and": lambda x, c: (x > 0) & (c > 0),
    "or": lambda x, c: (x > 0) | (c > 0),
    "xor": lambda x, c: (x > 0) ^ (c > 0),
    "not": lambda x, c: ~(x > c),
    "reduce_and": lambda x, c: jnp.all(x > c),
    "reduce_or": lambda x, c: jnp.any(x > c),
    "select_n": lambda x, c: lax.select_n(PICK, x, c),
    **{
        name: lambda x, c, name=name: getattr(lax, name)(x, c)
        for name in (*ENTRYWISE, "lt", "le", "gt", "ge", "eq", "ne")
    },
}
ELSEWHERE = {"expand_dims", "stack", "tile", "unstack"} | ({"one_minus_square"} - set(dir(lax)))
"""Primitives of other versions of JAX, which nothing here makes."""
NAMES = sorted(TABLE.keys() - {activation.primitive.name} - ELSEWHERE)


def program(name):
    return EXAMPLES.get(name, lambda x, c: getattr(lax, name)(x))


def operands(name, rng, dtype, count=()):
    x = rng.uniform(*DOMAIN.get(name, (-2, 2)), (*count, 6))
    c = np.array([0.7, -1.3, 0.4, 1.9, -0.6, 1.1])
    return x.astype(dtype), c.astype(dtype)


def traced(name, x, c):
    """The program, its constants known, and the equation of the primitive."""
    closed = jax.make_jaxpr(lambda x: program(name)(x, c))(x)
    return closed, [node.eqn for node in flatten(closed).nodes if node.name == name]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16])
def test_ends_hold_what_programs_and_exact_arithmetic_return(dtype):
    def check(name):
        rng = np.random.default_rng(0)
        middle, c = operands(name, rng, dtype)
        reach = np.array([0, 1e-6, 1e-3, 0.05, 0.3, 1.0])
        low, high = DOMAIN.get(name, (-3, 3))
        lower, upper = (np.clip(middle + s * reach, low, high).astype(dtype) for s in (-1, 1))
        closed, eqns = traced(name, lower, c)
        assert eqns, "the example does not hold the primitive"
        wide = np.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype
        box = fresh(jnp.asarray(lower.astype(wide)), jnp.asarray(upper.astype(wide)))
        least, most = ends(interval.interpret(closed, [box])[0])
        share = np.concatenate([rng.uniform(0, 1, (40, 6)), rng.integers(0, 2, (40, 6))])
        points = (lower.astype(float) + share * (upper - lower).astype(float)).astype(dtype)
        points = np.clip(points, lower, upper).astype(dtype)
        out = np.asarray(jax.jit(jax.vmap(lambda x: program(name)(x, c)))(points))
        with float64():
            fine = points.astype(np.float64), c.astype(np.float64)
            exact = np.asarray(jax.vmap(program(name), (0, None))(*fine))
        for value in (out, exact):
            value = value.astype(float)
            assert np.all((np.asarray(least).astype(float) <= value) | np.isnan(value)), name
            assert np.all((value <= np.asarray(most).astype(float)) | np.isnan(value)), name
        assert np.mean(np.isfinite(np.asarray(least).astype(float))) > 0.5, name

    with float64() if dtype == jnp.float64 else jax.disable_jit(False):
        for name in NAMES:
            check(name)


@pytest.mark.parametrize("name", [name for name in NAMES if TABLE[name].lines is not None])
def test_lines_hold_what_programs_return(name):
    rng = np.random.default_rng(1)
    middle, c = operands(name, rng, np.float32, (50,))
    reach = 10 ** rng.uniform(-5, 0.7, (50, 1))
    low, high = DOMAIN.get(name, (-20, 20))
    lower, upper = (np.clip(middle + s * reach, low, high).astype(np.float32) for s in (-1, 1))
    _, (eqn, *_) = traced(name, lower[0], c)
    fn = program(name)
    shape = eqn.invars[0].aval.shape
    box = [jnp.asarray(end).reshape(-1, *shape) for end in (lower, upper)]
    if name == "mul":
        args, moves, fn = [tuple(box)] * 2, [True, True], lambda x, c: x * x
    else:
        args = [tuple(box), *([jnp.asarray(c)] if len(eqn.invars) == 2 else [])]
        moves = [True, *[False] * (len(eqn.invars) - 1)]
    lines = TABLE[name].lines(eqn, args, moves)
    assert lines is not None
    for turn in range(40):
        share = [rng.uniform(0, 1, lower.shape), rng.integers(0, 2, lower.shape)][turn % 2]
        x = np.clip(lower + share * (upper - lower), lower, upper).astype(np.float32)
        out = np.asarray(jax.vmap(fn, (0, None))(x, c)).astype(float)
        for side, sign in (("low", -1), ("up", 1)):
            total = np.asarray(getattr(lines, side)).astype(float)
            for view in lines.views:
                seen = x.reshape(-1, *shape)
                seen = seen if view.view is None else np.asarray(jax.vmap(view.view)(seen))
                seen = np.where(np.isfinite(seen), seen, 0.0)
                total = total + np.asarray(getattr(view, side)).astype(float) * seen
            good = np.isfinite(total)
            assert np.mean(good) > 0.5
            assert np.all((sign * (total - out) >= 0) | ~good)


@pytest.mark.parametrize(("name", "meets"), [("max", True), ("min", True), ("mul", False)])
def test_lines_of_two_operands_hold_between_all_ends(name, meets):
    """On grids of two intervals; a maximum's upper line meets it where the operands differ most."""
    rng = np.random.default_rng(0)
    middle, reach = rng.normal(size=(2, 1, 400)), 10 ** rng.uniform(-4, 1, (2, 1, 400))
    lower, upper = (np.float32(middle + s * reach) for s in (-1, 1))
    lower[:, :, :20] = upper[:, :, :20]
    (eqn,) = jax.make_jaxpr(getattr(lax, name))(jnp.ones(400), jnp.ones(400)).eqns
    boxes = [(jnp.asarray(low), jnp.asarray(up)) for low, up in zip(lower, upper)]
    lines = TABLE[name].lines(eqn, boxes, [True, True])
    true, gaps = {"max": np.maximum, "min": np.minimum, "mul": np.multiply}[name], []
    for shares in np.stack(np.meshgrid(*[np.linspace(0, 1, 21)] * 2), axis=-1).reshape(-1, 2):
        x = [a + share * (b.astype(float) - a) for a, b, share in zip(lower, upper, shares)]
        for side, sign in (("low", -1), ("up", 1)):
            slopes = [np.asarray(getattr(view, side)).astype(float) for view in lines.views]
            line = np.asarray(getattr(lines, side)) + sum(a * z for a, z in zip(slopes, x))
            gap = sign * (line - true(*x))
            assert np.all(gap >= 0)
            if sorted(shares) == [0, 1] and (side == "up") == (name == "max"):
                gaps.append(np.max(gap / (np.abs(lower) + np.abs(upper)).sum(axis=0)))
    assert not meets or max(gaps) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_records_say_what_kind_a_primitive_is_of(name):
    own, rng = TABLE[name], np.random.default_rng(2)
    x, c = operands(name, rng, np.float32)
    fn = program(name)
    out = np.asarray(fn(x, c)).astype(float)
    unit = 2e-2 if name == "convert_element_type" else 1e-5
    jacobian = []
    for place in range(6):
        moved = x.copy()
        moved[place] = x[place] * 0.9 + 0.01
        jacobian.append(np.asarray(fn(moved, c)).astype(float) != out)
    if own.elementwise:
        assert out.shape == x.shape
        assert not np.any(np.array(jacobian)[~np.eye(6, dtype=bool)])
    if own.affine is not None and name != "select_and_scatter_add":
        one, two, half = (np.asarray(fn(t, c)).astype(float) for t in (x, -x, 0 * x))
        assert np.allclose(one + two, 2 * half, atol=unit * np.abs(out).max() + 1e-6)
        _, (eqn, *_) = traced(name, x, c)
        assert max(np.sum(column) for column in jacobian) <= own.affine(eqn)
    if own.homogeneous:
        scaled = np.asarray(fn(2 * x, 2 * c)).astype(float)
        assert np.array_equal(scaled, out if out.dtype == bool or own.compares else scaled)
        assert np.allclose(scaled, 2 * out) or np.asarray(fn(x, c)).dtype == bool
    if own.elementwise and out.dtype == float:
        with np.errstate(all="ignore"):
            lost = np.isnan(np.asarray(fn(np.full_like(x, np.inf), c)).astype(float)).any()
        rising = jnp.full(x.shape, 1.0), jnp.full(x.shape, np.inf)
        seen = certify.bound(lambda t: fn(t, c), *rising)
        hidden = np.isfinite(seen.lower) & np.isfinite(seen.upper)
        assert own.waves == bool(lost and hidden.any()), "NaN at inf that the bounds do not show"
    if own.monotone:
        more = np.asarray(fn(np.minimum(x + 0.05, DOMAIN.get(name, (0, 9))[1]).astype(x.dtype), c))
        assert np.all(own.monotone * (more - out) >= 0)
    if own.keeps_order and name != "broadcast_in_dim":
        assert np.allclose(out.ravel(), x, rtol=unit)
    if own.continuous is True and np.asarray(fn(x, c)).dtype != bool:
        ends_of = [np.asarray(fn(x + s * np.float32(1e-6), c)).astype(float) for s in (-1, 1)]
        assert np.allclose(*ends_of, rtol=1e-3, atol=1e-3 if name != "convert_element_type" else 1)


def test_every_record_has_an_example_and_every_primitive_that_is_absent_is_one_of_other_versions():
    here = {p.name for p in vars(known_to_jax).values() if hasattr(p, "name")}
    assert TABLE.keys() >= ELSEWHERE
    assert not EXAMPLES.keys() - TABLE.keys()
    assert all(name in EXAMPLES or hasattr(lax, name) for name in NAMES)
    assert {"erf_inv", "sin", "scatter", "reduce_precision"} <= here & TABLE.keys()


FIELDS = [field.name for field in dataclasses.fields(record.Record)]
UNMEASURED = record.Error(1, 1, -1), record.Error(1, 1, float("nan"))


@pytest.mark.parametrize("gap", FIELDS)
def test_no_field_of_a_record_has_a_default(gap):
    whole = {name: getattr(TABLE["exp"], name) for name in FIELDS}
    record.Record(**whole)
    with pytest.raises(TypeError, match=gap):
        record.Record(**{key: value for key, value in whole.items() if key != gap})


@pytest.mark.parametrize("error", [None, 16, (0.5, 0.5), *UNMEASURED])
def test_a_function_without_measured_errors_is_refused(error):
    with pytest.raises(ValueError, match="measure it"):
        dataclasses.replace(TABLE["exp"], error=error)
    with pytest.raises(ValueError, match="has a record already"):
        record.add(TABLE["exp"])


def test_a_primitive_without_a_record_is_told_with_the_way_out():
    model = Model(lambda w, x: lax.bessel_i0e(x) @ w, jnp.ones((3, 2)))
    with pytest.raises(ValueError, match=r"'bessel_i0e'.*record.*docs/primitives\.md"):
        certify.margin_bounds(model, jnp.ones((1, 3)), jnp.array([0]), norm=2, eps=0.1)


@pytest.mark.parametrize("fn", [jnp.log, jnp.sqrt, jnp.arctanh, jnp.arccos, lax.rsqrt, jnp.log1p])
def test_what_may_be_nan_is_unbounded_on_both_sides(fn):
    low, high = certify.bound(fn, jnp.float32(-1.5), jnp.float32(0.5))
    assert (low, high) == (-np.inf, np.inf), "functions of it would hide the NaN"


@pytest.mark.parametrize("method", ["interval", "crown", "alpha"])
def test_nothing_hides_a_nan(method):
    """The second logit is NaN at x = 0.41, which the ball contains."""
    hidden = lambda x: jnp.tanh(jnp.log(x - 0.5))  # noqa: E731
    model = Model(lambda _, x: jnp.concatenate([0 * x + 5, hidden(x)], axis=1), None)
    low = certify.margin_bounds(
        model, jnp.array([[0.7]]), jnp.array([0]), norm=np.inf, eps=0.3, method=method
    )
    assert low[0, 1] == -np.inf


def test_a_record_is_added_from_outside():
    """By the code of the page, and nothing else."""
    text = (ROOT / "docs" / "primitives.md").read_text()
    code = next(part for part in text.split("```python\n") if part.startswith("from wdjax")).split(
        "```"
    )
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    model = Model(lambda w, x: lax.igamma(jnp.full_like(x, 2.0), 5 * x) @ w, w)
    x, eps = jnp.array([[0.2, 0.4, 0.6, 0.8]]), 0.05
    y = jnp.argmax(model(x), axis=-1)
    with pytest.raises(ValueError, match=r"'igamma'.*record"):
        certify.margin_bounds(model, x, y, norm=np.inf, eps=eps)
    try:
        exec(code[0])
        moves = np.random.default_rng(1).choice([-eps, 0, eps], (500, 4)).astype(np.float32)
        logits = np.asarray(model(x + moves))
        margin = (logits[:, y] - logits).min(axis=0)
        clean = np.asarray(model(x))[0, y] - np.asarray(model(x))[0]
        for method, most in (("interval", 4), ("crown", 1.2)):
            low = np.asarray(
                certify.margin_bounds(model, x, y, norm=np.inf, eps=eps, method=method)
            )
            rivals = np.arange(3) != y
            assert np.all((low[0] <= margin)[rivals])
            assert np.all((clean - low[0])[rivals] <= most * (clean - margin)[rivals])
    finally:
        TABLE.pop("igamma", None)


STRUCTURE = {
    "graph.py": "calls, identities: no record, since nothing is computed",
    "rewritten.py": "what is written in terms of primitives that have records",
    "batch_axis.py": "calls and loops, which are looked into",
    "axis_rules.py": "where the samples' axis goes; what it repeats is compared with the records",
    "rounding.py": "what has no gradient at all, and what may mask; no bound depends on it",
    "state_pickle.py": "operations of PyTorch", "torch_file.py": "operations of PyTorch",
}  # fmt: skip


def test_no_other_table_names_primitives():
    names = {p.name for p in vars(known_to_jax).values() if hasattr(p, "name")} | TABLE.keys()
    found = []
    for path in (ROOT / "wdjax").rglob("*.py"):
        if path.parent.name == "primitives" or path.name in STRUCTURE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            members = getattr(node, "keys" if isinstance(node, ast.Dict) else "elts", [])
            told = [m.value for m in members if isinstance(m, ast.Constant) and m.value in names]
            if len(told) > 2:
                found.append(f"{path.name}:{node.lineno} {told}")
    assert not found, f"{found}: what is known of a primitive is said in its record"


def test_both_tables_agree_which_primitives_act_entry_by_entry():
    """The rules of the samples' axis lie below the records and have a table of their own."""
    own = {name for name, record in TABLE.items() if record.elementwise}
    assert own - {activation.primitive.name} == TABLE.keys() & ELEMENTWISE


WINDOWS = {
    "sums in a frame": lambda x: lax.reduce_window(
        x, jnp.float32(0), lax.add, (1, 3), (1, 2), [(0, 0), (2, 1)],
        base_dilation=(1, 2), window_dilation=(1, 2),
    ),
    "maxima from 0.4": lambda x: lax.reduce_window(
        x, jnp.float32(0.4), lax.max, (1, 3), (1, 1), [(0, 0), (1, 1)]
    ),
    "minima from 0.6": lambda x: lax.reduce_window(
        x, jnp.float32(0.6), lax.min, (1, 3), (1, 1), [(0, 0), (1, 1)]
    ),
    "reductions": lambda x: x * lax.reduce(x, jnp.float32(0.7), lax.max, (1,))[:, None]
    + lax.reduce(x, jnp.float32(0), lax.add, (1,))[:, None],
    "top_k": lambda x: jnp.concatenate([lax.top_k(x, 4)[0], lax.top_k(-x, 4)[0]], axis=1),
    "scatter": lambda x: x.at[:, jnp.array([1, 6, 3])].set(x[:, :3]),
    "erf_inv": lambda x: jax.scipy.special.erfinv(0.9 * x),
    "snake": lambda x: x + jnp.sin(3 * x) ** 2 / 3,
    "a product of waves": lambda x: jnp.cos(5 * x) * jnp.sin(2 * x),
    "clamp": lambda x: lax.clamp(0.3, x, 0.6),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_margins_of_what_is_bounded_since(name):
    """Sound, and no looser than three times what random points show."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0.1, 0.9, (2, 8)), jnp.float32)
    fn, eps = WINDOWS[name], 0.05
    out = jnp.asarray(rng.normal(size=(fn(x).shape[1], 4)), jnp.float32)
    model = Model(lambda out, x: fn(x) @ out, out)
    y = jnp.argmax(model(x), axis=-1)
    low = np.asarray(certify.margin_bounds(model, x, y, norm=np.inf, eps=eps, box=None))
    moves = rng.uniform(-eps, eps, (2000, *x.shape))
    moves[::2] = eps * np.sign(moves[::2])
    logits = np.asarray(jax.vmap(model)(x + moves.astype(np.float32)))
    margins = np.take_along_axis(logits, np.asarray(y)[None, :, None], axis=2) - logits
    rivals = np.arange(4) != np.asarray(y)[:, None]
    clean = np.asarray(jnp.take_along_axis(model(x), y[:, None], axis=1) - model(x))
    assert np.all((low <= margins.min(axis=0))[rivals])
    assert np.mean((clean - low)[rivals]) <= 3 * np.mean((clean - margins.min(axis=0))[rivals])


@pytest.mark.parametrize("method", ["interval", "crown"])
def test_nothing_is_known_of_entries_that_are_written_twice(method):
    """On CPUs the last update stays, on GPUs any; also of booleans."""
    places = jnp.array([1, 3, 3, 5])
    x, y = jnp.full((2, 6), 0.6), jnp.zeros(2, int)

    def bounds(fn, column):
        head = jnp.zeros((6, 2)).at[column, 0].set(1.0)
        model = Model(lambda head, x: fn(x) @ head, head)
        return certify.margin_bounds(model, x, y, norm=np.inf, eps=0.1, method=method)[:, 1]

    def written(x):
        return x.at[:, places].set(2 * x[:, :4])

    assert np.all(np.isneginf(bounds(written, 3)))
    if method == "interval":  # CROWN multiplies all entries, the unknown one too.
        kept = lambda x: written(x)[:, :3].repeat(2, axis=1)  # noqa: E731
        np.testing.assert_allclose(bounds(kept, 3), 1.0, rtol=1e-4)
    once = lambda x: x.at[:, jnp.array([1, 3, 2, 5])].set(2 * x[:, :4])  # noqa: E731
    np.testing.assert_allclose(bounds(once, 3), 1.0, rtol=1e-4)
    signs = jax.make_jaxpr(lambda x: (x > 0).at[places].set(x[:4] > 0))(x[0])
    least, most = ends(interval.interpret(signs, [fresh(x[0], x[0])])[0])
    assert least.tolist() == [True, True, True, False, True, True]
    assert np.all(most)


@pytest.mark.parametrize("method", ["interval", "crown"])
def test_what_winograd_rounds_is_charged_beside_bright_pixels(method):
    """In the dark column its products round what the bright neighbours, times 0, cancel to."""
    rng, dark, channels = np.random.default_rng(0), 15, WINOGRAD_CHANNELS
    x = rng.uniform(0.5, 1, (1, 32, 32, channels)).astype(np.float32)
    x[:, :, :dark] *= 1e-6
    kernel = np.zeros((3, 3, channels, channels), np.float32)
    kernel[1, 1] = rng.normal(size=(channels, channels))
    model = Model(lambda k, x: conv(x, k, padding=1)[:, 16, dark - 1], jnp.asarray(kernel))
    out = np.asarray(jax.jit(model)(x))[0].astype(float)
    exact = x[0, 16, dark - 1].astype(float) @ kernel[1, 1].astype(float)
    y = np.array([np.argmax(out)])
    low = np.asarray(certify.margin_bounds(model, x, y, norm=np.inf, eps=0.0, method=method))[0]
    rivals = np.arange(channels) != y
    for z in (out, exact):
        assert np.all((low <= z[y] - z)[rivals])
    assert jax.default_backend() != "cpu" or np.max(np.abs(out - exact)) > 0.01 * np.max(out)


INSTEAD = {
    "sums of windows from 1.5": (
        lambda x: lax.reduce_window(x, jnp.float32(1.5), lax.add, (1, 3), (1, 1), "VALID"),
        "differ in how often .* add the initial value afterwards",
        lambda x: lax.reduce_window(x, jnp.float32(0), lax.add, (1, 3), (1, 1), "VALID") + 1.5,
    ),
    "a frame of sums from 1.5": (
        lambda x: lax.reduce_window(x, jnp.float32(1.5), lax.add, (1, 3), (1, 1), "SAME"),
        "differ in how often .* add the initial value afterwards",
        lambda x: lax.reduce_window(x, jnp.float32(0), lax.add, (1, 3), (1, 1), "SAME") + 1.5,
    ),
    "sums from 0.7": (
        lambda x: lax.reduce(x, jnp.float32(0.7), lax.add, (1,))[:, None],
        "differ in how often .* add it afterwards",
        lambda x: lax.reduce(x, jnp.float32(0), lax.add, (1,))[:, None] + 0.7,
    ),
    "products of a window": (
        lambda x: lax.reduce_window(x, 1.0, lax.mul, (1, 2), (1, 2), "VALID"),
        "bounded for sums, maxima and minima .* write a product of windows as one of strided slic",
        lambda x: x[:, ::2] * x[:, 1::2],
    ),
    "products": (
        lambda x: lax.reduce(x, jnp.float32(1), lax.mul, (1,))[:, None],
        r"'reduce'.* write a product as jnp\.prod",
        lambda x: jnp.prod(x, axis=1, keepdims=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.parametrize("method", ["interval", "crown"])
def test_what_is_not_rewritten_names_its_reason_and_what_is_bounded(name, method):
    refused, reason, instead = INSTEAD[name]
    x, y = jnp.full((1, 4), 0.6), jnp.array([0])

    def bounds(fn):
        head = jnp.ones((fn(x).shape[1], 2)).at[:, 1].set(-1.0)
        model = Model(lambda head, x: fn(x) @ head, head)
        return certify.margin_bounds(model, x, y, norm=np.inf, eps=0.1, method=method)

    with pytest.raises(ValueError, match=reason):
        bounds(refused)
    assert np.isfinite(bounds(instead)[0, 1])


def test_running_log_sums_are_exact_but_for_their_rounding():
    fn = lambda x: lax.cumlogsumexp(x, axis=0)  # noqa: E731
    x = np.random.default_rng(0).normal(size=300).astype(np.float32) * 5
    least, most = ends(interval.interpret(jax.make_jaxpr(fn)(x), [fresh(x, x)])[0])
    least, most = np.asarray(least), np.asarray(most)
    exact = np.logaddexp.accumulate(x.astype(np.longdouble))
    assert np.all((least <= exact) & (exact <= most))
    assert np.max(most - least) < 0.5


@pytest.mark.parametrize("far", [0, 30, 900, 2e4, 1e7])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_waves_are_bounded_wherever_they_are(name, far):
    rng = np.random.default_rng(0)
    middle, reach = far + rng.uniform(-4, 4, (1, 500)), 10 ** rng.uniform(-4, 1.2, (1, 500))
    lower, upper = (np.float32(middle + s * reach) for s in (-1, 1))
    eqn = jax.make_jaxpr(getattr(lax, name))(jnp.ones(())).eqns[0]
    lines = TABLE[name].lines(eqn, [(jnp.asarray(lower), jnp.asarray(upper))], [True])
    least, most = interval.over(jax.make_jaxpr(getattr(lax, name))(lower), lower, upper)
    (view,) = lines.views
    parts = view.low, lines.low, view.up, lines.up, least, most
    low, below, up, above, least, most = (np.asarray(part).astype(float) for part in parts)
    loose = np.full((4, *lower.shape), np.inf)
    for share in np.linspace(0, 1, 2001):
        z = lower.astype(float) + share * (upper.astype(float) - lower)
        true = getattr(np, name)(z)
        gaps = true - (low * z + below), up * z + above - true, true - least, most - true
        loose = np.minimum(loose, gaps)
    assert np.all(loose >= 0)
    assert far > 1000 or np.max(loose) < 3e-6 * (60 + far)


LIRPA = {
    "two layers": {
        1e-3: [0.56170636, 1.694438, 0, 0.95668155],
        0.05: [0.08961499, 1.3410017, 0, 0.5821811],
        0.2: [-2.2991612, -1.403269, 0, -1.9245563],
    },
    "of the input": {
        1e-5: [0.20997672, 0.50564301, 0, 0.77913982],
        1e-4: [0.20953923, 0.50526851, 0, 0.77880305],
        1e-3: [0.20558563, 0.50187546, 0, 0.775855],
        0.01: [0.16549566, 0.46749666, 0, 0.7458716],
        0.1: [-0.24042118, 0.11932646, 0, 0.44136789],
    },
}
"""Lower bounds of the margins of the first sample, by ``CROWN`` of auto_LiRPA 0.3 in float32."""


@pytest.mark.parametrize("net", LIRPA)
def test_sines_are_bounded_as_by_auto_lirpa(net):
    rng = np.random.default_rng(0)
    sizes = ((8, 16), 2.0), ((16, 16), 1.5), ((16, 4), 1.0)
    weights = [jnp.asarray(rng.normal(size=s) * f / np.sqrt(s[0]), jnp.float32) for s, f in sizes]
    x = jnp.asarray(rng.uniform(0.1, 0.9, (8, 8))[:1], jnp.float32)
    model = {
        "two layers": Model(lambda w, x: jnp.sin(jnp.sin(x @ w[0]) @ w[1]) @ w[2], weights),
        "of the input": Model(lambda w, x: jnp.sin(x) @ w[0][:, :4], weights),
    }[net]
    y = jnp.argmax(model(x), axis=-1)
    clean = np.asarray(jnp.take_along_axis(model(x), y[:, None], axis=1) - model(x))
    rivals = np.arange(4) != np.asarray(y)[:, None]
    for eps, theirs in LIRPA[net].items():
        low = certify.margin_bounds(model, x, y, norm=np.inf, eps=eps, box=None)
        lost, allowed = (clean - np.asarray(bound) for bound in (low, [theirs]))
        assert np.all(lost[rivals] <= 1.5 * allowed[rivals]), eps


def described(own):
    """One row of the page."""
    lines = "own" if own.lines is not None else "cells" if own.fuses else "interval"
    lines = "interval" if own.compares else lines
    lines = "affine" if own.affine is not None and own.lines is None else lines
    error = "by the exponent" if callable(own.error) else " / ".join(f"{e:g}" for e in own.error)
    error = "exact" if not callable(own.error) and own.exact else error
    kinds = {
        "each entry alone": own.elementwise, "grows": own.monotone == 1,
        "falls": own.monotone == -1, "jumps": own.continuous is False,
        "jumps with companions": callable(own.continuous), "homogeneous": own.homogeneous,
        "sums": own.sums,
        f"in operands {', '.join(map(str, own.operands or ()))}": own.operands is not None,
    }  # fmt: skip
    told = ", ".join(kind for kind, holds in kinds.items() if holds)
    return f"| `{own.name}` | {lines} | {error} | {told} |"


def test_the_page_lists_every_record():
    """To write it anew, put ``made`` between the comments."""
    text = (ROOT / "docs" / "primitives.md").read_text()
    begin = "<!-- table: made by tests/test_certify_primitives.py -->\n"
    head = "| Primitive | Lines | Error | Kind |\n| --- | --- | --- | --- |\n"
    records = [TABLE[name] for name in sorted(TABLE) if name != activation.primitive.name]
    made = head + "".join(described(own) + "\n" for own in records)
    assert text.split(begin)[1].split("<!-- end of table -->")[0] == made
    code = text.split("```python\n")[1].split("```")[0]
    functions = (ROOT / "wdjax" / "bounds" / "primitives" / "functions.py").read_text()
    shown = "".join(line.split("#")[0] for line in code.splitlines())
    assert "".join(shown.split()) in "".join(functions.split()), "the example is not the record"
