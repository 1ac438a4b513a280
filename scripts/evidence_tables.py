"""The tables of docs/evidence/RELEASE.md, from measurements and the rows that tests recorded."""

import datetime
import json
import os
import platform

from evidence_rows import RELEASE, bench, latest_rows, measures
from packaging.version import Version


def tables() -> list[str]:
    """The lines of the whole report."""
    measured = (planning, cpu_copy, scenarios, accuracy, drafts, serving_speed)
    proven = (verified, verify_cost)
    # Later releases use the engine's own queues.
    queued = (back_off,) if Version(RELEASE) < Version("0.5.20") else ()
    attacked = (faults, attacks, hang_ups, event_loop, *queued, soak)
    parts = (line for table in (*measured, scale, *proven, *attacked) for line in table())
    return [*heading(), *figures(measures()), "", *parts]


def heading() -> list[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"# Evidence: SGLang {RELEASE}",
        "",
        "Made by `scripts/evidence.sh`; not written by hand.",
        "",
        f"{datetime.date.today()}, {os.cpu_count()} cores, {memory:.0f} GiB, no accelerator, "
        f"Python {platform.python_version()}. {step_dates()}",
        "",
    ]


def step_dates() -> str:
    """A sentence with the day on which each step last ran."""
    days = measures().get("days", {})
    steps = ", ".join(f"{step} on {day}" for step, day in days.items())
    return f"Steps were taken last: {steps or 'none'}."


def figures(measures: dict) -> list[str]:
    """A table of times; missing measurements are marked as such."""
    absent = {"seconds": "not measured", "status": "-"}
    demo, stock = measures.get("demo", absent), measures.get("demo_stock", absent)
    tests, nightly = measures.get("tests", absent), measures.get("nightly", absent)
    rows = [
        ("set-up, cold", measures.get("setup_cold", "not measured"), "scripts/setup.sh"),
        ("set-up, warm", measures.get("setup_warm", "not measured"), "scripts/setup.sh"),
        ("demo, patched", demo["seconds"], f"status {demo['status']}: {demo.get('verdict')}"),
        ("demo, stock", stock["seconds"], f"status {stock['status']}: {stock.get('verdict')}"),
        ("scripts/test.sh", tests["seconds"], f"status {tests['status']}: {tests.get('summary')}"),
        ("scripts/test.sh --nightly", nightly["seconds"], f"status {nightly['status']}"),
    ]
    return [
        "| what | seconds | |",
        "|---|---|---|",
        *(f"| {what} | {seconds} | {note} |" for what, seconds, note in rows),
        "",
        f"The environments take {measures.get('setup_gib', '?')} GiB.",
    ]


def planning() -> list[str]:
    """A table of planning long prompts, then the least gain at any size for each case."""
    if (found := bench("plan")) is None:
        return ["Planning: not measured.", ""]
    rows = found["rows"]
    least: dict[str, dict] = {}
    for row in rows:
        if row["faster"]["ours"] <= least.get(row["kind"], row)["faster"]["ours"]:
            least[row["kind"]] = row
    gains = (
        f"{kind} {row['faster']['ours']:.2f}x at {row['pages']:,}" for kind, row in least.items()
    )
    return [
        "Planning one transfer (`scripts/bench.sh plan`), up to the call of the transport: medians",
        "of stock and ours, taken in turns in one process. Arrays: ours for a transport that takes",
        "them instead of lists. MB: the most that one call holds at once.",
        "",
        "| transfer | pages | fragmented | copies | stock ms | ours ms | faster "
        "| arrays ms | faster | stock MB | ours MB |",
        "|---" * 11 + "|",
        *(planning_row(row) for row in rows if row["copies"] > 150_000 or row["pages"] >= 1024),
        "",
        f"The least gain at any size from 1 page up: {'; '.join(gains)}.",
        *(f"Missed: {miss}." for miss in found["missed"]),
        "",
    ]


def cpu_copy() -> list[str]:
    """A table of copying KV to the host and back."""
    if (found := bench("cpu-copy")) is None:
        return ["KV to the host and back: not measured.", ""]
    lines = [
        "KV of a retracted request to the host and back (`scripts/bench.sh cpu-copy`), scattered",
        "slots, medians taken in turns; the loop goes layer by layer and chunk by chunk.",
        "0.5.9's pools copy by what the patches add, 0.5.23's by themselves.",
        "",
        "| pool | tokens | MB | one memcpy ms | to host, pool ms | loop ms | back, pool ms "
        "| loop ms |",
        "|---" * 8 + "|",
    ]
    names = ("memcpy", "to host, pool", "to host, loop", "back, pool", "back, loop")
    for row in found:
        cells = (f"{row['ms'][name]:.1f}" for name in names)
        size = f"{row['pool']} | {row['tokens']:,} | {row['mb']:.0f}"
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return [*lines, ""]


def planning_row(row: dict) -> str:
    """One line of the table of `planning`."""
    ms, faster, peak = row["ms"], row["faster"], row["peak_mb"]
    arrays = (f"{ms['arrays']:.2f}", f"{faster['arrays']:.0f}x") if "arrays" in ms else ("", "")
    cells = (
        row["kind"],
        f"{row['pages']:,}",
        row["fragmented"],
        f"{row['copies']:,}",
        f"{ms['stock']:.2f}",
        f"{ms['ours']:.2f}",
        f"{faster['ours']:.1f}x",
        *arrays,
        f"{peak['stock']:.1f}",
        f"{peak['ours']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def scenarios() -> list[str]:
    """A table of each pair of engines' last outcome in each scenario."""
    by_scenario: dict[str, dict[str, dict]] = {}
    for (scenario, engine), row in latest_rows("serving").items():
        by_scenario.setdefault(scenario, {})[engine] = row
    if not by_scenario:
        return ["Scenarios: not measured.", ""]
    engines = ["stock", "patched", "stock-to-patched", "patched-to-stock"]
    lines = [
        "Real prefill and decode servers behind the real router; six prompts of 1 to 600 tokens,",
        "sent together; token ids and logprobs (tolerance 2e-3) against one stock server, TP 1.",
        "Seconds include starting the servers.",
        "",
        f"| scenario | {' | '.join(engines)} |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for name, records in by_scenario.items():
        cells = [
            f"{records[engine]['outcome']}, {records[engine]['seconds']:.0f} s"
            if engine in records
            else ""
            for engine in engines
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def accuracy() -> list[str]:
    """A table of the engine's few-shot script's scores through each router."""
    rows = latest_rows("accuracy")
    if not rows:
        return ["Accuracy: not measured.", ""]
    sides = ("one server", "stock", "patched")
    return [
        "Accuracy: the engine's `few_shot_gsm8k` on sums that tiny models were trained on until",
        "they know them: the part of the answers that is right, through one server and through",
        "the router of each fleet.",
        "",
        f"| fleet | questions | {' | '.join(sides)} |",
        "|---" * 5 + "|",
        *(
            f"| {fleet} | {row['questions']} | {' | '.join(score(row[side]) for side in sides)} |"
            for (fleet,), row in rows.items()
        ),
        "",
    ]


def score(part: float | None) -> str:
    return "no answer" if part is None else f"{part:.3f}"


def drafts() -> list[str]:
    """A table of answers by fleets with a draft model, and of their accepted draft tokens."""
    by_scenario: dict[str, dict[str, dict]] = {}
    for (scenario, engine), row in latest_rows("draft").items():
        by_scenario.setdefault(scenario, {})[engine] = row
    if not by_scenario:
        return ["Draft models: not measured.", ""]

    def cell_of(row: dict | None) -> str:
        if row is None:
            return ""
        if row["outcome"] != "right":
            return row["outcome"]
        same = ", as alone" if row.get("as_alone") else ""
        return f"right, {row['tokens_a_round']} tokens a round{same}"

    def alone_of(rows: dict[str, dict]) -> str:
        measured = {str(row["tokens_alone"]) for row in rows.values() if "tokens_alone" in row}
        return ", ".join(sorted(measured))

    return [
        "Draft models (EAGLE for a Llama, NEXTN for MLA, topk 1): six prompts one by one, 40",
        "tokens each, which must be those of one server without a draft. Tokens a round of decode,",
        "from what servers report of each request (`spec_verify_ct`): 1 is no accepted draft.",
        "Alone: one stock server with this draft, which prefills and decodes; as alone: of each",
        "prompt as many rounds.",
        "",
        "| fleet | alone | stock | patched |",
        "|---" * 4 + "|",
        *(
            f"| {name} | {alone_of(rows)} | {cell_of(rows.get('stock'))} | "
            f"{cell_of(rows.get('patched'))} |"
            for name, rows in by_scenario.items()
        ),
        "",
    ]


def faults() -> list[str]:
    """A table of the last outcome of each fault."""
    rows = latest_rows("faults")
    if not rows:
        return ["Faults: not measured.", ""]
    return [
        "Faults: a part of a fleet dies in the middle of a transfer. Servers are whole ones behind",
        "a router, ranks are managers without a model. Seconds until the",
        "client has its error, and then until the survivor holds no token and no request of it;",
        "then, with a new server in the place of a dead one, the next answers. A prefill server",
        "computes the rest of a prompt before it says that decode is dead.",
        "",
        "| fault | backend | error after s | client's error | freed after s | next answers |",
        "|---" * 6 + "|",
        *(
            f"| {case} | {backend} | {row['seconds']} | {cell(row['client'])} "
            f"| {row.get('freed', '')} | {row['after']} |"
            for (case, backend), row in rows.items()
        ),
        "",
    ]


def attacks() -> list[str]:
    """A table of the effects of each attack on other clients' requests, as last measured."""
    rows = latest_rows("attacks")
    if not rows:
        return ["Attacks: not measured.", ""]
    return [
        "Attacks: one server of two is attacked while it has requests open; the other one's are",
        "asked for. Decode ranks are managers without a model, over TCP, with prefill TP 2 (stock",
        "0.5.9 over NIXL: TP 1) and four workers (stock: those of one queue; by default it deals",
        "decode ranks to four, by their ports). Prefill servers, decode servers that stop in mid-",
        "prompt, and requests that are refused, are of whole servers, with forward passes in",
        "their loops. The longest time in which the loop of those that serve on does not turn (in",
        "brackets: before the attack); until the slowest of the others' requests was answered (a",
        "refused one: itself; swapped: the first after it), or how long it was waited for; and",
        "what is held then: rooms in tables, requests without an end, decode ranks that are gone.",
        "Patched, a peer is silent after 5 s here.",
        "",
        "| attack | backend | engine | longest pause, ms | others served after s | held |",
        "|---" * 6 + "|",
        *(
            f"| {case} | {backend} | {engine} | {paused(row)} | {served(row)} | {held(row)} |"
            for (case, backend, engine), row in sorted(rows.items())
        ),
        "",
    ]


def paused(row: dict) -> str:
    """The longest pause in milliseconds; in brackets that before the attack, if measured."""
    before = f" ({row['before_ms']:.0f})" if "before_ms" in row else ""
    return f"{row.get('pause_ms', '')}{before}"


def served(row: dict) -> str:
    return f"not in {row['waited']:.0f}" if row["served"] is None else f"{row['served']:.2f}"


def held(row: dict) -> str:
    """What the server still holds; "nothing" if all counts are 0, empty if not checked."""
    if row["held"] is None:
        return ""
    return ", ".join(f"{count} {name}" for name, count in row["held"].items() if count) or "nothing"


def serving_speed() -> list[str]:
    """A table of stock and patched pairs' time to the first token and throughput."""
    if (found := bench("serve")) is None:
        return ["Serving speed: not measured.", ""]
    return [
        "Serving speed (`scripts/bench.sh serve`): pairs of prefill and decode servers, asked in",
        "turns, without a router; prompts of 200 tokens, answers of 16. Medians of all blocks; a",
        "ratio above 1 is patched being better. Noise: how far the medians of two halves of one",
        "engine's blocks are apart, the largest of three ways to halve them and of both engines.",
        "",
        "| fleet | figure | stock | patched | ratio | noise |",
        "|---" * 6 + "|",
        *(
            f"| {row['fleet']} | {row['figure']} | {row['stock']:.1f} | {row['patched']:.1f} "
            f"| {row['ratio']:.2f} | {row['noise']:.2f} |"
            for row in found["rows"]
        ),
        "",
        *(f"Slower: {miss}." for miss in found["missed"]),
        *([""] if found["missed"] else []),
    ]


def scale() -> list[str]:
    """Two tables and a plot: what many ranks cost each other, and how the costs grow."""
    if (found := bench("scale")) is None:
        return ["Many ranks: not measured.", ""]
    lines = [
        "Many ranks (`scripts/bench.sh scale`): prefill PP 4 and TP a fourth of the ranks, decode",
        "as many servers of one rank, each of which has to do with all prefill ranks (Mooncake:",
        "GQA; NIXL: MLA). Managers without a model, each in a process of its own; the transfer",
        "library writes nothing. Known: until all have served each other once, by the clock, and",
        "processor seconds of all together. Memory: of a prefill rank, for each decode rank. A",
        "request: of all ranks together, messages sent, and processor time of schedulers (without",
        "polls in vain) and of threads that read messages, then of whole processes. At rest: of a",
        "rank. Gap: the longest in which a decode rank had no request end, before and after",
        "another was killed; then after how long the one in its place was served. Lost: requests;",
        "a fleet that loses a twentieth is started anew, once. Workers: transfer workers that had",
        f"ended, did the bench not keep them. Load average at the end {found['load']:.0f}.",
        "",
        f"![What grows with ranks](scale-{RELEASE}.svg)",
        "",
        "| backend | ranks | engine | known s | CPU s | KiB a peer | messages | scheduler ms "
        "| reader ms | all ms | at rest % | gap s | after s | new after s | lost | workers |",
        "|---" * 16 + "|",
    ]
    numbers = (
        *("meet_s", "meet_cpu_s", "kib_a_peer", "messages", "scheduler_ms", "reader_ms"),
        *("all_ms", "rest_percent", "gap_before_s", "gap_after_s", "new_rank_s"),
    )
    for row in sorted(found["rows"], key=lambda row: (row["backend"], row["ranks"])):
        cells = ("-" if row[name] is None else f"{row[name]:.3g}" for name in numbers)
        who = f"{row['backend']} | {row['ranks']} | {row['engine']}"
        lines.append(f"| {who} | {' | '.join(cells)} | {row['lost']} | {row['workers_ended']} |")
    lines += ["", "| grows with ranks to the power | stock | patched | noise |", "|---" * 4 + "|"]
    for one in found["growths"]:
        powers = (f"{one[name]:.2f}" for name in ("stock", "patched", "noise"))
        lines.append(f"| {one['backend']}: {one['figure']} | {' | '.join(powers)} |")
    return [*lines, "", *(f"Missed: {miss}." for miss in found["missed"]), ""]


def hang_ups() -> list[str]:
    """A table of what clients that hang up leave behind in each fleet, as last measured."""
    rows = latest_rows("hang_ups")
    if not rows:
        return ["Clients that hang up: not measured.", ""]
    return [
        "Clients that hang up: for each seed 200 clients, up to 0.1 s apart, with prompts of 3 to",
        "1,500 tokens, prefilled in chunks of 128. Each asks both servers, or the router, and",
        'closes its connections, with "either" one of them, after random()**2 * 1.5 s; the engine',
        "looks each second for who has gone. Then six prompts are sent at once: the longest time",
        "until all are answered, and what the servers still hold 10 s later. Stages have unequal",
        "lengths, for which stock's tokens are wrong. Busy: how much longer a loop took than its",
        "processor time, for what else ran on the machine, and as much longer clients took.",
        "",
        "| fleet | engine | seeds | servers | next six prompts | after s | busy | held |",
        "|---" * 8 + "|",
        *(
            f"| {name} | {engine} | {row['seeds']} | {'alive' if row['alive'] else 'ended'} "
            f"| {row['next_prompts']} | {row['seconds']} | {row['busy']} "
            f"| {cell(json.dumps(row['held'])) if row['held'] else 'nothing'} |"
            for (name, engine), row in rows.items()
        ),
        "",
    ]


def event_loop() -> list[str]:
    """A table of how long decode's event loop pauses for each backend and engine."""
    rows = latest_rows("event_loop")
    if not rows:
        return ["Decode's event loop when prefill dies: not measured.", ""]
    rooms = next(iter(rows.values()))["rooms"]
    return [
        f"Decode's event loop when prefill dies with {rooms} rooms open: decode TP 2, whose ranks'",
        "heartbeats are apart; the longest time in which a rank's loop does not turn, from the",
        "kill until all requests have failed, or for 30 s, and in 5 s before it.",
        "",
        "| backend | engine | before, ms | after the kill, ms | all failed after s |",
        "|---" * 5 + "|",
        *(
            f"| {backend} | {engine} | {row['before_ms']:.0f} | {row['pause_ms']:.0f} "
            f"| {row['seconds']} |"
            for (backend, engine), row in rows.items()
        ),
        "",
    ]


def back_off() -> list[str]:
    """A table of transfers to a decode rank while another one does not answer."""
    rows = latest_rows("back_off")
    if not rows:
        return ["A decode rank that does not answer, beside another: not measured.", ""]
    return [
        "Mooncake, two decode ranks in one queue, of which one does not answer: a transfer to it",
        "fails after the time-out (a stand-in's for the engine). What the other's transfers take.",
        "",
        "| time-out s | transfers | median ms | worst ms |",
        "|---" * 4 + "|",
        *(
            f"| {timeout:g} | {row['rooms']} | {1000 * row['median']:.1f} "
            f"| {1000 * row['worst']:.0f} |"
            for (timeout,), row in sorted(rows.items())
        ),
        "",
    ]


def cell(text: str) -> str:
    """A text as a table's cell: one line, without "|", shortened before its end (the reason)."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 200 else f"{line[:60]} ... {line[-130:]}"


def soak() -> list[str]:
    """A table of the last soak of each backend and engine."""
    rows = latest_rows("soak")
    if not rows:
        return ["Soak: not measured.", ""]
    return [
        "Soak: requests of 1 to 600 tokens, eight at once, through one prefill and one decode",
        "server that retracts; each answer against one stock server's. MiB: memory of a server's",
        "processes after the warm-up and at the end, and the most in between. What the engine",
        "itself takes is in the row of stock; managers without a model keep less than 150 KiB of",
        "600 requests (test/transport/test_memory.py).",
        "",
        "| backend, engine | requests | wrong | retractions | seconds | prefill MiB | decode MiB |",
        "|---" * 7 + "|",
        *(
            f"| {name} | {row['requests']} | {row['wrong']} | {row['retractions']} "
            f"| {row['seconds']:.0f} | {memory(row, 'prefill')} | {memory(row, 'decode')} |"
            for (name,), row in rows.items()
        ),
        "",
    ]


def memory(row: dict, server: str) -> str:
    sizes = row[f"{server}_mib"][row["warm_up"] - 1 :]
    return f"{sizes[0]}, {sizes[-1]} (most {max(sizes)})"


def verified() -> list[str]:
    """A table of faults in the stock engine's transfer code, and of decode's reports of them."""
    rows = latest_rows("verify")
    if not rows:
        return ["Faults that decode finds: not measured.", ""]
    return [
        "Faults that decode finds by comparing digests (`SGLANG_PD_VERIFY=1`, docs/verify.md). The",
        "fault is the stock engine's: patched servers send by its transfer code, and nothing is",
        "known of the right answers (test/serving/test_verify.py).",
        "",
        "| fault of stock | found by | requests that fail | first text |",
        "|---" * 4 + "|",
        *(
            f"| {name} | `sglang-pd verify` | {row['failed']} of {row['requests']} "
            f"| {cell(row['text'])} |"
            for (name,), row in sorted(rows.items())
        ),
        "",
    ]


def verify_cost() -> list[str]:
    """Two tables: digests against memcpy, and times to the first token."""
    if (found := bench("verify")) is None:
        return ["The cost of comparing: not measured.", ""]
    return [
        "The cost of comparing (`scripts/bench.sh verify`): digests of a request's pages, beside",
        "copying the same pages; then milliseconds to the first token without and with it, NIXL",
        "TP 1 to 1, in turns. Without the variable nothing is computed, kept or sent.",
        "",
        "| pool | tokens | MiB | digests, GB/s | memcpy, GB/s | digests, ms |",
        "|---" * 6 + "|",
        *(
            f"| {row['pool']} | {row['tokens']} | {row['MiB']:.0f} | {row['digest GB/s']:.2f} "
            f"| {row['memcpy GB/s']:.2f} | {row['digest ms']:.0f} |"
            for row in found["digests"]
        ),
        "",
        "| prompt, tokens | without, ms | with, ms | ratio | noise |",
        "|---" * 5 + "|",
        *(
            f"| {row['tokens']} | {row['off']:.0f} | {row['on']:.0f} | {row['ratio']:.2f} "
            f"| {row['noise']:.2f} |"
            for row in found["serving"]
        ),
        "",
    ]
