"""The command line of `sglang-pd`."""

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console
from rich.text import Text

from sglang_pd import __version__
from sglang_pd.doctor import show as findings_view
from sglang_pd.doctor.host import Host, LaunchOptions, import_error
from sglang_pd.doctor.packages import choose_backend
from sglang_pd.doctor.run_checks import run_checks
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import operations
from sglang_pd.install import show as status_view
from sglang_pd.install.engine import Engine, find_engine
from sglang_pd.install.export import export as write_series
from sglang_pd.install.release_detection import detect_release, release_notes
from sglang_pd.patchset.patches import Release, load_release, read_records, supported_releases
from sglang_pd.verify import show as verdict_view
from sglang_pd.verify.check import Verdict, check
from sglang_pd.verify.servers import FleetClient

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Applies the prefill/decode patch set to an SGLang engine, and reverts it.",
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

EnginePath = Annotated[
    Path | None,
    typer.Option(
        "--engine",
        help="The engine: its `sglang/` folder, the site-packages folder that contains it, or a "
        "source checkout. Default: the engine that this Python imports.",
    ),
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release",
        help="Treat the engine as this release. Default: detected from its version, or, if that "
        "is unknown, from its symbols.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ApiKey = Annotated[
    str,
    typer.Option(envvar="SGLANG_PD_API_KEY", help="API key of servers started with --api-key."),
]
BackendName = Literal["nixl", "mooncake", "ascend"]
SIZES_HELP = (
    "Sizes of the {} server, such as {}; also {}=N, layers=30+31 (by stage), "
    "draft=LAYERS, page=TOKENS."
)
DEFAULT_LENGTHS = "1,2,17,100,512,1024,2048,4096,8192"
EXIT_CODES = {
    "applied": 0,
    "absent": ExitCode.ABSENT,
    "half-applied": ExitCode.HALF_APPLIED,
    "outdated": ExitCode.OUTDATED,
    "drifted": ExitCode.DRIFTED,
    "carried": 0,
    "missing": ExitCode.ABSENT,
    "unknown": ExitCode.ABSENT,
}


def command(function: Callable) -> Callable:
    """Adds a command. It prints a Refusal or OSError, if asked as JSON, and exits with its code."""

    @app.command()
    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (Refusal, OSError) as error:
            refusal = error if isinstance(error, Refusal) else Refusal(ExitCode.IO, str(error))
            if kwargs.get("as_json"):
                result = {"code": refusal.code, "name": refusal.code.name, "text": str(refusal)}
                print(json.dumps({"error": result}))
            else:
                err.print(Text("refused: ", "bold red").append(str(refusal), "not bold"))
            raise typer.Exit(int(refusal.code)) from None

    return run


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def find_engine_and_release(path: Path | None, release: str | None) -> tuple[Engine, Release]:
    """Finds the engine and loads the patch set of its release."""
    engine = find_engine(path, release)
    return engine, load_release(release) if release else detect_release(engine)


def auth_headers(api_key: str) -> dict[str, str]:
    """Returns the header that servers started with `--api-key` require; empty without a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sglang-pd {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@command
def status(
    patch: Annotated[
        str | None, typer.Argument(help="Show only this patch, with its full record.")
    ] = None,
    engine: EnginePath = None,
    release: ReleaseName = None,
    as_json: AsJson = False,
) -> None:
    """Shows the engine, and each patch: applied, absent, outdated, drifted or half-applied.

    Exit code, for the engine or for the one PATCH: 0 applied (or, for a patch, carried by the
    engine), 10 absent (for a patch also: needed, but without an edit), 11 half-applied, 12
    outdated, 5 drifted.
    """
    records = {} if patch is None else {record.id: record for record in read_records()}
    if patch is not None and patch not in records:
        known = ", ".join(records)
        raise typer.BadParameter(f"unknown patch {patch!r}; the patches are {known}")
    record = records.get(patch)
    result = operations.status(*find_engine_and_release(engine, release))
    if as_json and record:
        print_json(status_view.patch_as_json(record, result))
    elif as_json:
        print_json(status_view.as_json(result))
    elif record:
        status_view.show_patch(record, result, out)
    else:
        status_view.show(result, out)
    state = status_view.patch_state(record, result) if record else result.state
    raise typer.Exit(int(EXIT_CODES[state]))


@command
def apply(
    engine: EnginePath = None,
    release: ReleaseName = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")
    ] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="Apply even if the release is a preview.")
    ] = False,
) -> None:
    """Applies all patches, or none."""
    found, patch_set = find_engine_and_release(engine, release)
    edits = operations.apply(found, patch_set, dry_run, preview)
    for remark in release_notes(found, patch_set):
        out.print(Text(remark))
    if not edits:
        out.print(f"already applied to SGLang {patch_set.name} at", Text(str(found.root)))
        return
    for edit in edits:
        out.print("  add   " if edit.old is None else "  change", Text(edit.path))
    verb = "would be applied" if dry_run else "applied"
    out.print(
        f"{len(patch_set.patches)} patches {verb} to SGLang {patch_set.name} at",
        Text(str(found.root)),
    )


@command
def revert(engine: EnginePath = None) -> None:
    """Undoes `apply`: restores every byte of the engine's files."""
    found = find_engine(engine)
    done = operations.revert(found)
    out.print(done or "nothing to revert at", Text(str(found.root)))


@command
def diff(engine: EnginePath = None, release: ReleaseName = None) -> None:
    """Prints the patch set's edits as a unified diff, for review or `git apply`."""
    found, patch_set = find_engine_and_release(engine, release)
    for remark in release_notes(found, patch_set):
        err.print(Text(remark))
    sys.stdout.flush()
    for line in operations.diff(found, patch_set):
        sys.stdout.buffer.write(line)


@command
def export(
    output: Annotated[Path, typer.Option("--output", help="A new folder for the patches.")],
    format: Annotated[
        Literal["git"], typer.Option("--format", help="git: for `git apply`, and for `quilt`.")
    ] = "git",
    engine: EnginePath = None,
    release: ReleaseName = None,
) -> None:
    """Writes the patch set as a series of patches for this engine, one for each record.

    The folder has `series`, SHA256SUMS, and a README with the engine's version or revision.
    """
    found, patch_set = find_engine_and_release(engine, release)
    for remark in release_notes(found, patch_set):
        err.print(Text(remark))
    names = write_series(found, patch_set, output)
    out.print(f"{len(names)} patches for SGLang {patch_set.name} in", Text(str(output)))


@command
def doctor(
    engine: EnginePath = None,
    release: ReleaseName = None,
    role: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(help="Role of the server that will be launched. Default: either role."),
    ] = None,
    backend: Annotated[
        BackendName | None,
        typer.Option(help="Transfer backend. Default: detected from the installed packages."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the server that will be launched.")] = 30000,
    bootstrap_port: Annotated[int, typer.Option(help="Port of prefill's bootstrap server.")] = 8998,
    nnodes: Annotated[
        int, typer.Option(help="Number of the server's nodes, as in its launch command.")
    ] = 1,
    url: Annotated[
        list[str] | None,
        typer.Option(help="URL of a running server to check, too; may be repeated."),
    ] = None,
    api_key: ApiKey = "",
    image: Annotated[
        bool, typer.Option("--image", help="Skip what only a host has: for an image build.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Checks a host before servers are launched, and running servers, and reports problems.

    Exit code: 0 nothing is wrong (there may be warnings), 17 something is wrong.
    """
    found, patch_set = find_engine_and_release(engine, release)
    # Packages beside the engine belong to it; with --engine this Python may not be able to import
    # them.
    folders = [str(found.root.parent), *sys.path]
    host = Host(folders=folders, import_error=None if engine else import_error)
    backend = backend or choose_backend(host)
    launch = LaunchOptions(role or "", backend, port, bootstrap_port, image, nnodes)
    findings = list(run_checks(found, patch_set, host, launch, url or (), auth_headers(api_key)))
    if as_json:
        print_json(findings_view.as_json(findings, launch))
    else:
        findings_view.show(findings, launch, out)
    raise typer.Exit(int(ExitCode.HOST_PROBLEM) if any(f.level == "wrong" for f in findings) else 0)


@command
def verify(
    router: Annotated[str, typer.Option(help="URL of the router.")] = "",
    prefill: Annotated[
        str, typer.Option(help="URL of the prefill server (instead of --router).")
    ] = "",
    decode: Annotated[
        str, typer.Option(help="URL of the decode server (instead of --router).")
    ] = "",
    requests: Annotated[int, typer.Option(help="Size of the final concurrent burst.")] = 16,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths to test, in tokens, separated by commas.")
    ] = DEFAULT_LENGTHS,
    reference: Annotated[
        str, typer.Option(help="URL of a server of the same model without disaggregation.")
    ] = "",
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode per request.")] = 8,
    seconds: Annotated[
        float, typer.Option("--timeout", "--seconds", help="Seconds to wait for each answer.")
    ] = 120.0,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Sends requests to servers that compare all KV (SGLANG_PD_VERIFY=1), and reports differences.

    Exit code: 0 every request was answered, its KV was compared and is equal, and with --reference
    the answers agree; 14 otherwise; 15 the servers do not verify or cannot be reached.
    """
    if bool(router) == bool(prefill and decode):
        raise typer.BadParameter("give either --router, or both --prefill and --decode")
    try:
        wanted = [int(one) for one in lengths.split(",")]
    except ValueError:
        text = f"--lengths must be numbers separated by commas, not {lengths!r}"
        raise typer.BadParameter(text) from None

    def on_progress(name: str, count: int) -> None:
        err.print(f"sending {count} prompts ({name}), twice ...")

    async def run() -> Verdict:
        headers = auth_headers(api_key)
        async with httpx.AsyncClient(timeout=seconds, trust_env=False, headers=headers) as client:
            fleet = FleetClient(client, router.rstrip("/"), prefill.rstrip("/"), decode.rstrip("/"))
            return await check(fleet, wanted, requests, new_tokens, reference, on_progress)

    verdict = asyncio.run(run())
    if as_json:
        print_json(verdict_view.as_json(verdict))
    else:
        verdict_view.show(verdict, out)
    raise typer.Exit(0 if verdict.passed else int(ExitCode.MISMATCH))


@command
def plan(
    model: Annotated[
        Path, typer.Option(help="The model's config.json, or the folder that contains it.")
    ],
    prefill: Annotated[str, typer.Option(help=SIZES_HELP.format("prefill", "tp=4,pp=2", "dp"))],
    decode: Annotated[str, typer.Option(help=SIZES_HELP.format("decode", "tp=4,dp=2", "pp"))],
    backend: Annotated[BackendName, typer.Option(help="Transfer backend.")] = "nixl",
    release: Annotated[
        str | None,
        typer.Option(
            "--release",
            "--engine-release",
            help="Release of the engine. Default: the newest supported one.",
        ),
    ] = None,
    page_size: Annotated[
        int, typer.Option(min=0, help="Tokens per page, on both servers; 0: the engine's default.")
    ] = 0,
    draft_layers: Annotated[
        int, typer.Option(min=0, help="Layers of the draft model, on both servers.")
    ] = 0,
    fia: Annotated[
        bool, typer.Option("--fia", help="Use the layout of NPU pools with ASCEND_USE_FIA.")
    ] = False,
    compare: Annotated[
        str, typer.Option(help="Other sizes to compare with, such as tp=8:tp=4,dp=2.")
    ] = "",
    as_json: AsJson = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a picture into this .svg or .png file.")
    ] = None,
) -> None:
    """Shows whether two servers of a model work together, and which rank sends what to which.

    Exit code: 0 they work on the patched engine, 19 they do not, or were never tested; 18 the
    model's configuration is missing or not supported; 20 --picture needs matplotlib, which is not
    installed.
    """
    # Imported only here: it needs NumPy, and `revert` must work without NumPy.
    from sglang_pd.plan import show as view
    from sglang_pd.plan.picture import check_picture_path, draw
    from sglang_pd.plan.summary import summarize

    engine = release or supported_releases()[-1]
    try:
        pairs = [(prefill, decode), *([_split_compare(compare)] if compare else [])]
        summaries = summarize(model, pairs, backend, engine, page_size, draft_layers, fia)
        if picture:
            check_picture_path(picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        result = [view.as_json(one) for one in summaries]
        print_json(result if compare else result[0])
    elif compare:
        view.compare(*summaries, out)
    else:
        view.show(summaries[0], out)
    if picture:
        draw(summaries, picture)
    raise typer.Exit(0 if summaries[0].works else int(ExitCode.INCOMPATIBLE))


@command
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files, or folders of files, that SGLANG_PD_REQUEST_LOG had written."),
    ],
    room: Annotated[int | None, typer.Option(help="Show the time of this room's request.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only requests that failed.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many of the slowest to show.")] = 20,
    picture: Annotated[
        Path | None, typer.Option(help="With --room: draw its time into this .svg or .png file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Joins both servers' lines of each request, and shows how long each part of it took.

    Exit code: 0; 21 there is no such request; 20 --picture needs matplotlib.
    """
    from sglang_pd.trace import show as view
    from sglang_pd.trace.picture import draw
    from sglang_pd.trace.requests import read

    if picture and room is None:
        raise typer.BadParameter("--picture needs --room")
    found = read(path for given in files for path in _trace_files(given))
    chosen = [
        one for one in found.requests if room in (None, one.room) and (one.failure or not failed)
    ]
    if not chosen:
        what = f"room {room}" if room is not None else "a request"
        text = f"no line of {what} in {', '.join(map(str, files))}"
        raise Refusal(ExitCode.NO_REQUEST, text)
    if room is None:
        chosen = sorted(chosen, key=lambda one: -one.total)[:limit]
    if as_json:
        print_json(view.as_json(chosen, found.unread))
    elif room is None:
        view.show(found, chosen, out)
    else:
        for request in chosen:
            view.show_request(request, out)
    if picture:
        try:
            draw(chosen[-1], picture)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


def _trace_files(given: Path) -> list[Path]:
    return sorted(given.rglob("*.jsonl")) if given.is_dir() else [given]


def _split_compare(text: str) -> tuple[str, str]:
    prefill, colon, decode = text.partition(":")
    if not colon:
        raise ValueError(f"--compare {text!r}: give prefill's and decode's sizes, as tp=8:tp=4")
    return prefill, decode


def main() -> None:
    app()
