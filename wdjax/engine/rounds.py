"""A search at top level, in rounds: every unfinished sample takes the same number of steps.

One compiled program gathers a batch and steps, another, whose argument is donated, scatters. Their
shapes do not depend on how many samples are correct or unfinished: there are two batch sizes, the
smaller one for the remainder, and the number of rows is padded to one of a few values.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from wdjax import distinct, identity, loops, parallel, program
from wdjax.checks import validate
from wdjax.core import Array, Attack, Found, Info, Progress, PyTree, Samples, Stage, Victim
from wdjax.engine import batching, diagnosis, loop, track
from wdjax.engine.track import Track
from wdjax.xla_cpu import on_cpu

_LONG = 4e10
"""Stages in which the model multiplies at least so often for one batch, in forward passes, get a
second, smaller batch size: it saves more time than its compilation takes, a second for a small net.
"""
_PATIENCE = 0.2
"""On a CPU, the maximum number of steps in one program, as a share of the stage's. More steps in a
program save up to a quarter of PGD's time, but a sample that finishes goes on to the program's
end."""
_WORTH = 4
"""On a CPU, the minimum number of steps for which a loop is compiled: that takes 1.5 times as long
as compiling a single step."""


class Plan(NamedTuple):
    """What is searched, and in which batches: constant. Sizes and rows are per device."""

    attack: Attack
    victim: Victim
    samples: Samples
    """``[devices * rows, ...]`` leaves."""
    size: int
    small: int
    """The batch size for the remainder."""
    work: float
    """How often the model multiplies for one sample."""
    rows: int
    """The number of samples on a device, padded."""
    mesh: Mesh | None
    clean: np.ndarray
    """``[devices * rows]``: the criterion at the samples."""
    turns: tuple[int, ...]
    """For each stage, the number of steps in one program."""

    @property
    def forms(self) -> tuple[Attack, Attack]:
        """The attacks that are compiled for its beginning and for the rest of it."""
        return getattr(self.attack, "shared", (self.attack, self.attack))

    @property
    def devices(self) -> int:
        return parallel.mesh_size(self.mesh)


class Request(NamedTuple):
    """How a search begins and what it records, as in :func:`wdjax.checks.validate.check_search`."""

    start: Array | None
    sample_index: Array
    only: np.ndarray | None
    key: Array | None
    skip_misclassified: bool
    history: bool


class Search(NamedTuple):
    """The state of a search, a pytree that can be saved between rounds."""

    track: Track
    chosen: np.ndarray
    """``[devices * rows]``: which samples are attacked."""
    active: np.ndarray
    """``[devices * rows]``: which samples have steps left in this stage."""
    stage: int
    step: int
    history: Info | None
    """``[steps, devices * rows]`` leaves on the host, or None."""


def search(
    attack: Attack,
    victim: Victim,
    samples: Samples,
    start: Array | None,
    sample_index: Array,
    only: np.ndarray | None,
    *,
    key: Array | None,
    skip_misclassified: bool,
    history: bool,
    batch_size: int | None,
    mesh: Mesh | None,
    callback: Callable[[Progress], Any] | None,
    checkpoint: str | PathLike[str] | None,
    every: float,
) -> tuple[Found, np.ndarray]:
    """A search of checked arguments (:func:`wdjax.checks.validate.check_search`), in rounds.

    Returns what it found, by its end or by the round in which the callback returned a true value,
    and the criterion at the samples, ``[n]``.
    """
    plan = _plan(attack, victim, samples, batch_size, mesh)
    request = Request(start, sample_index, only, key, skip_misclassified, history)

    def attempt(size: int) -> tuple[Found, np.ndarray]:
        sized = plan._replace(size=size, small=max(1, size // 4))
        return _carry(sized, request, callback, checkpoint, every)

    return batching.halving(attempt, plan.size, mesh, whole=plan.rows)


def _carry(
    plan: Plan,
    request: Request,
    callback: Callable[[Progress], Any] | None,
    checkpoint: str | PathLike[str] | None,
    every: float,
) -> tuple[Found, np.ndarray]:
    """:func:`search` in the plan's batches."""
    attack, victim, samples = plan[:3]
    n, mark = len(samples.y), b""
    plan, begun = _first_search(plan, request)

    def report(search: Search) -> Any:
        return None if callback is None else callback(_progress(plan, search, n))

    about: dict[str, Any] = {"attack": attack, "criterion": victim.criterion, "samples": n}
    if checkpoint is not None:
        lengths = [(stage.length, stage.cycles) for stage in attack.stages]
        traced = track.programs(attack, victim, samples, request.start, request.key)
        given = *request[:4], np.array([request.skip_misclassified, request.history])
        mark = identity.digest(traced, lengths, attack, victim, samples, *given)
        about["largest eps"] = None if samples.eps is None else float(jnp.max(samples.eps))
    last = loop.carry(
        begun,
        functools.partial(_advance, plan),
        functools.partial(_finished, plan),
        report=report,
        checkpoint=checkpoint,
        every=every,
        identity=mark,
        about=about,
        mesh=plan.mesh,
    )
    return _finish(plan, last, n, request.skip_misclassified), plan.clean[:n]


def _first_search(plan: Plan, request: Request) -> tuple[Plan, Search]:
    """Evaluates all samples, chooses those to attack and calculates the attack's first state.

    Returns the plan with all of its samples' rows.
    """
    attack, victim, samples = plan[:3]
    n, whole = len(samples.y), plan.devices * plan.rows
    rows = samples, request.start, request.sample_index
    given = jax.tree.map(functools.partial(_padded, rows=whole), rows)
    parallel.check_same((given, request.only, attack), plan.mesh)
    samples, start, sample_index = parallel.shard(given, plan.mesh)
    keys = None if request.key is None else track.keys(request.key, sample_index)
    used = -(-min(n, plan.rows) // plan.size)
    blocks = np.arange(used * plan.size, dtype=np.int32).reshape(used, 1, -1)
    blocks = blocks.repeat(plan.devices, axis=1)
    given = samples.x, samples.y
    out, clean, fine = _whole(plan, blocks, lambda index: _evaluate(victim, *_rows(given, index)))
    clean, fine, y = map(np.asarray, parallel.local((clean, fine, samples.y)))
    _refuse_faults(fine[:n])
    # In NumPy, so that nothing is compiled for each n.
    seen = jax.tree.map(lambda leaf: np.asarray(leaf)[:n], parallel.local(out))
    diagnosis.warn_of_logits(seen, y[:n], clean[:n])
    samples = samples._replace(out=out)
    first = functools.partial(_first, plan.forms[0], victim, samples, start, keys)
    chosen = np.arange(whole) < n
    if request.only is not None:
        chosen[:n] &= request.only
    if request.skip_misclassified:
        chosen &= ~(clean > 0)
    search = Search(_whole(plan, blocks, first), chosen, chosen, -1, 0, None)
    if request.history:
        search = search._replace(history=_blank(clean, attack.stages))
    plan = plan._replace(samples=samples, clean=clean)
    plan = plan._replace(turns=_turns(plan, search))
    return plan, _next_stage(plan, search)


def _whole(plan: Plan, blocks: np.ndarray, block: Callable[[np.ndarray], PyTree]) -> PyTree:
    """All rows, from a function of the numbers ``[devices, size]`` of some: those of ``blocks``.

    They are set one after another, since a program that joins them all takes longer to compile the
    more there are. Other rows are padding: copies of the first on their device.
    """
    part = block(blocks[0])
    if plan.size == plan.rows:
        return part
    whole = _rows(part, np.zeros((plan.devices, plan.rows), np.int32))
    for number, index in enumerate(blocks):
        whole = _set_rows(whole, index, block(index) if number else part)
    return whole


def _finished(plan: Plan, search: Search) -> bool:
    """Whether no stage is left."""
    return int(search.stage) >= len(plan.attack.stages)


def _advance(plan: Plan, search: Search) -> Search:
    """One round: every active sample takes up to ``plan.turns`` steps of the current stage.

    The track of the old search is donated: only the returned search may be used afterwards.
    """
    number, row = int(search.stage), int(search.step)
    stage, moving, history = plan.attack.stages[number], search.track, search.history
    most = plan.turns[number]
    steps = min(most, stage.length - row)
    left = stage.length - row - steps
    if history is not None:  # After a resume it consists of read-only JAX arrays.
        history = jax.tree.map(lambda leaf: np.require(leaf, requirements="W"), history)
    batches, seen = _batches(plan, np.asarray(search.active), stage.length), []
    counts, record = np.array([steps, left], np.int32), history is not None
    # The number of steps is traced but for a history's rows, so stages of all lengths share a loop.
    form = _like(plan.attack, number), most if record else min(most, 2), record
    for index, _ in batches:
        given = _rows((plan.samples, moving), index)
        batch, *flags = _steps(plan.forms[1], plan.victim, *given, counts, *form)
        moving = _set_rows(moving, index, batch)
        seen.append(flags)
    if stage.couple is not None:
        chosen = np.asarray(search.chosen)
        moving = _couple(plan.attack, plan.samples, moving, chosen, number)
    active = np.array(search.active)
    for (_, positions), (over, info) in zip(batches, parallel.local(seen)):
        real = positions < len(active)
        if stage.done is not None or stage.cycles:
            active[positions[real]] = ~np.asarray(over)[real]
        if history is not None:
            first = _offset(plan, number) + row
            for leaf, values in zip(history, info):
                leaf[first : first + steps, positions[real]] = np.asarray(values)[:steps, real]
    search = Search(moving, search.chosen, active, number, row + steps, history)
    return _next_stage(plan, search) if left == 0 or not active.any() else search


def _next_stage(plan: Plan, search: Search) -> Search:
    """Enters the next stage in which a sample has steps to take, or ends the search."""
    attack, stages, chosen = plan.attack, plan.attack.stages, np.asarray(search.chosen)
    for number in range(int(search.stage) + 1, len(stages)):
        active = chosen
        if stages[number].done is not None:
            state = search.track.state
            active = chosen & ~np.asarray(
                parallel.local(_done(plan.forms[1], state, _like(attack, number)))
            )
        if stages[number].length and active.any():
            moving = search.track
            moving = _enter(attack, moving) if track.cyclic(attack) else moving
            return search._replace(track=moving, active=active, stage=number, step=0)
    return search._replace(active=np.zeros_like(chosen), stage=len(stages), step=0)


def _like(attack: Attack, number: int) -> int:
    """The first stage that differs from stage ``number`` in length only: they share programs."""
    stages = [stage._replace(length=0) for stage in attack.stages]
    return stages.index(stages[number])


def _offset(plan: Plan, number: int) -> int:
    """The number of steps in all stages before stage ``number``."""
    return sum(stage.length for stage in plan.attack.stages[:number])


def _progress(plan: Plan, search: Search, n: int) -> Progress:
    """How far the search of ``n`` samples has come."""
    stages, number = plan.attack.stages, int(search.stage)
    active, chosen = np.asarray(search.active), int(np.sum(search.chosen))
    before, total = _offset(plan, number), _offset(plan, len(stages))
    now, going = (stages[number].length if number < len(stages) else 0), int(active.sum())
    taken = before * chosen + now * (chosen - going) + int(search.step) * going
    return Progress(taken, total * chosen, np.flatnonzero(active[:n]))


def _finish(plan: Plan, search: Search, n: int, skip_misclassified: bool) -> Found:
    """What has been found so far, measured at the points: a ``Found`` of ``[n]`` leaves.

    The rows from ``n`` on are padding and are cut off. ``skip_misclassified`` is passed to
    :func:`track.measure`. The history, if there is one, becomes ``[steps, n]``.
    """
    x, chosen = np.asarray(parallel.local(plan.samples.x)), np.asarray(search.chosen)
    found, seen = _points(plan, search)
    given = found, x, plan.clean, seen, chosen
    found = track.measure(np, plan.attack.ball, *given, skip_misclassified)
    found = jax.tree.map(lambda leaf: jax.device_put(leaf[:n]), found)
    if search.history is None:
        return found
    history = jax.tree.map(lambda leaf: np.array(leaf[:, :n]), search.history)
    taken = (history.forwards > 0) | (history.gradients > 0)
    for row in range(1, len(taken)):  # A step not taken repeats the value before it.
        history.value[row] = np.where(taken[row], history.value[row], history.value[row - 1])
    return replace(found, history=history)


def _points(plan: Plan, search: Search) -> tuple[Found, tuple[np.ndarray, np.ndarray]]:
    """The attack's points and the model's criterion there, on the host.

    Leaves ``[devices * rows, ...]``; 0 for samples that were not attacked.
    """
    chosen = np.asarray(search.chosen)
    batches = _batches(plan, chosen)

    def look(index: np.ndarray) -> tuple[Found, tuple[Array, Array]]:
        taken, batch = _rows((plan.samples, search.track), index)
        found = _reach(plan.forms[1], taken, batch)
        return parallel.local((found, _evaluate(plan.victim, found.x_adv, taken.y)[1:]))

    first = look(batches[0][0]) if batches else jax.eval_shape(look, _nobody(plan))
    whole = jax.tree.map(lambda row: np.zeros((len(chosen), *row.shape[1:]), row.dtype), first)
    for number, (index, positions) in enumerate(batches):
        rows = look(index) if number else first
        real = positions < len(chosen)
        for leaf, taken in zip(jax.tree.leaves(whole), jax.tree.leaves(rows)):
            leaf[positions[real]] = np.asarray(taken)[real]
    return whole


def _plan(
    attack: Attack, victim: Victim, samples: Samples, batch_size: int | None, mesh: Mesh | None
) -> Plan:
    """Chooses the batch sizes: ``batch_size``, or by default what the model's memory allows."""
    if any(stage.couple and stage.cycles for stage in attack.stages):
        raise ValueError("a stage that couples samples cannot look for cycles of one of them.")
    victim = victim._replace(model=parallel.replicate(victim.model, mesh))
    devices = parallel.mesh_size(mesh)
    uneven = getattr(attack, "uneven", False)
    size, rows = batching.sizes(victim.model, samples.x, batch_size, devices, uneven)
    small = max(1, size // 4)
    work = batching.work(victim.model, samples.x)
    return Plan(attack, victim, samples, size, small, work, rows, mesh, np.empty(0), ())


def _padded(leaf: Array, rows: int) -> Array:
    """Pads to ``rows`` by repeating the last row, on the host, so that nothing is compiled."""
    if len(leaf) == rows:
        return validate.on_device(leaf)
    host = np.asarray(leaf)
    return jax.device_put(np.concatenate([host, host[-1:].repeat(rows - len(host), axis=0)]))


def _turns(plan: Plan, search: Search) -> tuple[int, ...]:
    """For each stage, the number of steps in one program; 1 if a loop would run slowly."""
    counts, index, record = np.zeros(2, np.int32), _nobody(plan), search.history is not None
    moving = jax.eval_shape(functools.partial(track.enter, plan.attack), search.track)
    given = jax.eval_shape(_rows, (plan.samples, moving), index)

    def looped(number: int, most: int) -> int:
        form = counts, number, most, record
        steps = _steps.trace(plan.forms[1], plan.victim, *given, *form)
        return most if program.loops_well(steps.jaxpr) else 1

    most = [_chunk(stage) for stage in plan.attack.stages]
    if type(plan.forms[1]) is not type(plan.attack):  # Stages of all lengths share a loop.
        most = [max(few, min(2, s.length)) for few, s in zip(most, plan.attack.stages)]
    return tuple(looped(number, steps) if steps > 1 else 1 for number, steps in enumerate(most))


def _chunk(stage: Stage) -> int:
    """Maximum number of steps in one program; samples that finish earlier wait for its end."""
    if stage.couple is not None:
        return 1
    if not on_cpu():
        return min(loop.CHUNK, stage.length)
    most = min(loop.CHUNK, int(_PATIENCE * stage.length))
    return most if most >= _WORTH else 1


def _batches(
    plan: Plan, active: np.ndarray, length: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of active rows: a list of their numbers on the device, ``[devices, size]``, and in
    all, ``[devices * size]``.

    Padding has the number ``rows`` on the device and that of all rows in all. A long stage of a
    large net uses the small batch for the remainder; elsewhere its compilation would not pay.
    """
    shares = [np.flatnonzero(part) for part in active.reshape(plan.devices, plan.rows)]
    count = max(map(len, shares))
    full, rest = divmod(count, plan.size)
    small = -(-rest // plan.small)
    if small * plan.small >= plan.size or length * plan.size * plan.work < _LONG:
        full, small = full + (rest > 0), 0
    sizes = [plan.size] * full + [plan.small] * small
    padded = np.full((plan.devices, sum(sizes)), plan.rows, np.int32)
    for row, positions in zip(padded, shares):
        row[: len(positions)] = positions
    indices = np.split(padded, np.cumsum(sizes)[:-1], axis=1) if sizes else []
    first = plan.rows * np.arange(plan.devices)[:, None]
    none = plan.rows * plan.devices
    return [(index, np.where(index < plan.rows, index + first, none).ravel()) for index in indices]


def _nobody(plan: Plan) -> np.ndarray:
    """An index for tracing: only its shape matters."""
    return np.zeros((plan.devices, plan.size), np.int32)


def _take(tree: PyTree, index: Array) -> PyTree:
    """Gathers rows ``index [devices, size]`` on each device: ``[devices * size, ...]``."""

    def take(leaf: Array) -> Array:
        if len(index) == 1:
            return leaf.at[index[0]].get(mode="clip")
        shares = leaf.reshape(len(index), -1, *leaf.shape[1:])
        rows = jax.vmap(lambda part, positions: part.at[positions].get(mode="clip"))(shares, index)
        return rows.reshape(-1, *leaf.shape[1:])

    return jax.tree.map(take, tree)


def _put(tree: PyTree, index: Array, rows: PyTree) -> PyTree:
    """Scatters rows back, the inverse of :func:`_take`; padding is dropped."""

    def put(leaf: Array, new: Array) -> Array:
        if len(index) == 1:
            return leaf.at[index[0]].set(new, mode="drop")
        shares = leaf.reshape(len(index), -1, *leaf.shape[1:])
        new = new.reshape(*index.shape, *leaf.shape[1:])
        set_rows = jax.vmap(lambda part, positions, rows: part.at[positions].set(rows, mode="drop"))
        return set_rows(shares, index, new).reshape(leaf.shape)

    return jax.tree.map(put, tree, rows)


_evaluate = distinct.jit(track.evaluate)


_rows = distinct.jit(_take)
_set_rows = distinct.jit(_put, donate_argnums=0)


@distinct.jit
def _first(
    attack: Attack,
    victim: Victim,
    samples: Samples,
    start: Array | None,
    keys: Array | None,
    index: Array,
) -> Track:
    return track.first_track(attack, victim, *_take((samples, start, keys), index))


@functools.partial(distinct.jit, static_argnums=(5, 6, 7), donate_argnums=3)
def _steps(
    attack: Attack,
    victim: Victim,
    taken: Samples,
    batch: Track,
    counts: Array,
    number: int,
    most: int,
    record: bool,
) -> tuple[Track, Array, Info | None]:
    """Takes ``counts[0]`` steps of stage ``number`` on a batch.

    ``counts[1]`` are the steps of the stage that remain afterwards, and ``most`` the maximum of
    ``counts[0]``. Returns the batch's track, ``[n]`` booleans which of it are finished with the
    stage, and with ``record`` the steps' Info, ``[most, n]`` leaves. Programs of their own take a
    batch's rows, one for all stages, and set them: one that read some rows of an array and wrote
    others would copy all of it.
    """
    stage, (steps, left) = attack.stages[number], counts
    if most == 1:
        batch, recurs, info = track.step(stage, victim, taken, batch)
        seen = jax.tree.map(lambda leaf: leaf[None], info) if record else None
    else:
        batch, recurs, seen = _loop(stage, victim, taken, batch, steps, most if record else None)
    batch, over = track.freeze(stage, batch, recurs, left)
    return batch, over, seen


def _loop(
    stage: Stage, victim: Victim, taken: Samples, batch: Track, steps: Array, record: int | None
) -> tuple[Track, Array, Info | None]:
    """Takes ``steps`` steps (a traced number) of a stage on a batch, in one loop.

    Returns the batch, ``[n]`` booleans whether a state was that of two steps before, and, if
    ``record`` is the maximum number of steps instead of None, the steps' Info, ``[record, n]``
    leaves. XLA takes what depends on the labels alone out of a loop, one copy for each use of the
    loss, and no longer sees that these uses compute the same: a barrier holds the labels inside.
    """
    seen = None
    if record is not None:
        shapes = jax.eval_shape(functools.partial(track.step, stage, victim), taken, batch)[2]
        seen = jax.tree.map(lambda leaf: jnp.zeros((record, *leaf.shape), leaf.dtype), shapes)

    def body(i: Array, carried: PyTree) -> PyTree:
        batch, _, seen = carried
        here = taken._replace(y=lax.optimization_barrier((taken.y, i))[0])
        batch, recurs, info = track.step(stage, victim, here, batch)
        if seen is not None:
            seen = jax.tree.map(lambda rows, row: rows.at[i].set(row), seen, info)
        return batch, recurs, seen

    return loops.fori_loop(0, steps, body, (batch, jnp.zeros(len(taken.y), bool), seen))


@functools.partial(distinct.jit, static_argnums=4, donate_argnums=2)
def _couple(attack: Attack, samples: Samples, moving: Track, chosen: Array, number: int) -> Track:
    couple = attack.stages[number].couple
    assert couple is not None
    return moving._replace(state=couple(samples, moving.state, chosen))


_enter = distinct.jit(track.enter, donate_argnums=1)
_reach = distinct.jit(track.reach)


@functools.partial(distinct.jit, static_argnums=2)
def _done(attack: Attack, state: PyTree, number: int) -> Array:
    done = attack.stages[number].done
    assert done is not None
    return done(state)


def _refuse_faults(fine: np.ndarray) -> None:
    if not fine.all():
        raise ValueError(
            "the model's outputs, or the criterion of them, are not finite for "
            f"{int((~fine).sum())} samples, first at index {int(np.argmin(fine))}; no robustness "
            "can be reported for such a model."
        )


def _blank(value: np.ndarray, stages: tuple[Stage, ...]) -> Info:
    """A history whose values are the criterion at the samples, ``[n]``, and whose counts are 0."""
    none = np.zeros((sum(stage.length for stage in stages), len(value)), np.int32)
    values = np.tile(value, (len(none), 1))
    leaves: tuple[Any, ...] = (values, none, none.copy(), none.copy(), none.astype(bool))
    return Info(*leaves)
