"""What carries a search on: from samples and an attack to adversarial points, measured again.

`driver` is the front door, :func:`wdjax.search` and :func:`wdjax.run`. It hands the samples to
`rounds`, which picks batches of those that have something left to do and takes them on by the steps
of `track`; `loop` repeats rounds, reports, saves and resumes; `identity` says which checkpoint
belongs to what; `batching` chooses sizes of batches; `diagnosis` warns of results that may
overstate robustness. `tasks`
keeps what longer commands have done. Open `driver` first.
"""
