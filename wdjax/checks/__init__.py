"""What every public function asks of its arguments, before any work is done.

`arguments` checks kinds and types, which tracers have too; `validate` checks the numbers: finite,
in the box, labels in range. `independence` asks whether a model treats each sample alone, which
`batch_axis` proves from its program where it can. `forward_mode` refuses gradients and traces of
what has none, and names what has. Open `validate` first.
"""
