"""Real servers on this machine, for tests, the demo and benchmarks; not part of the tool."""
