"""What measures a model runs it in float32, on devices whose products are less exact by default."""

import jax
import pytest
from test_misuse import CALLS, DEFENSE, MODEL, NET, PICTURE

import wdjax
from wdjax import ensembles, nppr, smoothing, training
from wdjax import transductive as games

pytestmark = pytest.mark.fast

# They train in JAX's default precision, or do not run a classifier.
OTHERS = {
    training.train,
    nppr.train_model,
    games.train_classifier,
    games.prepare,
    ensembles.lowered,
}


def spied(model, seen):
    """The model, which notes at each trace in what precision its products are."""

    def run(*given):
        seen.append(jax.config.jax_default_matmul_precision)
        return model.func(*given)

    return wdjax.Model(run, *model.args)


def is_run(value):
    """Whether a value of the table is a classifier, or a defense that holds one."""
    return any(value is one for one in (MODEL, PICTURE, DEFENSE))


def measuring():
    for function, given in CALLS.items():
        if function not in OTHERS and any(map(is_run, given.values())):
            yield pytest.param(function, given, id=f"{function.__module__}.{function.__name__}")


@pytest.mark.parametrize(("function", "given"), [*measuring()])
def test_products_are_exact_unless_the_user_says_otherwise(function, given):
    seen = []
    for name, value in given.items():
        if value is DEFENSE:
            given = given | {name: games.Fixed(spied(NET, seen))}
        elif is_run(value):
            given = given | {name: spied(value, seen)}
    if "bank" in given:
        given = given | {"bank": games.empty_bank(spied(NET, seen), 1)}
    short = {nppr.fit: {"schedule": nppr.Schedule(steps=2)}, smoothing.certify: {"n": 20}}
    with jax.default_matmul_precision(None):
        function(**given, **short.get(function, {}))
        assert jax.config.jax_default_matmul_precision is None
    assert seen
    assert set(seen) <= {"highest", "float32"}  # Two names of one.


@pytest.mark.parametrize("function", [training.train, nppr.train_model, games.train_classifier])
def test_training_takes_what_the_device_does_by_default(function):
    """Its attacks too, which would take most of the time."""
    seen = []
    given = CALLS[function] | {"model": spied(MODEL, seen)}
    if function is not games.train_classifier:
        given |= {"epochs": 1}
    with jax.default_matmul_precision(None):
        function(**given)
    assert "default" in seen
    assert None not in seen
