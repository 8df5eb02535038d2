"""One record a primitive, one family a file; open :mod:`wdjax.bounds.record` for what they say.

`linear` holds what is affine in each operand, `functions` what acts on every entry alone, `order`
maxima, sorting and rounding, `logic` comparisons and selections. Importing this makes them known.
"""

from wdjax.bounds import record
from wdjax.bounds.primitives import functions, linear, logic, order
from wdjax.bounds.record import TABLE

__all__ = ["TABLE"]

record.add(*linear.RECORDS, *functions.RECORDS, *order.RECORDS, *logic.RECORDS)
