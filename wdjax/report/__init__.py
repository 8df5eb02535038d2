"""From attacks and certificates to a page that shows what is robust and what is unknown.

`audit` runs attacks and certificates on a model and returns a
:class:`~wdjax.report.evidence.Sandwich` of `evidence` entries; `summary` converts it to plain
numbers for JSON, `page` to HTML, `plots` to figures. Open `audit` first.
"""
