"""The load generator: arrivals and prompts before the run, time stamps during it, parsing after it."""
