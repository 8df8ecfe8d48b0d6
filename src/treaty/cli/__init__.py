"""The ``treaty`` command and its demos."""
