"""A bootstrap server of a prefill server, as decode ranks of releases after 0.5.9 query it."""

import http.server
import json
import threading
from urllib.parse import parse_qs, urlsplit

from pd_harness.ports import HOST, free_ports


class BootstrapServer(http.server.ThreadingHTTPServer):
    """Answers queries for the sizes of a prefill server, and for its ranks.

    Attributes:
        sizes: The answer to a query for sizes.
        rank_port: The first DP rank's port; each other rank has the next one.
        rank: The answer to a query for a rank; `...` for the rank's address and its numbers.
        queried_ranks: The numbers in each query: DP, CP, TP and PP rank, or -1 four times.
        open: Lets answers through.
    """

    def __init__(self):
        (port,) = free_ports(1)
        super().__init__((HOST, port), BootstrapHandler)
        self.address = f"{HOST}:{port}"
        self.sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        self.sizes |= {"page_size": 64, "kv_cache_dtype": "bfloat16", "follow_bootstrap_room": True}
        self.rank_port, self.rank, self.queried_ranks = 1, ..., []
        self.open = threading.Event()
        self.open.set()
        self.thread = threading.Thread(target=self.serve_forever, args=[0.01])
        self.thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def answer(self, numbers: tuple[int, ...]):
        self.queried_ranks.append(numbers)
        assert self.open.wait(10)
        if numbers == (-1,) * 4:
            return self.sizes
        if self.rank is not ...:
            return self.rank
        return {"rank_ip": HOST, "rank_port": self.rank_port + numbers[0], "rank": numbers}

    def queried_dp_ranks(self) -> list[int]:
        return [dp for dp, *_ in self.queried_ranks]


class BootstrapHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        body = json.dumps(self.server.answer(tuple(int(query[name][0]) for name in names))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
