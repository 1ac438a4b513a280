"""The engine and its release are found without importing the engine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ENGINE, VERSION, write

from sglang_pd.cli import find_engine_and_release
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import operations
from sglang_pd.install.engine import find_engine
from sglang_pd.patchset import patches


@pytest.fixture
def unimportable(toy):
    """An engine that cannot be imported."""
    write(toy.root / "__init__.py", "raise SystemExit('imported')\n")
    return toy


def find_engine_in(python_path) -> subprocess.CompletedProcess:
    """Searches in a fresh interpreter with the given path."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); "
        "from sglang_pd.install.engine import find_engine; print(find_engine().root)"
    )
    # The tool's own packages, without an engine that is installed for other tests.
    packages = [path for path in sys.path if "site-packages" in path]
    packages = [path for path in packages if not (Path(path) / "sglang").exists()]
    tool = [str(patches.PACKAGE.parent), *packages]
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, ":".join([*map(str, python_path), *tool])],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("at", ["", "sglang"])
def test_engine_is_found_by_package_or_parent_folder(unimportable, at):
    engine = find_engine(unimportable.site / at)
    assert engine.root == unimportable.root
    assert engine.version == VERSION
    assert engine.dist_record == unimportable.dist_record


@pytest.mark.parametrize("at", ["", "python", "python/sglang"])
def test_engine_is_found_in_checkout(unimportable, tmp_path, at):
    (tmp_path / "checkout").mkdir()
    unimportable.site.rename(tmp_path / "checkout/python")
    assert find_engine(tmp_path / "checkout" / at).root == tmp_path / "checkout/python/sglang"


def test_symlink_to_engine_is_followed(unimportable, tmp_path):
    (tmp_path / "link").symlink_to(unimportable.root)
    assert find_engine(tmp_path / "link").root == unimportable.root


def test_importable_engine_is_found_behind_patch_tree(unimportable):
    ran = find_engine_in([patches.PACKAGE.parent, unimportable.site])
    assert ran.stdout.strip() == str(unimportable.root), ran.stderr


def test_missing_importable_engine_is_reported(tmp_path):
    ran = find_engine_in([tmp_path])
    assert "no SGLang that" in ran.stderr and "--engine" in ran.stderr


@pytest.mark.parametrize("path", [patches.PACKAGE.parent, patches.PACKAGE])
def test_patch_sources_are_not_an_engine(path):
    with pytest.raises(Refusal, match="no SGLang at") as error:
        find_engine(path)
    assert error.value.code == ExitCode.NO_ENGINE


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"version.py": "try:\n    from x import v\nexcept E:\n    __version__ = '1'\n"}, VERSION),
        ({"_version.py": "__version__ = version = '0.5.9'\n"}, "0.5.9"),
        ({"_version.py": "__version__: str\n__version__ = '0.5.9+npu'\n"}, "0.5.9+npu"),
    ],
)
def test_engine_version_is_read_without_import(toy, files, expected):
    for name, text in files.items():
        write(toy.root / name, text)
    assert find_engine(toy.site).version == expected


# The engine's release


@pytest.fixture
def patch_set(toy, toy_patch_set):
    """The toy's patch set, with a release 5.0 that differs in one symbol."""
    shutil.copytree(toy.releases / VERSION, toy.releases / "5.0")
    toy.pin(toy.releases / "5.0", "srt/net/conn.py", "send", "0" * 64)


def set_version(toy, version: str | None) -> None:
    """Makes the engine report this version; with None it does not report any."""
    if version is None:
        (toy.root / "version.py").unlink()
        toy.dist_record.unlink()
    else:
        write(toy.root / "version.py", f"__version__ = '{version}'\n")


def detect(toy, release: str | None = None):
    """The engine, and its release as the tool detects it."""
    return find_engine_and_release(toy.site, release)


UNKNOWN_VERSIONS = [f"{VERSION}.post3", "5.0.dev1+g12ab", "1.0", None]


@pytest.mark.parametrize("version", UNKNOWN_VERSIONS)
def test_unknown_version_is_matched_by_symbols(toy, patch_set, version):
    set_version(toy, version)
    before = toy.snapshot()
    engine, release = detect(toy)
    assert release.name == VERSION
    assert operations.status(engine, release).state == "absent"
    assert operations.apply(engine, release)
    engine, release = detect(toy)
    status = operations.status(engine, release)
    assert (release.name, status.state) == (VERSION, "applied")
    said = f"({version or 'none'}) is unknown; all patched symbols match SGLang {VERSION}"
    assert said in status.notes[0]
    assert operations.revert(engine)
    assert toy.snapshot() == before


def test_release_of_applied_engine_stays_in_journal(toy, patch_set):
    set_version(toy, "1.0")
    operations.apply(*detect(toy))
    toy.pin(toy.releases / VERSION, "srt/net/conn.py", "send", "0" * 64)
    assert detect(toy)[1].name == VERSION
    toy.revert()
    toy.assert_refused(detect, ExitCode.UNSUPPORTED, "The nearest is")


def test_journal_of_unknown_release_is_matched_by_symbols(toy, patch_set):
    set_version(toy, "1.0")
    operations.apply(*detect(toy))
    (toy.releases / VERSION).rename(toy.releases / "9.10")
    assert detect(toy)[1].name == "9.10"


def test_patched_engine_without_journal_is_matched_by_symbols(toy, patch_set):
    set_version(toy, "1.0")
    operations.apply(*detect(toy))
    shutil.rmtree(toy.root / ".sglang_pd")
    engine, release = detect(toy)
    assert (release.name, operations.status(engine, release).state) == (VERSION, "applied")


@pytest.mark.parametrize(
    ("path", "text", "count", "words"),
    [
        ("srt/net/conn.py", "def send(x): return 1\n", 1, "srt/net/conn.py::send: expected"),
        ("srt/net/plan.py", "THEIRS = 1\n", 1, "srt/net/plan.py: the engine has this file"),
        ("srt/pool.py", None, 3, "srt/pool.py: the engine has no such file"),
        ("srt/pool.py", "class Pool(", 3, "srt/pool.py: "),
        ("srt/pool.py", ENGINE["srt/pool.py"] + "describe = 1\n", 1, "layout.describe"),
    ],
)
def test_unknown_version_with_other_symbols_is_refused(toy, patch_set, path, text, count, words):
    set_version(toy, "1.0")
    shutil.rmtree(toy.releases / "5.0")
    (toy.root / path).unlink() if text is None else write(toy.root / path, text)
    toy.assert_refused(
        detect,
        ExitCode.UNSUPPORTED,
        f"SGLang 1.0 is not supported; this patch set supports {VERSION}",
        f"The nearest is {VERSION}: {count} of 7 symbols",
        words,
    )


def test_missing_version_with_other_symbols_is_refused(toy, patch_set):
    set_version(toy, None)
    (toy.root / "srt/pool.py").unlink()
    said = "an SGLang without a version is not supported"
    toy.assert_refused(detect, ExitCode.UNSUPPORTED, said)


def test_nearest_release_has_smallest_share_of_differences(toy, patch_set):
    set_version(toy, "1.0")
    for symbol in ("send", "receive"):
        toy.pin(toy.releases / VERSION, "srt/net/conn.py", symbol, "0" * 64)
    toy.assert_refused(detect, ExitCode.UNSUPPORTED, "nearest is 5.0: 1 of 7")
    for k in range(20):
        toy.pin(toy.releases / VERSION, "srt/net/conn.py", f"new{k}", None)
    toy.assert_refused(detect, ExitCode.UNSUPPORTED, "nearest is 9.9: 2 of 28")


def test_newest_of_equal_matches_is_chosen(toy, patch_set):
    set_version(toy, "1.0")
    shutil.copytree(toy.releases / VERSION, toy.releases / "10.1")
    assert detect(toy)[1].name == "10.1"


def test_at_most_ten_symbols_are_listed(toy, patch_set):
    set_version(toy, "1.0")
    shutil.rmtree(toy.releases / "5.0")
    for k in range(12):
        toy.pin(toy.releases / VERSION, "srt/net/conn.py", f"gone{k}", "0" * 64)
    words = ("12 of 19 symbols", "and 2 more")
    refusal = toy.assert_refused(detect, ExitCode.UNSUPPORTED, *words)
    assert str(refusal).count("no such symbol") == 10


def test_known_version_is_not_matched_by_symbols(toy, patch_set):
    set_version(toy, "5.0")
    engine, release = detect(toy)
    assert release.name == "5.0"
    toy.assert_refused(
        lambda _: operations.apply(engine, release), ExitCode.DRIFTED, "srt/net/conn.py::send"
    )


@pytest.mark.parametrize("version", [*UNKNOWN_VERSIONS, "5.0"])
def test_given_release_overrides_version(toy, patch_set, version):
    set_version(toy, version)
    assert detect(toy, f"{VERSION}+vendor")[1].name == VERSION
    assert detect(toy, "5.0")[1].name == "5.0"
    toy.assert_refused(lambda toy: detect(toy, "1.0"), ExitCode.UNSUPPORTED, "supports 5.0, 9.9")
