"""Attacks: every factory returns a :class:`wdjax.Attack` for :func:`wdjax.run`."""
