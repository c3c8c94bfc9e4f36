"""The load generator and its benchmarks: `scripts/bench`.

`workload` and `figures` are pure: what is sent, and what the times mean. `load` is the closed loop, whatever it sends
to. `emberline_client` speaks to our server, `server` starts one, `processes` watches it, `report` writes. `serve` and
`death` are the commands. Nothing of the product is imported but the stubs that any caller has.
"""
