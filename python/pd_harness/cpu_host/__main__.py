"""Print the CPU host's environment, one NAME=VALUE per line, for `scripts/cpu_host.sh`.

Variables that the caller's environment already sets keep their values.
"""

import os

from pd_harness.cpu_host import ENVIRONMENT

for name, value in ENVIRONMENT.items():
    print(f"{name}={os.environ.get(name, value)}")
