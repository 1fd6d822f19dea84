"""The version, where every layer may read it."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
