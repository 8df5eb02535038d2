"""Proofs of verdicts on ONNX nets, and the program that checks them.

A search (``wdjax.certify.property``, ``python -m wdjax verify --proof``) writes a proof down by
`recorder`: the tree of splits of a box, and the numbers from which each part's bound follows.
`checker` decides whether it shows what it claims. It shares no code with ``wdjax.bounds``: it reads
the net by `real_net` as a function of real numbers, bounds its nonlinear functions by the lines of
`curves`, and computes all in float64 with every rounding charged. Its only other parts are the
readers of ``wdjax.files``.

Open `checker` first; docs/proofs.md has the format and the mathematics.
"""
