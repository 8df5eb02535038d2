"""No class is taken for another, whatever the caches of JAX compare."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import wdjax
from wdjax import distinct
from wdjax.smoothing import noise

SIBLINGS = 150
"""With jax 0.10.2, ``jax.jit`` takes about fifteen of them for another."""


def siblings(register):
    """Objects of classes with the same fields, that multiply by 0, 1, 2, ..."""

    def sibling(number):
        @register
        @dataclasses.dataclass(frozen=True)
        class Times:
            unit: float = 1.0
            name: str = dataclasses.field(default="times", metadata={"static": True})

            def __call__(self, x):
                return x * self.unit * number

        return Times()

    return [sibling(number) for number in range(SIBLINGS)]


@pytest.mark.parametrize(
    ("jit", "register"),
    [
        (distinct.jit, jax.tree_util.register_dataclass),
        (jax.jit, distinct.register_dataclass),
    ],
    ids=["jit", "register_dataclass"],
)
def test_a_call_runs_the_program_of_the_class(jit, register):
    call = jit(lambda given, x: given["times"](x))
    said = [float(call({"times": times}, 1.0)) for times in siblings(register)]
    assert said == [*range(SIBLINGS)]


def test_a_trace_is_that_of_the_class():
    call = distinct.jit(lambda times, x: times(x))
    traced = [call.trace(times, 1.0).jaxpr for times in siblings(jax.tree_util.register_dataclass)]
    said = [jax.core.eval_jaxpr(one.jaxpr, one.consts, 1.0, 1.0)[0] for one in traced]
    assert [float(number) for number in said] == [*range(SIBLINGS)]


def test_structures_of_noises_differ():
    noises = noise.Gaussian(0.5), noise.Laplace(0.5), noise.Uniform(0.5)
    assert len({*map(jax.tree.structure, noises)}) == 3
    assert jax.tree.structure(noises[0]) != jax.tree.structure(noises[1])


def test_the_package_compiles_and_registers_in_one_way():
    package = Path(wdjax.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("jit", "register_dataclass"):
                home = ast.unparse(node.value)
                assert path.stem == "distinct" or home == "distinct", f"{path}: {home}.{node.attr}"


def test_options_are_those_of_jax_jit():
    def power(x, n, *more, scale=1.0):
        assert isinstance(n, int)
        return scale * x**n + sum(more)

    by_number, by_name = (
        distinct.jit(power, **how) for how in ({"static_argnums": 1}, {"static_argnames": "n"})
    )
    for call in (by_number, by_name):
        assert float(call(3.0, 2)) == float(call(3.0, n=2)) == 9.0
        assert float(call(3.0, 2, 1.0, scale=2.0)) == 19.0
    last = distinct.jit(lambda x, *more: x * len(more[1]), static_argnums=2)
    assert float(last(2.0, 1.0, "abc")) == 6.0
    x = jnp.ones(3)
    distinct.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()


def test_errors_name_the_argument():
    with pytest.raises(jax.errors.ConcretizationTypeError, match="argument speed"):
        distinct.jit(lambda speed: float(speed))(1.0)
