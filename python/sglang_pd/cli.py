"""The command line of `sglang-pd`."""

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer
from rich.console import Console
from rich.text import Text

from sglang_pd import __version__
from sglang_pd.doctor.examine import examine
from sglang_pd.doctor.host import Host, Launch, import_error
from sglang_pd.doctor.packages import choose_backend
from sglang_pd.doctor.show import as_json as findings_as_json
from sglang_pd.doctor.show import show as show_findings
from sglang_pd.errors import Code, Refusal
from sglang_pd.install import operations
from sglang_pd.install.engine import Engine, find_engine
from sglang_pd.install.matching import release_of, remarks
from sglang_pd.install.show import as_json as status_as_json
from sglang_pd.install.show import patch_as_json, patch_state, show_patch
from sglang_pd.install.show import show as show_status
from sglang_pd.patchset.patches import Release, load, read_records, supported
from sglang_pd.verifying.check import Verdict, check
from sglang_pd.verifying.fleet import Fleet
from sglang_pd.verifying.show import as_json as verdict_as_json
from sglang_pd.verifying.show import show as show_verdict

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Applies the prefill/decode patch set to an SGLang engine, and undoes it.",
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

EnginePath = Annotated[
    Path | None,
    typer.Option(
        "--engine",
        help="The engine: its folder `sglang/`, the site-packages folder that holds it, or a "
        "source checkout. Default: the one that this Python imports.",
    ),
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release",
        help="Take the engine for this release. Default: the one that it says it is, or, of a "
        "version that is not known, the one whose symbols it has.",
    ),
]

ApiKey = Annotated[
    str,
    typer.Option(envvar="SGLANG_PD_API_KEY", help="Of servers that were started with --api-key."),
]

BackendName = Literal["nixl", "mooncake", "ascend"]
LENGTHS = "1,2,17,100,512,1024,2048,4096,8192"
EXIT = {
    "applied": 0,
    "absent": Code.ABSENT,
    "half-applied": Code.HALF_APPLIED,
    "outdated": Code.OUTDATED,
    "drifted": Code.DRIFTED,
    "carried": 0,
    "missing": Code.ABSENT,
    "unknown": Code.ABSENT,
}


def refusing(command: Callable) -> Callable:
    """Turns a Refusal or OSError into its exit code and text: on stderr, or as JSON if asked."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except (Refusal, OSError) as error:
            refusal = error if isinstance(error, Refusal) else Refusal(Code.IO, str(error))
            if kwargs.get("as_json"):
                told = {"code": refusal.code, "name": refusal.code.name, "text": str(refusal)}
                print(json.dumps({"error": told}))
            else:
                err.print(
                    Text("refused: ", style="bold red") + Text(str(refusal), style="not bold")
                )
            raise typer.Exit(int(refusal.code)) from None

    return run


def locate(path: Path | None, release: str | None) -> tuple[Engine, Release]:
    """The engine and the patch set for it."""
    engine = find_engine(path, release)
    return engine, load(release) if release else release_of(engine)


def authorization(api_key: str) -> dict[str, str]:
    """The header that servers started with `--api-key` want."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"sglang-pd {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
@refusing
def status(
    patch: Annotated[
        str | None, typer.Argument(help="Show this patch alone, with its whole record.")
    ] = None,
    engine: EnginePath = None,
    release: ReleaseName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows the engine, and whether each patch is applied, absent, drifted or half-applied.

    Exit code, of the engine or of the one patch: 0 applied (of a patch: or carried by the engine),
    10 absent, 11 half-applied, 12 outdated, 5 drifted.
    """
    records = {} if patch is None else {record.id: record for record in read_records()}
    if patch is not None and patch not in records:
        known = ", ".join(records)
        raise typer.BadParameter(f"there is no patch {patch!r}; there are {known}")
    found, patch_set = locate(engine, release)
    told = operations.status(found, patch_set)
    what = (found, patch_set, told) if patch is None else (records[patch], found, patch_set, told)
    if as_json:
        said = status_as_json(*what) if patch is None else patch_as_json(*what)
        print(json.dumps(said, indent=1))
    elif patch is None:
        show_status(*what, out)
    else:
        show_patch(*what, out)
    state = told.state if patch is None else patch_state(records[patch], patch_set, told)
    raise typer.Exit(int(EXIT[state]))


@app.command()
@refusing
def apply(
    engine: EnginePath = None,
    release: ReleaseName = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")
    ] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="Also apply to a release that is a preview.")
    ] = False,
) -> None:
    """Applies every patch, or none."""
    found, patch_set = locate(engine, release)
    edits = operations.apply(found, patch_set, dry_run, preview)
    for remark in remarks(found, patch_set):
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


@app.command()
@refusing
def revert(engine: EnginePath = None) -> None:
    """Restores every byte of the engine."""
    found = find_engine(engine)
    done = operations.revert(found)
    out.print("restored" if done else "nothing to revert at", Text(str(found.root)))


@app.command()
@refusing
def diff(engine: EnginePath = None, release: ReleaseName = None) -> None:
    """Prints the edit as a unified diff, for review or `git apply`."""
    found, patch_set = locate(engine, release)
    for remark in remarks(found, patch_set):
        err.print(Text(remark))
    sys.stdout.flush()
    for line in operations.diff(found, patch_set):
        sys.stdout.buffer.write(line)


@app.command()
@refusing
def doctor(
    engine: EnginePath = None,
    release: ReleaseName = None,
    role: Annotated[
        Literal["prefill", "decode"] | None, typer.Option(help="Of the server that is meant.")
    ] = None,
    backend: Annotated[
        BackendName | None,
        typer.Option(help="Default: what the installed packages are for."),
    ] = None,
    port: Annotated[int, typer.Option(help="The server's.")] = 30000,
    bootstrap_port: Annotated[int, typer.Option(help="Prefill's.")] = 8998,
    nnodes: Annotated[int, typer.Option(help="Nodes of the server, as it is told.")] = 1,
    url: Annotated[
        list[str] | None, typer.Option(help="A running server to ask, too; give several.")
    ] = None,
    api_key: ApiKey = "",
    image: Annotated[
        bool, typer.Option("--image", help="Leave out what only a host has: for an image's build.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Looks at a host before servers are launched, and at running ones, and says what is wrong.

    Exit code: 0 nothing is wrong (there may be warnings), 17 something is.
    """
    found, patch_set = locate(engine, release)
    # Packages beside the engine are its own; another Python's cannot be imported by this one.
    folders = [str(found.root.parent), *sys.path]
    host = Host(folders=folders, import_error=None if engine else import_error)
    backend = backend or choose_backend(host)
    launch = Launch(role or "", backend, port, bootstrap_port, image, nnodes)
    findings = list(examine(found, patch_set, host, launch, url or (), authorization(api_key)))
    if as_json:
        print(json.dumps(findings_as_json(findings, launch), indent=1))
    else:
        show_findings(findings, launch, out)
    raise typer.Exit(int(Code.UNFIT_HOST) if any(f.level == "wrong" for f in findings) else 0)


@app.command()
@refusing
def verify(
    router: Annotated[str, typer.Option(help="URL of the router.")] = "",
    prefill: Annotated[str, typer.Option(help="Without a router: of the prefill server.")] = "",
    decode: Annotated[str, typer.Option(help="Without a router: of the decode server.")] = "",
    requests: Annotated[int, typer.Option(help="How many are sent at once, in the end.")] = 16,
    lengths: Annotated[str, typer.Option(help="Tokens of single prompts.")] = LENGTHS,
    reference: Annotated[
        str, typer.Option(help="A server of the same model that does not disaggregate.")
    ] = "",
    new_tokens: Annotated[int, typer.Option(help="Decoded for each request.")] = 8,
    seconds: Annotated[float, typer.Option(help="That an answer may take.")] = 120.0,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sends requests to running servers that compare all KV (SGLANG_PD_VERIFY=1), and reports.

    Exit code: 0 all was compared and is equal, 14 it is not, 15 the servers do not compare.
    """
    if bool(router) == bool(prefill and decode):
        raise typer.BadParameter("give --router, or --prefill and --decode")
    try:
        wanted = [int(one) for one in lengths.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--lengths takes numbers and commas, not {lengths!r}") from None

    def on_progress(name: str, count: int) -> None:
        err.print(f"{count} prompts {name}, twice ...")

    async def run() -> Verdict:
        headers = authorization(api_key)
        async with httpx.AsyncClient(timeout=seconds, trust_env=False, headers=headers) as client:
            fleet = Fleet(client, router.rstrip("/"), prefill.rstrip("/"), decode.rstrip("/"))
            return await check(fleet, wanted, requests, new_tokens, reference, on_progress)

    verdict = asyncio.run(run())
    if as_json:
        print(json.dumps(verdict_as_json(verdict), indent=1))
    else:
        show_verdict(verdict, out)
    raise typer.Exit(0 if verdict.is_right else int(Code.WRONG))


@app.command()
@refusing
def plan(
    model: Annotated[Path, typer.Option(help="Its config.json, or the folder that has it.")],
    prefill: Annotated[str, typer.Option(help="Sizes, such as tp=4,pp=2 (or dp, layers=30+31).")],
    decode: Annotated[str, typer.Option(help="The same; also draft and page, of one server.")],
    backend: Annotated[BackendName, typer.Option(help="That sends KV.")] = "nixl",
    release: Annotated[
        str | None, typer.Option("--engine-release", help="Default: the newest that is known.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=0, help="0: as the engine chooses.")] = 0,
    draft_layers: Annotated[int, typer.Option(min=0, help="Of both servers' drafts.")] = 0,
    fia: Annotated[bool, typer.Option("--fia", help="NPU pools with ASCEND_USE_FIA.")] = False,
    compare: Annotated[
        str, typer.Option(help="Other sizes to set beside these, such as tp=8:tp=4,dp=2.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it, as .svg or .png.")] = None,
) -> None:
    """Says whether two servers of a model work together, who sends what to whom, and how much.

    Exit code: 0 it works on the patched engine, 19 it does not, or is not known to; 18 the model
    is not known.
    """
    # Only here: it needs NumPy, and an engine must be revertible without.
    from sglang_pd.topology import show as shown
    from sglang_pd.topology.asked import Asked
    from sglang_pd.topology.picture import check_name, draw

    asked = Asked(model, backend, release or supported()[-1], page_size, draft_layers, fia)
    try:
        pairs = [(prefill, decode), *([_two(compare)] if compare else [])]
        summaries = [asked.summary(*sizes) for sizes in pairs]
        if picture:
            check_name(picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        told = [shown.as_json(one) for one in summaries]
        print(json.dumps(told if compare else told[0], indent=1))
    elif compare:
        shown.compare(*summaries, out)
    else:
        shown.show(summaries[0], out)
    if picture:
        draw(summaries, picture)
    raise typer.Exit(0 if summaries[0].works else int(Code.UNFIT))


def _two(text: str) -> tuple[str, str]:
    prefill, colon, decode = text.partition(":")
    if not colon:
        raise ValueError(f"--compare {text!r}: give prefill's and decode's sizes, as tp=8:tp=4")
    return prefill, decode


def main() -> None:
    app()
