"""InferSession as of 2023: the compiled half gets all arguments unchecked."""

from ais_bench_session import Session


class InferSession(Session):
    pass
