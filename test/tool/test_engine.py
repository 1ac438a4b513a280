"""Which engine is found, and which release it is; nothing of it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from toy import VERSION, write

from sglang_pd.cli import locate
from sglang_pd.errors import Code, Refusal
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


def test_unknown_and_unsupported_versions(toy, monkeypatch):
    monkeypatch.setattr(patches, "RELEASES", toy.releases)
    monkeypatch.setattr(patches, "TREES", toy.trees)
    write(toy.root / "version.py", "__version__ = '1.0'\n")
    for version, word in (("1.0", "SGLang 1.0 is not supported"), (None, "does not say")):
        if version is None:
            (toy.root / "version.py").unlink()
            toy.record.unlink()
        with pytest.raises(Refusal, match=word) as error:
            locate(toy.site, None)
        assert error.value.code == Code.UNSUPPORTED
        assert locate(toy.site, f"{VERSION}+vendor")[1].name == VERSION
