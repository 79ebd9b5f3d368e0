from tests.attention.conftest import _repeatable

__all__ = ["_repeatable"]
