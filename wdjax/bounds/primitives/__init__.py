"""One record for each primitive; :mod:`wdjax.bounds.record` documents their fields.

`linear` holds operations that are affine in each operand, `functions` entrywise functions, `order`
maxima, sorting and rounding, `logic` comparisons and selections. Importing this registers them.
"""

from wdjax.bounds import record
from wdjax.bounds.primitives import functions, linear, logic, order
from wdjax.bounds.record import TABLE

__all__ = ["TABLE"]

record.add(*linear.RECORDS, *functions.RECORDS, *order.RECORDS, *logic.RECORDS)
