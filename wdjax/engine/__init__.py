"""Runs attacks: from samples and an attack to adversarial points, which are then measured again.

`driver` holds the entry points, :func:`wdjax.search` and :func:`wdjax.run`. `trees` flattens
samples that are pytrees; a gate in :mod:`wdjax.checks` checks all arguments. Inside a trace `track`
does the whole search. At top level `rounds` gathers the unfinished samples into batches and applies
the steps of `track` to them; `loop` repeats rounds, reports, saves and resumes; `identity` computes
the digest that ties a checkpoint to its search; `batching` chooses batch sizes. `diagnosis` warns
where a result may overstate robustness; `tasks` stores the finished parts of longer commands. Open
`driver` first.
"""
