"""`scripts/chaos`: faults against a real server under load, and a judge of what its clients saw.

Nothing of the product is imported here. The server is `scripts/serve` as a subprocess, its protocol is learned through
reflection, its logs are JSON lines on stderr; faults come from outside (signals, limits, hostile clients) and through a
`sitecustomize` on the PYTHONPATH of its processes (`injected/`).

`history.py` is what clients saw and `rules.py` what they may have seen: both pure. `asks.py` makes the load, `load.py`
sends it, `faults.py` is the catalogue, `scenarios.py` puts them together, `figures.py` measures the table of
docs/reliability.md.
"""
