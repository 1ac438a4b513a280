"""What happens to each request between prefill and decode: metrics, and a line for each request.

    log         notes events, and writes what they amount to
    rooms       follows each room through its states
    series      the values behind `/metrics`
    files       writes them where the engine's `/metrics` reads
    records     a line of JSON for each request
    failures    which kind of failure a reason tells of

Imports nothing of the engine, so that tests and `sglang-pd trace` use it without one.
"""

from .failures import KINDS, failure_kind
from .log import STALL_SECONDS, TransferLog
from .records import VARIABLE, RequestRecord
from .rooms import STATES
from .series import MAX_PEERS, METRICS
