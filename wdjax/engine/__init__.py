"""Runs searches: from samples and an attack to adversarial points, measured again at the end.

`driver` has the entry points: :func:`wdjax.search` checks the arguments and returns a ``Found``;
:func:`wdjax.run` searches and then spends the budget: how much of each sample's mass moves. `trees`
flattens samples that are pytrees, `masks` leaves to an attack the coordinates that may move.
`track` has a search's pure functions on a batch: first state, step, points, measurement; it makes
the ``Found``. Inside a trace the driver applies them to all samples at once. At top level `rounds`
does: in a round every unfinished sample takes the same number of steps, in batches, and finished
samples leave (``freeze`` of `track` says which); `loop` repeats rounds until the search is
finished, reports, saves and resumes (trainings and fits use it, too). After the last round the
points are evaluated once more, and infeasible ones are replaced by the samples.

`batching` chooses batch sizes; `diagnosis` warns where a result may overstate robustness, and takes
a second look; `tasks` keeps the finished parts of longer commands. Open `driver` first. Nothing
needs to be added here for a new attack.
"""
