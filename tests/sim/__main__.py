"""`python -m tests.sim [--seed N] [--num-seeds N] …`: simulates the scheduler; one JSON line per seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tests.sim.simulator import Simulation


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulate the scheduler under a load.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=1.0, help="rate of arrivals, relative")
    parser.add_argument("--fault-rate", type=float, default=0.0, help="share of the steps that fail")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.num_seeds):
        report = Simulation(
            seed, num_requests=arguments.num_requests, load=arguments.load, fault_rate=arguments.fault_rate
        ).run()
        print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
