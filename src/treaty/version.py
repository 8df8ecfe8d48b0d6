"""The version, which stands here alone: the build, reports and partners read it from here."""

__version__ = "0.2.0"
