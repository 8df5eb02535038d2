"""From attacks and certificates to a page: what is robust, and how far the two sides are apart.

`audit` runs attacks and certificates on a model and returns a
:class:`~wdjax.report.evidence.Sandwich` of `evidence` entries; `summary` turns them into plain
numbers for JSON, `page` into HTML, `plots` into figures. Open `audit` first.
"""
