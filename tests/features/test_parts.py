"""How rooms find what features bring along: by the name of a file, and never by that of a feature."""

from __future__ import annotations

import pytest

from ddp_runner import installed
from tests.test_layout import MODULES


@pytest.fixture
def features(tmp_path, monkeypatch):
    """Two features in a package of their own, of which one has words."""
    package = tmp_path / "some_features"
    for feature, file in (("one", "rules"), ("two", "words")):
        (package / feature).mkdir(parents=True)
        (package / feature / "__init__.py").touch()
        (package / feature / f"{file}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "_FOLDER", str(package))
    monkeypatch.setattr(installed, "_PACKAGE", "some_features")
    installed.names.cache_clear()
    installed.parts.cache_clear()
    yield package
    installed.names.cache_clear()
    installed.parts.cache_clear()


def test_the_features_that_have_a_file_are_found_by_it(features):
    """Those without it are not imported."""
    (words,) = installed.parts("words")
    assert words.__name__ == "some_features.two.words"
    assert installed.names("rules") == ("one",)
    assert installed.parts("child") == ()


def test_a_package_without_features_has_no_parts(monkeypatch, features):
    """It is no error."""
    monkeypatch.setattr(installed, "_FOLDER", str(features / "none"))
    assert installed.parts("words") == ()


def test_no_room_names_a_feature():
    """Not even in a string, which import contracts do not see."""
    rooms = [path for name, path in MODULES.items() if not name.startswith("ddp_runner.features.")]
    rooms = [one for one in rooms if "ddp_runner.features." in one.read_text(encoding="utf-8")]
    assert rooms == []
