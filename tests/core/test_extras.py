"""What a part says when a package that it needs is absent, too old, or not released."""

import sys
from importlib import metadata

import pytest

from linbias import _extras


@pytest.fixture
def installed(monkeypatch):
    """Pretend that pyproject.toml asks for lines, and packages have versions; None: absent."""

    def pretend(asked, **versions):
        _extras._asked_of.cache_clear()
        monkeypatch.setattr(metadata, "requires", lambda name: asked)
        monkeypatch.setattr(metadata, "version", versions.__getitem__)
        monkeypatch.setattr(_extras, "_is_installed", versions.get)
        monkeypatch.setitem(_extras.PARTS, "linbias.moon", ("sky", tuple(versions)))

    yield pretend
    _extras._asked_of.cache_clear()


INSTALL = "pip install 'linbias[sky]'"
ASKED = [
    'moonlight>=9; extra == "sky"',
    'moon>=2.11; extra == "sky"',
    f'stars>=1; python_version < "3.{sys.version_info.minor}" and extra == "sky"',
    f'sun>=1; python_version < "3.{sys.version_info.minor + 1}" and extra == "sky"',
]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"moon": "2.11.0"}, None),
        ({"moon": "2.11.0a0+git1"}, None),
        ({"moon": "10.1+cpu"}, None),
        ({"unknown": "0.1"}, None),
        (
            {"moon": "2.9.1+cpu"},
            f"needs moon 2.11 or later, and 2.9.1+cpu is installed: {INSTALL}",
        ),
        ({"moon": None}, f"needs moon, which is not installed: {INSTALL}"),
        ({"moon": None, "sun": None}, f"needs moon, sun, which are not installed: {INSTALL}"),
        (
            {"stars": None},
            "needs stars, which is not installed; stars had no release for Python"
            f" 3.{sys.version_info.minor} when this linbias was made: take an older Python,"
            " or try pip install stars",
        ),
    ],
)
def test_what_a_part_says_of_its_packages(installed, versions, expected):
    installed(ASKED, **versions)
    if expected is None:
        return _extras.require("linbias.moon")
    with pytest.raises(ImportError) as error:
        _extras.require("linbias.moon")
    assert str(error.value) == f"linbias.moon {expected}"
    assert isinstance(error.value, ModuleNotFoundError) == (None in versions.values())


def test_the_oldest_versions_are_those_of_pyproject():
    _extras._asked_of.cache_clear()
    packages = {package for _, needed in _extras.PARTS.values() for package in needed}
    assert all(_extras._asked_of(package)[0] for package in packages)
