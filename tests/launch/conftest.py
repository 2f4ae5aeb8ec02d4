from tests.model.small import one_rank  # noqa: F401
