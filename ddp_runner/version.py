"""The version, in a place that loads nothing else. Equal to the one in pyproject.toml."""

VERSION = "0.1.0"
