from tests.tasks.conftest import cache, root, start  # noqa: F401
