"""Audits: attacks and certificates on one model, checked against each other, as a page.

`audit` runs attacks over a range of radii, and the certificates of `proved`. Its result, a
``Sandwich`` of `evidence`, holds an entry for each attack and budget (points, accuracy, loss, exact
Wasserstein distance), the certified radii and the bounds of the loss; it is called a sandwich
because the true robust accuracy lies between certificates (below) and attacks (above). `evidence`
also has the invariants, which hold for every model: a broken one shows a fault of the model or the
library. `summary` turns a sandwich into plain numbers for JSON, `page` that JSON and the figures of
`plots` into one HTML file; `worst` shows single samples there, `html_table` has its tables, and
``wdjax/page.js`` is what a reader may try in it. `changes` compares two such JSON files. `audited`
holds the audit of one model, prints its table and saves its page; `leaderboard` is the page of many
jobs; `rounded` writes proved bounds rounded to the side on which they hold; `figures` makes figures
that notebooks show.

Open `audit` first. To add a default attack: a row in ``standard_attacks`` of `audit`; a default
certificate: a row in ``standard_certificates`` of `proved`. To add a check: an ``Invariant`` in
``invariants`` of `evidence`. To add a figure: a function of a sandwich in `plots`, and a row in
``pictures`` of `page`.
"""
