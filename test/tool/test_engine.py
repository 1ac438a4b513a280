"""Which engine is found, and which release it is; nothing of it is imported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ENGINE, VERSION, write

from sglang_pd.cli import locate
from sglang_pd.errors import Code, Refusal
from sglang_pd.install import operations
from sglang_pd.install.engine import find_engine
from sglang_pd.patchset import patches


@pytest.fixture
def loud(toy):
    """An engine that cannot be imported."""
    write(toy.root / "__init__.py", "raise SystemExit('imported')\n")
    return toy


def find_in(python_path, *arguments) -> str:
    """What a fresh interpreter with the given path finds."""
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
def test_given_as_a_package_or_its_folder(loud, at):
    engine = find_engine(loud.site / at)
    assert engine.root == loud.root
    assert engine.version == VERSION
    assert engine.record == loud.record


@pytest.mark.parametrize("at", ["", "python", "python/sglang"])
def test_given_as_a_checkout(loud, tmp_path, at):
    (tmp_path / "checkout").mkdir()
    loud.site.rename(tmp_path / "checkout/python")
    assert find_engine(tmp_path / "checkout" / at).root == tmp_path / "checkout/python/sglang"


def test_a_link_to_an_engine_is_followed(loud, tmp_path):
    (tmp_path / "link").symlink_to(loud.root)
    assert find_engine(tmp_path / "link").root == loud.root


def test_the_importable_one_behind_our_own_folder(loud):
    ran = find_in([patches.PACKAGE.parent, loud.site])
    assert ran.stdout.strip() == str(loud.root), ran.stderr


def test_none_importable(tmp_path):
    ran = find_in([tmp_path])
    assert "no SGLang that" in ran.stderr
    assert "--engine" in ran.stderr


@pytest.mark.parametrize("path", [patches.PACKAGE.parent, patches.PACKAGE])
def test_our_own_sources_are_no_engine(path):
    with pytest.raises(Refusal, match="no SGLang at") as error:
        find_engine(path)
    assert error.value.code == Code.NO_ENGINE


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"version.py": "try:\n    from x import v\nexcept E:\n    __version__ = '1'\n"}, VERSION),
        ({"_version.py": "__version__ = version = '0.5.9'\n"}, "0.5.9"),
        ({"_version.py": "__version__: str\n__version__ = '0.5.9+npu'\n"}, "0.5.9+npu"),
    ],
)
def test_its_version(toy, files, expected):
    for name, text in files.items():
        write(toy.root / name, text)
    assert find_engine(toy.site).version == expected


# Which release it is


@pytest.fixture
def patch_set(toy, monkeypatch):
    """The toy's is the tool's: a release 5.0, too, of which the engine lacks one symbol's text."""
    shutil.copytree(toy.releases / VERSION, toy.releases / "5.0")
    toy.pin(toy.releases / "5.0", "srt/net/conn.py", "send", "0" * 64)
    monkeypatch.setattr(patches, "RELEASES", toy.releases)
    monkeypatch.setattr(patches, "TREES", toy.trees)


def name_it(toy, version: str | None) -> None:
    """The engine says that it is of this version; None: nothing says it."""
    if version is None:
        (toy.root / "version.py").unlink()
        toy.record.unlink()
    else:
        write(toy.root / "version.py", f"__version__ = '{version}'\n")


UNKNOWN = [f"{VERSION}.post3", "5.0.dev1+g12ab", "1.0", None]


@pytest.mark.parametrize("version", UNKNOWN)
def test_an_unknown_version_is_the_release_whose_symbols_it_has(toy, patch_set, version):
    name_it(toy, version)
    before = toy.snapshot()
    engine, release = locate(toy.site, None)
    assert release.name == VERSION
    assert operations.status(engine, release).state == "absent"
    assert operations.apply(engine, release)
    engine, release = locate(toy.site, None)
    told = operations.status(engine, release)
    assert (release.name, told.state) == (VERSION, "applied")
    assert (
        f"{version or 'nothing'} of its release; it is taken for SGLang {VERSION}" in told.notes[0]
    )
    assert operations.revert(engine)
    assert toy.snapshot() == before


def test_what_was_applied_stays_what_it_was_taken_for(toy, patch_set):
    name_it(toy, "1.0")
    engine, release = locate(toy.site, None)
    operations.apply(engine, release)
    toy.pin(toy.releases / VERSION, "srt/net/conn.py", "send", "0" * 64)
    engine, release = locate(toy.site, None)
    assert release.name == VERSION
    operations.revert(engine)
    with pytest.raises(Refusal, match="The nearest is"):
        locate(toy.site, None)


def test_what_was_applied_for_a_release_that_is_unknown_now_is_matched_as_it_was(toy, patch_set):
    name_it(toy, "1.0")
    operations.apply(*locate(toy.site, None))
    (toy.releases / VERSION).rename(toy.releases / "9.10")
    assert locate(toy.site, None)[1].name == "9.10"


def test_what_was_applied_by_other_means_is_known_by_what_is_there(toy, patch_set):
    name_it(toy, "1.0")
    operations.apply(*locate(toy.site, None))
    shutil.rmtree(toy.root / ".sglang_pd")
    engine, release = locate(toy.site, None)
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
def test_an_unknown_version_with_other_symbols(toy, patch_set, path, text, count, words):
    name_it(toy, "1.0")
    shutil.rmtree(toy.releases / "5.0")
    (toy.root / path).unlink() if text is None else write(toy.root / path, text)
    before = toy.snapshot()
    with pytest.raises(Refusal) as refusal:
        locate(toy.site, None)
    told = str(refusal.value)
    assert refusal.value.code == Code.UNSUPPORTED
    assert f"SGLang 1.0 is not supported; this patch set knows {VERSION}" in told
    assert f"The nearest is {VERSION}: {count} of 7 symbols" in told and words in told
    assert toy.snapshot() == before


def test_an_engine_without_a_version_and_with_other_symbols(toy, patch_set):
    name_it(toy, None)
    (toy.root / "srt/pool.py").unlink()
    with pytest.raises(Refusal, match="an SGLang that does not say which is not supported"):
        locate(toy.site, None)


def test_the_nearest_release_is_that_of_which_the_smallest_part_differs(toy, patch_set):
    name_it(toy, "1.0")
    for symbol in ("send", "receive"):
        toy.pin(toy.releases / VERSION, "srt/net/conn.py", symbol, "0" * 64)
    with pytest.raises(Refusal, match="nearest is 5.0: 1 of 7"):
        locate(toy.site, None)
    for k in range(20):
        toy.pin(toy.releases / VERSION, "srt/net/conn.py", f"new{k}", None)
    with pytest.raises(Refusal, match="nearest is 9.9: 2 of 28"):
        locate(toy.site, None)


def test_of_releases_that_fit_alike_it_is_the_newest(toy, patch_set):
    name_it(toy, "1.0")
    shutil.copytree(toy.releases / VERSION, toy.releases / "10.1")
    assert locate(toy.site, None)[1].name == "10.1"


def test_no_more_than_ten_symbols_are_named(toy, patch_set):
    name_it(toy, "1.0")
    shutil.rmtree(toy.releases / "5.0")
    for k in range(12):
        toy.pin(toy.releases / VERSION, "srt/net/conn.py", f"gone{k}", "0" * 64)
    with pytest.raises(Refusal, match="12 of 19 symbols") as refusal:
        locate(toy.site, None)
    assert str(refusal.value).count("no such symbol") == 10
    assert "and 2 more" in str(refusal.value)


def test_a_version_that_is_known_is_not_matched(toy, patch_set):
    name_it(toy, "5.0")
    engine, release = locate(toy.site, None)
    assert release.name == "5.0"
    with pytest.raises(Refusal, match="srt/net/conn.py::send") as refusal:
        operations.apply(engine, release)
    assert refusal.value.code == Code.DRIFTED


@pytest.mark.parametrize("version", [*UNKNOWN, "5.0"])
def test_a_release_that_is_given_is_taken(toy, patch_set, version):
    name_it(toy, version)
    assert locate(toy.site, f"{VERSION}+vendor")[1].name == VERSION
    assert locate(toy.site, "5.0")[1].name == "5.0"
    with pytest.raises(Refusal, match="knows 5.0, 9.9") as refusal:
        locate(toy.site, "1.0")
    assert refusal.value.code == Code.UNSUPPORTED
