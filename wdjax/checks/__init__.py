"""Checks of the arguments of public functions, before any work is done.

`arguments` checks kinds and types, which tracers have too; `validate` checks the numbers: finite,
in the box, labels in range. Its :func:`~wdjax.checks.validate.gate` does so at top level and inside
a trace. `independence` checks that a model treats each sample alone, which `batch_axis` proves from
its program where it can. `forward_mode` raises errors where a function cannot be traced or
differentiated, and names an alternative. Open `validate` first.
"""
