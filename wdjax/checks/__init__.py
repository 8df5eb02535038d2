"""Checks of the arguments of public functions, before any work is done.

An argument first passes `arguments`, which checks what it is: float samples, integer labels, a
typed key, an attack or model (this works inside a trace too). Then `validate` checks the numbers
outside traces: finite, in the box, labels in range, radii at least 0. `independence` checks that a
model treats each sample alone; `batch_axis` proves this from the model's program, by the rules of
`axis_rules`, which say for each primitive where the batch axis goes. Without a proof the model is
evaluated on several batches and compared. `purity` refuses functions that no longer are what JAX
compiled. `forward_mode` makes the errors of functions that work on the host only, or have no
reverse-mode gradient; they name an alternative.

Open `validate` first. To check a new kind of argument: a function and a row in ``_KINDS`` of
`arguments`. To prove more models independent: a rule in ``RULES`` of `axis_rules`.
"""
