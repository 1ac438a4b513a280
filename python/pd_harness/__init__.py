"""Real servers on this machine, for tests, the demo and measurements; no part of the tool."""
