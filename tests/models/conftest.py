from tests.attention.conftest import repeatable

__all__ = ["repeatable"]
