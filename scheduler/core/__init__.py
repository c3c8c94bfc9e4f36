"""The ring that decides: standard library only; no clock, I/O, threads, randomness or logging."""
