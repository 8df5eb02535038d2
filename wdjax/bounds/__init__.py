"""From a traced program to bounds of its outputs over a region of inputs.

Preparing: `graph` flattens a model's program into equations, with calls inlined, loops unrolled and
some primitives replaced by others (`rewritten`); `explicit` writes implicit broadcasts and products
of two variable values out; `fused` makes one node of a scalar activation such as GELU.

What is known of a primitive is one `record`; the folder `primitives` has all of them, one family a
file: interval rule (written in `affine_rules`, `nonlinear` and `decisions`, for integers in
`whole`), linear relaxation, called lines (written in `relax`), rounding error, and properties.
`activation` computes lines of fused activations and of functions without lines of their own;
`continuity` finds programs that may jump.

Bounding: `domain` has the values of interval arithmetic, and `interval` walks the program forwards
with them. `network` sorts equations into affine and nonlinear ones. `crown` sends `coefficients`
backwards, through affine equations by transposition and through nonlinear ones by their lines,
until `region` minimises the linear function over the inputs (concretises it; `moved_mass` does so
where mass moves between pixels). In l2 `coupled` relaxes the rectifiers of a layer together, which
lie in a ball by the norms that `spectral` bounds. `coarse` decides easy neurons first;
`first_layer` bounds values that are affine in the input; `slopes` optimises the free slopes of
lines by Adam (alpha-CROWN). `margins` bounds all margins of a batch: it says which of these each
method runs, and for how many steps. `linear_outputs` bounds any linear functions of the outputs
over boxes. `leaves` bounds the subproblems of the branch and bound over ReLU signs that
:mod:`wdjax.certify.signs` runs, and ranks the ReLUs to split next; `rebounded` bounds the
operands of all later ReLUs anew in a subproblem; `output_constraint` does so where the property
would be violated.

Open `margins` first, then `crown`. To add a primitive: one record in the file of its family in
`primitives` (``docs/primitives.md`` has an example), an interval rule and lines if it needs new
ones, and a row in ``tests/test_certify_ulps.py``, which measures its error.
"""
